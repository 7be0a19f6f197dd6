"""Jobs that would leave processes behind, and what is left of them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.support.launching import wait_until

if TYPE_CHECKING:
    from tests.conftest import Doctor

TOKEN = "DDPDOCTOR_TEST_TOKEN"


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def processes(doctor: Doctor) -> list[psutil.Process]:
    """All live processes of the test's job, the supervisor and the guard among them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(TOKEN) == doctor.token and alive(process.pid):
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def described(left: list[psutil.Process]) -> list[str]:
    words = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            words.append(f"{process.pid}: {' '.join(process.cmdline())[-80:]}")
    return words


def assert_all_end(doctor: Doctor, *besides: int) -> None:
    wait_until(lambda: not processes(doctor), "the end of the job's processes")
    for pid in besides:
        assert not alive(pid)


def pid_in(path: Path) -> int:
    return int(path.read_text())


def name(process: psutil.Process) -> str:
    """As the kernel has it, to which psutil adds."""
    return Path(f"/proc/{process.pid}/comm").read_text()


def _words(process: psutil.Process) -> list[str]:
    """A process's command line; none if it has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
