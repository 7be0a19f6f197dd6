"""Serve the rank's end of the control socket, on which the supervisor makes requests.

A thread of this process sleeps in ``recv`` until one arrives. Runs without a debugger have no
such thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from ddpdoctor.probe.runtime import shield
from ddpdoctor.probe.runtime.shield import background
from ddpdoctor.run.journal import move_up
from ddpdoctor.run.names import CONTROL, namespace, short_path

_CLAIM = "DDPDOCTOR_RANK_PID"
"""Environment variable with the pid of the rank, by which its children know they are not ranks."""

Message = dict[str, Any]
Action = Callable[[Message], object]

actions: dict[str, Action] = {}
"""The supervisor's requests by name. An action returns the response, or `LATER`."""

LATER = object()  # The action calls `answer` later, from another thread

_socket: socket.socket | None = None
_path = ""
_sending = threading.Lock()
ended = threading.Event()  # set once the supervisor is gone


def is_joined() -> bool:
    """Return whether this process has a debug port."""
    return _socket is not None


def is_worker() -> bool:
    """Return whether torchrun started this process as a rank, which is known without torch."""
    worker = {"TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK"} <= os.environ.keys()
    return worker and os.environ.get(_CLAIM, str(os.getpid())) == str(os.getpid())


def claim() -> None:
    """Note in the environment that this process, not its children, is the rank."""
    os.environ[_CLAIM] = str(os.getpid())


def join(hello: Message) -> None:
    """Introduce this process to the supervisor, or send it new facts.

    Raises:
        OSError: The supervisor cannot be reached, for example from a container or another machine.
    """
    if _socket is None:
        _, _, place = os.environ.get("DDPDOCTOR_SUPERVISOR", "").partition("@")
        if place != namespace():
            return
        join_at(os.path.join(os.environ["DDPDOCTOR_RUN_DIR"], CONTROL), hello)
        claim()
    else:
        say("hello", pid=os.getpid(), **hello)


def join_at(path: str, hello: Message) -> None:
    """Introduce this process at a control socket, and serve the requests that arrive on it.

    Raises:
        OSError: It cannot be reached, or belongs to another user.
    """
    global _socket, _path
    _socket, _path = _connect(path), path
    ended.clear()
    background("control", _serve, _socket).start()
    say("hello", pid=os.getpid(), **hello)


def leave() -> None:
    """End the connection, if there is one."""
    global _socket
    if _socket is not None:
        _socket.close()
    _socket = None


def session(key: str) -> socket.socket:
    """Connect to the supervisor once more, for the debugger session that it knows by ``key``.

    Raises:
        OSError: The supervisor can no longer be reached.
    """
    connection = _connect(_path)
    try:
        connection.sendall(json.dumps({"say": "session", "key": key}).encode() + b"\n")
    except OSError:
        connection.close()
        raise
    return connection


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection = socket.socket(fileno=move_up(connection.detach()))
    try:
        with short_path(path) as short:
            connection.connect(short)
        if hasattr(socket, "SO_PEERCRED"):
            # Its listener may run code in this process, so it must belong to this user or root.
            size = struct.calcsize("3i")
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            uid = struct.unpack("3i", credentials)[1]
            if uid not in (0, os.geteuid()):
                raise PermissionError(f"the control socket belongs to uid {uid}")
    except OSError:
        connection.close()
        raise
    return connection


def say(what: str, **values: object) -> None:
    """Send the supervisor a message. Never blocks for long and never raises."""
    _send({"say": what, **values})


def _send(message: Message) -> None:
    if _socket is None:
        return
    with _sending, contextlib.suppress(OSError):
        _socket.sendall(json.dumps(message).encode() + b"\n")


def _serve(connection: socket.socket) -> None:
    with contextlib.suppress(OSError), connection.makefile("rb") as lines:
        for line in lines:
            _act(line)
    ended.set()


def _act(line: bytes) -> None:
    try:
        message = json.loads(line)
        found = actions[message["do"]](message)
    except Exception as error:
        shield.fault("control", error)
        return
    if found is not LATER:
        answer(message, found if isinstance(found, dict) else {})


def answer(message: Message, values: Message) -> None:
    """Answer a request of the supervisor, if it waits for an answer."""
    if "ask" in message:
        _send({"answers": message["ask"], **values})


def forget() -> None:
    """Drop the parent's connection in a forked child."""
    global _socket, _sending
    if _socket is not None:
        # `close` would keep it open for a thread that does not exist in this process.
        os.close(_socket.detach())
    _socket = None
    _sending = threading.Lock()
