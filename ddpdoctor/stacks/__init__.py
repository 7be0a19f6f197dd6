"""Stacks of the ranks of a live run, captured from outside and merged into one tree."""
