"""Send a run's numbers and findings to experiment trackers. One module for each of them."""
