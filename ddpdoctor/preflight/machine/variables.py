"""Variables that were set to debug something once, and slow down or break every job since."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, finding, judged
from ddpdoctor.preflight.situation import Situation, visible_gpus

OFF = frozenset({"", "0", "false", "off", "no"})


@dataclass(frozen=True)
class _Machine:
    gpus: int
    nodes: int
    infiniband: bool


@dataclass(frozen=True)
class _Leftover:
    """A variable, when it hurts, and what it does then."""

    name: str
    effect: str
    hurts: Callable[[str, _Machine], bool]
    severity: Severity = Severity.WARNING


def _is_on(value: str) -> bool:
    return value.strip().lower() not in OFF


_LEFTOVERS = (
    _Leftover(
        "TORCH_DISTRIBUTED_DEBUG",
        "DDP over gloo crashes with a segmentation fault in its constructor (torch 2.8 to 2.15)",
        lambda value, machine: value.upper() == "DETAIL" and not machine.gpus,
        Severity.ERROR,
    ),
    _Leftover(
        "TORCH_DISTRIBUTED_DEBUG",
        "every collective is preceded by another that compares the ranks, and DDP over gloo "
        "crashes",
        lambda value, machine: value.upper() == "DETAIL" and machine.gpus > 0,
    ),
    _Leftover(
        "CUDA_LAUNCH_BLOCKING",
        "every kernel waits for the one before, so that nothing overlaps",
        lambda value, machine: _is_on(value) and machine.gpus > 0,
    ),
    _Leftover(
        "NCCL_P2P_DISABLE",
        "the GPUs of this machine exchange gradients through host memory, not NVLink or PCIe",
        lambda value, machine: _is_on(value) and machine.gpus > 1,
    ),
    _Leftover(
        "NCCL_SHM_DISABLE",
        "ranks of this machine talk through the network",
        lambda value, machine: _is_on(value) and machine.gpus > 1,
    ),
    _Leftover(
        "NCCL_IB_DISABLE",
        "the nodes talk over TCP though there is InfiniBand",
        lambda value, machine: (
            _is_on(value) and machine.gpus > 0 and machine.infiniband and machine.nodes > 1
        ),
    ),
    _Leftover(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "a collective that fails or times out hangs for ever instead of ending the job",
        lambda value, machine: value.strip() == "0" and machine.gpus > 0,
    ),
    _Leftover(
        "NCCL_ASYNC_ERROR_HANDLING",
        "a collective that fails or times out hangs for ever instead of ending the job",
        lambda value, machine: value.strip() == "0" and machine.gpus > 0,
    ),
    _Leftover(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "every tensor is allocated by the driver, which is slow and synchronizes",
        lambda value, machine: _is_on(value) and machine.gpus > 0,
    ),
)


@check("variables", "DDP007")
def variables(situation: Situation) -> Outcome:
    """An environment variable meant for debugging slows down or breaks every job.

    What it finds
        TORCH_DISTRIBUTED_DEBUG=DETAIL, CUDA_LAUNCH_BLOCKING, NCCL_P2P_DISABLE, NCCL_SHM_DISABLE,
        NCCL_IB_DISABLE, NCCL_ASYNC_ERROR_HANDLING=0 or PYTORCH_NO_CUDA_MEMORY_CACHING, where it has
        an effect on this machine; in the environment, in ~/.nccl.conf or in /etc/nccl.conf.

    Why it is bad
        These variables often stay in a .bashrc or an image long after they were needed, and the job
        takes three times as long for no visible reason. With TORCH_DISTRIBUTED_DEBUG=DETAIL and
        gloo, DDP ends in a segmentation fault without a traceback.

    How to fix it
        Remove them. Set them for a single run when you need them.

    Example
        Wrong: `export NCCL_P2P_DISABLE=1` in .bashrc.
        Right: `NCCL_P2P_DISABLE=1 torchrun ...` for one test.

    When it stays silent
        Where the variable has no effect: NCCL's variables without GPUs or with one GPU,
        NCCL_IB_DISABLE without InfiniBand or on one node, CUDA_LAUNCH_BLOCKING without a GPU.
    """
    sources = {"the environment": situation.environ, **_files(situation)}
    machine = _Machine(
        situation.shared(visible_gpus),
        situation.options.nnodes,
        any(_listing(situation.sys / "class" / "infiniband")),
    )
    known = len({each.name for each in _LEFTOVERS})
    detail = f"none of {known} known ones is set where it hurts"
    findings = list(_findings(sources, machine))
    if findings:
        detail = ", ".join(finding.about for finding in findings)
    return judged(detail, findings)


def _findings(sources: Mapping[str, Mapping[str, str]], machine: _Machine) -> Iterator[Finding]:
    for each in _LEFTOVERS:
        for source, values in sources.items():
            value = values.get(each.name)
            if value is None or not each.hurts(value, machine):
                continue
            inside = source == "the environment"
            yield finding(
                each.severity,
                f"{each.name}={value} is set: {each.effect}",
                evidence=() if inside else (f"it stands in {source}",),
                fix="Remove it, from the shell's start files and the image as well."
                if inside
                else f"Remove the line from {source}.",
                paste=f"unset {each.name}" if inside else _without(each.name, source),
                about=each.name,
            )


def _without(name: str, source: str) -> str:
    """The line that takes a variable out of a file."""
    sudo = "sudo " if source.startswith("/etc/") else ""
    return f"{sudo}sed -i '/^ *{name} *=/d' {shlex.quote(source)}"


def _files(situation: Situation) -> dict[str, dict[str, str]]:
    """What NCCL reads from files, by path; the environment goes before them."""
    root = situation.proc.parent
    home = situation.environ.get("HOME", "")
    paths = [root / "etc" / "nccl.conf"]
    if home:
        paths.insert(0, Path(home) / ".nccl.conf")
    found: dict[str, dict[str, str]] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            rows = [row.strip() for row in path.read_text("utf-8", "replace").splitlines()]
            pairs = [row.partition("=") for row in rows if "=" in row and not row.startswith("#")]
            found[str(path)] = {
                name.strip(): value.strip()
                for name, _, value in pairs
                if name.strip() not in situation.environ
            }
    return found


def _listing(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return [each.name for each in folder.iterdir()]
    return []
