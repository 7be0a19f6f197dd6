"""Ask NCCL's RAS for the status of the communicators of a job that makes no progress.

RAS is a thread in each process of a job that uses NCCL 2.24 or newer. The protocol is that of
``ncclras`` (``src/ras/client.cc`` of NCCL): one command a line. The answer to ``STATUS`` ends with
the connection. All processes of a node listen on one port, even those of the user's other jobs. The
kernel chooses which one answers, and its socket tables show whether it belongs to this job.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ddpdoctor.core import opening
from ddpdoctor.run.names import namespace
from ddpdoctor.run.records.supervisor import (
    Ras,
    RasCommunicator,
    RasDifference,
    RasGroup,
    RasProcess,
)
from ddpdoctor.run.snapshot import Run
from ddpdoctor.system import peers, proc
from ddpdoctor.system.proc import PROC, sockets

PORT = 28028  # The port of RAS, unless ``NCCL_RAS_ADDR`` sets another one

PROCESS_TIMEOUT = 2  # Seconds for a process to answer another process

RAS_TIMEOUT = 9.0
"""Seconds to wait for RAS, which takes `PROCESS_TIMEOUT` and 5 s more if a process is silent."""

MAX_ANSWER = 4 << 20  # Maximum size of an answer in bytes

MAX_JSON_RANKS = 256
"""Maximum world size for which JSON is requested. JSON has an entry for each rank, text only
outliers.
"""

_MAX_LINE = 1024
_CONNECT_TIMEOUT = 1.0
_MAX_CONNECTIONS = 8  # Maximum number of connections tried until one is with a process of this job

_MAX_KEPT = 64  # Maximum number of ranks, groups or communicators to keep

_ERRORS = (
    *("", "Unhandled CUDA error", "System error", "Internal error", "Invalid argument"),
    *("Invalid usage", "Remote process error"),
)
"""Texts of RAS by ``ncclResult_t``. 7 is an operation in progress."""


class Answer(NamedTuple):
    """An answer of RAS."""

    text: str
    structured: bool  # Whether it is JSON


class RasError(Exception):
    """There is no answer. ``str`` is the reason, or empty if no RAS listens."""


def asked(run: Run) -> Callable[[], Ras | None]:
    """Ask RAS in a thread, if a rank of this machine uses NCCL.

    Return a function that waits up to `RAS_TIMEOUT` for the answer, and returns None without RAS.
    """
    here = namespace()
    pids = [
        rank.status.pid
        for rank in run.last
        if rank.status is not None and rank.exit is None and "nccl" in rank.opened.backend
        if rank.opened.namespace in (None, here)
    ]
    if not pids:
        return lambda: None
    found: list[Ras | None] = []
    thread = threading.Thread(
        target=lambda: found.append(status(pids, run.world_size)), name="ras", daemon=True
    )
    thread.start()

    def answer() -> Ras | None:
        thread.join(RAS_TIMEOUT)
        return found[0] if found else None

    return answer


def status(pids: Sequence[int], world: int) -> Ras | None:
    """Ask RAS for the status of a job with these processes on this machine.

    Return the answer, or the reason for which there is none. None without RAS.
    """
    where = address(proc.environ(pids[0]))
    if where is None:
        return None
    try:
        said = ask(where, pids, RAS_TIMEOUT - 1, structured=world <= MAX_JSON_RANKS)
        return from_json(said.text) if said.structured else from_text(said.text)
    except (RasError, ValueError) as error:
        return Ras(trouble=str(error)) if str(error) else None


def address(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the address of RAS for a process with this environment. None if it is off."""
    if environ.get("NCCL_RAS_ENABLE", "1") == "0":
        return None
    host, _, port = environ.get("NCCL_RAS_ADDR", f"localhost:{PORT}").rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        return None
    return host.strip("[]"), int(port)


def ask(where: tuple[str, int], pids: Collection[int], seconds: float, structured: bool) -> Answer:
    """Ask for the status of the job whose processes on this machine have these pids.

    ``structured`` prefers JSON, which NCCL 2.28.7 and newer have.

    Raises:
        RasError: There is no answer.
    """
    until = time.monotonic() + seconds
    for _ in range(_MAX_CONNECTIONS):
        try:
            with _connected(where, until) as connection:
                line = _Lines(connection, until)
                if not line.asked("CLIENT PROTOCOL 2").startswith("SERVER PROTOCOL "):
                    raise RasError("the listener there is not RAS")
                if not _is_of(connection, pids):
                    continue
                line.asked(f"TIMEOUT {PROCESS_TIMEOUT}")
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
        limit = min(_CONNECT_TIMEOUT, max(0.01, until - time.monotonic()))
        return socket.create_connection(where, limit)
    except OSError:
        # Nothing listens: NCCL is too old, or not started yet.
        raise RasError from None


def _is_of(connection: socket.socket, pids: Collection[int]) -> bool:
    """Return whether one of these processes holds the other end of a connection."""
    with contextlib.suppress(peers.UnknownPeerError):
        inode = peers.inode(connection)
        return any(inode in sockets(PROC / str(pid)) for pid in pids)
    return False


class _Lines:
    """A conversation with limits on its time and size."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection = connection
        self._until = until
        self._read = b""

    def send(self, command: str) -> None:
        self._wait()
        self._connection.sendall(f"{command}\n".encode())

    def asked(self, command: str) -> str:
        """Send a command. Returns the line that answers it."""
        self.send(command)
        while b"\n" not in self._read:
            if len(self._read) > _MAX_LINE or not self._more():
                raise RasError("the listener there is not RAS")
        line, _, self._read = self._read.partition(b"\n")
        return line.decode("utf-8", "replace").strip()

    def rest(self) -> str:
        """Read the rest of the answer."""
        while self._more():
            if len(self._read) > MAX_ANSWER:
                raise RasError(f"its answer is larger than {MAX_ANSWER >> 20} MB")
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


# -- JSON


def from_json(text: str) -> Ras:
    """Parse an answer in JSON, which NCCL 2.28.7 and newer have.

    Raises:
        ValueError: If it is anything else.
    """
    # Up to NCCL 2.28.9 a comma is missing in the entries of ranks.
    text = re.sub(r'("nvml_dev": -?\d+)\n(\s*"status")', r"\1,\n\2", text)
    data = text.encode()
    if opening.expanded(data) > opening.MOST_EXPANDED:
        raise ValueError("its answer is too large")
    found = opening.loads(data)
    if not isinstance(found, dict):
        raise ValueError("its answer is not a JSON object")
    every = _dicts(found.get("communicators"))
    return Ras(
        version=str(found.get("nccl_version"))[:40],
        total=len(every),
        communicators=_of_interest(_communicator(each) for each in every),
    )


def _communicator(found: Mapping[str, Any]) -> RasCommunicator:
    missing = tuple(
        RasProcess(
            rank=opening.integer(each, "rank", -1),
            pid=opening.integer(each, "pid", -1),
            host=str(each.get("host"))[:64],
            dead=_dict(each, "status").get("considered_dead") is True,
        )
        for each in _dicts(found.get("missing_ranks"))[:_MAX_KEPT]
        # Other missing ranks are only joining or leaving.
        if _dict(each, "status").get("unresponsive") is True
    )
    values: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for each in _dicts(found.get("ranks")):
        rank, status = opening.integer(each, "rank", -1), _dict(each, "status")
        values["status"][_status(status)].append(rank)
        for name, count in _dict(each, "collective_counts").items():
            if isinstance(count, int):
                values[str(name)[:40]][str(count)].append(rank)
        for key in ("init_state", "async_error"):
            number = opening.integer(status, key)
            if 0 < number < len(_ERRORS):
                values["error"][_ERRORS[number]].append(rank)
    differences = tuple(
        RasDifference(
            what=what,
            groups=tuple(
                RasGroup(value=value, many=len(ranks), ranks=tuple(ranks[:_MAX_KEPT]))
                for value, ranks in groups.items()
            ),
        )
        for what, groups in values.items()
        if len(groups) > 1 or what == "error"
    )
    return RasCommunicator(
        size=opening.integer(found, "size"), missing=missing, differences=differences[:_MAX_KEPT]
    )


def _status(status: Mapping[str, Any]) -> str:
    """Return the word for a status in the text format."""
    if status.get("abort_flag"):
        return "ABORT"
    if status.get("finalize_called") or status.get("destroy_flag"):
        return "FINALIZE"
    return "INIT" if status.get("init_state") else "RUNNING"


# -- text

_ROW = re.compile(r" *(\d+) +(\d+) +(\d+) +[\d-]+ +(\d+) +\d+ +[A-Z]+ +[A-Z,]+$")
_SECTION = re.compile(r"#(\d+)-\d+ \([0-9a-f]+\) ([A-Z]+)$")
_DIFFERENT = re.compile(r"  Communicator ranks have different (\w+)(?: operation counts)?$")
_SAID = (
    r"(?:has |have )?(?:launched up to operation (\d+)|not launched (any) operations|status (\w+)|"
    r"reported (.+?))"
)
_GROUP = re.compile(rf"  (\d+) ranks {_SAID}$")
_ONE = re.compile(rf"  Rank (\d+) {_SAID}(?: -- |$)")
_MEMBER = re.compile(r"  Rank (\d+) -- (?:GPU .* managed by process (\d+) on node (\S+))?")
_LISTED = re.compile(r"  The missing ranks?: ([\d,]+)$")
_PROCESS = re.compile(r"  Process (\d+) on node (\S+) ")


def from_text(text: str) -> Ras:
    """Parse an answer in text.

    Raises:
        ValueError: If it is anything else.
    """
    version = re.match(r"NCCL version (\S{1,40})", text)
    if version is None:
        raise ValueError("its answer is not one of RAS")
    reader = _TextReader()
    for line in text.splitlines():
        reader.take(line)
    return Ras(
        version=version[1],
        total=sum(reader.many.values()),
        communicators=_of_interest(each.communicator() for each in reader.found.values()),
        silent=tuple(reader.silent[:_MAX_KEPT]),
    )


class _Section:
    """The section of one communicator."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.missing: list[RasProcess] = []
        self.groups: dict[str, list[tuple[str, int, list[int]]]] = defaultdict(list)

    def communicator(self) -> RasCommunicator:
        differences = (
            RasDifference(
                what=what,
                groups=tuple(
                    RasGroup(value=value, many=many, ranks=tuple(ranks[:_MAX_KEPT]))
                    for value, many, ranks in groups[:_MAX_KEPT]
                ),
            )
            for what, groups in self.groups.items()
        )
        return RasCommunicator(
            size=self.size, missing=tuple(self.missing[:_MAX_KEPT]), differences=tuple(differences)
        )


class _TextReader:
    """Reads an answer line by line."""

    def __init__(self) -> None:
        self.many: dict[int, int] = {}  # Number of communicators in each group, by its number
        self.found: dict[str, _Section] = {}
        self.silent: list[RasProcess] = []
        self._sizes: dict[int, int] = {}
        self._section: _Section | None = None
        self._kind = ""
        self._what = ""

    def take(self, line: str) -> None:
        """Read a line."""
        row, head = _ROW.match(line), _SECTION.match(line)
        if row is not None:
            self.many[int(row[1][:9])] = int(row[2][:9])
            self._sizes[int(row[1][:9])] = int(row[4][:9])
        elif head is not None and len(self.found) < _MAX_KEPT:
            size = self._sizes.get(int(head[1][:9]), 0)
            name = line.rpartition(" ")[0]
            self._section = self.found.setdefault(name, _Section(size))
            self._kind, self._what = head[2], "error" if head[2] == "ERROR" else ""
        elif line in ("INCOMPLETE", "DEAD", "TIMEOUT"):
            self._section, self._kind = None, line
        elif self._section is not None:
            self._of_communicator(self._section, line)
        else:
            process = _PROCESS.match(line)
            if process is not None:
                dead = self._kind == "DEAD"
                pid = opening.whole(process[1], -1)
                self.silent.append(RasProcess(pid=pid, host=process[2][:64], dead=dead))

    def _of_communicator(self, section: _Section, line: str) -> None:
        different, group, one = _DIFFERENT.match(line), _GROUP.match(line), _ONE.match(line)
        member, listed = _MEMBER.match(line), _LISTED.match(line)
        if different is not None:
            self._what = different[1]
        elif group is not None:
            section.groups[self._what].append((_value(group), opening.whole(group[1]), []))
        elif one is not None:
            section.groups[self._what].append((_value(one), 1, [opening.whole(one[1])]))
        elif listed is not None:
            ranks = (opening.whole(each, -1) for each in listed[1].split(",")[:_MAX_KEPT])
            section.missing += [RasProcess(rank=rank, pid=-1, host="") for rank in ranks]
        elif member is not None and self._kind == "INCOMPLETE":
            pid, host = opening.whole(member[2] or "", -1), (member[3] or "")[:64]
            rank = opening.whole(member[1], -1)
            section.missing.append(RasProcess(rank=rank, pid=pid, host=host))
        elif member is not None and section.groups[self._what]:
            section.groups[self._what][-1][2].append(opening.whole(member[1], -1))


def _value(found: re.Match[str]) -> str:
    """Return a line's value for ranks: a number, a status or an error."""
    launched, none, status, error = found.groups()[1:]
    return launched[:18] if launched else "0" if none else (status or error)[:64]


# -- both formats


def _of_interest(found: Iterable[RasCommunicator]) -> tuple[RasCommunicator, ...]:
    return tuple(each for each in found if each.missing or each.differences)[:_MAX_KEPT]


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _dict(found: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = found.get(key)
    return value if isinstance(value, dict) else {}
