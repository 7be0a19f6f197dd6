"""Find the debug ports of live ranks, and open ports in processes that have none.

An editor trusts the process it attaches to. So the run and the process that listens at a port have
to belong to this user. The kernel is asked for the owner before a port is printed or written.

The gateway of a run serves the port. debugpy's own port would be open to every user of the machine,
and another process could take a free port before debugpy does.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import named, shown
from ddpdoctor.core.job import LOOPBACK
from ddpdoctor.core.opening import ask_as, integer, relative_place, stranger, whose
from ddpdoctor.debug import gateway, vscode_configurations
from ddpdoctor.debug.gateway import Gateway
from ddpdoctor.run import rundir
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.supervisor import DebugRecord
from ddpdoctor.run.snapshot import Run
from ddpdoctor.system import peers

# -- the debug ports of a live run, with the state of each rank


_ADDRESS = re.compile(r"[A-Za-z0-9._:%-]+")
_MAX_LABEL = 200
_LAST_PORT = 65535
_REMOTE = "on another machine: --tunnel leads there"


@dataclass(frozen=True)
class Point:
    """A rank's port and its state, in words."""

    rank: int
    port: int
    pid: int | None
    state: str
    node: str  # The host of a rank of another node
    trouble: str  # Why no debugger may attach to the port. Empty if one may


def live_run(path: Path) -> Run:
    """Return the live run in a directory.

    Raises:
        DoctorError: It belongs to another user, has ended, or is damaged.
    """
    uid = stranger(path)
    if uid is not None:
        raise DoctorError(f"the run in {path} belongs to {whose(uid)}", ask_as(uid))
    if not rundir.is_live(path):
        raise DoctorError(f"{path.name} has ended", "`ddpdoctor attach` lists the live runs")
    return RunReader(path, own=True).snapshot()


def debugged_run(name: str | None) -> Run:
    """Return a live run with debug ports, by default the newest.

    Raises:
        DoctorError: There is no such run.
    """
    paths = [rundir.find(name)] if name is not None else rundir.some_live()
    run = live_run(paths[0])
    if not is_debugged(run):
        raise DoctorError(f"{run.path.name} was started with --no-debug")
    if len(paths) > 1:
        text = f"{run.path.name} is the newest of {len(paths)} live runs"
        print(f"ddpdoctor: {shown(text)}", file=sys.stderr)
    return run


def chosen_ranks(run: Run, ranks: frozenset[int] | None) -> frozenset[int]:
    """Return the live ranks of a run, or the chosen ones among them.

    Raises:
        DoctorError: There is no such rank.
    """
    every = live_ranks(run)
    missing = (ranks or frozenset()) - every
    if missing or not every:
        why = f"has no {named(missing)}" if missing else "has no rank yet"
        raise DoctorError(f"{run.path.name} {why}", "`ddpdoctor attach` lists the ranks")
    return ranks or every


def live_ranks(run: Run) -> frozenset[int]:
    """Return the live ranks with a debug port."""
    states = run.debug_states
    return frozenset(rank for rank, each in states.items() if each.state not in ("gone", "lost"))


def points(run: Run) -> list[Point]:
    """Return the ports of a run's ranks, ascending by rank.

    Raises:
        DoctorError: The run directory holds no valid address.
    """
    nodes = hosts(run)
    remote = "" if _is_here(run) or not gateway.is_loopback(host(run)) else _REMOTE
    return [
        Point(
            rank,
            each.port or 0,
            each.pid or None,
            _state(run, rank, each),
            nodes.get(rank, ""),
            (each.state == "lost" and each.why) or _trouble(run, each.port) or remote,
        )
        for rank, each in sorted(run.debug_states.items())
    ]


def hosts(run: Run) -> dict[int, str]:
    """Return the hosts of the ranks of other nodes."""
    return {rank.rank: rank.opened.host for rank in run.last if rank.elsewhere}


def _trouble(run: Run, port: int | None) -> str:
    """Return why no debugger may attach to a port. Empty for a port on another machine."""
    if port is None or port not in _ports(run):
        return "it has no port"
    if not _is_here(run):
        return ""
    uid = peers.listener(port, host(run))
    if uid is None:
        return f"nothing listens on port {port}"
    return "" if uid == os.geteuid() else f"port {port} is taken by {whose(uid)}"


def left_out(run: Run) -> list[str]:
    """Return a line for each rank that no debugger may attach to."""
    found = (point for point in points(run) if point.trouble)
    return [f"rank {point.rank} is left out: {point.trouble}" for point in found]


def _is_here(run: Run) -> bool:
    return bool(run.manifest.get("host") == socket.gethostname())


def _state(run: Run, rank: int, record: DebugRecord) -> str:
    """Return a rank's state in a few words."""
    state, place = record.state, relative_place(record.at)
    if state == "gone":
        return "ended"
    if state == "waits":
        return f"waits for a debugger at {place}"
    if state == "stopped":
        return "held by the debugger" + (f" at {place}" if record.place else "")
    status = next((each.status for each in run.last if each.rank == rank), None)
    doing = "starting"
    if status is not None:
        doing = f"step {status.step}, {status.collective or status.phase.label}"
        doing += f" ({relative_place(status.site)})" if status.site else ""
    return f"in the debugger, {doing}" if state in ("attached", "running") else doing


def is_debugged(run: Run) -> bool:
    """Return whether the run was started with debug ports."""
    return isinstance(run.manifest.get("debug"), dict)


def host(run: Run) -> str:
    """Return the address at which a debugger reaches the run's ports.

    Raises:
        DoctorError: The run directory holds no valid address, which users would paste.
    """
    address = run.manifest["debug"].get("host")
    if isinstance(address, str) and _ADDRESS.fullmatch(address):
        address = gateway.reachable(address)
        try:
            # A name may lead a client to another address of the host.
            return address if ":" in address else socket.gethostbyname(address)
        except (OSError, UnicodeError):
            pass
    raise _damaged(run, f"{address!r} is not an address")


def label(run: Run) -> str:
    """Return the label that distinguishes the run's entries in launch.json from another run's.

    Raises:
        DoctorError: The run directory holds something other than a line of text.
    """
    found = run.manifest["debug"].get("label") or ""
    if not isinstance(found, str) or len(found) > _MAX_LABEL or shown(found) != found:
        raise _damaged(run, "the label is not a line of text")
    return found


def workspace(run: Run) -> Path | None:
    """Return the folder whose launch.json the run writes. None if it writes none.

    Raises:
        DoctorError: The run directory holds no valid path.
    """
    found = run.manifest["debug"].get("workspace")
    if found is not None and not (isinstance(found, str) and os.path.isabs(found)):
        raise _damaged(run, f"{found!r} is not a workspace")
    return None if found is None else Path(found)


def _damaged(run: Run, why: str) -> DoctorError:
    return DoctorError(f"{run.path / rundir.MANIFEST} is damaged: {why}")


def tunnel(run: Run) -> str:
    """Return the ssh command that forwards the run's ports to another machine.

    Raises:
        DoctorError: There is no port to forward.
    """
    node = str(run.manifest.get("host", "HOST"))
    there = host(run)
    there = f"[{there}]" if ":" in there else there
    ends = [*_ends(run).values(), *((port, port) for port in _root(run).values())]
    forwards = " ".join(f"-L {near}:{there}:{far}" for near, far in ends)
    if not forwards:
        raise DoctorError(
            f"no port of {run.path.name} can be reached", "`ddpdoctor attach` says why"
        )
    return f"ssh -N {forwards} {getpass.getuser()}@{shlex.quote(node)}"


def _ports(run: Run) -> list[int]:
    listed = run.manifest["debug"].get("ports")
    every = listed if isinstance(listed, list) else []
    return [port for port in every if isinstance(port, int) and 0 < port <= _LAST_PORT]


def _root(run: Run) -> dict[int, int]:
    """Return the port of debug sessions with all ranks, keyed by `ALL`. Empty if there is none."""
    port = integer(run.manifest["debug"], "root")
    own = not _is_here(run) or peers.listener(port, host(run)) == os.geteuid()
    return {vscode_configurations.ALL: port} if 0 < port <= _LAST_PORT and own else {}


def _ends(run: Run) -> dict[int, tuple[int, int]]:
    """Return the local and remote ports of a tunnel by rank. No two ranks share a local port."""
    ports = _ports(run)
    found = {point.rank: point.port for point in points(run)} or dict(enumerate(ports))
    return {
        rank: (ports[0] + rank if run.debug_states else port, port)
        for rank, port in found.items()
        if not _trouble(run, port)
    }


def write(
    runs: Sequence[Run],
    workspace: Path,
    *,
    mappings: Sequence[vscode_configurations.PathMapping] = (),
    through_tunnel: bool = False,
) -> bool:
    """Write the ranks of runs into the workspace's launch.json. Returns whether it changed.

    Ranks that no debugger may attach to are left out.

    Raises:
        DoctorError: The file cannot be edited. It is unchanged.
    """
    labels = [label(run) for run in runs]
    changed = False
    for run, own in zip(runs, labels, strict=True):
        near, nodes = LOOPBACK if through_tunnel else host(run), hosts(run)
        ports = {point.rank: point.port for point in points(run) if not point.trouble}
        if through_tunnel:
            ports = {rank: end for rank, (end, _) in _ends(run).items()}
        mapped, folder = mappings, run.manifest.get("workspace")
        if not mapped and isinstance(folder, str) and not rundir.belongs(run.path, str(workspace)):
            # The gateway refuses clients of another project that do not name this one.
            there = vscode_configurations.PathMapping(folder, folder)
            mapped = [*vscode_configurations.default_mappings(workspace), there]
        changed |= vscode_configurations.update_launch(
            workspace,
            [
                vscode_configurations.AttachPoint(rank, near, port, nodes.get(rank, ""))
                for rank, port in {**(_root(run) if ports else {}), **ports}.items()
            ],
            label=own,
            others=set(labels) - {own},
            mappings=mapped,
        )
    return changed


# -- open a debug port for a Python process that runs without ddpdoctor


CONNECT_TIMEOUT = 60.0  # Seconds for the process to connect to the gateway when asked to

_SLEEPER = "import time\nprint(flush=True)\nwhile True: time.sleep(0.02)"
_BREAK_TIMEOUT = 0.5  # Seconds for a process that gdb has broken to end

_ROOT = str(Path(__file__).parents[2])

_INJECT = """
import os, sys
import debugpy.server
import pydevd
sys.path.append(os.path.join(os.path.dirname(pydevd.__file__), "pydevd_attach_to_process"))
from add_code_to_python_process import run_python_code
run_python_code(int(sys.argv[1]), sys.argv[2], connect_debugger_tracing=False)
"""

_REMOTE_EXEC = "import sys; sys.remote_exec(int(sys.argv[1]), sys.argv[2])"
_PTRACE = "ptrace must be allowed: run as the same user, see /proc/sys/kernel/yama/ptrace_scope"
_REFUSED = ("ptrace", "No symbol")  # In gdb's output, even if its exit status is 0

_JOIN = """
import sys
before = list(sys.path)
sys.path[:0] = {paths!r}
try:
    from ddpdoctor.probe.runtime import injected
    injected.join({directory!r})
finally:
    sys.path[:] = before
"""


def serve_process(pid: int, first_port: int, say: Callable[[str], None]) -> None:
    """Open a debug port for a process and serve it until the process ends, or Ctrl-C.

    Args:
        pid: A Python process of this user.
        first_port: The port, or the first after it that is free.
        say: Takes lines for the user.

    Raises:
        DoctorError: debugpy cannot be injected, or no port is free.
    """
    ports = gateway.bind_block(LOOPBACK, first_port, 1)
    news = threading.Event()

    def wait_for(state: str, timeout: float | None) -> bool:
        """Print events until a state is reached. Returns False after a timeout."""
        while news.wait(timeout):
            news.clear()
            for record in served.take():
                if record.state == "refused":
                    client = f"uid {record.uid}" if record.uid is not None else "a client"
                    say(f"refused: {client}" + (f" ({record.why})" if record.uid is None else ""))
                elif record.state == "flooded":
                    say(gateway.flooded(record))
                elif record.state == state:
                    return True
        return False

    with tempfile.TemporaryDirectory(prefix="ddpdoctor-attach-") as directory:
        served = Gateway(
            ports,
            gateway.RunSockets(Path(directory), 1),
            unidentified=False,
            gate=None,
            ends_job=False,
            hold_errors=False,
            expected=1,
        )
        try:
            served.start(news.set)
            _inject(pid, directory)
            if not wait_for("ready", CONNECT_TIMEOUT):
                raise DoctorError(
                    f"process {pid} did not load debugpy: its stderr says why, or its main thread "
                    "is in native code",
                    f"see where it is: ddpdoctor attach {pid}",
                )
            say(
                f"process {pid}: attach to {ports.host}:{ports.numbers[0]}; "
                "the port is open until Ctrl-C here"
            )
            wait_for("gone", None)
            say(f"process {pid} has ended")
        except KeyboardInterrupt:
            say(f"the port is closed; process {pid} goes on")
        finally:
            served.stop()


def runs_code(pid: int) -> bool:
    """Return whether a Python process runs code on request (PEP 768, Python 3.14)."""
    asked = [f"/proc/{pid}/exe", "-Ic", "import sys; sys.exit(not hasattr(sys, 'remote_exec'))"]
    with contextlib.suppress(OSError):
        # Other programs embed Python.
        named_python = os.path.basename(os.readlink(asked[0])).startswith("python")
        return named_python and subprocess.run(asked, capture_output=True).returncode == 0
    return False


def _inject(pid: int, directory: str) -> None:
    """Make the process connect to the control socket in a directory."""
    import debugpy

    debugpys = os.path.dirname(os.path.dirname(debugpy.__file__))
    source = _JOIN.format(paths=[_ROOT, debugpys], directory=directory)
    if runs_code(pid):
        script = Path(directory, "join.py")
        script.write_text(source)
        run_inside(pid, script)
    else:
        if breaks_sleepers():
            raise DoctorError(
                f"gdb would break process {pid}: on this machine, its calls make a process fail",
                f"inspect it from outside (ddpdoctor attach {pid}), or start the job with "
                "ddpdoctor run",
            )
        # gdb's command line cannot carry quotes and line ends.
        code = f"exec(bytes({list(source.encode())}).decode(),{{}})".replace(" ", "")
        _start([sys.executable, "-c", _INJECT, str(pid), code], pid)


def run_inside(pid: int, script: Path) -> None:
    """Let a process of Python 3.14 run a script on its main thread, between two lines (PEP 768).

    Raises:
        DoctorError: The process cannot be asked.
    """
    _start([f"/proc/{pid}/exe", "-Ic", _REMOTE_EXEC, str(pid), str(script)], pid)


def _start(command: Sequence[str], pid: int) -> None:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"},
    )
    output = done.stdout.splitlines()
    refused = [each for each in output if any(word in each for word in _REFUSED)]
    if done.returncode != 0 or refused:
        reason = (refused or output[-1:] or ["no reason was given"])[0].strip()
        forbidden = any(word in reason for word in ("ptrace", "ermission", "not permitted"))
        raise DoctorError(
            f"no code can be loaded into process {pid}: {reason}", _PTRACE if forbidden else ""
        )


def breaks_sleepers() -> bool:
    """Return whether a call by gdb ends a sleeping process, by trying it on a child process.

    Where gdb cannot write the registers back ("Couldn't write extended state status": gdb 13 on
    some virtual machines), the system call that it interrupted fails with an invalid error number
    (512 to 516), and Python raises.
    """
    command = [sys.executable, "-I", "-S", "-c", _SLEEPER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            subprocess.run(
                ["gdb", "-nx", "-p", str(child.pid), "-batch", "-ex", "call (int)getpid()"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_BREAK_TIMEOUT)
            return child.poll() is not None
        finally:
            child.kill()
