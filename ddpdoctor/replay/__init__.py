"""Compute a kept step of a rank again, in one process and without the other ranks."""
