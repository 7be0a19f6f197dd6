"""Debug several ranks at once, as a client of the run's gateway.

A rank is attached to only when a command needs a debugger. Until then its debugpy is not loaded.
``eval`` and ``profile`` ask ranks to do something at the same step.
"""

from __future__ import annotations

import contextlib
import math
import re
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.opening import integer
from ddpdoctor.debug import attach_points, dap
from ddpdoctor.debug.clients import CHUNK_SIZE, NATIVE_STOP
from ddpdoctor.run.names import debug_socket, short_path
from ddpdoctor.run.reader import RunReader, glance
from ddpdoctor.run.records.supervisor import DebugRecord
from ddpdoctor.run.snapshot import Run
from ddpdoctor.run.status import Status
from ddpdoctor.system.process_activity import CpuTime, most_lacked, read_cpu_times

ANSWER_TIMEOUT = 600.0  # Seconds for a response. The gateway gives up on a rank earlier.


_NOTE = "(note: full exception trace"  # Start of the text that debugpy appends to an exception
_CURRENT = " (Current frame)"  # Text that debugpy appends to the name of a frame
_NO_THREAD = "Unable to find thread"  # Start of debugpy's error for a thread that has not stopped


class Frame(NamedTuple):
    """One frame of a stopped rank."""

    id: int
    name: str
    path: str
    line: int


@dataclass(frozen=True)
class Breakpoint:
    """A line at which ranks stop."""

    path: str
    line: int
    ranks: frozenset[int]
    condition: str = ""
    once: bool = False


def connect(run: Run, rank: int) -> socket.socket:
    """Connect to the debug port of a rank.

    Raises:
        DoctorError: The rank has no port, or no debugger may attach to it.
    """
    point = next((each for each in attach_points.points(run) if each.rank == rank), None)
    if point is None:
        raise DoctorError(f"rank {rank} has not started")
    if point.trouble:
        raise DoctorError(f"rank {rank}: {point.trouble}")
    record = run.debug_states[rank]
    try:
        if point.node or record.local_rank is None:
            return socket.create_connection((attach_points.host(run), point.port), 10.0)
        connection = socket.socket(socket.AF_UNIX)
        with short_path(str(run.path / debug_socket(record.local_rank))) as name:
            connection.connect(name)
        return connection
    except OSError as error:
        raise DoctorError(f"rank {rank} cannot be reached: {error.strerror or error}") from None


class Session:
    """The debugger session of one rank."""

    def __init__(self, rank: int, connection: socket.socket, news: threading.Condition) -> None:
        self.rank = rank
        self.thread: int | None = None  # The stopped thread. None while the rank runs.
        self.why = ""  # Why it stopped, in a few words
        self.selected = 0  # The index of the frame that commands use, 0 for the innermost
        self.over = ""  # Why the session has ended. Empty before that.
        self.is_seen = True  # Whether the user has seen the stop
        self.output = ""  # debugpy's output that the user has not seen yet
        self._frames: list[Frame] = []
        self._connection = connection
        connection.settimeout(None)
        self._news = news
        self._answers: dict[int, dap.Message] = {}
        self._asked = 0
        self._is_ready = False  # debugpy accepts breakpoints
        threading.Thread(target=self._read, name=f"rank {rank}", daemon=True).start()

    def attach(self, breakpoints: Iterable[Breakpoint], *, all_code: bool) -> None:
        """Begin the session.

        Raises:
            DoctorError: The rank cannot be debugged now.
        """
        self.ask("initialize", clientID="ddpdoctor", adapterID="debugpy", pathFormat="path")
        attaching = self._send("attach", {"justMyCode": not all_code})
        with self._news:
            self._news.wait_for(
                lambda: self._is_ready or attaching in self._answers or self.over, ANSWER_TIMEOUT
            )
        if not self._is_ready:
            self._answer("attach", attaching)
        known = list(breakpoints)
        for path in {each.path for each in known}:
            self.set_breakpoints(path, [each for each in known if each.path == path])
        self.ask("setExceptionBreakpoints", filters=[])
        self.ask("configurationDone")
        self._answer("attach", attaching)

    def set_breakpoints(self, path: str, breakpoints: Iterable[Breakpoint]) -> str:
        """Replace the breakpoints of a file.

        Return why one of them cannot be hit, or an empty string.
        """
        wanted = [
            {"line": each.line, **({"condition": each.condition} if each.condition else {})}
            for each in breakpoints
        ]
        body = self.ask("setBreakpoints", source={"path": path}, breakpoints=wanted)
        found = [each for each in body.get("breakpoints", ()) if not each.get("verified")]
        return str(found[0].get("message") or "it is not hit") if found else ""

    def resume(self, command: str) -> None:
        """Resume the stopped rank: ``continue``, ``next``, ``stepIn`` or ``stepOut``."""
        thread, self.thread, self._frames, self.selected = self.thread, None, [], 0
        self.is_seen = True
        self.ask(command, threadId=thread)

    def pause(self) -> None:
        """Ask the main thread to stop."""
        threads = self.ask("threads").get("threads", [])
        named = [each["id"] for each in threads if str(each.get("name")).endswith("MainThread")]
        self.ask("pause", threadId=(named or [threads[0]["id"]])[0])

    @property
    def frames(self) -> list[Frame]:
        """The frames of the stopped thread, innermost first. Empty while the rank runs."""
        if self.thread is not None and not self._frames:
            found = self.ask("stackTrace", threadId=self.thread).get("stackFrames", ())
            self._frames = [
                Frame(
                    integer(each, "id"),
                    str(each.get("name")).removesuffix(_CURRENT),
                    str((each.get("source") or {}).get("path") or ""),
                    integer(each, "line"),
                )
                for each in found
            ]
        return self._frames

    @property
    def frame(self) -> Frame | None:
        """The frame that commands use. None if there is none."""
        frames = self.frames
        return frames[self.selected] if self.selected < len(frames) else None

    def evaluate(self, expression: str) -> str:
        """Evaluate an expression, or execute a statement, in the selected frame.

        Raises:
            DoctorError: The code raised an exception.
        """
        frame = self.frame
        arguments: dict[str, Any] = {} if frame is None else {"frameId": frame.id}
        return str(
            self.ask("evaluate", expression=expression, context="repl", **arguments)["result"]
        )

    def leave(self) -> None:
        """End the session. The rank continues."""
        with contextlib.suppress(DoctorError):
            self.ask("disconnect", restart=False, terminateDebuggee=False)
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request, and return the body of the response.

        The argument ``seconds`` is the time that the rank may take.

        Raises:
            DoctorError: The rank refuses, or the session has ended.
        """
        timeout = ANSWER_TIMEOUT + float(arguments.get("seconds", 0.0))
        return self._answer(command, self._send(command, arguments), timeout)

    def _send(self, command: str, arguments: Mapping[str, Any]) -> int:
        with self._news:
            self._asked += 1
            message = {"seq": self._asked, "type": "request", "command": command}
            with contextlib.suppress(OSError):
                self._connection.sendall(dap.encode({**message, "arguments": dict(arguments)}))
            return self._asked

    def _answer(self, command: str, number: int, timeout: float = ANSWER_TIMEOUT) -> dict[str, Any]:
        with self._news:
            self._news.wait_for(lambda: number in self._answers or self.over, timeout)
            answer = self._answers.pop(number, None)
        if answer is None:
            why = self.over or f"no answer to {command} within {timeout:.0f} s"
            raise DoctorError(why)
        if not answer.get("success"):
            raise DoctorError(str(answer.get("message") or f"{command} failed"))
        body = answer.get("body")
        return body if isinstance(body, dict) else {}

    def _read(self) -> None:
        decoder = dap.Decoder()
        with contextlib.suppress(OSError, dap.NotDapError):
            while chunk := self._connection.recv(CHUNK_SIZE):
                for message in decoder.feed(chunk):
                    with self._news:
                        self._take(message)
                        self._news.notify_all()
        with self._news:
            self.over, self.thread = self.over or "the rank has ended", None
            self._news.notify_all()

    def _take(self, message: dap.Message) -> None:
        if message.get("type") == "response":
            self._answers[message.get("request_seq", 0)] = message
            return
        event, body = message.get("event"), message.get("body") or {}
        if event == "initialized":
            self._is_ready = True
        elif event == "stopped" and isinstance(body.get("threadId"), int):
            self.thread, self._frames, self.selected = body["threadId"], [], 0
            self.is_seen = False
            self.why = _why(body)
        elif event == "output" and body.get("category") != "telemetry":
            self.output += str(body.get("output") or "")
        elif event == "continued":
            self.thread, self._frames = None, []


class Sessions:
    """The ranks of a live run, and the debugger sessions to those that are attached.

    With ``all_code``, steps also enter libraries.
    """

    def __init__(self, path: Path, *, all_code: bool = False) -> None:
        self._reader = RunReader(path, own=True)
        self._all_code = all_code
        self.news = threading.Condition(threading.RLock())
        self.run = self._reader.snapshot()
        self.by_rank: dict[int, Session] = {}
        self.breakpoints: list[Breakpoint] = []

    def look(self) -> None:
        """Read new records in the run directory."""
        self.run = self._reader.snapshot()
        for rank in [rank for rank, each in self.by_rank.items() if each.over]:
            del self.by_rank[rank]

    @property
    def ranks(self) -> frozenset[int]:
        """The live ranks."""
        return attach_points.live_ranks(self.run)

    @property
    def is_held(self) -> bool:
        """Whether the ranks are held before their first line."""
        gates = [
            each.state
            for each in self.run.supervisor.of(DebugRecord)
            if each.state in ("listening", "gate open")
        ]
        return bool(gates) and gates[-1] == "listening"

    def waiting(self) -> frozenset[int]:
        """Return the ranks that wait for a debugger: at ``breakpoint()``, or at an exception."""
        states = self.run.debug_states
        return frozenset(
            rank for rank in self.ranks - set(self.by_rank) if states[rank].state == "waits"
        )

    def stopped(self) -> frozenset[int]:
        """Return the ranks that are stopped."""
        with self.news:
            return frozenset(r for r, each in self.by_rank.items() if each.thread is not None)

    def turns(self, ranks: Iterable[int]) -> dict[int, dict[int, CpuTime]]:
        """Return the CPU times of the threads of ranks, for :meth:`without_core`."""
        states = self.run.debug_states
        return {rank: read_cpu_times(states[rank].pid or 0) for rank in ranks if rank in states}

    def without_core(self, before: Mapping[int, dict[int, CpuTime]], seconds: float) -> float:
        """Return the time that a thread of these ranks recently waited for a core, in seconds."""
        states = self.run.debug_states
        after = {rank: read_cpu_times(states[rank].pid or 0) for rank in before}
        lost = (most_lacked(before[rank], after[rank], seconds) for rank in before)
        return max(lost, default=0.0)

    def status(self, rank: int) -> Status | None:
        """Return a rank's status."""
        return next((each.status for each in self.run.last if each.rank == rank), None)

    def attach(self, ranks: Collection[int]) -> dict[int, str]:
        """Attach to ranks that are not attached yet. Return the reasons for failures."""

        def begin(rank: int) -> str:
            session = Session(rank, connect(self.run, rank), self.news)
            own = [each for each in self.breakpoints if rank in each.ranks]
            try:
                session.attach(own, all_code=self._all_code)
            except BaseException:
                session.leave()
                raise
            with self.news:
                self.by_rank[rank] = session
            return ""

        self.look()
        found = for_each([rank for rank in ranks if rank not in self.by_rank], begin)
        return {rank: text for rank, text in found.items() if text}

    def ask(
        self, ranks: Iterable[int], function: Callable[[Session], str | None]
    ) -> dict[int, str]:
        """Call a function with the sessions of ranks in parallel. Return the results."""
        sessions = {rank: self.by_rank[rank] for rank in ranks if rank in self.by_rank}
        return for_each(sessions, lambda rank: function(sessions[rank]))

    def update_breakpoints(self, paths: Collection[str]) -> dict[int, str]:
        """Send the breakpoints of files to all ranks. Return why one cannot be hit, by rank."""

        def send(session: Session) -> str:
            troubles = [
                session.set_breakpoints(
                    path,
                    [e for e in self.breakpoints if e.path == path and session.rank in e.ranks],
                )
                for path in paths
            ]
            return next(filter(None, troubles), "")

        found = self.ask(list(self.by_rank), send)
        return {rank: text for rank, text in found.items() if text}

    def wait(self, seconds: float, until: Callable[[], bool] | None = None) -> None:
        """Wait up to ``seconds`` for a change, or for one that makes a condition true."""
        with self.news:
            if until is None:
                self.news.wait(seconds)
            else:
                self.news.wait_for(until, seconds)

    def leave(self) -> None:
        """End all sessions. The ranks continue."""
        self.ask(list(self.by_rank), lambda session: session.leave())
        self.by_rank.clear()


def for_each(ranks: Iterable[int], function: Callable[[int], str | None]) -> dict[int, str]:
    """Call a function for each rank in parallel. Return the results, or texts of errors."""
    found: dict[int, str] = {}

    def call(rank: int) -> None:
        try:
            found[rank] = function(rank) or ""
        except DoctorError as error:
            found[rank] = f"*** {_reason(error.message)}"
        except (KeyError, TypeError, IndexError) as error:
            found[rank] = f"*** unexpected response: {error!r}"

    # Daemons, so that Ctrl-C does not wait for a rank that does not answer.
    threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.5)
    return dict(sorted(found.items()))


_RANK = re.compile(r"^rank \d+: ")


def _why(stopped: dict[str, Any]) -> str:
    """Return why a rank stopped, in a few words."""
    reason, text = str(stopped.get("reason") or ""), str(stopped.get("text") or "")
    # The gateway puts the rank in front, for editors.
    described = _RANK.sub("", str(stopped.get("description") or ""), count=1)
    if reason == "exception":
        return ": ".join(each.partition(_NOTE)[0].rstrip() for each in (text, described))
    return described if described == NATIVE_STOP else reason


def _reason(text: str) -> str:
    """Return why a request failed.

    For a traceback, return its last line, which names the exception.
    """
    if text.startswith(_NO_THREAD):
        return "in native code: values can be read once Python continues"
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if text.startswith("Traceback") and lines else text


MAX_APART = 1  # Maximum steps between ranks that train in lockstep


def ask(
    run: Run, ranks: Collection[int], command: str, lead: float, **arguments: Any
) -> dict[int, dict[str, Any]]:
    """Send each rank a request with the number of a step. Return the responses by rank.

    ``command`` is a key of :data:`ddpdoctor.debug.clients.AT_STEP`. The step begins in ``lead``
    seconds, so that all ranks have been asked by then.
    """
    found: dict[int, dict[str, Any]] = {}
    sessions: dict[int, Session] = {}

    def reach(rank: int) -> None:
        sessions[rank] = Session(rank, connect(run, rank), threading.Condition())

    def send(rank: int) -> None:
        found[rank] = sessions[rank].ask(command, step=step, **arguments)

    troubles = for_each(ranks, reach)
    # Read the step only now: ranks keep training while the others are being connected to.
    step = _step(glance(run.path), ranks, lead)
    troubles |= for_each(sessions, send)
    for session in sessions.values():
        session.close()
    return {rank: found.get(rank, {"trouble": text}) for rank, text in troubles.items()}


def trouble(answer: dict[str, Any]) -> str:
    """Return why a rank returned no value."""
    return f"*** {answer.get('error') or answer.get('trouble') or 'no value'}"


def _step(run: Run, ranks: Collection[int], lead: float) -> int:
    """Return the number of the next step that all ranks can begin together.

    Returns 0, for each rank's next step, if the ranks do not train in lockstep.
    """
    pages = [each.status for each in run.last if each.rank in ranks and each.status is not None]
    steps = [each.step for each in pages]
    if not steps or max(steps) - min(steps) > MAX_APART:
        return 0
    shortest = min(each.last_total for each in pages) / 1e9
    return max(steps) + (min(math.ceil(lead / shortest), 10_000) if shortest > 0 else 1)
