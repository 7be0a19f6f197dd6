"""Which code a node would train with; nothing of it is imported or run."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.preflight.situation import Situation

GIT_LIMIT = 5.0
"""Seconds for git; a large repository on a slow file system is then left out."""


@dataclass(frozen=True)
class Code:
    """What the script is made of; empty where it is not known.

    Attributes:
        script: The script's name.
        script_hash: Of its bytes.
        commit: The checked-out commit of its repository.
        changes: A hash of what was changed in tracked files since; empty when nothing was.
    """

    script: str = ""
    script_hash: str = ""
    commit: str = ""
    changes: str = ""


def code(situation: Situation) -> Code:
    """The code of the script that was named; without one nothing is known."""
    options = situation.options
    if not options.script or options.module:
        return Code()
    script = Path(options.script[0])
    try:
        script_hash = _hash(script.read_bytes())
    except OSError:
        return Code(script=str(script))
    folder = script.resolve().parent
    commit = _git(folder, "rev-parse", "HEAD").decode().strip()
    changed = _git(folder, "diff", "HEAD", "--no-ext-diff", "--no-textconv") if commit else b""
    return Code(str(script), script_hash, commit, _hash(changed) if changed else "")


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _git(folder: Path, *words: str) -> bytes:
    git = shutil.which("git")
    if git is None:
        return b""
    try:
        done = subprocess.run(
            [git, "-C", str(folder), *words],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=GIT_LIMIT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""
