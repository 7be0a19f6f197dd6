"""DDP610 and DDP611 on written runs whose ranks are slow in some steps only, which medians hide."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

import pytest

from ddpdoctor.core.finding import Finding
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.speed.lag import still_slower
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.base import JsonObject
from tests.support.straggling import MAIN, asked, loop, profile, rank, stack
from tests.support.written import MS, T0, Written

OWN = 10.0
"""Milliseconds that a step takes."""

Extra = Callable[[int], float]


def steps(
    mine: Extra,
    other: Extra,
    count: int,
    *,
    phase: str = "other",
    outside: Callable[[int], float] = lambda step: 0.0,
    first: Callable[[int], bool] = lambda step: False,
    length: int = 1,
) -> Iterator[JsonObject]:
    """Steps of ranks that wait for each other.

    Args:
        mine: Milliseconds beyond the usual ones, by step.
        other: Those of the other rank.
        count: Steps.
        phase: Where they are spent.
        outside: Milliseconds before a step that belong to none.
        first: Whether a step is the first of a pass.
        length: How many steps a line of the journal stands for.
    """
    start = float(T0)
    for begin in range(0, count, length):
        numbers = range(begin, begin + length)
        own = sum(OWN + mine(step) for step in numbers) / length
        wait = sum(max(0.0, other(step) - mine(step) - outside(step)) for step in numbers) / length
        before = sum(outside(step) + (0.01 if first(step) else 0) for step in numbers)
        start += before * MS
        parts = {"forward": int(OWN * MS), phase: int((own - OWN) * MS), "wait": int(wait * MS)}
        if phase == "forward":
            parts["forward"] = int(own * MS)
        yield {
            "kind": "step", "step": begin + length - 1, "start": int(start), "split": True, **parts,
            "total": sum(parts.values()), "cpu": int(OWN * MS), "waited": 0, "steps": length,
            "outside": int(before * MS),
        }  # fmt: skip
        start += sum(parts.values()) * length


def none(step: int) -> float:
    return 0.0


def every(period: int, extra: float) -> Extra:
    return lambda step: extra if step % period == 0 else 0.0


def said(written: Written, *each: Iterable[JsonObject]) -> list[Finding]:
    for number, records in enumerate(each):
        rank(written, number, records)
    found = written.findings(status=0)
    return [one for one in found if one.code in ("DDP610", "DDP611")]


@pytest.mark.parametrize(("period", "words"), [(2, "2nd"), (3, "3rd"), (10, "10th")])
def test_the_period_is_named(written: Written, period: int, words: str) -> None:
    slow = every(period, 10.0 * period)
    asked(written)
    save = stack(40, MAIN, loop(31), letter="S")
    (finding,) = said(
        written,
        [*steps(none, slow, 400), profile(stack(48, MAIN, loop(33)))],
        [*steps(slow, none, 400), profile(save, stack(8, MAIN, loop(33)))],
    )
    assert (finding.code, finding.ranks) == ("DDP610", (1,))
    assert f"a step, in its code between the phases, in every {words} step" in finding.message
    assert finding.location == Location("/job/train.py", 31)
    more = f"in every {words} step: {10 * period}"
    assert any(each.startswith(more) for each in finding.evidence), finding.evidence
    assert any("means of 390 steps" in each for each in finding.evidence)
    assert still_slower(RunReader(written.path).snapshot(), 1)


def test_a_period_may_hide_within_lines_of_the_journal(written: Written) -> None:
    """A line stands for 16 steps: their sum is known, and not which of them it was."""
    slow = every(10, 100.0)
    each = (steps(none, slow, 1600, length=16), steps(slow, none, 1600, length=16))
    (finding,) = said(written, *each)
    assert finding.ranks == (1,) and " step:" not in finding.message
    assert "every" not in finding.message


def test_an_evaluation_that_one_rank_does_between_passes(written: Written) -> None:
    first = every(20, 1.0)

    def evaluated(step: int) -> float:
        return 400.0 * first(step)

    (finding,) = said(
        written,
        steps(evaluated, none, 300, outside=none),
        list(steps(none, evaluated, 300, first=lambda step: bool(first(step)))),
    )
    assert finding.ranks == (0,)
    assert finding.message.endswith(
        "in its code between the phases, in the first step of each pass"
    )


def test_what_lies_between_passes_counts_for_the_rank_that_spends_it(written: Written) -> None:
    def between(step: int) -> float:
        return 400.0 if step % 20 == 0 else 0.0

    (finding,) = said(
        written,
        steps(none, none, 300, outside=between),
        steps(none, between, 300, first=lambda step: step % 20 == 0),
    )
    assert (finding.code, finding.ranks) == ("DDP610", (0,))
    assert "in the first step of each pass" in finding.message


def test_what_all_ranks_do_between_passes_is_no_surplus(written: Written) -> None:
    def between(step: int) -> float:
        return 400.0 if step % 20 == 0 else 0.0

    each = [list(steps(none, none, 300, outside=between)) for _ in range(2)]
    assert said(written, *each) == []


@pytest.mark.parametrize("times", [1, 3])
def test_a_few_long_steps_say_nothing_of_the_rest(written: Written, times: int) -> None:
    """A checkpoint, say; it takes as long as half of the job."""
    slow = {100 * each + 50: 4000.0 / times for each in range(times)}

    def extra(step: int) -> float:
        return slow.get(step, 0.0)

    assert said(written, steps(none, extra, 400), steps(extra, none, 400)) == []


@pytest.mark.parametrize("seed", range(8))
def test_lengths_that_vary_on_all_ranks_make_no_straggler(written: Written, seed: int) -> None:
    drawn = random.Random(seed)
    own = [[40 * drawn.random() ** 3 for _ in range(500)] for _ in range(2)]
    zero, one = (lambda step, each=each: each[step] for each in own)
    assert said(written, steps(zero, one, 500), steps(one, zero, 500)) == []


def test_what_no_rank_waits_for_is_no_matter(written: Written) -> None:
    """A rank that logs while its device has enough to do."""
    slow = every(10, 100.0)
    assert said(written, steps(slow, none, 400), steps(none, none, 400)) == []


def test_too_few_periods_show_nothing(written: Written) -> None:
    slow = every(40, 400.0)
    assert said(written, steps(none, slow, 320), steps(slow, none, 320)) == []


# -- data


def passed(workers: int) -> JsonObject:
    return {
        "kind": "pass", "pass": 0, "number": 0, "state": "ended", "workers": workers, "marks": 1
    }  # fmt: skip


@pytest.mark.parametrize(("workers", "fix"), [(2, "persistent_workers=True"), (0, "num_workers")])
def test_waits_at_the_beginning_of_each_pass(written: Written, workers: int, fix: str) -> None:
    slow = every(10, 200.0)
    each = [
        [passed(workers), *steps(slow, slow, 400, phase="data", first=lambda step: step % 10 == 0)]
        for _ in range(2)
    ]
    (finding,) = said(written, *each)
    assert (finding.code, finding.ranks) == ("DDP611", (0, 1))
    assert finding.message.startswith("both ranks wait for data 67 % of the time")
    assert "most of it is in the first step of each pass" in finding.evidence
    assert fix in finding.fix
    assert ("the loader's 2 workers start again in each pass" in finding.evidence) is (workers > 0)


def test_passes_of_a_short_job_say_little(written: Written) -> None:
    slow = every(10, 100.0)
    records = [*steps(slow, slow, 200, phase="data", first=lambda step: step % 10 == 0)]
    assert said(written, records, records) == []


def test_one_long_wait_for_data_says_nothing(written: Written) -> None:
    slow = {100: 6000.0}
    records = [*steps(lambda step: slow.get(step, 0.0), none, 300, phase="data")]
    assert said(written, records, records) == []


def test_every_fourth_batch_is_late_on_all_ranks(written: Written) -> None:
    slow = every(4, 40.0)
    records = [*steps(slow, slow, 300, phase="data")]
    (finding,) = said(written, records, records)
    assert finding.message.startswith("both ranks wait for data 50 % of every step")


def test_steady_waits_are_judged_by_medians_where_few_steps_lack_a_core(written: Written) -> None:
    """A mean would call the machine crowded."""
    records = [
        {**each, "waited": 40 * MS if index % 10 == 0 else 0}
        for index, each in enumerate(steps(lambda step: 30.0, none, 100, phase="data"))
    ]
    (finding,) = said(written, records, records)
    assert finding.message.startswith("both ranks wait for data 75 % of every step")
