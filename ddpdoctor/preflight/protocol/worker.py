"""What a node does on behalf of the coordinator, until the end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpdoctor.preflight.protocol import pairs
from ddpdoctor.preflight.protocol.caller import Call, refused
from ddpdoctor.preflight.protocol.messages import Answer, Facts, Order, Report, Welcome
from ddpdoctor.preflight.protocol.pairs import Listener
from ddpdoctor.preflight.protocol.ranks import Ranks
from ddpdoctor.preflight.protocol.wire import WireError
from ddpdoctor.run.records.decoder import decoder

LOOK_EVERY = 0.2
"""Seconds after which it is noticed that the coordinator is gone."""


@dataclass
class Worker:
    """A node among the others.

    Attributes:
        call: The connection to the coordinator.
        host: Of the rendezvous.
        facts: What this node reports of itself.
        listener: What the other nodes dial.
        ranks: Its processes for the collective test.
        index: Its own among the nodes; -1 until it is known.
    """

    call: Call
    host: str
    facts: Facts
    listener: Listener
    ranks: Ranks
    index: int = -1

    async def run(self, deadline: float) -> Report:
        """Do what is asked for until the end.

        Args:
            deadline: Monotonic time at which all has to be over.

        Returns:
            What the coordinator reports to all nodes.

        Raises:
            WireError: The coordinator is gone.
            CallError: It goes on without this node.
        """
        link, call = self.call.link, self.call
        await link.send(
            {"facts": self.facts, "offset": call.offset, "uncertainty": call.uncertainty}
        )
        while True:
            message = await link.receive(max(0.1, deadline - time.monotonic()))
            order = decoder(Order)(message)
            if order.do == "leave":
                raise refused(decoder(Welcome)(message))
            if order.do == "end" and order.report is not None:
                return order.report
            await link.send(await self._while_connected(self._do(order)))

    async def _while_connected(self, doing: Coroutine[Any, Any, Answer]) -> Answer:
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

    async def _do(self, order: Order) -> Answer:
        if order.do == "roster":
            self.index = order.index
            self.listener.admit(order.index, bytes.fromhex(order.token))
        elif order.do == "dial":
            results = await pairs.dial_all(order.targets, self.listener.token)
            return Answer(dialled=tuple(results))
        elif order.do == "settle" and order.needed:
            return Answer(unready=await self.ranks.ready(order.limit))
        elif order.do == "settle":
            await self.ranks.stop()
        elif order.do == "speed" and order.targets:
            speed = await pairs.speed(order.targets[0], self.listener.token)
            return Answer() if speed is None else Answer(rtt=speed.rtt, bandwidth=speed.bandwidth)
        elif order.do == "folder":
            return await asyncio.to_thread(_in_folder, Path(self.facts.folder), order)
        elif order.do == "reduce":
            # A rank that waits in vain ends at its own limits and says so; this one is for hung
            # ones.
            orders = [self._of_rank(order, local) for local in range(self.facts.nproc)]
            return Answer(ranks=tuple(await self.ranks.reduce(orders, order.patience)))
        return Answer()

    def _of_rank(self, order: Order, local: int) -> dict[str, Any]:
        return {
            "host": self.host,
            "port": order.port,
            "rank": order.first + local,
            "local_rank": local,
            "world": order.world,
            "limit": order.limit,
            "stage_limit": order.stage_limit,
            "patience": order.patience,
            "stages": "nccl" if order.nccl else "",
            "node_of": order.node_of,
        }


def _in_folder(folder: Path, order: Order) -> Answer:
    """Test whether the checkpoint folder is the same on all nodes: one's file is seen by all."""
    if order.action == "write":
        return Answer(error=write(folder, order.token))
    if order.action == "remove":
        remove(folder, order.token)
        return Answer()
    return Answer(seen=seen(folder, order.token), listing=listing(folder))


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
            # Listing the folder makes an NFS client ask the server again.
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
