"""Finds and loads the files of torch's Flight Recorder, which may be anybody's."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from ddpdoctor.analysis import plain_pickle
from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run.records.base import JsonObject

MOST_FILE = 16 << 20
"""Bytes of a file: 100,000 collectives."""

MOST_FILES = 1024
"""Ranks whose files are read."""

_RANK = re.compile(r"(\d{1,6})(\.(?:json|pickle|pkl|bin))?$")
HINT = (
    "set TORCH_FR_DUMP_TEMP_FILE (older torch: TORCH_NCCL_DEBUG_INFO_TEMP_FILE) to a path and "
    "TORCH_NCCL_DUMP_ON_TIMEOUT=1, and name the directory"
)


def chosen(names: Sequence[str]) -> tuple[dict[int, tuple[str, bool]], list[str]]:
    """The file of each rank, and whether it may be a link; and what is left out, in words.

    A directory may hold dumps of several names: those of the name with most ranks are read.

    Raises:
        DoctorError: There is no such file or directory.
    """
    by_name: dict[tuple[bool, str], dict[int, tuple[str, bool]]] = defaultdict(dict)
    for name in names:
        folder = Path(name)
        if not folder.exists():
            raise DoctorError(f"no such file or directory: {name}", HINT)
        inside = folder.is_dir()
        paths = [str(folder / each) for each in opening.names(folder)] if inside else [name]
        for path in paths:
            base = os.path.basename(path)
            number = _RANK.search(base)
            begin = _begin(path, links=not inside) if number is not None else b""
            if number is not None and begin in (b"\x80", b"{"):
                pattern = f"{base[: number.start()]}*{number[2] or ''}"
                by_name[begin == b"{", pattern][int(number[1])] = (path, not inside)
    if not by_name:
        return {}, []
    # Of two forms the pickles, which have the lines.
    order = sorted(by_name, key=lambda each: (-len(by_name[each]), each))
    chosen = by_name[order[0]]
    trouble = [f"files {name} were not read: name them" for _, name in order[1:3]]
    if len(chosen) > MOST_FILES:
        trouble.append(f"{len(chosen) - MOST_FILES} files were not read: {MOST_FILES} are at most")
    return {rank: chosen[rank] for rank in sorted(chosen)[:MOST_FILES]}, trouble


def _begin(path: str, links: bool) -> bytes:
    """The first byte of a file; none of what cannot be read."""
    try:
        with opening.file(path, links=links) as file:
            return file.read(1)
    except OSError:
        return b""


def loaded(path: str, links: bool) -> JsonObject:
    """A dump, either a pickle or JSON.

    Args:
        path: The file.
        links: It may be a link.

    Raises:
        OSError: It cannot be opened, or is too large.
        ValueError: It is neither, or takes too much memory.
    """
    data = opening.contents(path, MOST_FILE, links=links)
    if data[:1] == b"\x80":
        found = plain_pickle.loads(data)
    elif opening.expanded(data) > plain_pickle.MOST_MEMORY:
        raise ValueError(f"takes more than {plain_pickle.MOST_MEMORY >> 20} MB")
    else:
        found = opening.loads(data)
    if not isinstance(found, dict) or "version" not in found:
        raise ValueError("is no Flight Recorder dump")
    return found
