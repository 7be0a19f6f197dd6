"""The gateway's connections to the ranks: control messages, the gate, collective timeouts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import psutil

from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer
from ddpdoctor.core.user_code import Location
from ddpdoctor.debug import dap
from ddpdoctor.run.records.supervisor import DebugRecord
from ddpdoctor.run.status import Phase, Status
from ddpdoctor.system.process_activity import most_lacked, read_cpu_times

# -- one rank's control connection: JSON lines


MAX_STARVATION = 20.0
"""Maximum factor by which the timeout of an answer grows while the process waits for a core."""

SAMPLE_INTERVAL = 1.0  # Seconds between two samples of the CPU time of the process

Message = dict[str, Any]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class SilentError(Exception):
    """The process did not answer in time, or has ended."""


class RankLink:
    """The control connection of one process of the job."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = 0  # In its own namespace
        self.rank: int | None = None  # Its global rank. None while unknown.
        self.local_rank: int | None = None  # None if its launcher has no local ranks
        self.world_size: int | None = None  # None while unknown
        self.local_world_size: int | None = None
        """The number of ranks of this node. None if its launcher does not say."""
        self._reader = reader
        self._writer = writer
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._asked = 0

    def introduce(self, hello: Message) -> None:
        """Take the attributes from the first message of the process."""
        for name in ("pid", "rank", "local_rank", "world_size", "local_world_size"):
            value = hello.get(name)
            if isinstance(value, int):
                setattr(self, name, value)

    async def messages(self) -> AsyncIterator[Message]:
        """Yield the messages of the process until it ends, except answers to :meth:`ask`."""
        while True:
            try:
                line = await self._reader.readline()
                message = opening.loads(line)
            except (OSError, ValueError):
                break
            if not isinstance(message, dict):
                break
            answer = self._answers.get(integer(message, "answers", -1))
            if answer is None:
                yield message
            elif not answer.done():
                answer.set_result(message)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(SilentError("the process has ended"))
        self._writer.close()

    def send(self, do: str, **values: object) -> None:
        """Send a message that needs no answer."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write(json.dumps({"do": do, **values}).encode() + b"\n")

    async def ask(self, do: str, timeout: float, **values: object) -> Message:
        """Send a message and wait for the answer.

        Time in which a thread of the process waits for a core does not count, up to
        `MAX_STARVATION` times the timeout.

        Raises:
            SilentError: There was no answer within ``timeout`` seconds, or the process has ended.
        """
        self._asked += 1
        number = self._asked
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self.send(do, ask=number, **values)
        try:
            left, most = timeout, time.monotonic() + MAX_STARVATION * timeout
            while left > 0 and time.monotonic() < most:
                began, before = time.monotonic(), read_cpu_times(self.pid)
                await asyncio.wait({answer}, timeout=min(left, SAMPLE_INTERVAL))
                if answer.done():
                    return answer.result()
                seconds = time.monotonic() - began
                left -= seconds - most_lacked(before, read_cpu_times(self.pid), seconds)
            raise SilentError(f"no answer within {timeout:.0f} s")
        finally:
            del self._answers[number]


# -- the debug ports and their state


@dataclass
class Slot:
    """One debug port, with its process and its session."""

    index: int
    port: int
    link: RankLink | None = None
    session: dap.SessionState | None = None
    client: asyncio.StreamWriter | None = None  # The connection to the session's client
    waits: Message | None = None  # Where the rank waits for a debugger: ``why``, ``path``, ``line``
    last_rank: int | None = None  # The global rank of the port's last process

    @property
    def rank(self) -> int:
        """The global rank if it is known, or else the index."""
        return self.index if self.last_rank is None else self.last_rank


@dataclass(frozen=True)
class Stop:
    """A rank held by the debugger."""

    rank: int
    place: str  # ``path:line``, empty if unknown


MAY_WAIT = (Phase.WAIT, Phase.FORWARD, Phase.BACKWARD)
"""Phases that contain a collective. DDP's own run inside forward and backward."""


def waits_for_others(status: Status | None, least: float, steps: float) -> bool:
    """Return whether a rank has been in such a phase for at least these seconds and steps."""
    if status is None or status.phase not in MAY_WAIT:
        return False
    return time.time_ns() - status.since > max(least * 1e9, steps * status.last_total)


SETTLE_TIME = 4.0
"""Seconds after the last new rank after which no more are expected, if their number is unknown."""


class Ranks:
    """The debug ports of one run, ascending, and the control socket of its ranks.

    Only :meth:`records` may be called outside the event loop's thread. The arguments are explained
    at :class:`~ddpdoctor.debug.gateway.Gateway`.
    """

    def __init__(
        self,
        ports: tuple[int, ...],
        *,
        gate: frozenset[int] | None,
        hold_errors: bool,
        expected: int | None,
    ) -> None:
        self.slots = [Slot(index, port) for index, port in enumerate(ports)]
        self._records: deque[DebugRecord] = deque()
        self._changed = asyncio.Condition()
        self.tasks: set[asyncio.Task[None]] = set()  # Background tasks
        self.news: Callable[[], None] = lambda: None  # Called when there are records
        self._gate = gate
        self.gate_open = gate is None
        self._hold_errors = hold_errors
        self._expected = expected
        self._lifted = hold_errors
        self._error_seen = False
        self._reported_listening = False
        self._hello_at = 0.0
        self._links: set[RankLink] = set()
        self.sessions: dict[str, asyncio.Future[Streams]] = {}
        """The connections that ranks were asked to make for debugpy, by key."""
        self.on_workers: Callable[[Slot], Coroutine[Any, Any, None]] | None = None
        """Called when a DataLoader of a rank has started workers."""
        self.on_node: Callable[[Message], None] = lambda _: None
        """Called when the ranks of another node have changed, with an empty message if all are
        gone.
        """
        self._exchange: RankLink | None = None
        """The connection to the process that exchanges records with other nodes."""
        self._sent_last: dict[str, object] = {}  # The last message to the exchange
        self._held_elsewhere = False  # A debugger holds ranks of other nodes

    @property
    def linked(self) -> list[Slot]:
        """The slots with a process."""
        return [slot for slot in self.slots if slot.link is not None]

    @property
    def stops(self) -> list[Stop]:
        """The ranks that are held: at a breakpoint, or waiting for a client."""
        found = []
        for slot in self.slots:
            waits, session = slot.waits, slot.session
            if waits is not None:
                found.append(Stop(slot.rank, f"{waits.get('path')}:{waits.get('line')}"))
            elif session is not None and session.stopped:
                found.append(Stop(slot.rank, session.place))
        return found

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def report(self, record: DebugRecord) -> None:
        """Give the supervisor a record for the journal."""
        self._records.append(record)
        self.news()

    def report_rank(
        self, slot: Slot, state: str, *, place: str = "", at: Location | None = None, why: str = ""
    ) -> None:
        """Report a record about one rank: where it stopped or waits, and why."""
        self.report(
            DebugRecord(
                time=time.time_ns(),
                state=state,
                rank=slot.rank,
                local_rank=slot.index,
                port=slot.port,
                pid=slot.link.pid if slot.link is not None else None,
                place=place,
                path=at.path if at is not None else "",
                line=at.line if at is not None else 0,
                why=why,
            )
        )

    def report_waits(self, slot: Slot) -> None:
        """Report a rank that waits for a debugger while none is attached."""
        waits = slot.waits
        if waits is not None and (slot.session is None or not slot.session.attached):
            why = str(waits.get("why") or "")
            self.report_rank(slot, "waits", at=_location(waits), why=why)

    def records(self) -> list[DebugRecord]:
        """Return the records since the last call. May be called from any thread."""
        return [self._records.popleft() for _ in range(len(self._records))]

    async def changed(self) -> None:
        """Wake everything that waits for a change: a process or session has started or ended."""
        self._tell_exchange()
        async with self._changed:
            self._changed.notify_all()

    async def wait_until(self, true: Callable[[], bool], timeout: float) -> None:
        """Wait up to ``timeout`` seconds until a change makes a condition true."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with self._changed:
                await asyncio.wait_for(self._changed.wait_for(true), timeout)

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection to the control socket."""
        link = RankLink(reader, writer)
        self._links.add(link)
        slot: Slot | None = None
        try:
            async for message in link.messages():
                if message.get("say") == "hello":
                    slot = await self._hello(link, slot, message)
                elif message.get("say") == "exchange":
                    self._links.discard(link)
                    self._exchange, self._sent_last = link, {}
                    self._tell_exchange()
                elif link is self._exchange:
                    self._message_of_exchange(message)
                elif message.get("say") == "session":
                    # A connection for debugpy: everything that follows is debugpy's.
                    awaited = self.sessions.pop(str(message.get("key")), None)
                    if awaited is None or awaited.done():
                        writer.close()
                    else:
                        awaited.set_result((reader, writer))
                    return
                elif slot is not None:
                    await self._message(slot, message)
                elif message.get("say") == "waits":
                    link.send("release")
                    now = time.time_ns()
                    self.report(DebugRecord(time=now, state="no port", rank=link.rank))
        finally:
            self._links.discard(link)
            if link is self._exchange:
                self._exchange = None
                self._message_of_exchange({"say": "held"})
                self.on_node({})
            if slot is not None and slot.link is link:
                self._error_seen |= slot.waits is not None and slot.waits.get("why") == "error"
                self.report_rank(slot, "gone")
                slot.link = slot.waits = None
                self.restore_timeouts()
                await self.changed()

    async def _hello(self, link: RankLink, slot: Slot | None, hello: Message) -> Slot | None:
        rank = link.rank
        link.introduce(hello)
        if slot is not None:
            slot.last_rank = link.rank if link.rank is not None else slot.last_rank
            if link.rank == rank:
                return slot
        if slot is None:
            slot = self._slot_for(link)
            if slot is None:
                link.send("go")
                return None
            slot.link, slot.waits = link, None
            slot.last_rank = link.rank
            self._hello_at = time.monotonic()
            if self._lifted:
                link.send("lift")
            if self.gate_open:
                link.send("go")
        self.report_rank(slot, "ready")
        self.check_gate()
        if not self.gate_open:
            self.begin(self._check_gate_later())
        await self.changed()
        return slot

    def _slot_for(self, link: RankLink) -> Slot | None:
        """Return the slot of a process: by local rank, else by rank, else the first free one."""
        wanted = link.local_rank if link.local_rank is not None else link.rank
        if wanted is not None and wanted < len(self.slots):
            slot = self.slots[wanted]
            # torchrun restarts a rank as soon as its predecessor has ended.
            if slot.link is None:
                return slot
            try:
                if psutil.Process(slot.link.pid).status() == psutil.STATUS_ZOMBIE:
                    return slot
            except psutil.Error:
                return slot
        return next((slot for slot in self.slots if slot.link is None), None)

    async def _message(self, slot: Slot, message: Message) -> None:
        link = slot.link
        if link is None:
            return
        if message.get("say") == "waits":
            if message.get("why") == "error" and self._error_seen:
                # The user has debugged the first failure, of which this one is a consequence.
                link.send("release")
                return
            slot.waits = message
            # Not awaited, because this rank's own answer comes through the caller.
            self.begin(self.lift_timeouts())
            self.report_waits(slot)
        elif message.get("say") == "workers":
            if self.on_workers is not None:
                self.begin(self.on_workers(slot))
        elif message.get("say") == "expects":
            self.report_rank(slot, "expects", at=_location(message))
        elif message.get("say") == "goes on":
            self._error_seen |= message.get("why") == "error"
            slot.waits = None
            self.report_rank(slot, "goes on")
            self.restore_timeouts()

    @property
    def _held(self) -> bool:
        """Whether a debugger holds a rank of this node, or is about to."""
        held = any(slot.session is not None or slot.waits is not None for slot in self.slots)
        return held or self._hold_errors

    def _tell_exchange(self) -> None:
        """Tell the exchange about changes on this node."""
        ranks = [
            [slot.index, slot.last_rank, slot.link.pid]
            for slot in self.slots
            if slot.link is not None and slot.last_rank is not None
        ]
        for name, value in (("held", self._held), ("ranks", ranks)):
            if self._exchange is not None and self._sent_last.get(name) != value:
                self._sent_last[name] = value
                self._exchange.send(name, **{name: value})

    def _message_of_exchange(self, message: Message) -> None:
        if message.get("say") == "node":
            self.on_node(message)
        elif message.get("say") == "held":
            self._held_elsewhere = message.get("held") is True
            if self._held_elsewhere:
                self.begin(self.lift_timeouts())
            else:
                self.restore_timeouts()

    def _all_here(self) -> bool:
        links = [slot.link for slot in self.slots if slot.link is not None]
        sizes = [link.local_world_size or link.world_size or 1 for link in links]
        expected = self._expected or max(sizes, default=1)
        if len(links) >= min(expected, len(self.slots)):
            return True
        # For ranks started by hand on several nodes, the number on this one is unknown.
        known = self._expected is not None or any(link.local_world_size for link in links)
        return not known and bool(links) and time.monotonic() - self._hello_at >= SETTLE_TIME

    async def _check_gate_later(self) -> None:
        await asyncio.sleep(SETTLE_TIME + 0.1)
        self.check_gate()

    def check_gate(self) -> None:
        """Open the gate if all ranks that it waits for are attached."""
        if self.gate_open or not self._all_here():
            return
        wanted = [slot for slot in self.linked if not self._gate or slot.rank in self._gate]
        missing = [slot for slot in wanted if slot.session is None or not slot.session.attached]
        if missing:
            if not self._reported_listening:
                self._reported_listening = True
                ranks = tuple(slot.rank for slot in wanted)
                self.report(DebugRecord(time=time.time_ns(), state="listening", ranks=ranks))
            return
        self.gate_open = True
        for slot in self.linked:
            if slot.link is not None:
                slot.link.send("go")
        self.report(DebugRecord(time=time.time_ns(), state="gate open"))

    async def lift_timeouts(self) -> None:
        """Lift the collective timeouts of all ranks.

        Ranks of this node have a second to do so. Other nodes are asked without waiting for them.
        """
        self._tell_exchange()
        if self._lifted or not (self._held or self._held_elsewhere):
            return
        self._lifted = True
        asked = [link.ask("lift", 1.0) for link in self._links]
        await asyncio.gather(*asked, return_exceptions=True)

    def restore_timeouts(self) -> None:
        """Restore the collective timeouts once no rank is in a debugger."""
        self._tell_exchange()
        if not self._lifted or self._held or self._held_elsewhere:
            return
        self._lifted = False
        for link in self._links:
            link.send("restore")


def _location(message: Message) -> Location:
    return Location(str(message.get("path") or ""), integer(message, "line"))
