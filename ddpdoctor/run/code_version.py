"""Record the code of a job, so that two runs can be compared.

git is not called, since it takes seconds in a large repository.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.run import rundir
from ddpdoctor.run.names import CODE, of_node
from ddpdoctor.run.records.base import Part, as_json
from ddpdoctor.run.records.typed_json import decoder

MAX_SCRIPT = 256 << 10  # Maximum bytes of a script whose text is kept
MAX_FILES = 300  # Maximum number of files with hashes

_DEPTH = 3
_SKIPPED = ("node_modules", "site-packages", "__pycache__", "venv", "env", "build", "dist")


@dataclass(frozen=True, slots=True, kw_only=True)
class Code(Part):
    """A script and the files next to it."""

    script: str  # Its absolute path. Empty if the job is not a script.
    text: str = ""  # Its source. Empty if it is too long.
    commit: str = ""  # The checked-out commit. Empty without a repository.
    files: dict[str, str] = field(default_factory=dict)
    """Hashes of the Python files in its directory and below, by relative path."""


def keep(directory: Path, argv: Sequence[str]) -> None:
    """Record the code of a job in a thread, since its file system may be slow."""
    # A daemon thread, for which the supervisor does not wait. The file is written atomically.
    script = next((word for word in argv if word.endswith(".py")), "")
    thread = threading.Thread(
        target=_keep, args=(directory, script), name="ddpdoctor-code", daemon=True
    )
    thread.start()


def _keep(directory: Path, script: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        found = as_json(look(Path(script).absolute() if script else None))
        rundir.put(directory / CODE, json.dumps(found).encode())


def look(script: Path | None) -> Code:
    """Read the current code of a job that starts ``script``."""
    if script is None:
        return Code(script="")
    text = b""
    with contextlib.suppress(OSError):
        text = opening.contents(script, MAX_SCRIPT, links=True)
    folder = script.resolve().parent
    return Code(
        script=str(script),
        text=text.decode("utf-8", "replace"),
        commit=_commit(folder),
        files=dict(_hashes(folder)),
    )


def read(directory: Path, node: int = 0) -> Code | None:
    """Return the recorded code of a node, or None if it cannot be read.

    Node 0 is the node that the run directory belongs to.
    """
    name = of_node(CODE, node) if node else CODE
    try:
        return decoder(Code)(opening.json_object(directory / name, 2 * MAX_SCRIPT))
    except (OSError, ValueError):
        return None


def _hashes(folder: Path) -> Iterator[tuple[str, str]]:
    left = MAX_FILES
    for here, folders, files in os.walk(folder):
        inside = os.path.relpath(here, folder)
        depth = 0 if inside == os.curdir else inside.count(os.sep) + 1
        folders[:] = sorted(
            each for each in folders
            if depth < _DEPTH and not each.startswith(".") and each not in _SKIPPED
        )  # fmt: skip
        for name in sorted(files):
            if name.endswith(".py"):
                with contextlib.suppress(OSError):
                    path = os.path.join(here, name)
                    source = opening.contents(path, opening.MOST_SOURCE, links=True)
                    digest = hashlib.sha256(source).hexdigest()[:16]
                    yield os.path.normpath(os.path.join(inside, name)), digest
                left -= 1
                if not left:
                    return


def _commit(folder: Path) -> str:
    """Read the commit of a folder's repository from git's files."""
    for place in (folder, *folder.parents):
        git = place / ".git"
        if not git.exists():
            continue
        try:
            if git.is_file():
                # A worktree, or a submodule.
                git = (place / _text(git).partition("gitdir:")[2].strip()).resolve()
            common = git / "commondir"
            shared = (git / _text(common)).resolve() if common.is_file() else git
            return _resolved(_text(git / "HEAD"), git, shared)
        except OSError:
            return ""
    return ""


def _resolved(head: str, git: Path, shared: Path) -> str:
    """Return the commit that HEAD refers to."""
    if not head.startswith("ref:"):
        return head[:40]
    name = head.removeprefix("ref:").strip()
    for place in (git / name, shared / name):
        if place.is_file():
            return _text(place)[:40]
    packed = _text(shared / "packed-refs").splitlines()
    return next((line[:40] for line in packed if line.endswith(f" {name}")), "")


def _text(path: Path) -> str:
    data = opening.contents(path, opening.MOST_RECORD, links=True)
    return data.decode("utf-8", "replace").strip()
