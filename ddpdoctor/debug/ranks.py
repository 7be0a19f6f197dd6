"""The gateway's side of the ranks: their control connections, the gate, collective timeouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import psutil

from ddpdoctor.core.opening import integer
from ddpdoctor.core.user_code import Location
from ddpdoctor.debug.rank_link import Message, RankLink, Streams
from ddpdoctor.debug.slots import Slot, Slots
from ddpdoctor.run.records.supervisor import DebugRecord

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
