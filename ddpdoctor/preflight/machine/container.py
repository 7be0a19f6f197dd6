"""The container around this process: its kind, and what its control groups allow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from ddpdoctor.preflight.situation import Situation, text

DOCKERS_RESOLVER = "127.0.0.11"
"""The name server of Docker's own networks. Containers in the host's network have the host's."""

Kind = Literal["", "docker", "podman", "kubernetes"]


def kind(situation: Situation) -> Kind:
    """Return the kind of container around this process; empty if none is known."""
    root = situation.proc.parent
    if "KUBERNETES_SERVICE_HOST" in situation.environ:
        return "kubernetes"
    if (root / "run" / ".containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    return ""


def appears_when_started(situation: Situation) -> bool:
    """Return whether other nodes' names and addresses may appear only when they start."""
    inside = kind(situation)
    if inside != "docker":
        return bool(inside)
    lines = text(situation.proc.parent / "etc" / "resolv.conf").splitlines()
    return any(line.split() == ["nameserver", DOCKERS_RESOLVER] for line in lines)


def run_line(situation: Situation, option: str) -> str:
    """Return the line that starts this container with an option; empty if it is of another kind."""
    inside = kind(situation)
    return f"{inside} run {option} ..." if inside in ("docker", "podman") else ""


_UNLIMITED = 1 << 60  # Version 1 of control groups shows "no limit" as a number near 2**63


def _folders(situation: Situation, controller: str) -> Iterator[Path]:
    """Yield the directories of a controller, from this process's own group up to the root.

    In a container the paths of /proc/self/cgroup are often the host's and do not exist. Then the
    root of the mount is the container's own group.
    """
    root = situation.sys / "fs" / "cgroup"
    for row in text(situation.proc / "self" / "cgroup").splitlines():
        _, _, rest = row.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mount = root if (root / "cgroup.controllers").exists() else root / "unified"
        elif controller in controllers.split(","):
            mount = root / controllers if (root / controllers).is_dir() else root / controller
        else:
            continue
        folder = mount / path.strip("/")
        while True:
            if folder.is_dir():
                yield folder
            if folder in (mount, folder.parent):
                break
            folder = folder.parent


def _number(path: Path) -> int | None:
    """Read the number in a file; None if there is none, or it means "no limit"."""
    digits = text(path)
    return int(digits) if digits.isdigit() and int(digits) < _UNLIMITED else None


def memory(situation: Situation) -> tuple[int, int] | None:
    """Return the bytes used and allowed of the tightest group; None if none has a limit."""
    found = []
    for folder in _folders(situation, "memory"):
        for most, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _number(folder / most)
            if limit is None:
                continue
            # The kernel gives page cache back when memory is short.
            rows = (row.partition(" ") for row in text(folder / "memory.stat").splitlines())
            cache = ("inactive_file", "active_file")
            free = sum(int(value) for name, _, value in rows if name in cache and value.isdigit())
            found.append((max(0, (_number(folder / used) or 0) - free), limit))
    return min(found, key=lambda each: each[1] - each[0], default=None)


def cores(situation: Situation) -> float | None:
    """Return how many cores the groups allow; None if there is no limit."""
    found = []
    for folder in _folders(situation, "cpu"):
        quota, _, period = text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            found.append(int(quota) / int(period))
        quota_us = _number(folder / "cpu.cfs_quota_us")
        period_us = _number(folder / "cpu.cfs_period_us")
        if quota_us and period_us:
            found.append(quota_us / period_us)
    return min(found, default=None)


def pids(situation: Situation) -> tuple[int, int] | None:
    """Return the processes and threads now and at most of the tightest group, if there is one."""
    found = []
    for folder in _folders(situation, "pids"):
        most, now = _number(folder / "pids.max"), _number(folder / "pids.current")
        if most is not None:
            found.append((now or 0, most))
    return min(found, key=lambda each: each[1] - each[0], default=None)
