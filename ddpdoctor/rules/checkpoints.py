"""Checkpoints (DDP5xx): who writes them, and what is in them."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator

from ddpdoctor.finding import Finding, Location, Severity, rule
from ddpdoctor.record import Record, integer
from ddpdoctor.run import Rank, Run

_REFUSED = re.compile(r"Error\(s\) in loading state_dict for (\w+)")
_MISSING = re.compile(r"Missing key\(s\) in state_dict: \"([^\"]+)\"")
_UNEXPECTED = re.compile(r"Unexpected key\(s\) in state_dict: \"([^\"]+)\"")
_PREFIX = "module."


def _location(record: Record) -> Location | None:
    return Location(str(record["path"]), integer(record, "line")) if record.get("path") else None


@rule("DDP501", "save-on-every-rank", Severity.WARNING)
def save_on_every_rank(run: Run) -> Iterator[Finding]:
    """Several ranks write the same checkpoint file.

    What it finds
        The same path, on the same machine, given to `torch.save` by more than one rank.

    Why it is bad
        The writes run into each other. A reader, or a job that is stopped meanwhile, finds a file
        that is no checkpoint: 2 of 30 loads failed in a test of two ranks.

    How to fix it
        Save on rank 0 alone, to a temporary name that is renamed afterwards, with a barrier before
        anybody reads it. Where each rank has a state of its own, put the rank into the name.

    Example
        Wrong: `torch.save(model.module.state_dict(), "last.pt")` on every rank.
        Right: `if dist.get_rank() == 0: torch.save(model.module.state_dict(), "last.pt")`.

    When it stays silent
        For paths with the rank in them, buffers in memory, and the same name on other machines.

    Since
        0.1.0
    """
    writers: dict[tuple[str, str], list[tuple[Rank, Record]]] = defaultdict(list)
    for rank in run.last:
        for record in rank.of_kind("save"):
            writers[str(rank.opened.get("host")), str(record["file"])].append((rank, record))
    guilty: dict[object, list[tuple[str, list[tuple[Rank, Record]]]]] = defaultdict(list)
    for (_, file), found in writers.items():
        if len({rank.rank for rank, _ in found}) > 1:
            _, first = min(found, key=lambda each: integer(each[1], "time"))
            guilty[_location(first)].append((file, found))
    for place, files in guilty.items():
        assert place is None or isinstance(place, Location)
        ranks = tuple(sorted({rank.rank for _, found in files for rank, _ in found}))
        name = os.path.basename(files[0][0])
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        yield Finding(
            code="DDP501",
            severity=Severity.WARNING,
            message=f"{len(ranks)} ranks write the same checkpoint, {name}{more}",
            ranks=ranks,
            location=place,
            evidence=tuple(_wrote(file, found) for file, found in files[:3]),
            fix="Save on rank 0 alone (`if dist.get_rank() == 0:`), then a barrier before anybody "
            "reads it; or put the rank into the file's name.",
            about=str(place),
        )


def _wrote(file: str, found: list[tuple[Rank, Record]]) -> str:
    parts = [f"rank {rank.rank} in step {integer(record, 'step')}" for rank, record in found[:4]]
    return f"{file} was written by {', '.join(parts)}"


@rule("DDP502", "save-wrapped-state", Severity.INFO)
def save_wrapped_state(run: Run) -> Iterator[Finding]:
    """The wrapper's state was saved instead of the model's.

    What it finds
        A checkpoint whose parameter names all begin with `module.`, a pickled model, or a job that
        failed because such names did not fit what they were loaded into.

    Why it is bad
        The names fit only a model wrapped in DDP again: a single process, or an inference script,
        fails with "Missing key(s) in state_dict". A pickled model needs the same source tree.

    How to fix it
        Save `model.module.state_dict()`, and load it before the wrap.

    Example
        Wrong: `torch.save(model.state_dict(), path)` with `model = DDP(net)`.
        Right: `torch.save(model.module.state_dict(), path)`.

    When it stays silent
        When the keys are the model's own, and when only the bare model is saved.

    Since
        0.1.0
    """
    for rank in run.last:
        for record in rank.of_kind("error"):
            finding = _refused(rank, record)
            if finding is not None and run.exit_status:
                yield finding
                return
    for rank in run.last:
        for record in rank.of_kind("save"):
            if record.get("content") not in ("wrapped", "module"):
                continue
            pickled = record["content"] == "module"
            what = "a whole model, pickled" if pickled else 'the wrapper\'s "module." names'
            yield Finding(
                code="DDP502",
                severity=Severity.INFO,
                message=f"the checkpoint {os.path.basename(str(record['file']))} holds {what}",
                ranks=(rank.rank,),
                location=_location(record),
                evidence=(f"{record['file']} was written by rank {rank.rank}",),
                fix="Save `model.module.state_dict()`, which loads with and without DDP.",
                about=f"{record.get('path')}:{record.get('line')}",
            )


def _refused(rank: Rank, record: Record) -> Finding | None:
    """The finding for a load that failed on the prefix, if that is why it failed."""
    message = str(record.get("message", ""))
    loading = _REFUSED.search(message)
    missing, unexpected = _MISSING.search(message), _UNEXPECTED.search(message)
    if loading is None or missing is None or unexpected is None:
        return None
    wanted, given = missing[1], unexpected[1]
    if given == _PREFIX + wanted:
        fix = "The checkpoint came from a DDP wrapper: load it into the wrapper, or strip "
        fix += 'the prefix ({k.removeprefix("module."): v for k, v in state.items()}).'
    elif wanted == _PREFIX + given:
        fix = "The checkpoint came from a bare model: load it into `model.module`, or before the "
        fix += "wrap."
    else:
        return None
    return Finding(
        code="DDP502",
        severity=Severity.ERROR,
        message=f"rank {rank.rank} could not load a checkpoint: its names differ from the model's "
        "by the wrapper's prefix",
        ranks=(rank.rank,),
        location=_location(record),
        evidence=(f'the model has "{wanted}", the checkpoint "{given}"',),
        fix=fix,
        about="load",
    )
