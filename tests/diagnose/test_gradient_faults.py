"""Gradients and learning rates that are wrong on every rank alike, by what the probe records."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.run.records.base import JsonObject
from tests.support.written import T0, Written

AT: JsonObject = {"path": "/job/train.py", "line": 9}


def findings_of(
    directory: Path, *ranks: list[JsonObject], status: int | None = 0, script: str = ""
) -> list[Finding]:
    """What is said of ranks with these records, all of which have run a script."""
    directory.mkdir()
    written = Written(directory, world_size=len(ranks))
    file = directory / "train.py"
    file.write_text(script)
    site = {"kind": "site", "phase": "backward", "path": str(file), "line": 1}
    for number, records in enumerate(ranks):
        written.rank(number, [site, *records])
    return written.findings(status=status)


# -- parameters that are never used, with options that allow it


def never(count: int = 2, part: float = 0.5, why: str = "unused") -> JsonObject:
    return {
        "kind": "never_used", "ddp": 0, "backwards": 64, "count": count, "of": 4, "part": part,
        "parameters": [["text.weight", "Linear", why]] if count else [], **AT,
    }  # fmt: skip


CUT: JsonObject = {"kind": "graph_cut", "step": 0, "call": "all_gather", **AT, "line": 22}


@pytest.mark.parametrize(
    ("first", "second", "severity", "line"),
    [
        ([never()], [never()], Severity.WARNING, 9),
        ([never(part=0.01)], [never(part=0.01)], Severity.INFO, 9),
        ([never(part=0.01), CUT], [never(part=0.01), CUT], Severity.WARNING, 22),
        # Used later, on another rank, or of a rank without a record.
        ([never(), never(0)], [never(), never(0)], None, 0),
        ([never()], [never(0)], None, 0),
        ([never()], [], None, 0),
        ([CUT], [CUT], None, 0),
        # The whole module: it is not trained on purpose.
        ([never(4)], [never(4)], None, 0),
        # Replaced after DDP was built: DDP303.
        ([never(why="replaced")], [never(why="replaced")], None, 0),
    ],
)
def test_parameters_that_no_rank_ever_uses(
    tmp_path: Path,
    first: list[JsonObject],
    second: list[JsonObject],
    severity: Severity | None,
    line: int,
) -> None:
    found = findings_of(tmp_path / "run", first, second)
    assert [(each.code, each.severity) for each in found] == (
        [("DDP305", severity)] if severity is not None else []
    )
    assert all(each.location is not None and each.location.line == line for each in found)
    assert all(("functional.all_gather" in each.fix) is (CUT in first) for each in found)


# -- gradients that are not averaged


def unreduced(cause: str, step: int, gradient: float, value: float, ddp: int = 0) -> JsonObject:
    return {
        "kind": "unreduced", "step": step, "ddp": ddp, "cause": cause,
        "gradients": {"w": gradient}, "parameters": {"w": value}, **AT,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("cause", "ddp", "values", "gradients", "expected"),
    [
        ("step in no_sync", 0, (1.0, 2.0), (1.0, 2.0), ["DDP308"]),
        ("step in no_sync", 0, (2.0, 2.0), (1.0, 2.0), []),
        ("step in no_sync", 0, (2.0, 2.0), (1.0, 1.0), []),
        ("outside", -1, (1.0, 2.0), (1.0, 2.0), ["DDP330"]),
        ("outside", -1, (2.0, 2.0), (1.0, 1.0), []),
    ],
)
def test_gradients_that_only_their_rank_uses(
    tmp_path: Path,
    cause: str,
    ddp: int,
    values: tuple[float, float],
    gradients: tuple[float, float],
    expected: list[str],
) -> None:
    ranks = [
        [unreduced(cause, 0, gradients[rank], 3.0, ddp)]
        + [unreduced(cause, step, 1.0, values[rank], ddp) for step in (1, 2)]
        for rank in (0, 1)
    ]
    assert [each.code for each in findings_of(tmp_path / "run", *ranks)] == expected


@pytest.mark.parametrize(
    ("script", "expected"), [("g = torch.autograd.grad(loss, p)\n", ["DDP322"]), ("", [])]
)
def test_gradients_that_autograd_grad_returns(
    tmp_path: Path, script: str, expected: list[str]
) -> None:
    ranks = [
        [unreduced("no backward", 0, 1.0 + rank, 3.0)]
        + [unreduced("no backward", step, 1.0, 1.0 + rank) for step in (1, 2)]
        for rank in (0, 1)
    ]
    found = findings_of(tmp_path / "run", *ranks, script=script)
    assert [each.code for each in found] == expected


EMA = """
def main(rank):
    ema = Ema(model.module)
    for x, y in loader:
        {update}
    for x, y in validation:
        score += (ema.model(x) == y).sum()
    if rank == 0:
        torch.save(ema.state_dict(), "ema.pt")
"""
GUARDED = "if rank == 0: \n            ema.update(model.module)"


def other(value: float, armed: int = 40) -> JsonObject:
    return {"kind": "other_model", "number": 0, "type": "Net", "armed": armed, "values": [value]}


@pytest.mark.parametrize(
    ("values", "update", "expected"),
    [
        ((1.0, 2.0), GUARDED, ["DDP708"]),
        ((1.0, 1.0), GUARDED, []),
        ((1.0, 2.0), "ema.update(model.module)", []),
    ],
)
def test_an_average_of_weights_that_one_rank_updates(
    tmp_path: Path, values: tuple[float, float], update: str, expected: list[str]
) -> None:
    facts = {
        "kind": "pass", "pass": 1, "number": 0, "state": "ended", "armed": 40, "fetched": 4,
        "length": 100, "draws": 50, "collectives": 1, "reductions": 1, **AT,
    }  # fmt: skip
    ranks = [
        [other(values[rank]), {**facts, "head": [50, rank], "made": ["/job/train.py", 5]}]
        for rank in (0, 1)
    ]
    found = findings_of(tmp_path / "run", *ranks, script=EMA.format(update=update))
    assert [each.code for each in found] == expected
    assert all(each.location is not None and each.location.line == 6 for each in found)


def test_parameters_that_differ_from_the_beginning_are_parts(tmp_path: Path) -> None:
    ranks = [
        [unreduced("outside", n, 1.0 + rank, 3.0 + rank, -1) for n in (0, 1)] for rank in (0, 1)
    ]
    assert findings_of(tmp_path / "run", *ranks) == []


# -- gradients scaled by the number of ranks


def loss_scale(factor: float, call: str = "all_reduce") -> JsonObject:
    return {"kind": "loss_scale", "step": 0, "call": call, "factor": factor, **AT}


DIVIDED = "loss = model(x)\nloss = loss / world_size\nloss.backward()\n"
"""A script that divides its loss."""


@pytest.mark.parametrize(
    ("record", "script", "expected"),
    [
        (loss_scale(0.5), "", [Severity.WARNING]),
        (loss_scale(1.0), "", [Severity.INFO]),
        (loss_scale(0.5, ""), DIVIDED, [Severity.WARNING]),
        # As many batches are accumulated as there are ranks.
        (loss_scale(0.5, ""), DIVIDED.replace("/ world_size", "/ accumulated"), []),
        # It is what a log shows.
        (
            loss_scale(0.5, ""),
            "loss = model(x)\nloss = loss / 2\nloss.backward()\nprint(loss / world_size)\n",
            [],
        ),
    ],
)
def test_a_loss_scaled_by_the_number_of_ranks(
    tmp_path: Path, record: JsonObject, script: str, expected: list[Severity]
) -> None:
    path = str(tmp_path / "run" / "train.py")
    forward: JsonObject = {"kind": "site", "phase": "forward", "path": path, "line": 1}
    records = [forward, {**record, "path": path, "line": 3}]
    found = findings_of(tmp_path / "run", records, records, script=script)
    assert [(each.code, each.severity) for each in found] == [("DDP329", each) for each in expected]


@pytest.mark.parametrize(
    ("factors", "line", "expected"),
    [
        ((0.5, 0.5, 0.5, 0.5), "p.grad /= world_size", ["DDP329"]),
        ((2.0, 2.0, 2.0, 2.0), "dist.all_reduce(p.grad)", ["DDP329"]),
        (
            (2.0, 2.0, 2.0, 2.0),
            "flat = cat([p.grad for p in ps])\ndist.all_reduce(flat)",
            ["DDP329"],
        ),
        ((2.0, 2.0, 2.0, 2.0), "n = p.grad.norm()\ndist.all_reduce(n)", []),
        (
            (0.5, 0.5, 0.5, 0.5),
            "r, n = dist.get_rank(), dist.get_world_size()\np.grad /= n",
            ["DDP329"],
        ),
        ((0.5, 0.5, 0.5, 0.5), "p.grad /= accumulated", []),
        ((0.5, 0.4, 0.5, 0.5), "p.grad /= world_size", []),
        ((1.0, 1.0, 1.0, 1.0), "dist.all_reduce(p.grad); p.grad /= world_size", []),
    ],
)
def test_gradients_scaled_by_the_number_of_ranks(
    tmp_path: Path, factors: tuple[float, ...], line: str, expected: list[str]
) -> None:
    record = {"kind": "gradient_scale", "step": 3, "name": "w", "factors": list(factors)}
    found = findings_of(tmp_path / "run", [record], [record], script=f"{line}\n")
    assert [each.code for each in found] == expected


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("p.grad.div_(world_size)\n", ["DDP329"]),
        ("p.grad.data.mul_(1 / accumulated)\n", []),
    ],
)
def test_a_division_in_place_is_read_as_one(
    tmp_path: Path, script: str, expected: list[str]
) -> None:
    record = {"kind": "gradient_scale", "step": 3, "name": "w", "factors": [0.5] * 4}
    found = findings_of(tmp_path / "run", [record], [record], script=script)
    assert [each.code for each in found] == expected


# -- schedules


def schedule(position: int, numbers: list[int], name: str = "LambdaLR") -> JsonObject:
    return {
        "kind": "schedule", "scheduler": name, "position": position, "steps": 399,
        "numbers": numbers, **AT,
    }  # fmt: skip


TWICE = "steps = len(loader) // world_size\n"


@pytest.mark.parametrize(
    ("record", "script", "expected"),
    [
        (schedule(399, [80, 800]), "", True),
        (schedule(399, [40, 400]), "", False),
        (schedule(399, [40, 400, 800]), "", False),
        (schedule(399, [600]), "", False),
        # Stepped by epoch, or after a warm-up.
        (schedule(4, [800]), "", False),
        (schedule(359, [760], "CosineAnnealingLR"), "", True),
        # Stepped by each rank's number of steps at a time.
        (schedule(798, [400]), "", True),
        (schedule(798, [800]), "", False),
        # Half of the training is a usual length of a cycle.
        (schedule(399, [200], "CosineAnnealingLR"), "", False),
        (schedule(399, [200], "CosineAnnealingLR"), TWICE, True),
        (schedule(399, [200], "StepLR"), TWICE, False),
    ],
)
def test_a_schedule_whose_length_is_off_by_the_number_of_ranks(
    tmp_path: Path, record: JsonObject, script: str, expected: bool
) -> None:
    found = findings_of(tmp_path / "run", [record], [record], script=script)
    assert [each.code for each in found] == (["DDP331"] if expected else [])
    stopped = findings_of(tmp_path / "stopped", [record], [record], script=script, status=None)
    assert stopped == []


def test_a_rate_scaled_by_the_batch_of_one_rank(tmp_path: Path) -> None:
    step = {"kind": "step", "step": 0, "samples": 32, "total": 1}
    for number, (line, expected) in enumerate(
        (
            ("lr = 0.1 * batch_size / 256", ["DDP317"]),
            ("lr = 0.1 * batch_size * world_size / 256", []),
            ("optimizer = SGD(p, lr=args.lr * args.batch / 256)", ["DDP317"]),
            ("lr = 0.1", []),
            # It is the batch of all ranks.
            ("part = batch_size // world_size\nlr = 0.1 * batch_size / 256", []),
        )
    ):
        found = findings_of(tmp_path / str(number), [step], [step], script=f"{line}\n")
        assert [each.code for each in found] == expected
        assert all("64 in one of all ranks" in each.evidence[0] for each in found)


@pytest.mark.parametrize(
    ("script", "rates", "expected"),
    [
        ("total = epochs * len(data) // 16", (0.1, 0.2, 0.3, 0.2), ["DDP331"]),
        ("total = epochs * len(data) // 16", (0.1, 0.1, 0.1, 0.1), []),
        ("total = epochs * len(data) // (16 * world_size)", (0.1, 0.2, 0.3, 0.4), []),
        ("total = epochs * len(loader) // 2", (0.1, 0.2, 0.3, 0.4), []),
        ("total = epochs * len(data) // global_batch", (0.1, 0.2, 0.3, 0.4), []),
        ("b = 4 * world_size\ntotal = epochs * len(data) // b", (0.1, 0.2, 0.3, 0.4), []),
    ],
)
def test_a_schedule_by_hand_over_all_the_data(
    tmp_path: Path, script: str, rates: tuple[float, ...], expected: list[str]
) -> None:
    prints: list[JsonObject] = [
        {"kind": "fingerprint", "step": step, "module": 0, "parameters": "a", "hyper": [[[rate]]]}
        for step, rate in enumerate((*rates, 0.05))
    ]
    prints.append({"kind": "end", "time": T0})
    source = "rank, size = dist.get_rank(), dist.get_world_size()\n"
    source += f"sampler = DistributedSampler(data)\n{script}\n"
    found = findings_of(tmp_path / "run", prints, prints, script=source)
    assert [each.code for each in found] == expected


STATIC = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This "
    "error indicates that your training graph has changed in this iteration"
)


@pytest.mark.parametrize(("cut", "expected"), [([CUT], "DDP305"), ([], "DDP306")])
def test_a_lost_graph_under_static_graph(
    tmp_path: Path, cut: list[JsonObject], expected: str
) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    written = Written(directory)
    for rank in (0, 1):
        error = {"kind": "error", "exception": "RuntimeError", "message": STATIC, "step": 2, **AT}
        written.rank(rank, [*cut, {**error, "time": T0 + rank}])
        written.exit(rank, 1, T0 + rank)
    found = [each.code for each in written.findings(status=1, stderr=f"RuntimeError: {STATIC}\n")]
    assert found == [expected]
