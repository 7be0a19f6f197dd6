"""The debug ports of a run, and who is behind each: a process of the job, a session of a client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from ddpdoctor.core.user_code import Location
from ddpdoctor.debug import dap
from ddpdoctor.debug.rank_link import Message, RankLink
from ddpdoctor.run.records.supervisor import DebugRecord


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
