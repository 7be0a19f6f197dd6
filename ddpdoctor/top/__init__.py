"""The live monitor: what it shows, where it comes from, and the Textual application."""
