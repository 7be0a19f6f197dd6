"""``ddpdoctor run``: start a job and watch it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ddpdoctor.core import working_directory
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.job import Command
from ddpdoctor.debug.debugging import Debugging
from ddpdoctor.render.report import Reporter
from ddpdoctor.run import rundir
from ddpdoctor.supervise import command as job_command
from ddpdoctor.supervise import terminal, tracebacks
from ddpdoctor.supervise.passthrough import Passthrough
from ddpdoctor.supervise.supervisor import Supervisor, end_like

HELP = """\
Usage: ddpdoctor run [OPTIONS] [TORCHRUN OPTIONS] [--] SCRIPT [ARGS...]
       ddpdoctor run [OPTIONS] -- COMMAND [ARGS...]

Start a job as torchrun would, and watch it: the same job, the same output,
the same exit status, and findings on stderr when something is wrong.

SCRIPT is a .py file (or a module with -m) that torchrun starts. COMMAND is any
program (python, bash, srun, mpirun, accelerate) that starts the ranks itself.

Options of ddpdoctor:
  --quiet           Say findings only, no notes and no summary.
  --strict          Exit with status 3 if the job succeeded but an error-level
                    finding stands.
  --json FILE       Write each finding to FILE as a line of JSON.
  --output FORMAT   text, or problems: findings as lines that an editor's problem
                    matcher understands (path:line:col: severity CODE message).
  --grace SECONDS   Time the job has to end after SIGINT, SIGTERM or SIGHUP
                    [default: 30].
  --hang-after SECONDS
                    Look into a job that gave no sign of life for so long
                    [default: 30, or 20 median steps if that is longer; the
                    first step may take 10 times as long while it works].
  --kill-on-hang    End a job that hangs for sure, once the cause is said.
  --run-dir DIR     Keep the records in DIR, new or empty
                    [default: a directory below <tmp>/ddpdoctor-<uid>/].
  --journal-mb N    Most megabytes of records per rank [default: 64].
  --overhead-budget PERCENT
                    What looking for wrong results may cost, of the step time;
                    0 turns it off [default: 0.5].
  -h, --help        Show this text.

Debugger (debugpy starts in a rank only when a client attaches):
  --debug-port PORT Local rank R listens on PORT + R [default: 5678; 0: any].
  --debug-host ADDRESS
                    Listen there instead of on 127.0.0.1, where only you and
                    root are let in; needs --debug-unidentified.
  --debug-unidentified
                    Let in clients whose user cannot be determined, as those of
                    other machines: they can run code as you.
  --wait-for-attach [RANKS]
                    Hold every rank before its first line until a debugger is
                    attached to RANKS, such as 0,2-3 [default: all].
  --stop-with-debugger
                    End the job, all ranks at once, when such a debugger is
                    stopped; any other only detaches.
  --debug-on-error  Hold a rank at an uncaught exception until a debugger has
                    looked at it.
  --no-debug        No debug ports; breakpoint() is Python's own.
  --workspace DIR   The folder whose .vscode/launch.json gets the ranks
                    [default: the nearest with .vscode or .git].
  --no-vscode       Leave launch.json alone.
  --path-map LOCAL=REMOTE
                    Where the editor's files are in the job (in a container).

Every option of torchrun is passed on: --nproc-per-node, --nnodes, --node-rank,
--rdzv-endpoint, --standalone, --max-restarts, -m, ... (torchrun --help).
Without --nproc-per-node: one rank per visible GPU, or 2 without a GPU.

Exit status: the job's own; 2 for bad input; 3 with --strict and 4 with
--kill-on-hang (see above).
"""


def main(words: Sequence[str]) -> int:
    """Run a job.

    Raises:
        DoctorError: The command line cannot work.
    """
    _open_standard_files()
    command = job_command.build(words, os.environ)
    if command is None:
        sys.stdout.write(HELP)
        return 0
    passthrough = Passthrough(direct=terminal.is_typed_into(command.argv))
    reporter = Reporter(passthrough.say, command.own, tracebacks.keep)
    if working_directory.is_gone():
        reporter.warn(f'{working_directory.GONE}, and torch hardly starts there: type `cd "$PWD"`')
    debugging = None if command.own.no_debug else _debugging(command, reporter)
    try:
        directory = rundir.create(command.own.run_dir)
        if rundir.is_open_to_others(directory):
            reporter.note(f"others may write to {directory}, and what they put there is read")
    except OSError as error:
        directory = None
        reporter.warn(f"no run directory ({error}); the job runs unwatched")
    return end_like(Supervisor(command, directory, passthrough, reporter, debugging).run())


def _debugging(command: Command, reporter: Reporter) -> Debugging | None:
    """The debugger's side; a job is not kept from starting by a fault in it.

    Raises:
        DoctorError: The command line asks for what cannot be had.
    """
    try:
        return Debugging(command, reporter)
    except DoctorError:
        raise
    except Exception as error:
        reporter.faults.failed([("the debugger", error)])
        return None


def _open_standard_files() -> None:
    """Give a process that was started with closed standard files empty ones.

    Else the first file that is opened would become its standard error.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
