"""The table of known failures: one file for each family, one entry for each failure.

To add one, write an entry into the file of its family: the text in the log (``pattern``), its
meaning (``says``), the fix (``fix``), and printed lines that show it, as short as possible
(``examples``). An entry of a new code brings the code's page. The tests check that each example is
recognised as its own entry, and as no other.
"""

from __future__ import annotations

from ddpdoctor.failures.entry import Failure
from ddpdoctor.failures.table import endings, frameworks, nccl, rendezvous, resources, script

TABLE: tuple[Failure, ...] = (
    *rendezvous.RENDEZVOUS,
    *rendezvous.STORES,
    *resources.RESOURCES,
    *nccl.NCCL,
    *resources.CUDA,
    *nccl.NETWORK,
    *script.SCRIPT,
    *script.CHECKPOINTS,
    *frameworks.FRAMEWORKS,
    *endings.SCHEDULING,
    *endings.ENDINGS,
    *endings.WRAPPERS,
)
"""All entries. If two of one weight match a line, the first one counts."""
