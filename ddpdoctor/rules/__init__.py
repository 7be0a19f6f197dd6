"""The rules: importing this package registers them all in `ddpdoctor.finding.RULES`."""

from ddpdoctor.rules import checkpoints, crashes, hangs, launch, speed

__all__ = ["checkpoints", "crashes", "hangs", "launch", "speed"]
