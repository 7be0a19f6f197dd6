"""A finding in, text out."""
