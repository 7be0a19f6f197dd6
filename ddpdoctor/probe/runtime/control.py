"""Serve the rank's end of the control socket: the supervisor asks, a thread of this process acts.

The thread sleeps in ``recv`` until something is asked. In a run without a debugger there is none.
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
"""Set by the process that is the rank, so that its children know that they are not."""

Message = dict[str, Any]
Action = Callable[[Message], Message | None]

actions: dict[str, Action] = {}
"""What the supervisor may ask for, by name; what an action returns is the answer."""

_socket: socket.socket | None = None
_path = ""
_sending = threading.Lock()
ended = threading.Event()
"""The supervisor is gone: nothing waits for it any more."""


def is_joined() -> bool:
    """Whether this process has a debug port."""
    return _socket is not None


def is_worker() -> bool:
    """Whether this process was started by torchrun as a rank, which is known without torch."""
    worker = {"TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK"} <= os.environ.keys()
    return worker and os.environ.get(_CLAIM, str(os.getpid())) == str(os.getpid())


def claim() -> None:
    """This process is the rank that its environment speaks of; its children are not."""
    os.environ[_CLAIM] = str(os.getpid())


def join(hello: Message) -> None:
    """Say hello to the supervisor, or more about this process once more is known.

    Raises:
        OSError: There is no supervisor to be reached: a container, or another machine.
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
    """Say hello to whoever has its control socket at ``path``, and do what it asks for.

    Raises:
        OSError: It cannot be reached, or is another user's.
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
    """One more connection to the supervisor, for the debugger session that it knows by ``key``.

    Raises:
        OSError: The supervisor cannot be reached any more.
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
        _check_supervisor(connection)
    except OSError:
        connection.close()
        raise
    return connection


def _check_supervisor(connection: socket.socket) -> None:
    """Whoever listens there may run code in this process: it has to be this user, or root.

    Raises:
        PermissionError: It is another user, in whose reach the run directory is.
    """
    if hasattr(socket, "SO_PEERCRED"):
        size = struct.calcsize("3i")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        uid = struct.unpack("3i", credentials)[1]
        if uid not in (0, os.geteuid()):
            raise PermissionError(f"the control socket belongs to uid {uid}")


def say(what: str, **values: object) -> None:
    """Send the supervisor something; never blocks for long, never raises."""
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
        answer = actions[message["do"]](message)
    except Exception as error:
        shield.fault("control", error)
        return
    if "ask" in message:
        _send({"answers": message["ask"], **(answer or {})})


def forget() -> None:
    """In a forked child: the connection is its parent's."""
    global _socket, _sending
    if _socket is not None:
        # Not `close`: the thread that is not in this process would keep it open.
        os.close(_socket.detach())
    _socket = None
    _sending = threading.Lock()
