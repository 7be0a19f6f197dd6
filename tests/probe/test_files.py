"""What a rank writes down of the files that it changes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ddpdoctor.probe.observers import files
from ddpdoctor.probe.runtime import rank
from ddpdoctor.run.records.base import JsonObject
from tests.support.probed import a_rank


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[JsonObject]:
    found: list[JsonObject] = []
    monkeypatch.setattr(rank, "_state", a_rank(found))
    monkeypatch.setattr(files, "_off", False)
    monkeypatch.setattr(files, "_known", set())
    monkeypatch.setenv("DDPDOCTOR_RUN_DIR", str(tmp_path / "run"))
    return found


def test_each_change_of_a_path_once(lines: list[JsonObject], tmp_path: Path) -> None:
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    for _ in range(2):
        files.touched("os.mkdir", (a, 0o777, -1))
        files.touched("open", (b, "w", os.O_WRONLY | os.O_CREAT))
        files.touched("os.rename", (b, a, -1, -1))
        files.touched("os.remove", (a, -1))
        files.touched("os.remove", ("relative to an open directory", 5))
    assert [(each["what"], each["file"]) for each in lines] == [
        ("make", a), ("write", b), ("move", b), ("replace", a), ("remove", a),
    ]  # fmt: skip


def test_files_that_do_not_count(lines: list[JsonObject], tmp_path: Path) -> None:
    for path in ("/dev/null", "/job/__pycache__/a.pyc.12", str(tmp_path / "run/rank.jsonl"), 7):
        files.touched("open", (path, "w", os.O_WRONLY))
    files.touched("open", ("/job/train.py", "r", os.O_RDONLY))
    files.touched("open", ("/data/a.json", "r", os.O_RDONLY))
    assert not lines
    assert files.read_last()[0].path == "/data/a.json"
    files.forget()
    files.touched("open", (str(tmp_path / "b"), "w", os.O_WRONLY))
    assert not lines


def test_the_events_are_those_that_python_audits(tmp_path: Path) -> None:
    seen: list[tuple[str, object]] = []
    sys.addaudithook(lambda event, args: seen.append((event, args)) if tmp_path else None)
    file = tmp_path / "a"
    file.write_text("a")
    os.replace(file, tmp_path / "b")
    os.remove(tmp_path / "b")
    names = [event for event, _ in seen]
    assert {"open", "os.rename", "os.remove"} <= set(names)
    flags = next(args[2] for event, args in seen if event == "open" and args[0] == str(file))  # type: ignore[index]
    assert isinstance(flags, int) and flags & os.O_WRONLY
