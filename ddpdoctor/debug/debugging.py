"""The debugger's part of a run: its ports, its entries in launch.json, and its messages."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ddpdoctor.core import opening
from ddpdoctor.core.commands import in_own_process
from ddpdoctor.core.errors import DoctorError, Faults
from ddpdoctor.core.formatting import duration, named, shown
from ddpdoctor.core.job import DEFAULT_PORT, Command, OwnOptions
from ddpdoctor.core.opening import relative_path, relative_place
from ddpdoctor.core.user_code import Location
from ddpdoctor.debug import gateway, vscode_configurations
from ddpdoctor.debug.clients import Project
from ddpdoctor.debug.gateway import Gateway
from ddpdoctor.debug.gateway_ranks import Stop, waits_for_others
from ddpdoctor.debug.vscode_files import (
    FOLDER,
    LAUNCH,
    PREFIX,
    current_directory,
    edit,
    find_workspace,
    job_workspace,
    locked,
    state_file,
)
from ddpdoctor.run import rundir
from ddpdoctor.run.names import DEBUG
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.supervisor import DebugRecord
from ddpdoctor.run.reported import Event, Withdrawn, in_words
from ddpdoctor.run.status import Status
from ddpdoctor.system import peers

if TYPE_CHECKING:
    from ddpdoctor.run.snapshot import Run

# -- the prompt that --wait-in-terminal opens in the terminal of the run

_STDIN = 0
_END_TIMEOUT = 5.0  # Seconds for the prompt to end once the job has ended


class OwnTerminal:
    """Lend the terminal to ``ddpdoctor debug`` while ranks wait for a debugger.

    The prompt has its own process group, so Ctrl-C there does not reach the job.
    """

    def __init__(self) -> None:
        self._prompt: subprocess.Popen[bytes] | None = None
        self._settings: list[Any] = []
        self._known: list[object] = []  # The waits for which the prompt was opened

    @property
    def is_open(self) -> bool:
        """Whether the prompt has the terminal."""
        return self._prompt is not None

    def update(self, directory: Path, waits: list[object]) -> None:
        """Open the prompt if ranks wait. Take the terminal back if the prompt has ended.

        ``waits`` has an object for each waiting rank, the same for the whole wait.
        """
        if self._prompt is not None and self._prompt.poll() is not None:
            self._take_back()
        known = {id(each) for each in self._known}
        if self._prompt is None and any(id(each) not in known for each in waits):
            self._known = waits
            self._open(directory)

    def _open(self, directory: Path) -> None:
        try:
            name = os.ttyname(_STDIN)
            if os.tcgetpgrp(_STDIN) != os.getpgrp():
                # A shell has moved this job to the background.
                return
            self._settings = termios.tcgetattr(_STDIN)
            with open(name, "wb", buffering=0) as output:
                self._prompt = subprocess.Popen(
                    in_own_process("debug", str(directory)),
                    stdout=output,
                    stderr=output,
                    preexec_fn=_take_terminal,
                )
        except (OSError, termios.error, subprocess.SubprocessError):
            # Without a terminal, users attach as they would without the option.
            return

    def _take_back(self) -> None:
        self._prompt = None
        _give_terminal_to(os.getpgrp())
        with contextlib.suppress(termios.error):
            termios.tcsetattr(_STDIN, termios.TCSADRAIN, self._settings)

    def close(self) -> None:
        """End the prompt."""
        if self._prompt is not None:
            self._prompt.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._prompt.wait(_END_TIMEOUT)
            self._take_back()


def _take_terminal() -> None:
    os.setpgid(0, 0)
    _give_terminal_to(os.getpid())
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _give_terminal_to(group: int) -> None:
    """Make a process group of this session the terminal's foreground group."""
    # Otherwise this call would stop a process in the background.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    with contextlib.suppress(OSError):
        os.tcsetpgrp(_STDIN, group)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- the run's entries in launch.json, which several live runs may share


class Editor:
    """Write the attach configurations of one run.

    The first live run of a workspace has the plain names. The names of all others contain their
    script and port.

    Raises:
        DoctorError: The chosen workspace is not a directory.
    """

    def __init__(self, own: OwnOptions, script: str) -> None:
        self.workspace: Path | None = None
        if not own.no_vscode:
            self.workspace = find_workspace(current_directory(), own.workspace)
        self._tracked: bool | None = None
        self._before: str | None = None
        self._after: str | None = None
        self._path_map = own.path_map
        self._script = script
        self.label = ""
        """Part of the names that distinguishes this run. Empty for the first live run."""

    def claim(self, directory: Path, port: int) -> None:
        """Choose the label, and record it for the runs that start later."""
        if self.workspace is None:
            return
        try:
            with locked(self.workspace):
                claims = _claims(self.workspace)
                if any(claim["label"] == "" for claim in claims):
                    self.label = f"{self._script} :{port}"
                claims.append({"label": self.label, "directory": str(directory)})
                rundir.put(state_file(self.workspace, "json"), json.dumps(claims).encode())
        except (OSError, DoctorError):
            # Without a directory for the record, use the plain names.
            return

    def write(self, host: str, ports: dict[int, int], nodes: dict[int, str]) -> str:
        """Write the configurations of these ranks into launch.json, by global rank.

        Returns:
            The file, if it is new or had no entries of ddpdoctor, else an empty string.

        Raises:
            DoctorError: The file cannot be changed. It is unchanged.
        """
        if self.workspace is None:
            return ""
        points = [
            vscode_configurations.AttachPoint(
                rank, gateway.reachable(host), port, nodes.get(rank, "")
            )
            for rank, port in sorted(ports.items())
        ]
        others = {claim["label"] for claim in _claims(self.workspace)} - {self.label}
        text = _text(self.workspace)
        if self._tracked is None:
            self._tracked = _tracked_by_git(self.workspace)
            self._before = text if self._tracked else None
        vscode_configurations.update_launch(
            self.workspace,
            points,
            label=self.label,
            others=others,
            mappings=[vscode_configurations.PathMapping(*pair) for pair in self._path_map],
        )
        self._after = _text(self.workspace)
        fresh = text is None or PREFIX not in text
        return str(self.workspace / FOLDER / LAUNCH) if fresh else ""

    def restore(self) -> None:
        """Restore a launch.json that git tracks, so that a run leaves nothing to commit.

        Leave it unchanged if others have changed it meanwhile.

        Raises:
            DoctorError: The file cannot be changed. It is unchanged.
        """
        before, after = self._before, self._after
        if self.workspace is not None and before is not None:
            edit(self.workspace, {LAUNCH: lambda text: before if text == after else text})


def _text(workspace: Path) -> str | None:
    try:
        return (workspace / FOLDER / LAUNCH).read_bytes().decode()
    except (OSError, ValueError):
        return None


def _tracked_by_git(workspace: Path) -> bool:
    """Return whether git tracks the workspace's launch.json."""
    path = Path(FOLDER, LAUNCH)
    if not (workspace / path).exists() or not (workspace / ".git").exists():
        return False
    command = ["git", "-C", str(workspace), "ls-files", "--error-unmatch", str(path)]
    try:
        return subprocess.run(command, capture_output=True, timeout=2).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def _claims(workspace: Path) -> list[dict[str, Any]]:
    """Return the live runs that have entries in this workspace's launch.json."""
    try:
        claims = json.loads(state_file(workspace, "json").read_text())
        return [claim for claim in claims if rundir.is_live(Path(claim["directory"]))]
    except (OSError, ValueError, KeyError, TypeError):
        return []


# -- partial stops: some ranks are held by the debugger, the others wait for them in a collective


ARRIVAL_TIMEOUT = 2.0  # Seconds for all ranks to reach the same breakpoint

MIN_WAIT_STEPS = 3
"""Minimum length of a phase, in steps, to count as a wait: backward is slow on a slow machine."""


class PartialStops:
    """Report each partial stop once."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._last: tuple[frozenset[int], frozenset[int]] | None = None
        self._reported: tuple[frozenset[int], frozenset[int]] | None = None

    def check(self, run: Run, stops: Sequence[Stop]) -> str:
        """Return a sentence about a new partial stop, or an empty string."""
        held = frozenset(stop.rank for stop in stops)
        waiting = [
            rank.status
            for rank in run.last
            if rank.status is not None
            and rank.rank not in held
            and waits_for_others(rank.status, ARRIVAL_TIMEOUT, MIN_WAIT_STEPS)
        ]
        if not held:
            self._since = None
            if not waiting:
                # While ranks wait, it is the same stop: the user steps through the lines.
                self._reported = None
            return ""
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since < ARRIVAL_TIMEOUT:
            return ""
        before, self._last = self._last, None
        now_held = (held, frozenset(status.rank for status in waiting))
        if not waiting or now_held == self._reported:
            return ""
        if now_held != before:
            # Ranks arrive one by one. Report when no more of them join.
            self._last = now_held
            return ""
        self._reported = now_held
        return _stop_sentence(run, stops, waiting)


def _stop_sentence(run: Run, stops: Sequence[Stop], waiting: Sequence[Status]) -> str:
    ranks = {stop.rank for stop in stops}
    places = {relative_place(stop.place) for stop in stops} - {""}
    at = f" at {places.pop()}" if len(places) == 1 else ""
    verb, them = ("is", "it") if len(ranks) == 1 else ("are", "them")
    wait = "waits" if len(waiting) == 1 else "wait"
    where = ""
    operations = {(status.collective or status.phase.label, status.site) for status in waiting}
    if len(operations) == 1:
        what, site = operations.pop()
        where = f" in {what}" + (f" ({relative_place(site)})" if site else "")
    sentence = (
        f"{named(ranks)} {verb} held by the debugger{at}; "
        f"{named(status.rank for status in waiting)} {wait} for {them}{where} and will "
        "stop at breakpoints after that"
    )
    # gloo in some torch versions keeps its group's timeout, which cannot be lifted.
    kept = [rank.opened.kept_timeout for rank in run.last]
    timeouts = [each for each in kept if each is not None]
    if timeouts:
        sentence += (
            f"; this torch's gloo keeps its timeout of {duration(min(timeouts))}, after which they "
            "fail: a job that is started with --wait-for-attach has none"
        )
    return sentence


# -- the debugger's part of the supervisor


OWN_DEBUGPY_OFFSET = 1000  # Added to the default ports for a script that uses debugpy itself

_NCCL_HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"

DEFAULT_PORTS = 16  # Number of ports for a command whose number of ranks is unknown


class Speaker(Protocol):
    """The output to the user."""

    @property
    def faults(self) -> Faults:
        """Errors in ddpdoctor itself."""

    def note(self, text: str) -> None:
        """Print an action of ddpdoctor. Print nothing with ``--quiet``."""

    def say(self, text: str) -> None:
        """Print something that requires the user's action."""


class Debugging:
    """The debugger's part of the supervisor.

    Raises:
        DoctorError: No block of ports is free, or ``--workspace`` is not a directory.
    """

    def __init__(self, command: Command, speaker: Speaker) -> None:
        own = command.own
        self._command = command
        self._speaker = speaker
        _check_gate(command)
        _check_host(command)
        count = command.local_ranks or DEFAULT_PORTS
        first = own.debug_port
        self._own_debugpy = first == DEFAULT_PORT and _uses_debugpy(command)
        if self._own_debugpy:
            first += OWN_DEBUGPY_OFFSET
        self._editor = Editor(own, command.script)
        self._ports = gateway.with_root(gateway.bind_block(own.debug_host, first, count))
        self._sockets: gateway.RunSockets | None = None
        self._gateway: Gateway | None = None
        self._stops = PartialStops()
        self._written: tuple[dict[int, int], dict[int, str]] = {}, {}
        self._directory: Path | None = None
        self._others_wait: dict[int, int] = {}
        """Start of each reported wait of a rank on another node, in Unix nanoseconds."""
        self._expects = False
        self._terminal = OwnTerminal() if own.wait_in_terminal else None
        self.stopped = False  # The debugger was stopped, which ends the job

    def environment(self) -> dict[str, str]:
        """Return the environment variables that prepare the ranks for a debugger."""
        words = ["attach"]
        if self._command.own.wait_for_attach is not None:
            words.append("gate")
            if not self._command.one_node:
                # Other nodes cannot know that ranks are held at the start.
                words.append("lift")
        if self._command.own.debug_on_error:
            words.append("error")
        environment = {DEBUG: ",".join(words)}
        if len(words) > 1 and _NCCL_HEARTBEAT not in os.environ:
            # NCCL's monitor ends a process that is held for long. Its timeout cannot change later.
            environment[_NCCL_HEARTBEAT] = str(7 * 24 * 3600)
        return environment

    def manifest(self) -> JsonObject:
        """Return the entry of run.json, for other commands."""
        workspace = self._editor.workspace
        return {
            "host": self._ports.host,
            "root": self._root,
            "ports": sorted({*self._ports.numbers, *self._reached.values()}),
            "sockets": [] if self._sockets is None else self._sockets.paths,
            "workspace": None if workspace is None else str(workspace),
            "label": self._editor.label,
        }

    @property
    def _root(self) -> int | None:
        """The port of debug sessions with all ranks."""
        return None if self._ports.root is None else int(self._ports.root.getsockname()[1])

    @property
    def _reached(self) -> dict[int, int]:
        """The port of each rank that has connected, on this or another node."""
        return self._gateway.ranks if self._gateway is not None else {}

    def open(self, directory: Path) -> None:
        """Create the sockets that the ranks connect to.

        Raises:
            OSError: A socket cannot be created.
        """
        self._directory = directory
        self._sockets = gateway.RunSockets(directory, len(self._ports.listeners))

    def announce(self, directory: Path) -> None:
        """Write launch.json, and print notes and warnings about the ports."""
        port = self._ports.numbers[0]
        self._speaker.faults.guarded("launch.json", self._editor.claim, directory, port)
        if self._command.one_node and self._command.local_ranks is not None:
            self._write(dict(enumerate(self._ports.numbers)), {})
        self._announce()

    def start(self, news: Callable[[], None]) -> None:
        """Serve. ``news`` is called from another thread when :meth:`poll` has something to do.

        Ranks that connected earlier wait in the sockets.
        """
        assert self._sockets is not None
        own = self._command.own
        self._gateway = Gateway(
            self._ports,
            self._sockets,
            unidentified=own.debug_unidentified,
            gate=own.wait_for_attach,
            ends_job=own.stop_with_debugger,
            hold_errors=own.debug_on_error,
            expected=self._command.local_ranks,
            project=self._project(),
        )
        self._gateway.start(news)

    def stop(self) -> None:
        """Close the ports, and restore launch.json if git tracks it."""
        if self._terminal is not None:
            self._terminal.close()
        if self._gateway is not None:
            self._gateway.stop()
        self._ports.close()
        if self._sockets is not None:
            self._sockets.close()
        self._speaker.faults.guarded("launch.json", self._edit, self._editor.restore)

    def _announce(self) -> None:
        own, numbers = self._command.own, self._ports.numbers
        if self._own_debugpy:
            self._speaker.note(
                f"{self._command.script} uses debugpy itself; ddpdoctor's debug ports are "
                f"{_span(numbers)}"
            )
        elif self._ports.moved:
            last = own.debug_port + len(numbers) - 1
            taken = f"port {last} is taken"
            if last != own.debug_port:
                taken = f"not all of ports {own.debug_port}-{last} are free"
            # launch.json and `ddpdoctor attach` know the ports. Another job on the machine often
            # uses the default ones.
            if own.debug_port != DEFAULT_PORT:
                self._speaker.note(f"{taken}; debuggers attach at {_span(numbers)} instead")
            # An editor trusts the process it attaches to, and another user may hold the usual port.
            for port in range(own.debug_port, last + 1):
                uid = peers.listener(port)
                if uid is not None and not peers.is_trusted(uid):
                    self._speaker.say(
                        f"warning: port {port} is held by another user (uid {uid}): "
                        "do not attach there"
                    )
                    break
        if own.debug_unidentified:
            self._speaker.say(
                "warning: --debug-unidentified lets anyone on another machine who can reach "
                f"{self._ports.host} run code as you, in your job, without a password; on a "
                "network that is not yours alone, use 127.0.0.1 and an SSH tunnel (`ddpdoctor "
                "attach --tunnel` prints it)"
            )
        if own.wait_for_attach is not None:
            self._speaker.say("waiting for the ranks to start; each is held before its first line")

    def poll(self) -> list[DebugRecord]:
        """Print the events since the last call, and return their records for the journal."""
        if self._gateway is None:
            return []
        if self._terminal is not None and self._directory is not None:
            self._terminal.update(self._directory, self._gateway.waits)
        records = self._gateway.take()
        for state in ("attached", "detached"):
            ranks = [each.rank for each in records if each.state == state and each.rank is not None]
            if ranks:
                verb = "attached to" if state == "attached" else "detached from"
                self._speaker.note(f"debugger {verb} {named(ranks)}")
        for record in records:
            if record.state != "fault":
                self._say(record)
        if any(record.state in ("ready", "port", "lost") for record in records):
            before = self._written[1]
            self._write(self._gateway.ranks, self._gateway.hosts)
            if before or self._written[1]:
                self._keep_manifest()
        return records

    def _keep_manifest(self) -> None:
        """Write the ports for ranks of other nodes into run.json."""
        assert self._directory is not None
        path = self._directory / rundir.MANIFEST
        with contextlib.suppress(OSError, ValueError):
            manifest = opening.json_object(path, opening.MOST_TEXT)
            manifest["debug"] = self.manifest()
            rundir.put(path, json.dumps(manifest, indent=1).encode())

    def check(self, run: Run) -> None:
        """Print which ranks wait for one that the debugger holds."""
        if self._gateway is None:
            return
        others = self._gateway.hosts
        states = {rank: each for rank, each in run.debug_states.items() if rank in others}
        for rank, each in states.items():
            if each.state == "waits" and self._others_wait.get(rank) != each.time:
                self._others_wait[rank] = each.time
                self._say(each)
        stops = [
            *self._gateway.stops,
            *(
                Stop(rank, each.at)
                for rank, each in states.items()
                if each.state in ("waits", "stopped")
            ),
        ]
        if text := self._stops.check(run, stops):
            self._speaker.say(text)
            at = (each.place.rpartition(":") for each in stops)
            places = [Location(path, int(line)) for path, _, line in at if line.isdigit()]
            self._gateway.tell(text, places[0] if places else None)

    def tell(self, events: Iterable[Event]) -> None:
        """Print findings in the consoles of the debuggers that are attached, with a link."""
        if self._gateway is None:
            return
        for event in events:
            if isinstance(event, Withdrawn):
                text, finding = in_words(event), event.reported.finding
            else:
                finding = event.finding
                text = f"{finding.severity.label} {finding.code}: {finding.message}. {finding.fix}"
                text += f" (more: ddpdoctor explain {finding.code})"
            self._gateway.tell(shown(" ".join(text.split())), finding.location)

    def _project(self) -> Project | None:
        workspace = job_workspace(self._command.own.workspace)
        if workspace is None:
            return None
        here = opening.working_directory()
        words = [os.path.join(here, word) for word in self._command.argv]
        scripts = {os.path.dirname(word) for word in words if word.endswith(".py")}
        return Project(self._command.script, (workspace, here, *scripts))

    def _say(self, record: DebugRecord) -> None:
        state, rank = record.state, record.rank
        where = f"{relative_path(record.path)}:{record.line}"
        if state == "waits" and rank is not None:
            node = self._written[1].get(rank, "")
            name = vscode_configurations.rank_name(rank, self._editor.label, node)
            why = "is held by an uncaught exception" if record.why == "error" else "waits"
            there = f" on {node}" if node else ""
            held = f"rank {rank}{there} {why} at {where}"
            if self._terminal is not None and self._terminal.is_open:
                self._speaker.note(held)
            else:
                self._speaker.say(f'{held}; attach with F5 "{name}", or run `ddpdoctor debug`')
        elif state == "expects" and not self._expects:
            self._expects = True
            self._speaker.say(
                f"{where} calls breakpoint(): collectives wait for at least an hour in this run"
            )
        elif state == "no port":
            self._speaker.say(
                f"rank {rank} asks for a debugger, but other ranks have taken all "
                f"{len(self._ports.numbers)} ports: it continues"
            )
        elif state == "listening" and self._gateway is not None:
            every = len(record.ranks) == len(self._gateway.ranks) - len(self._gateway.hosts)
            who = "" if every else f" to {named(record.ranks)}"
            entry = vscode_configurations.root_name(self._editor.label)
            self._speaker.say(
                f"all ranks listening on {self._ports.host}:{_span(self._ports.numbers)}; they "
                f'start when a debugger is attached{who}: F5 "{entry}"'
            )
        elif state == "stop":
            self.stopped = True
        elif state == "refused":
            if record.uid is not None:
                who = f"uid {record.uid}"
            else:
                who = f"a client whose user is not known ({record.why})"
            self._speaker.say(f"refused: {who} at {record.endpoint}")
        elif state == "flooded":
            self._speaker.say(gateway.flooded(record))
        elif state == "broken":
            self._speaker.say(f"warning: the debug ports are closed: {record.error}")

    def _write(self, ports: dict[int, int], nodes: dict[int, str]) -> None:
        if (ports, nodes) == self._written:
            return
        self._written = ports, nodes
        if ports and self._root is not None:
            ports = {vscode_configurations.ALL: self._root, **ports}
        write = partial(self._editor.write, self._ports.host, ports, nodes)
        fresh = self._speaker.faults.guarded("launch.json", self._edit, write)
        if fresh:
            self._speaker.note(
                f"wrote {relative_path(fresh)}, for F5 in VS Code; --no-vscode, or no-vscode = "
                "true under [tool.ddpdoctor.run] in pyproject.toml, switches this off for good"
            )

    def _edit(self, edit: Callable[[], str | None]) -> str | None:
        try:
            return edit()
        except DoctorError as error:
            self._speaker.note(f"launch.json is left as it is: {error}")
            return None


def _uses_debugpy(command: Command) -> bool:
    """Return whether the script uses debugpy itself, whose ports have to stay free."""
    scripts = [word for word in command.argv if os.path.basename(word) == command.script]
    try:
        return any("debugpy" in Path(script).read_text(errors="replace") for script in scripts)
    except OSError:
        return False


def _check_gate(command: Command) -> None:
    """Refuse to wait for ranks that do not exist in the job."""
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
    """Refuse ports that other machines can reach, unless unidentified clients are admitted."""
    own = command.own
    if not own.debug_unidentified and not gateway.is_loopback(own.debug_host):
        raise DoctorError(
            f"--debug-host {own.debug_host} is reachable from other machines, and nothing "
            "identifies the users of their clients",
            "use 127.0.0.1 and an SSH tunnel (`ddpdoctor attach --tunnel` prints it), or add "
            "--debug-unidentified to admit anyone who can reach that address",
        )


def _span(numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    return str(ordered[0]) if len(ordered) == 1 else f"{ordered[0]}-{ordered[-1]}"
