"""Rules on data sets: random splits that differ between ranks, and downloads."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.core.finding import Severity
from ddpdoctor.core.syntax import last_name
from ddpdoctor.lint.calls import has_unpacked, keyword
from ddpdoctor.lint.code import Code
from ddpdoctor.lint.conditions import is_guarded
from ddpdoctor.lint.ranks import depends_on_rank
from ddpdoctor.lint.rules import TRAINERS, Hit, rule


@rule("DDP110", Severity.ERROR, moot=TRAINERS)
def unseeded_split(code: Code) -> Iterator[Hit]:
    """Find random splits that differ between ranks."""
    if not code.program.wraps:
        return
    for call in (
        ()
        if _is_seeded(code)
        else (
            *code.calls_by_name.get("random_split", ()),
            *code.calls_by_name.get("train_test_split", ()),
        )
    ):
        name = last_name(call.func)
        option = {"random_split": ("generator", 2), "train_test_split": ("random_state", None)}[
            name
        ]
        given = keyword(call, *option)
        unseeded = given is None or (isinstance(given, ast.Constant) and given.value is None)
        if unseeded and not has_unpacked(call) and not is_guarded(code, call):
            seed = (
                "generator=torch.Generator().manual_seed(0)"
                if name == "random_split"
                else "random_state=0"
            )
            yield Hit(
                call,
                "each rank splits the data at random by another seed, so some ranks train on "
                "what others validate on",
                f"Pass {seed}.",
            )

    yield from _unseeded_shuffle(code)


_SHUFFLES = ("random.shuffle", "numpy.random.shuffle", "numpy.random.permutation")


def _unseeded_shuffle(code: Code) -> Iterator[Hit]:
    """Yield unseeded shuffles of a list that is then split."""
    for name in ("shuffle", "permutation"):
        for call in code.calls_by_name.get(name, ()):
            full = code.dotted(call.func).replace("np.", "numpy.")
            shuffled = last_name(call.args[0]) if call.args else ""
            if full not in _SHUFFLES or not shuffled or is_guarded(code, call):
                continue
            function = code.function(call)
            parts = sum(
                isinstance(each, ast.Subscript)
                and isinstance(each.slice, ast.Slice)
                and last_name(each.value) == shuffled
                for each in code.within(function or code.tree)
            )
            if parts > 1 and not _seeds(code, full.rpartition(".")[0]):
                yield Hit(
                    call,
                    "each rank shuffles by another seed before the data is split, so some ranks "
                    "train on what others validate on",
                    "Shuffle with random.Random(0).shuffle(...).",
                )


def _seeds(code: Code, module: str) -> bool:
    """Return whether the program may seed the generator of a module."""
    for each in code.program.codes:
        for name, calls in each.calls_by_name.items():
            for call in calls if "seed" in name.lower() else ():
                full = each.dotted(call.func).replace("np.", "numpy.")
                if full == f"{module}.seed":
                    return True
                known = full.startswith(("torch.", "numpy.", "random."))
                if not known and not each.program.targets(each, call):
                    return True
    return False


def _is_seeded(code: Code) -> bool:
    """Return whether the program may use the same seed on all ranks."""
    return any(
        not call.args or not depends_on_rank(each, call.args[0])
        for each in code.program.codes
        for name, calls in each.calls_by_name.items()
        if "seed" in name.lower()
        for call in calls
    )


@rule("DDP111", Severity.INFO, "download-race", moot=TRAINERS)
def download_race(code: Code) -> Iterator[Hit]:
    """All ranks download the same files at once.

    What it finds
        ``download=True`` of a data set that every rank reaches.

    Why it is bad
        The ranks of a node write the same files at the same time. One may read what
        another has not finished.

    How to fix it
        Let one rank of each node download, wait for it at a barrier, and pass ``download=False``
        on the others.

    Example
        Wrong:
            data = CIFAR10(root, download=True)
        Right:
            if local_rank == 0:
                CIFAR10(root, download=True)
            dist.barrier()
            data = CIFAR10(root, download=False)

    When it stays silent
        Downloads under a condition on the rank, or before the processes are started.
    """
    if not code.program.wraps:
        return
    for call in code.calls:
        value = keyword(call, "download")
        literal = isinstance(value, ast.Constant) and value.value is True
        if value is not None and literal and not (is_guarded(code, call) or _waits(code, call)):
            yield Hit(
                value,
                "every rank downloads these files at the same time",
                "Download on one rank of each node, then wait at a barrier.",
            )


def _waits(code: Code, node: ast.AST, depth: int = 4) -> bool:
    """Return whether ranks may wait for each other before a node, in its function or a caller."""
    function = code.function(node)
    names = ("barrier", "wait_for_everyone", "main_process_first")
    inside = code.within(function or code.tree)
    if any(
        getattr(each, "lineno", 0) < getattr(node, "lineno", 0)
        and isinstance(each, (ast.Call, ast.Name, ast.Attribute))
        and any(name in last_name(each) for name in names)
        for each in inside
    ):
        return True
    callers = code.program.callers(code, function) if function is not None and depth else []
    return any(_waits(other, call, depth - 1) for other, call in callers)
