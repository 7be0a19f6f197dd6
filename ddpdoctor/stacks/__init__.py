"""Capture the stacks of a live run's ranks from outside, and merge them into one tree."""
