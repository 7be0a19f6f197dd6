"""Nothing of a job is left, whatever is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.conftest import LIMIT

if TYPE_CHECKING:
    from tests.conftest import Doctor, Live
from tests.support.launching import PYTHON, wait_for_rounds, wait_until
from tests.support.left_behind import (
    _words,
    alive,
    assert_all_end,
    name,
    pid_in,
    processes,
)

pytestmark = pytest.mark.usefixtures("bystanders")

STUCK = '''
"""Two ranks in a group, each with DataLoader workers that sleep in user code and ignore SIGTERM."""

import os, signal, sys, time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

STUBBORN_RANK = "stubborn" in sys.argv
ATTEMPT = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def write(name: str) -> None:
    with open(f"{name}.tmp", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{name}.tmp", name)


class Stuck(Dataset):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if ATTEMPT == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            write(f"worker-{self.rank}")
            time.sleep(3600)
        return torch.zeros(1)


# A store of its own for each attempt: over torchrun's, a restarted gloo job of torch 2.13 hangs now
# and then, with and without ddpdoctor.
rank = int(os.environ["RANK"])
dist.init_process_group(
    "gloo",
    init_method=f"file://{os.getcwd()}/store.{ATTEMPT}",
    rank=rank,
    world_size=int(os.environ["WORLD_SIZE"]),
)
dist.barrier()
if STUBBORN_RANK:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "helper" in sys.argv:
    import subprocess
    subprocess.Popen(["sleep", "3600"], start_new_session=True)
write(f"rank-{rank}.{ATTEMPT}")
for batch in DataLoader(Stuck(rank), batch_size=1, num_workers=1):
    pass
until = time.monotonic() + 300
while not os.path.exists("go") and time.monotonic() < until:
    time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()
'''


def is_keeper(process: psutil.Process, form: str = "keep") -> bool:
    words = _words(process)
    return form in words and any(word.endswith("supervise/keeper.py") for word in words)


def keepers_of(live: Live) -> list[psutil.Process]:
    """Both keepers of a job, the one above first."""
    below = psutil.Process(live.process.pid).children(recursive=True)
    found = [process for process in below if is_keeper(process)]
    assert len(found) == 2
    assert found[1].ppid() == found[0].pid
    return found


def standby_of(live: Live) -> psutil.Process | None:
    for child in psutil.Process(live.process.pid).children():
        if is_keeper(child, "standby"):
            return child
    return None


def torchrun_of(live: Live) -> psutil.Process:
    for child in keepers_of(live)[1].children():
        if any(os.path.basename(word) == "torchrun" for word in child.cmdline()):
            return child
    raise AssertionError("no torchrun")


def kill_together(*processes: psutil.Process) -> None:
    """So that none of them has the time to notice the end of another."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def start_stuck(doctor: Doctor, *words: str, options: tuple[str, ...] = ()) -> Live:
    """Two ranks, each stuck in its first batch."""
    doctor.write("stuck.py", STUCK)
    live = doctor.start("--grace", "2", "--nproc-per-node", "2", *options, "stuck.py", *words)
    names = [doctor.directory / name for name in ("worker-0", "worker-1", "rank-0.0", "rank-1.0")]

    def there() -> bool:
        assert live.process.poll() is None, live.err.read_text()
        return all(name.exists() for name in names)

    wait_until(there, "two ranks with workers", 300)
    live.wait_for(lambda run: len(run.ranks) == 2, 300)
    return live


# -- each process killed alone


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), id="plain", marks=pytest.mark.slow),
        pytest.param(("stubborn", "helper"), id="stubborn"),
    ],
)
def test_kill_the_supervisor(words: tuple[str, ...], doctor: Doctor) -> None:
    live = start_stuck(doctor, *words)
    live.process.kill()
    live.process.wait()
    assert_all_end(doctor)


@pytest.mark.slow
def test_kill_torchrun(doctor: Doctor) -> None:
    live = start_stuck(doctor, "stubborn", "helper")
    torchrun_of(live).kill()
    assert_all_end(doctor)
    assert live.finish().status == -signal.SIGKILL


@pytest.mark.slow
def test_kill_a_rank(doctor: Doctor) -> None:
    live = start_stuck(doctor, "helper")
    os.kill(pid_in(doctor.directory / "rank-1.0"), signal.SIGKILL)
    assert live.finish().status == 1
    assert processes(doctor) == []


@pytest.mark.slow
def test_kill_a_worker(doctor: Doctor) -> None:
    live = start_stuck(doctor)
    os.kill(pid_in(doctor.directory / "worker-1"), signal.SIGKILL)
    assert live.finish().status == 1
    assert processes(doctor) == []


@pytest.mark.slow
def test_the_job_outlives_its_keepers_and_not_the_supervisor(doctor: Doctor) -> None:
    live = start_stuck(doctor, "stubborn", "helper")
    for keeper in keepers_of(live):
        keeper.kill()
    wait_until(lambda: standby_of(live) is not None, "a standby")
    for _ in range(2):
        first = standby_of(live)
        assert first is not None
        first.kill()
        wait_until(lambda old=first: standby_of(live) not in (None, old), "a new one")  # type: ignore[misc]
    assert live.process.poll() is None
    assert alive(pid_in(doctor.directory / "rank-0.0"))
    last = standby_of(live)
    assert last is not None
    wait_for_rounds(last.pid, 1.0, 2)  # it looks every half second what there is
    live.process.kill()
    live.process.wait()
    assert_all_end(doctor)


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)], ids=["above", "below", "both"])
def test_the_status_comes_through_without_keepers(which: tuple[int, ...], doctor: Doctor) -> None:
    live = doctor.start("--", "bash", "-c", "touch there; read line; exit 15", stdin=-1)
    wait_until((doctor.directory / "there").exists, "the job")
    keepers = keepers_of(live)
    kill_together(*(keepers[number] for number in which))
    time.sleep(0.5)
    live.process.communicate(b"\n", timeout=LIMIT)
    assert live.process.returncode == 15


DAEMON = """
import os, signal, sys, time
if os.fork() or os.setsid() is None and os.fork():
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.execve("/bin/sh", ["sh", "-c", "trap '' TERM; echo $$ > daemon; while :; do sleep 1; done"], {})
"""
"""Two forks, a session of its own, an empty environment, and deaf to SIGTERM."""


@pytest.mark.parametrize(
    "which",
    [(), pytest.param((0,), marks=pytest.mark.slow), (1,)],
    ids=["alone", "with keeper 1", "with keeper 2"],
)
def test_kill_the_supervisor_of_a_job_with_a_daemon(which: tuple[int, ...], doctor: Doctor) -> None:
    doctor.write("daemon.py", DAEMON)
    live = doctor.start("--", "bash", "-c", f"{PYTHON} daemon.py; sleep 3600 & sleep 3600; true")
    daemon = doctor.directory / "daemon"
    wait_until(lambda: daemon.exists() and bool(daemon.read_text().strip()), "the daemon")
    pid = pid_in(daemon)
    keepers = keepers_of(live)
    try:
        kill_together(psutil.Process(live.process.pid), *(keepers[number] for number in which))
        live.process.wait()
        assert_all_end(doctor)
        wait_until(lambda: not alive(pid), "the daemon's end", 3)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("how", ["-f", pytest.param("name", marks=pytest.mark.slow)])
def test_all_that_are_called_so_are_killed(how: str, doctor: Doctor) -> None:
    # As `pkill -9 -f train.py` and `killall -9 python` do it.
    doctor.write("daemon.py", DAEMON)
    doctor.write("train.py", "import time; time.sleep(3600)")
    command = f"{PYTHON} daemon.py; setsid sleep 3600 & {PYTHON} train.py; true"
    live = doctor.start("--", "bash", "-c", command)
    daemon = doctor.directory / "daemon"
    wait_until(lambda: daemon.exists() and bool(daemon.read_text().strip()), "the daemon")
    pid = pid_in(daemon)
    below = psutil.Process(live.process.pid).children(recursive=True)
    kill_together(
        psutil.Process(live.process.pid),
        *(
            process
            for process in below
            if (
                "train.py" in " ".join(_words(process))
                if how == "-f"
                else "python" in name(process)
            )
        ),
    )
    live.process.wait()
    try:
        assert_all_end(doctor)
        wait_until(lambda: not alive(pid), "the daemon's end", 3)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_the_whole_process_group_is_killed(doctor: Doctor) -> None:
    # As a harness does it, or `timeout --signal=KILL`.
    live = start_stuck(doctor, "stubborn", "helper")
    os.killpg(live.process.pid, signal.SIGKILL)
    live.process.wait()
    assert_all_end(doctor)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.slow
def test_kill_supervisor_and_a_keeper(which: int, doctor: Doctor) -> None:
    live = start_stuck(doctor, "stubborn", "helper")
    kill_together(psutil.Process(live.process.pid), keepers_of(live)[which])
    live.process.wait()
    assert_all_end(doctor)


@pytest.mark.slow
def test_kill_a_keeper_while_it_ends_the_job(doctor: Doctor) -> None:
    live = start_stuck(doctor, "stubborn", "helper")
    below = keepers_of(live)[1]
    live.process.kill()
    live.process.wait()
    time.sleep(1.0)
    below.kill()
    assert_all_end(doctor)


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("stubborn", "helper")])
@pytest.mark.parametrize("torchrun", [True, False])
def test_kill_everything_but_the_ranks(
    words: tuple[str, ...], torchrun: bool, doctor: Doctor
) -> None:
    live = start_stuck(doctor, *words)
    doomed = [psutil.Process(live.process.pid), *keepers_of(live)]
    kill_together(*doomed, *([torchrun_of(live)] if torchrun else []))
    live.process.wait()
    assert_all_end(doctor)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_asked_to_stop(number: signal.Signals, doctor: Doctor) -> None:
    live = start_stuck(doctor, "stubborn", "helper")
    live.process.send_signal(number)
    assert live.finish().status != 0
    assert processes(doctor) == []


@pytest.mark.slow
def test_the_supervisor_is_killed_in_the_grace_period(doctor: Doctor) -> None:
    live = start_stuck(doctor, "stubborn", "helper")
    live.process.send_signal(signal.SIGTERM)
    live.wait_for(lambda run: run.stopped_at is not None)
    live.process.kill()
    live.process.wait()
    assert_all_end(doctor)


# -- while the job goes on


@pytest.mark.slow
@pytest.mark.parametrize("when", [pytest.param("later", marks=pytest.mark.slow), "at once"])
def test_workers_of_a_killed_rank_are_gone_while_the_restarted_job_goes_on(
    when: str, doctor: Doctor
) -> None:
    live = start_stuck(doctor, options=("--max-restarts", "1"))
    if when == "later":
        wait_for_rounds(live.process.pid, 1.2, 6)  # the supervisor looks every half second
    workers = [pid_in(doctor.directory / f"worker-{rank}") for rank in (0, 1)]
    os.kill(pid_in(doctor.directory / "rank-1.0"), signal.SIGKILL)
    again = [doctor.directory / f"rank-{rank}.1" for rank in (0, 1)]
    try:
        wait_until(lambda: not any(map(alive, workers)), "the workers' end")
        wait_until(lambda: all(path.exists() for path in again), "the second attempt")
        assert live.process.poll() is None
        assert all(alive(pid_in(path)) for path in again)
    finally:
        doctor.write("go", "")
    live.finish().check_success()


@pytest.mark.slow
def test_a_rank_that_no_torchrun_started_leaves_no_workers(doctor: Doctor) -> None:
    # The shell that started the rank goes on.
    doctor.write("stuck.py", STUCK)
    environment = {"RANK": "0", "WORLD_SIZE": "1"}
    live = doctor.start(
        "--", "bash", "-c", f"{PYTHON} stuck.py; read line; exit 14", env=environment, stdin=-1
    )
    worker = doctor.directory / "worker-0"
    wait_until(worker.exists, "a worker")
    live.wait_for(lambda run: len(run.ranks) == 1)
    pid = pid_in(worker)
    # The supervisor notes a rank's children every second.
    wait_for_rounds(live.process.pid, 2.2, 6)
    os.kill(pid_in(doctor.directory / "rank-0.0"), signal.SIGKILL)
    wait_until(lambda: not alive(pid), "the worker's end")
    assert live.process.poll() is None
    live.process.communicate(b"\n", timeout=LIMIT)
    assert live.process.returncode == 14
