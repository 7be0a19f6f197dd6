"""DDP610 on written runs: what is a straggler on a crowded machine, and what is said of one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.speed.reasons import _bytes
from ddpdoctor.run.mapped import RequestWriter
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.supervisor import ProfileRequestRecord
from ddpdoctor.supervise.slow_ranks import Stragglers
from ddpdoctor.system.process_activity import CoreClocks
from tests.support.straggling import BACKWARD, MAIN, asked, loop, profile, rank, sick, stack, steps
from tests.support.written import MS, T0, Written

# -- waits for a core


def test_a_rank_with_more_work_is_found_on_a_crowded_machine(written: Written) -> None:
    """It needs 10 ms more, and waits 60 ms for its core because of that: seen at load 12."""
    rank(written, 0, steps(3.6, 78, 3.5, 0.2))
    rank(written, 1, steps(73, 8, 11, 66))
    (finding,) = written.findings(status=0)
    assert (finding.ranks, finding.severity) == ((1,), Severity.WARNING)
    assert "by 7.5 ms a step" in finding.message
    assert "other processes" not in finding.message
    assert any("waits 66.0 ms a step for a CPU core" in each for each in finding.evidence)


def test_ranks_that_wait_alike_for_their_cores_are_no_stragglers(written: Written) -> None:
    for number, own in enumerate((80, 110, 95)):
        rank(written, number, steps(own, 130 - own, 12, own - 12, last=300))
    assert written.findings(status=0) == []


def test_a_slow_rank_for_which_the_others_do_not_wait_longer_holds_none_up(
    written: Written,
) -> None:
    rank(written, 0, steps(10, 30, 9, 0))
    rank(written, 1, steps(50, 30, 45, 0))
    assert written.findings(status=0) == []


@pytest.mark.parametrize(("high", "found"), [(30, 1), (29, 0)])
def test_a_surplus_has_to_be_there_in_three_of_four_steps(
    written: Written, high: int, found: int
) -> None:
    """The others have a tenth of it; of the first ten steps none counts."""
    mine = [*steps(50, 1, 45, 0, last=10 + high), *list(steps(14, 37, 12, 0, last=50))[10 + high :]]
    rank(written, 0, steps(10, 41, 9, 0, last=50))
    rank(written, 1, mine)
    assert len(written.findings(status=0)) == found


def test_what_is_said_of_a_straggler(written: Written) -> None:
    for number in (0, 2):
        rank(written, number, steps(10, 41, 9, 0, phase="forward"))
    rank(written, 1, steps(50, 1, 45, 0, phase="forward"))
    (finding,) = written.findings(status=0)
    assert finding.message == "rank 1 holds the others up by 40.0 ms a step, in its forward pass"
    assert finding.evidence == (
        "own time 50.0 ms a step; the others 10.0 ms (medians of 110 steps)",
        "forward pass: 50.0 ms against 10.0 ms",
        "the others wait 41.0 ms a step in the all-reduce, rank 1 1.0 ms",
    )
    assert "batch shapes" in finding.fix


def test_a_rank_whose_work_is_that_of_the_others_only_waits(written: Written) -> None:
    """For a second: the kernel will balance it."""
    rank(written, 0, steps(12, 40, 12, 0.2, last=40))
    rank(written, 1, steps(51, 1, 12, 39, last=40))
    assert written.findings(status=0) == []


def test_waits_that_one_rank_alone_has_are_named(written: Written) -> None:
    asked(written)
    busy = [[4711, 0.9, 0, "python compress.py (pid 4711)"]]
    written.supervisor.append({"kind": "profile", "time": T0, "asked": 1, "busy": busy})
    rank(written, 0, [*steps(12, 60, 12, 1), profile(BACKWARD)])
    rank(written, 1, [*steps(71, 1, 12, 59), profile(BACKWARD)])
    (finding,) = written.findings(status=0)
    assert (finding.ranks, finding.severity) == ((1,), Severity.WARNING)
    assert finding.message.endswith("because other processes take its CPU core")
    assert finding.evidence[0].startswith("it waits 59.0 ms a step for a core")


@pytest.mark.parametrize(("share", "named"), [(0.13, False), (0.3, True)])
def test_many_processes_that_share_all_cores_take_none(
    written: Written, share: float, named: bool
) -> None:
    """A rank whose core happens to have more of them than the other's is only unlucky."""
    asked(written)
    busy = [[4711 + each, share, each % 2, "python other.py"] for each in range(6)]
    written.supervisor.append({"kind": "profile", "time": T0, "asked": 1, "busy": busy})
    rank(written, 0, [*steps(12, 60, 12, 1), profile(BACKWARD)])
    rank(written, 1, [*steps(71, 1, 12, 59), profile(BACKWARD)])
    assert [each.ranks for each in written.findings(status=0)] == [(1,)] * named


def test_nobody_is_blamed_who_was_not_seen(written: Written) -> None:
    rank(written, 0, steps(12, 60, 12, 1))
    rank(written, 1, steps(71, 1, 12, 59))
    assert written.findings(status=0) == []


def test_a_rank_that_is_pinned_and_who_is_on_its_core(written: Written) -> None:
    asked(written)
    busy = [
        [4711, 0.5, 0, "python compress.py (pid 4711)"],
        [4712, 0.9, 1, "python elsewhere.py (pid 4712)"],
    ]
    written.supervisor.append({"kind": "profile", "time": T0, "asked": 1, "busy": busy})
    rank(written, 0, [*steps(12, 60, 12, 1), profile(BACKWARD)])
    rank(written, 1, [*steps(71, 1, 12, 59), profile(BACKWARD, affinity=[0])])
    (finding,) = written.findings(status=0)
    assert finding.message.endswith("take its CPU core: it is pinned to core 0")
    said = [each for each in finding.evidence if each.startswith("also on its core")]
    assert said == ["also on its core: python compress.py (pid 4711), 50% of a core"]
    assert "sched_setaffinity" in finding.fix


def test_sleep_on_a_crowded_machine_takes_a_line_that_sleeps(written: Written) -> None:
    """Without one it may have waited for what others of the machine keep from running."""
    for number in (0, 2):
        rank(written, number, [*steps(40, 45, 10, 28), profile(BACKWARD)])
    rank(written, 1, [*steps(80, 5, 10, 30), profile(BACKWARD)])
    asked(written)
    assert written.findings(status=0) == []


def test_sleep_on_a_crowded_machine_that_waits_cannot_explain(written: Written) -> None:
    rank(written, 0, steps(6, 30, 4, 3))
    rank(written, 1, steps(34, 2, 4, 8))
    assert [each.ranks for each in written.findings(status=0)] == [(1,)]


def test_workers_that_want_for_cores_are_no_stragglers_fault(written: Written) -> None:
    counted = {"children": 2, "children_ran": 200 * MS}
    fetch = stack(40, MAIN, loop(30), letter="S", waits=("queue.py", "get"))
    asked(written)
    theirs = profile(BACKWARD, **counted, children_waited=100 * MS)
    rank(written, 0, [*steps(20, 50, 10, 2, phase="data"), theirs])
    mine = profile(fetch, **counted, children_waited=900 * MS)
    rank(written, 1, [*steps(69, 1, 10, 2, phase="data"), mine])
    assert "DDP610" not in [each.code for each in written.findings(status=0)]


@pytest.mark.parametrize(("workers", "found"), [(1, []), (0, ["DDP610"])])
def test_what_workers_lack_is_not_known_without_samples(
    written: Written, workers: int, found: list[str]
) -> None:
    """A short job may end before any were taken; its training thread only waits for a batch."""
    passed = {"kind": "pass", "pass_": 0, "number": 0, "state": "ended", "workers": workers}
    rank(written, 0, [*steps(10, 60, 10, 2, phase="data"), passed])
    rank(written, 1, [*steps(69, 1, 10, 2, phase="data"), passed])
    assert [each.code for each in written.findings(status=0)] == found


def test_workers_that_want_for_cores_excuse_no_other_phase(written: Written) -> None:
    counted = {"children": 2, "children_ran": 200 * MS}
    slow = stack(40, MAIN, loop(30))
    finding = sick(
        written,
        profile(slow, **counted, children_waited=900 * MS),
        profile(BACKWARD, **counted, children_waited=100 * MS),
    )
    assert finding.location == Location("/job/train.py", 30)


def test_a_rank_without_workers_waits_for_none_of_them(written: Written) -> None:
    fetch = stack(40, MAIN, loop(30), letter="S", waits=("queue.py", "get"))
    asked(written)
    rank(written, 0, [*steps(20, 50, 10, 2, phase="data"), profile(BACKWARD)])
    mine = profile(fetch, children_waited=900 * MS)
    rank(written, 1, [*steps(69, 1, 10, 2, phase="data"), mine])
    assert "DDP610" in [each.code for each in written.findings(status=0)]


# -- lines


def test_the_line_is_the_one_with_the_surplus(written: Written) -> None:
    work = stack(30, MAIN, loop(30), ("/job/clean.py", 12, "normalize"))
    common = stack(10, MAIN, loop(31), ("/job/clean.py", 40, "load"))
    theirs = profile(BACKWARD, common)
    finding = sick(written, profile(work, common, stack(8, MAIN, loop(33))), theirs)
    assert finding.location == Location("/job/clean.py", 12)
    assert finding.fix.startswith("Do this on the one rank less often")
    assert finding.message == (
        "rank 1 holds the others up by 40.0 ms a step, in its code between the phases: it runs "
        "normalize()"
    )
    assert finding.evidence[:2] == (
        "30 of 48 samples of its stack (62%) are at clean.py:12 in normalize(); of the others' 0 "
        "of 100",
        "called at train.py:30",
    )


def test_a_line_of_all_ranks_that_takes_longer_on_one(written: Written) -> None:
    work = [stack(count, MAIN, loop(30), ("/job/clean.py", 12, "clean")) for count in (40, 4)]
    finding = sick(written, profile(work[0]), profile(work[1], BACKWARD))
    assert finding.fix.startswith("See why this line takes longer on this rank")


def test_what_all_ranks_do_is_no_surplus(written: Written) -> None:
    common = [stack(24, MAIN, loop(31)), stack(24, MAIN, loop(33))]
    finding = sick(written, profile(*common), profile(*common))
    assert finding.location is None
    assert finding.evidence[0] == (
        "its training thread runs 36.0 ms a step longer, at the same lines as the others: heavier "
        "data, or a slower core"
    )


def test_a_surplus_spread_over_a_function_is_that_function(written: Written) -> None:
    lines = [stack(9, MAIN, loop(30), ("/job/a.py", line, "clean")) for line in (3, 4, 5, 6)]
    finding = sick(written, profile(*lines, stack(10, MAIN, loop(33))))
    assert finding.location == Location("/job/a.py", 3)
    assert "36 of 46 samples of its stack (78%) are in clean(), 9 of them at a.py:3" in str(
        finding.evidence
    )


def test_what_one_of_many_slow_lines_calls_is_not_the_line(written: Written) -> None:
    """The surplus is that of the function; a call that has a quarter of it explains little."""
    lines = [stack(9, MAIN, loop(30), ("/job/a.py", line, "clean")) for line in (4, 5, 6)]
    inner = stack(9, MAIN, loop(30), ("/job/a.py", 3, "clean"), ("/job/b.py", 8, "trim"))
    finding = sick(written, profile(inner, *lines, stack(10, MAIN, loop(33))))
    assert finding.location == Location("/job/a.py", 3)
    assert "in clean(), 9 of them at a.py:3" in str(finding.evidence)


@pytest.mark.parametrize(("later", "named"), [(0, True), (1, False)])
def test_a_file_that_was_changed_since_has_other_lines(
    written: Written, tmp_path: Path, later: int, named: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text("def main(rank):\n    if rank == 1:\n        log()\n")
    mine = profile(stack(40, (str(script), 3, "main"), (str(tmp_path / "log.py"), 7, "log")))
    os.utime(script, ns=(0, mine["time"] + later))
    finding = sick(written, mine)
    assert ("train.py:3 is in a branch that depends on the rank" in finding.evidence) is named


def test_a_branch_by_rank_is_the_cause(written: Written, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def main(rank):\n    if rank == 1:\n        log()\n")
    here = ((str(script), 3, "main"), (str(tmp_path / "log.py"), 7, "log"))
    finding = sick(written, profile(stack(40, *here)))
    assert finding.location == Location(str(script), 3)
    assert "train.py:3 is in a branch that depends on the rank" in finding.evidence
    assert finding.fix.startswith("Do this on the one rank less often")


# -- reasons


@pytest.mark.parametrize(
    ("text", "letter", "waits", "words"),
    [
        ("time.sleep(delay)", "S", ("a.py", "fetch"), "it sleeps in fetch()"),
        ("with self.lock:", "S", ("a.py", "fetch"), "it waits for a lock in fetch()"),
        ("item = source.get()", "S", ("queue.py", "get"), "it waits for a queue in fetch()"),
        ("page = ask(url)", "S", ("ssl.py", "read"), "it waits for the network in fetch()"),
        ("page = peer.recv(64)", "S", ("a.py", "fetch"), "it waits for the network in fetch()"),
        ("item = peer.recv()", "S", ("connection.py", "_recv"), "it waits for a queue in fetch()"),
        ("text = file.read()", "S", ("a.py", "fetch"), "it waits for a file in fetch()"),
        ("text = file.read()", "D", ("a.py", "fetch"), "it waits for the disk in fetch()"),
        ("do_something()", "S", ("a.py", "fetch"), "it waits in fetch()"),
    ],
)
def test_what_a_line_waits_for(
    written: Written, tmp_path: Path, text: str, letter: str, waits: tuple[str, str], words: str
) -> None:
    helper = tmp_path / "a.py"
    helper.write_text(f"def fetch():\n    {text}\n")
    here = stack(40, MAIN, loop(30), (str(helper), 2, "fetch"), letter=letter, waits=waits)
    finding = sick(written, profile(here), cpu=10.0)
    assert finding.message.endswith(words)
    assert finding.location == Location(str(helper), 2)


def test_garbage(written: Written) -> None:
    work = stack(40, MAIN, loop(30))
    finding = sick(written, profile(work, gc=20 * 35 * MS))
    assert finding.message.endswith(": Python collects garbage")
    assert "Python's collector takes 35.0 ms a step, 0.0 ms on the others" in finding.evidence


@pytest.mark.parametrize(
    ("mine", "theirs", "named"),
    [(20, 0, True), (19, 0, False), (35, 20, False), (41, 20, True)],
)
def test_garbage_that_is_half_of_the_surplus(
    written: Written, mine: int, theirs: int, named: bool
) -> None:
    """What it takes on the others as well is no reason."""
    work, usual = stack(40, MAIN, loop(30)), profile(BACKWARD, gc=20 * theirs * MS)
    finding = sick(written, profile(work, gc=20 * mine * MS), usual)
    assert finding.message.endswith(": Python collects garbage") is named


def test_samples_of_a_single_step_count_for_that_step(written: Written) -> None:
    finding = sick(written, profile(stack(40, MAIN, loop(30)), gc=35 * MS, steps=1))
    assert "Python's collector takes 35.0 ms a step, 0.0 ms on the others" in finding.evidence


@pytest.mark.parametrize(("mine", "theirs", "named"), [(2, 4, True), (4, 4, False), (0, 4, False)])
def test_threads_that_are_fewer_are_reported(
    written: Written, mine: int, theirs: int, named: bool
) -> None:
    common = stack(40, MAIN, loop(30))
    finding = sick(written, profile(common, threads=mine), profile(common, threads=theirs))
    words = f": it computes with {mine} threads, the others with {theirs}"
    assert finding.message.endswith(words) is named


@pytest.mark.parametrize(
    ("major", "words", "moved"),
    [
        (
            20,
            "it waits for the disk in fetch()",
            ["it reads and writes 5 MB a step, 2 KB of it on disk"],
        ),
        (19, "it waits in fetch()", []),
    ],
)
def test_a_wait_for_pages_that_come_from_the_disk(
    written: Written, tmp_path: Path, major: int, words: str, moved: list[str]
) -> None:
    helper = tmp_path / "a.py"
    helper.write_text("def fetch():\n    return stream.next()\n")
    here = stack(40, MAIN, loop(30), (str(helper), 2, "fetch"), letter="S", waits=("a.py", "fetch"))
    counted = {"characters": 20 * 5_000_000, "disk": 20 * 2_000, "major": major}
    finding = sick(written, profile(here, **counted), cpu=10.0)
    assert finding.message.endswith(words)
    assert [each for each in finding.evidence if each.startswith("it reads and writes")] == moved


@pytest.mark.parametrize(
    ("sleeps", "waits"), [(20, True), (19, False)], ids=["half of the samples", "fewer"]
)
def test_a_line_that_waits_does_so_in_half_of_its_samples(
    written: Written, sleeps: int, waits: bool
) -> None:
    there = (MAIN, loop(30), ("/job/a.py", 3, "pad"))
    mine = profile(stack(sleeps, *there, letter="S"), stack(40 - sleeps, *there))
    assert sick(written, mine, cpu=10.0).message.endswith("it waits in pad()") is waits


@pytest.mark.parametrize(
    ("number", "words"),
    [(999, "999 B"), (1_000, "1 KB"), (999_000_000, "999 MB"), (1_500_000_000, "1.5 GB")],
)
def test_what_is_read_and_written_is_shown_in_the_unit_that_fits(number: int, words: str) -> None:
    assert _bytes(number) == words


def test_fewer_threads(written: Written, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n\ntorch.set_num_threads(1)\n")
    mine = profile(stack(40, (str(script), 9, "<module>")), threads=1)
    theirs = profile(stack(40, (str(script), 9, "<module>")), threads=4)
    finding = sick(written, mine, theirs)
    assert finding.message.endswith(": it computes with 1 thread, the others with 4")
    assert finding.location == Location(str(script), 3)
    assert "set_num_threads" in finding.fix


def test_waits_in_a_collective_are_no_line_of_a_surplus(written: Written) -> None:
    """The rank was sampled in an evaluation, too, in which it waited for the others."""
    waits = stack(24, MAIN, loop(40), waits=("distributed_c10d.py", "all_gather"), letter="S")
    mine = profile(waits, stack(24, MAIN, loop(30), letter="S"))
    assert sick(written, mine, cpu=10.0).location == Location("/job/train.py", 30)


def test_page_faults(written: Written) -> None:
    work = stack(40, MAIN, loop(30), ("/job/a.py", 3, "pad"))
    finding = sick(written, profile(work, minor=20 * 120_000))
    assert finding.message.endswith(": it touches new memory in pad()")
    assert "120000 page faults a step, 0 on the others" in finding.evidence


@pytest.mark.parametrize(
    ("faults", "kernel", "named"), [(16_384, 22, True), (16_384, 5, False), (900, 22, False)]
)
def test_page_faults_that_are_slow(written: Written, faults: int, kernel: int, named: bool) -> None:
    """As in a virtual machine; the time is the kernel's, and there are enough of them for it."""
    work = stack(40, MAIN, loop(30), ("/job/a.py", 3, "pad"))
    mine = profile(work, minor=20 * faults, system=20 * kernel * MS)
    assert sick(written, mine).message.endswith("touches new memory in pad()") is named


@pytest.mark.parametrize(
    ("waited", "shared", "named"), [(30, 1, False), (30, 0, True), (0, 1, True)]
)
def test_page_faults_of_code_that_all_ranks_run(
    written: Written, waited: int, shared: int, named: bool
) -> None:
    """On a crowded machine, one allocator returned its memory and another did not."""
    asked(written)
    there = stack(30, MAIN, loop(30), ("/job/a.py", 3, "pad"))
    theirs = profile(BACKWARD, *[stack(shared, MAIN, loop(30), ("/job/a.py", 3, "pad"))] * shared)
    for number in (0, 2):
        rank(written, number, [*steps(10 + waited, 40, 9, waited), theirs])
    mine = profile(there, stack(18, MAIN, loop(31)), minor=20 * 120_000)
    rank(written, 1, [*steps(50 + waited, 1, 45, waited), mine])
    assert [each.code for each in written.findings(status=0)] == ["DDP610"] * named


def clocked(written: Written, *clocks: object) -> Finding:
    """The finding, with clocks of cores by rank; the others compute for 9 ms a step."""
    told = {"kind": "profile", "time": T0, "restart": 0, "asked": 1, "busy": []}
    written.supervisor.append({**told, "clocks": list(clocks)})
    work = stack(40, MAIN, loop(30))
    theirs = profile(BACKWARD, stack(4, MAIN, loop(30)), ran=20 * 9 * MS)
    return sick(written, profile(work, ran=20 * 45 * MS), theirs)


FAST = ([0, 3_600_000, 3_600_000, 5], [2, 3_600_000, 3_600_000, 5])


def test_a_core_with_a_lower_clock(written: Written) -> None:
    finding = clocked(written, *FAST, [1, 800_000, 3_600_000, 5])
    assert finding.message.endswith(
        ": its CPU core runs at 0.8 GHz, those of the others at 3.6 GHz"
    )
    assert "its training thread runs 36.0 ms a step longer for the same work" in finding.evidence
    assert (finding.location, "governor" in finding.fix) == (None, True)


def test_a_core_of_another_kind(written: Written) -> None:
    finding = clocked(written, *FAST, [1, 800_000, 900_000, 5])
    assert "the most that its core can do is 0.9 GHz, that of the others 3.6 GHz" in (
        finding.evidence
    )
    assert "not all cores" in finding.fix.lower()


@pytest.mark.parametrize(
    "clocks",
    [
        (),
        FAST,
        # As fast as theirs, or too little slower for the whole surplus.
        (*FAST, [1, 3_400_000, 3_600_000, 5]),
        (*FAST, [1, 2_500_000, 3_600_000, 5]),
        # Read too seldom, of none of the others, damaged.
        (*FAST, [1, 800_000, 3_600_000, 2]),
        ([1, 800_000, 3_600_000, 5],),
        (*FAST, [1, 0, 0, 9], [1, "slow"], None),
    ],
)
def test_clocks_that_explain_nothing(written: Written, clocks: tuple[object, ...]) -> None:
    finding = clocked(written, *clocks)
    assert "GHz" not in finding.message
    assert finding.location == Location("/job/train.py", 30)


def test_a_lower_clock_does_not_hide_what_the_rank_alone_does(written: Written) -> None:
    told = {"kind": "profile", "time": T0, "restart": 0, "asked": 1, "busy": []}
    written.supervisor.append({**told, "clocks": [*FAST, [1, 800_000, 3_600_000, 5]]})
    mine = profile(stack(40, MAIN, loop(30), ("/job/a.py", 3, "pad")), ran=20 * 45 * MS)
    finding = sick(written, mine, profile(BACKWARD, ran=20 * 9 * MS))
    assert finding.location == Location("/job/a.py", 3)


def test_clocks_are_read_where_the_kernel_tells_them(tmp_path: Path) -> None:
    processes, cores = tmp_path / "proc", tmp_path / "cpu"
    for pid, core in ((10, 3), (11, 4), (12, 5)):
        (processes / str(pid)).mkdir(parents=True)
        fields = " ".join(["R", *["0"] * 35, str(core), "0"])
        (processes / str(pid) / "stat").write_text(f"{pid} (a) b) {fields}\n")
    for core, clock in ((3, 800_000), (4, 3_000_000)):
        folder = cores / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_cur_freq").write_text(f"{clock}\n")
        (folder / "cpuinfo_max_freq").write_text("3600000\n")
    clocks = CoreClocks(processes, cores)
    assert not clocks.highest
    # Rank 2's core tells nothing, and rank 3 is gone.
    pids = {0: 10, 1: 11, 2: 12, 3: 99}
    clocks.look(pids)
    (cores / "cpu4" / "cpufreq" / "scaling_cur_freq").write_text("3500000\n")
    (cores / "cpu3" / "cpufreq" / "scaling_cur_freq").write_text("700000\n")
    clocks.look(pids)
    assert list(clocks.highest) == [(0, 800000, 3600000, 2), (1, 3500000, 3600000, 2)]


def test_loader_workers(written: Written) -> None:
    fetch = stack(40, MAIN, loop(30), letter="S", waits=("queue.py", "get"))
    asked(written)
    for number, waits in ((0, BACKWARD), (1, fetch)):
        ran = (1_900 if number else 200) * MS
        times = steps(50, 1, 5, 0, phase="data") if number else steps(10, 41, 5, 0, phase="data")
        rank(written, number, [*times, profile(waits, children=2, children_ran=ran)])
    (finding,) = written.findings(status=0)
    assert finding.message.endswith("in its data loading: it waits for its loader workers")
    assert finding.location == Location("/job/train.py", 30)
    assert any("use 95% of a core; those of the others 10%" in each for each in finding.evidence)


def test_samples_that_were_asked_for_another_ranks_sake_have_its_line_too(written: Written) -> None:
    asked(written)
    work = stack(40, MAIN, loop(30), ("/job/clean.py", 12, "normalize"))
    for number in (0, 3):
        rank(written, number, [*steps(10, 40, 9, 0), profile(BACKWARD)])
    for number in (1, 2):
        rank(written, number, [*steps(50, 1, 45, 0), profile(work)])
    found = written.findings(status=0)
    assert [each.ranks for each in found] == [(1,), (2,)]
    assert [each.location for each in found] == [Location("/job/clean.py", 12)] * 2


def test_who_seems_slow_is_asked_before_the_rules_look(written: Written) -> None:
    """However lately the steps were looked at; else the finding comes first, without its line."""
    records: list[Record] = []
    page = RequestWriter(str(written.path))
    stragglers = Stragglers(page, records.append)
    (written.path / "run.json").write_text(json.dumps({"format": FORMAT}))
    stragglers.look(RunReader(written.path).snapshot())
    for number, times in ((0, steps(10, 41, 9, 0)), (1, steps(50, 1, 45, 0))):
        rank(written, number, times)
    run = RunReader(written.path).snapshot()
    stragglers.look(run)
    assert records == []
    stragglers.ask(run)
    stragglers.ask(run)
    stragglers.close()
    assert [each.rank for each in records if isinstance(each, ProfileRequestRecord)] == [1]


def test_damaged_samples_are_left_out(written: Written) -> None:
    damaged: list[Any] = [None, [1], [2, "x", 3, 4, 5], {"a": 1}, [1, [[1, 2]], ["a"], "R", 1]]
    finding = sick(written, profile(*damaged, gc="much", affinity=7, steps=None))
    assert finding.location is None
