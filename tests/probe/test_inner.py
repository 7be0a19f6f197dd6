"""Of exceptions that wrap each other, the one that says where and why."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures.process import _RemoteTraceback
from pathlib import Path

import pytest

from ddpdoctor.probe.observers import failures

HERE = str(Path(__file__))


class Wrapped(Exception):
    pass


def caught(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("it raised nothing")


def _missing() -> None:
    row: dict[str, int] = {}
    row["label"]


def _from() -> None:
    try:
        _missing()
    except KeyError as error:
        raise Wrapped("could not set up") from error


def test_an_explicit_cause_is_the_one() -> None:
    raised, outer = failures.unwrapped(caught(_from))
    assert (raised.name, raised.message, raised.path) == ("KeyError", "'label'", HERE)
    assert raised.line == _missing.__code__.co_firstlineno + 2
    assert outer is not None
    assert outer.message == "could not set up"


def test_what_merely_came_before_is_not() -> None:
    def instead() -> None:
        try:
            _missing()
        except KeyError:
            raise Wrapped("the configuration is incomplete")  # noqa: B904

    raised, outer = failures.unwrapped(caught(instead))
    assert (raised.message, outer) == ("the configuration is incomplete", None)


def test_a_cause_without_words_or_from_a_library_is_not() -> None:
    def silent() -> None:
        try:
            next(iter(()))
        except StopIteration as error:
            raise Wrapped("no batch") from error

    def library() -> None:
        raise Wrapped("outer") from ValueError("made, and never raised")

    assert failures.unwrapped(caught(silent))[0].message == "no batch"
    assert failures.unwrapped(caught(library))[0].message == "outer"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_the_first_of_a_group() -> None:
    def group() -> None:
        kind = __builtins__["ExceptionGroup"]  # type: ignore[index]
        raise kind("loading failed", [caught(_missing), caught(_from)])

    raised, outer = failures.unwrapped(caught(group))
    assert raised.name == "KeyError"
    assert outer is not None
    assert outer.message.startswith("loading failed")


def test_the_exception_of_a_worker() -> None:
    text = (
        "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
        'last):\n  File "/usr/site-packages/torch/fetch.py", line 3, in fetch\n    data\n'
        '  File "/job/data.py", line 23, in __getitem__\n    row["label"]\nKeyError: \'label\'\n'
    )

    def again() -> None:
        raise RuntimeError(text)

    raised, outer = failures.unwrapped(caught(again))
    assert raised == ("KeyError", "'label'", "/job/data.py", 23)
    assert outer is not None
    assert outer.message == text


def test_the_line_in_the_process_of_a_pool() -> None:
    def again() -> None:
        remote = 'Traceback:\n  File "/job/tokens.py", line 5, in f\n    x\nValueError: no token\n'
        raise ValueError("no token") from _RemoteTraceback(remote)  # type: ignore[arg-type]

    raised, outer = failures.unwrapped(caught(again))
    assert raised == ("ValueError", "no token", "/job/tokens.py", 5)
    assert outer is None


def test_printing_looks_the_same(tmp_path: Path) -> None:
    """The hooks on the traceback module change no word of what it prints."""
    script = tmp_path / "show.py"
    script.write_text(
        textwrap.dedent("""\
        import logging, sys, traceback, threading
        if len(sys.argv) > 1:
            from ddpdoctor.probe.hooks import exits
            exits.install()
        def fail():
            try:
                {}["a"]
            except KeyError as error:
                raise ValueError("x") from error
        try:
            fail()
        except ValueError as error:
            traceback.print_exc()
            traceback.print_exception(error)
            traceback.print_exception(None, value=error, tb=error.__traceback__)
            print(traceback.format_exc(), file=sys.stderr)
            logging.exception("failed")
        try:
            traceback.print_exception()
        except TypeError as error:
            print(error, file=sys.stderr)
        def run():
            raise OSError("in a thread")
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        """)
    )
    plain, watched = (
        subprocess.run([sys.executable, str(script), *more], capture_output=True, text=True)
        for more in ([], ["watched"])
    )
    assert watched.stderr == plain.stderr
    assert watched.returncode == plain.returncode == 0
