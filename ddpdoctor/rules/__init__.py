"""The rules: importing this package registers them all in `ddpdoctor.finding.RULES`."""

from ddpdoctor.rules import crashes, hangs, speed

__all__ = ["crashes", "hangs", "speed"]
