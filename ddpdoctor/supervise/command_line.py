"""The command line of ``ddpdoctor run``."""

from __future__ import annotations

from ddpdoctor.core import options
from ddpdoctor.core.options import Parser
from ddpdoctor.core.selection import CODES

PARSER = Parser(
    "run",
    """\
Usage: ddpdoctor run [OPTIONS] [TORCHRUN OPTIONS] [--] SCRIPT [ARGS...]
       ddpdoctor run [OPTIONS] -- COMMAND [ARGS...]

Start a job as torchrun would, and watch it: the same job, the same output,
the same exit status, and findings on stderr when something is wrong.

SCRIPT is a .py file (or a module with -m) that torchrun starts. COMMAND is any
program (python, bash, srun, mpirun, accelerate) that starts the ranks itself.

Options of ddpdoctor:
  --quiet           Print findings only, no notes and no summary.
  --strict          Exit with status 3 if the job succeeded but an error-level
                    finding remains.
  --json FILE       Write each finding to FILE as a line of JSON.
  --output FORMAT   text; problems: findings as lines that an editor's problem
                    matcher understands (path:line:col: severity CODE message);
                    github: as annotations of GitHub Actions.
  --select CODES    Report these findings alone: codes, or how they begin, such
                    as DDP4,DDP901.
  --ignore CODES    Do not report these.
  --notify URL|CMD  Send findings at error level, hangs, crashes and the end of
                    the job to a webhook (such as Slack's), or to a command's
                    standard input, as JSON; may be given more than once.
  --grace SECONDS   Time the job has to end after SIGINT, SIGTERM or SIGHUP
                    [default: 30].
  --hang-after SECONDS
                    Examine a job that made no progress for so long
                    [default: 30, or 20 median steps if that is longer; the
                    first step may take 10 times as long while it works].
  --kill-on-hang    End a job that certainly hangs, after the cause is printed.
  --run-dir DIR     Keep the records in DIR, new or empty
                    [default: a directory below <tmp>/ddpdoctor-<uid>/].
  --journal-mb N    Most megabytes of records per rank [default: 64].
  --overhead-budget PERCENT
                    What the hooks and the checks for wrong results may cost, in
                    per cent of the step time; 0: no checks [default: 0.5].
  -h, --help        Show this text.

Debugger (debugpy starts in a rank only when a client attaches):
  --debug-port PORT Local rank R listens on PORT + R [default: 5678; 0: any].
  --debug-host ADDRESS
                    Listen there instead of on 127.0.0.1, where only you and
                    root are admitted; needs --debug-unidentified.
  --debug-unidentified
                    Admit clients whose user cannot be determined, such as those
                    of other machines: they can run code as you.
  --wait-for-attach [RANKS]
                    Hold every rank before its first line until a debugger is
                    attached to RANKS, such as 0,2-3 [default: all].
  --stop-with-debugger
                    End the job, all ranks at once, when such a debugger is
                    stopped; any other only detaches.
  --debug-on-error  Hold a rank at an uncaught exception until a debugger has
                    been attached.
  --no-debug        No debug ports; breakpoint() is Python's own.
  --workspace DIR   The folder whose .vscode/launch.json gets the ranks
                    [default: the nearest with .vscode or .git].
  --no-vscode       Do not change .vscode/launch.json.
  --path-map LOCAL=REMOTE
                    Where the editor's files are in the job (in a container).

Every option of torchrun is passed on: --nproc-per-node, --nnodes, --node-rank,
--rdzv-endpoint, --standalone, --max-restarts, -m, ... (torchrun --help).
Without --nproc-per-node: one rank per visible GPU, or 2 without a GPU.

Exit status: the job's own; 2 for bad input; 3 with --strict and 4 with
--kill-on-hang (see above); 70 if ddpdoctor itself could not start the job.
""",
    {
        "--json": options.FILE,
        "--output": options.OUTPUT,
        "--select": CODES,
        "--ignore": CODES,
        "--notify": options.NOTIFY,
        "--grace": options.seconds(),
        "--hang-after": options.seconds(1),
        "--run-dir": options.DIRECTORY,
        "--journal-mb": options.number(1, 100_000, "a number of megabytes"),
        "--overhead-budget": options.percent(),
        "--debug-port": options.number(0, 65535, "a port number"),
        "--debug-host": options.text("an address of this machine"),
        "--wait-for-attach": options.RANKS._replace(omitted=frozenset()),
        "--workspace": options.DIRECTORY,
        "--path-map": options.PATH_MAP,
    },
    leading=True,
)
