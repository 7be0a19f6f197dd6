"""Start a job, watch it, and end it."""
