"""Starting a job and keeping it in order."""
