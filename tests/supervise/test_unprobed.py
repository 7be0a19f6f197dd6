"""``ddpdoctor attach PID`` and ``stacks PID``: jobs that run without ddpdoctor."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run import rundir
from ddpdoctor.run.names import MARK
from ddpdoctor.stacks.capture import find_py_spy
from ddpdoctor.supervise import unprobed
from ddpdoctor.supervise.unprobed import Job, Look
from ddpdoctor.system.proc import last_ran
from tests.conftest import LIMIT, Doctor
from tests.support.flight_files import entry, write

pytestmark = pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed")

LONG = 3.0
"""Seconds that stand for the half minute after which a standstill counts as a hang."""

SETUP = """\
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def step():
    model(torch.randn(8, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def load_extra():
    time.sleep(3600)


def save():
    with open(os.environ["FIFO"], "wb") as file:
        torch.save(model.state_dict(), file)


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
ones = torch.ones(4)
"""


@contextlib.contextmanager
def started(words: Sequence[str], **environ: str) -> Iterator[int]:
    """A command with all its descendants, none of which is of ddpdoctor."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DDPDOCTOR")}
    process = subprocess.Popen(
        words,
        env={**clean, "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process.pid
    finally:
        tree = psutil.Process(process.pid)
        for each in (*tree.children(recursive=True), tree):
            with contextlib.suppress(psutil.Error):
                each.kill()
        process.wait()


@pytest.fixture
def torchrun(tmp_path: Path) -> Callable[[str], contextlib.AbstractContextManager[int]]:
    def start(body: str) -> contextlib.AbstractContextManager[int]:
        script = tmp_path / "train.py"
        script.write_text(SETUP + textwrap.dedent(body))
        os.mkfifo(tmp_path / "fifo")
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words += ["--nproc-per-node", "2", str(script)]
        return started(words, FIFO=str(tmp_path / "fifo"))

    return start


def seen(pid: int, good: Callable[[Look], object], ranks: int = 2, watched: float = 1.0) -> Look:
    """What is seen of a job, once it is as expected."""
    deadline = time.monotonic() + LIMIT
    while True:
        job = unprobed.find(pid)
        look = unprobed.look(job, watched)
        if len(job.ranks) == ranks and good(look):
            return look
        assert time.monotonic() < deadline, [*unprobed.lines(look), *unprobed.remarks(look)]


# -- which processes are the ranks

SLEEPS = "import time; print(flush=True); time.sleep(3600)"
STARTS = (
    "import subprocess as s, sys; s.call([sys.executable, '-c', 'import time; time.sleep(3600)'])"
)


def wait_for_ranks(pid: int, ranks: int) -> Job:
    deadline = time.monotonic() + LIMIT
    while True:
        assert time.monotonic() < deadline
        with contextlib.suppress(DoctorError):
            job = unprobed.find(pid)
            if len(job.ranks) == ranks:
                return job


def test_ranks_are_found_from_the_launcher_a_rank_or_a_process_of_a_rank(tmp_path: Path) -> None:
    launcher = tmp_path / "launcher.sh"
    port = str(os.getpid())
    launcher.write_text(
        f"export WORLD_SIZE=4 MASTER_PORT={port}\n"
        f"RANK=2 '{sys.executable}' -c \"{STARTS}\" &\n"
        f'RANK=0 sh -c \'"{sys.executable}" -c "{SLEEPS}"; true\' &\nwait\n'
    )
    with started(["sh", str(launcher)]) as pid:
        job = wait_for_ranks(pid, 2)
        assert list(job.ranks) == [0, 2] and job.world_size == 4
        # The shell around rank 0 has its number, too, and so has what rank 2 starts.
        assert all("-c" in each.words for each in job.ranks.values())
        assert str(pid) in job.name
        for each in (*job.ranks.values(),):
            assert {rank: p.pid for rank, p in unprobed.find(each.pid).ranks.items()} == {
                rank: p.pid for rank, p in job.ranks.items()
            }
        deadline = time.monotonic() + LIMIT
        while not (below := psutil.Process(job.ranks[2].pid).children()):
            assert time.monotonic() < deadline
        assert unprobed.find(below[0].pid).ranks == job.ranks
        # There may be a newer one.
        newest = unprobed.find(None)
        assert newest.ranks and MARK not in newest.environ


def test_what_is_no_rank_is_refused() -> None:
    with started(["sleep", "3600"]) as pid, pytest.raises(DoctorError, match="is no rank of a job"):
        unprobed.find(pid)
    with pytest.raises(DoctorError, match="there is no process"):
        unprobed.find(pid)


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        (rundir.base_directory() / "20260101-1", "20260101-1"),
        ("/job/my runs", "'/job/my runs'"),
    ],
)
def test_a_process_of_a_run_is_left_to_its_commands(directory: object, name: str) -> None:
    environ = {
        "RANK": "0", "WORLD_SIZE": "1", "DDPDOCTOR_RUN_ID": "1795857764-f32c",
        "DDPDOCTOR_RUN_DIR": str(directory),
    }  # fmt: skip
    with started([sys.executable, "-c", SLEEPS], **environ) as pid:
        refused: DoctorError | None = None
        deadline = time.monotonic() + LIMIT
        # Until the program has been loaded, nothing is known of it.
        while refused is None or "of the run" not in refused.message:
            assert time.monotonic() < deadline
            try:
                unprobed.find(pid)
            except DoctorError as error:
                refused = error
        assert refused.hint == f"ddpdoctor stacks {name}"


def test_the_kernel_says_when_a_process_ran_last() -> None:
    if last_ran(os.getpid()) is None:
        pytest.skip("this kernel does not say")
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        began = time.monotonic()
        while (ago := last_ran(process.pid) or 0.0) < 0.2:
            assert time.monotonic() - began < LIMIT
        assert ago < time.monotonic() - began + 5
        process.kill()


def test_files_of_flight_recorders_say_more_than_the_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unprobed, "MIN_SILENCE", 0.1)
    launcher = tmp_path / "launcher.sh"
    launcher.write_text(
        f"export WORLD_SIZE=2 MASTER_PORT={os.getpid()}\n"
        f"RANK=1 '{sys.executable}' -c \"{SLEEPS}\" &\n"
        f"RANK=0 '{sys.executable}' -c \"{SLEEPS}\" &\nwait\n"
    )
    folder = tmp_path / "dumps"
    folder.mkdir()
    prefix = str(write(folder, 0, []))[:-1]
    with started(["sh", str(launcher)], TORCH_FR_DUMP_TEMP_FILE=prefix) as pid:
        job = wait_for_ranks(pid, 2)
        older = unprobed.look(job, 0.1)
        assert older.dumps is not None
        os.utime(f"{prefix}0", (1, 1))
        # Of an earlier job.
        assert unprobed.look(job, 0.1).dumps is None
        write(folder, 0, [entry(1, line=7), entry(2, line=9, done=False)])
        write(folder, 1, [entry(1, line=7)])
        deadline = time.monotonic() + LIMIT
        # A verdict needs whole seconds of standstill.
        while not (look := unprobed.look(job, 0.1)).stood:
            assert time.monotonic() < deadline
        (finding,) = look.findings
        assert (finding.code, finding.ranks) == ("DDP802", (1,)), finding
        assert any("left files" in line for line in unprobed.remarks(look))


@pytest.mark.parametrize("idle", [False, True])
def test_training_in_another_thread_is_no_hang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, idle: bool
) -> None:
    monkeypatch.setattr(unprobed, "MIN_SILENCE", 0.1)
    script = tmp_path / "train.py"
    work = "time.sleep(3600)" if idle else "sum(range(10**5)); time.sleep(0.01)"
    script.write_text(
        f"import threading, time\n\ndef train():\n    while True:\n        {work}\n\n"
        "thread = threading.Thread(target=train)\nthread.start()\nthread.join()\n"
    )
    with started([sys.executable, str(script)], RANK="0", WORLD_SIZE="1") as pid:
        job = wait_for_ranks(pid, 1)
        deadline = time.monotonic() + LIMIT
        # Until the main thread waits for the other one.
        while not (look := unprobed.look(job, 0.3)).stood or look.moving:
            assert time.monotonic() < deadline
        assert [each.code for each in look.findings] == (["DDP814"] if idle else [])


@pytest.mark.slow
@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="it takes root to give up ptrace"
)
def test_where_ptrace_is_refused_it_says_what_to_do(doctor: Doctor) -> None:
    without = ["setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"]
    with started([sys.executable, "-c", SLEEPS], RANK="0", WORLD_SIZE="1") as pid:
        wait_for_ranks(pid, 1)
        command = [*without, sys.executable, "-m", "ddpdoctor", "attach", "--for", "0.1", str(pid)]
        shown = subprocess.run(command, capture_output=True, text=True, env=doctor.environment())
    if "may not look" not in shown.stdout:
        pytest.skip("it is permitted here all the same")
    assert shown.returncode == 0 and "Traceback" not in shown.stderr
    assert "sudo sysctl kernel.yama.ptrace_scope=0" in shown.stdout
    assert "no verdict" not in shown.stdout and "DDP" not in shown.stdout


# -- jobs that hang, and one that does not


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "code", "ranks", "says"),
    [
        (
            "for number in range(10**6):\n    if rank == 1 and number == 9:\n        load_extra()\n"
            "    step()\n",
            "DDP802",
            (1,),
            "never joined backward's all-reduce, where rank 0 waits",
        ),
        (
            "step()\nif rank == 0:\n    save()\ndist.barrier()\n",
            "DDP802",
            (0,),
            "never joined barrier, where rank 1 waits in `dist.barrier()`",
        ),
        (
            "if rank == 0:\n    dist.barrier()\nelse:\n    dist.all_reduce(ones)\n",
            "DDP803",
            (0, 1),
            "rank 0 in barrier at `dist.barrier()`",
        ),
        (
            "while True:\n    step()\n    if rank == 0:\n        dist.all_reduce(ones)\n",
            "DDP401",
            (0,),
            "rank 0 alone called all_reduce at `dist.all_reduce(ones)`",
        ),
        (
            "pair = dist.new_group([0, 1])\nif rank == 0:\n    dist.all_reduce(ones, group=pair)\n"
            "dist.all_reduce(ones)\nif rank == 1:\n    dist.all_reduce(ones, group=pair)\n",
            "DDP814",
            (0, 1),
            "the job has made no progress",
        ),
        (
            "if rank == 0:\n    while not os.path.exists('/nowhere'):\n        time.sleep(0.1)\n"
            "work = dist.all_reduce(ones, async_op=True)\nwork.wait()\n",
            "DDP802",
            (0,),
            "where rank 1 waits in `work.wait()`",
        ),
    ],
    ids=["sleeps", "saves", "mismatch", "guarded", "order", "polls"],
)
def test_a_hang_is_explained_from_outside(
    torchrun: Callable[[str], contextlib.AbstractContextManager[int]],
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    code: str,
    ranks: tuple[int, ...],
    says: str,
) -> None:
    monkeypatch.setattr(unprobed, "MIN_SILENCE", LONG)
    with torchrun(body) as pid:
        # On a busy machine rank 1 may be in the last lines of init_process_group for seconds.
        look = seen(pid, lambda look: look.findings and all(r.joined for r in look.still.ranks))
        (finding,) = look.findings
        assert (finding.code, finding.ranks) == (code, ranks), finding
        assert says in finding.message
        assert finding.location is not None and finding.location.path.endswith("train.py")
        assert not look.moving
        assert any("not known" in line for line in unprobed.remarks(look))


@pytest.mark.slow
def test_a_rank_that_never_comes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(unprobed, "MIN_SILENCE", LONG)
    script = tmp_path / "late.py"
    late = "import os, time\nif os.environ['RANK'] == '1':\n    time.sleep(3600)\n"
    script.write_text(late + SETUP)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with started([*words, "--nproc-per-node", "2", str(script)]) as pid:
        look = seen(pid, lambda look: look.findings)
        (finding,) = look.findings
        assert (finding.code, finding.ranks) == ("DDP802", (1,))
        assert "has not come to init_process_group" in finding.message


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.3])
def test_of_a_healthy_job_nothing_is_found(
    torchrun: Callable[[str], contextlib.AbstractContextManager[int]],
    monkeypatch: pytest.MonkeyPatch,
    pause: float,
) -> None:
    monkeypatch.setattr(unprobed, "MIN_SILENCE", LONG)
    with torchrun(f"while True:\n    step()\n    time.sleep({pause} * rank)\n") as pid:
        look = seen(pid, lambda look: look.still.ranks[0].joined and 0 in look.moving, watched=LONG)
        assert look.findings == []
        told = [*unprobed.lines(look), *unprobed.remarks(look)]
        assert any("no hang is seen" in line for line in told), told


@pytest.mark.slow
def test_spawned_ranks_are_found_in_the_order_of_their_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unprobed, "MIN_SILENCE", LONG)
    script = tmp_path / "spawn.py"
    script.write_text(
        textwrap.dedent(
            """\
            import time, sys
            import torch, torch.distributed as dist, torch.multiprocessing as mp

            def worker(rank, world):
                dist.init_process_group(
                    "gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world
                )
                if rank == 1:
                    time.sleep(3600)
                dist.all_reduce(torch.ones(3))

            if __name__ == "__main__":
                mp.spawn(worker, args=(2,), nprocs=2)
            """
        )
    )
    with started([sys.executable, str(script), str(tmp_path / "store")]) as pid:
        look = seen(pid, lambda look: look.findings and look.still.ranks[0].joined)
        (finding,) = look.findings
        assert (finding.code, finding.ranks) == ("DDP802", (1,)), finding
        from_a_rank = unprobed.find(look.job.ranks[1].pid)
        assert {each.pid for each in from_a_rank.ranks.values()} == {
            each.pid for each in look.job.ranks.values()
        }


@pytest.mark.slow
def test_the_commands_show_it(
    doctor: Doctor, torchrun: Callable[[str], contextlib.AbstractContextManager[int]]
) -> None:
    with torchrun("if rank == 1:\n    load_extra()\ndist.barrier()\n") as pid:
        seen(pid, lambda look: look.waits)
        shown = doctor.cli("attach", "--for", "1", str(pid))
        assert shown.status == 0, shown.stderr
        assert "train.py (pid" in shown.stdout and "2 ranks, watched for" in shown.stdout
        assert "rank 0 waits in barrier for rank 1" in shown.stdout
        assert "load_extra" in shown.stdout and "time.sleep(3600)" in shown.stdout
        merged = doctor.cli("stacks", str(pid))
        assert merged.status == 0 and "2 ranks at 2 different places" in merged.stdout
        assert "2 ranks at 2" not in doctor.cli("stacks", "--rank", "1", str(pid)).stdout
        assert doctor.cli("stacks", "--rank", "5", str(pid)).status == 2
        assert doctor.cli("attach", "--for", "1").status == 2
        assert "names another" in doctor.cli("attach", "--job", str(pid)).stderr
