"""The file or address that an exception is about, and the room there was; words name neither."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ddpdoctor.probe.observers.files import path_of
from ddpdoctor.run.records.process import ResourceFacts

_SERIALIZATION = os.path.join("torch", "serialization.py")
_ASKING = (
    (os.path.join("urllib", "request.py"), "urlopen", "url"),
    (os.path.join("requests", "sessions.py"), "request", "url"),
)
"""Functions that download, and their argument that says what."""

_ACCESS = {"save": "write", "load": "read"}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MOST = 8
"""Exceptions of a chain that are looked at."""


def facts(error: BaseException) -> ResourceFacts | None:
    """What is known of the file that ``torch.save`` or ``torch.load`` failed on, or of a download.

    None if the exception is about neither.
    """
    for each in _chain(error):
        trace = each.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            if code.co_name in _ACCESS and code.co_filename.endswith(_SERIALIZATION):
                path = path_of(trace.tb_frame.f_locals.get("f"))
                if path:
                    return _known(path, _ACCESS[code.co_name])
            for file, function, argument in _ASKING:
                if code.co_name == function and code.co_filename.endswith(file):
                    url = _address(trace.tb_frame.f_locals.get(argument))
                    if url:
                        return ResourceFacts(url=url)
            trace = trace.tb_next
        if isinstance(each, OSError) and each.errno in _NO_ROOM:
            return _known(path_of(each.filename), "write")
    return None


def _address(url: Any) -> str:
    """Server and path of a URL or of a request for it."""
    # Imported only here: a start must not pay for it.
    from urllib.parse import urlsplit

    url = url if isinstance(url, str) else getattr(url, "full_url", "")
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
    except ValueError:
        return ""
    return f"{parts.scheme}://{parts.hostname}{parts.path}"[:200] if parts.hostname else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    for _ in range(_MOST):
        if current is None:
            return
        yield current
        current = current.__cause__ or current.__context__


def _known(path: str, access: str) -> ResourceFacts:
    limit: int | None = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if access != "write" or limit == resource.RLIM_INFINITY:
        limit = None
    found = ResourceFacts(path=path, access=access, limit=limit)
    try:
        room = os.statvfs(os.path.dirname(path) or ".")
        free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
        found = replace(found, free=free, total=total)
        return replace(found, size=os.stat(path).st_size)
    except OSError:
        return found
