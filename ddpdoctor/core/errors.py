"""The one exception whose text a user may see instead of a traceback."""

from __future__ import annotations

USAGE = 2
"""Exit status for bad input: an unknown option, a missing file, a damaged run directory."""

STRICT = 3
"""Exit status of ``run --strict`` when the job succeeded and an error-level finding stands."""

HANG = 4
"""Exit status of ``run --kill-on-hang`` when it ended a job that hung."""

INTERNAL = 70
"""Exit status of any command in which ddpdoctor itself failed (``EX_SOFTWARE`` of sysexits.h)."""


class DoctorError(Exception):
    """Something a person has to know, said in one line, with one line on what to do.

    Args:
        message: What is wrong, without a trailing full stop.
        hint: What to do about it; empty when the message says it all.
        status: The exit status of the command that raised it.
    """

    def __init__(self, message: str, hint: str = "", status: int = USAGE) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.status = status

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message
