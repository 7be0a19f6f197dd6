"""A run as one HTML file that needs nothing else: its data, its script, and a plotting library."""
