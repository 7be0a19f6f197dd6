"""The rule for random numbers that are the same on all ranks, or in all workers (DDP601)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.relations import always
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.data.draws import equal_losses, groups_of
from ddpdoctor.diagnose.data.seeds import Seed, loop_of, mentions, seeds_of, worker_functions
from ddpdoctor.run.records.training import GeneratorState, RandomRecord
from ddpdoctor.run.snapshot import Rank, Run

MIN_STEPS = 4  # Minimum number of consecutive steps with draws
BLOCK_DRAWS = 624
"""Number of draws in a generator's block. A step with this many draws fills a tensor. Fewer may be
for a value that ranks must share, such as an order or a size."""
MIN_DRAWS = 8  # Minimum number of draws for an augmented batch

_NAMES = {"torch": "torch", "numpy": "numpy", "python": "the random module"}


@dataclass(frozen=True)
class _Alike:
    """Equal random numbers of ranks or workers."""

    ranks: tuple[int, ...]
    library: str  # The library of the generator. Empty if only the losses show it.
    what: str
    evidence: str
    mild: bool = False  # Whether it may be harmless, because only few numbers per batch are equal
    worker: bool = False
    at: Location | None = None  # The line that draws the numbers, if known


@rule(
    "DDP601",
    "same-random-numbers",
    Severity.WARNING,
    yields_to=dict.fromkeys(("DDP101", "DDP102", "DDP105", "DDP115", "DDP116"), always),
)
def same_random_numbers(run: Run) -> Iterator[Finding]:
    """All ranks, or all workers of a loader, draw the same random numbers.

    What it finds
        Generators of torch, numpy or Python's `random` that are in the same state on all ranks of a
        DDP group, and from which the training loop or the data set draws in each step. Workers of a
        loader that begin with the same state. Losses that are bitwise equal on all ranks, while the
        loop draws its batches.

    Why it is bad
        N ranks see the same augmentations, noise, masks or simulated samples: there is less
        variety than it seems. If the batches are the same, N ranks do the work of one.

    How to fix it
        Seed the model's initial weights as you like. Then add the rank to the seed of generators
        for the data, and seed workers with `torch.initial_seed()`, which differs between them.

    Example
        Wrong: `torch.manual_seed(0)`, then `noise = torch.randn_like(batch)` in the loop
        Right: `torch.manual_seed(seed + rank)` after the model was built

    When it stays silent
        For draws within the model's forward if anything there is called dropout, for few numbers in
        the loop (a size, the order of an epoch), for numbers drawn on a GPU, if the loss is
        reduced, and for a batch that never changes. It is information if a data set draws a few
        numbers for each batch that are equal on all ranks, but not in all workers of a rank, and if
        `ddpdoctor parity` sees dropout masks that are the same on all ranks.
    """
    found = next((alike for look in (_workers, _ranks, _losses) for alike in look(run)), None)
    if found is None:
        return
    at, evidence = _seed_line(run, found)
    yield Finding(
        code="DDP601",
        about="random numbers",
        severity=Severity.INFO if found.mild else Severity.WARNING,
        message=found.what + (f", seeded alike at {at}" if at is not None and evidence else ""),
        ranks=found.ranks,
        location=at or found.at,
        evidence=(found.evidence, *evidence),
        fix="Seed it from (torch.initial_seed() + 1000 * rank) % 2**32."
        if found.worker
        else "After the model is built, seed what draws for the data with the rank added: "
        "torch.manual_seed(seed + dist.get_rank()).",
    )


# -- evidence


def _workers(run: Run) -> Iterator[_Alike]:
    """Yield data sets whose workers draw the same numbers on all ranks."""
    records = [each for each in run.strays.of(RandomRecord) if each.restart == run.restarts[-1]]
    for group in groups_of(run):
        numbers = tuple(rank.rank for rank in group)
        mine = [each for each in records if each.rank in numbers and each.worker is not None]
        for dataset in dict.fromkeys(each.dataset for each in mine):
            written = [each for each in mine if each.dataset == dataset]
            for library in _NAMES:
                found = _alike_workers(written, library, numbers)
                if found is not None:
                    yield found


def _alike_workers(
    written: Sequence[RandomRecord], library: str, ranks: tuple[int, ...]
) -> _Alike | None:
    begins: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
    many = True
    for record in written:
        states = [each for each in record.states if each.name == library]
        if len(states) < 2 or any(_drawn(*pair) < 1 for pair in pairwise(states)):
            # The data set does not draw, for example because an evaluation does not augment it.
            continue
        many = many and all(_drawn(*pair) >= BLOCK_DRAWS for pair in pairwise(states))
        key = record.worker or 0, record.generation
        begins.setdefault(key, {})[record.rank] = states[0].block, states[0].used
    watched = [each for each in begins.values() if set(each) >= set(ranks[:8])]
    if not watched or any(len(set(each.values())) > 1 for each in watched):
        return None
    firsts = Counter(next(iter(each.values())) for each in watched)
    constant = len(watched) > 1 and len(firsts) == 1
    whom = "every worker of every rank draws" if constant else "the workers of all ranks draw"
    return _Alike(
        ranks,
        library,
        f"{whom} the same random numbers from {_NAMES[library]} for {written[0].dataset}",
        f"{len(watched) * len(ranks[:8])} workers of {len(ranks[:8])} ranks began with "
        f"{len(firsts)} state{'' if len(firsts) == 1 else 's'} of the generator, "
        "and drew for each batch",
        mild=not constant and not many,
        worker=True,
    )


def _drawn(before: GeneratorState, after: GeneratorState) -> int:
    """Return the minimum number of draws between two states."""
    if before.block == after.block:
        return after.used - before.used
    # The block was replaced at least once. With few draws, that would not occur in every step.
    return BLOCK_DRAWS


def _ranks(run: Run) -> Iterator[_Alike]:
    """Yield generators from which all ranks of a group draw in the same states."""
    for group in groups_of(run):
        records = [rank.records.first(RandomRecord) for rank in group]
        known = [each for each in records if each is not None]
        if len(known) < len(group):
            continue
        for library in _NAMES:
            each = [[one for one in record.states if one.name == library] for record in known]
            if not each[0] or any(states != each[0] for states in each):
                continue
            drops = any(record.drops for record in known)
            found = _alike_ranks(run, group, library, each[0], drops)
            if found is not None:
                yield found


def _alike_ranks(
    run: Run, group: Sequence[Rank], library: str, states: list[GeneratorState], drops: bool
) -> _Alike | None:
    data: list[int] = []
    loop: list[int] = []
    forward: list[int] = []
    for before, after in pairwise(states):
        if after.place == "batch":
            data.append(_drawn(before, after))
        elif before.place == "forward":
            forward.append(_drawn(before, after))
        elif after.place == "forward":
            loop.append(_drawn(before, after))
    if drops or mentions(run, "drop"):
        # Dropout masks are equal in many jobs that seed once.
        forward = []
    found = (
        ("the data set draws", data, BLOCK_DRAWS),
        ("the training loop draws", loop, BLOCK_DRAWS),
        ("the model draws", forward, BLOCK_DRAWS),
        ("the data set draws", data, MIN_DRAWS),
    )
    for who, drawn, enough in found:
        steps = sum(count >= enough for count in drawn)
        if steps >= MIN_STEPS and steps >= len(drawn) - 1:
            return _Alike(
                tuple(rank.rank for rank in group),
                library,
                f"{who} the same random numbers from {_NAMES[library]} on all ranks",
                f"the generator had the same state on {len(group)} ranks at {len(states)} "
                f"moments, and {steps} steps in a row drew from it",
                mild=enough == MIN_DRAWS,
                at=group[0].site("forward"),
            )
    return None


def _losses(run: Run) -> Iterator[_Alike]:
    """Yield ranks with equal losses whose loop draws random numbers."""
    found = equal_losses(run)
    loop = loop_of(found.at) if found is not None else None
    if found is not None and loop is not None and loop[1]:
        yield _Alike(
            found.ranks,
            "",
            "every rank draws the same batches from its random numbers",
            f"the loss was bitwise equal on {len(found.ranks)} ranks in {found.steps} of "
            f"{found.steps} steps",
            at=loop[0],
        )


# -- the line that seeds


def _seed_line(run: Run, found: _Alike) -> tuple[Location | None, tuple[str, ...]]:
    """Return the most likely line of the cause, and the lines that seed all ranks equally."""
    functions = worker_functions(run)
    fits = [
        (min(fit, 1) if each.passed else 2 * fit, each)
        for each in seeds_of(run)
        if (fit := _fits(each, found, each.function in functions))
    ]
    best = max((fit for fit, _ in fits), default=0)
    lines = [each for fit, each in fits if fit == best]
    texts = tuple(f"seeded at {each.location}: {each.text}" for each in lines[:3])
    return (lines[0].location if lines else None), texts


def _fits(seed: Seed, found: _Alike, in_worker: bool) -> int:
    """Rate how well a seed, perhaps of a ``worker_init_fn``, explains equal numbers. 0 if not."""
    if not found.library:
        return 3 if seed.own else int(not in_worker)
    if in_worker:
        return 3 if found.worker and seed.library in (found.library, "") else 0
    # By default the rank's torch generator seeds the generators of its workers.
    wanted = "torch" if found.worker else found.library
    return 0 if seed.own else 2 if seed.library == wanted else int(not seed.library)
