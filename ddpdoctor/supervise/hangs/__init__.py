"""Notices that a job stands still, and gathers what the rules need to say why."""
