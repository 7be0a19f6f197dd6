"""The file or address that an exception is about, and the room there was; words name neither."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from typing import Any

from ddpdoctor.run.records.base import JsonObject

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


def facts(error: BaseException) -> JsonObject | None:
    """What is known of the file that ``torch.save`` or ``torch.load`` failed on.

    Returns:
        ``path``, ``access`` (``read`` or ``write``), and in bytes: ``size`` of the file, ``free``
        and ``total`` of its file system, ``limit`` on the size of files; what cannot be had is
        absent. ``url`` alone of a download, without passwords and queries.
        None if the exception is about neither.
    """
    for each in _chain(error):
        trace = each.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            if code.co_name in _ACCESS and code.co_filename.endswith(_SERIALIZATION):
                path = _path(trace.tb_frame.f_locals.get("f"))
                if path:
                    return _known(path, _ACCESS[code.co_name])
            for file, function, argument in _ASKING:
                if code.co_name == function and code.co_filename.endswith(file):
                    url = _address(trace.tb_frame.f_locals.get(argument))
                    if url:
                        return {"url": url}
            trace = trace.tb_next
        if isinstance(each, OSError) and each.errno in _NO_ROOM:
            return _known(_path(each.filename), "write")
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


def _path(file: Any) -> str:
    name = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
    path = os.fspath(name) if isinstance(name, (str, os.PathLike)) else ""
    return os.path.realpath(path) if isinstance(path, str) and path else ""


def _known(path: str, access: str) -> JsonObject:
    found: JsonObject = {"path": path, "access": access}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if access == "write" and limit != resource.RLIM_INFINITY:
        found["limit"] = limit
    try:
        room = os.statvfs(os.path.dirname(path) or ".")
        found["free"] = room.f_bavail * room.f_frsize
        found["total"] = room.f_blocks * room.f_frsize
        found["size"] = os.stat(path).st_size
    except OSError:
        pass
    return found
