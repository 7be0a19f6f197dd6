"""The monitor driven by keys."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from textual.pilot import Pilot

from ddpdoctor.render.terminal import plain
from ddpdoctor.top.app import TopApp
from ddpdoctor.top.frames import Replay, Visible
from ddpdoctor.top.snapshot import Snapshot
from ddpdoctor.top.view import View
from tests.conftest import LIMIT
from tests.support import top_snapshots as made


class Frames:
    """A source that hands out frames, one step further each time."""

    interval = 0.02
    replay: Replay | None = None

    def __init__(self, first: Snapshot) -> None:
        self.first = first
        self.count = 0
        self.wanted: list[Visible] = []
        self.closed = False
        self.fail: Exception | None = None

    def read(self, want: Visible) -> Snapshot:
        self.wanted.append(want)
        if self.fail is not None:
            raise self.fail
        self.count += 1
        rows = tuple(replace(row, step=self.count) for row in self.first.ranks)
        return replace(self.first, ranks=rows, time=self.first.time + self.count)

    def history(self) -> tuple[Snapshot, ...]:
        return ()

    def close(self) -> None:
        self.closed = True


Test = Callable[[TopApp, Pilot[None]], Awaitable[None]]


def drive(app: TopApp, test: Test, size: tuple[int, int] = (100, 30)) -> None:
    """Run a test in the app, at a given size."""

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app.shown.time > 0)
            await test(app, pilot)

    asyncio.run(run())


async def until(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        await pilot.pause(0.01)


def screen(app: TopApp) -> str:
    return "\n".join(plain(line) for line in app.drawn.lines)


def monitor(first: Snapshot | None = None, view: View = View(), **more: Any) -> TopApp:  # noqa: B008
    source = more.pop("source", None) or Frames(first or made.run(8))
    return TopApp(lambda: source, view, **more)
