"""The supervisor's end of a rank's control socket: JSON lines, one request at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer

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

        Raises:
            SilentError: There was none within ``timeout`` seconds, or the process has ended.
        """
        self._asked += 1
        number = self._asked
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self.send(do, ask=number, **values)
        try:
            return await asyncio.wait_for(answer, timeout)
        except asyncio.TimeoutError:
            raise SilentError(f"no answer within {timeout:.0f} s") from None
        finally:
            del self._answers[number]
