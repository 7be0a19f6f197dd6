"""Evaluations with fewer samples, and steps that were not kept, on written runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.commands import parity
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.diagnose.parity.rules_evaluation import (
    compared_evaluations,
    compared_metrics,
    metric_differs,
    with_metrics,
)
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.snapshot import Run
from tests.parity.test_parity_rules import trained
from tests.support.written import Written


def evaluated(draws: int, **changed: object) -> list[JsonObject]:
    """The records of a rank that evaluates so many of 70 samples."""
    return [
        {
            "kind": "pass", "path": "/job/train.py", "line": 9, "time": 1, "pass": 1, "number": 0,
            "state": "ended", "made": ["/job/train.py", 5], "dataset": "TensorDataset",
            "length": 70, "followed": 35, "fetched": 3, "draws": draws, **changed,
        }
    ]  # fmt: skip


def run_of(folder: Path, *ranks: list[JsonObject]) -> Run:
    folder.mkdir()
    written = Written(folder)
    written.world_size = len(ranks)
    for number, records in enumerate(ranks):
        written.rank(number, records)
    written.findings(status=0)
    return RunReader(written.path).snapshot()


@pytest.mark.parametrize(
    ("one", "two", "message"),
    [
        ([evaluated(70)], [evaluated(28), evaluated(28)], "has 56 samples, one of 1 rank 70"),
        ([evaluated(70)], [evaluated(35), evaluated(35)], ""),
        ([evaluated(70)], [evaluated(70), evaluated(70)], ""),
        ([evaluated(70)], [evaluated(28), evaluated(28, state="left")], ""),
        ([evaluated(70)], [evaluated(28), []], ""),
        ([evaluated(70)], [evaluated(28), evaluated(28, marks=3)], ""),
        ([evaluated(70, iterable=True)], [evaluated(28), evaluated(28)], ""),
        ([evaluated(70, line=8)], [evaluated(28), evaluated(28)], ""),
        ([evaluated(35), evaluated(35)], [evaluated(17)] * 4, ""),
        ([evaluated(70), evaluated(70)], [evaluated(16)] * 4, "has 64 samples, one of a rank of 2"),
    ],
)
def test_samples_that_are_left_out(
    tmp_path: Path, one: list[list[JsonObject]], two: list[list[JsonObject]], message: str
) -> None:
    found = list(compared_evaluations(run_of(tmp_path / "a", *one), run_of(tmp_path / "b", *two)))
    assert len(found) == bool(message) and all(message in each.message for each in found)
    assert all((each.code, str(each.location)) == ("DDP349", "/job/train.py:5") for each in found)


SCRIPT = """
def evaluate(model, loader):
    total, seen = 0.0, 0
    for inputs, labels in loader:
        total += loss(model, inputs, labels)
        seen += len(labels)
    return total / len(loader), seen

def main():
    for epoch in range(3):
        train = fit(epoch)
        held, seen = evaluate(model, tests)
        {shows}
"""
PRINTS = {
    "print(f'epoch {epoch} train {train:.3f} held {held:.4f}')": "epoch {e} train 0.{e}1 held {v}",
    "print('held', held)": "held {v}",
    "print('held: %.4f (%d%%)' % (held, 7))": "held: {v} (7%)",
    "print('{}: held {:.4f}'.format(epoch, held))": "{e}: held {v}",
    "log.info('held %.4f in epoch %d', held, epoch)": "INFO:root:held {v} in epoch {e}",
    "print('held', held, file=sys.stderr)": "held tensor({v})",
}


def printing(folder: Path, shows: str, lines: list[str], ranks: int) -> Run:
    """A run that evaluates 70 samples in batches of 14, and its output."""
    script = folder.parent / "train.py"
    script.write_text(SCRIPT.format(shows=shows))
    drawn = 70 // ranks
    place = {"path": str(script), "line": 4, "fetched": -(-drawn // 14)}
    site: JsonObject = {"kind": "site", "phase": "forward", "path": str(script), "line": 5}
    run = run_of(folder, *([site, *evaluated(drawn, **place)] for _ in range(ranks)))
    run.path.with_name(f"{run.path.name}.log").write_text("\n".join(lines))
    return run


def outputs(line: str, *values: str) -> list[str]:
    return ["Some words.", *(line.format(e=at, v=value) for at, value in enumerate(values))]


@pytest.mark.parametrize("shows", PRINTS)
def test_a_metric_of_the_same_weights(tmp_path: Path, shows: str) -> None:
    line = PRINTS[shows]
    one = printing(tmp_path / "a", shows, outputs(line, "0.7929", "0.7929"), 1)
    two = printing(tmp_path / "b", shows, outputs(line, "0.9037", "0.9037"), 2)
    pairs = list(compared_metrics(one, two))
    (finding,) = metric_differs(pairs, 1, 2)
    assert finding.message.endswith("held is 0.7929 with 1 rank, and 0.9037 with 2")
    assert finding.location is not None and finding.location.line == 13
    assert "35 in 3 batches, 35 in 3 batches" in finding.evidence[1]
    assert finding.fix.startswith("Weigh each batch by its samples")
    assert metric_differs(list(compared_metrics(one, one)), 1, 1) == []


@pytest.mark.parametrize(
    ("shows", "one", "two", "differs"),
    [
        ("print('held', held)", ("0.7929", "0.7930"), ("0.9", "0.9"), None),
        ("print('held', held)", ("0.7929",), ("0.9037",), None),
        ("print('held', held)", ("0.7929", "0.7929"), ("0.7930", "0.7930"), False),
        ("print('held', held)", ("1.001e-05", "1.001e-05"), ("1.900e-05", "1.900e-05"), True),
        ("print('held', held)", ("nan", "nan"), ("nan", "nan"), None),
        # Each rank prints its own.
        ("print('held', held)", ("0.750", "0.750"), ("0.7000", "0.8000") * 2, True),
        ("print('seen', seen)", ("70", "70"), ("35", "35"), None),
        ("print(held)", ("0.7929", "0.7929"), ("0.9037", "0.9037"), None),
        ("print('train', train)", ("0.7929", "0.7929"), ("0.9037", "0.9037"), None),
    ],
)
def test_whether_a_metric_differs(
    tmp_path: Path,
    shows: str,
    one: tuple[str, ...],
    two: tuple[str, ...],
    differs: bool | None,
) -> None:
    line = {"print(held)": "{v}"}.get(shows, f"{shows[7:].partition(chr(39))[0]} {{v}}")
    runs = [
        printing(tmp_path / name, shows, outputs(line, *values), ranks)
        for name, values, ranks in (("a", one, 1), ("b", two, 2))
    ]
    pairs = list(compared_metrics(*runs))
    assert bool(pairs) == (differs is not None)
    assert bool(metric_differs(pairs, 1, 2)) == bool(differs)


def test_a_cause_has_the_numbers() -> None:
    cause, other, metric = (
        Finding(code=code, severity=Severity.WARNING, message=code, evidence=("first",))
        for code in ("DDP107", "DDP102", "DDP343")
    )
    assert with_metrics([other], [metric]) == [other, metric]
    found = with_metrics([other, cause], [metric])
    assert found == [other, replace(cause, evidence=("first", "DDP343"))]


def test_five_lines_if_only_the_rate_did_not_grow(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    steps = list(trained(lambda step: 8, lambda step: 1.9))
    for folder, ranks in (("a", 1), ("b", 2)):
        run_of(tmp_path / folder, *([steps] * ranks))
    runs = [str(each.parent) for each in sorted(tmp_path.glob("*/**/run.json"))]
    assert parity.main(runs) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[3] == (
        "ddpdoctor: the same training, 2 times the batch, at the same learning rate (DDP339)"
    )
    assert parity.main(["--verbose", *runs]) == 0
    assert "info DDP339: an optimizer step has 2 times" in capfd.readouterr().out


def test_a_size_that_failed_is_named_with_its_error(tmp_path: Path) -> None:
    error: JsonObject = {
        "kind": "error",
        "time": 5,
        "exception": "ValueError",
        "message": "no data",
    }
    written = Written(tmp_path)
    written.rank(0, [error])
    written.findings(status=1)
    with pytest.raises(DoctorError, match="rank 0 raised ValueError: no data"):
        parity._read(written.path)


@pytest.mark.parametrize(
    ("why", "asked", "expected"),
    [
        ("more than 4 GiB of tensors", False, "more than 4 GiB of tensors"),
        ("", True, "the run ended before step 5"),
        ("", False, None),
    ],
)
def test_why_a_step_was_not_kept(
    tmp_path: Path, why: str, asked: bool, expected: str | None
) -> None:
    kept: JsonObject = {"kind": "capsule", "time": 1, "step": 5, "bytes": 0, "why_not": why}
    run = run_of(tmp_path / "a", [kept] if why else [])
    found = parity._replayed(run, asked)
    assert (found and found.why_not) == expected
