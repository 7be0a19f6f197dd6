"""Send a run's numbers and findings to experiment trackers. Each has a module."""
