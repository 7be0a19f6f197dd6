"""This node's ranks of the collective test: processes with torch, started early, used once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpdoctor.preflight.machine.collectives import environment

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

    async def reduce(self, orders: list[dict[str, Any]], limit: float) -> list[dict[str, Any]]:
        """Give each its order; what each answered, in their order.

        Args:
            orders: One for each process.
            limit: Seconds for the collectives.
        """
        return list(
            await asyncio.gather(
                *(
                    self._one(process, order, limit)
                    for process, order in zip(self._processes, orders, strict=True)
                )
            )
        )

    async def _one(
        self, process: asyncio.subprocess.Process, order: dict[str, Any], limit: float
    ) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None

        def failed(words: str) -> dict[str, Any]:
            return {"rank": order["rank"], "ok": False, "error": words}

        ends = time.monotonic() + limit
        answer: dict[str, Any] = {}
        try:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            await process.stdin.drain()
            while not answer or answer.get("more"):
                left = max(0.0, ends - time.monotonic())
                line = await asyncio.wait_for(process.stdout.readline(), left)
                if not line:
                    return _cut_off(answer or failed(""), await _how_it_ended(process))
                answer = json.loads(line)
        except asyncio.TimeoutError:
            return _cut_off(answer or failed(""), f"no result within {limit:.0f} s")
        except (OSError, ValueError):
            return _cut_off(answer or failed(""), await _how_it_ended(process))
        return answer

    async def stop(self) -> None:
        """End them all."""
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        for process in self._processes:
            await process.wait()
        self._processes.clear()


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


def _cut_off(answer: dict[str, Any], why: str) -> dict[str, Any]:
    """What a rank told before it ended, or hung: that counts, and what it was at failed."""
    answer.pop("more", None)
    stages = answer.get("stages")
    if stages is None:
        return {**answer, "ok": False, "error": answer.get("error") or why}
    doing = stages.pop("doing", None)
    if doing is not None:
        stages["stages"].append({**doing, "error": why, "bus": 0.0})
    return answer
