"""The words of the prompt of ``ddpdoctor debug``."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.debug import prompt as debug_prompt
from ddpdoctor.debug.prompt import HELP, Prompt
from ddpdoctor.debug.sessions import Frame

SOURCE = '''\
def scale(total, /, by=2, *rest, dim, **more):
    """Scale it."""
    return total * by


class Model:
    def scale(self, x):
        return x
'''


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("41", (None, "41", None, "")),
        ("train.py:41", ("train.py", "41", None, "")),
        ("a b/train.py:41 if rank == 0", ("a b/train.py", "41", None, "rank == 0")),
        ("41, step > 3", (None, "41", None, "step > 3")),
        ("41, if step > 3", (None, "41", None, "step > 3")),
        ("scale", (None, None, "scale", "")),
        ("scale if x[1:2]", (None, None, "scale", "x[1:2]")),
        ("41 x", None),
        ("train.py:", None),
    ],
)
def test_places(text: str, found: tuple[str | None, ...] | None) -> None:
    match = debug_prompt._BREAK.match(text)
    assert found == (match and match.group("file", "line", "function", "condition"))


def test_functions_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    assert debug_prompt._first_line(str(path), "scale") == 3
    assert debug_prompt._first_line(str(path), "other") == 0
    names = ["total", "by", "dim", "rest", "more"]
    assert debug_prompt._arguments(Frame(1, "scale", str(path), 3)) == names
    assert debug_prompt._arguments(Frame(1, "scale", str(path), 8)) == ["self", "x"]
    assert debug_prompt._arguments(Frame(1, "<module>", str(path), 1)) == []
    assert debug_prompt._arguments(Frame(1, "f", str(tmp_path / "none.py"), 1)) == []


def test_help_names_each_command() -> None:
    words = {word for line in HELP.splitlines() for word in line[:24].replace(",", " ").split()}
    for name in (
        "bt",
        "w",
        "up",
        "p",
        "pp",
        "args",
        "l",
        "b",
        "tbreak",
        "cl",
        "n",
        "c",
        "pause",
        "q",
    ):
        assert name in words
        assert hasattr(Prompt, f"do_{name}")
