"""The checks across nodes. Each judges the result of one meeting of all nodes."""
