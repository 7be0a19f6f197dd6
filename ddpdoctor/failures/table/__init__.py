"""The table of known failures: one file for each family, one entry for each failure.

To add one, write an entry into the file of its family: the text in the log (``pattern``), its
meaning (``says``), the fix (``fix``), and printed lines that show it, as short as possible
(``examples``). An entry of a new code brings the code's page. The tests check that each example is
recognised as its own entry, and as no other.
"""

from __future__ import annotations

from typing import Any

from ddpdoctor.core import plugins
from ddpdoctor.failures.entry import Failure, check_failure
from ddpdoctor.failures.table import endings, frameworks, nccl, rendezvous, resources, script

_OWN: tuple[Failure, ...] = (
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


def _with_plugins() -> tuple[Failure, ...]:
    """Add the failures of plug-ins behind ours."""
    failures = {each.known.name: each for each in _OWN}

    def take(loaded: Any) -> None:
        for failure in [loaded] if isinstance(loaded, Failure) else loaded:
            check_failure(failure)
            if failure.known.name in failures:
                raise ValueError(f"there is a failure {failure.known.name} already")
            failures[failure.known.name] = failure

    plugins.load(plugins.FAILURES, failures, take, known={each.code for each in _OWN})
    return tuple(failures.values())


TABLE = _with_plugins()
"""All of them; of two that match one line at the same weight, the first one counts."""
