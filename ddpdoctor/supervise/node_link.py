"""The supervisor's part of a run on several nodes: start the exchange, and follow its link.

On a node whose records go to the head, findings are left to the head, which sees all ranks. The
node reports them itself while there is no link.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from ddpdoctor.core.commands import in_own_process
from ddpdoctor.nodes.alignment import dumped, parsed
from ddpdoctor.nodes.exchange import Attempt, State
from ddpdoctor.run.records.base import as_json
from ddpdoctor.run.records.process import StoreRecord
from ddpdoctor.run.records.typed_json import decoder
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.stacks.capture import read_declared
from ddpdoctor.system.proc import readable

JOIN_TIME = 0.5  # Seconds for all ranks of this node to join a process group

MEETING = "nodes"  # The file in a run directory at which nodes meet

LINK_TIME = 10.0  # Seconds for which findings wait for the first link to the head
END_TIMEOUT = 12.0  # Seconds for the exchange to end


class NodeLink:
    """Follows whether the job has ranks on other nodes, and links the run to theirs.

    ``chosen`` is the directory of ``--run-dir``, which may be on a file system that nodes share.
    """

    def __init__(
        self,
        directory: Path,
        journal_bytes: int,
        note: Callable[[str], None],
        *,
        debug_nodes: bool = False,
        chosen: str | None = None,
    ) -> None:
        self._directory = directory
        self._journal_bytes = journal_bytes
        self._note = note
        self._debug_nodes = debug_nodes
        self._meeting = (
            StoreRecord(file=os.path.abspath(os.path.join(chosen, MEETING)))
            if chosen is not None
            else None
        )
        """The meeting point of nodes whose ranks have no store that other processes can use."""
        self._launcher = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._output = b""
        self._sent: set[int] = set()
        self._state = State()
        self.judge = ""
        """The host of the head that judged this node's ranks until the end. Empty if none did."""
        self._waits_until = 0.0

    def begin(self, launcher: int) -> None:
        """Note that the job's command has started as this process."""
        self._launcher = launcher

    @property
    def pids(self) -> set[int]:
        """The pid of the exchange, which is not part of the job."""
        return {self._process.pid} if self._process is not None else set()

    @property
    def leaves_to_head(self) -> bool:
        """Whether the head reports the findings of this node's ranks, or may do so soon."""
        if self._process is None or self._state.head:
            return False
        return self._state.linked or time.monotonic() < self._waits_until

    @property
    def job_hangs(self) -> bool:
        """Whether the head has ended its part of the job because it hangs."""
        return self._state.hangs

    def look(self, run: Run) -> None:
        """Process a snapshot of the run."""
        restart = run.restarts[-1]
        own = [rank for rank in run.attempt(restart) if not rank.elsewhere]
        store = next(filter(None, (rank.records.first(StoreRecord) for rank in own)), None)
        store = store or (self._meeting if own else None)
        if not run.ranks and self._process is None:
            self._look_at_start()
        elif store is not None and restart not in self._sent and _has_others(own, store, run.taken):
            if self._process is None or not (self._sent or self._state.linked):
                self._waits_until = time.monotonic() + LINK_TIME
            self._sent.add(restart)
            self._send_joined(restart, own, store)
        elif self._process is not None and own and len(own) == own[0].opened.world_size:
            # The last ranks joined late, and all are on this node.
            self.close()
        if not self._read():
            self._change(State())

    def _send_joined(self, restart: int, own: list[Rank], store: StoreRecord) -> None:
        # The journals of other ranks may not exist yet.
        began = min(rank.opened.time for rank in own if rank.opened.time)
        world_size = max(rank.opened.world_size for rank in own)
        leads = any(rank.rank == 0 for rank in own)
        self._send(restart, world_size, began, store, leads=leads)

    def _look_at_start(self) -> None:
        """Check the processes that will become ranks, because one may never join the others."""
        declared = [each for each in read_declared(self._directory) if each.store is not None]
        for each in declared[-1:]:
            store = each.store
            if store is not None and store.local_world_size <= len(declared) < each.world_size:
                leads = any(one.rank == 0 for one in declared)
                self._send(each.restart, each.world_size, 0, store, leads=leads)

    def _send(
        self, restart: int, world_size: int, began: int, store: StoreRecord, *, leads: bool
    ) -> None:
        if self._process is None:
            self._start()
        attempt = Attempt(
            restart=restart, world_size=world_size, time=began, leads=leads, store=store
        )
        self._write(dumped(as_json(attempt) | {"store": as_json(store)}))

    def _start(self) -> None:
        words = [str(self._directory), str(self._journal_bytes), str(self._launcher)]
        words += ["--debug-nodes"] if self._debug_nodes else []
        self._process = subprocess.Popen(
            in_own_process(*words, module="ddpdoctor.nodes.exchange"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def _write(self, line: bytes) -> None:
        process = self._process
        if process is not None and process.stdin is not None:
            # If the exchange has ended, each node is judged alone.
            with contextlib.suppress(OSError):
                process.stdin.write(line + b"\n")
                process.stdin.flush()

    def _read(self) -> bool:
        """Read the exchange's messages about the link. Return False once it has ended."""
        process = self._process
        if process is None or process.stdout is None:
            return False
        data = process.stdout.read(1 << 16)
        if data:
            *lines, self._output = (self._output + data).split(b"\n")
            for line in lines:
                self._change(decoder(State)(parsed(line) or {}))
        return data != b""

    def _change(self, state: State) -> None:
        before, self._state = self._state, state
        self.judge = state.host
        if state.linked and not before.linked:
            self._note(
                f"{state.host} judges this node's ranks together with all others; its records are "
                f"in {state.directory}"
            )
        elif before.linked and not state.linked:
            self._note(f"lost the link to {before.host}: this node's ranks are judged alone")

    def end(self, status: int | None, *, hangs: bool = False) -> None:
        """Let the exchange send or receive the last records, and wait for its end.

        ``hangs`` if the command was ended because the job hangs.
        """
        process = self._process
        if process is None:
            return
        self._write(dumped({"end": status, "hangs": hangs}))
        if process.stdout is not None:
            deadline = time.monotonic() + END_TIMEOUT
            while time.monotonic() < deadline and self._read():
                readable([process.stdout.fileno()], 0.05)

    def close(self) -> None:
        """End the exchange."""
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        if process.poll() is None:
            process.kill()
            process.wait()


def _has_others(own: list[Rank], store: StoreRecord, now: int) -> bool:
    """Return whether some ranks of the attempt are known to be on other nodes."""
    world_size = max(rank.opened.world_size for rank in own)
    if store.local_world_size:
        return store.local_world_size < world_size
    newest = max(rank.opened.time for rank in own)
    return len(own) < world_size and now - newest > JOIN_TIME * 1e9
