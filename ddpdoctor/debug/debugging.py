"""The debugger's side of a run: its ports, its entries in launch.json, and the words about them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.faults import Faults
from ddpdoctor.core.job import DEFAULT_PORT, Command
from ddpdoctor.core.ranks import named
from ddpdoctor.core.working_directory import relative
from ddpdoctor.debug import debug_ports
from ddpdoctor.debug.editor import Editor
from ddpdoctor.debug.partial_stops import PartialStops
from ddpdoctor.run.environment import DEBUG
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.supervisor import DebugRecord
from ddpdoctor.system import peers

if TYPE_CHECKING:
    from ddpdoctor.debug.gateway import Gateway
    from ddpdoctor.run.snapshot import Run

ASIDE = 1000
"""How far the default ports move for a script that uses debugpy itself."""

_NCCL_HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"

MOST_RANKS = 16
"""Ports for a command whose number of ranks is unknown."""


class Speaker(Protocol):
    """Where words go."""

    @property
    def faults(self) -> Faults:
        """What failed in ddpdoctor itself."""

    def note(self, text: str) -> None:
        """Say what ddpdoctor does; not with ``--quiet``."""

    def say(self, text: str) -> None:
        """Say what a person has to act on."""


class Debugging:
    """What the supervisor needs of the debugger.

    Args:
        command: The job.
        speaker: Says where ranks wait.

    Raises:
        DoctorError: No block of ports is free, or ``--workspace`` is no directory.
    """

    def __init__(self, command: Command, speaker: Speaker) -> None:
        own = command.own
        self._command = command
        self._speaker = speaker
        _check_gate(command)
        _check_host(command)
        count = command.local_ranks or MOST_RANKS
        first = own.debug_port
        self._own_debugpy = first == DEFAULT_PORT and _listens_itself(command)
        if self._own_debugpy:
            first += ASIDE
        self._editor = Editor(own, command.script)
        self._ports = debug_ports.bind_block(own.debug_host, first, count)
        self._doors: debug_ports.Doors | None = None
        self._gateway: Gateway | None = None
        self._stops = PartialStops()
        self._written: dict[int, int] = {}
        self._expects = False
        self.stopped = False
        """The debugger was stopped, and with it the job is to end."""

    def environment(self) -> dict[str, str]:
        """By what the ranks know that a debugger may come."""
        words = ["attach"]
        if self._command.own.wait_for_attach is not None:
            words.append("gate")
            if not self._command.one_node:
                # The ranks of other nodes do not learn when one of these is in the debugger.
                words.append("lift")
        if self._command.own.debug_on_error:
            words.append("error")
        environment = {DEBUG: ",".join(words)}
        if len(words) > 1 and _NCCL_HEARTBEAT not in os.environ:
            # Its monitor ends a process that was quiet for long, and its timeout cannot be lifted.
            environment[_NCCL_HEARTBEAT] = str(7 * 24 * 3600)
        return environment

    def manifest(self) -> JsonObject:
        """What other commands have to know of it."""
        workspace = self._editor.workspace
        return {
            "host": self._ports.host,
            "ports": list(self._ports.numbers),
            "sockets": [] if self._doors is None else self._doors.paths,
            "workspace": None if workspace is None else str(workspace),
            "label": self._editor.label,
        }

    def open(self, directory: Path) -> None:
        """Make what the ranks connect to.

        Raises:
            OSError: The control socket cannot be made.
        """
        self._doors = debug_ports.Doors(directory, len(self._ports.listeners))

    def announce(self, directory: Path) -> None:
        """Write launch.json, and say what there is; the job does not wait for it."""
        port = self._ports.numbers[0]
        self._speaker.faults.guarded("launch.json", self._editor.claim, directory, port)
        if self._command.one_node and self._command.local_ranks is not None:
            self._write(dict(enumerate(self._ports.numbers)))
        self._announce()

    def start(self, news: Callable[[], None]) -> None:
        """Serve; ``news`` is called, from another thread, when :meth:`look` has something to do.

        Ranks that came before wait in the sockets: the job does not wait for asyncio's import.
        """
        from ddpdoctor.debug.gateway import Gateway

        assert self._doors is not None
        own = self._command.own
        self._gateway = Gateway(
            self._ports,
            self._doors,
            unidentified=own.debug_unidentified,
            gate=own.wait_for_attach,
            ends_job=own.stop_with_debugger,
            hold_errors=own.debug_on_error,
            expected=self._command.local_ranks,
        )
        self._gateway.start(news)

    def stop(self) -> None:
        """The run is over."""
        if self._gateway is not None:
            self._gateway.stop()
        self._ports.close()
        if self._doors is not None:
            self._doors.close()
        self._speaker.faults.guarded("launch.json", self._restore_file)

    def _announce(self) -> None:
        own, numbers = self._command.own, self._ports.numbers
        if self._own_debugpy:
            self._speaker.note(
                f"{self._command.script} uses debugpy itself; ddpdoctor's debug ports are "
                f"{_span(numbers)}"
            )
        elif self._ports.moved:
            last = own.debug_port + len(numbers) - 1
            taken = (
                f"port {last} is"
                if last == own.debug_port
                else "not all of ports " + (f"{own.debug_port}-{last} are")
            )
            state = "taken" if last == own.debug_port else "free"
            self._speaker.note(f"{taken} {state}; debuggers attach at {_span(numbers)} instead")
            self._warn_of_strangers(own.debug_port, last)
        if own.debug_unidentified:
            self._speaker.say(
                "warning: --debug-unidentified lets anyone on another machine who can reach "
                f"{self._ports.host} run code as you, in your job, without a password; on a "
                "network that is not yours alone, use 127.0.0.1 and an SSH tunnel (`ddpdoctor "
                "attach --tunnel` prints it)"
            )
        if own.wait_for_attach is not None:
            self._speaker.say("waiting for the ranks to start; each is held before its first line")

    def _warn_of_strangers(self, first: int, last: int) -> None:
        """An editor trusts what it attaches to: a stranger at the usual port could answer it."""
        for port in range(first, last + 1):
            uid = peers.listener(port)
            if uid is not None and not peers.is_trusted(uid):
                self._speaker.say(
                    f"warning: port {port} is held by another user (uid {uid}): do not attach there"
                )
                return

    def look(self) -> list[DebugRecord]:
        """Take in what has happened, say it, and return its records for the journal."""
        if self._gateway is None:
            return []
        records = self._gateway.take()
        for state in ("attached", "detached"):
            ranks = [each.rank for each in records if each.state == state and each.rank is not None]
            if ranks:
                verb = "attached to" if state == "attached" else "detached from"
                self._speaker.note(f"debugger {verb} {named(ranks)}")
        for record in records:
            if record.state != "fault":
                self._say(record)
        if any(record.state == "ready" for record in records):
            self._write(self._gateway.ranks)
        return records

    def look_at(self, run: Run) -> None:
        """Say which ranks wait for one that stands in the debugger."""
        stops = () if self._gateway is None else self._gateway.stops
        if text := self._stops.look(run, stops):
            self._speaker.say(text)

    def _say(self, record: DebugRecord) -> None:
        state, rank = record.state, record.rank
        where = f"{relative(record.path)}:{record.line}"
        if state == "waits" and rank is not None:
            name = self._editor.configuration(rank)
            why = "is held by an uncaught exception" if record.why == "error" else "waits"
            self._speaker.say(f'rank {rank} {why} at {where}; attach with F5 "{name}"')
        elif state == "expects" and not self._expects:
            self._expects = True
            self._speaker.say(
                f"{where} calls breakpoint(): collectives wait for at least an hour in this run"
            )
        elif state == "no port":
            self._speaker.say(
                f"rank {rank} wants a debugger, but all {len(self._ports.numbers)} ports "
                "are taken by other ranks: it goes on"
            )
        elif state == "listening" and self._gateway is not None:
            every = len(record.ranks) == len(self._gateway.ranks)
            who = "" if every else f" to {named(record.ranks)}"
            self._speaker.say(
                f"all ranks listening on {self._ports.host}:{_span(self._ports.numbers)}; they "
                f'start when a debugger is attached{who}: F5 "{self._editor.compound}"'
            )
        elif state == "stop":
            self.stopped = True
        elif state == "refused":
            if record.uid is not None:
                who = f"uid {record.uid}"
            else:
                who = f"a client whose user is not known ({record.why})"
            self._speaker.say(f"refused: {who} at {record.door}")
        elif state == "flooded":
            self._speaker.say(debug_ports.flooded(record))
        elif state == "broken":
            self._speaker.say(f"warning: the debug ports are closed: {record.error}")

    def _write(self, ports: dict[int, int]) -> None:
        if ports == self._written:
            return
        self._written = ports
        self._speaker.faults.guarded("launch.json", self._write_file, ports)

    def _write_file(self, ports: dict[int, int]) -> None:
        try:
            fresh = self._editor.write(self._ports.host, ports)
            if fresh:
                self._speaker.note(
                    f"wrote {relative(fresh)}, for F5 in VS Code; --no-vscode, or no-vscode = true "
                    "under [tool.ddpdoctor.run] in pyproject.toml, switches this off for good"
                )
        except DoctorError as error:
            self._speaker.note(f"launch.json is left as it is: {error}")

    def _restore_file(self) -> None:
        try:
            self._editor.restore()
        except DoctorError as error:
            self._speaker.note(f"launch.json is left as it is: {error}")


def _listens_itself(command: Command) -> bool:
    """Whether the script opens its own debug ports, which must find them free."""
    scripts = [word for word in command.argv if os.path.basename(word) == command.script]
    try:
        return any("debugpy" in Path(script).read_text(errors="replace") for script in scripts)
    except OSError:
        return False


def _check_gate(command: Command) -> None:
    """Refuse to wait for ranks that there will not be."""
    wanted, count = command.own.wait_for_attach, command.local_ranks
    if not wanted or not command.one_node or count is None:
        return
    missing = [rank for rank in wanted if rank >= count]
    if missing:
        raise DoctorError(
            f"--wait-for-attach: there will be no {named(missing)}",
            f"this job has {named(range(count))}",
        )


def _check_host(command: Command) -> None:
    """Refuse ports for clients whose user is unknown, unless they are asked for."""
    own = command.own
    if not own.debug_unidentified and not debug_ports.is_loopback(own.debug_host):
        raise DoctorError(
            f"--debug-host {own.debug_host} is reachable from other machines, and nothing "
            "identifies the users of their clients",
            "use 127.0.0.1 and an SSH tunnel (`ddpdoctor attach --tunnel` prints it), or add "
            "--debug-unidentified to admit anyone who can reach that address",
        )


def _span(numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    return str(ordered[0]) if len(ordered) == 1 else f"{ordered[0]}-{ordered[-1]}"
