"""The checks across nodes, each a judgement of what came of one meeting of all nodes."""
