"""This node's ranks of the collective test: processes with torch, started early, used once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpdoctor.core import opening
from ddpdoctor.preflight.machine.collectives import environment
from ddpdoctor.preflight.protocol.report import (
    RankResult,
    Stage,
)
from ddpdoctor.run.records.decoder import decoder

Order = Mapping[str, Any]
"""What a rank is to do, as its program reads it."""

PROGRAM = Path(__file__).with_name("reduction.py")
"""Started by its path: as a module it would import all the checks before torch, in every rank."""

LATE = "late"
"""Not all ranks had imported torch in time."""

BROKEN = "broken"
"""A rank ended in importing torch."""


class Ranks:
    """Processes that import torch while the network is tested, and then reduce together."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environment(environ)
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self, count: int) -> None:
        """Start so many."""
        for _ in range(count):
            self._processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    str(PROGRAM),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    env=self._environ,
                )
            )

    async def ready(self, limit: float) -> str:
        """Wait until all have imported torch, or have failed to.

        Args:
            limit: Seconds.

        Returns:
            What came of it: empty if all have, :data:`LATE` or :data:`BROKEN`.
        """
        came = await asyncio.gather(*(_imported(each, limit) for each in self._processes))
        return next((each for each in (BROKEN, LATE) if each in came), "")

    async def reduce(self, orders: Sequence[Order], limit: float) -> list[RankResult]:
        """Give each its order; what each answered, in their order.

        Args:
            orders: One for each process.
            limit: Seconds for the collectives.
        """
        each = zip(self._processes, orders, strict=True)
        return list(await asyncio.gather(*(_reduce(*one, limit) for one in each)))

    async def stop(self) -> None:
        """End them all."""
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        for process in self._processes:
            await process.wait()
        self._processes.clear()


async def _reduce(process: asyncio.subprocess.Process, order: Order, limit: float) -> RankResult:
    assert process.stdin is not None and process.stdout is not None
    ends = time.monotonic() + limit
    answer: dict[str, Any] = {"rank": order["rank"], "more": True}
    why = ""
    try:
        process.stdin.write(json.dumps(order).encode() + b"\n")
        await process.stdin.drain()
        while answer.get("more"):
            left = max(0.0, ends - time.monotonic())
            line = await asyncio.wait_for(process.stdout.readline(), left)
            # Of an empty line it is known how the rank ended.
            answer = opening.loads(line)
    except asyncio.TimeoutError:
        why = f"no result within {limit:.0f} s"
    except (OSError, ValueError):
        why = await _how_it_ended(process)
    result = decoder(RankResult)(answer)
    return _cut_off(result, answer, why) if why else result


async def _imported(process: asyncio.subprocess.Process, limit: float) -> str:
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), limit)
    except asyncio.TimeoutError:
        return LATE
    return "" if line else BROKEN


async def _how_it_ended(process: asyncio.subprocess.Process) -> str:
    """In words, of a rank that says no more."""
    with contextlib.suppress(asyncio.TimeoutError):
        status = await asyncio.wait_for(process.wait(), 1)
        if status < 0:
            return f"the rank was ended by {signal.Signals(-status).name}"
    return "the rank ended without a result"


def _cut_off(result: RankResult, answer: Mapping[str, Any], why: str) -> RankResult:
    """What a rank knew before it ended, or hung: that counts, and what it was doing failed."""
    stages = result.stages
    if stages is None:
        return replace(result, ok=False, error=result.error or why)
    doing = answer["stages"].get("doing")
    if not isinstance(doing, dict):
        return result
    failed = replace(decoder(Stage)(doing), error=why)
    return replace(result, stages=replace(stages, stages=(*stages.stages, failed)))
