"""From the words after ``ddpdoctor run`` to the command that is the job."""

from __future__ import annotations

import os
import re
import shutil
import sys
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.job import Command, OwnOptions
from ddpdoctor.core.ranks import is_rank_set, rank_set
from ddpdoctor.supervise.torchrun_options import TorchrunOptions, read_options, torchrun_source
from ddpdoctor.system.gpu.visible import visible

TORCHRUN = str(Path(__file__).parent / "entry" / "torchrun")
"""torchrun's own entry point. Not ``-m torch.distributed.run``: as ``__main__`` its log lines have
another head, and the working directory is in its path."""

DEFAULT_CPU_RANKS = 2
_NUMBER = re.compile(r"-$|-\d+$|-\d*\.\d+$")
_NPROC = ("--nproc-per-node", "--nproc_per_node")
_NPROC_WORDS = frozenset({"auto", "cpu", "gpu", "xpu"})


@dataclass
class _Words:
    """The command line taken apart."""

    own: dict[str, object] = field(default_factory=dict)
    torchrun: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Option in full, as it was typed, and its value, in order."""
    rest: list[str] = field(default_factory=list)
    separator: bool = False
    """Whether ``--`` stood before the rest."""
    help: bool = False

    def typed(self) -> list[str]:
        words: list[str] = []
        for _, typed, value in self.torchrun:
            if value is None or "=" in typed or (len(typed) > 2 and typed[1] != "-"):
                words.append(typed)
            else:
                words += [typed, value]
        return words

    def last(self, *names: str) -> str | None:
        found = [value for name, _, value in self.torchrun if name in names]
        return found[-1] if found else None

    def has(self, *names: str) -> bool:
        return any(name in names for name, _, _ in self.torchrun)


def _flag(_: str) -> bool:
    return True


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e6:
        raise ValueError
    return value


def _positive_seconds(text: str) -> float:
    value = _seconds(text)
    if value < 1:
        raise ValueError
    return value


def _megabytes(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 100_000:
        raise ValueError
    return value


def _percent(text: str) -> float:
    value = float(text.removesuffix("%"))
    if not 0 <= value <= 100:
        raise ValueError
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise ValueError
    return value


def _address(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _name(text: str) -> str:
    """A file or directory; an empty one would be the working directory, as in ``"$UNSET"``."""
    if not text:
        raise ValueError
    return text


def _output(text: str) -> str:
    if text not in ("text", "problems"):
        raise ValueError
    return text


def _mapping(text: str) -> tuple[str, str]:
    local, equals, remote = text.partition("=")
    if not local or not equals or not remote:
        raise ValueError
    return local, remote


_OWN: dict[str, tuple[str, Callable[[str], object], str]] = {
    "--quiet": ("quiet", _flag, ""),
    "--strict": ("strict", _flag, ""),
    "--grace": ("grace", _seconds, "a number of seconds, 0 or more"),
    "--hang-after": ("hang_after", _positive_seconds, "a number of seconds, 1 or more"),
    "--kill-on-hang": ("kill_on_hang", _flag, ""),
    "--run-dir": ("run_dir", _name, "a directory"),
    "--json": ("json", _name, "a file name"),
    "--output": ("output", _output, "text or problems"),
    "--journal-mb": ("journal_mb", _megabytes, "a number of megabytes, 1 or more"),
    "--overhead-budget": ("overhead_budget", _percent, "per cent of the step time, 0 to 100"),
    "--no-debug": ("no_debug", _flag, ""),
    "--debug-port": ("debug_port", _port, "a port number (0: any)"),
    "--debug-host": ("debug_host", _address, "an address of this machine"),
    "--debug-unidentified": ("debug_unidentified", _flag, ""),
    "--debug-on-error": ("debug_on_error", _flag, ""),
    "--wait-for-attach": ("wait_for_attach", rank_set, "ranks such as 0,2-3"),
    "--stop-with-debugger": ("stop_with_debugger", _flag, ""),
    "--no-vscode": ("no_vscode", _flag, ""),
    "--workspace": ("workspace", _name, "a directory"),
    "--path-map": ("path_map", _mapping, "LOCAL=REMOTE"),
}
_REPEATED = frozenset({"--path-map"})
_OPTIONAL: dict[str, object] = {"--wait-for-attach": frozenset()}
"""Options whose value may be left out, and what they then mean."""


def build(words: Sequence[str], environ: Mapping[str, str]) -> Command | None:
    """Understand the command line of ``ddpdoctor run``.

    Options come first, ours and torchrun's in any order; the first other word, or the one behind
    ``--``, is the script or the command, and everything behind it is its own.

    Args:
        words: The words after ``ddpdoctor run``.
        environ: The environment, for torchrun's ``PET_*`` defaults and ``CUDA_VISIBLE_DEVICES``.

    Returns:
        The job, or None if help is asked for.

    Raises:
        DoctorError: Something in it cannot work, said before anything was started.
    """
    options = read_options(torchrun_source())
    parts = _take_apart(words, options)
    if parts.help:
        return None
    own = OwnOptions(**parts.own)  # type: ignore[arg-type]
    if own.no_debug and (own.wait_for_attach is not None or own.debug_on_error):
        wanted = "--debug-on-error" if own.debug_on_error else "--wait-for-attach"
        raise DoctorError(f"{wanted} needs the debugger", "leave out --no-debug")
    if own.stop_with_debugger and own.wait_for_attach is None:
        raise DoctorError(
            "--stop-with-debugger is for the debugger that the ranks wait for at the start",
            "add --wait-for-attach",
        )
    if not parts.rest:
        raise DoctorError(
            "no script to run", "for example: ddpdoctor run --nproc-per-node 2 -- train.py"
        )
    _take_python_options(parts)
    script = parts.rest[0]
    as_module = parts.has("-m", "--module") or _is_on(environ, "PET_MODULE")
    no_python = parts.has("--no-python", "--no_python") or _is_on(environ, "PET_NO_PYTHON")
    # Without the separator, torchrun's options say that what follows is torchrun's script.
    for_torchrun = as_module or no_python or (bool(parts.torchrun) and not parts.separator)
    if not for_torchrun and _is_executable(script):
        if parts.torchrun:
            raise DoctorError(
                f"{parts.torchrun[0][1]} is an option of torchrun, but the job is the "
                f"command {script}",
                f"leave it out, or give torchrun a program with --no-python -- {script}",
            )
        return Command(
            tuple(parts.rest), own, "", through_torchrun=False, script=_called(parts.rest)
        )
    nproc = _nproc(parts, environ)
    note = ""
    extra: list[str] = []
    ranks = _local_ranks(nproc, environ)
    if nproc is None:
        count = visible(environ)
        ranks = count or DEFAULT_CPU_RANKS
        extra = ["--nproc-per-node", str(ranks)]
        what = f"one per visible GPU ({count})" if count else "no GPU here"
        note = f"starting {ranks} ranks, {what}; --nproc-per-node N chooses another number"
    if no_python:
        if shutil.which(script) is None:
            raise DoctorError(f"{script}: no such program", "check the name, or give a path")
    elif not as_module:
        _check_script(script)
    separator = ["--"] if parts.separator else []
    argv = [sys.executable, TORCHRUN, *parts.typed(), *extra, *separator, *parts.rest]
    return Command(
        argv=tuple(argv),
        own=own,
        note=note,
        through_torchrun=True,
        local_ranks=ranks,
        one_node=_nodes(parts, environ) == "1",
        script=os.path.basename(script),
    )


def _take_apart(words: Sequence[str], options: TorchrunOptions) -> _Words:
    parts = _Words()
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word == "--":
            parts.rest, parts.separator = queue, True
            break
        if not word.startswith("-") or word == "-":
            parts.rest = [word, *queue]
            break
        _take_option(parts, word, options, queue)
    return parts


def _take_option(parts: _Words, word: str, options: TorchrunOptions, queue: list[str]) -> None:
    """Take one option in, and its value off the queue."""
    name, equals, given = word.partition("=")
    if name in _OWN:
        _take_own(parts, name, given if equals else None, queue)
        return
    if not word.startswith("--") and len(word) > 2:
        _take_joined(parts, word, options, queue)
        return
    option = options.resolve(name)
    if option is None:
        raise DoctorError(f"unknown option {name}", _suggestion(name, options))
    if option in ("-h", "--help"):
        parts.help = True
    elif not options.takes_value[option]:
        if equals:
            raise DoctorError(f"option {name} takes no value")
        parts.torchrun.append((option, word, None))
    elif equals:
        parts.torchrun.append((option, word, given))
    else:
        parts.torchrun.append((option, word, _value(name, queue)))


def taken_by_option(words: Sequence[str]) -> int:
    """How many words an option of ``ddpdoctor run`` or torchrun takes, itself included.

    Args:
        words: The option, and what follows it.

    Raises:
        DoctorError: There is no such option, or its value is missing or wrong.
    """
    queue = list(words[1:])
    _take_option(_Words(), words[0], read_options(torchrun_source()), queue)
    return len(words) - len(queue)


def _take_python_options(parts: _Words) -> None:
    """What stands behind ``--`` as if it were behind ``python``: ``-m pkg.train``.

    Raises:
        DoctorError: It is an option that cannot stand there.
    """
    word = parts.rest[0]
    if not parts.separator or not word.startswith("-") or parts.has("-m", "--module"):
        return
    if os.path.lexists(word) or parts.has("--no-python", "--no_python"):
        return
    if word in ("-m", "--module"):
        if len(parts.rest) < 2:
            raise DoctorError(f"option {word} needs a module", "such as: -- -m package.train")
        parts.torchrun.append(("-m", "-m", None))
        parts.rest = parts.rest[1:]
    elif word == "-c":
        raise DoctorError("-c: torchrun starts a file or a module", "put the code into a file")
    else:
        raise DoctorError(
            f"{word}: no such file",
            "options of ddpdoctor and torchrun stand before the --; for one of python's: "
            f"--no-python -- python {word} train.py",
        )


def _take_joined(parts: _Words, word: str, options: TorchrunOptions, queue: list[str]) -> None:
    """Short options in one word, as argparse has them: ``-r3``, ``-mr3``, ``-mr 3``."""
    for place in range(1, len(word)):
        option = f"-{word[place]}"
        if option not in options.takes_value:
            raise DoctorError(f"unknown option {word}", _suggestion(word, options))
        if option == "-h":
            parts.help = True
        elif not options.takes_value[option]:
            parts.torchrun.append((option, option, None))
        elif place + 1 < len(word):
            parts.torchrun.append((option, option + word[place + 1 :], word[place + 1 :]))
            return
        else:
            parts.torchrun.append((option, option, _value(option, queue)))


def _value(name: str, queue: list[str]) -> str:
    """The next word as an option's value; as for argparse, no other option can be one."""
    if not queue or (queue[0].startswith("-") and not _NUMBER.match(queue[0])):
        raise DoctorError(f"option {name} needs a value")
    return queue.pop(0)


def _take_own(parts: _Words, name: str, given: str | None, queue: list[str]) -> None:
    key, convert, wanted = _OWN[name]
    if not wanted:
        if given is not None:
            raise DoctorError(f"option {name} takes no value")
        parts.own[key] = True
        return
    if given is None and name in _OPTIONAL and not (queue and is_rank_set(queue[0])):
        parts.own[key] = _OPTIONAL[name]
        return
    if given is None:
        if not queue or queue[0] == "--":
            raise DoctorError(f"option {name} needs {wanted}")
        given = queue.pop(0)
    try:
        value = convert(given)
        if name in _REPEATED:
            value = (*parts.own.get(key, ()), value)  # type: ignore[misc]
        parts.own[key] = value
    except ValueError:
        raise DoctorError(f"option {name} needs {wanted}, not {given!r}") from None


def _suggestion(name: str, options: TorchrunOptions) -> str:
    import difflib

    def likeness(option: str) -> float:
        # Options are long and what people type is the beginning.
        return difflib.SequenceMatcher(None, name, option[: len(name) + 1]).ratio()

    best = max([*_OWN, *options.takes_value], key=likeness)
    if likeness(best) >= 0.7:
        return f"did you mean {best}?"
    return "`ddpdoctor run --help` and `torchrun --help` list them"


def _nproc(parts: _Words, environ: Mapping[str, str]) -> str | None:
    value = parts.last(*_NPROC)
    name = "--nproc-per-node"
    if value is None:
        value, name = environ.get("PET_NPROC_PER_NODE"), "PET_NPROC_PER_NODE"
    if value is None or value in _NPROC_WORDS:
        return value
    if not value.isdigit() or int(value) < 1:
        raise DoctorError(f"{name} {value}: needs a number of ranks, 1 or more (or gpu, cpu, auto)")
    return value


def _local_ranks(nproc: str | None, environ: Mapping[str, str]) -> int | None:
    """The number of ranks that torchrun will start on this node, None if only it knows."""
    if nproc is None:
        return None
    if nproc.isdigit():
        return int(nproc)
    if nproc == "cpu":
        return os.cpu_count()
    return visible(environ) or (os.cpu_count() if nproc == "auto" else None)


def _nodes(parts: _Words, environ: Mapping[str, str]) -> str:
    return parts.last("--nnodes") or environ.get("PET_NNODES", "1")


def _called(words: list[str]) -> str:
    """What a command runs, for a person: its first script, else the program."""
    scripts = [word for word in words if word.endswith(".py")]
    return os.path.basename((scripts or words)[0])


def _is_executable(word: str) -> bool:
    """Whether the first word is a command rather than a script for torchrun."""
    if word.endswith(".py"):
        return False
    if os.sep in word:
        return os.path.isfile(word) and os.access(word, os.X_OK)
    return not os.path.isfile(word) and shutil.which(word) is not None


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    """Whether torchrun takes a ``PET_*`` flag as given: a number other than 0."""
    try:
        return bool(int(environ.get(name, "0")))
    except ValueError:
        return False


def _check_script(script: str) -> None:
    """Refuse what Python cannot run, before two ranks have each spent seconds to find out.

    Raises:
        DoctorError: The script is missing, unreadable or no Python.
    """
    path = Path(script)
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise DoctorError(f"{script} is a directory without a __main__.py")
        return
    if path.exists() and not path.is_file():
        # A pipe or /dev/stdin can be read only once, and not by us.
        return
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise DoctorError(f"{script}: no such file", _nearby(path)) from None
    except OSError as error:
        raise DoctorError(f"{script} cannot be read: {error.strerror}") from None
    if zipfile.is_zipfile(path):
        return
    try:
        with warnings.catch_warnings():
            # The ranks will say them, each once, as they would without us.
            warnings.simplefilter("ignore")
            compile(source, script, "exec", dont_inherit=True)
    except SyntaxError as error:
        where = f"{script}:{error.lineno}" if error.lineno else script
        raise DoctorError(f"{where} is not valid Python: {error.msg}") from None
    except ValueError as error:
        raise DoctorError(f"{script} is not a Python script: {error}") from None
    except (RecursionError, MemoryError):
        # Too deep for the compiler here; the ranks will see for themselves.
        return


def _nearby(path: Path) -> str:
    import difflib

    try:
        names = [entry.name for entry in (path.parent).iterdir() if entry.suffix == ".py"]
    except OSError:
        return f"there is no directory {path.parent}"
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / close[0]}?" if close else f"looked in {Path.cwd()}"
