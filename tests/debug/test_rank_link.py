"""A rank has time to answer: time in which it could, that is, and not in which it has no core."""

from __future__ import annotations

import asyncio
import time

import pytest

from ddpdoctor.debug import gateway_ranks
from ddpdoctor.debug.gateway_ranks import Message, RankLink, SilentError
from ddpdoctor.system.process_activity import CpuTime


class Writer:
    """Answers the first request after a while."""

    def __init__(self, reader: asyncio.StreamReader, after: float) -> None:
        self.reader, self.after = reader, after

    def write(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self.after, self.reader.feed_data, b'{"answers": 1, "here": true}\n')

    def close(self) -> None:
        """The stream ends."""


def ask(after: float) -> Message:
    """Ask a rank that answers after so many seconds, and is given a tenth of them."""

    async def asked() -> Message:
        reader = asyncio.StreamReader()
        link = RankLink(reader, Writer(reader, after))  # type: ignore[arg-type]

        async def read() -> None:
            async for _ in link.messages():
                pass

        reading = asyncio.create_task(read())
        try:
            return await link.ask("answer", after / 10)
        finally:
            reading.cancel()

    return asyncio.run(asked())


def test_a_rank_that_sleeps_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_ranks, "read_cpu_times", lambda pid: {1: CpuTime("S", 0.0, 0.0, 1)})
    with pytest.raises(SilentError, match="no answer"):
        ask(5.0)


def test_a_rank_that_gets_no_core_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()

    def starved(pid: int) -> dict[int, CpuTime]:
        return {1: CpuTime("R", 0.0, time.monotonic() - began, 1)}

    monkeypatch.setattr(gateway_ranks, "read_cpu_times", starved)
    assert ask(5.0)["here"]
