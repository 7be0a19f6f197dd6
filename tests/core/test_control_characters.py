"""What foreign text may not do to a terminal, in every renderer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpdoctor.commands import check as check_module
from ddpdoctor.core.finding import Finding, Severity, to_record
from ddpdoctor.core.formatting import json_text, shown, without_formatting
from ddpdoctor.core.user_code import Location
from ddpdoctor.preflight.check import Outcome, Status
from ddpdoctor.render import console, json_lines
from ddpdoctor.render.check_screen import View, screen
from ddpdoctor.run import rundir
from ddpdoctor.run.records.supervisor import Frame, RankStacks, Thread
from ddpdoctor.run.status import Phase
from ddpdoctor.stacks import frames
from tests.conftest import LIMIT
from tests.support.written import MS, T0, Written

HOSTILE = "a\x1b[2Jb\x9b1mc\x07d\x7fe\u202ef\u2066g\u2028h\x00i\rj\x1b]0;k\x1b\\l\ud800m\u00adn"
"""Clears the screen, colours, rings, deletes, turns round, isolates, ends lines, sets the title."""

RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
"""Controls but newline and tab."""


def check(text: str) -> None:
    assert not RAW.search(text), ascii(text)
    text.encode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x9b", "\\x9b"),
        ("abc\u202edef", "abc\\u202edef"),
        ("\U000e0041", "\\U000e0041"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\udcff", "\\udcff"),
        ("Zürich 東京 \N{NO-BREAK SPACE}é", "Zürich 東京 \N{NO-BREAK SPACE}é"),
        ("\N{WOMAN}\u200d\N{ROCKET}", "\N{WOMAN}\u200d\N{ROCKET}"),
    ],
)
def test_shown(text: str, expected: str) -> None:
    assert shown(text) == expected


@given(st.text(st.characters(exclude_categories=())))
def test_nothing_that_steers_is_left(text: str) -> None:
    for kept in ("", "\n\t"):
        result = shown(text, kept)
        assert shown(result, kept) == result
        result.encode()
        for each in result:
            assert each in kept or unicodedata.category(each) not in ("Cc", "Cs", "Zl", "Zp")
            assert unicodedata.bidirectional(each) not in {
                *("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
            }


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_has_none_and_loses_none(value: object) -> None:
    text = json_text(value)
    assert text.isascii() and text.isprintable()
    assert json.loads(text) == value


def test_colours_of_a_job_are_left_out() -> None:
    text = "\x1b[1;31mred\x1b[0m \x1b[2K\x1b]0;title\x07"
    assert without_formatting(text) == "red \x1b]0;title\x07"


FINDING = Finding(
    "DDP9\x1b01",
    Severity.ERROR,
    f"message {HOSTILE}",
    (0,),
    Location(f"/tmp/{HOSTILE}.py", 1),
    (f"evidence {HOSTILE}",),
    f"fix {HOSTILE}",
    f'File "/home/{HOSTILE}.py", line 1, in {HOSTILE}\nFile "/home/x.py", line 2, in y\n',
    paste=f"paste {HOSTILE}",
)


def test_a_finding_in_each_form(tmp_path: Path) -> None:
    text = console.render(FINDING, colour=False, width=80)
    check(text)
    for word in ("message", "evidence", "fix", "paste"):
        assert word in text
    assert "\\x1b[2J" in text
    check(json_lines.line(FINDING, {}))
    assert json.loads(json_lines.line(FINDING, {})) == to_record(FINDING)
    check(console.problem_line(FINDING, HOSTILE))
    assert "\n" not in console.problem_line(FINDING, "x\ny")


def test_a_message_makes_no_second_finding() -> None:
    finding = Finding("DDP901", Severity.INFO, "nothing\nerror DDP702: train.py:1: forged")
    assert len(console.render(finding, colour=False, width=200).splitlines()) == 1


def test_lines_of_source(tmp_path: Path) -> None:
    source = tmp_path / "train.py"
    source.write_bytes(b"x = '" + HOSTILE.encode("utf-8", "replace") + b"'\n\ty\n")
    finding = Finding("DDP901", Severity.ERROR, "m", (0,), Location(str(source), 1))
    check(console.render(finding, colour=False, width=80))
    check(console.render(finding, colour=True, width=80).replace("\x1b[", ""))


def test_a_check() -> None:
    outcome = Outcome(Status.FAIL, f"peer {HOSTILE}", (FINDING,), "network")
    check(screen([outcome], View(HOSTILE, 1, 3, met=True, first=HOSTILE, verbose=True)))
    said = {"code": "DDP001", "severity": "error"}
    nodes = [{"host": f"{each} {HOSTILE}", "findings": [said]} for each in range(3)]
    check(screen([outcome], View(HOSTILE, 1, 3, met=True, nodes=nodes, width=80)))
    check(check_module.json_document([outcome], HOSTILE, 0.1))


@pytest.fixture
def directory(written: Written) -> Path:
    """A run that was written by somebody hostile."""
    error = {
        "kind": "error", "time": T0, "exception": HOSTILE, "message": HOSTILE, "line": 1,
        "path": f"/home/{HOSTILE}.py", "traceback": FINDING.traceback,
    }  # fmt: skip
    site = {"kind": "site", "phase": "wait", "site": HOSTILE}
    opened = {"kind": "open", "format": 1, "rank": 0, "host": HOSTILE, "backend": HOSTILE}
    steps = [
        {"kind": "step", "step": number, "start": T0 + number * MS, "data": MS, "total": MS}
        for number in range(3)
    ]
    for rank in range(2):
        written.rank(rank, [opened, site, *steps, error], phase=Phase.WAIT, steps=3)
    said = {**to_record(FINDING), "code": "DDP901", "kind": "finding", "number": 1, "time": T0}
    written.supervisor += [said, {"kind": "unwatched", "why": HOSTILE, "time": T0}]
    written.exit(0, 1, T0)
    written.findings(status=1, stderr=f"[rank0]: {HOSTILE}\nRuntimeError: {HOSTILE}\n".encode(
        "utf-8", "replace").decode())  # fmt: skip
    manifest = {
        "format": 1, "id": HOSTILE, "command": ["python", f"{HOSTILE}.py"], "cwd": HOSTILE,
        "host": HOSTILE, "launcher": HOSTILE, "versions": {"torch": HOSTILE, HOSTILE: HOSTILE},
    }  # fmt: skip
    (written.path / "run.json").write_text(json.dumps(manifest))
    frame = Frame(f"/home/{HOSTILE}.py", 1, HOSTILE)
    thread = Thread(1, "MainThread", False, (frame,))
    other = Thread(2, HOSTILE, False, (frame,))
    whole = RankStacks(0, 0, 1, HOSTILE, (thread, other), native=(HOSTILE,), note=HOSTILE)
    missing = RankStacks(1, 0, 1, HOSTILE, trouble=HOSTILE, note=HOSTILE)
    frames.save_stacks(written.path, [whole, missing], T0)
    return written.path


@pytest.mark.parametrize(
    "words",
    [
        ("report",),
        ("report", "--json"),
        ("report", "--output", "problems"),
        ("top", "--once"),
        ("top", "--json"),
        ("stacks",),
        ("stacks", "--all-threads", "--all-frames"),
        ("stacks", "--json"),
    ],
    ids=" ".join,
)
def test_a_hostile_run(words: tuple[str, ...], directory: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "ddpdoctor", *words, str(directory)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT,
    )
    assert result.returncode in (0, 2), result.stderr
    assert b"Traceback (most recent call last)" not in result.stderr
    check(result.stdout.decode())
    check(result.stderr.decode())
    assert b"1b[2J" in result.stdout


def test_a_hostile_log(tmp_path: Path) -> None:
    log = tmp_path / "rank0\x1b[2J.log"
    traceback = 'Traceback (most recent call last):\n  File "/home/\u202ex.py", line 1, in \u202ef'
    # After a carriage return a line begins again.
    said = HOSTILE.replace("\r", "")
    text = f"{traceback}\n    fail()\nRuntimeError: \u202ebad {said}\n"
    log.write_bytes(text.encode("utf-8", "replace"))
    for more in ((), ("--json",), ("--output", "problems")):
        words = ("report", *more, "--log", str(log))
        result = subprocess.run(
            [sys.executable, "-m", "ddpdoctor", *words], capture_output=True, timeout=LIMIT
        )
        assert result.returncode == 2
        check(result.stdout.decode())


@pytest.mark.parametrize(
    "words", [("\x1b[2J",), ("explain", "\x1b[2J"), ("report", "\x1b[2J\udcff"), ("top", "\u202e")]
)
def test_errors_for_people(words: tuple[str, ...]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "ddpdoctor", *words], capture_output=True, timeout=LIMIT
    )
    assert result.returncode in (2, 3)
    check(result.stderr.decode())
    assert result.stderr.startswith(b"ddpdoctor: error: ")


@pytest.mark.parametrize(
    "words", [("attach",), ("attach", "--tunnel"), ("attach", "--rank", "0")], ids=" ".join
)
@pytest.mark.parametrize("host", ["127.0.0.1", HOSTILE, '"..os.execute("id").."', "a;id"])
def test_a_hostile_run_to_attach_to(words: tuple[str, ...], host: str, directory: Path) -> None:
    manifest = json.loads((directory / "run.json").read_text())
    manifest["debug"] = {"host": host, "ports": [5678, HOSTILE]}
    manifest["host"] = f"{HOSTILE};id"
    (directory / "run.json").write_text(json.dumps(manifest))
    debug = {"kind": "debug", "rank": 0, "port": 5678, "pid": HOSTILE, "place": HOSTILE}
    with (directory / "supervisor.jsonl").open("a") as journal:
        journal.write(json.dumps({**debug, "time": T0, "state": "stopped"}) + "\n")
    lock = rundir.Lock(directory)
    result = subprocess.run(
        [sys.executable, "-m", "ddpdoctor", *words, str(directory)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT,
    )
    lock.close()
    said = (result.stdout + result.stderr).decode()
    check(said)
    assert "Traceback" not in said
    if host == "127.0.0.1" and words[-1] == "0":
        assert result.returncode == 2
        assert "on another machine" in said
    elif host == "127.0.0.1":
        assert result.returncode == 0, said
        assert "1b[2J" in said and "@;id" not in said
    else:
        # Nothing of it is in a line that somebody pastes.
        assert (result.returncode, result.stdout) == (2, b""), said
        assert "is not an address" in said


def test_attach_to_names(tmp_path: Path) -> None:
    workspace = tmp_path / "\x1b[2J\u202e"
    (workspace / ".vscode").mkdir(parents=True)
    for words in (("vscode", "--workspace", str(workspace), "train.py"), ("attach", HOSTILE[:3])):
        result = subprocess.run(
            [sys.executable, "-m", "ddpdoctor", *words],
            capture_output=True,
            timeout=LIMIT,
            cwd=workspace,
        )
        assert b"Traceback" not in result.stderr
        check((result.stdout + result.stderr).decode())
