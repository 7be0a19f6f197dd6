"""Reach ranks through a command: ``srun --overlap``, a jump host, ``kubectl exec``.

``ddpdoctor attach --through COMMAND`` listens on this machine. For each client the command starts
``ddpdoctor attach --stdio`` on the node, which connects to the debug port there.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.job import LOOPBACK
from ddpdoctor.system import peers

_CHUNK = 1 << 16
_LISTEN_BACKLOG = 8
_LAST_PORT = 65535
_ASK_TIMEOUT = 60.0  # Seconds for the far end to name its ranks
_MAX_RANKS = 256
_END_TIMEOUT = 5.0  # Seconds for the command to end with its client


def listen(port: int) -> socket.socket:
    """Listen on a port of this machine, or on any free one if that is taken."""
    for each in (port, 0) if port <= _LAST_PORT else (0,):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, each))
        except OSError:
            listener.close()
            continue
        listener.listen(_LISTEN_BACKLOG)
        return listener
    raise DoctorError("no port of this machine is free")


def ranks(command: Sequence[str]) -> list[int]:
    """Ask the far end for the ranks that a debugger can attach to.

    Raises:
        DoctorError: The command fails, or there is no such rank.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DoctorError(f"{command[0]} cannot be run: {error}", "try it in the shell") from None
    lines = done.stdout.splitlines() or [""]
    try:
        found = json.loads(lines[-1])
    except ValueError:
        found = None
    if done.returncode or not isinstance(found, list) or not found:
        last = (done.stderr.splitlines() or ["it names no rank"])[-1]
        raise DoctorError(f"{command[0]} reaches no rank: {last}", "try it in the shell")
    return [each for each in found if type(each) is int and each >= 0][:_MAX_RANKS]


def serve(listeners: Mapping[socket.socket, Sequence[str]]) -> None:
    """Start a listener's command for each of its clients of this user, until Ctrl-C."""
    while True:
        for listener in select.select([*listeners], [], [])[0]:
            client, _ = listener.accept()
            command = listeners[listener]
            threading.Thread(target=_serve, args=(client, command), daemon=True).start()


def _serve(client: socket.socket, command: Sequence[str]) -> None:
    with client:
        try:
            # A login node has other users, and a debugger runs code.
            if not peers.is_trusted(peers.user(client)):
                return
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        except (OSError, peers.UnknownPeerError) as error:
            print(f"ddpdoctor: cannot serve a client: {error}", file=sys.stderr)
            return
        assert process.stdin is not None and process.stdout is not None
        with process.stdin, process.stdout:
            copy(client, process.stdout.fileno(), process.stdin.fileno())
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_TIMEOUT)
        process.kill()
        process.wait()


def copy(connection: socket.socket, source: int, target: int) -> None:
    """Copy from ``source`` to a socket, and from there to ``target``, until one side ends."""
    client = connection.fileno()
    with contextlib.suppress(OSError):
        while True:
            for ready in select.select([client, source], [], [])[0]:
                data = os.read(ready, _CHUNK)
                if not data:
                    return
                while data:
                    data = data[os.write(target if ready == client else client, data) :]
