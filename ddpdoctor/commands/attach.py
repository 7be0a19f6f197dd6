"""``ddpdoctor attach``: show where to attach a debugger, and what jobs without ddpdoctor do."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ddpdoctor.commands.stacks import is_of_job, print_stacks
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import duration, json_text, shown
from ddpdoctor.core.job import DEFAULT_PORT, LOOPBACK, Command, OwnOptions
from ddpdoctor.core.opening import integer, relative_path, whose
from ddpdoctor.core.options import DIRECTORY, PATH_MAP, Given, Parser, number, seconds, text
from ddpdoctor.debug import attach_points, vscode_configurations
from ddpdoctor.debug.vscode_files import current_directory, find_workspace
from ddpdoctor.run import rundir
from ddpdoctor.run.names import MARK
from ddpdoctor.run.snapshot import Run

PARSER = Parser(
    "attach",
    """\
Usage: ddpdoctor attach [OPTIONS] [RUN]
       ddpdoctor attach [--for SECONDS] PID | --job
       ddpdoctor attach --probe PID | --job
       ddpdoctor attach --debug PID
       ddpdoctor attach --through COMMAND [--rank N] [RUN]

Show where a debugger attaches to the ranks of your live runs, and what each
rank does. RUN is a run's name or directory [default: all live runs, those of
the workspace first].

Of a job that runs without ddpdoctor, show what each rank does, who waits for
whom, the stacks, and why it hangs if it has for 30 seconds. PID is a rank, or
the launcher. py-spy reads the stacks; no rank is paused, and nothing is loaded
into it.

Options:
  --job             Your newest job that runs without ddpdoctor.
  --for SECONDS     Watch that job, or the one of PID, for so long [default: 5].
  --probe           Load ddpdoctor's probe into the ranks of that job, and report
                    findings until Ctrl-C or the end of the job. For ranks that
                    train with DDP on Python 3.14, all on this machine.
  --write           Put the ranks into .vscode/launch.json, one attach
                    configuration each.
  --workspace DIR   The folder that VS Code opens
                    [default: the nearest with a .vscode or .git].
  --path-map LOCAL=REMOTE
                    Where the editor's folder LOCAL is in the job, for --write.
  --tunnel          For an editor on another machine: the ssh line that forwards
                    the ports, and with --write its local ends.
  --through COMMAND For a node that only a command reaches, such as 'srun
                    --overlap --jobid 4711 --nodelist node3' or 'ssh -J jump
                    node3': forward a port of this machine to each rank there,
                    or to rank N, until Ctrl-C. The same Python has to be there.
  --stdio           The far end of --through: connect standard input and output
                    to the debug port of --rank, or print the ranks.
  --rank N          Print the line that attaches Neovim (nvim-dap) to rank N.
  --debug PID       Load debugpy into a Python process that runs without
                    ddpdoctor, and hold a port for it until Ctrl-C. Python 3.14
                    does that itself; older ones need gdb, which stops it.
  -h, --help        Show this text.

Exit status: 0; 2 if there is no such run, rank or process.
""",
    {
        "--workspace": DIRECTORY,
        "--path-map": PATH_MAP,
        "--rank": number(),
        "--through": text("a command that reaches the node"),
        "--debug": number(),
        "--for": seconds(),
    },
)


def main(words: Sequence[str]) -> int:
    """Show, write or print the attach points of live runs."""
    given = PARSER.read(words)
    name = PARSER.one_run(given)
    if "--through" in given:
        return _forward(name, given)
    if "--stdio" in given:
        return _connect(name, given)
    if "--debug" in given:
        return _inject(given.options["--debug"])
    if "--probe" in given:
        if not is_of_job(name, given):
            raise PARSER.wrong(
                "--probe is for jobs that run without ddpdoctor", "name a PID, or --job"
            )
        if "--for" in given:
            raise PARSER.wrong("--probe lasts until Ctrl-C", "leave out --for")
        return _probe(int(name) if name is not None else None)
    if is_of_job(name, given):
        return _examine(int(name) if name is not None else None, given)
    return _attach(name, given)


def _attach(name: str | None, given: Given) -> int:
    if "--for" in given:
        raise DoctorError("--for is for jobs that run without ddpdoctor", "name a PID, or --job")
    paths = [rundir.find(name)] if name is not None else rundir.some_live()
    live = [attach_points.live_run(path) for path in paths]
    runs = [run for run in live if attach_points.is_debugged(run)]
    if not runs:
        raise DoctorError(f"{live[0].path.name} was started with --no-debug")
    if "--path-map" in given and "--write" not in given:
        raise DoctorError("--path-map is for --write")
    workspace = find_workspace(current_directory(), given.get("--workspace"))
    elsewhere = {run.path for run in runs if not rundir.belongs(run.path, str(workspace))}
    runs.sort(key=lambda run: run.path in elsewhere)
    if "--rank" in given:
        return _one_line(runs, given.options["--rank"])
    if "--tunnel" in given:
        for run in runs:
            _say(attach_points.tunnel(run))
    if "--write" in given:
        # Runs of other workspaces have their own launch.json files.
        own = [run for run in runs if run.path not in elsewhere]
        return _write(own or runs, workspace, given)
    if "--tunnel" not in given:
        for run in runs:
            _show(run, elsewhere=run.path in elsewhere)
    return 0


def _say(text: str) -> None:
    """Print a line with text of the run directory, which others may have written."""
    print(shown(text))


def _show(run: Run, *, elsewhere: bool) -> None:
    points = attach_points.points(run)
    entry = vscode_configurations.root_name(attach_points.label(run))
    seconds = (time.time_ns() - integer(run.manifest, "started")) / 1e9
    words = run.command
    scripts = [os.path.basename(word) for word in words if word.endswith(".py")]
    name = scripts[0] if scripts else shlex.join(words[:3])
    folder = run.manifest.get("workspace") or run.manifest.get("cwd")
    there = f" in {folder}" if elsewhere and isinstance(folder, str) else ""
    _say(f"{run.path.name}: {name}{there}, for {duration(seconds)}")
    if not points:
        print("  no rank has started yet")
    else:
        print(f"  {'rank':<6}{'port':<7}{'pid':<9}state")
    for point in points:
        state = point.trouble or point.state
        state = f"on {point.node}: {state}" if point.node and not point.trouble else state
        _say(f"  {point.rank:<6}{point.port:<7}{point.pid or '-':<9}{state}")
    _say(f'  VS Code: F5 "{entry}"')
    print("  Neovim: ddpdoctor attach --rank N; another machine: ddpdoctor attach --tunnel")


def _one_line(runs: Sequence[Run], rank: int) -> int:
    for run in runs:
        for point in attach_points.points(run):
            if point.rank == rank and point.trouble:
                raise DoctorError(f"rank {rank}: {point.trouble}", "do not attach there")
            if point.rank == rank:
                host = attach_points.host(run)
                print(
                    'lua require("dap").run({type = "python", request = "attach", '
                    f'name = "{vscode_configurations.rank_name(rank, node=point.node)}", '
                    f'connect = {{host = "{host}", port = {point.port}}}}})'
                )
                print(f"any other client: attach to {host}:{point.port}", file=sys.stderr)
                return 0
    raise DoctorError(f"no live run has a rank {rank}", "`ddpdoctor attach` lists them")


def _write(runs: Sequence[Run], workspace: Path, given: Given) -> int:
    changed = attach_points.write(
        runs,
        workspace,
        mappings=[vscode_configurations.PathMapping(*pair) for pair in given.get("--path-map", ())],
        through_tunnel="--tunnel" in given,
    )
    if "--tunnel" not in given:
        for run in runs:
            for line in attach_points.left_out(run):
                print(f"ddpdoctor: {shown(line)}", file=sys.stderr)
    path = os.path.join(workspace, ".vscode", vscode_configurations.LAUNCH_FILE)
    _say(f"{'wrote' if changed else 'unchanged:'} {relative_path(path)}")
    return 0


def _forward(name: str | None, given: Given) -> int:
    """Forward a port of this machine to each rank that a command reaches."""
    from ddpdoctor.debug import bridge

    words = [] if name is None else [name]
    try:
        command = shlex.split(given.options["--through"])
    except ValueError as error:
        raise DoctorError(f"--through is invalid: {error}", "quote it as for a shell") from None
    command += [sys.executable, "-m", "ddpdoctor", "attach", "--stdio"]
    ranks = [given.options["--rank"]] if "--rank" in given else bridge.ranks([*command, *words])
    with contextlib.ExitStack() as stack:
        listeners = {
            rank: stack.enter_context(bridge.listen(DEFAULT_PORT + rank)) for rank in ranks
        }
        ports = {rank: each.getsockname()[1] for rank, each in listeners.items()}
        if "--write" in given:
            _write_points(ports, given)
        for rank, port in ports.items():
            print(f"rank {rank}: attach to {LOOPBACK}:{port}")
        print("Ctrl-C ends it", flush=True)
        bridge.serve(
            {each: [*command, "--rank", str(rank), *words] for rank, each in listeners.items()}
        )
    return 0


def _write_points(ports: dict[int, int], given: Given) -> None:
    """Put the forwarded ports into launch.json."""
    vscode_configurations.update_launch(
        find_workspace(current_directory(), given.get("--workspace")),
        [vscode_configurations.AttachPoint(rank, LOOPBACK, port) for rank, port in ports.items()],
        mappings=[vscode_configurations.PathMapping(*pair) for pair in given.get("--path-map", ())],
    )


def _connect(name: str | None, given: Given) -> int:
    """Connect standard input and output to a rank's debug port, or print the ranks."""
    from ddpdoctor.debug import bridge
    from ddpdoctor.debug.sessions import connect

    run = attach_points.debugged_run(name)
    if "--rank" not in given:
        points = attach_points.points(run)
        print(json_text([each.rank for each in points if not each.trouble and not each.node]))
        return 0
    with connect(run, given.options["--rank"]) as connection:
        bridge.copy(connection, 0, 1)
    return 0


def _examine(pid: int | None, given: Given) -> int:
    """Show the activity of the ranks of a job that runs without ddpdoctor."""
    from ddpdoctor.commands.report import print_lines, text_of
    from ddpdoctor.render.stack_text import stacks_summary
    from ddpdoctor.stacks.frames import merge
    from ddpdoctor.supervise import unprobed

    job = unprobed.find(pid)
    look = unprobed.look(job, given.get("--for", 5.0))
    print_lines(unprobed.lines(look))
    print()
    print_stacks(stacks_summary(merge(look.stacks)), look.stacks, job.started, given)
    print()
    for finding in look.findings:
        print(text_of(finding, job.started / 1e9, None))
    print_lines(unprobed.remarks(look))
    return 0


def _inject(pid: int) -> int:
    """Open a debug port for a process that runs without ddpdoctor."""
    from ddpdoctor.supervise import unprobed

    process = unprobed.of_pid(pid)
    if MARK in process.environ:
        raise DoctorError(
            f"process {pid} belongs to a run of ddpdoctor",
            "`ddpdoctor attach` shows the port of its rank",
        )
    if not unprobed.maps(process, "python"):
        raise DoctorError(f"process {pid} is not a Python process")
    if process.uid != os.geteuid():
        raise DoctorError(
            f"process {pid} belongs to {whose(process.uid)}",
            "run this command as that user: the port lets in only that user and root",
        )
    own = attach_points.runs_code(pid)
    if not own and shutil.which("gdb") is None:
        raise DoctorError(
            f"process {pid} has a Python older than 3.14: loading debugpy into it needs gdb",
            f"install gdb, or inspect it from outside: ddpdoctor attach {pid}",
        )
    how = "loads debugpy between two lines (PEP 768)" if own else "is stopped by gdb for a moment"
    print(f"process {pid} {how}")
    attach_points.serve_process(pid, DEFAULT_PORT, lambda text: print(shown(text), flush=True))
    return 0


def _probe(pid: int | None) -> int:
    """Watch a job that runs without ddpdoctor from within its ranks, until it ends."""
    from ddpdoctor.commands import run
    from ddpdoctor.supervise import unprobed

    job = unprobed.find(pid)
    for rank, process in job.ranks.items():
        if not attach_points.runs_code(process.pid):
            raise DoctorError(
                f"rank {rank} (process {process.pid}) does not run on Python 3.14, which can load "
                "code between two lines",
                f"look at it from outside: ddpdoctor attach {process.pid}",
            )
    if job.world_size > len(job.ranks):
        raise DoctorError(
            f"{len(job.ranks)} of {job.world_size} ranks are on this machine, and all have to "
            "begin together",
            "start the job with ddpdoctor run",
        )
    words = [f"{rank}:{process.pid}" for rank, process in job.ranks.items()]
    return run.start(
        Command(
            (sys.executable, "-m", "ddpdoctor.supervise.late_ranks", *words),
            OwnOptions(no_debug=True, no_lint=True, no_nodes=True),
            note="",
            through_torchrun=False,
            local_ranks=len(words),
            attached=tuple(next(iter(job.ranks.values())).words),
        )
    )
