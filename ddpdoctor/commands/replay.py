"""``ddpdoctor replay``: compute a kept step of a rank again, in one process."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpdoctor.core import options
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import count, named, shown
from ddpdoctor.core.opening import ForeignError
from ddpdoctor.core.options import Parser, Value
from ddpdoctor.replay import devices, steps
from ddpdoctor.replay.losses import NotFollowedError, total_loss
from ddpdoctor.run import rundir
from ddpdoctor.run.capsule import ODD_LOSS, PARTIAL, Capsule, RefusedError, tensors_of
from ddpdoctor.run.names import capsule_file


def _devices(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not all(_DEVICE.fullmatch(each) for each in names):
        raise ValueError(text)
    return names


_DEVICE = re.compile(r"[a-z]{2,12}(:\d{1,3})?", re.ASCII)

PARSER = Parser(
    "replay",
    """\
Usage: ddpdoctor replay [OPTIONS] RUN|DIRECTORY

Compute the step that a rank kept (`ddpdoctor run --capsule`, or `ddpdoctor
parity --replay`) again: in one process, on the CPU, without the other ranks.
A directory with copies of capsule-*.pickle will do, on another machine, too.

Options:
  --rank N          The rank [default: the first that kept a step].
  --devices D,D,... Compute it twice on each of these devices, such as
                    cuda:0,cuda:1,cpu, and compare outputs and gradients.
  --trust           Read a file whatever it refers to: it may run any program.
  --pdb             Stop in pdb before the forward, and at an exception.
  -h, --help        Show this text.

It imports the modules of the job and runs the model's code, and reads only files
of your own account. A debugger's breakpoint() in the model stops here, too.

Exit status: 0; 1 if the forward raises an exception, its outputs are not
finite, or devices differ by more than rounding; 2 for bad input.
""",
    {"--rank": options.number(0, 1 << 17), "--devices": Value(_devices, "cuda:0,cuda:1")},
)


def main(words: Sequence[str]) -> int:
    """Compute the forwards of the step, and print their results."""
    given = PARSER.read(words)
    if len(given.rest) != 1:
        raise DoctorError("name one run directory", "such as: ddpdoctor replay RUN --rank 3")
    path = _file(_place(given.rest[0]), given.get("--rank"))
    # The job's modules may be there, on another machine.
    sys.path.append(os.getcwd())
    try:
        import torch
    except ImportError:
        raise DoctorError("replay needs torch", "run it in the job's environment") from None
    try:
        capsule = steps.load(str(path), torch, "--trust" in given)
    except ForeignError as error:
        raise DoctorError(f"{path} {error.strerror}", "only your own steps are run") from None
    except RefusedError as error:
        raise DoctorError(
            f"{path.name} refers to {error}, which models do not need: it is not read",
            "if you would run the job that wrote it, add --trust",
        ) from None
    except Exception as error:
        # Importing the job's classes may fail in any way.
        raise DoctorError(
            f"{path.name} cannot be read here: {type(error).__name__}: {error}",
            "run it in the job's environment and directory",
        ) from None
    print(shown(_head(capsule)))
    if "--devices" in given:
        return _on_devices(capsule, torch, given.get("--devices"))
    return _computed(capsule, torch, "--pdb" in given)


def _place(name: str) -> Path:
    """Return the directory of a run, or one with copies of files with steps."""
    copied = Path(name)
    return copied if any(copied.glob("capsule-*.pickle*")) else rundir.find(name)


def _on_devices(capsule: Capsule, torch: Any, names: Sequence[str]) -> int:
    """Compute the step on devices. Returns 1 if one computes wrongly."""
    for name in names:
        if why := devices.unusable(name, torch):
            raise DoctorError(f"{name} cannot be used here: {why}", "name others with --devices")
    try:
        every = [devices.compute(capsule, name, torch) for name in names]
    except Exception as error:
        traceback.print_exception(error)
        return 1
    lines, wrong = devices.report(capsule, every, torch)
    for line in lines:
        print(shown(f"  {line}"))
    if not any(each.gradients for each in capsule.forwards):
        print("  gradients: not computed, as the backward of the step was not kept")
    return int(wrong)


def _file(directory: Path, rank: int | None) -> Path:
    """Return the file of a rank, by default the first one."""
    kept = sorted(directory.glob("capsule-*.pickle"))
    wanted = directory / capsule_file(rank) if rank is not None else kept[0] if kept else None
    if wanted is not None and wanted in kept:
        return wanted
    partial = [int(each.name[8:12]) for each in directory.glob(f"capsule-[0-9]*.pickle{PARTIAL}")]
    if partial and (not kept or rank in partial):
        raise DoctorError(
            f"{named(partial)} ended while writing the step, and left a part of it",
            "with ddpdoctor run --grace SECONDS a job that is stopped has more time",
        )
    if not kept:
        raise DoctorError(
            f"{directory}: no rank kept a step there",
            "keep one with ddpdoctor run --capsule, or ddpdoctor parity --replay",
        )
    ranks = ", ".join(str(int(each.stem.rpartition("-")[2])) for each in kept)
    raise DoctorError(f"rank {rank} kept no step", f"there are steps of ranks {ranks}")


def _head(capsule: Capsule) -> str:
    why = f", which ended with {capsule.error}" if capsule.error else ""
    return (
        f"step {capsule.step} of rank {capsule.rank} of {capsule.world_size}{why}: "
        f"{type(capsule.module).__name__}, {count(len(capsule.forwards), 'forward')}"
    )


def _computed(capsule: Capsule, torch: Any, stop: bool) -> int:
    """Compute the forwards. Return 1 if one fails, or has outputs that are not finite."""
    steps.restore(capsule, torch)
    status = 0
    outputs = {}
    for number, each in enumerate(capsule.forwards):
        if stop:
            import pdb

            pdb.set_trace()
        try:
            output = steps.forward(capsule, each, torch)
        except Exception as error:
            traceback.print_exception(error)
            if stop:
                pdb.post_mortem(error.__traceback__)
            return 1
        outputs.update({(number, at): e for at, e in enumerate(tensors_of(output, torch))})
        for name, values in (("input", (each.args, each.kwargs)), ("output", output)):
            for place, tensor in enumerate(tensors_of(values, torch)):
                text, finite = _summary(tensor)
                status |= int(not finite)
                print(f"  forward {number} {name} {place}: {text}")
    if capsule.loss_calls is not None:
        try:
            loss = total_loss(capsule.loss_calls, outputs, torch)
            print(f"  loss: {loss.item():.6g}")
        except NotFollowedError as why:
            print(shown(f"  loss: not computed again: {why}"))
    elif capsule.error.startswith(ODD_LOSS) and not status:
        print("  the outputs are finite, the loss is not: look at its targets and its formula")
    return status


def _summary(tensor: Any) -> tuple[str, bool]:
    """Return the shape and range of a tensor, and whether it is finite."""
    text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if not tensor.numel():
        return text, True
    if not tensor.is_floating_point():
        return f"{text}, {tensor.min().item()} to {tensor.max().item()}", True
    bad = int((~tensor.isfinite()).sum())
    values = tensor.detach()[tensor.isfinite()] if bad else tensor.detach()
    span = f", {values.min().item():.4g} to {values.max().item():.4g}" if values.numel() else ""
    return f"{text}{span}" + (f", {bad} not finite" if bad else ""), not bad
