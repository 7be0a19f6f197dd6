"""What a rank that the others wait for is seen to do, by its process and its stack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.finding import Severity
from ddpdoctor.diagnose.hangs.process_activity import (
    doing,
    lacks_cpu,
    shown_bytes,
    starves,
    stirs,
    works,
)
from ddpdoctor.diagnose.hangs.rank_activity import activity_of, came_since, state_of
from tests.support.hanging_ranks import stacks
from tests.support.seen_ranks import LOAD, MB, died, said, seen

# -- what a process does within a second


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "idle"),
        ({"cpu": 0.19}, "idle"),
        ({"cpu": 0.2}, "computing (20 % of a core)"),
        ({"cpu": 0.97}, "computing (97 % of a core)"),
        ({"cpu": 0.1, "busy": 0.2}, "short of CPU (gets 10 % of a core)"),
        ({"letters": "SR"}, "short of CPU (gets 0 % of a core)"),
        ({"letters": "RS"}, "idle"),
        ({"characters": MB - 1}, "idle"),
        ({"characters": MB}, "reading or writing 1.0 MB/s"),
        ({"disk": MB}, "reading or writing 1.0 MB/s"),
        ({"characters": MB, "disk": 5 * MB}, "reading or writing 5.2 MB/s"),
        ({"network": True}, "idle"),
        ({"network": True, "switches": 9}, "idle"),
        ({"switches": 99}, "idle"),
        ({"network": True, "switches": 10}, "sending or receiving over the network"),
        (
            {"children_cpu": 0.2},
            "waiting for its child processes, which are computing (20 % of a core)",
        ),
        (
            {"children_busy": 0.2, "children_cpu": 0.1},
            "waiting for its child processes, which are short of CPU (gets 10 % of a core)",
        ),
        (
            {"children_letters": "SR"},
            "waiting for its child processes, which are short of CPU (gets 0 % of a core)",
        ),
        ({"children_cpu": 0.19, "children_letters": "SS"}, "idle"),
        ({"cpu": 0.5, "children_cpu": 0.9}, "computing (50 % of a core)"),
        ({"cpu": 0.5, "characters": MB}, "reading or writing 1.0 MB/s, computing (50 % of a core)"),
    ],
)
def test_what_a_process_does_is_reported(facts: dict[str, Any], words: str) -> None:
    found = seen(**facts)
    assert doing(found) == words
    assert works(found) is (words != "idle")
    _, severity, text = said(activity_of(found, starting=False))
    assert severity == (Severity.ERROR if words == "idle" else Severity.WARNING)
    assert text == f"is in `load` train.py:88, {words} for 41 s"


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, False),
        ({"wrote": 1}, True),
        ({"since_cpu": 0.02}, True),
        ({"since_children_cpu": 0.02}, True),
        ({"since_cpu": 0.019, "since_children_cpu": 0.019, "wrote": 0}, False),
    ],
)
def test_what_stirs_now_and_then_works(facts: dict[str, Any], expected: bool) -> None:
    found = seen(**facts)
    assert stirs(found) is expected
    assert works(found) is expected


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (999, "999 bytes"),
        (1_000, "1.0 kB"),
        (1_000_000, "1.0 MB"),
        (2_500_000_000, "2.5 GB"),
    ],
)
def test_amounts_are_shown_in_the_unit_that_fits(number: float, words: str) -> None:
    assert shown_bytes(number) == words


@pytest.mark.parametrize(
    ("lost", "facts", "expected"),
    [
        # It was silent for 41 s, with a limit of 30.
        (30.0, {"cpu": 0.9}, True),
        (30.0, {}, False),
        (20.0, {"cpu": 0.9}, False),
        (10.0, {"cpu": 0.9}, False),
        (0.0, {"cpu": 0.9}, False),
    ],
)
def test_a_rank_without_a_core_for_most_of_its_silence_is_late_for_that(
    lost: float, facts: dict[str, Any], expected: bool
) -> None:
    assert lacks_cpu(seen(lost=lost, **facts), 30.0) is expected


@pytest.mark.parametrize(
    ("lost", "limit", "expected"), [(21.0, 19.0, False), (21.0, 19.5, True), (20.5, 30.0, False)]
)
def test_silence_is_counted_in_whole_seconds(lost: float, limit: float, expected: bool) -> None:
    """It had a core for 41 s less those that it lost, which has to be less than both."""
    assert lacks_cpu(seen(lost=lost, cpu=0.9), limit) is expected


def test_who_would_compute_if_it_had_a_core_starves() -> None:
    assert starves(seen(letters="SR"))
    assert starves(seen(busy=0.9, cpu=0.1))
    assert not starves(seen(busy=0.9, cpu=0.2))
    assert not starves(seen())


# -- processes that are stopped, dead or silent


@pytest.mark.parametrize(
    ("letters", "code", "severity", "words"),
    [
        (
            "TT",
            "DDP805",
            Severity.ERROR,
            "has been stopped (SIGSTOP, SIGTSTP or Ctrl-Z) for 41 s, at",
        ),
        ("tt", "DDP805", Severity.WARNING, "has been held by a tracer (gdb, strace) for 41 s, at"),
        ("DD", "DDP806", Severity.ERROR, "waits for a disk or device in nfs_wait for 41 s, at"),
    ],
)
def test_states_of_a_process(letters: str, code: str, severity: Severity, words: str) -> None:
    known = stacks(1, LOAD, state={"wchan": "nfs_wait"})
    found = said(state_of(seen(letters=letters, stacks=known)))
    assert found[:2] == (code, severity)
    assert found[2].startswith(f"{words} train.py:88")
    # Nothing of its stack is known, but the line that its page names.
    hidden = {**stacks(1), "threads": []}
    found = said(state_of(seen(letters=letters, stacks=hidden)))
    assert found[2].endswith("last seen at train.py:61")


@pytest.mark.parametrize("letters", ["TS", "St", "DS", "SD", "RR", ""])
def test_states_that_do_not_last(letters: str) -> None:
    assert state_of(seen(letters=letters)) is None


def test_a_device_that_gives_something_is_slow() -> None:
    slow = state_of(seen(letters="DD", disk=MB))
    assert said(slow)[1] == Severity.WARNING
    assert slow is not None
    assert slow.evidence == ("moved 1.0 MB to or from a device within a second",)
    assert said(state_of(seen(letters="DD", disk=MB - 1)))[1] == Severity.ERROR


def test_a_dead_rank_that_its_launcher_has_not_noticed() -> None:
    found = said(state_of(seen(exit=died(5.0))))
    assert found[:2] == ("DDP812", Severity.ERROR)
    assert found[2] == "died at train.py:88 and its launcher has not noticed"
    assert state_of(seen(exit=died(4.9))) is None
    assert state_of(seen(exit=died(5.0), launcher_works=True)) is None
    assert state_of(seen(exit=died(5.0), ended=True)) is None
    assert said(activity_of(seen(exit=died(1.0)), False))[::2] == ("DDP802", "has died")
    assert said(activity_of(seen(ended=True), False))[::2] == ("DDP802", "has ended")


@pytest.mark.parametrize(
    ("cpu", "native", "words", "evidence"),
    [
        (0.9, [], "(busy, 90 % of a core)", 1),
        (0.2, ["fetch"], "(busy, 20 % of a core)", 0),
        (0.1, [], "(idle)", 1),
    ],
)
def test_native_code_that_holds_the_gil(
    cpu: float, native: list[str], words: str, evidence: int
) -> None:
    held = stacks(1, LOAD, gil_held=True, native=native)
    found = state_of(seen(cpu=cpu, silent=2_000_000_001, stacks=held))
    code, severity, text = said(found)
    assert (code, severity) == ("DDP810", Severity.ERROR)
    assert text.startswith("holds the GIL in native code for 41 s, at train.py:88")
    assert words in text
    assert found is not None
    assert len(found.evidence) == evidence


@pytest.mark.parametrize("less", [{"silent": 2_000_000_000}, {"gil": False}, {"activity": None}])
def test_a_silence_that_tells_nothing_of_the_gil(less: dict[str, Any]) -> None:
    held = stacks(1, LOAD, gil_held=less.get("gil", True))
    found = seen(silent=less.get("silent", 2_000_000_001), stacks=held)
    if "activity" in less:
        found = replace(found, evidence=replace(found.evidence, activity=None))
    assert state_of(found) is None


# -- by the stack


ASKS = "answer = input('go on? ')\nwhile True:\n    pass\n"


def test_a_line_that_asks_for_input(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ASKS)
    asking = (str(script), 1, "main")
    found = activity_of(seen(asking), False)
    assert said(found)[:2] == ("DDP808", Severity.ERROR)
    assert said(found)[2].startswith("waits for input at `answer = input('go on? ')` train.py:1")
    assert "keyboard" in found.fix
    assert activity_of(seen(asking, cpu=0.9), False).code == "DDP802"
    assert activity_of(seen(input=True), False).code == "DDP808"
    assert activity_of(seen(input=True, cpu=0.9), False).code == "DDP802"


@pytest.mark.parametrize(
    ("facts", "severity"),
    [
        ({"terminal": True, "step": 0}, Severity.INFO),
        ({"terminal": False, "step": 0}, Severity.ERROR),
        ({"terminal": True, "step": 1}, Severity.ERROR),
    ],
)
def test_a_question_before_the_first_step_may_be_answered(
    facts: dict[str, Any], severity: Severity
) -> None:
    assert activity_of(seen(input=True, **facts), True).severity == severity
    assert activity_of(seen(input=True, **facts), False).severity == Severity.ERROR


def test_the_debugger_waits_for_a_command() -> None:
    inside = [("/lib/python3.11/bdb.py", 90, "trace"), ("/lib/python3.11/cmd.py", 9, "cmdloop")]
    found = activity_of(seen(LOAD, *inside, terminal=True, step=0), True)
    assert said(found)[:2] == ("DDP808", Severity.ERROR)
    assert "waits for a command in the debugger (pdb) at train.py:88" in found.text
    # What called the loop of commands a while ago is no debugger any more.
    deeper = [("/job/train.py", line, "deep") for line in range(6)]
    assert activity_of(seen(LOAD, *inside, *deeper), False).code == "DDP802"


def test_who_waits_for_ranks_to_join() -> None:
    joins = ("/lib/site-packages/torch/distributed/c10d.py", 9, "new_group")
    found = activity_of(seen(LOAD, joins), False)
    assert said(found)[:2] == ("DDP813", Severity.ERROR)
    assert found.text == "waits in new_group at train.py:88 for ranks that have not come"
    store = ("/lib/site-packages/torch/distributed/store.py", 9, "get")
    assert activity_of(seen(LOAD, store), False).code == "DDP802"
    alone = seen(LOAD, store)
    alone = replace(alone, evidence=replace(alone.evidence, phase=None))
    assert activity_of(alone, False).text.startswith("waits in rendezvous at train.py:88")
    later = stacks(1, LOAD, joins)
    assert came_since(seen(later=later)) and not came_since(seen())


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"cpu": 0.9}, "computing (90 % of a core) for 41 s"),
        ({"network": True}, "waiting for the network, from which nothing comes, for 41 s"),
        ({"network": True, "since": 0}, "waiting for the network, from which nothing comes"),
        ({"network": True, "switches": 50}, "sending or receiving over the network for 41 s"),
        ({"network": True, "later": stacks(1, ("/job/train.py", 89, "load"))}, "idle for 41 s"),
    ],
)
def test_who_is_at_work_before_the_first_step_starts_up(facts: dict[str, Any], words: str) -> None:
    found = activity_of(seen(step=0, **facts), True)
    assert said(found)[:2] == ("DDP811", Severity.WARNING)
    assert found.text == f"is still starting up: in `load` train.py:88, {words}"
    assert found.fix.startswith("Fetch" if "nothing comes" in words else "Share the work")
    assert activity_of(seen(step=0, **facts), False).code == "DDP802"
    assert activity_of(seen(step=1, **facts), True).code == "DDP802"


def test_who_is_idle_before_the_first_step_does_not_start_up() -> None:
    assert activity_of(seen(step=0), True).code == "DDP802"


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [(3, 4, "DDP807"), (3, 7, "DDP802"), (7, 3, "DDP802"), (4, 4, "DDP807")],
)
def test_a_loop_that_cannot_end(tmp_path: Path, before: int, after: int, code: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("def spin():\n    while True:\n        look()\n        look()\n\n\nspin()\n")
    one, other = ((str(script), line, "spin") for line in (before, after))
    found = activity_of(seen(one, cpu=0.97, later=stacks(1, other)), False)
    assert found.code == code
    assert activity_of(seen(one, later=stacks(1, other)), False).code == "DDP802"
    if code == "DDP807":
        assert found.text == (
            "runs in an endless loop, `while True:` train.py:2, for 41 s (97 % of a core)"
        )
        lines = ", ".join(map(str, sorted({before, after})))
        assert found.evidence == (f"seen at lines {lines} within a second",)


def test_a_rank_of_which_only_its_page_is_known() -> None:
    hidden = {**stacks(1), "threads": []}
    text = activity_of(seen(stacks=hidden), False).text
    assert text == "is in phase other, last seen at train.py:61, idle for 41 s"
    assert "is in an unknown place, idle" in activity_of(seen(stacks=hidden, site=""), False).text


def test_the_code_of_a_line_tells_more_than_the_name_of_a_main_function(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("download(everything)\n")
    for name, words in (("main", "`download(everything)` train.py:1"), ("get", "`get` train.py:1")):
        assert f"is in {words}, idle" in activity_of(seen((str(script), 1, name)), False).text
