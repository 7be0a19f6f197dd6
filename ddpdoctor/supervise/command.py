"""The command line of ``ddpdoctor run``, and the job's command that it describes."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddpdoctor.core import options
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import count
from ddpdoctor.core.job import Command, OwnOptions
from ddpdoctor.core.options import CODES, Given, Parser, Passed, Selection, read_options

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
                    finding remains, or its code has an error.
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
  --log-to TARGET   Send times, waits, memory and findings to tensorboard[:DIR],
                    wandb[:PROJECT], mlflow[:URL] or otlp[:URL]; may be given
                    more than once.
  --grace SECONDS   Time the job has to end after SIGINT, SIGTERM or SIGHUP
                    [default: 30].
  --hang-after SECONDS
                    Examine a job that made no progress for so long
                    [default: 30, or 20 median steps if that is longer; the
                    first step may take 10 times as long while it works].
  --kill-on-hang    End a job that certainly hangs, after the cause is printed.
  --run-dir DIR     Keep the records in DIR, new or empty
                    [default: a directory below <tmp>/ddpdoctor-<uid>/].
  --no-nodes        Judge the ranks of this node alone [default: ranks of all
                    nodes that run under ddpdoctor are judged on rank 0's node].
  --no-lint         Do not check the script's code for misuse of DDP.
  --capsule         Keep the step in which a rank fails, or its loss is no longer
                    finite, for ddpdoctor replay.
  --journal-mb N    Most megabytes of records per rank [default: 64].
  --overhead-budget PERCENT
                    What the checks for wrong results, and hooks that need not
                    run in each step, may cost, in per cent of the step time;
                    0: no checks [default: 0.5].
  -h, --help        Show this text.

Debugger (debugpy starts in a rank only when a client attaches):
  --debug-port PORT Local rank R listens on PORT + R [default: 5678; 0: any].
  --debug-host ADDRESS
                    Listen there instead of on 127.0.0.1, where only you and
                    root are admitted; needs --debug-unidentified.
  --debug-unidentified
                    Admit clients whose user cannot be determined, such as those
                    of other machines: they can run code as you.
  --debug-nodes     Let debuggers on rank 0's node attach to ranks of this one. So
                    can whoever is able to write to the job's store.
  --wait-for-attach [RANKS]
                    Hold every rank before its first line until a debugger is
                    attached to RANKS, such as 0,2-3 [default: all].
  --stop-with-debugger
                    End the job, all ranks at once, when such a debugger is
                    stopped; any other only detaches.
  --debug-on-error  Hold a rank at an uncaught exception until a debugger has
                    been attached.
  --wait-in-terminal
                    When a rank waits at breakpoint() or at such an exception,
                    open the prompt of `ddpdoctor debug` in this terminal.
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
        "--log-to": options.LOG_TO,
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


TORCHRUN = str(Path(__file__).parent / "entry" / "torchrun")
"""torchrun's own entry point. With ``-m torch.distributed.run`` its log lines would begin
differently, and the working directory would be in its path."""

DEFAULT_CPU_RANKS = 2
_NPROC = ("--nproc-per-node", "--nproc_per_node")
_NPROC_WORDS = frozenset({"auto", "cpu", "gpu", "xpu"})


def build(words: Sequence[str], environ: Mapping[str, str]) -> Command:
    """Return the job that the command line of ``ddpdoctor run`` describes.

    Options come first, ddpdoctor's and torchrun's in any order. The first other word, or the one
    after ``--``, is the script or the command, and all further words are its arguments.

    Args:
        words: The words after ``ddpdoctor run``.
        environ: The environment, for torchrun's ``PET_*`` defaults and ``CUDA_VISIBLE_DEVICES``.

    Raises:
        DoctorError: The command line cannot work. Nothing was started.
        HelpRequest: It asks for the help text.
    """
    given = PARSER.read(words, {})
    fields = given.fields()
    for name in ("select", "ignore"):
        fields.pop(name, None)
    own = OwnOptions(**fields, selection=Selection.given(given))
    _check_debug_options(own)
    if not given.rest:
        raise DoctorError(
            "no script to run", "for example: ddpdoctor run --nproc-per-node 2 -- train.py"
        )
    _take_python_options(given)
    script = given.rest[0]
    as_module = given.has_passed("-m", "--module") or _is_on(environ, "PET_MODULE")
    no_python = given.has_passed("--no-python", "--no_python") or _is_on(environ, "PET_NO_PYTHON")
    # Without the separator, options of torchrun mean that its script follows.
    for_torchrun = as_module or no_python or (bool(given.passed) and not given.separator)
    if not for_torchrun and _is_executable(script):
        return _of_command(given, own)
    # This reports first if there is no torch.
    read_options()
    nproc = _nproc(given, environ)
    ranks, note, extra = _local_ranks(nproc, environ), "", []
    if nproc is None:
        gpus = _gpus(environ)
        ranks = gpus or DEFAULT_CPU_RANKS
        extra = ["--nproc-per-node", str(ranks)]
        what = f"one per visible GPU ({gpus})" if gpus else "no GPU here"
        note = f"starting {count(ranks, 'rank')}, {what}; --nproc-per-node N chooses another number"
    if no_python and shutil.which(script) is None:
        raise DoctorError(f"{script}: no such program", "check the name, or give a path")
    if not no_python and not as_module:
        _check_script(script)
    separator = ["--"] if given.separator else []
    argv = [sys.executable, TORCHRUN, *given.typed(), *extra, *separator, *given.rest]
    nodes = given.last_passed("--nnodes") or environ.get("PET_NNODES", "1")
    return Command(
        argv=tuple(argv),
        own=own,
        note=note,
        through_torchrun=True,
        local_ranks=ranks,
        one_node=nodes == "1",
        script=os.path.basename(script),
    )


def _check_debug_options(own: OwnOptions) -> None:
    wanted = {
        "--wait-for-attach": own.wait_for_attach is not None,
        "--debug-on-error": own.debug_on_error,
        "--wait-in-terminal": own.wait_in_terminal,
    }
    if own.no_debug and any(wanted.values()):
        option = next(name for name, is_given in wanted.items() if is_given)
        raise DoctorError(f"{option} needs the debugger", "leave out --no-debug")
    if own.stop_with_debugger and own.wait_for_attach is None:
        raise DoctorError(
            "--stop-with-debugger is for the debugger that the ranks wait for at the start",
            "add --wait-for-attach",
        )


def _of_command(given: Given, own: OwnOptions) -> Command:
    """Return a job whose command starts the ranks itself."""
    if given.passed:
        raise DoctorError(
            f"{given.passed[0].words[0]} is an option of torchrun, but the job is the "
            f"command {given.rest[0]}",
            f"leave it out, or give torchrun a program with --no-python -- {given.rest[0]}",
        )
    scripts = [word for word in given.rest if word.endswith(".py")]
    name = os.path.basename((scripts or given.rest)[0])
    return Command(tuple(given.rest), own, "", through_torchrun=False, script=name)


def _take_python_options(given: Given) -> None:
    """Accept options of Python after ``--``, such as ``-m pkg.train``."""
    word = given.rest[0]
    if not given.separator or not word.startswith("-") or given.has_passed("-m", "--module"):
        return
    if os.path.lexists(word) or given.has_passed("--no-python", "--no_python"):
        return
    if word in ("-m", "--module"):
        if len(given.rest) < 2:
            raise DoctorError(f"option {word} needs a module", "such as: -- -m package.train")
        given.passed.append(Passed("-m", ("-m",)))
        given.rest = given.rest[1:]
    elif word == "-c":
        raise DoctorError("-c: torchrun starts a file or a module", "put the code into a file")
    else:
        raise DoctorError(
            f"{word}: no such file",
            "options of ddpdoctor and torchrun go before the --; for one of python's: "
            f"--no-python -- python {word} train.py",
        )


def _nproc(given: Given, environ: Mapping[str, str]) -> str | None:
    value, name = given.last_passed(*_NPROC), "--nproc-per-node"
    if value is None:
        value, name = environ.get("PET_NPROC_PER_NODE"), "PET_NPROC_PER_NODE"
    if value is None or value in _NPROC_WORDS:
        return value
    if not value.isdigit() or int(value) < 1:
        raise DoctorError(f"{name} {value}: needs a number of ranks, 1 or more (or gpu, cpu, auto)")
    return value


def _local_ranks(nproc: str | None, environ: Mapping[str, str]) -> int | None:
    """Return the number of ranks that torchrun starts on this node. None if only it knows."""
    if nproc is None:
        return None
    if nproc.isdigit():
        return int(nproc)
    if nproc == "cpu":
        return os.cpu_count()
    return _gpus(environ) or (os.cpu_count() if nproc == "auto" else None)


def _gpus(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs visible to the job."""
    # Imported only where the number of ranks depends on it.
    from ddpdoctor.system.nvml import visible

    return visible(environ)


def _is_executable(word: str) -> bool:
    """Return whether the first word is a command rather than a script for torchrun."""
    if word.endswith(".py"):
        return False
    if os.sep in word:
        return os.path.isfile(word) and os.access(word, os.X_OK)
    return not os.path.isfile(word) and shutil.which(word) is not None


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    """Return whether torchrun regards a ``PET_*`` flag as set: to a number other than 0."""
    try:
        return bool(int(environ.get(name, "0")))
    except ValueError:
        return False


def _check_script(script: str) -> None:
    """Reject a script that Python cannot run, before each rank spends seconds on it."""
    path = Path(script)
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise DoctorError(f"{script} is a directory without a __main__.py")
        return
    if path.exists() and not path.is_file():
        # A pipe or /dev/stdin can be read only once, by the job.
        return
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise DoctorError(f"{script}: no such file", _nearby(path)) from None
    except OSError as error:
        raise DoctorError(f"{script} cannot be read: {error.strerror}") from None
    try:
        with warnings.catch_warnings():
            # Each rank will print them once, as without ddpdoctor.
            warnings.simplefilter("ignore")
            compile(source, script, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        import zipfile

        if zipfile.is_zipfile(path):
            # Python runs the archive's __main__.py.
            return
        if not isinstance(error, SyntaxError):
            raise DoctorError(f"{script} is not a Python script: {error}") from None
        where = f"{script}:{error.lineno}" if error.lineno else script
        # VS Code's F5 runs the open file, which may be the launch.json just written.
        hint = "" if path.suffix == ".py" else "open the training script, or name it"
        raise DoctorError(f"{where} is not valid Python: {error.msg}", hint) from None
    except (RecursionError, MemoryError):
        # Too deeply nested to be compiled here. The ranks will try.
        return


def _nearby(path: Path) -> str:
    import difflib

    try:
        names = [entry.name for entry in (path.parent).iterdir() if entry.suffix == ".py"]
    except OSError:
        return f"there is no directory {path.parent}"
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / close[0]}?" if close else f"looked in {Path.cwd()}"
