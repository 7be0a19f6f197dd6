"""From a snapshot and a view to lines of text."""
