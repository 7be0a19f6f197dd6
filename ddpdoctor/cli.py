"""Run a command by its name. Its module is imported only then, so ``--help`` is fast.

The ``main`` of each command takes its words, returns the exit status, and raises DoctorError for
what the user has to correct. A request for help is an exception, too. The imports here, during
which Ctrl-C is not caught, take a few milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence

from ddpdoctor import __version__
from ddpdoctor.core import plugins
from ddpdoctor.core.commands import COMMANDS
from ddpdoctor.core.errors import INTERNAL, DoctorError, HelpRequest

HELP = """\
Usage: ddpdoctor COMMAND [ARGS...]

A debugger and diagnostics toolkit for PyTorch DistributedDataParallel jobs.

Commands:
{commands}

Options:
  --version   Show the version.
  -h, --help  Show this text; `ddpdoctor COMMAND --help` describes a command.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run ``ddpdoctor`` with the words of the command line. Returns the exit status."""
    words = sys.argv[1:] if words is None else words
    # Open the streams that are closed (``>&-``). Otherwise the first file that is opened would
    # become our standard error, and the job's.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    try:
        status = _dispatch(words)
        # At the interpreter's end a closed pipe could not be caught.
        sys.stdout.flush()
        return status
    except DoctorError as error:
        _complain(error.message, error.hint)
        return error.status
    except BrokenPipeError:
        # The reader of our output has closed it.
        _drop_output()
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            _drop_output()
            _complain("the output cannot be written: its disk is full")
            return 3
        from ddpdoctor.core import errors

        _complain(errors.words([(" ".join(["ddpdoctor", *words[:1]]), error)]))
        return INTERNAL
    finally:
        for line in plugins.take_failures():
            _say(f"warning: {line}")


def _complain(message: str, hint: str = "") -> None:
    _say(f"error: {message}\n" + (f"ddpdoctor: {hint}" if hint else ""))


def _say(text: str) -> None:
    from ddpdoctor.core.formatting import shown

    text = shown(f"ddpdoctor: {text.rstrip()}\n", "\n")
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def _drop_output() -> None:
    """Redirect standard output to /dev/null, to discard what is still buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        commands = "\n".join(f"  {name:<12}{summary}" for name, summary in COMMANDS.items())
        sys.stdout.write(HELP.format(commands=commands))
        return 0
    if words[0] == "--version":
        print(f"ddpdoctor {__version__}")
        return 0
    if words[0] not in COMMANDS:
        import difflib

        close = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"did you mean `ddpdoctor {close[0]}`?" if close else "`ddpdoctor --help` lists them"
        raise DoctorError(f"unknown command {words[0]}", hint)
    module = importlib.import_module(f"ddpdoctor.commands.{words[0]}")
    try:
        return int(module.main(words[1:]))
    except HelpRequest as request:
        sys.stdout.write(str(request))
        return 0
    except FileNotFoundError:
        from ddpdoctor.core import opening

        if opening.working_directory_is_gone():
            raise DoctorError(opening.DIRECTORY_GONE, opening.GO_THERE) from None
        raise
