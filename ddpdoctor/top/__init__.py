"""The live monitor: its data, its sources, and the Textual application."""
