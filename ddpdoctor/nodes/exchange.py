"""The supervisor's helper process that links one node's run to the others.

The supervisor starts it once ranks may be on other nodes, so that jobs on one node pay nothing. It
talks to the supervisor in lines of JSON. Everything else goes through the run directory: on the
head this process writes the other nodes' files there, and elsewhere it reads them. If it fails, the
run continues, and each node is judged alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import zmq

from ddpdoctor.nodes import hang_examination, store
from ddpdoctor.nodes.alignment import dumped, parsed
from ddpdoctor.nodes.debug_relay import DebugRelay
from ddpdoctor.nodes.head import SILENT_TIMEOUT, Head, Invitation
from ddpdoctor.nodes.member import Member
from ddpdoctor.nodes.messages import Began
from ddpdoctor.run.journal import Journal
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.base import Part, as_json, dataclass, document, json_line
from ddpdoctor.run.records.process import StoreRecord
from ddpdoctor.run.records.supervisor import HeadRecord, NoCoreRecord, RankEvidence
from ddpdoctor.run.records.typed_json import decoder, required
from ddpdoctor.run.snapshot import Run
from ddpdoctor.run.status import Phase
from ddpdoctor.stacks.capture import capture

LOOK_EVERY = 0.5  # Seconds between two reads of the job's store
END_TIMEOUT = 3.0  # Seconds to send the last records
FAILED_TIMEOUT = 8.0  # The same if the job has failed, perhaps because the head ended
LEAVE_TIMEOUT = 4.0  # Seconds for which the head waits for the last records of other nodes
MAX_FAILURES = 20
LOG = "nodes.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(Part):
    """The supervisor's knowledge of an attempt, in a line to this process."""

    restart: int
    world_size: int
    time: int  # Time at which its first rank joined the process group. 0 before that.
    leads: bool  # Whether rank 0 is on this node
    store: StoreRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class State(Part):
    """The state of the link, in a line to the supervisor."""

    head: bool = False  # Whether this node is the head
    linked: bool = False  # Whether the head judges this node's ranks
    host: str = ""  # The head's host
    directory: str = ""  # The head's run directory
    hangs: bool = False  # Whether the head has ended its part of the job, which hangs


# -- questions of the head about the ranks of this node


class Answers:
    """Answers questions about the ranks of a run. ``launcher`` is the process id of its command."""

    def __init__(self, directory: Path, launcher: int) -> None:
        self._directory = directory
        self._launcher = launcher
        self._lock = threading.Lock()
        self._reader: RunReader | None = None
        self._evidence: dict[int, RankEvidence] = {}
        self._seen: dict[int, hang_examination.Seen] = {}

    def answer(self, what: str, arguments: Any) -> Any:
        """Return the answer as JSON. None if the question is unknown."""
        with self._lock:
            if self._reader is None:
                self._reader = RunReader(self._directory, own=True)
            run = self._reader.snapshot()
            if what == "examine":
                return self._examine(run, int(arguments["number"]))
            if what == "stacks":
                return self._stacks(run, arguments)
        return None

    def _examine(self, run: Run, number: int) -> Any:
        waiting = [
            rank.rank
            for rank in run.last
            if rank.status is not None and rank.status.phase in (Phase.WAIT, Phase.BACKWARD)
        ]
        since = {rank.rank: rank.status.since for rank in run.last if rank.status is not None}
        lost = {
            each.rank: each.lost / 1e9
            for each in run.supervisor.of(NoCoreRecord)
            if since.get(each.rank) == each.since
        }
        found = hang_examination.examine(
            run, number, waiting, self._evidence, self._seen, self._launcher, lost
        )
        self._evidence = {each.rank: each for each in found}
        return [parsed(json_line(as_json(each))) for each in found]

    def _stacks(self, run: Run, arguments: Any) -> Any:
        patience = min(30.0, float(arguments.get("patience", 2.0)))
        wanted = {name: arguments.get(name) is True for name in ("native", "variables")}
        found = capture(run, arguments.get("ranks"), patience, **wanted)
        return [document(each) for each in found]


class Exchange:
    """Finds the other nodes of a job, and exchanges records with them.

    ``launcher`` is the pid of the job's command, ``debug_nodes`` as of :class:`DebugRelay`.
    """

    def __init__(
        self, directory: Path, journal_bytes: int, launcher: int, *, debug_nodes: bool
    ) -> None:
        self._directory = directory
        self._journal_bytes = journal_bytes
        self._identity = b"n" + secrets.token_bytes(15)
        self._answers = Answers(directory, launcher)
        self._relay = DebugRelay(directory, admits=debug_nodes)
        self._head: Head | None = None
        self._member: Member | None = None
        self._attempt: Attempt | None = None
        self._published: StoreRecord | None = None
        self._due = 0.0
        self._announced: State | None = None
        self._input = b""
        self._journal: Journal | None = None
        self.ended = False

    # -- the supervisor

    def read(self) -> None:
        """Read the supervisor's lines. Exit when the supervisor ends."""
        data = os.read(0, 1 << 16)
        if not data:
            raise SystemExit
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            found = parsed(line) or {}
            if "store" in found:
                self._begin(required(Attempt, found))
            elif "end" in found:
                if found.get("hangs") and self._head is not None:
                    self._head.end_hang()
                status = found["end"]
                began = time.monotonic()
                if self._member is not None:
                    self._member.finish(status, FAILED_TIMEOUT if status else END_TIMEOUT)
                    self._tell()
                while self._head is not None and self._head.waits_for:
                    passed = time.monotonic() - began
                    # If the job failed, a lost node may be the reason.
                    if passed > LEAVE_TIMEOUT and (
                        status == 0 or passed > SILENT_TIMEOUT or not self._head.doubts
                    ):
                        break
                    self.turn(0.05)
                self.ended = True

    def _begin(self, attempt: Attempt) -> None:
        self._attempt = attempt
        began = Began(restart=attempt.restart, world_size=attempt.world_size, time=attempt.time)
        if attempt.leads and self._head is None and not self._is_linked:
            self._head = Head(self._directory, self._journal_bytes, attempt.store.host, self._relay)
        if self._head is not None and attempt.time:
            self._head.began(began)
        elif self._head is None and self._member is None:
            self._member = Member(
                self._directory, self._identity, self._answers.answer, self._relay
            )
        if self._member is not None and attempt.time:
            self._member.began(began)
        self._due = 0.0

    def _tell(self) -> None:
        """Send the state of the link to the supervisor, and record it."""
        head = self._member.head if self._member is not None else None
        state = State(
            head=self._head is not None,
            linked=head is not None,
            host=head.host[:255] if head is not None else "",
            directory=head.directory[:4096] if head is not None else "",
            hangs=self._member is not None and self._member.hangs,
        )
        if state == self._announced:
            return
        before, self._announced = self._announced, state
        os.write(1, dumped(as_json(state)) + b"\n")
        if state.linked or (before is not None and before.linked):
            found = state if state.linked else before
            assert found is not None
            if self._journal is None:
                self._journal = Journal(str(self._directory / "head.jsonl"), 1 << 20)
            record = HeadRecord(
                time=time.time_ns(),
                state="linked" if state.linked else "lost",
                host=found.host,
                directory=found.directory,
            )
            self._journal.write([record])

    # -- the job's store

    @property
    def _is_linked(self) -> bool:
        return self._member is not None and self._member.head is not None

    def _meet(self) -> None:
        """Publish the head's address, or look for it."""
        attempt = self._attempt
        if attempt is None or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + LOOK_EVERY
        # The key lacks the round, because each torchrun counts restarts by itself.
        key = f"ddpdoctor/{attempt.store.job}"
        invitation = self._head.invitation if self._head is not None else None
        if invitation is None and attempt.leads and self._is_linked and self._member is not None:
            # Rank 0 of this attempt is on another node than before: keep the head.
            invitation = self._member.invitation
        if invitation is not None:
            if self._published != attempt.store:
                store.write(attempt.store, key, dumped(as_json(invitation)))
                self._published = attempt.store
        elif self._member is not None and self._member.looks_for_head:
            found = parsed(store.read(attempt.store, key) or b"")
            if found is not None:
                self._member.invite(decoder(Invitation)(found))

    # -- the loop

    def turn(self, seconds: float) -> None:
        """Wait for events, and handle them."""
        poller = zmq.Poller()
        if not self.ended:
            poller.register(0, zmq.POLLIN)
        for each in (self._head, self._member, self._relay):
            if each is not None:
                each.register(poller)
        ready = dict(poller.poll(int(seconds * 1000)))
        if self._head is not None:
            self._head.receive()
            self._head.accept()
            self._head.tick()
        if self._member is not None:
            self._member.receive()
            self._member.tick()
        self._relay.turn()
        if 0 in ready and seconds > 0.05:
            self.read()
        with contextlib.suppress(OSError):
            self._meet()
        self._tell()

    def run(self) -> None:
        """Exchange records until the job has ended."""
        failures = 0
        while not self.ended:
            wait = self._member.seconds_to_wait if self._member is not None else 0.25
            try:
                self.turn(max(wait, 0.06))
            except Exception:
                failures += 1
                traceback.print_exc()
                if failures >= MAX_FAILURES:
                    raise
                time.sleep(0.2)

    def close(self) -> None:
        """Close the links."""
        if self._published is not None:
            store.forget(self._published)
        self._relay.close()
        if self._head is not None:
            self._head.close(killed=not self.ended)
        if self._member is not None:
            self._member.close()
        if self._journal is not None:
            self._journal.close()


def main(argv: list[str]) -> None:
    """Run the exchange: ``DIRECTORY JOURNAL_BYTES LAUNCHER [--debug-nodes]``."""
    directory, journal_bytes, launcher = Path(argv[0]), int(argv[1]), int(argv[2])
    # Keep errors of this process out of the job's terminal.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(OSError):
        os.dup2(os.open(directory / LOG, flags, 0o600), 2)
    exchange = Exchange(directory, journal_bytes, launcher, debug_nodes="--debug-nodes" in argv)
    try:
        exchange.run()
    except (SystemExit, BrokenPipeError):
        return
    finally:
        exchange.close()
