"""Data that ranks share and ought not to, or only seem to share."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from ddpdoctor.core.finding import Severity
from ddpdoctor.diagnose.data import rules_streams
from ddpdoctor.diagnose.loops import rules_evaluation
from ddpdoctor.probe.observers import sample_contents
from ddpdoctor.probe.observers.samples import Pass, digest_of, sample_of
from ddpdoctor.run.records.base import JsonObject
from tests.diagnose.test_data_rules import (
    codes,
    drawn,
    evaluated,
    findings,
    its_own,
    run_of,
    shuffled,
)
from tests.support.probed import as_line, pass_record


def held(value: int) -> int:
    return value * 0x9E3779B97F4A7C15 >> 16 & (1 << 48) - 1


def sketch(values: Sequence[int]) -> list[object]:
    one = sample_contents.Sketch()
    one.add([held(value) for value in values])
    looked, repeats, kept = one.summary()
    return [looked, repeats, list(kept)]


def subset(indices: Sequence[int], order: Sequence[int], **facts: object) -> JsonObject:
    """A pass over a subset of 400 samples, in an order of its own numbers."""
    wanted = frozenset(sample_of(400))
    lookup = list(indices)
    followed = {place: name for place, name in enumerate(lookup) if name in wanted}
    known: JsonObject = {
        "kind": "pass", "pass": 0, "number": 0, "path": "/job/train.py", "line": 9,
        "made": ["/job/train.py", 5], "armed": 0, "workers": 0, "length": 400, "batches": 5,
        "subset": digest_of(lookup), "subset_length": len(lookup), "followed": len(followed),
        "to_end": True, "sampler": {"name": "RandomSampler", "torch": True}, **facts,
    }  # fmt: skip
    one = Pass(pass_record(known), followed, 0, lookup)
    for start in range(0, len(order), 16):
        one.draw(list(order[start : start + 16]))
        looked = one.arrived()
        hashes = [[its_own(index)] for _, index, _ in looked]
        one.see([index for _, index, _ in looked], lambda hashes=hashes: hashes)  # type: ignore[misc]
        one.fetched += 1
        one.marks += 1
    return {**as_line(one.as_it_is("ended")), "sketch": sketch([lookup[place] for place in order])}


def said(*records: JsonObject) -> list[str]:
    run = run_of(*([each] for each in records))
    return [*codes(run), *(each.code for each in rules_streams.shared_rows(run))]


def test_equal_numbers_of_other_subsets_are_other_samples() -> None:
    assert said(*(subset(range(rank * 200, rank * 200 + 200), range(200)) for rank in (0, 1))) == []


def test_subsets_that_overlap_are_no_whole_data_set() -> None:
    parts = [range(300), range(100, 400)]
    records = [subset(part, shuffled(rank, 300)) for rank, part in enumerate(parts)]
    assert said(*records) == ["DDP117"]
    (finding,) = rules_streams.shared_rows(run_of(*([each] for each in records)))
    assert finding.severity == Severity.WARNING
    assert "of 600 samples" in finding.message


def test_without_content_the_numbers_tell() -> None:
    records = [subset(part, range(300)) for part in (range(300), range(100, 400))]
    for record in records:
        del record["sketch"]
    assert said(*records) == ["DDP117"]


@pytest.mark.parametrize(("again", "expected"), [(1, ["DDP117"]), (300, [])])
def test_draws_with_replacement_share_samples_by_chance(again: int, expected: list[str]) -> None:
    """A sample or two that a rank drew twice are no sign of that."""
    order = [*range(300), *range(again)]
    records = [subset(part, order) for part in (range(300), range(100, 400))]
    for record in records:
        del record["sketch"]
    assert said(*records) == expected


def test_one_subset_that_every_rank_reads_is_the_whole() -> None:
    assert said(*(subset(range(300), shuffled(seed, 300)) for seed in (0, 1))) == ["DDP102"]


def copied(rank: int, seed: int, **facts: object) -> JsonObject:
    """Half of a copy that the rank has shuffled for itself."""
    order = shuffled(seed)
    mine = list(range(rank, 400, 2))
    sampler = {"name": "DistributedSampler", "rank": rank, "num_replicas": 2, "seed": 0}
    record = drawn(mine, content=lambda index: its_own(order[index]), sampler=sampler)
    return {**record, "sketch": sketch([order[index] for index in mine]), **facts}


def test_copies_are_compared_by_what_they_hold() -> None:
    assert said(copied(0, seed=1), copied(1, seed=1)) == []
    first = [copied(0, seed=1), copied(1, seed=2)]
    # Made up at random with one seed, samples look like this, too, until they are drawn again.
    assert said(*first) == []
    again = [{**record, "pass": 1, "number": 1, "armed": 13} for record in first]
    passes = [list(pair) for pair in zip(first, again, strict=True)]
    assert [each.code for each in rules_streams.shared_rows(run_of(*passes))] == ["DDP117"]


def test_samples_made_up_at_random_are_left_alone() -> None:
    first = [copied(0, seed=1), copied(1, seed=2)]
    again = [
        {**copied(rank, seed=3), "sketch": record["sketch"], "pass": 1, "number": 1, "armed": 13}
        for rank, record in enumerate(first)
    ]
    passes = [list(pair) for pair in zip(first, again, strict=True)]
    assert list(rules_streams.shared_rows(run_of(*passes))) == []


@pytest.mark.parametrize("state", ["trains", "seen"])
def test_a_pass_that_goes_on_is_waited_for(state: str) -> None:
    assert said(copied(0, 1, state=state), copied(1, 2, state=state)) == []


def test_what_repeats_within_a_rank_repeats_in_the_data() -> None:
    few = [{**copied(rank, 1), "sketch": sketch([i % 60 for i in range(200)])} for rank in (0, 1)]
    assert said(*few) == []


def test_files_of_each_rank_are_left_alone() -> None:
    def own(rank: int) -> JsonObject:
        def content(index: int) -> int:
            return its_own(index) + rank

        values = [index + 10_000 * rank for index in range(400)]
        return {**drawn(range(400), content=content), "sketch": sketch(values)}

    assert said(own(0), own(1)) == []


def test_the_sampler_that_repeats_on_purpose_is_left_alone() -> None:
    order = random.Random(0).sample(range(400), 400)
    said_of = {"name": "Repeated", "torch": False, "rank": 0, "num_replicas": 2, "seed": 0}
    passes = []
    for rank in (0, 1):
        mine = order[rank * 100 : rank * 100 + 200]
        record = drawn(mine, sampler={**said_of, "rank": rank})
        passes.append({**record, "sketch": sketch(mine)})
    assert said(*passes) == []


def test_shards_of_subsets_of_each_rank_are_meant() -> None:
    """Equal samples in shards of other subsets: what a split at random gives is DDP110's affair."""
    records = []
    for rank in (0, 1):
        sampler = {"name": "DistributedSampler", "rank": rank, "num_replicas": 2, "seed": 0}
        record = subset(shuffled(rank, 300), range(rank, 300, 2), sampler=sampler)
        records.append({**record, "sketch": sketch(range(150))})
    assert said(*records) == ["DDP110"]


def test_a_permutation_of_each_rank_in_torchs_sampler_is_named() -> None:
    sampler = {"name": "SubsetRandomSampler", "torch": True}
    records = [drawn(shuffled(seed)[:200], sampler=sampler) for seed in (0, 1)]
    assert said(*records) == ["DDP117"]


# -- evaluations


def padded(reductions: int, gathers: int) -> list[JsonObject]:
    records = []
    for rank in (0, 1):
        _, part, _ = evaluated(rank, "x")
        known = {"length": 399, "reductions": reductions, "gathers": gathers, "collectives": 1}
        records.append({**part, **known})
    return records


@pytest.mark.parametrize(
    ("reductions", "gathers", "severity"),
    [(1, 0, Severity.WARNING), (0, 0, Severity.INFO), (1, 2, Severity.INFO)],
)
def test_padding_matters_where_a_metric_is_reduced(
    reductions: int, gathers: int, severity: Severity
) -> None:
    run = run_of(*([each] for each in padded(reductions, gathers)))
    (finding,) = rules_evaluation.padded(run)
    assert finding.severity == severity


def test_what_is_said_of_padding() -> None:
    (finding,) = rules_evaluation.padded(run_of(*([each] for each in padded(1, 0))))
    assert finding.message.startswith("the evaluation counts 1 of 399 samples twice: the sampler")
    assert finding.evidence == (
        "rank 0: 200 samples",
        "rank 1: 200 samples",
        "together 400 of 399",
        "numbers are reduced over the ranks afterwards",
    )


@pytest.mark.parametrize(("length", "expected"), [(400, 0), (399, 1), (398, 0)])
def test_padding_is_less_than_a_sample_for_each_rank(length: int, expected: int) -> None:
    records = [{**each, "length": length} for each in padded(1, 0)]
    assert len(list(rules_evaluation.padded(run_of(*([each] for each in records))))) == expected


def test_a_sampler_that_drops_the_last_samples_pads_nothing() -> None:
    records = [{**each, "sampler": {**each["sampler"], "drop_last": True}} for each in padded(1, 0)]
    assert list(rules_evaluation.padded(run_of(*([each] for each in records)))) == []


def test_before_it_is_known_what_becomes_of_the_results_nothing_is_said() -> None:
    records = [{**each, "collectives": None} for each in padded(0, 0)]
    assert [each.code for each in findings(run_of(*([each] for each in records)))] == []


# -- what is recorded


class Wrapper(Dataset[int]):
    def __init__(self, dataset: Dataset[int]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]


BASE = TensorDataset(torch.arange(20))


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (BASE, None),
        (Wrapper(BASE), None),  # type: ignore[arg-type]
        (ConcatDataset([BASE, BASE]), None),
        (Subset(BASE, [3, 5]), [3, 5]),
        (Subset(Subset(BASE, range(10, 20)), [1, 0]), [11, 10]),
        (Wrapper(Subset(BASE, torch.tensor([7, 2]))), [7, 2]),  # type: ignore[arg-type]
        (ConcatDataset([Subset(BASE, [1]), Subset(BASE, [4])]), [1, 4]),
        (ConcatDataset([Subset(BASE, [1]), TensorDataset(torch.arange(2))]), [1, 20, 21]),
    ],
)
def test_data_sets_are_followed_to_the_bottom(
    dataset: Dataset[object], expected: list[int] | None
) -> None:
    found = sample_contents.bottom_of(dataset, 10**9)
    assert (found.lookup if found is not None else None) == expected


def test_what_is_too_long_to_follow_is_left_alone() -> None:
    found = sample_contents.bottom_of(Subset(BASE, range(10)), 0)
    assert found is not None and found.lookup is None


def test_a_batch_is_known_by_its_widest_part() -> None:
    inputs = torch.randn(4, 3, 8, 8)
    one, other = (
        sample_contents.sketch_rows([inputs, torch.zeros(4)]),
        sample_contents.sketch_rows([inputs.flip(0)]),
    )
    assert one is not None and other is not None
    assert len(set(one())) == 4
    assert one() == other()[::-1]


def test_words_are_known_however_far_they_are_padded() -> None:
    words = torch.randint(1, 9999, (4, 30))
    padded = torch.cat([words, torch.zeros(4, 12, dtype=torch.int64)], 1)
    one, other = (
        sample_contents.sketch_rows({"ids": words}),
        sample_contents.sketch_rows({"ids": padded}),
    )
    assert one is not None and other is not None and one() == other()


def test_a_sketch_keeps_the_smallest() -> None:
    one = sample_contents.Sketch()
    for start in range(0, 5000, 50):
        one.add([held(value) for value in range(start, start + 50)])
    looked, repeats, kept = one.summary()
    assert (looked, repeats) == (5000, 0)
    assert list(kept) == sorted(held(value) for value in range(5000))[: sample_contents.SKETCH_SIZE]


def fed(seed: int, epochs: int, samples: int, part: slice, size: int = 16) -> JsonObject:
    """Batches that a rank cuts by hand from its part of an order, in some epochs."""
    batches = []
    for epoch in range(epochs):
        order = shuffled(100 * epoch + seed, samples)[part]
        batches += [order[at : at + size] for at in range(0, len(order), size)]
    return {"kind": "fed", "batches": batches[:64]}


def test_batches_cut_by_hand_from_orders_of_each_rank() -> None:
    parts = [slice(rank, None, 2) for rank in (0, 1)]
    own = [fed(rank, 3, 640, part) for rank, part in enumerate(parts)]
    assert said(*own) == ["DDP117"]
    # Together they take each sample once in an epoch, in another order each time.
    assert said(*(fed(7, 3, 640, part) for part in parts)) == []
    many = [slice(rank, None, 12) for rank in range(12)]
    assert said(*(fed(7, 12, 768, part) for part in many)) == []
    # The ranks are seeded alike, and one of them draws more.
    same = [[100 * batch + row for row in range(16)] for batch in range(40)]
    ahead = [{"kind": "fed", "batches": [same[0], *same[1 + 9 * rank :]]} for rank in (0, 1)]
    assert said(*ahead) == ["DDP117"]
    # All take all batches, and one had a loader.
    assert said(fed(7, 3, 640, slice(None)), fed(7, 3, 640, slice(None))) == []
    assert said(own[0], subset(range(200), range(200))) == []


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_batches_cut_by_hand_with_replacement(ranks: int) -> None:
    for seed in range(20):
        drawn_ = [random.Random(100 * seed + rank) for rank in range(ranks)]
        rows = [[[one.randrange(4000) for _ in range(16)] for _ in range(64)] for one in drawn_]
        assert said(*({"kind": "fed", "batches": each} for each in rows)) == []
