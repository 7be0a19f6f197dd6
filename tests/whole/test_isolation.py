"""A fault in one part of ddpdoctor ends that part alone, and is said once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
from ddpdoctor.commands import report
from ddpdoctor.core.finding import RULES, Finding
from ddpdoctor.core.job import Command, OwnOptions
from ddpdoctor.debug.debugging import Debugging
from ddpdoctor.render import console
from ddpdoctor.render.reporter import Reporter
from ddpdoctor.run import rundir
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.snapshot import Run
from ddpdoctor.run.status import Phase
from ddpdoctor.supervise.job_signals import Passthrough
from ddpdoctor.supervise.run_watch import RunWatch
from ddpdoctor.supervise.supervisor import Supervisor
from ddpdoctor.top import headline
from ddpdoctor.top.frames import Visible
from ddpdoctor.top.live import GpuFiles, LiveSource
from ddpdoctor.top.run_files import Stderr, SupervisorEvents
from tests.support.written import T0, Written

WORDS = "internal error in"


def raises(*_: object, **__: object) -> Any:
    raise KeyError("what is not there")


def fails_on_the_way(run: Run) -> Iterator[Finding]:
    yield from ()
    raises(run)


def break_rule(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setitem(RULES, code, replace(RULES[code], detect=fails_on_the_way))


@pytest.fixture
def sick(written: Written) -> Path:
    """The directory of a run with findings of two rules."""
    error = {"kind": "error", "time": T0, "exception": "ValueError", "message": "a bad value"}
    site = {"user_frames": [["/job/train.py", 12, "main"]], "traceback": ""}
    place = {"path": "/job/train.py", "line": 3}
    parsed = {"kind": "local_rank", "parsed": 0, "environment": 1, **place}
    written.rank(0, [parsed, {**error, **site}])
    written.rank(1, [parsed])
    assert {"DDP206", "DDP901"} <= {each.code for each in written.findings(status=1)}
    return written.path


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def reporter(said: list[str]) -> Reporter:
    return Reporter(said.append, OwnOptions())


# -- rules


@pytest.mark.parametrize("code", sorted(RULES))
def test_a_rule_that_fails_ends_alone(
    monkeypatch: pytest.MonkeyPatch, sick: Path, reporter: Reporter, said: list[str], code: str
) -> None:
    run = RunReader(sick).snapshot()
    reporter.examine(run)
    sound = [each.code for each in reporter.current]
    said.clear()
    break_rule(monkeypatch, code)
    for _ in range(3):
        reporter.examine(run)
    # What it had found still stands.
    assert sorted(each.code for each in reporter.current) == sorted(sound)
    (line,) = said
    assert line.startswith(f"ddpdoctor: warning: {WORDS} {code}: KeyError('what is not there')")
    assert "the job and all other checks go on" in line
    (told,) = reporter.faults.take()
    assert told.part == code
    assert reporter.faults.take() == []


def test_rules_that_fail_together_are_one_line(
    monkeypatch: pytest.MonkeyPatch, sick: Path, reporter: Reporter, said: list[str]
) -> None:
    for code in sorted(RULES)[:5]:
        break_rule(monkeypatch, code)
    reporter.examine(RunReader(sick).snapshot())
    assert sum(WORDS in line for line in said) == 1
    assert "and 2 more" in "".join(said)
    assert len(reporter.faults.take()) == 5
    assert {"DDP206", "DDP901"} <= {each.code for each in reporter.current}


def test_a_finding_whose_text_cannot_be_made_is_still_said(
    monkeypatch: pytest.MonkeyPatch, sick: Path, reporter: Reporter, said: list[str]
) -> None:
    monkeypatch.setattr(console, "render", raises)
    reporter.examine(RunReader(sick).snapshot())
    assert any(line.startswith("ddpdoctor: error DDP901: ") for line in said)


def test_a_report_applies_the_other_rules(
    monkeypatch: pytest.MonkeyPatch, sick: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    break_rule(monkeypatch, "DDP206")
    for options in ([], ["--json"], ["--output", "problems"]):
        report.main([str(sick), *options])
        out, err = capsys.readouterr()
        assert "DDP901" in out
        assert f"{WORDS} DDP206" in err and "all other rules are applied" in err
    monkeypatch.setattr(console, "render", raises)
    report.main([str(sick)])
    assert "error DDP901: " in capsys.readouterr().out


# -- watchers


@pytest.fixture
def supervisor(tmp_path: Path, reporter: Reporter) -> Iterator[Supervisor]:
    """One that looks at a job of two ranks."""
    own = OwnOptions(no_vscode=True, debug_port=0)
    command = Command(("true",), own, "", through_torchrun=False, local_ranks=2)
    made = Supervisor(
        command, tmp_path / "run", Passthrough(), reporter, Debugging(command, reporter), ()
    )
    (tmp_path / "run").mkdir()
    made._watch.open()
    Written(tmp_path / "run").rank(0, [], phase=Phase.WAIT)
    made._start()
    yield made
    while made._keepers.status is None:
        made._keepers.poll()
        made._idle(0.02)
    made._finish(made._keepers.status)
    made._keepers.dismiss(made._idle)
    made._passthrough.finish(1.0)
    made._watch.close()


PARTS: dict[str, Callable[[RunWatch], tuple[object, str]]] = {
    "the debugger": lambda made: (made._debugging, "poll"),
    "the debugger again": lambda made: (made._debugging, "check"),
    "the monitor's files": lambda made: (made._showing, "update"),
    "the rank watch": lambda made: (made._ranks, "end_leftovers"),
    "the rank watch again": lambda made: (made._ranks, "follow"),
    "the GPU watch": lambda made: (made._gpus, "look_at"),
    "the suspicions": lambda made: (made._watches["the suspicions"], "look"),
    "the hang watch": lambda made: (made._hangs, "look"),
    "the hang watch again": lambda made: (made._hangs, "judged"),
    "the rules": lambda made: (made._reporter, "examine"),
    "reading the records": lambda made: (made._reader, "snapshot"),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_watcher_that_fails_ends_alone(
    monkeypatch: pytest.MonkeyPatch, supervisor: Supervisor, said: list[str], part: str
) -> None:
    watch = supervisor._watch
    broken, method = PARTS[part](watch)
    looked: list[str] = []
    for name, find in PARTS.items():
        owner, each = find(watch)
        if (owner, each) != (broken, method):
            _listen(monkeypatch, owner, each, name, looked)
    monkeypatch.setattr(broken, method, raises)
    for _ in range(4):
        watch._happened = 1.0
        watch.check()
    name = part.removesuffix(" again")
    (line,) = [line for line in said if WORDS in line]
    assert line.startswith(f"ddpdoctor: warning: {WORDS} {name}: KeyError('what is not there')")
    journal = (watch._directory or Path()) / "supervisor.jsonl"
    records = [json.loads(line) for line in journal.read_bytes().splitlines()]
    (fault,) = [each for each in records if each["kind"] == "fault"]
    assert fault["part"] == name and fault["error"] == "KeyError('what is not there')"
    assert fault["places"][0].startswith(("supervise/", "debug/", "core/errors.py"))
    others = {each for each in PARTS if each.removesuffix(" again") != name}
    if name == "reading the records":
        # Nobody else has anything to look at then, but the debugger's ports and what is shown.
        others = {"the debugger", "the monitor's files", "the rank watch"}
    for other in others:
        assert looked.count(other) >= 4, other


@pytest.mark.parametrize("part", PARTS)
def test_the_end_of_stderr_is_kept_whatever_failed(
    monkeypatch: pytest.MonkeyPatch, supervisor: Supervisor, part: str
) -> None:
    watch = supervisor._watch
    monkeypatch.setattr(*PARTS[part](watch), raises)
    watch._happened = 1.0
    watch.check()
    monkeypatch.setattr(type(watch._passthrough), "tail", b"RuntimeError: the cause\n")
    watch.end(1, list)
    assert watch._directory is not None
    assert (watch._directory / rundir.STDERR).read_bytes() == b"RuntimeError: the cause\n"


def _listen(
    monkeypatch: pytest.MonkeyPatch, owner: object, method: str, name: str, looked: list[str]
) -> None:
    original = getattr(owner, method)

    def listening(*args: Any, **kwargs: Any) -> Any:
        looked.append(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, method, listening)


def test_a_poll_of_gpus_that_fails_is_said(supervisor: Supervisor, said: list[str]) -> None:
    assert supervisor._watch._gpu_poll is not None
    supervisor._watch._gpu_poll.failed = KeyError("uuid")
    for _ in range(2):
        supervisor._watch.check()
    assert sum(f"{WORDS} the GPU poll: KeyError('uuid')" in line for line in said) == 1


@pytest.mark.parametrize("method", ["claim", "write"])
def test_a_fault_in_the_editors_files_leaves_the_debugger(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    reporter: Reporter,
    said: list[str],
    method: str,
) -> None:
    own = OwnOptions(no_vscode=True, debug_port=0)
    command = Command(("true",), own, "", through_torchrun=False, local_ranks=2, one_node=True)
    debugging = Debugging(command, reporter)
    monkeypatch.setattr(debugging._editor, method, raises)
    debugging.open(tmp_path)
    debugging.announce(tmp_path)
    debugging.start(lambda: None)
    assert debugging.poll() == []
    debugging.stop()
    assert sum(f"{WORDS} launch.json" in line for line in said) == 1


# -- the monitor


@pytest.mark.parametrize(
    ("owner", "method", "part"),
    [
        (LiveSource, "_row", "rank 0, rank 1"),
        (Stderr, "read", "the output"),
        (GpuFiles, "read", "the GPUs"),
        (SupervisorEvents, "poll", "events"),
        (headline, "judge", "the verdict"),
    ],
)
def test_a_part_of_the_monitor_that_fails_leaves_the_rest(
    monkeypatch: pytest.MonkeyPatch, sick: Path, owner: object, method: str, part: str
) -> None:
    monkeypatch.setattr(owner, method, raises)
    source = LiveSource(sick, 1.0)
    for _ in range(2):
        frame = source.read(Visible(None))
        (note,) = [note for note in frame.notes if WORDS in note]
        assert note.startswith(f"{WORDS} {part}: KeyError('what is not there')")
        assert len(frame.ranks) == (0 if method == "_row" else 2)
    source.close()
    monkeypatch.undo()
    source = LiveSource(sick, 1.0)
    assert not source.read(Visible(None)).notes
    source.close()
