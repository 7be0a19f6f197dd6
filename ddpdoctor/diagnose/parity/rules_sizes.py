"""The comparison of two sizes of one job."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.core.finding import Finding
from ddpdoctor.diagnose.parity.rules import models
from ddpdoctor.diagnose.parity.rules_data import epochs
from ddpdoctor.diagnose.parity.rules_rates import rates
from ddpdoctor.diagnose.parity.training import Training


def compared(base: Training, other: Training) -> Iterator[Finding]:
    """Yield what changed in the training between a smaller and a larger size."""
    for compare in (rates, epochs, models):
        yield from compare(base, other)
