"""What a node does on behalf of the coordinator, until the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import resource
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddpdoctor.core import opening
from ddpdoctor.core.finding import Severity
from ddpdoctor.preflight.check import Outcome, Status
from ddpdoctor.preflight.place import Seat
from ddpdoctor.preflight.protocol import pairs
from ddpdoctor.preflight.protocol.addresses import may_be_node
from ddpdoctor.preflight.protocol.caller import Call, refused
from ddpdoctor.preflight.protocol.connecting import words_of
from ddpdoctor.preflight.protocol.messages import (
    Answer,
    Order,
    Welcome,
)
from ddpdoctor.preflight.protocol.pairs import Dialled, Listener, Target
from ddpdoctor.preflight.protocol.ranks import Ranks
from ddpdoctor.preflight.protocol.report import (
    Facts,
    Report,
    Said,
    Verdict,
)
from ddpdoctor.preflight.protocol.validation import unpacked
from ddpdoctor.preflight.protocol.wire import LARGEST, WireError
from ddpdoctor.preflight.situation import Verdicts

MOST_FINDINGS, MOST_SAID = 16, 500
"""Findings of a machine that the others are shown, and characters of each."""

LOOK_EVERY = 0.2
"""Seconds after which it is noticed that the coordinator is gone."""


@dataclass
class Worker:
    """A node among the others.

    Attributes:
        call: The connection to the coordinator.
        seat: This node's place in the job.
        facts: What this node reports of itself.
        listener: What the other nodes dial.
        ranks: Its processes for the collective test.
        verdicts: What the checks of this machine find.
        index: Its own among the nodes; -1 until it is known.
    """

    call: Call
    seat: Seat
    facts: Facts
    listener: Listener
    ranks: Ranks
    verdicts: Verdicts = field(default_factory=Verdicts)
    index: int = -1
    written: str = ""
    """The token of the file that this node has written into the checkpoint folder."""

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
        try:
            return await self._obey(deadline)
        except ValueError as error:
            raise WireError(str(error)) from None
        finally:
            # Whoever plays node 0 may never ask for it.
            if self.written:
                remove(Path(self.facts.folder), self.written)

    async def _obey(self, deadline: float) -> Report:
        link = self.call.link
        while True:
            message = await link.receive(max(0.1, deadline - time.monotonic()), LARGEST)
            order = unpacked(Order, message)
            if order.do == "leave":
                raise refused(unpacked(Welcome, message))
            if order.do == "end" and order.report is not None:
                with contextlib.suppress(WireError):
                    await link.send(Answer())
                return order.report
            try:
                answer = await self._while_connected(self._do(order))
            except OSError as error:
                # Too many open files, say: node 0 reports it to all.
                answer = Answer(failed=_words(error))
            await link.send(answer)

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
            self.listener.admit(order.index, pairs.pair_token(order.token.encode()))
        elif order.do == "dial":
            return Answer(dialled=tuple(await self._dial(order.targets)))
        elif order.do == "verdict":
            return Answer(verdict=await self._verdict(order.limit))
        elif order.do == "settle" and order.needed:
            return Answer(unready=await self.ranks.ready(order.limit))
        elif order.do == "settle":
            await self.ranks.stop()
        elif order.do == "speed" and order.targets and self._allows(order.targets[0]):
            speed = await pairs.speed(order.targets[0], self.listener.token)
            return Answer() if speed is None else Answer(**asdict(speed))
        elif order.do == "folder" and self.facts.folder:
            return await asyncio.to_thread(self._in_folder, Path(self.facts.folder), order)
        elif order.do == "reduce":
            # A rank that waits in vain ends at its own limits and says so; this one is for hung
            # ones.
            orders = [self._of_rank(order, local) for local in range(self.facts.nproc)]
            return Answer(ranks=tuple(await self.ranks.reduce(orders, order.patience)))
        return Answer()

    def _of_rank(self, order: Order, local: int) -> dict[str, Any]:
        return {
            "host": self.seat.host,
            "port": self.seat.port,
            "rank": order.first + local,
            "local_rank": local,
            "world": order.world,
            "limit": order.limit,
            "stage_limit": order.stage_limit,
            "patience": order.patience,
            "stages": "nccl" if order.nccl else "",
            "node_of": order.node_of,
            "soak": order.soak,
        }

    async def _verdict(self, limit: float) -> Verdict:
        """What this machine's own checks found, once they have ended or the time is over."""
        until = time.monotonic() + limit
        while self.verdicts.so_far()[1] and time.monotonic() < until:
            await asyncio.sleep(LOOK_EVERY)
        outcomes, running = self.verdicts.so_far()
        return verdict_of(outcomes, running)

    def _allows(self, target: Target) -> bool:
        """Whether another node may be there: a stranger that plays node 0 names what it likes."""
        return target.port >= 1024 and may_be_node(target.address, self.call.address)

    async def _dial(self, targets: Sequence[Target]) -> list[Dialled]:
        allowed = [each for each in targets if self._allows(each)]
        results = iter(await pairs.dial_all(allowed, self.listener.token))
        not_dialled = Dialled("unreachable", error="no address of another node: not dialled")
        return [next(results) if self._allows(each) else not_dialled for each in targets]

    def _in_folder(self, folder: Path, order: Order) -> Answer:
        """Test whether the checkpoint folder is one on all nodes: one's file is seen by all."""
        if order.action == "write" and not self.written:
            error = write(folder, order.token)
            self.written = "" if error else order.token
            return Answer(error=error)
        if order.action == "remove":
            remove(folder, self.written)
            self.written = ""
            return Answer()
        return Answer(seen=seen(folder, order.token), listing=listing(folder))


def verdict_of(outcomes: Iterable[Outcome], running: Sequence[str]) -> Verdict:
    """The outcomes of one machine's checks, as the others are shown them."""
    said = [(each.check, finding) for each in outcomes for finding in each.findings]
    said = [each for each in said if each[1].severity > Severity.INFO]
    said.sort(key=lambda each: -each[1].severity)
    late = [each.check for each in outcomes if each.status is Status.COULD_NOT_RUN]
    return Verdict(
        tuple(
            Said(check, finding.code, finding.severity.label, finding.message[:MOST_SAID])
            for check, finding in said[:MOST_FINDINGS]
        ),
        (*late, *running),
    )


def _words(error: OSError) -> str:
    if error.errno == errno.EMFILE:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{words_of(error)} (limit {files}: raise it with ulimit -n)"
    return words_of(error)


PREFIX = ".ddpdoctor-check-"

SEEN_WITHIN = 4.0
"""Seconds. NFS clients may answer from their memory for some (``acdirmin`` is 30, but a lookup of a
name that was never asked for goes to the server)."""

SAMPLE = 200


def write(folder: Path, token: str) -> str:
    """Write the file that the others look for; what went wrong, or empty."""
    try:
        with open(folder / f"{PREFIX}{token}", "x") as file:
            file.write(token)
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
            # The user of another node may have another uid here.
            if opening.contents(folder / f"{PREFIX}{token}", 4096, links=True) == token.encode():
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
