"""Asks NCCL's RAS, a thread in each process of a job that uses NCCL 2.24 or newer, for its status.

The protocol is that of ``ncclras`` (``src/ras/client.cc`` of NCCL): lines of text, one command a
line; behind ``STATUS`` the answer ends with the connection. All processes of a node, those of other
jobs of the user among them, listen on one port, and the kernel chooses: whether a process of the
job answered shows in the tables of the kernel.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ddpdoctor.system import peers
from ddpdoctor.system.proc import PROC, sockets

PORT = 28028
"""Where RAS listens, unless ``NCCL_RAS_ADDR`` says otherwise."""

LEG = 2
"""Seconds in which a process has to answer another one."""

MOST = 4 << 20
"""Bytes of an answer."""

_LINE = 1024
_CONNECTS = 1.0
_ATTEMPTS = 8
"""Connections until one is with a process of this job."""


class Answer(NamedTuple):
    """What RAS said."""

    text: str
    structured: bool
    """It is JSON."""


class RasError(Exception):
    """There is no answer; ``str`` says why, and is empty where no RAS listens."""


def address(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Where the RAS of a process with this environment listens, None if it is switched off."""
    if environ.get("NCCL_RAS_ENABLE", "1") == "0":
        return None
    host, _, port = environ.get("NCCL_RAS_ADDR", f"localhost:{PORT}").rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        return None
    return host.strip("[]"), int(port)


def ask(where: tuple[str, int], pids: Collection[int], seconds: float, structured: bool) -> Answer:
    """Ask for the status of a job.

    Args:
        where: Host and port.
        pids: The processes of the job on this machine.
        seconds: How long it may take.
        structured: Prefer JSON, which NCCL 2.28.7 and newer have.

    Raises:
        RasError: There is no answer.
    """
    until = time.monotonic() + seconds
    for _ in range(_ATTEMPTS):
        try:
            with _connected(where, until) as connection:
                line = _Lines(connection, until)
                if not line.asked("CLIENT PROTOCOL 2").startswith("SERVER PROTOCOL "):
                    raise RasError("what listens there is no RAS")
                if not _is_of(connection, pids):
                    continue
                line.asked(f"TIMEOUT {LEG}")
                is_json = structured and line.asked("SET FORMAT json") == "OK"
                line.send("VERBOSE STATUS")
                return Answer(line.rest(), is_json)
        except TimeoutError:
            raise RasError("it did not answer in time") from None
        except OSError as error:
            raise RasError(error.strerror or str(error)) from None
    raise RasError("processes of another job answer there")


def _connected(where: tuple[str, int], until: float) -> socket.socket:
    try:
        limit = min(_CONNECTS, max(0.01, until - time.monotonic()))
        return socket.create_connection(where, limit)
    except OSError:
        # Nothing listens: an old NCCL, or none yet.
        raise RasError from None


def _is_of(connection: socket.socket, pids: Collection[int]) -> bool:
    """Whether one of some processes holds the other end."""
    with contextlib.suppress(peers.UnknownPeerError):
        inode = peers.inode(connection)
        return any(inode in sockets(PROC / str(pid)) for pid in pids)
    return False


class _Lines:
    """A conversation, within a time and a size."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection = connection
        self._until = until
        self._read = b""

    def send(self, command: str) -> None:
        self._wait()
        self._connection.sendall(f"{command}\n".encode())

    def asked(self, command: str) -> str:
        """The line that answers a command."""
        self.send(command)
        while b"\n" not in self._read:
            if len(self._read) > _LINE or not self._more():
                raise RasError("what listens there is no RAS")
        line, _, self._read = self._read.partition(b"\n")
        return line.decode("utf-8", "replace").strip()

    def rest(self) -> str:
        """All to the end."""
        while self._more():
            if len(self._read) > MOST:
                raise RasError(f"its answer is larger than {MOST >> 20} MB")
        return self._read.decode("utf-8", "replace")

    def _more(self) -> bool:
        self._wait()
        found = self._connection.recv(1 << 16)
        self._read += found
        return bool(found)

    def _wait(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
