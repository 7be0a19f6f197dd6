"""Time limits that do not run while this process does not: a busy machine is no broken network."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")

TICK_S = 0.05


class Patience:
    """Counts the time that this process gets, in ticks; within ``async with``.

    A tick that comes late, because others have the cores, counts as one tick.
    """

    def __init__(self) -> None:
        self._had = 0.0
        self._ticking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Patience:
        self._ticking = asyncio.ensure_future(self._tick())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._ticking is not None
        self._ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._ticking

    async def within(self, awaited: Awaitable[T], seconds: float) -> T:
        """What ``awaited`` returns.

        Raises:
            TimeoutError: It did not come back within so many seconds of this process's time.
        """
        task = asyncio.ensure_future(awaited)
        until = self._had + seconds
        try:
            while not task.done():
                left = until - self._had
                if left <= 0:
                    raise TimeoutError
                await asyncio.wait({task}, timeout=max(TICK_S, left))
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _tick(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(TICK_S)
            self._had += min(time.monotonic() - began, 2 * TICK_S)
