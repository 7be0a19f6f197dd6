"""Patches of torch and Python, which call the observers of `ddpdoctor.probe.observers`."""
