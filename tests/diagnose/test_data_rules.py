"""What ranks drew, and what is said of it: cases that no job on one machine can stage."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.finding import Finding
from ddpdoctor.diagnose.crashes.rank_endings import PATIENCE
from ddpdoctor.diagnose.data import rules, rules_streams
from ddpdoctor.diagnose.loops import rules as loop_rules
from ddpdoctor.diagnose.loops import rules_evaluation
from ddpdoctor.probe.observers.loaders import runs_to_end
from ddpdoctor.probe.observers.samples import FOLLOWED_INDICES, Pass, sample_of
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.process import OpenRecord
from ddpdoctor.run.records.supervisor import RankExitRecord
from ddpdoctor.run.snapshot import Rank, Records, Run
from ddpdoctor.run.status import Phase, Status
from tests.support.probed import as_line, pass_record
from tests.support.written import as_declared, rank_records

Content = Callable[[int], int]


def its_own(index: int) -> int:
    return index * 7919 % 65_521


def drawn(
    indices: Sequence[Any],
    *,
    length: int = 400,
    batch: int = 16,
    content: Content | None = its_own,
    state: str = "ended",
    **facts: object,
) -> JsonObject:
    """The record of a pass that drew and trained on ``indices``."""
    wanted = sample_of(length)
    known: JsonObject = {
        "kind": "pass", "pass": 0, "number": 0, "path": "/job/train.py", "line": 9,
        "made": ["/job/train.py", 5], "armed": 0, "workers": 0, "length": length,
        "batches": -(-len(indices) // batch), "followed": len(wanted), "to_end": True,
        "sampler": {"name": "RandomSampler", "torch": True}, **facts,
    }  # fmt: skip
    one = Pass(pass_record(known), dict(zip(wanted, wanted, strict=True)))
    for start in range(0, len(indices), batch):
        one.draw(indices[start : start + batch])
        looked = one.arrived()
        if looked and content is not None:
            hashes = [[content(index)] for _, index, _ in looked]
            one.see([index for _, index, _ in looked], lambda hashes=hashes: hashes)  # type: ignore[misc]
        one.fetched += 1
        one.marks += 1
    return {**as_line(one.as_it_is(state)), **facts}


def shuffled(seed: int, length: int = 400) -> list[int]:
    return random.Random(seed).sample(range(length), length)


def run_of(
    *ranks: Iterable[JsonObject],
    groups: Sequence[Sequence[int]] | None = None,
    status: Callable[[int], Status | None] = lambda _: None,
) -> Run:
    found = []
    for number, records in enumerate(ranks):
        mine = [each for each in groups or [range(len(ranks))] if number in each]
        ddp = [{"kind": "ddp", "group_ranks": list(each)} for each in mine]
        opened = OpenRecord(format=1, rank=number, world_size=len(ranks))
        every = rank_records(*ddp, *records)
        found.append(Rank(number, 0, status(number), opened, records=every))
    return Run(Path("/run"), {}, tuple(found), taken=10**12)


RULES = (
    rules.sampler_not_used, rules.unsharded, rules.order_repeated, rules.wrong_shard,
    rules.seeds_differ, rules.lengths_differ, loop_rules.uneven, rules.other_split,
    rules_streams.same_stream, rules_streams.same_workers, rules_evaluation.not_reduced,
    rules_evaluation.padded,
)  # fmt: skip


def findings(run: Run) -> list[Finding]:
    return as_declared(finding for rule in RULES for finding in rule(run))


def codes(run: Run) -> list[str]:
    return [finding.code for finding in findings(run)]


# -- what is recorded


@pytest.mark.parametrize("length", [1, 100, 1_000, 1_281_167])
def test_all_ranks_follow_the_same_indices(length: int) -> None:
    sample = sample_of(length)
    assert len(set(sample)) == len(sample) == min(length, FOLLOWED_INDICES)
    assert all(0 <= index < length for index in sample)


def test_the_order_at_the_beginning_does_not_depend_on_the_batch_size() -> None:
    order = shuffled(1)
    assert drawn(order, batch=16)["head"] == drawn(order, batch=7)["head"]
    assert drawn(order)["head"] != drawn(shuffled(2))["head"]


def test_indices_that_are_no_numbers_have_no_index_space() -> None:
    record = drawn([(index, 224) for index in range(64)])
    assert record["opaque"] and "hits" not in record


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("for batch in loader:\n    step(batch)", True),
        ("for i, batch in enumerate(tqdm(self.loader, desc='x'), 1):\n    step(batch)", True),
        ("for batch in loader:\n    for x in batch:\n        break", True),
        ("for batch in loader:\n    if done:\n        break", False),
        ("for batch in islice(loader, 10):\n    step(batch)", False),
        ("for a, b in zip(loader, other):\n    step(a, b)", False),
        ("for batch in loader:\n    yield batch", False),
    ],
)
def test_whether_a_loop_takes_every_batch(tmp_path: Path, loop: str, expected: bool) -> None:
    lines = "".join(f"    {line}\n" for line in loop.splitlines())
    path = tmp_path / "train.py"
    path.write_text(f"def train():\n{lines}")
    assert runs_to_end(str(path), 2) is expected


# -- what is said


def test_four_ranks_that_draw_everything() -> None:
    run = run_of(*([drawn(shuffled(seed))] for seed in range(4)))
    (finding,) = findings(run)
    assert (finding.code, finding.ranks, finding.location.line) == ("DDP102", (0, 1, 2, 3), 5)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("sampler", "call", "fix"),
    [
        ({"torch": True}, "sampler=s", "Use sampler=DistributedSampler(dataset)"),
        ({"torch": True}, "batch_sampler=s", "Build the batch sampler on a DistributedSampler:"),
        ({"name": "Buckets"}, "batch_sampler=s", "Let Buckets shuffle with the same seed"),
    ],
)
def test_the_fix_is_one_that_the_loader_accepts(
    tmp_path: Path, sampler: JsonObject, call: str, fix: str
) -> None:
    train = tmp_path / "train.py"
    train.write_text(f"loader = DataLoader(\n    data,\n    {call},\n)\n")
    made, known = [str(train), 1], {"name": "RandomSampler", **sampler}
    passes = [drawn(shuffled(seed), made=made, sampler=known) for seed in range(2)]
    run = run_of(*([each] for each in passes))
    (finding,) = findings(run)
    assert finding.fix.startswith(fix)


def test_the_same_order_is_seen_long_before_the_epoch_ends() -> None:
    begun = drawn(shuffled(0, 100_000)[:32], length=100_000, state="trains")
    assert codes(run_of([begun], [begun])) == ["DDP102"]


@pytest.mark.parametrize(("again", "expected"), [(0, ["DDP103"]), (1, [])])
def test_passes_that_were_followed_for_a_different_time(again: int, expected: list[str]) -> None:
    """The budget ended the second one, after fewer samples."""
    ranks = []
    for rank in range(2):
        first, second = sharded(0, rank), sharded(again, rank)
        later = {"number": 1, "pass": 1, "armed": 13, "sampler": first["sampler"]}
        begun = drawn(shuffled(0)[rank::2][:32], state="trains", sampler=first["sampler"])
        ended = drawn(shuffled(again)[rank::2][:32], state="unfollowed")
        ranks.append([begun, first, {**second, **ended, **later}])
    assert codes(run_of(*ranks)) == expected


@pytest.mark.parametrize(
    ("fetched", "marks", "codes_of"), [(1, 1, ["DDP102"]), (2, 1, []), (0, 0, [])]
)
def test_a_pass_that_the_budget_ended_after_one_batch(
    fetched: int, marks: int, codes_of: list[str]
) -> None:
    begun = drawn(shuffled(0)[:32], length=192, state="unfollowed", fetched=fetched, marks=marks)
    assert codes(run_of([begun], [begun])) == codes_of


@pytest.mark.parametrize("content", [None, lambda index: 5, lambda index: index % 2])
def test_equal_indices_say_nothing_where_the_content_does_not(content: Content | None) -> None:
    begun = drawn(shuffled(0)[:16], content=content, state="trains")
    assert codes(run_of([begun], [begun])) == []


def test_data_that_each_rank_has_of_its_own_is_left_alone() -> None:
    other = drawn(shuffled(0), content=lambda index: its_own(index) + 1)
    assert codes(run_of([drawn(shuffled(0))], [other])) == []


def test_draws_with_replacement_are_left_alone() -> None:
    order = [random.Random(seed).choices(range(400), k=400) for seed in (0, 1)]
    assert codes(run_of(*([drawn(each)] for each in order))) == []


def test_ranks_that_share_one_model_read_the_same_data() -> None:
    order = [range(0, 400, 2), range(1, 400, 2)]
    run = run_of(*([drawn(order[rank // 2])] for rank in range(4)), groups=[(0, 2), (1, 3)])
    assert codes(run) == []


def test_passes_of_different_epochs_are_not_compared() -> None:
    early, late = drawn(shuffled(0)), drawn(shuffled(0), armed=25)
    assert codes(run_of([early], [late])) == []


def test_a_loader_that_evaluates_may_read_everything() -> None:
    whole = drawn(range(400), marks=0, armed=5)
    assert codes(run_of([whole], [whole])) == []


SAMPLER: JsonObject = {
    "name": "DistributedSampler", "num_replicas": 2, "seed": 0, "epoch": 0, "shuffle": True,
    "set_epoch": True, "id": 1,
}  # fmt: skip


def sharded(epoch: int, rank: int, world: int = 2, **more: object) -> JsonObject:
    said = {
        "name": "DistributedSampler", "rank": rank, "num_replicas": world, "seed": 0,
        "shuffle": True, "set_epoch": True, "id": 1, **more,
    }  # fmt: skip
    record = drawn(shuffled(epoch)[rank::world], number=epoch, armed=13 * epoch, sampler=said)
    return {**record, "pass": epoch}


def test_an_epoch_that_one_rank_alone_has_finished_says_nothing() -> None:
    again = {**sharded(0, 0), "number": 1, "pass": 1, "armed": 13}
    assert codes(run_of([sharded(0, 0), again], [sharded(0, 1)])) == []
    twice = {**sharded(0, 1), "number": 1, "pass": 1, "armed": 13}
    assert codes(run_of([sharded(0, 0), again], [sharded(0, 1), twice])) == ["DDP103"]


def test_a_pass_that_one_rank_did_not_follow_shifts_no_other() -> None:
    """Where gradients are averaged by hand no forward is armed, and nothing else tells epochs."""
    ranks: list[list[JsonObject]] = [[], []]
    for epoch, rank in itertools.product(range(3), (0, 1)):
        one = sharded(epoch, rank)
        facts = {"armed": 0, "sampler": {**one["sampler"], "epoch": epoch}}
        ranks[rank].append({**one, **facts})
    for missed in range(3):
        fewer = [each for each in ranks[1] if each["number"] != missed]
        assert codes(run_of(ranks[0], fewer)) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ["DDP103"]),
        ({"number": 2}, []),
        ({"number": 0}, []),
        ({"marks": 0}, []),
        ({"order": 1, "head": [64, 1]}, []),
        # Passes that were left early are compared by their beginning.
        ({"order": 1}, []),
        ({"order": 1, "draws": 199}, ["DDP103"]),
        ({"order": 1, "state": "left"}, ["DDP103"]),
        ({"head": [7, 1], "state": "left"}, []),
        ({"sampler": {"id": 2}}, []),
        ({"sampler": {"id": None}}, []),
        ({"sampler": {"set_epoch": False}}, ["DDP103"]),
    ],
    ids=str,
)
def test_orders_that_are_repeated(change: JsonObject, expected: list[str]) -> None:
    ranks = []
    for rank in (0, 1):
        first = sharded(0, rank)
        again = {**first, "number": 1, "pass": 1, "armed": 13, **change}
        ranks.append([first, {**again, "sampler": {**first["sampler"], **again["sampler"]}}])
    assert codes(run_of(*ranks)) == expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [({}, ["DDP103"]), ({"shuffle": False}, []), ({"set_epoch": False}, []), ({"id": None}, [])],
    ids=str,
)
def test_samplers_that_shuffle_by_the_epoch(facts: JsonObject, expected: list[str]) -> None:
    ranks = []
    for rank in (0, 1):
        first = sharded(0, rank, **facts)
        ranks.append([first, {**first, "number": 1, "pass": 1, "armed": 13}])
    assert codes(run_of(*ranks)) == expected


def test_what_is_said_of_an_order_that_is_repeated() -> None:
    ranks = []
    for rank in (0, 1):
        first = sharded(0, rank)
        first["sampler"]["epoch"] = 0
        ranks.append([first, {**first, "number": 1, "pass": 1, "armed": 13}])
    (finding,) = findings(run_of(*ranks))
    assert finding.message == (
        "every rank draws the same samples in the same order in each epoch at /job/train.py:9: "
        "set_epoch does not reach the loader's DistributedSampler"
    )
    assert re.match(r"passes 1 and 2 over it gave the same \d+ samples first", finding.evidence[0])
    assert finding.evidence[1:] == (
        "DistributedSampler built at /job/train.py:5",
        "its epoch was 0, then 0",
    )


def test_set_epoch_on_one_rank_only_names_the_other() -> None:
    again = {**sharded(0, 1), "number": 1, "pass": 1, "armed": 13}
    run = run_of([sharded(0, 0), sharded(1, 0)], [sharded(0, 1), again])
    assert [each.ranks for each in findings(run) if each.code == "DDP103"] == [(1,)]


@pytest.mark.parametrize("name", ["seed", "epoch"])
def test_samplers_that_shuffle_otherwise_give_shards_that_overlap(name: str) -> None:
    ranks = [drawn(shuffled(rank)[rank::2], sampler={**SAMPLER, "rank": rank, name: rank})
             for rank in (0, 1)]  # fmt: skip
    (finding,) = findings(run_of(*([each] for each in ranks)))
    assert (finding.code, finding.ranks) == ("DDP113", (0, 1))
    assert finding.message.endswith(f"has a different {name} on each rank")
    assert finding.evidence[0] == f"{name}: rank 0 has 0, rank 1 has 1"
    assert re.match(r"of \d+ draws that were followed, \d+ were of samples", finding.evidence[1])


@pytest.mark.parametrize(("name", "expected"), [("seed", ["DDP113"]), ("epoch", [])])
def test_a_rank_that_left_an_epoch_early_is_in_another_one(
    monkeypatch: pytest.MonkeyPatch, name: str, expected: list[str]
) -> None:
    monkeypatch.setattr(rules, "local_decisions", lambda run, suspected: suspected)
    ranks = [drawn(shuffled(rank)[rank::2], sampler={**SAMPLER, "rank": rank, name: rank})
             for rank in (0, 1)]  # fmt: skip
    assert codes(run_of(*([each] for each in ranks))) == expected


@pytest.mark.parametrize(
    ("samplers", "lengths", "expected"),
    [
        (["DistributedSampler", "DistributedSampler"], (400, 396), 1),
        (["DistributedSampler", "DistributedSampler"], (400, 400), 0),
        # Accelerate divides the batches of such a sampler.
        (["SeedableRandomSampler", "SeedableRandomSampler"], (400, 396), 1),
        # Each rank reads all of its own data.
        (["RandomSampler", "RandomSampler"], (400, 396), 0),
        (["DistributedSampler", "RandomSampler"], (400, 396), 0),
    ],
)
def test_a_sampler_divides_data_sets_of_other_lengths(
    samplers: list[str], lengths: tuple[int, int], expected: int
) -> None:
    def read(rank: int, **facts: Any) -> list[JsonObject]:
        shard = {"rank": rank, "num_replicas": 2} if samplers[rank].startswith("D") else {}
        sampler = {"name": samplers[rank], **shard}
        drawn_here = list(range(rank, 64, 2))
        return [drawn(drawn_here, length=lengths[rank], sampler=sampler, **facts)]

    found = list(rules.lengths_differ(run_of(read(0), read(1))))
    assert [each.code for each in found] == ["DDP114"] * expected
    if found:
        assert "400 samples on rank 0, 396 samples on rank 1" in found[0].message
    # It evaluates.
    assert not list(rules.lengths_differ(run_of(read(0, marks=0), read(1, marks=0))))


def test_shards_of_one_order_do_not_overlap_whatever_the_seed() -> None:
    ranks = [drawn(shuffled(0)[rank::2], sampler={**SAMPLER, "rank": rank, "seed": rank})
             for rank in (0, 1)]  # fmt: skip
    assert codes(run_of(*([each] for each in ranks))) == []


def test_samplers_ranked_otherwise_are_well_if_they_cover_the_whole() -> None:
    assert codes(run_of([sharded(0, 1)], [sharded(0, 0)])) == []


def test_the_local_rank_given_to_the_sampler_names_the_second_node() -> None:
    run = run_of(*([sharded(0, rank % 2, world=4)] for rank in range(4)))
    (finding,) = findings(run)
    assert (finding.code, finding.ranks) == ("DDP105", (2, 3))


def test_shards_beyond_the_group_may_be_other_groups() -> None:
    ranks = [[sharded(0, rank, world=4)] for rank in range(4)]
    assert codes(run_of(*ranks, groups=[(0, 1), (2, 3)])) == []


def evaluated(rank: int, file: str) -> list[JsonObject]:
    """A rank's evaluation of its shard after training, and a file that it saves then."""
    trained = {**sharded(0, rank), "time": 10}
    facts = {"pass": 1, "line": 30, "armed": 13, "marks": 0, "collectives": 0, "time": 100}
    part = {**sharded(0, rank), **facts}
    return [trained, part, {"kind": "save", "time": 200, "file": file}]


def test_results_of_a_shard_that_never_meet() -> None:
    assert "DDP106" in codes(run_of(evaluated(0, "last.pt"), evaluated(1, "last.pt")))
    assert "DDP106" in codes(run_of(evaluated(0, "last.pt"), evaluated(1, "last.pt")[:2]))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        # Batches of 16 in turn; the last ones are filled up from the beginning.
        (([*range(16), *range(32, 48)], [*range(16, 32), *range(48, 56), *range(8)]), ["DDP106"]),
        # Each rank evaluates everything, or a part that it draws at random.
        ((range(56), range(56)), []),
        (([*range(32)], [*range(16, 48)]), []),
    ],
)
def test_shards_that_are_filled_up_to_whole_batches(
    parts: tuple[Sequence[int], Sequence[int]], expected: list[str]
) -> None:
    dealt: dict[str, Any] = {
        "sampler": {"name": "BatchSamplerShard", "id": 2},
        "pass": 1, "line": 30, "armed": 13, "marks": 0, "collectives": 0, "time": 100,
    }  # fmt: skip
    found = codes(
        run_of(
            *(
                [{**sharded(0, rank), "time": 10}, drawn(part, length=56, **dealt)]
                for rank, part in enumerate(parts)
            )
        )
    )
    assert [code for code in found if code == "DDP106"] == expected


def test_results_that_each_rank_keeps_in_a_file_of_its_own() -> None:
    assert codes(run_of(evaluated(0, "part0.pt"), evaluated(1, "part1.pt"))) == []


def test_files_that_are_saved_again_are_written_down_once() -> None:
    again = {"pass": 2, "time": 300, "armed": 26, "number": 1}
    ranks = [evaluated(rank, f"part{rank}.pt") for rank in (0, 1)]
    assert codes(run_of(*([*each, {**each[1], **again}] for each in ranks))) == []


def test_files_of_which_some_may_not_be_written_down() -> None:
    run = run_of(evaluated(0, "part0.pt"), evaluated(1, "part1.pt")[:2])
    first, second = run.ranks
    assert codes(run) == ["DDP106"]
    fault: JsonObject = {"kind": "fault", "hook": "files", "error": "OSError"}
    many: list[JsonObject] = [{"kind": "save", "time": 500, "file": f"{n}.pt"} for n in range(50)]
    for more in ([fault], many):
        other = replace(second, records=Records((*second.records, *rank_records(*more))))
        assert codes(replace(run, ranks=(first, other))) == []


def test_files_that_come_after_more_training_are_not_of_the_evaluation() -> None:
    more = {"pass": 2, "time": 150}
    again = [[*evaluated(rank, f"part{rank}.pt"), {**sharded(1, rank), **more}] for rank in (0, 1)]
    assert codes(run_of(*again)) == ["DDP106"]


def uneven(number: int, to_end: bool, **more: object) -> JsonObject:
    wanted = range(number * 200, number * 200 + (200 if number == 0 else 160))
    return {**drawn(list(wanted), to_end=to_end), **more}


def test_uneven_loaders_are_foretold_where_the_loop_takes_every_batch() -> None:
    for to_end, expected in ((True, ["DDP109"]), (False, [])):
        begun = [[uneven(rank, to_end, fetched=2, marks=2, state="trains")] for rank in (0, 1)]
        assert codes(run_of(*begun)) == expected
    joined = [[uneven(rank, True, joins=True)] for rank in (0, 1)]
    assert codes(run_of(*joined)) == []


def waiting(armed: int) -> Status:
    return Status(
        pid=1, rank=0, world_size=2, local_rank=0, restart=0, started=0, phase=Phase.BACKWARD,
        since=0, step=armed - 1, epoch=None, armed=armed, last_total=0, dropped=0,
        unwritten=False, collective="", site="",
    )  # fmt: skip


@pytest.mark.parametrize(("armed", "expected"), [(11, ["DDP109"]), (10, [])])
def test_else_uneven_loaders_are_named_once_a_rank_waits_alone(
    armed: int, expected: list[str]
) -> None:
    longer = uneven(0, False, fetched=11, marks=10, state="trains")
    shorter = uneven(1, False, armed_after=10, closed=9)
    run = run_of([longer], [shorter], status=lambda rank: waiting(armed) if rank == 0 else None)
    assert codes(run) == expected


def loop(state: str) -> list[JsonObject]:
    """The loop that read a pass, and its end after 10 steps unless it goes on."""
    place = {"kind": "loop", "loop": 0, "time": 1}
    begun = {**place, "state": "trains", "frames": [["/job/train.py", 9]], "before": 0}
    return [begun, *([{**place, "state": state, "fetched": 10, "after": 10}] if state else [])]


@pytest.mark.parametrize(
    ("longer", "shorter", "expected"),
    [
        (("trains", []), ("ended", []), ["DDP109"]),
        # Its rest was not followed: it may have been left.
        (("unfollowed", []), ("ended", []), []),
        (("unfollowed", loop("")), ("ended", []), ["DDP109"]),
        (("unfollowed", loop("left")), ("ended", []), []),
        (("trains", loop("left")), ("ended", []), []),
        (("trains", []), ("trains", []), []),
        (("trains", []), ("trains", loop("ended")), ["DDP109"]),
        (("trains", []), ("trains", loop("left")), []),
        (("unfollowed", loop("")), ("unfollowed", loop("ended")), ["DDP109"]),
    ],
)
def test_whether_a_pass_goes_on_has_to_be_known(
    longer: tuple[str, list[JsonObject]],
    shorter: tuple[str, list[JsonObject]],
    expected: list[str],
) -> None:
    records = [
        [uneven(0, False, state=longer[0], fetched=11, marks=10), *longer[1]],
        [uneven(1, False, state=shorter[0], armed_after=10, closed=9), *shorter[1]],
    ]
    run = run_of(*records, status=lambda _: waiting(11))
    assert codes(run) == expected
    first, second = run.ranks
    for change in ({"dropped": 1}, {"unwritten": True}):
        losing = replace(first, status=waiting(11)._replace(**change))
        assert codes(replace(run, ranks=(losing, second))) == []
    # More steps than it has batches, or its regular end: it is over, whatever its records say.
    later = replace(first, status=waiting(14))
    assert codes(replace(run, ranks=(later, second))) == (expected if longer[1] else [])
    end: JsonObject = {"kind": "end", "time": 1}
    over = replace(first, records=Records((*first.records, *rank_records(end))))
    assert codes(replace(run, ranks=(over, second))) == []


@pytest.mark.parametrize(("more", "expected"), [(0, []), (1, ["DDP109"])])
def test_a_rank_that_waits_for_a_moment_is_not_alone_yet(more: int, expected: list[str]) -> None:
    longer = uneven(0, False, fetched=11, marks=10, state="trains")
    shorter = uneven(1, False, armed_after=10, closed=9)
    run = run_of([longer], [shorter], status=lambda rank: None if rank else waiting(11))
    assert codes(replace(run, taken=PATIENCE + more)) == expected


@pytest.mark.parametrize(("over", "expected"), [(True, ["DDP109"]), (False, [])])
def test_a_rank_is_ended_before_it_writes_that_its_backward_raised(
    over: bool, expected: list[str]
) -> None:
    longer = uneven(0, False, fetched=11, marks=10, state="trains")
    entered: JsonObject = {"kind": "site", "path": "/job/train.py", "line": 9, "phase": "backward"}
    shorter = uneven(1, False, armed_after=10, closed=9)
    left = waiting(11)._replace(phase=Phase.OTHER, reduced=11, site="/job/train.py:9")
    run = run_of([longer, entered], [shorter], status=lambda rank: None if rank else left)
    ended = RankExitRecord(time=10**11, rank=0, restart=0, status=-15)
    alive, peer = run.ranks
    first = replace(alive, exit=ended) if over else alive
    assert codes(replace(run, ranks=(first, peer))) == expected
    # It has written it, and its page does not say yet that it is over.
    raised: JsonObject = {"kind": "error", "phase": "backward", "armed": 11, "exception": "E"}
    records = Records((*first.records, *rank_records(raised)))
    assert codes(replace(run, ranks=(replace(first, records=records), peer))) == expected


def stream(rows: Sequence[int], workers: int = 0, size: int = 8, **facts: object) -> JsonObject:
    named = [[place // size, value] for place, value in enumerate(rows)]
    return {
        "kind": "pass", "pass": 0, "number": 0, "path": "/job/train.py", "line": 9, "armed": 0,
        "made": ["/job/train.py", 5], "iterable": True, "in_order": True, "workers": workers,
        "state": "seen", "fetched": 24, "marks": 24, "rows": named, **facts,
    }  # fmt: skip


def test_a_stream_is_the_same_on_all_ranks_or_not() -> None:
    assert codes(run_of([stream(range(64))], [stream(range(64))])) == ["DDP115"]
    assert codes(run_of([stream(range(64))], [stream(range(64, 128))])) == []
    # Labels, or one made-up batch: they repeat within the rank.
    assert codes(run_of([stream([1, 2, 3, 4] * 16)], [stream([1, 2, 3, 4] * 16)])) == []


def test_a_stream_comes_once_from_each_worker() -> None:
    copies = [row for start in range(0, 64, 8) for _ in (0, 1) for row in range(start, start + 8)]
    other = [row + 1000 for row in copies]
    assert codes(run_of([stream(copies, 2)], [stream(other, 2)])) == ["DDP116"]
    assert codes(run_of([stream(copies, 0)], [stream(other, 0)])) == []
    # Few samples, or labels, which repeat within a batch as well.
    few = [row % 8 for row in copies]
    assert codes(run_of([stream(few, 2)], [stream([row + 9 for row in few], 2)])) == []
    labels = [row // 2 for row in copies]
    assert codes(run_of([stream(labels, 2)], [stream([row + 99 for row in labels], 2)])) == []
    assert codes(run_of([stream(range(64), 2)], [stream(range(64, 128), 2)])) == []


def test_shards_without_a_sampler_are_known_by_what_is_drawn() -> None:
    facts = {"pass": 1, "line": 30, "armed": 13, "marks": 0, "collectives": 0, "reductions": 0}
    for step, expected in ((2, ["DDP106"]), (1, [])):
        # Every rank reads all, or each its own half.
        ranks = [[{**drawn([*range(rank % step, 400, step)]), **facts}] for rank in (0, 1)]
        assert codes(run_of(*ranks)) == expected
    reduced = [[{**drawn([*range(rank, 400, 2)]), **facts, "reductions": 1}] for rank in (0, 1)]
    assert codes(run_of(*reduced)) == []


@pytest.mark.parametrize(
    ("rows", "facts", "expected"),
    [
        (range(64), {"persistent": True}, ["DDP103"]),
        # New workers begin each pass with the data set of the rank.
        (range(64), {"persistent": False}, []),
        (range(64), {"persistent": False, "shuffles": True}, ["DDP103"]),
        # An order that is meant to be fixed.
        (range(64), {"persistent": True, "data_epoch": 0}, []),
        (range(64), {"persistent": True, "in_order": False}, []),
        (range(64, 128), {"persistent": True}, []),
        # Labels, and data that is augmented at random.
        ([value % 3 for value in range(64)], {"persistent": True}, []),
        (range(64), {"persistent": True, "number": 2}, []),
        (range(64), {"persistent": True, "marks": 0}, []),
    ],
)
def test_a_stream_repeats_its_order(
    rows: Sequence[int], facts: dict[str, Any], expected: list[str]
) -> None:
    first = rows if max(rows) < 64 else range(64)
    again: dict[str, Any] = {"pass": 1, "number": 1, "data_epoch": 1, **facts}
    begun = {key: facts[key] for key in facts.keys() & {"persistent", "shuffles", "in_order"}}

    def passes(rank: int) -> list[JsonObject]:
        shift = 1000 * rank
        return [
            stream([row + shift for row in first], 2, data_epoch=0, **begun),
            stream([row + shift for row in rows], 2, **again),
        ]

    assert codes(run_of(passes(0), passes(1))) == expected
    if expected:
        # The other rank may be about to write, and has another order in its second pass.
        assert codes(run_of(passes(0), passes(1)[:1])) == []
        other = [passes(1)[0], {**passes(1)[1], "rows": passes(5)[1]["rows"]}]
        assert codes(run_of(passes(0), other)) == []
