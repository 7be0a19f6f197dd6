"""Notices that a job makes no progress, and gathers what the rules need to say why."""
