"""A run as one self-contained HTML file: its data, scripts, and a plotting library."""
