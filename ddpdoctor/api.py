"""The functions of the public API; `ddpdoctor` offers them under its own name (docs/api.md)."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path

from ddpdoctor.core import finding, plugins
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import RULES, Finding, Rule
from ddpdoctor.run import rundir
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.reported import with_kept
from ddpdoctor.run.snapshot import Run


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a run directory, of a live run or of one that is over.

    Args:
        path: The directory that ``ddpdoctor run`` wrote, or a copy of it.

    Raises:
        DoctorError: There is no such directory, it is no run, or it cannot be read.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise DoctorError(f"{directory} is not a run directory: there is no such directory")
    try:
        run = RunReader(directory).snapshot()
    except OSError as error:
        raise DoctorError(f"cannot read {directory}: {error.strerror}") from None
    if run.exit_status is None and not rundir.is_live(directory):
        # The supervisor was killed: no rank has been waiting since then.
        run = replace(run, taken=run.last_sign)
    return run


def examine(run: Run) -> list[Finding]:
    """Apply all rules, those of plug-ins too, and return the findings, the worst first.

    They are those of ``ddpdoctor report``. A rule or a plug-in that fails is left out with a
    `RuntimeWarning`.
    """
    import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)

    for line in plugins.take_failures():
        warnings.warn(line, RuntimeWarning, stacklevel=2)

    def failed(rule: Rule, error: Exception) -> None:
        warnings.warn(f"rule {rule.code} failed: {error!r}", RuntimeWarning, stacklevel=4)

    return with_kept(finding.examine(run, RULES.values(), failed=failed), run)
