"""The supervisor's end of a rank's control socket: JSON lines, one request at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer
from ddpdoctor.system.process_state import Turns, lacked, read_turns

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
