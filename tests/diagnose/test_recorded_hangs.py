"""Hangs that were recorded on a GPU with NCCL, read again, and as the probe records them now.

Each file of ``tests/recordings`` is the last examination of a real job: two ranks on one H100,
torch 2.11, NCCL 2.28.9. Paths are placeholders, and stacks and Flight Recorders are shortened.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.hangs.process_activity import MIN_STEADY
from ddpdoctor.nodes.hang_examination import CALLS_AFTER, CALLS_BEFORE, NEWEST_ENTRIES, around
from ddpdoctor.probe.observers.collective_calls import reported_calls
from ddpdoctor.run.records.base import as_json
from ddpdoctor.run.records.supervisor import FlightCall
from tests.support.hanging_ranks import flight_call
from tests.support.written import Written

RECORDINGS = Path(__file__).parents[1] / "recordings"


class Recording:
    """A recorded hang that a test may change before it is read."""

    def __init__(self, name: str, written: Written) -> None:
        text = (RECORDINGS / f"{name}.json").read_text()
        script = written.path / f"{name}.py"
        whole = json.loads(text.replace("{script}", str(script)))
        script.write_text(whole["script"])
        self.path = str(script)
        self._written = written
        self._stderr = str(whole["stderr"])
        self.hang: dict[str, Any] = whole["hang"]
        self.ranks: list[dict[str, Any]] = self.hang["ranks"]

    def flights(self) -> dict[int, list[dict[str, Any]]]:
        return {each["rank"]: each["flight"] for each in self.ranks}

    def findings(self) -> list[Finding]:
        name = "hang-0001.json"
        (self._written.path / name).write_text(json.dumps(self.hang))
        still = {key: value for key, value in self.hang.items() if key != "ranks"}
        self._written.supervisor.append({**still, "file": name})
        return self._written.findings(stderr=self._stderr)


# -- one rank skips one all_reduce


SKIPPED, CONDITION = 11, 10

SENTENCE = (
    "rank 1 skipped all_reduce #130 (1 float, default group) at `dist.all_reduce(m)` "
    "hang_missing_allreduce.py:11 after step 60, by `if not (rank == 1 and step == 60):` "
    "hang_missing_allreduce.py:10: rank 0 called it, rank 1 went on to all_reduce #{} "
    "(1,059,850 floats, default group) at hang_missing_allreduce.py:7"
)


def map_calls(recorded: list[dict[str, Any]]) -> list[FlightCall]:
    return [*map(flight_call, recorded)]


def as_recorded_now(recording: Recording) -> None:
    """What the examination keeps now: of rank 1 also the calls around the one that hangs."""
    zero, one = recording.ranks
    first = one["flight"][0]
    whole = [
        {
            **(each := one["flight"][sequence % 2]),
            "id": sequence - 1,
            "sequence": sequence,
            "created": first["created"] - (first["sequence"] - sequence) * 2_000_000,
            "retired": sequence < 130,
            "state": "completed" if sequence < 130 else each["state"],
        }
        for sequence in range(80, 160)
    ]
    kept = around({0: map_calls(zero["flight"]), 1: map_calls(whole)})
    zero["flight"], one["flight"] = ([as_json(each) for each in kept[rank]] for rank in (0, 1))


@pytest.mark.parametrize(("now", "went_on_to"), [(True, 130), (False, 138)])
def test_who_skipped_a_call_is_named_with_its_condition(
    written: Written, now: bool, went_on_to: int
) -> None:
    """Rank 1's host was 31 calls further on; what it did instead was not kept then."""
    recording = Recording("hang_missing_allreduce", written)
    if now:
        as_recorded_now(recording)
    (finding,) = recording.findings()
    assert (finding.code, finding.ranks, finding.severity) == ("DDP803", (1,), Severity.ERROR)
    assert finding.location == Location(recording.path, CONDITION)
    assert finding.message == SENTENCE.format(went_on_to)
    assert finding.evidence[-1] == (
        "NCCL on rank 0: message truncated: receiving 530432 bytes instead of 65536: the ranks' "
        "collectives differ in size"
    )


def test_without_a_condition_on_the_rank_both_lines_are_named(written: Written) -> None:
    recording = Recording("hang_missing_allreduce", written)
    script = Path(recording.path)
    script.write_text(script.read_text().replace("rank == 1 and step == 60", "loss < best"))
    as_recorded_now(recording)
    (finding,) = recording.findings()
    assert (finding.code, finding.ranks) == ("DDP803", (0, 1))
    assert "called all_reduce #130 of the default group with different sizes" in finding.message


def test_who_may_never_come_there_did_not_skip_it(written: Written) -> None:
    recording = Recording("hang_missing_allreduce", written)
    script = Path(recording.path)
    text = script.read_text()
    script.write_text(text.replace("not (rank == 1 and step == 60)", "rank == 0 and step == 60"))
    as_recorded_now(recording)
    (finding,) = recording.findings()
    assert (finding.code, finding.ranks) == ("DDP401", (0,))


def test_calls_of_every_group_are_kept_around_the_one_that_hangs() -> None:
    def entries(group: str, done: int, count: int) -> list[dict[str, Any]]:
        return [
            {
                "process_group": (group, ""),
                "collective_seq_id": sequence,
                "profiling_name": "nccl:all_reduce",
                "time_created_ns": 10 * sequence + len(group),
                "retired": sequence <= done,
                "state": "completed" if sequence <= done else "scheduled",
            }
            for sequence in range(1, count + 1)
        ]

    def kept(*recorded: dict[str, Any]) -> list[FlightCall]:
        return map_calls(reported_calls([*recorded], lambda _: ()))

    found = around(
        {
            0: kept(*entries("0", 129, 130), *entries("one", 7, 7)),
            1: kept(*entries("0", 129, 300), *entries("one", 200, 200)),
        }
    )
    numbers = {
        group: [each.sequence for each in found[1] if each.group == group] for group in ("0", "one")
    }
    assert numbers["0"] == [
        *range(130 - CALLS_BEFORE, 130 + CALLS_AFTER),
        *range(301 - NEWEST_ENTRIES, 301),
    ]
    # Nothing hangs there.
    assert numbers["one"] == [*range(201 - NEWEST_ENTRIES, 201)]
    assert [each.sequence for each in found[0] if each.group == "0"][-1] == 130


# -- a GPU that is at work which was queued before the collective


def marked(recording: Recording, *late: int) -> None:
    """What the probe's markers tell now: the ranks ``late`` have not come to their forward."""
    for each in recording.ranks:
        created = next(call["created"] for call in each["flight"] if call["sequence"] == 65)
        optimizer, forward, backward, over = (created - ago for ago in (9, 6, 3, -3))
        each["sites"] = dict.fromkeys(("forward", "backward", "optimizer"), f"{recording.path}:9")
        each["device"] = (
            [
                ["optimizer", optimizer, True],
                ["other", forward, False],
                ["forward", backward, False],
            ]
            if each["rank"] in late
            else [["other", backward, True], ["backward", over, False], ["other", over, False]]
        )


def test_a_gpu_at_work_that_was_queued_before_is_named(written: Written) -> None:
    recording = Recording("hang_infinite_kernel", written)
    marked(recording, 1)
    (finding,) = recording.findings()
    assert (finding.code, finding.ranks, finding.severity) == ("DDP802", (1,), Severity.WARNING)
    assert finding.location == Location(recording.path, 9)
    assert finding.message == (
        "the GPU of rank 1 never came to all_reduce #65 (1,059,850 floats, default group) of "
        "hang_infinite_kernel.py:9, where rank 0 waits: still at work that was queued before it, "
        "for 33 s: what was queued after optimizer at hang_infinite_kernel.py:9 and before forward "
        "at hang_infinite_kernel.py:9"
    )


def test_a_gpu_in_its_forward(written: Written) -> None:
    recording = Recording("hang_infinite_kernel", written)
    marked(recording, 1)
    _, one = recording.ranks
    one["device"][1][2] = True
    one["device"] = one["device"][1:]
    (finding,) = recording.findings()
    assert finding.message.endswith("for 33 s: forward at hang_infinite_kernel.py:9")


@pytest.mark.parametrize("timed", [True, False])
def test_the_network_is_blamed_only_if_every_gpu_has_come(written: Written, timed: bool) -> None:
    """By torch's own record, which it makes only with TORCH_NCCL_ENABLE_TIMING."""
    recording = Recording("hang_infinite_kernel", written)
    for each in recording.ranks:
        for call in each["flight"]:
            call["state"] = "completed" if call["retired"] else "started" if timed else "scheduled"
    (finding,) = recording.findings()
    assert finding.code == "DDP814"
    assert ("does not end: the network between them" in finding.message) is timed
    assert ("or a GPU has not come to it" in finding.message) is not timed
    assert ("TORCH_NCCL_ENABLE_TIMING" in finding.fix) is not timed


@pytest.mark.parametrize(("backend", "known"), [("nccl", False), ("gloo", True)])
def test_without_a_flight_recorder_only_nccl_leaves_it_open(
    written: Written, backend: str, known: bool
) -> None:
    recording = Recording("hang_infinite_kernel", written)
    for each in recording.ranks:
        each.update(flight=None, phase="wait", collective="barrier", backend=backend)
    (finding,) = recording.findings()
    assert finding.code == "DDP814"
    assert ("does not end: the network between them" in finding.message) is known


def test_a_gpu_that_torch_has_not_seen_begin_it_is_late(written: Written) -> None:
    recording = Recording("hang_infinite_kernel", written)
    for each in recording.ranks:
        for call in each["flight"]:
            if call["retired"]:
                call["duration"] = 0.4
            elif each["rank"] == 0 and call["sequence"] == 65:
                call["state"] = "started"
    (finding,) = recording.findings()
    assert (finding.code, finding.ranks) == ("DDP802", (1,))
    assert finding.message.endswith("for 33 s: what was queued before it")


def test_markers_of_an_older_step_say_nothing(written: Written) -> None:
    """Of steps that are not seen in full there are none between the phases."""
    recording = Recording("hang_infinite_kernel", written)
    for each in recording.ranks:
        each["device"] = [["starting", each["since"] - 10**9, True]]
    (finding,) = recording.findings()
    assert "or a GPU has not come to it" in finding.message


def test_gpus_that_came_to_their_backward(written: Written) -> None:
    recording = Recording("hang_infinite_kernel", written)
    marked(recording)
    (finding,) = recording.findings()
    assert finding.code == "DDP814"
    assert finding.message.endswith("the backend, or the work of that backward on a GPU")


@pytest.mark.parametrize(
    ("steady", "moves", "expected"),
    [
        (MIN_STEADY, 0, Severity.ERROR),
        (MIN_STEADY - 1, 0, Severity.WARNING),
        (MIN_STEADY, 1 << 22, Severity.WARNING),
    ],
)
def test_what_lasts_is_an_error(
    written: Written, steady: int, moves: int, expected: Severity
) -> None:
    recording = Recording("hang_infinite_kernel", written)
    marked(recording, 1)
    for each in recording.ranks:
        each["steady"] = steady
        each["activity"]["characters"] = moves
    (finding,) = recording.findings()
    assert (finding.code, finding.severity) == ("DDP802", expected)


# -- those that were right before


def test_collectives_in_another_order(written: Written) -> None:
    (finding,) = Recording("hang_order", written).findings()
    assert (finding.code, finding.ranks) == ("DDP803", (0, 1))
    assert "rank 1 all_reduce at `dist.all_reduce(acc); dist.broadcast(loss, 0)`" in finding.message


def test_a_rank_that_sleeps(written: Written) -> None:
    recording = Recording("timeout", written)
    (finding,) = recording.findings()
    assert (finding.code, finding.ranks) == ("DDP802", (1,))
    assert finding.location == Location(recording.path, 7)
    # Where the call is made, not where the host has come to.
    assert "where rank 0 waits in hang_" not in finding.message
    assert "where rank 0 waits in timeout.py:8" in finding.message
