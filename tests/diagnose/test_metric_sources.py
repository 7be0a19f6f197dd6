"""DDP106: what the source does with the result of an evaluation."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.loops.metric_sources import evaluated_by_hand, ratio_reduced, use_of
from ddpdoctor.run.records.training import SiteRecord
from ddpdoctor.run.snapshot import Rank, Records, Run

EVALUATE = """
def evaluate(model, loader, data):
    right = seen = 0
    for x, y in loader:  # read
        right += (model(x) == y).sum().item()
        seen += len(y)
    return right / seen
"""


def run_of(path: Path, source: str) -> tuple[Run, dict[str, int]]:
    """A run of one rank with that source, and the lines of its marks."""
    text = textwrap.dedent(source)
    path.write_text(text)
    lines = {
        line.partition("  # ")[2]: number
        for number, line in enumerate(text.splitlines(), 1)
        if "  # " in line
    }
    site = SiteRecord(phase="forward", path=str(path), line=1)
    return Run(Path("/run"), {}, (Rank(0, 0, None, records=Records((site,))),)), lines


@pytest.mark.parametrize(
    ("shown", "labelled"),
    [
        ('if rank == 0: print(f"accuracy {accuracy}")', False),
        ('print("epoch", epoch, accuracy)', False),
        ("best = max(best, accuracy)", False),
        ("writer.add_scalar('accuracy', accuracy, epoch)", False),
        ('print(f"accuracy of the shard of rank 0: {accuracy}")', True),
        ('print(f"[{rank}] accuracy {accuracy}")', True),
        ('name = f"part{rank}.json"; json.dump(accuracy, open(name, "w"))', True),
    ],
)
def test_a_result_that_is_shown_with_its_rank_is_labelled(
    tmp_path: Path, shown: str, labelled: bool
) -> None:
    loader = "    loader = DataLoader(Subset(data, range(rank, len(data), world)))\n"
    main = f"def main(rank):\n{loader}    accuracy = evaluate(model, loader, data)\n    {shown}\n"
    run, lines = run_of(tmp_path / "job.py", EVALUATE + main)
    use = use_of(run, Location(str(tmp_path / "job.py"), lines["read"]))
    assert use.at is not None
    assert use.labelled is labelled
    assert not use.kept


@pytest.mark.parametrize("shows", [True, False])
def test_a_meter_of_the_function_around_the_loop(tmp_path: Path, shows: bool) -> None:
    source = f"""
    def validate(loader, model):
        def run(loader):
            for x, y in loader:  # read
                top1.update(accuracy(model(x), y))

        top1 = Meter()
        run(loader)
        return top1.avg

    def main():
        score = validate(loader, model)
        {"best = max(best, score)" if shows else "pass"}  # shown
    """
    run, lines = run_of(tmp_path / "job.py", source)
    use = use_of(run, Location(str(tmp_path / "job.py"), lines["read"]))
    shown = Location(str(tmp_path / "job.py"), lines["shown"])
    assert (use.at, use.kept) == ((shown, False) if shows else (None, True))


def test_a_result_that_nothing_shows_is_kept(tmp_path: Path) -> None:
    source = """
    def pseudo(model, loader):
        out = []
        for x, _ in loader:  # read
            out.append(model(x).argmax(1))
        return torch.cat(out)

    labels = pseudo(model, loader)
    """
    run, lines = run_of(tmp_path / "job.py", source)
    assert use_of(run, Location(str(tmp_path / "job.py"), lines["read"])).kept


def test_a_count_divided_by_the_length_of_all_data(tmp_path: Path) -> None:
    for length, expected in (("len(data)", True), ("len(loader)", False), ("seen", False)):
        source = EVALUATE.replace("right / seen", f"right / {length}")
        run, lines = run_of(tmp_path / "job.py", source)
        use = use_of(run, Location(str(tmp_path / "job.py"), lines["read"]))
        assert use.over_all is expected, length


@pytest.mark.parametrize("read", ["tests", "enumerate(tests)", "tqdm(tests, desc='test')"])
def test_what_a_loop_reads_is_a_loader(tmp_path: Path, read: str) -> None:
    source = EVALUATE.replace("right / seen", "right / len(tests)").replace(
        "in loader", f"in {read}"
    )
    run, lines = run_of(tmp_path / "job.py", source)
    assert not use_of(run, Location(str(tmp_path / "job.py"), lines["read"])).over_all


HELPER = """
def mean_of(value):
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)  # call
    return tensor.item() / world
"""


@pytest.mark.parametrize(
    ("given", "is_ratio", "never"),
    [
        ("right / seen", True, False),
        ("evaluate(model, loader, data)", True, False),
        ("f1_score(predicted, labels)", True, True),
        ('found["f1"]', True, True),
        ('found["accuracy"]', True, False),
        ('found["count"]', False, False),
        ("right", False, False),
        ("right / world_size", False, False),
        ("right / seen * seen", False, False),
        ("unknown(model)", False, False),
    ],
)
def test_what_a_helper_reduces_is_read_where_it_is_called(
    tmp_path: Path, given: str, is_ratio: bool, never: bool
) -> None:
    source = f"{EVALUATE}{HELPER}\nshown = mean_of({given})  # from\n"
    _, lines = run_of(tmp_path / "job.py", source)
    path = str(tmp_path / "job.py")
    found = ratio_reduced([Location(path, lines["call"]), Location(path, lines["from"])])
    assert (found is not None) is is_ratio
    assert found is None or found.never_a_mean is never


def test_counts_reduced_beside_a_ratio_are_no_average(tmp_path: Path) -> None:
    for values, is_ratio in (
        ("[right / seen, loss / seen]", True),
        ("[right / seen, seen]", False),
    ):
        source = f"both = torch.tensor({values})\ndist.all_reduce(both)  # call\n"
        _, lines = run_of(tmp_path / "job.py", source)
        found = ratio_reduced([Location(str(tmp_path / "job.py"), lines["call"])])
        assert (found is not None) is is_ratio


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ("range(rank, len(data), world)", 1),
        ("data[rank::world]", 1),
        ("data if rank == 0 else ()", 0),
        ("data", 0),
    ],
)
def test_a_loop_that_takes_the_samples_of_its_rank(
    tmp_path: Path, items: str, expected: int
) -> None:
    source = f"""
    def evaluate(model, data):
        with torch.no_grad():
            for x in {items}:
                right += model(x)
        return right / seen
    """
    run, _ = run_of(tmp_path / "job.py", source)
    assert len(list(evaluated_by_hand(run))) == expected


@pytest.mark.parametrize(
    ("length", "shown", "expected"),
    [
        ("len(data)", "value.item()", False),
        ("len(data)", "value.item() / world_size", True),
        ("len(sampler)", "value.item()", True),
        ("len(loader)", "value.item() / world_size", True),
    ],
)
def test_a_sum_of_parts_of_the_whole_is_right(
    tmp_path: Path, length: str, shown: str, expected: bool
) -> None:
    source = f"""
    def total(loss):
        value = torch.tensor(loss / {length})
        dist.all_reduce(value)  # call
        return {shown}
    """
    _, lines = run_of(tmp_path / "job.py", source)
    found = ratio_reduced([Location(str(tmp_path / "job.py"), lines["call"])])
    assert (found is not None) is expected
