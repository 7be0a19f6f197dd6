"""Variables that were set to debug something once, and slow down or break every job since."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from typing import NamedTuple

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, finding, judged, note, typed
from ddpdoctor.preflight.situation import Situation, names, text, visible_gpus

OFF = frozenset({"", "0", "false", "off", "no"})


class _Leftover(NamedTuple):
    """A variable, what it does, and where that hurts.

    Attributes:
        gpus: Of how many GPUs on the machine, at least and at most.
        value: The one that hurts; empty for any that turns it on.
        fabric: Whether it hurts between nodes with InfiniBand alone.
    """

    name: str
    effect: str
    gpus: tuple[float, float] = (1, inf)
    value: str = ""
    fabric: bool = False
    severity: Severity = Severity.WARNING

    def _is_on(self, value: str) -> bool:
        value = value.strip()
        return value.upper() == self.value if self.value else value.lower() not in OFF

    def elsewhere(self, value: str, situation: Situation) -> bool:
        """Whether it would hurt on a machine with GPUs, and this one has none."""
        return self.gpus[1] > 0 and self._is_on(value) and not situation.shared(visible_gpus)

    def hurts(self, value: str, situation: Situation) -> bool:
        """Whether a value of it slows down or breaks jobs on this machine."""
        on = self._is_on(value)
        fabric = situation.options.nnodes > 1 and names(situation.sys / "class" / "infiniband")
        least, most = self.gpus
        return (
            on
            and least <= situation.shared(visible_gpus) <= most
            and bool(fabric or not self.fabric)
        )


_HANGS = "a collective that fails or times out hangs forever instead of ending the job"

_LEFTOVERS = (
    _Leftover(
        "TORCH_DISTRIBUTED_DEBUG",
        "DDP over gloo crashes with a segmentation fault in its constructor (torch 2.8 to 2.15)",
        (0, 0),
        "DETAIL",
        severity=Severity.ERROR,
    ),
    _Leftover(
        "TORCH_DISTRIBUTED_DEBUG",
        "every collective is preceded by another that compares the ranks, and DDP over gloo "
        "crashes",
        value="DETAIL",
    ),
    _Leftover(
        "CUDA_LAUNCH_BLOCKING", "every kernel waits for the one before, so that nothing overlaps"
    ),
    _Leftover(
        "NCCL_P2P_DISABLE",
        "the GPUs of this machine exchange gradients through host memory, not NVLink or PCIe",
        (2, inf),
    ),
    _Leftover(
        "NCCL_SHM_DISABLE", "ranks of this machine communicate through the network", (2, inf)
    ),
    _Leftover(
        "NCCL_IB_DISABLE", "the nodes communicate over TCP though there is InfiniBand", fabric=True
    ),
    _Leftover("TORCH_NCCL_ASYNC_ERROR_HANDLING", _HANGS, value="0"),
    _Leftover("NCCL_ASYNC_ERROR_HANDLING", _HANGS, value="0"),
    _Leftover(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "every tensor is allocated by the driver, which is slow and synchronizes",
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
        Where the variable has no effect: NCCL's variables with one GPU, NCCL_IB_DISABLE without
        InfiniBand or on one node. Without GPUs it is information.
    """
    sources = {"the environment": situation.environ, **_files(situation)}
    known = len({each.name for each in _LEFTOVERS})
    findings = list(_findings(situation, sources))
    about = ", ".join(each.about for each in findings if each.severity > Severity.INFO)
    return judged(about or f"none of {known} known ones is set where it hurts", findings)


def _findings(situation: Situation, sources: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    for each in _LEFTOVERS:
        for source, values in sources.items():
            value = values.get(each.name)
            if value is not None and each.elsewhere(value, situation):
                yield note(
                    f"{each.name}={value} is set; where there are GPUs, {each.effect}",
                    evidence=(f"it is set in {source}",),
                    about=each.name,
                )
            if value is None or not each.hurts(value, situation):
                continue
            inside = source == "the environment"
            yield finding(
                each.severity,
                f"{each.name}={value} is set: {each.effect}",
                evidence=() if inside else (f"it is set in {source}",),
                fix="Remove it, from the shell's start files and the image as well."
                if inside
                else f"Remove the line from {source}.",
                paste=typed("unset {}", each.name) if inside else _without(each.name, source),
                about=each.name,
            )


def _without(name: str, source: str) -> str:
    """The line that takes a variable out of a file."""
    sudo = "sudo " if source.startswith("/etc/") else ""
    return typed(f"{sudo}sed -i {{}} {{}}", f"/^ *{name} *=/d", source)


def _files(situation: Situation) -> dict[str, dict[str, str]]:
    """What NCCL reads from files, by path; the environment takes precedence."""
    home = situation.environ.get("HOME", "")
    paths = [situation.proc.parent / "etc" / "nccl.conf"]
    if home:
        paths.insert(0, Path(home) / ".nccl.conf")
    found: dict[str, dict[str, str]] = {}
    for path in paths:
        rows = (row.strip() for row in text(path).splitlines())
        pairs = (row.partition("=") for row in rows if "=" in row and not row.startswith("#"))
        values = {name.strip(): value.strip() for name, _, value in pairs}
        found[str(path)] = {
            name: value for name, value in values.items() if name not in situation.environ
        }
    return found
