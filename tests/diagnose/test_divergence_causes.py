"""Why parameters differ between ranks: loads, writes, learning rates, state and scale."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.core.user_code import Location
from ddpdoctor.run.records.base import JsonObject
from tests.support.replicas import SITE, found, prints, ranks, tensors
from tests.support.written import T0, Written


def load(step: int) -> JsonObject:
    return {"kind": "load", "step": step, "module": 0, "path": "/job/train.py", "line": 5}


def test_weights_loaded_on_one_rank_are_the_cause(written: Written) -> None:
    ranks(written, list(prints("aaaa")), [*prints("aabb"), load(2)])
    (finding,) = found(written)
    assert (finding.code, finding.ranks, str(finding.location)) == (
        "DDP319", (1,), "/job/train.py:5",
    )  # fmt: skip


GUARDED = """def change(model):
    torch_changes(model)
if rank == 0:
    change(ddp)
"""


@pytest.mark.parametrize(
    ("kind", "code"), [("load", "DDP319"), ("resume", "DDP703"), ("clip", "DDP709")]
)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_call_under_a_condition_is_the_place_not_the_function_that_it_calls(
    written: Written, tmp_path: Path, kind: str, code: str, elsewhere: bool
) -> None:
    train = tmp_path / "train.py"
    train.write_text(GUARDED + "change(teacher)\n" * elsewhere)
    at = {"kind": "site", "phase": "forward", "path": str(train), "line": 1}
    change = {"kind": kind, "step": 2, "module": 0, "path": str(train), "line": 2}
    change |= {"call": "clip_grad_norm_"} if kind == "clip" else {"what": "SGD"}
    both = [
        [{**each, "state": each["parameters"] * (kind == "resume")} for each in prints(letters)]
        for letters in ("aabb", "aaaa")
    ]
    ranks(written, [at, change, *both[0]], [at, *both[1]])
    (finding,) = written.findings(status=0)
    assert finding.code == code
    assert finding.location == Location(str(train), 2 if elsewhere else 4)
    called = "`torch_changes(model)` train.py:2 is called from `change(ddp)` train.py:4"
    assert (called in finding.evidence) is not elsewhere


def test_other_weights_loaded_on_every_rank_are_not_one_ranks_fault(written: Written) -> None:
    ranks(written, [*prints("aaaa"), load(2)], [*prints("aabb"), load(2)])
    assert [each.code for each in found(written)] == ["DDP701"]


def test_a_load_before_the_last_equality_is_not_the_cause(written: Written) -> None:
    ranks(written, list(prints("aaaa")), [*prints("aabb"), load(1)])
    assert [each.code for each in found(written)] == ["DDP701"]


def test_parameters_changed_by_hand_on_one_rank(written: Written) -> None:
    outside = {"kind": "outside", "step": 1, "module": 0, "count": 1, "names": ["second.weight"]}
    ranks(written, list(prints("aaaa")), [*prints("aabb"), outside])
    (finding,) = found(written)
    assert (finding.code, finding.ranks) == ("DDP319", (1,))


WRITES = {
    "copy": "if rank == 0:\n    model.weight.copy_(best)\n",
    "assigned": "if rank == 0:\n    p.data = best\n",
    "element": "if rank == 0:\n    model.weight[:] = best\n",
    "init": "if rank == 0:\n    nn.init.zeros_(head)\n",
    "apply": "if dist.get_rank() == 0:\n    model.apply(start)\n",
    "loop": "if rank == 0:\n    [p.data.mul_(2) for p in model.parameters()]\n",
    "helper": "def reset(m):\n    m.weight.zero_()\nif rank == 0:\n    reset(model)\n",
}
NO_WRITES = {
    "everywhere": "model.weight.zero_()\n\n",
    "gradient": "if rank == 0:\n    p.grad.zero_()\n",
    "no module's apply": "if rank == 0:\n    settings.apply(start)\n",
    "another method": "if rank == 0:\n    model.describe()\n",
    "total": "if rank == 0:\n    total.add_(loss)\n",
    "called everywhere": "def reset(m):\n    m.weight.zero_()\nreset(model)\n",
    "two": WRITES["copy"] + WRITES["init"],
}


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("name", [*WRITES, *NO_WRITES])
def test_the_line_that_changes_weights_on_one_rank(
    written: Written, tmp_path: Path, name: str, seen: bool
) -> None:
    train = tmp_path / "train.py"
    train.write_text({**WRITES, **NO_WRITES}[name])
    at = {"kind": "site", "phase": "forward", "path": str(train), "line": 1}
    outside = {"kind": "outside", "step": 1, "module": 0, "count": 1, "names": ["second.weight"]}
    changed = [*prints("aabb", gradients="g"), *([outside] if seen else [])]
    ranks(written, [at, *prints("aaaa", gradients="g")], changed)
    (finding,) = found(written)
    assert finding.code == ("DDP319" if seen or name in WRITES else "DDP701")
    # By what was seen, else by the condition around the line, if that is known.
    alone = name in WRITES
    assert finding.ranks == ((1,) if seen else (0,) if alone else (0, 1))
    if name in WRITES:
        assert finding.location == Location(str(train), 4 if name == "helper" else 2)
        assert "likely" in finding.message or seen
    elif seen:
        assert finding.location is None


def test_a_difference_of_learning_rates_is_said_once_with_its_consequence(
    written: Written,
) -> None:
    cut = {"kind": "cut", "step": 3, "path": "/job/train.py", "line": 7}
    mine = [*prints("aaa"), *prints("bbb", lr=0.01, start=3), cut]
    ranks(written, list(prints("aaaaaa")), mine)
    (finding,) = found(written)
    assert (finding.code, finding.ranks, str(finding.location)) == (
        "DDP702", (1,), "/job/train.py:7",
    )  # fmt: skip
    assert "0.1 on rank 0, 0.01 on rank 1" in finding.message
    assert "the parameters differ since step 3" in finding.evidence


def test_a_schedule_that_all_ranks_follow_is_no_difference(written: Written) -> None:
    both = [*prints("aaa"), *prints("bbb", lr=0.01, start=3)]
    ranks(written, both, both)
    assert found(written) == []


RESUME = {"kind": "resume", "step": 0, "path": "/job/train.py", "line": 4, "what": "SGD"}


@pytest.mark.parametrize(("resumed", "expected"), [((0,), "DDP703"), ((0, 1), "DDP701")])
def test_an_optimizers_state_that_one_rank_loaded(
    written: Written, resumed: tuple[int, ...], expected: str
) -> None:
    each = [
        [*([RESUME] if rank in resumed else []), *prints("ab"[rank] * 4, state="xy"[rank])]
        for rank in (0, 1)
    ]
    ranks(written, *each)
    assert [each.code for each in found(written)] == [expected]


def test_scales_that_differ_are_the_cause(written: Written) -> None:
    ranks(written, list(prints("aaaa", scale=4.0)), list(prints("bbbb", scale=8.0)))
    (finding,) = found(written)
    assert (finding.code, finding.ranks) == ("DDP705", (0, 1))


def test_scales_that_follow_other_parameters_are_not(written: Written) -> None:
    mine = [*prints("ab", scale=8.0), *prints("bb", start=2, scale=4.0)]
    ranks(written, list(prints("aaaa", scale=8.0)), mine)
    assert [each.code for each in found(written)] == ["DDP701"]


def stepped(backwards: list[int], armed: list[int]) -> list[JsonObject]:
    """Steps with their backwards, and fingerprints that all differ from the second one on."""
    step = dict.fromkeys(("data", "forward", "backward", "optimizer", "other", "wait"), 1)
    steps: list[JsonObject] = [
        {"kind": "step", "step": number, "start": T0, **step, "total": 6, "split": True,
         "backwards": count}
        for number, count in enumerate(backwards)
    ]  # fmt: skip
    prints_of = zip(prints("a" * len(armed)), armed, strict=True)
    return [*steps, *({**each, "armed": count} for each, count in prints_of)]


@pytest.mark.parametrize(
    ("mine", "armed", "codes"),
    [
        ([1, 1, 2, 1, 1], [1, 2, 4, 5, 6], ["DDP403"]),
        # A backward of its own, which was not reduced.
        ([1, 1, 2, 1, 1], [1, 2, 3, 4, 5], []),
        ([1, 1, 1, 1, 1], [1, 2, 3, 4, 5], []),
        # A step without a backward.
        ([1, 1, 0, 1, 1], [1, 2, 2, 3, 4], []),
    ],
)
def test_a_step_that_one_rank_left_out(
    written: Written, mine: list[int], armed: list[int], codes: list[str]
) -> None:
    ranks(written, stepped([1] * 5, [1, 2, 3, 4, 5]), stepped(mine, armed))
    findings = found(written)
    assert [each.code for each in findings] == codes
    assert not codes or findings[0].ranks == (1,)


LEAVES_OUT = {
    "for x in loader:\n    loss.backward()\n    if norm < 9:\n        optimizer.step()\n": 3,
    "for x in loader:\n    loss.backward()\n    if norm > 9:\n        continue\n"
    "    optimizer.step()\n": 4,
    # Which of the two is not known, and one in front of the backward is none of them.
    "for x in loader:\n    loss.backward()\n    if norm > 9:\n        continue\n"
    "    if late:\n        continue\n    optimizer.step()\n": 7,
    "for x in loader:\n    if x is None:\n        continue\n    loss.backward()\n"
    "    optimizer.step()\n": 5,
    "loss.backward()\noptimizer.step()\n": 2,
}


@pytest.mark.parametrize("text", LEAVES_OUT)
def test_the_statement_by_which_a_step_was_left_out(
    written: Written, tmp_path: Path, text: str
) -> None:
    train = tmp_path / "train.py"
    train.write_text(text)
    lines = text.splitlines()
    sites = [
        {"kind": "site", "phase": phase, "path": str(train),
         "line": next(number for number, line in enumerate(lines, 1) if code in line)}
        for phase, code in (("backward", "backward"), ("optimizer", "optimizer.step"))
    ]  # fmt: skip
    each = (stepped([1] * 5, [1, 2, 3, 4, 5]), stepped([1, 1, 2, 1, 1], [1, 2, 4, 5, 6]))
    for number, records in enumerate(each):
        written.rank(number, [*sites, tensors([0, 1]), *records])
    (finding,) = found(written)
    assert finding.location is not None
    assert finding.location.line == LEAVES_OUT[text]
    assert finding.message.startswith(
        "rank 1 alone did not step the optimizer after a backward of step 2, and rank 0 did:"
    )
    assert finding.evidence == (
        "rank 0 had 1 backward in step 2",
        "rank 1 had 2 backwards in step 2",
    )
    assert "so that rank 1 steps whenever rank 0 does;" in finding.fix


@pytest.mark.parametrize(
    ("armed", "over", "expected"),
    [
        ([1, 2, 4], False, []),
        ([1, 2, 4], True, ["DDP403"]),
        ([1, 2, 4, 5], False, ["DDP403"]),
    ],
)
def test_a_step_that_was_left_out_just_now_may_be_made_up_for(
    written: Written, armed: list[int], over: bool, expected: list[str]
) -> None:
    count = len(armed)
    theirs = stepped([1] * count, list(range(1, count + 1)))
    ranks(written, theirs, stepped([1, 1, 2, 1][:count], armed))
    assert [each.code for each in found(written, over=over)] == expected


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("if rank == 0:\n    group['lr'] *= 2\n", 2),
        ("if rank == 0:\n    optimizer.param_groups[0]['lr'] = 1.0\n", 2),
        ("optimizer.param_groups[0]['lr'] = 1.0\n", None),
        ("if rank == 0:\n    settings['lr'] = 1.0\n    group['lr'] = 1.0\n", None),
    ],
)
def test_the_line_that_sets_another_learning_rate_on_one_rank(
    written: Written, tmp_path: Path, text: str, line: int | None
) -> None:
    train = tmp_path / "train.py"
    train.write_text(text)
    at = {"kind": "site", "phase": "optimizer", "path": str(train), "line": 9}
    rates = ([[[0.1, 0, None, 0]]], [[[0.2, 0, None, 0]]])
    for number, rate in enumerate(rates):
        first = {"kind": "fingerprint", "step": 0, "module": 0, "armed": 1, "parameters": "a"}
        lines = [{**first, "hyper": rates[1]}]
        lines += [{**first, "step": step, "armed": step + 1, "hyper": rate} for step in (1, 2)]
        written.rank(number, [SITE, at, tensors([0, 1]), *lines])
    (finding,) = found(written)
    assert (finding.code, finding.ranks) == ("DDP702", (0,))
    place = finding.location
    assert place is not None and place.line == (9 if line is None else line)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("if rank == 0:\n    group['lr'] *= 2\n", (0,)), ("group['lr'] *= 2\n", (0, 1))],
)
def test_under_a_scheduler_the_line_says_who_changed_the_learning_rate(
    written: Written, tmp_path: Path, text: str, ranks: tuple[int, ...]
) -> None:
    train = tmp_path / "train.py"
    train.write_text(text)
    at = {"kind": "site", "phase": "optimizer", "path": str(train), "line": 9}
    for number, changed in enumerate((0.16, 0.08)):
        prints_of = {"kind": "fingerprint", "module": 0, "parameters": "a"}
        rates = [0.1, 0.09, changed]
        lines = [
            {**prints_of, "step": step, "armed": step + 1, "hyper": [[[rate, 0, None, 0]]]}
            for step, rate in enumerate(rates)
        ]
        written.rank(number, [SITE, at, tensors([0, 1]), *lines])
    (finding,) = found(written)
    assert (finding.code, finding.ranks) == ("DDP702", ranks)
