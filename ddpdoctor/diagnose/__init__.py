"""Rules that find faults in a run, by family."""

STANDSTILLS = ("DDP401", *(f"DDP{number}" for number in range(802, 816)))
"""Codes of findings from the examination of a hang."""

APART = ("DDP401", "DDP402", "DDP403", "DDP803", "DDP804")
"""Codes of findings that explain differing collectives."""
