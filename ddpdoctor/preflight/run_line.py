"""The line that starts the job, to be typed as it is."""

from __future__ import annotations

import shlex

from ddpdoctor.preflight.situation import Situation

PLACEHOLDER = "train.py"
"""Stands for the script where none was named."""


def run_line(situation: Situation, *words: str) -> str:
    """`ddpdoctor run` with these options, and with the script that the check was given."""
    options = situation.options
    line = ["ddpdoctor", "run", *words]
    if options.module:
        line.append("-m")
    if options.program:
        line.append("--no-python")
    return shlex.join([*line, "--", *(options.script or (PLACEHOLDER,))])
