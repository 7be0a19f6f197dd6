"""Where the ranks of a live run are in the code: asked from outside, and merged into one tree."""
