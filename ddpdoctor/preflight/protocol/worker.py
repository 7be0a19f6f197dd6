"""What a node does on behalf of the coordinator, until it is told the end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from ddpdoctor.preflight.place import Seat
from ddpdoctor.preflight.protocol import pairs
from ddpdoctor.preflight.protocol.caller import Call, refused
from ddpdoctor.preflight.protocol.coordinator import unpacked_token
from ddpdoctor.preflight.protocol.facts import Facts
from ddpdoctor.preflight.protocol.pairs import Listener, Target
from ddpdoctor.preflight.protocol.ranks import Ranks
from ddpdoctor.preflight.protocol.wire import WireError

LOOK_EVERY = 0.2
"""Seconds after which it is noticed that the coordinator is gone."""


class Attendance:
    """A node among the others.

    Args:
        call: The connection to the coordinator.
        seat: This node's place.
        facts: What this node tells of itself.
        listener: What the other nodes dial.
        ranks: Its processes for the collective test.
    """

    def __init__(
        self, call: Call, seat: Seat, facts: Facts, listener: Listener, ranks: Ranks
    ) -> None:
        self.call = call
        self.seat = seat
        self.facts = facts
        self.listener = listener
        self.ranks = ranks
        self.index = -1

    async def run(self, deadline: float) -> dict[str, Any]:
        """Do what is asked for until the end.

        Args:
            deadline: Monotonic time at which all has to be over.

        Returns:
            What the coordinator tells all nodes.

        Raises:
            WireError: The coordinator is gone.
            CallError: It goes on without this node.
        """
        await self.call.link.send(
            {
                "facts": self.facts.packed(),
                "offset": self.call.offset,
                "uncertainty": self.call.uncertainty,
            }
        )
        while True:
            message = await self.call.link.receive(max(0.1, deadline - time.monotonic()))
            if message["do"] == "leave":
                raise refused(message)
            if message["do"] == "end":
                blob: dict[str, Any] = message["blob"]
                return blob
            await self.call.link.send(await self._while_connected(self._do(message)))

    async def _while_connected(self, doing: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Do something for as long as the coordinator is there: without it, ranks wait in vain.

        Raises:
            WireError: The coordinator is gone.
        """
        task = asyncio.ensure_future(doing)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_EVERY)
                # Nothing is read here: the coordinator says nothing until it has its answer.
                if not task.done() and self.call.link.reader.at_eof():
                    raise WireError("the connection was closed")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def _do(self, message: Mapping[str, Any]) -> dict[str, Any]:
        what = message["do"]
        if what == "roster":
            self.index = int(message["index"])
            self.listener.admit(self.index, unpacked_token(message["token"]))
            return {}
        if what == "dial":
            targets = [Target(**each) for each in message["targets"]]
            results = await pairs.dial_all(targets, self.listener.token)
            return {"results": [result.packed() for result in results]}
        if what == "settle":
            if message["needed"]:
                return {"unready": await self.ranks.ready(float(message["limit"]))}
            await self.ranks.stop()
            return {}
        if what == "speed":
            speed = await pairs.speed(Target(**message["target"]), self.listener.token)
            return {} if speed is None else {"rtt": speed.rtt, "bandwidth": speed.bandwidth}
        if what == "folder":
            return await asyncio.to_thread(self._folder, message)
        if what == "reduce":
            return {"results": await self._reduce(message)}
        return {}

    def _folder(self, message: Mapping[str, Any]) -> dict[str, Any]:
        path, token = Path(self.facts.folder), message["token"]
        if message["action"] == "write":
            return {"error": write(path, token)}
        if message["action"] == "remove":
            remove(path, token)
            return {}
        return {"seen": seen(path, token), "listing": listing(path)}

    async def _reduce(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        orders = [
            {
                "host": self.seat.host,
                "port": message["port"],
                "rank": message["first"] + local,
                "local_rank": local,
                "world": message["world"],
                "limit": message["limit"],
                "stage_limit": message["stage_limit"],
                "patience": message["patience"],
                "stages": "nccl" if message["nccl"] else "",
                "node_of": message["node_of"],
            }
            for local in range(self.facts.nproc)
        ]
        # A rank that waits in vain ends at its own limits and says so; this one is for hung ones.
        return await self.ranks.reduce(orders, message["patience"])


PREFIX = ".ddpdoctor-check-"

SEEN_WITHIN = 4.0
"""Seconds. NFS clients may answer from their memory for some (``acdirmin`` is 30, but a lookup of a
name that was never asked for goes to the server)."""

SAMPLE = 200


def write(folder: Path, token: str) -> str:
    """Write the file that the others look for; what went wrong, or empty."""
    try:
        (folder / f"{PREFIX}{token}").write_text(token)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def seen(folder: Path, token: str) -> bool:
    """Whether the file is here, with the right words in it."""
    until = time.monotonic() + SEEN_WITHIN
    while True:
        with contextlib.suppress(OSError):
            # Listing the folder makes an NFS client ask the server anew.
            os.listdir(folder)
            if (folder / f"{PREFIX}{token}").read_text() == token:
                return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.1)


def listing(folder: Path) -> str:
    """A hash of names and sizes of a sample of the folder's files; empty if it cannot be read."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith(PREFIX))
    except OSError:
        return ""
    step = max(1, len(names) // SAMPLE)
    digest = hashlib.sha256(str(len(names)).encode())
    for name in names[::step]:
        digest.update(name.encode(errors="surrogateescape"))
        with contextlib.suppress(OSError):
            digest.update(str((folder / name).stat().st_size).encode())
    return digest.hexdigest()[:16]


def remove(folder: Path, token: str) -> None:
    """Take the file away again."""
    with contextlib.suppress(OSError):
        (folder / f"{PREFIX}{token}").unlink()
