"""Odd jobs, each run without and with `ddpdoctor run`, in the interpreters of this machine."""

from __future__ import annotations

import difflib
import functools
import os
import re
import shlex
import shutil
import string
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import JOBS, LIMIT, Doctor

ODD = JOBS / "odd"
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PYTHONS = "DDPDOCTOR_TEST_PYTHONS"
"""Interpreters to take before those of PATH and pyenv, separated by colons."""

PACKAGES = (
    "cloudpickle", "coverage", "dill", "distributed", "eventlet", "exceptiongroup", "gevent",
    "IPython", "ipykernel", "joblib", "jupyter_client", "mpi4py", "pytest", "ray", "rich",
    "sentry_sdk", "setproctitle", "torch", "uvloop", "xdist", "_testcapi",
)  # fmt: skip


@dataclass(frozen=True)
class Odd:
    """A job.

    Attributes:
        command: As a person types it; `$PYTHON` is the interpreter, `$ODD` the folder of the jobs.
        needs: Packages and programs without which it cannot run.
        env: Variables that it is started with.
        since: The first minor version of Python that has what it needs, or shows no frame of ours.
        sort: Whether processes print at the same time, so the order of lines is any.
        loose: What differs between two runs without ddpdoctor, too.
        ours: What ddpdoctor adds, which cannot be avoided; docs/visible.md says so.
        stdin: What it reads.
    """

    command: str
    needs: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    since: int = 10
    sort: bool = False
    loose: str = ""
    ours: str = ""
    stdin: str = ""


@dataclass(frozen=True)
class Seen:
    """What a person sees of a job, and ddpdoctor's own lines."""

    status: int
    stdout: list[str]
    stderr: list[str]
    ours: list[str]


def _python(*flags: str, **env: str) -> Odd:
    """A job that reports what it sees of the interpreter, and ends with an exception."""
    return Odd(shlex.join(("$PYTHON", *flags, "$ODD/plain.py", "a", "b")), env=tuple(env.items()))


def _ends(*words: str) -> Odd:
    return Odd(shlex.join(("$PYTHON", "$ODD/raises.py", *words)))


INTERPRETER = {
    "plain": _python(),
    "optimized": _python("-O"),
    "optimized twice": _python("-OO"),
    "developer mode": _python("-X", "dev"),
    "warnings are errors": _python("-W", "error"),
    "without site": Odd("$PYTHON -S $ODD/plain.py", ours=r"'[^']*/probe/entry', "),
    "without user site": _python("-s"),
    "safe path": Odd("$PYTHON -P $ODD/plain.py", since=11),
    "isolated": _python("-I"),
    "without environment": _python("-E"),
    "unbuffered": _python("-u"),
    "utf-8": _python("-X", "utf8"),
    "import times": Odd(
        "$PYTHON -X importtime -c 'import json'", loose=r" *\d+ \| +\d+ \|",
        ours=r".*\b(sitecustomize|ddpdoctor_entry)",
    ),
    "traced memory": _python("-X", "tracemalloc=3"),
    "no frozen modules": Odd("$PYTHON -X frozen_modules=off $ODD/plain.py", since=11),
    "faulthandler": _python(PYTHONFAULTHANDLER="1"),
    "PYTHONDEVMODE": _python(PYTHONDEVMODE="1"),
    "PYTHONHASHSEED": _python(PYTHONHASHSEED="0"),
    "PYTHONINSPECT": _python(PYTHONINSPECT="1"),
    "PYTHONSAFEPATH": _python(PYTHONSAFEPATH="1"),
    "PYTHONWARNINGS": _python(PYTHONWARNINGS="error,ignore::DeprecationWarning"),
    "PYTHONMALLOC": _python(PYTHONMALLOC="debug"),
    "PYTHONPATH with gaps": _python(PYTHONPATH=":/nowhere::lib:."),
    "PYTHONSTARTUP": Odd(
        "$PYTHON -i", env=(("PYTHONSTARTUP", "$ODD/package/__main__.py"),), stdin="print(1)\n1/0\n"
    ),
    "script on stdin": Odd("$PYTHON -", stdin="import sys\nprint(sys.argv)\n1/0\n"),
    "command": Odd("$PYTHON -c 'import sys; print(sys.argv, sys.path[0]); 1/0' a"),
    "module": Odd("sh -c 'cd $ODD && exec $PYTHON -m package a'"),
    "directory": Odd("$PYTHON $ODD/package a"),
    "zip file": Odd("sh -c '$PYTHON -m zipapp $ODD/package -o job.pyz && exec $PYTHON job.pyz a'"),
    "symbolic link": Odd("sh -c 'ln -sf $ODD/plain.py link.py && exec $PYTHON link.py'"),
    "names of Python's": Odd("$PYTHON $ODD/more_names/job.py"),
    "no such script": Odd("$PYTHON nowhere.py"),
    "no such module": Odd("$PYTHON -m nowhere"),
    "syntax error": Odd("$PYTHON -c 'a = (1,'"),
    "directory is gone": Odd("""sh -c 'mkdir -p gone && cd gone && rmdir ../gone &&
        exec $PYTHON -c "import os; print(os.listdir()); os.getcwd()"'"""),
    "sitecustomize prints": _python(PYTHONPATH="$ODD/site_prints"),
    "sitecustomize raises": _python(PYTHONPATH="$ODD/site_raises"),
    "sitecustomize leaves": _python(PYTHONPATH="$ODD/site_exits"),
    "runpy": Odd("""$PYTHON -c 'import runpy; runpy.run_path("$ODD/plain.py", {"a": 1}, "job")'"""),
    "pdb": Odd("$PYTHON -m pdb -c continue $ODD/plain.py", stdin="w\np a\nq\n"),
    "profiler": Odd(
        "$PYTHON -m cProfile -s name $ODD/plain.py", loose=r"\d+\.\d+|\d+ function.*|0x\w+",
        sort=True,
    ),
    "trace": Odd(
        "$PYTHON -m trace --count --summary -C . $ODD/raises.py exit 3", ours=".*sitecustomize.*"
    ),
    "console": Odd("$PYTHON -m code", stdin="import sys\nsys.excepthook\n1/0\n"),
    "unittest": Odd("$PYTHON -m unittest nowhere", loose=r"\d+\.\d+s"),
}  # fmt: skip

STREAMS = {
    "no stdin": Odd("sh -c 'exec $PYTHON $ODD/plain.py <&-'"),
    "no stdout": Odd("sh -c 'exec $PYTHON $ODD/plain.py >&-'"),
    "no stderr": Odd("sh -c 'exec $PYTHON $ODD/plain.py 2>&-'"),
    "no streams": Odd("sh -c 'exec $PYTHON $ODD/plain.py <&- >&- 2>&-'"),
    "broken pipe": Odd("""sh -c '$PYTHON -c "print(1); print(2 * 10 ** 5 * str(3))" | head -1'"""),
    "both into a pipe": Odd("sh -c '$PYTHON -u $ODD/raises.py chained 2>&1 | cat'"),
    "full disk": Odd("sh -c 'exec $PYTHON $ODD/plain.py > /dev/full'"),
    "pseudo-terminal": Odd("script -qec '$PYTHON $ODD/plain.py' /dev/null", ("script",)),
    "tmux": Odd(
        """sh -c 'tmux -L odd$$$$ -f /dev/null new -d "$PYTHON $ODD/plain.py > out 2>&1;
        tmux wait -S done" \\; wait done; cat out; rm out'""", ("tmux",)
    ),
    "few descriptors": Odd("sh -c 'ulimit -n 16; exec $PYTHON $ODD/plain.py'"),
    "little memory": Odd("sh -c 'ulimit -v 400000; exec $PYTHON $ODD/plain.py'"),
    "no file may grow": Odd("sh -c 'ulimit -f 0; exec $PYTHON $ODD/plain.py'"),
    "small stack": Odd("sh -c 'ulimit -s 512; exec $PYTHON $ODD/plain.py'"),
    "no TMPDIR": _python(TMPDIR="/nowhere"),
    "no home": _python(HOME="/nowhere"),
    "umask": Odd("sh -c 'umask 777; exec $PYTHON $ODD/plain.py'"),
    "ignored signals": Odd(
        """sh -c 'trap "" INT TERM HUP PIPE USR1; exec $PYTHON $ODD/plain.py'"""
    ),
    "empty environment": Odd("env -i $PYTHON $ODD/plain.py"),
}  # fmt: skip

ENDINGS = {
    **{way: _ends(way) for way in (
        "chained", "in_context", "suppressed", "noted", "deep", "unspeakable", "interrupt",
        "in_thread", "exit_in_thread", "in_del", "at_exit", "exit_at_exit", "own_hooks",
        "broken_hook", "no_hook", "hook_is_none", "hook_leaves", "saved_hook", "restored_hook",
        "no_stderr", "closed_stderr", "limit", "syntax", "without_modules", "memory", "stop_and_go",
        "SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGKILL", "SIGSEGV", "SIGABRT",
    )},
    **{f"exit {status}": _ends("exit", status) for status in (
        "3", "0", "None", "256", "-1", "'some words'", "(1, 2)", "True", "10**30",
    )},
    "_exit": _ends("_exit", "7"),
    "raise SystemExit": _ends("raise", "SystemExit('left')"),
    "raise BaseException": _ends("raise", "BaseException('base')"),
    "raise GeneratorExit": _ends("raise", "GeneratorExit"),
    "group": Odd("$PYTHON $ODD/raises.py group", since=11),
    "group on 3.10": Odd("$PYTHON $ODD/raises.py group", ("exceptiongroup",)),
}  # fmt: skip


def _starts(*words: str, sort: bool = False) -> Odd:
    return Odd(shlex.join(("$PYTHON", "$ODD/processes.py", *words)), sort=sort)


PROCESSES = {
    **{f"multiprocessing {name}": Odd(
        f"$PYTHON $ODD/processes.py method {name}", loose=r"Process child \d"
    ) for name in ("fork", "forkserver", "spawn")},
    **{f"executor {name}": _starts("executor", name, sort=True)
       for name in ("fork", "forkserver", "spawn")},
    **{name: _starts(name) for name in (
        "own_run", "fork", "daemon", "spawned", "shell", "terminal", "interrupted",
    )},
    "shared": Odd("$PYTHON $ODD/processes.py shared", loose=r"/psm_\w+"),
    "exec chain": _starts("exec_chain", "3"),
    "interpreters": Odd("$PYTHON $ODD/processes.py interpreters", ("_testcapi",)),
}  # fmt: skip

LOOKS = {
    **{name: Odd(f"$PYTHON $ODD/looks.py {name}") for name in (
        "settrace", "setprofile", "monitoring", "traced_to_the_end", "audit", "tracemalloc",
        "garbage", "finders", "hooks", "logs", "sources",
    )},
    "faults": Odd("$PYTHON $ODD/looks.py fault", loose=r"Thread 0x\w+|0x\w+"),
}  # fmt: skip


def _library(name: str, *needs: str, sort: bool = False, loose: str = "") -> Odd:
    return Odd(f"$PYTHON $ODD/libraries.py {name}", needs or (name,), sort=sort, loose=loose)


_PYTEST = "$PYTHON -m pytest -p no:cacheprovider -c /dev/null --rootdir . $ODD/suite.py"
_SECONDS = r"in \d+\.\d+s|=+|\d+\.\d+s"

LIBRARIES = {
    "IPython script": Odd(
        "$PYTHON -m IPython --no-banner $ODD/plain.py", ("IPython",), (("IPYTHONDIR", "."),)
    ),
    "IPython command": Odd(
        "$PYTHON -m IPython --no-banner -c 'import sys; print(sys.excepthook.__qualname__); 1/0'",
        ("IPython",), (("IPYTHONDIR", "."),),
    ),
    "kernel": _library("kernel", "ipykernel", "jupyter_client"),
    "pytest": Odd(_PYTEST, ("pytest",), loose=_SECONDS),
    "pytest -x": Odd(f"{_PYTEST} -x", ("pytest",), loose=_SECONDS),
    "pytest -n 2": Odd(
        f"{_PYTEST} -n 2", ("pytest", "xdist"), loose=_SECONDS + r"|gw\d|\[...%\]|^[.F]+", sort=True
    ),
    "pytest native": Odd(f"{_PYTEST} --tb=native", ("pytest",), loose=_SECONDS),
    "coverage": Odd(
        "sh -c '$PYTHON -m coverage run --parallel-mode $ODD/processes.py fork; echo $?;"
        " $PYTHON -m coverage combine -q; $PYTHON -m coverage report; rm .coverage'",
        ("coverage",), sort=True,
    ),
    "coverage of subprocesses": Odd(
        "sh -c '$PYTHON -m coverage run --rcfile=$ODD/coverage.ini $ODD/processes.py shell;"
        " $PYTHON -m coverage combine -q; $PYTHON -m coverage report; rm .coverage'",
        ("coverage",), sort=True, ours=r".*/probe/entry/.*|TOTAL.*|-+$| +",
    ),
    "uvloop": _library("uvloop"),
    "gevent": _library("gevent", loose=r"^20\d\d-\S+"),
    "eventlet": _library("eventlet"),
    "loky": _library("loky", "joblib", sort=True),
    "ray": _library("ray", sort=True),
    "dask": _library(
        "dask", "distributed", sort=True, loose=r"^20\d\d-\S+ \S+|fails-[\w-]+|port \d+"
    ),
    "mpi": Odd(
        "mpiexec --allow-run-as-root --oversubscribe -n 2 $PYTHON $ODD/libraries.py mpi",
        ("mpi4py", "mpiexec"), sort=True,
    ),
    "proctitle": _library("proctitle", "setproctitle"),
    "rich": _library("rich"),
    "sentry": _library("sentry", "sentry_sdk"),
    "exceptiongroup": _library("exceptiongroup"),
    "pickles": _library("pickles", "cloudpickle", "dill"),
}  # fmt: skip

_WAYS = {
    **{name: (name,) for name in (
        "fails", "fails_on_one", "leaves", "trains", "subclasses", "looks", "compiled", "exported",
        "spawned", "saved",
    )},
    **{f"workers by {name}": ("workers", name) for name in ("fork", "spawn", "forkserver")},
}  # fmt: skip

# torchrun's report of a failure has times, and its ranks print in any order.
_TORCHRUN = r"\b[EWI]\d{4} \S+ \d+ |time +: .*|pid: \d+|\d{4}-\d\d-\d\d\S+|^Fatal Python.*|\d{4,}"
_TRAINED = "$PYTHON -m torch.distributed.run --nproc-per-node"

TORCH = {
    **{f"torch {name}": Odd(
        shlex.join(("$PYTHON", "$ODD/torches.py", *words)), ("torch",), loose=_TORCHRUN, sort=True
    ) for name, words in _WAYS.items()},
    "torch pickled": Odd(
        "$PYTHON $ODD/torches.py pickled", ("torch", "cloudpickle", "dill"), loose=_TORCHRUN
    ),
    **{f"rank {name}": Odd(
        shlex.join((*_TRAINED.split(), "1", "$ODD/torches.py", *words)), ("torch",),
        loose=_TORCHRUN, sort=True, since=11 if name.startswith(("workers", "spawned")) else 10,
    ) for name, words in _WAYS.items()},
    **{f"torch, names of Python's {when}": Odd(
        f"$PYTHON $ODD/names/job.py {when}", ("torch",)
    ) for when in ("first", "last")},
    **{f"rank, names of Python's {when}": Odd(
        f"{_TRAINED} 1 $ODD/names/job.py {when} rank", ("torch",), loose=_TORCHRUN, sort=True
    ) for when in ("first", "last")},
    **{f"two ranks {name}": Odd(
        shlex.join((*_TRAINED.split(), "2", "$ODD/torches.py", name)), ("torch",), loose=_TORCHRUN,
        sort=True,
    ) for name in ("trains", "fails_on_one")},
}  # fmt: skip

TABLE = {**INTERPRETER, **STREAMS, **ENDINGS, **PROCESSES, **LOOKS, **LIBRARIES, **TORCH}


# -- interpreters


@functools.cache
def _pythons() -> list[tuple[str, str, frozenset[str]]]:
    """The interpreters of this machine: version, path, and which of `PACKAGES` they have."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    named = os.environ.get(PYTHONS, "").split(os.pathsep)
    places = [os.environ.get("PATH", ""), *map(str, sorted(root.glob("*/bin")))]
    found = [
        shutil.which(f"python{version}", path=place) for place in places for version in VERSIONS
    ]
    question = (
        "import sys; from importlib.util import find_spec as find;"
        f"print('%d.%d' % sys.version_info[:2], *filter(find, {PACKAGES}))"
    )
    answers = []
    for path in dict.fromkeys(filter(None, [*named, sys.executable, *found])):
        # A shim of pyenv's fails if its version is not chosen.
        asked = subprocess.run([path, "-c", question], capture_output=True, text=True)
        if asked.returncode == 0:
            version, *packages = asked.stdout.split()
            answers.append((version, path, frozenset(packages)))
    return answers


def interpreter(version: str, needs: Sequence[str] = ()) -> str:
    """An interpreter of that version with what is needed; skips the test if there is none."""
    packages = {need for need in needs if need in PACKAGES}
    for program in set(needs) - packages:
        if shutil.which(program) is None:
            pytest.skip(f"no {program} on this machine")
    for found, path, has in _pythons():
        if found == version and packages <= has:
            return path
    pytest.skip(
        f"no Python {version} with {', '.join(packages) or 'anything'}; {PYTHONS} names one"
    )


# -- one job, without and with ddpdoctor


def seen(doctor: Doctor, job: Odd, python: str, watch: bool) -> Seen:
    """Run the job and return what a person sees of it, ddpdoctor's own lines left out."""
    names = {"PYTHON": python, "ODD": str(ODD)}
    fill = [string.Template(word).safe_substitute(names) for word in shlex.split(job.command)]
    directory = doctor.directory / ("watched" if watch else "bare")
    directory.mkdir()
    # The path of a Unix socket in it, such as multiprocessing's and Ray's, holds 107 characters.
    temporary = tempfile.mkdtemp(prefix="odd-", dir="/tmp")
    environment = doctor.environment({"TMPDIR": temporary, "HOME": str(directory)})
    for name in ("PYTHONWARNINGS", "PYTHONPATH", "PYTEST_CURRENT_TEST", "COLUMNS"):
        environment.pop(name, None)
    given = {name: string.Template(value).safe_substitute(names) for name, value in job.env}
    run = [sys.executable, "-m", "ddpdoctor", "run", "--run-dir", str(doctor.directory / "run")]
    ours = [*run, "--debug-port", "0", "--"] if watch else []
    # What is meant for the job's Python is not for ddpdoctor's.
    ours += ["env", *(f"{name}={given.pop(name)}" for name in set(given) if "PYTHON" in name)]
    try:
        done = subprocess.run(
            [*ours, *fill],
            cwd=directory,
            env={**environment, **given},
            input=job.stdin,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            start_new_session=True,
            timeout=LIMIT,
        )
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Seen(
        done.returncode,
        _lines(done.stdout.replace(temporary, "DIRECTORY"), directory, job),
        _lines(done.stderr.replace(temporary, "DIRECTORY"), directory, job),
        [line for line in done.stderr.splitlines() if line.startswith("ddpdoctor: ")],
    )


def differences(bare: Seen, watched: Seen) -> str:
    """Return what is seen without ddpdoctor alone (-), and with it alone (+)."""
    one, other = (
        [f"status {each.status}", *each.stdout, "-- stderr", *each.stderr]
        for each in (bare, watched)
    )
    found = [*difflib.unified_diff(one, other, "bare", "watched", n=0, lineterm="")]
    return "\n".join([*found, *watched.ours] if found else [])


def _lines(text: str, directory: Path, job: Odd) -> list[str]:
    """The lines without what differs between any two runs."""
    text = text.replace(str(directory), "DIRECTORY")
    text = re.sub(r"\b0x[0-9a-f]{6,}\b|\bpid[ =]\d+|(?<=Process-)\d+", "#", text)
    lines = [line for line in text.splitlines() if not line.startswith("ddpdoctor: ")]
    if job.ours:
        lines = [left for line in lines if (left := re.sub(job.ours, "", line))]
    if job.loose:
        lines = [re.sub(job.loose, "#", line) for line in lines]
    return sorted(lines) if job.sort else lines
