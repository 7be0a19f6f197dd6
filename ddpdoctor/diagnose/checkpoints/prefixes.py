"""Recognize loads that failed only because of the DDP wrapper's prefix."""

from __future__ import annotations

import re

from ddpdoctor.diagnose.crashes.rank_endings import Ending
from ddpdoctor.run.snapshot import Run

_REFUSED = re.compile(r"Error\(s\) in loading state_dict for (\w+)")
_MISSING = re.compile(r"Missing key\(s\) in state_dict: ([^\n]+)")
_UNEXPECTED = re.compile(r"Unexpected key\(s\) in state_dict: ([^\n]+)")
_KEY = re.compile(r"\"([^\"]+)\"")
PREFIX = "module."
MIN_PREFIXED = 0.8  # Minimum fraction of names that differ only by the prefix


def refused_for_prefix(run: Run, cause: Ending) -> bool:
    """Return whether DDP502 explains an exception, because a load failed on DDP's prefix."""
    return prefixed_names(run, cause) is not None


def prefixed_names(run: Run, cause: Ending) -> tuple[str, str] | None:
    """Return a name in the model and in the checkpoint if a load failed on the prefix only.

    Other missing names, such as those of new buffers, do not matter.
    """
    message = cause.message
    missing, unexpected = _MISSING.search(message), _UNEXPECTED.search(message)
    if cause.kind != "exception" or run.exit_status == 0 or _REFUSED.search(message) is None:
        return None
    if missing is None or unexpected is None:
        return None
    wanted, given = _KEY.findall(missing[1]), _KEY.findall(unexpected[1])
    least = MIN_PREFIXED * min(len(wanted), len(given))
    added = [(name, PREFIX + name) for name in wanted]
    stripped = [(name, name.removeprefix(PREFIX)) for name in wanted if name.startswith(PREFIX)]
    for changed in (added, stripped):
        pairs = [(name, other) for name, other in changed if other in given]
        if pairs and len(pairs) >= least:
            return pairs[0]
    return None
