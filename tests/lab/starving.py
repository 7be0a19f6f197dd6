"""Give the commands of a host little CPU time, or stop and continue them all the time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.network import Host

PERIOD_S = 0.5  # Of stopping and continuing


@contextlib.contextmanager
def _group(host: Host, roots: list[str], file: str) -> Iterator[Path]:
    """A control group for what is started on a host, below the first root with such a file."""
    for root in roots:
        group = Path(root) / f"ddpdoctor-{os.getpid()}-{host.rank}"
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / file).exists():
                break
            group.rmdir()
    else:
        pytest.skip(f"no control group with {file} here")
    host.outside = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    try:
        yield group
    finally:
        host.outside = []
        members = group / "cgroup.procs"
        while members.read_text():
            for pid in members.read_text().split():
                with contextlib.suppress(OSError):
                    os.kill(int(pid), 9)
        group.rmdir()


@contextlib.contextmanager
def throttled(host: Host, share: float) -> Iterator[None]:
    """Give all that is started on a host this share of one core."""
    quota = int(share * 100_000)
    if Path("/sys/fs/cgroup/cpu").exists():
        with _group(host, ["/sys/fs/cgroup/cpu"], "cpu.cfs_quota_us") as group:
            (group / "cpu.cfs_quota_us").write_text(str(quota))
            yield
    else:
        with _group(host, ["/sys/fs/cgroup"], "cpu.max") as group:
            (group / "cpu.max").write_text(f"{quota} 100000")
            yield


@contextlib.contextmanager
def interrupted(host: Host, share: float) -> Iterator[None]:
    """Let all that is started on a host run for this share of the time, as in a paused machine."""
    over = threading.Event()
    with _group(host, ["/sys/fs/cgroup/freezer"], "freezer.state") as group:

        def switch() -> None:
            while not over.is_set():
                (group / "freezer.state").write_text("FROZEN")
                over.wait(PERIOD_S * (1 - share))
                (group / "freezer.state").write_text("THAWED")
                over.wait(PERIOD_S * share)

        switching = threading.Thread(target=switch)
        switching.start()
        try:
            yield
        finally:
            over.set()
            switching.join()
