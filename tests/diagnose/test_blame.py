"""Who is out of line where ranks call different collectives, and what is said of them."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.finding import Finding
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.collectives.collective_mismatch import (
    Mismatch,
    _shared,
    alone_by_guard,
    mismatch_of_calls,
)
from ddpdoctor.diagnose.collectives.mismatch_findings import mismatch_finding
from ddpdoctor.diagnose.collectives.recorded_calls import Call
from ddpdoctor.diagnose.rank_conditions import guards_of
from ddpdoctor.diagnose.rank_expressions import discerns, is_plain, runs_on_one_rank, words_of


class Script:
    """A script of the user's, and calls from its lines."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = str(path)
        self._lines = text.splitlines()
        path.write_text(text)

    def line(self, code: str) -> int:
        """The line that a piece of code first stands in."""
        return next(number for number, line in enumerate(self._lines, 1) if code in line)

    def call(self, sequence: int, *codes: str, name: str = "all_reduce", **facts: object) -> Call:
        """A call by the lines with these pieces of code, innermost first."""
        site, *callers = [Location(self.path, self.line(code)) for code in codes]
        given = {"numel": 4, "dtype": "float32", "reduce": "SUM", "root": -1, **facts}
        return Call(
            group="0", members="0-3", sequence=sequence, name=name, done=False, site=site,
            callers=tuple(callers), **given,  # type: ignore[arg-type]
        )  # fmt: skip


def judged(
    calls: Mapping[int, Call], before: Mapping[int, Sequence[Call]] | None = None
) -> tuple[Mismatch, Finding]:
    found = mismatch_of_calls(calls, before)
    assert found is not None
    return found, mismatch_finding(found)


# -- conditions on the rank


SETTINGS = """\
def primary():
    return dist.get_rank() == 0
me = dist.get_rank()
lead = me == 0
class Trainer:
    def __init__(self):
        self.head = not lead
        self.fast = speed > 3
build(first=me == 0)
"""


@pytest.mark.parametrize(
    ("test", "tells"),
    [
        ("rank == 0", True),
        ("not rank", True),
        ("args.local_rank in [-1, 0]", True),
        ('int(os.environ["RANK"]) == 0', True),
        ("int(rank) == 0", True),
        ('str(rank) == "0"', True),
        ('int(os.environ.get("RANK")) == 0', True),
        ('os.getenv("RANK") == "0"', True),
        ("not (rank > 0)", True),
        ("rank not in (0, 1)", True),
        ("rank % 2 == 0", True),
        ("debug or rank == 0", True),
        ("self.is_master", True),
        ("trainer.is_global_zero", True),
        ("accelerator.is_local_main_process and step % 10 == 0", True),
        ("not dist.is_initialized() or dist.get_rank() == 0", True),
        ('cfg["is_main"]', True),
        ("lead", True),
        ("trainer.head", True),
        ("primary()", True),
        ("options.first", True),
        ("me > 0", True),
        ("rank in ranks", True),
        ("rank in {0, 1}", True),
        ("rank in [-1, limit]", True),
        # All ranks answer these alike.
        ("rank is not None", False),
        ("local_rank != -1", False),
        ("rank >= 0", False),
        ("rank not in [-1]", False),
        ("rank in (-1, -2)", False),
        ("int(rank) >= 0", False),
        ('str(rank) != "none"', False),
        ('int(os.environ["RANK"]) >= 0', False),
        ('os.getenv("RANK") != "none"', False),
        ("not (rank < 0)", False),
        ("rank >= 0 and rank != -1", False),
        ("rank == -1 or rank < 0", False),
        ('"RANK" in os.environ', False),
        ('os.environ.get("RANK")', False),
        ('hasattr(args, "rank")', False),
        ("True or rank == 0", False),
        ("len(ranks) > 1", False),
        # Other ranks.
        ("self.lora_rank > 0", False),
        ("ranking > 3", False),
        ("trainer.fast", False),
        ("step == 5", False),
    ],
)
def test_conditions_that_tell_ranks_apart(test: str, tells: bool) -> None:
    words = words_of(ast.walk(ast.parse(SETTINGS)))
    condition = ast.parse(test, mode="eval").body
    assert discerns(condition, words) is tells
    assert is_plain(condition, words)


def test_names_are_followed_through_three_assignments() -> None:
    chain = "first = rank\nsecond = first\nthird = second\nfourth = third\n"
    words = words_of(ast.walk(ast.parse(chain)))
    assert words.numbers == {"first", "second", "third"}


def test_a_condition_that_may_be_a_collective_itself() -> None:
    words = words_of(ast.walk(ast.parse(SETTINGS)))
    assert not is_plain(ast.parse("rank == 0 and agreed(flag)", mode="eval").body, words)


@pytest.mark.parametrize(
    ("decorator", "on_one"),
    [
        ("rank_zero_only", True),
        ("accelerator.on_main_process", True),
        ("accelerator.on_local_main_process()", True),
        ("master_only", True),
        ("rank_zero_first", False),
        ("main_process_first()", False),
        ("log_rank", False),
        ("torch.no_grad()", False),
    ],
)
def test_decorators_after_which_some_ranks_run(decorator: str, on_one: bool) -> None:
    assert runs_on_one_rank(ast.parse(decorator, mode="eval").body) is on_one


@pytest.mark.parametrize(
    ("text", "line", "guard"),
    [
        ("if rank == 0: barrier()", 1, 1),
        ("rank == 0 and barrier()", 1, 1),
        ("barrier() if rank == 0 else None", 1, 1),
        ("x = gather(x) if rank == 0 else [x]", 1, 1),
        ("return gather(x) if is_main() else [x]", 1, 1),
        ("gather(x if rank == 0 else None)", 1, None),
        ("x = gather(x) if world_size > 1 else [x]", 1, None),
        ("reduce(x, MAX if rank == 0 else SUM)", 1, None),
        ("if rank == 0 and agreed(x): save()", 1, None),
        ("@rank_zero_only\ndef f():\n    barrier()", 3, 1),
        ("match rank:\n    case 0:\n        barrier()", 3, 2),
        (
            "def f():\n    if rank == 0:\n        go()\n    else:\n        return\n    barrier()",
            6,
            2,
        ),
        ("if local_rank != -1:\n    barrier()", 2, None),
        ("for x in y:\n    if rank == 0 and bad:\n        break\n    barrier()", 4, 2),
        ("for x in y:\n    if rank != 0:\n        continue\n    barrier()", 4, 2),
        ("for x in y:\n    if int(os.environ['RANK']):\n        continue\n    barrier()", 4, 2),
        ("main = rank == 0\nfor x in y:\n    if not main:\n        continue\n    go()", 5, 3),
        # The next round comes there.
        ("for x in y:\n    if rank == 0 and bad:\n        continue\n    barrier()", 4, None),
    ],
)
def test_lines_under_a_condition_on_the_rank(
    tmp_path: Path, text: str, line: int, guard: int | None
) -> None:
    path = tmp_path / "train.py"
    path.write_text(text + "\n")
    found = guards_of([Location(str(path), line)])
    assert (found[0][0].line if found else None) == guard


def test_a_function_of_another_file_that_asks_for_the_rank(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "comm.py").write_text("def first():\n    return get_rank() == 0\n")
    path = tmp_path / "train.py"
    path.write_text("from tools.comm import first\nif first():\n    barrier()\n")
    assert guards_of([Location(str(path), 3)])[0][0].line == 2
    path.write_text("from tools import comm\nif comm.first():\n    save()\n    barrier()\n")
    assert guards_of([Location(str(path), 4)])[0][0].line == 2


# -- a condition in a caller


HELPER = """\
def sync():
    barrier()
def save():
    write()
    sync()
def train():
    if local_rank != -1:
        loss.backward()
        if rank == 0:
            save()
        else:
            follow()
        reduce(total)
"""


def test_a_condition_on_the_rank_in_a_caller(tmp_path: Path) -> None:
    script = Script(tmp_path / "train.py", HELPER)
    chain = ("barrier()", "    sync()", "            save()")
    barrier = script.call(3, *chain, name="barrier", numel=-1, dtype="", reduce="")
    reduces = script.call(3, "reduce(total)")
    found, verdict = judged({0: barrier, 1: reduces})
    assert (found.blame.kind, verdict.code, verdict.ranks) == ("guard", "DDP401", (0,))
    assert verdict.location == Location(script.path, 10)
    assert verdict.message == (
        "rank 0 alone called barrier #3 (default group) at `barrier()` train.py:2, by `save()` "
        "train.py:10, under `if rank == 0:` (line 9): the other ranks did not make this call"
    )
    # Most ranks are under it; the others are no more guilty for being few.
    found, verdict = judged({0: reduces, 1: barrier, 2: barrier})
    assert (verdict.code, verdict.ranks) == ("DDP401", (1, 2))
    # Where all have passed it, it decided nothing.
    behind = script.call(3, *chain)
    found, verdict = judged({0: barrier, 1: behind})
    assert (found.blame.kind, verdict.code, verdict.ranks) == ("none", "DDP803", (0, 1))
    # So it did where the call has its partner in the other branch.
    before = {0: [script.call(1, *chain)], 1: [script.call(1, "follow()")]}
    found, verdict = judged({0: barrier, 1: reduces}, before)
    assert (found.blame.kind, verdict.code) == ("none", "DDP803")


def test_the_other_branch_of_a_condition_in_a_caller(tmp_path: Path) -> None:
    """Who is there has a call of that branch, maybe the same ones in another order."""
    script = Script(tmp_path / "train.py", HELPER)
    saves = {0: script.call(3, "barrier()", "    sync()", "            save()")}
    assert alone_by_guard(saves, [[Location(script.path, script.line("reduce(total)"))]])
    assert alone_by_guard(saves, [[Location(script.path, script.line("follow()"))]]) is None


def test_a_condition_that_leaves_what_follows_it(tmp_path: Path) -> None:
    text = "for x in y:\n    if rank == 0:\n        break\n    all_reduce(x)\nbarrier()\n"
    script = Script(tmp_path / "train.py", text)
    calls = {0: script.call(1, "barrier()", name="barrier"), 1: script.call(1, "    all_reduce(x)")}
    _, verdict = judged(calls)
    assert (verdict.code, verdict.ranks) == ("DDP401", (1,))
    assert "after `if rank == 0: break` (line 2)" in verdict.message
    # In front of the `break` the call would have no partner in the next pass.
    assert verdict.fix.startswith("Broadcast the decision of the rank that makes it")


def test_a_call_that_met_another_of_its_kind(tmp_path: Path) -> None:
    text = (
        "def mean(x):\n    all_reduce(x)\ndef validate():\n    if rank != 0:\n        return\n"
        "    evaluate()\ndef train():\n    mean(loss)\n    loss.backward()\n    validate()\n"
    )
    script = Script(tmp_path / "train.py", text)
    usual = [script.call(number, "all_reduce(x)", "mean(loss)") for number in range(4)]
    extra = script.call(3, "all_reduce(x)", "    evaluate()", "    validate()")
    now = {0: script.call(4, "all_reduce(x)", "mean(loss)", numel=9), 1: script.call(4, "mean(lo")}
    found, verdict = judged(now, {0: [*usual[:3], extra], 1: usual})
    assert (verdict.code, verdict.ranks) == ("DDP401", (0,))
    assert verdict.location == Location(script.path, script.line("    evaluate()"))
    assert [each.rpartition(", by ")[2] for each in found.evidence] == ["train.py:6", "train.py:8"]
    # Calls of one kind under both branches of a condition fit together.
    _, verdict = judged(now, {0: usual, 1: usual})
    assert (verdict.code, verdict.ranks) == ("DDP803", (0, 1))


def test_both_branches_of_one_condition(tmp_path: Path) -> None:
    script = Script(tmp_path / "train.py", "if rank == 0:\n    send(x)\nelse:\n    receive(x)\n")
    found, verdict = judged({0: script.call(1, "send"), 1: script.call(1, "receive", reduce="MAX")})
    assert (found.blame.kind, verdict.code, verdict.ranks) == ("none", "DDP803", (0, 1))


# -- the course of the calls


LOOP = """\
for step in range(9):
    first(x)
    if broken(batch):
        continue
    second(x)
    third(x)
    if score > best:
        extra(x)
    if step % 4 == 3:
        log(x)
"""


def rounds(script: Script, count: int, *codes: str) -> list[Call]:
    each = [code for _ in range(count) for code in codes]
    return [script.call(number, code) for number, code in enumerate(each, 1)]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_call_that_was_passed_over(tmp_path: Path, swapped: bool) -> None:
    script = Script(tmp_path / "train.py", LOOP)
    before = [*rounds(script, 3, "first", "second", "third"), script.call(10, "first")]
    there, here = script.call(11, "second"), script.call(11, "first", numel=9)
    calls = {0: here, 1: there} if swapped else {0: there, 1: here}
    found, verdict = judged(calls, {0: before, 1: before})
    skipped = 0 if swapped else 1
    assert (found.blame.kind, verdict.code, verdict.ranks) == ("passed", "DDP803", (skipped,))
    assert verdict.location == Location(script.path, script.line("continue"))
    assert verdict.message == (
        f"rank {skipped} skipped all_reduce #11 (4 floats, default group) at `second(x)` "
        f"train.py:5, by `continue` train.py:4: rank {1 - skipped} called it, rank {skipped} went "
        "on to all_reduce #11 (9 floats, default group) at `first(x)` train.py:2"
    )


@pytest.mark.parametrize("swapped", [False, True])
def test_a_call_that_one_rank_made_alone(tmp_path: Path, swapped: bool) -> None:
    script = Script(tmp_path / "train.py", LOOP)
    before = rounds(script, 3, "first", "second", "third")
    there, here = script.call(10, "first"), script.call(10, "extra", name="broadcast", root=0)
    calls = {0: here, 1: there} if swapped else {0: there, 1: here}
    found, verdict = judged(calls, {0: before, 1: before})
    assert (found.blame.kind, verdict.ranks) == ("alone", (0 if swapped else 1,))
    assert verdict.location == here.site
    assert "under `if score > best:` train.py:7" in verdict.message


@pytest.mark.parametrize(
    ("times", "kind"), [(3, "passed"), (2, "passed"), (1, "none")], ids=["3", "twice", "once"]
)
def test_what_followed_twice_is_the_rule(tmp_path: Path, times: int, kind: str) -> None:
    script = Script(tmp_path / "train.py", LOOP)
    before = [*rounds(script, times, "first", "second", "third"), script.call(10, "first")]
    calls = {0: script.call(11, "second"), 1: script.call(11, "first", numel=9)}
    found, _ = judged(calls, {0: before, 1: before})
    assert found.blame.kind == kind


def test_what_followed_before_is_no_call_out_of_line(tmp_path: Path) -> None:
    """Another round went on without the call, too."""
    script = Script(tmp_path / "train.py", LOOP)
    usual = rounds(script, 3, "first", "second", "third")
    before = [*usual, script.call(10, "first"), script.call(11, "first")]
    calls = {0: script.call(12, "second"), 1: script.call(12, "first", numel=9)}
    found, _ = judged(calls, {0: before, 1: before})
    assert found.blame.kind == "none"


def test_most_ranks_are_right_about_what_comes_first(tmp_path: Path) -> None:
    """They called before what the other one called already: in the first round, say."""
    script = Script(tmp_path / "train.py", LOOP)
    before = rounds(script, 1, "first", "second", "third")
    before += [script.call(4, "first")]
    there, here = script.call(5, "second"), script.call(5, "third", numel=9)
    found, verdict = judged({0: there, 1: there, 2: here}, dict.fromkeys(range(3), before))
    assert (found.blame.kind, verdict.ranks) == ("passed", (2,))
    found, _ = judged({0: there, 1: here}, dict.fromkeys(range(2), before))
    assert found.blame.kind == "none"


def test_a_call_by_a_shared_count_is_not_to_blame(tmp_path: Path) -> None:
    """The other rank may have skipped a round some time before."""
    script = Script(tmp_path / "train.py", LOOP)
    before = rounds(script, 3, "first", "second", "third")
    calls = {0: script.call(10, "first"), 1: script.call(10, "log", numel=1)}
    found, verdict = judged(calls, {0: before, 1: before})
    assert (found.blame.kind, verdict.ranks) == ("none", (0, 1))


@pytest.mark.parametrize(
    ("test", "shared"),
    [
        ("step == 10", True),
        ("self.steps == args.epochs", True),
        ("seen % 10 == 0", True),
        ("is_late(step)", True),
        ("loss < best", False),
        ("step == 10 and loss < best", False),
    ],
)
def test_conditions_on_a_count_that_all_ranks_share(test: str, shared: bool) -> None:
    assert _shared(ast.parse(test, mode="eval").body) is shared


KEEPER = """\
def save(model):
    if settings.sharded:
        gather(model)
    barrier()
def keep(model, score):
    if score >= keeper.best:
        return
    save(model)
def epoch(model):
    for x in loader:
        backward(x)
for number in range(9):
    epoch(model)
    if args.evaluate:
        keep(model, evaluate())
"""


@pytest.mark.parametrize(
    ("test", "kind"),
    [("world_size == 1", "alone"), ("args.num_gpus > 1", "alone"), ("score > 1", "decided")],
)
def test_a_condition_on_the_world_size_decides_nothing(
    tmp_path: Path, test: str, kind: str
) -> None:
    text = f"""
def gather(value):
    if {test}:
        return value
    all_gather(value)
for x in loader:
    backward(x)
    gather(x) if first else x
"""
    script = Script(tmp_path / "train.py", text)
    gathers = script.call(9, "    all_gather(value)", "    gather(x)", name="all_gather")
    backward = script.call(9, "    backward(x)")
    before = rounds(script, 8, "    backward(x)")
    found, _ = judged({0: gathers, 1: backward}, {0: before, 1: before})
    assert (found.blame.kind == "decided") is (kind == "decided")


def test_a_condition_on_a_value_of_each_rank(tmp_path: Path) -> None:
    """Autograd's thread does not know what called backward."""
    script = Script(tmp_path / "train.py", KEEPER)
    chain = ("barrier()", "    save(model)", "        keep(model,")
    barrier = script.call(9, *chain, name="barrier", numel=-1, dtype="", reduce="")
    backward = script.call(9, "backward(x)")
    before = rounds(script, 8, "backward(x)")
    for above in ("    epoch(model)", ""):
        lines = (Location(script.path, script.line(above)),) if above else ()
        calls = {0: barrier, 1: replace(backward, above=lines)}
        found, verdict = judged(calls, {0: before, 1: before})
        assert (found.blame.kind, verdict.code, verdict.ranks) == ("decided", "DDP803", (0, 1))
        assert verdict.location == Location(script.path, script.line("if score"))
        assert verdict.message == (
            "rank 0 alone called barrier #9 (default group) at `barrier()` train.py:4, where `if "
            "score >= keeper.best:` train.py:6 differs between the ranks: rank 1 called all_reduce "
            "#9 (4 floats, default group) at `backward(x)` train.py:11"
        )
    # Two of three are right about it.
    found, verdict = judged({0: barrier, 1: barrier, 2: backward}, dict.fromkeys(range(3), before))
    assert (found.blame.kind, verdict.ranks) == ("passed", (2,))
    found, verdict = judged({0: backward, 1: backward, 2: barrier}, dict.fromkeys(range(3), before))
    assert (found.blame.kind, verdict.ranks) == ("alone", (2,))


@pytest.mark.parametrize("test", ["args.save", "scaler is not None", "step % 100 == 0", "True"])
def test_conditions_that_are_the_same_on_all_ranks(tmp_path: Path, test: str) -> None:
    text = f"for step, x in data:\n    backward(x)\n    if {test}:\n        barrier()\n"
    script = Script(tmp_path / "train.py", text)
    calls = {0: script.call(9, "barrier()", numel=9), 1: script.call(9, "backward(x)")}
    found, _ = judged(calls, dict.fromkeys(range(2), rounds(script, 1, "backward(x)")))
    assert found.blame.kind == "none"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (("", ""), "ended"),
        (("in loader", "in range(n)"), "none"),
        (("train(x)\n", "train(x)\n        if x > 3: break\n"), "none"),
        (("train(x)\n", "train(x)\n        if x > 3: continue\n"), "none"),
    ],
    ids=["loader", "range", "break", "continue"],
)
def test_a_loop_that_ended_on_one_rank(tmp_path: Path, change: Any, kind: str) -> None:
    """After the same call both came before, and nothing else decides."""
    text = "for epoch in range(3):\n    for x in loader:\n        train(x)\n    evaluate(x)\n"
    script = Script(tmp_path / "train.py", text.replace(*change))
    before = rounds(script, 2, "train", "train", "train", "evaluate")
    before += [script.call(9, "train"), script.call(10, "train")]
    calls = {0: script.call(11, "train"), 1: script.call(11, "evaluate", numel=1)}
    found, verdict = judged(calls, {0: before, 1: before})
    assert (found.blame.kind, verdict.ranks) == (kind, (1,) if kind == "ended" else (0, 1))
    if kind == "ended":
        assert verdict.location == Location(script.path, 2)
        assert verdict.message == (
            "the loop at `for x in loader:` train.py:2 ended earlier on rank 1, which called "
            "all_reduce #11 (1 float, default group) at `evaluate(x)` train.py:4, than on rank 0, "
            "still in all_reduce #11 (4 floats, default group) at `train(x)` train.py:3"
        )


# -- in words


def test_nothing_is_known_but_what_they_called(tmp_path: Path) -> None:
    script = Script(tmp_path / "a.py", "one(x)\nother(x)\n")
    calls = {0: script.call(5, "one"), 1: script.call(5, "other", name="all_gather", reduce="")}
    _, verdict = judged(calls)
    assert verdict.ranks == (0, 1)
    assert verdict.message == (
        "ranks 0 and 1 called different collectives as #5 of the default group: rank 0 all_reduce "
        "at `one(x)` a.py:1 and rank 1 all_gather at `other(x)` a.py:2"
    )


@pytest.mark.parametrize(
    ("line", "facts", "fix"),
    [
        ("one", {"numel": 9}, "Make the size the same on every rank of the group."),
        ("one", {"name": "barrier"}, "Make the operation the same on every rank of the group."),
        ("other", {"numel": 9}, "Make the size the same on every rank of the group."),
        (
            "other",
            {"name": "barrier"},
            "Let every rank call the same collectives in the same order.",
        ),
    ],
)
def test_other_operations_at_other_lines_are_out_of_order(
    tmp_path: Path, line: str, facts: dict[str, Any], fix: str
) -> None:
    script = Script(tmp_path / "a.py", "one(x)\nother(x)\n")
    _, verdict = judged({0: script.call(5, "one"), 1: script.call(5, line, **facts)})
    assert verdict.fix == fix


def test_three_kinds_of_calls_are_named_as_three(tmp_path: Path) -> None:
    script = Script(tmp_path / "a.py", "one(x)\nother(x)\n")
    gathers = script.call(5, "other", name="all_gather", reduce="", numel=6)
    calls = {0: script.call(5, "one"), 1: script.call(5, "one", numel=5), 2: gathers}
    found, verdict = judged(calls)
    assert verdict.ranks == (0, 1, 2)
    assert (
        "rank 0 all_reduce of 4 floats at `one(x)` a.py:1, rank 1 all_reduce of 5 floats at "
        in (verdict.message)
    )
    assert verdict.message.endswith("and rank 2 all_gather at `other(x)` a.py:2")
    assert len(found.evidence) == 3


@pytest.mark.parametrize(
    ("numels", "ranks", "words"),
    [
        (
            (10, 11, 12),
            (0, 1, 2),
            "ranks 0, 1 and 2 called all_reduce #5 of the default group with different sizes: of "
            "10 floats on rank 0, of 11 floats on rank 1 and of 12 floats on rank 2, at `one(x)` "
            "a.py:1",
        ),
        (
            (10, 10, 12),
            (2,),
            "rank 2 called all_reduce of 12 floats as collective #5 of the default group, where "
            "ranks 0 and 1 called all_reduce of 10 floats, at `one(x)` a.py:1",
        ),
        (
            (10, 10, 10, 11, 12),
            (3, 4),
            "rank 3 called all_reduce of 11 floats and rank 4 called all_reduce of 12 floats as "
            "collective #5 of the default group, where ranks 0, 1 and 2 called all_reduce of 10 "
            "floats, at `one(x)` a.py:1",
        ),
        (
            (10, 10, 11, 12),
            (0, 1, 2, 3),
            "ranks 0, 1, 2 and 3 called all_reduce #5 of the default group with different sizes: "
            "of 10 floats on ranks 0 and 1, of 11 floats on rank 2 and of 12 floats on rank 3, at "
            "`one(x)` a.py:1",
        ),
    ],
)
def test_every_size_is_named(
    tmp_path: Path, numels: tuple[int, ...], ranks: tuple[int, ...], words: str
) -> None:
    script = Script(tmp_path / "a.py", "one(x)\n")
    calls = {rank: script.call(5, "one", numel=numel) for rank, numel in enumerate(numels)}
    _, verdict = judged(calls)
    assert (verdict.ranks, verdict.message) == (ranks, words)


def test_many_kinds_are_named_in_short(tmp_path: Path) -> None:
    script = Script(tmp_path / "a.py", "one(x)\n")
    found, verdict = judged({rank: script.call(5, "one", numel=rank) for rank in range(1, 21)})
    assert "and 16 more calls on other ranks" in verdict.message
    assert found.evidence[-1] == "14 more calls on other ranks"
