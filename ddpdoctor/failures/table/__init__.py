"""The table of known failures: one file a family, one entry a failure, with its example lines.

To add one, write an entry into the file of its family: how the log says it (``pattern``), what that
means (``says``), what to do (``fix``), and lines that show it (``examples``), as short as they can
be, in the words that were printed. An entry of a new code brings the code's page. The tests run
each example through the reader: it has to be seen as its own entry, and as no other.
"""

from __future__ import annotations

from ddpdoctor.failures.model import Failure
from ddpdoctor.failures.table import (
    checkpoints,
    cuda,
    endings,
    frameworks,
    nccl,
    network,
    rendezvous,
    resources,
    scheduling,
    script,
    stores,
    wrappers,
)

TABLE: tuple[Failure, ...] = (
    *rendezvous.FAILURES,
    *stores.FAILURES,
    *resources.FAILURES,
    *nccl.FAILURES,
    *cuda.FAILURES,
    *network.FAILURES,
    *script.FAILURES,
    *checkpoints.FAILURES,
    *frameworks.FAILURES,
    *scheduling.FAILURES,
    *endings.FAILURES,
    *wrappers.FAILURES,
)
"""All of them; of two that match one line at the same weight, the first one counts."""
