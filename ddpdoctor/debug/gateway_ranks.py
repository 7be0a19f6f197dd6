"""The gateway's side of the ranks: control connections, debug sessions, collective timeouts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer
from ddpdoctor.core.user_code import Location
from ddpdoctor.debug import dap
from ddpdoctor.run.records.supervisor import DebugRecord
from ddpdoctor.system.process_activity import Turns, lacked, read_turns

# -- the supervisor's end of a rank's control socket: JSON lines, one request at a time


STARVED = 20.0
"""How many times as long a process may take to answer if all that it lacks is a core."""

LOOK = 1.0
"""Seconds between two looks at what the process has had of the cores."""

Message = dict[str, Any]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class SilentError(Exception):
    """The process does not answer."""


class RankLink:
    """One process of the job that has said hello.

    Attributes:
        pid: Its process, as it sees itself.
        rank: Its global rank, None while it is unknown.
        local_rank: None where its launcher has no such thing.
        world_size: None until it is known.
        local_world_size: The number of ranks of this node, None where the launcher does not say.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = 0
        self.rank: int | None = None
        self.local_rank: int | None = None
        self.world_size: int | None = None
        self.local_world_size: int | None = None
        self._reader = reader
        self._writer = writer
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._asked = 0

    def introduce(self, hello: Message) -> None:
        """Take in what the process says of itself."""
        for name in ("pid", "rank", "local_rank", "world_size", "local_world_size"):
            value = hello.get(name)
            if isinstance(value, int):
                setattr(self, name, value)

    async def messages(self) -> AsyncIterator[Message]:
        """What the process says by itself, to the end of its life; answers go to who asked."""
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
        """Say something that needs no answer."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write(json.dumps({"do": do, **values}).encode() + b"\n")

    async def ask(self, do: str, timeout: float, **values: object) -> Message:
        """Say something and wait for the answer.

        Seconds in which a thread of the process wants a core and has none do not count, up to
        `STARVED` times as many.

        Raises:
            SilentError: There was none within ``timeout`` seconds, or the process has ended.
        """
        self._asked += 1
        number = self._asked
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self.send(do, ask=number, **values)
        try:
            left, most = timeout, time.monotonic() + STARVED * timeout
            while left > 0 and time.monotonic() < most:
                began, before = time.monotonic(), read_turns(self.pid)
                await asyncio.wait({answer}, timeout=min(left, LOOK))
                if answer.done():
                    return answer.result()
                seconds = time.monotonic() - began
                left -= seconds - _lacked(before, read_turns(self.pid), seconds)
            raise SilentError(f"no answer within {timeout:.0f} s")
        finally:
            del self._answers[number]


def _lacked(before: Turns, after: Turns, seconds: float) -> float:
    """For how long a process had to wait for a core, by the thread of it that waited longest."""
    waits = (lacked(before.get(thread, turn), turn, seconds) for thread, turn in after.items())
    return max(waits, default=0.0)


# -- slots


@dataclass
class Slot:
    """One port, and the process and session behind it."""

    index: int
    port: int
    link: RankLink | None = None
    session: dap.Tap | None = None
    client: asyncio.StreamWriter | None = None
    """Where the session's messages go."""
    waits: Message | None = None
    """Where the rank stands until a debugger comes: ``why``, ``path``, ``line``."""
    last_rank: int | None = None
    """The global rank of the last process that had the port."""

    @property
    def rank(self) -> int:
        """The global rank, as far as it is known."""
        return self.index if self.last_rank is None else self.last_rank


@dataclass(frozen=True)
class Stop:
    """A rank that the debugger holds."""

    rank: int
    place: str
    """``path:line``, empty if unknown."""


class Slots:
    """The ports of one run, ascending; all but :meth:`take` on the event loop's thread.

    Args:
        numbers: The port numbers.
    """

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self._slots = [Slot(index, port) for index, port in enumerate(numbers)]
        self._records: deque[DebugRecord] = deque()
        self._changed = asyncio.Condition()
        self.tasks: set[asyncio.Task[None]] = set()
        """What runs beside what goes on."""
        self.news: Callable[[], None] = lambda: None
        """Called when there is something to take."""

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    @property
    def linked(self) -> list[Slot]:
        """Those with a process behind them."""
        return [slot for slot in self._slots if slot.link is not None]

    @property
    def stops(self) -> list[Stop]:
        """The ranks that are held: at a breakpoint, or waiting for a client."""
        found = []
        for slot in self._slots:
            waits, session = slot.waits, slot.session
            if waits is not None:
                found.append(Stop(slot.rank, f"{waits.get('path')}:{waits.get('line')}"))
            elif session is not None and session.stopped:
                found.append(Stop(slot.rank, session.place))
        return found

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run something beside what goes on."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def report(self, record: DebugRecord) -> None:
        """Give the supervisor a record for the journal."""
        self._records.append(record)
        self.news()

    def report_rank(
        self,
        slot: Slot,
        state: str,
        *,
        place: str = "",
        at: Location | None = None,
        why: str = "",
    ) -> None:
        """The same, about one rank.

        Args:
            slot: Its port.
            state: As the record has it.
            place: Of the stop.
            at: The line that it waits at.
            why: It waits.
        """
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

    def take(self) -> list[DebugRecord]:
        """What was reported since the last call; from any thread."""
        taken = []
        while self._records:
            taken.append(self._records.popleft())
        return taken

    async def changed(self) -> None:
        """A process or a session has come or gone."""
        async with self._changed:
            self._changed.notify_all()

    async def wait_until(self, true: Callable[[], bool], timeout: float) -> None:
        """Wait for a change that makes something true, for so many seconds at most."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with self._changed:
                await asyncio.wait_for(self._changed.wait_for(true), timeout)


# -- the gateway's side of the ranks: their control connections, the gate, collective timeouts


NO_MORE = 4.0
"""Seconds without a new rank after which a gate counts those that are there."""


class Ranks:
    """Serves the control socket of one run.

    Args:
        slots: The debug ports.
        gate: Ranks that have to be attached before any may start; all of them if empty; None for
            no gate.
        hold_errors: Ranks hold at an uncaught exception, so timeouts are lifted from the start.
        expected: How many ranks there will be, None if only they know.
    """

    def __init__(
        self,
        slots: Slots,
        *,
        gate: frozenset[int] | None,
        hold_errors: bool,
        expected: int | None,
    ) -> None:
        self._slots = slots
        self._gate = gate
        self.gate_open = gate is None
        self._hold_errors = hold_errors
        self._expected = expected
        self._lifted = hold_errors
        self._error_seen = False
        self._said_listening = False
        self._hello_at = 0.0
        self._links: set[RankLink] = set()
        self.sessions: dict[str, asyncio.Future[Streams]] = {}
        """The connections that ranks were asked to make for debugpy, by their key."""
        self.on_workers: Callable[[Slot], Coroutine[Any, Any, None]] | None = None
        """Called when a DataLoader of a rank has started workers."""

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection to the control socket."""
        link = RankLink(reader, writer)
        self._links.add(link)
        slot: Slot | None = None
        try:
            async for message in link.messages():
                if message.get("say") == "hello":
                    slot = await self._hello(link, slot, message)
                elif message.get("say") == "session":
                    self._take_session(message, reader, writer)
                    return
                elif slot is not None:
                    await self._said(slot, message)
                elif message.get("say") == "waits":
                    link.send("release")
                    now = time.time_ns()
                    self._slots.report(DebugRecord(time=now, state="no port", rank=link.rank))
        finally:
            self._links.discard(link)
            if slot is not None and slot.link is link:
                self._error_seen |= slot.waits is not None and slot.waits.get("why") == "error"
                self._slots.report_rank(slot, "gone")
                slot.link = slot.waits = None
                self.restore_timeouts()
                await self._slots.changed()

    def _take_session(
        self, message: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """A connection that a rank has made for debugpy; what follows is debugpy's."""
        awaited = self.sessions.pop(str(message.get("key")), None)
        if awaited is None or awaited.done():
            writer.close()
        else:
            awaited.set_result((reader, writer))

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
        self._slots.report_rank(slot, "ready")
        self.look_at_gate()
        if not self.gate_open:
            self._slots.begin(self._look_again())
        await self._slots.changed()
        return slot

    def _slot_for(self, link: RankLink) -> Slot | None:
        """Its port: by local rank, else by rank, else the first free one."""
        wanted = link.local_rank if link.local_rank is not None else link.rank
        if wanted is not None and wanted < len(self._slots):
            slot = self._slots[wanted]
            # torchrun restarts a rank as soon as its predecessor has ended.
            if slot.link is None or not _lives(slot.link.pid):
                return slot
        return next((slot for slot in self._slots if slot.link is None), None)

    async def _said(self, slot: Slot, message: Message) -> None:
        link = slot.link
        if link is None:
            return
        if message.get("say") == "waits":
            if message.get("why") == "error" and self._error_seen:
                # The first failure has been looked at; this one is its consequence.
                link.send("release")
                return
            slot.waits = message
            # Not awaited: this rank's own answer comes through the caller.
            self._slots.begin(self.lift_timeouts())
            if slot.session is None or not slot.session.attached:
                self._slots.report_rank(
                    slot, "waits", at=_location(message), why=str(message.get("why") or "")
                )
        elif message.get("say") == "workers":
            if self.on_workers is not None:
                self._slots.begin(self.on_workers(slot))
        elif message.get("say") == "expects":
            self._slots.report_rank(slot, "expects", at=_location(message))
        elif message.get("say") == "goes on":
            self._error_seen |= message.get("why") == "error"
            slot.waits = None
            self._slots.report_rank(slot, "goes on")
            self.restore_timeouts()

    # -- the gate before the first user line

    def _all_here(self) -> bool:
        links = [slot.link for slot in self._slots if slot.link is not None]
        sizes = [link.local_world_size or link.world_size or 1 for link in links]
        expected = self._expected or max(sizes, default=1)
        if len(links) >= min(expected, len(self._slots)):
            return True
        # Started by hand on several nodes, the number on this one is unknown.
        known = self._expected is not None or any(link.local_world_size for link in links)
        return not known and bool(links) and time.monotonic() - self._hello_at >= NO_MORE

    async def _look_again(self) -> None:
        await asyncio.sleep(NO_MORE + 0.1)
        self.look_at_gate()

    def look_at_gate(self) -> None:
        """Open the gate if all that it waits for are attached."""
        if self.gate_open or not self._all_here():
            return
        wanted = [slot for slot in self._slots.linked if not self._gate or slot.rank in self._gate]
        missing = [slot for slot in wanted if slot.session is None or not slot.session.attached]
        if missing:
            if not self._said_listening:
                self._said_listening = True
                ranks = tuple(slot.rank for slot in wanted)
                self._slots.report(DebugRecord(time=time.time_ns(), state="listening", ranks=ranks))
            return
        self.gate_open = True
        for slot in self._slots.linked:
            if slot.link is not None:
                slot.link.send("go")
        self._slots.report(DebugRecord(time=time.time_ns(), state="gate open"))

    # -- timeouts

    async def lift_timeouts(self) -> None:
        """Lift the collective timeouts of all ranks, and wait a moment until they are."""
        if self._lifted:
            return
        self._lifted = True
        asked = [link.ask("lift", 1.0) for link in self._links]
        await asyncio.gather(*asked, return_exceptions=True)

    def restore_timeouts(self) -> None:
        """Give the collectives their timeouts again, once no rank is in a debugger."""
        if not self._lifted or self._hold_errors:
            return
        if any(slot.session is not None or slot.waits is not None for slot in self._slots):
            return
        self._lifted = False
        for link in self._links:
            link.send("restore")


def _location(message: Message) -> Location:
    return Location(str(message.get("path") or ""), integer(message, "line"))


def _lives(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
