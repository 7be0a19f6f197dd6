"""Failures of real jobs: the rank, the line, and what is only a consequence."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
from ddpdoctor.core.finding import Finding
from ddpdoctor.run.records.process import ErrorRecord
from ddpdoctor.run.records.supervisor import FindingRecord
from ddpdoctor.run.status import Phase
from tests.conftest import LIMIT, Doctor, Result
from tests.support.finding_jobs import TRAIN, TWO, findings


def line_of(mark: str) -> int:
    """The line of train.py that is marked as guilty of something."""
    for number, line in enumerate(Path(TRAIN).read_text().splitlines(), 1):
        if f"# guilty: {mark}" in line:
            return number
    raise AssertionError(mark)


def only(result: Result, code: str) -> Finding:
    """The one finding that was printed; the directory says the same afterwards."""
    again = findings(result)
    assert [finding.code for finding in again] == [code], result.stderr
    assert result.codes == [code], result.stderr
    return again[0]


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("exception", "DDP901", "ValueError: the wrong sort of batch"),
        pytest.param("segv", "DDP904", "SIGSEGV", marks=pytest.mark.slow),
        pytest.param("os-exit", "DDP905", "os._exit(7)", marks=pytest.mark.slow),
        pytest.param("sys-exit", "DDP905", "sys.exit(4)", marks=pytest.mark.slow),
    ],
)
def test_first_failure_names_rank_and_line(doctor: Doctor, how: str, code: str, says: str) -> None:
    result = doctor.run(*TWO, TRAIN, "--fail", how, "--at", "3")
    assert result.status == 1
    finding = only(result, code)
    assert finding.ranks == (1,)
    assert says in finding.message
    assert finding.location is not None
    assert Path(finding.location.path).name == "train.py"
    assert finding.location.line == line_of(how)
    assert any("as a consequence" in line for line in finding.evidence)


@pytest.mark.slow
def test_sigkill_says_rank_step_and_last_line(doctor: Doctor) -> None:
    result = doctor.run(*TWO, TRAIN, "--fail", "sigkill", "--at", "3")
    finding = only(result, "DDP902")
    assert finding.ranks == (1,)
    assert "SIGKILL in step 3" in finding.message
    assert any("train.py:" in line for line in finding.evidence)


@pytest.mark.slow
def test_rank_that_leaves_early_is_named_not_its_victim(doctor: Doctor) -> None:
    result = doctor.run(*TWO, TRAIN, "--fail", "leave", "--at", "4")
    assert result.status == 1
    finding = only(result, "DDP403")
    assert finding.ranks == (1,)
    assert "rank 1 alone left the training loop in step 4" in finding.message
    assert finding.location is not None
    assert finding.location.line == line_of("leave")


@pytest.mark.slow
def test_leaving_early_by_sys_exit_names_the_call(doctor: Doctor) -> None:
    script = doctor.write(
        "leave.py",
        """
        import sys
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo")
        ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
        for step in range(6):
            if step == 3 and dist.get_rank() == 0:
                sys.exit(0)
            ddp(torch.ones(2, 4)).sum().backward()
        """,
    )
    result = doctor.run(*TWO, str(script))
    finding = only(result, "DDP801")
    assert finding.ranks == (0,)
    assert finding.location is not None
    assert finding.location.line == 9


@pytest.mark.slow
def test_earlier_victim_output_does_not_hide_the_cause(doctor: Doctor) -> None:
    """Rank 1 dies of its own error only after rank 0 has given up waiting for it."""
    script = doctor.write(
        "late.py",
        """
        import datetime, time
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")  # its timeout is for ranks that start late
        group = dist.new_group(timeout=datetime.timedelta(seconds=2))
        if dist.get_rank() == 1:
            time.sleep(120)
            raise OSError("the disk is on fire")
        dist.all_reduce(torch.ones(1), group=group)
        """,
    )
    result = doctor.run(*TWO, str(script))
    # torchrun stops rank 1 as soon as rank 0 has failed. Its own work outlasted the timeout.
    finding = only(result, "DDP802")
    assert finding.ranks == (1,)
    assert "timeout" in finding.message


def test_failure_before_the_process_group(doctor: Doctor) -> None:
    script = doctor.write("early.py", "import os\nif os.environ['RANK'] == '1':\n    1 / 0\n")
    result = doctor.run(*TWO, str(script))
    finding = only(result, "DDP901")
    assert finding.ranks == (1,)
    assert "ZeroDivisionError" in finding.message
    assert "before it joined the process group" in finding.message


@pytest.mark.slow
def test_worker_exception_names_the_line_in_the_dataset(doctor: Doctor) -> None:
    script = doctor.write(
        "worker.py",
        """
        import torch, torch.distributed as dist
        from torch.utils.data import DataLoader, Dataset
        class Broken(Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                raise KeyError("no such label")
        dist.init_process_group("gloo")
        for batch in DataLoader(Broken(), num_workers=1):
            pass
        """,
    )
    finding = only(doctor.run("--nproc-per-node", "1", str(script)), "DDP901")
    assert finding.location is not None
    assert finding.location.line == 8


@pytest.mark.slow
def test_mp_spawn_exception(doctor: Doctor) -> None:
    script = doctor.write(
        "spawned.py",
        """
        import sys
        import torch.distributed as dist, torch.multiprocessing as mp
        def main(rank, port):
            dist.init_process_group(
                "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
            )
            if rank == 1:
                raise RuntimeError("spawned and broken")
            dist.barrier()
        if __name__ == "__main__":
            import socket
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            mp.spawn(main, (port,), nprocs=2)
        """,
    )
    finding = only(doctor.run("--", sys.executable, str(script)), "DDP901")
    assert finding.ranks == (1,)
    assert "spawned and broken" in finding.message


@pytest.mark.slow
@pytest.mark.parametrize("leaves", ["sys.exit(0)", "raise SystemExit"])
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_leaving_early_within_mp_spawn_names_the_line(
    doctor: Doctor, leaves: str, method: str
) -> None:
    """multiprocessing catches it, and ends the process by another exit."""
    script = doctor.write(
        "left.py",
        f"""
        import datetime, sys
        import torch, torch.distributed as dist, torch.multiprocessing as mp
        from torch.nn.parallel import DistributedDataParallel
        def main(rank, port):
            dist.init_process_group(
                "gloo", init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=2,
                timeout=datetime.timedelta(seconds=60),
            )
            ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
            for step in range(6):
                if step == 3 and rank == 0:
                    {leaves}
                ddp(torch.ones(2, 4)).sum().backward()
        if __name__ == "__main__":
            import socket
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            mp.start_processes(main, (port,), nprocs=2, start_method="{method}")
        """,
    )
    finding = only(doctor.run("--", sys.executable, str(script)), "DDP801")
    assert finding.ranks == (0,)
    assert finding.location is not None
    assert finding.location.line == 13


@pytest.mark.slow
def test_restarted_attempt_is_a_warning(doctor: Doctor) -> None:
    script = doctor.write(
        "again.py",
        """
        import os
        import torch, torch.distributed as dist
        # A second process group straight after the first one's failure fails half of the time in
        # torch 2.13, with bare torchrun, too; so the second attempt goes without.
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            dist.init_process_group("gloo")
            if dist.get_rank() == 1:
                raise ValueError("only at first")
            dist.all_reduce(torch.ones(1))
        """,
    )
    # The code alone shows that a rank may leave before the collective (DDP401).
    options = ("--max-restarts", "1", "--strict", "--no-lint")
    result = doctor.run(*TWO, *options, str(script))
    assert result.status == 0, result.stderr
    finding = next(each for each in findings(result) if each.code == "DDP901")
    assert finding.severity.label == "warning"
    assert finding.message.startswith("attempt 1: rank 1 raised ValueError: only at first")
    # If it was an error before the next attempt began, that is withdrawn.
    assert result.codes.count("DDP901") - len(result.withdrawn) == 1
    recorded = result.run.supervisor.of(FindingRecord)
    assert {each.restart for each in recorded if each.code == "DDP901"} == {0}


@pytest.mark.slow
def test_finding_is_on_screen_soon_after_the_failure(doctor: Doctor) -> None:
    """The other rank hangs (it ignores SIGTERM), so torchrun goes on for half a minute.

    How soon is measured in `benchmarks/faults.py`.
    """
    script = doctor.write(
        "hang.py",
        """
        import signal, time
        import torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            raise ValueError("seen at once")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
        """,
    )
    live = doctor.start(*TWO, "--grace", "1", str(script))
    live.wait_for(lambda run: any(list(rank.records.of(ErrorRecord)) for rank in run.ranks))
    while "DDP901" not in live.err.read_text():
        assert live.process.poll() is None, live.err.read_text()
        time.sleep(0.05)
    live.process.terminate()
    live.finish()


@pytest.mark.slow
def test_json_and_strict(doctor: Doctor) -> None:
    out = doctor.directory / "found.jsonl"
    result = doctor.run(*TWO, "--json", str(out), TRAIN, "--fail", "exception")
    *records, end = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["code"] for record in records] == ["DDP901"]
    assert set(records[0]) == {
        "format", "time", "run", "step", "id",
        "code", "severity", "message", "ranks", "location", "evidence", "fix", "restart",
    }  # fmt: skip
    assert (end["event"], end["exit_status"], end["findings"]["error"]) == ("end", 1, 1)
    assert records[0]["ranks"] == [1]
    assert records[0]["location"]["line"] == line_of("exception")
    assert result.status == 1, "the job's own failure counts before --strict"


@pytest.mark.slow
def test_strict_fails_a_job_that_hides_its_failure(doctor: Doctor) -> None:
    words = ("--", "bash", "-c")
    hidden = f"{sys.executable} -m torch.distributed.run {' '.join(TWO)} {TRAIN} --fail exception"
    assert doctor.run(*words, f"{hidden}; exit 0").status == 0
    result = doctor.run("--strict", *words, f"{hidden}; exit 0")
    assert result.status == 3
    assert result.codes == ["DDP901"]


@pytest.mark.slow
def test_live_run_shows_the_phase(doctor: Doctor) -> None:
    live = doctor.start(*TWO, "--grace", "1", TRAIN, "--fail", "stuck", "--at", "2")
    run = live.wait_for(
        lambda run: (
            len(run.ranks) == 2
            and all(
                rank.status is not None
                and rank.status.step >= 2
                and rank.status.since < run.taken - 1e9
                for rank in run.ranks
            )
        )
    )
    waiting = run.ranks[0].status
    assert waiting is not None
    assert waiting.phase is Phase.WAIT
    assert waiting.collective == "DDP's broadcast of buffers"
    assert waiting.site.split(":")[0].endswith("train.py")
    live.process.terminate()
    live.finish()


MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def memory_limit(token: str) -> Iterator[Path]:
    """A memory cgroup of 1.2 GB that a shell can put itself into."""
    cgroup, limit = MEMORY_CGROUPS / token, "memory.limit_in_bytes"
    if not MEMORY_CGROUPS.is_dir():
        cgroup, limit = Path("/sys/fs/cgroup") / token, "memory.max"
    try:
        cgroup.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a memory cgroup here: {error}")
    try:
        (cgroup / limit).write_text("1200M")
        (cgroup / "cgroup.procs").stat()
        yield cgroup
    except OSError as error:
        pytest.skip(f"cannot limit memory here: {error}")
    finally:
        deadline = time.monotonic() + LIMIT
        while (cgroup / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        cgroup.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 3], ids=["at-once", "later"])
def test_out_of_memory_killer(doctor: Doctor, memory_limit: Path, delay: int) -> None:
    script = doctor.write(
        "hog.py",
        f"""
        import time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            time.sleep({delay})
            hog = []
            while True:
                hog.append(torch.ones(1 << 23))
        dist.barrier()
        """,
    )
    # Straight into the cgroup, then the command a person would type.
    words = [sys.executable, "-m", "ddpdoctor", "run", *TWO, str(script)]
    line = f"echo $$ > {memory_limit}/cgroup.procs && exec {' '.join(words)}"
    result = doctor.run("bash", "-c", line, watch=False)
    assert result.codes == ["DDP903"], result.stderr
    assert "rank 1 was" in result.ours
