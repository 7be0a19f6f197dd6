"""Turn a snapshot and a view into lines of text."""
