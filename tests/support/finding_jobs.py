"""Jobs with one fault, and the findings of them."""

from __future__ import annotations

import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
from ddpdoctor.core.finding import RULES, Finding, examine
from tests.conftest import JOBS, Result

TRAIN = str(JOBS / "train.py")
TWO = ("--nproc-per-node", "2")


def findings(result: Result) -> list[Finding]:
    """What the rules say of a finished run's directory, read again from the disk."""
    return examine(result.run, RULES.values())
