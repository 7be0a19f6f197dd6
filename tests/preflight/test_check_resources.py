"""``ddpdoctor check``: cores, memory, limits, shared memory, the folder for checkpoints."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddpdoctor.preflight.check import Outcome, Status
from ddpdoctor.preflight.machine import own_address, resources
from ddpdoctor.preflight.situation import (
    Options,
    Situation,
    appears_when_started,
    bounded,
    container_cores,
    container_memory,
    container_pids,
)
from tests.conftest import LIMIT, Doctor
from tests.support.made_machine import Machine, messages


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# -- cores, memory, limits


def quota(machine: Machine, cores_allowed: float) -> None:
    machine.write("proc/self/cgroup", "0::/job/step\n")
    machine.write("sys/fs/cgroup/cgroup.controllers", "cpu memory pids\n")
    machine.write("sys/fs/cgroup/job/cpu.max", f"{int(cores_allowed * 100_000)} 100000\n")
    machine.write("sys/fs/cgroup/job/step/cpu.max", "max 100000\n")


def test_the_quota_of_a_container_counts(machine: Machine) -> None:
    quota(machine, 1.5)
    assert container_cores(machine.situation()) == 1.5
    eight = machine.situation(Options(nproc=8))
    outcome = resources.cores(eight)
    assert outcome.status is Status.WARN
    assert messages(outcome) == ["8 ranks will share 1.5 cores and wait for each other"]
    assert outcome.findings[0].paste == "ddpdoctor run --nproc-per-node 1 -- train.py"
    machine.write(".dockerenv", "")
    assert resources.cores(eight).findings[0].paste == "docker run --cpus=8 ..."
    slurm = machine.situation(Options(nproc=8), environ={"SLURM_JOB_ID": "1"})
    assert resources.cores(slurm).findings[0].paste == "#SBATCH --cpus-per-task=8"


def test_two_ranks_on_one_core_are_worth_a_word_alone(machine: Machine) -> None:
    quota(machine, 1)
    assert resources.cores(machine.situation(Options())).status is Status.PASS
    assert resources.cores(machine.situation(Options(nproc=2))).status is Status.WARN


def test_the_older_control_groups(machine: Machine) -> None:
    rows = "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n2:pids:/docker/abc\n0::/\n"
    machine.write("proc/self/cgroup", rows)
    # In a container the host's path does not exist, and the root is the container's own group.
    machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "200000\n")
    machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{1 << 30}\n")
    machine.write("sys/fs/cgroup/memory/memory.usage_in_bytes", f"{900 << 20}\n")
    machine.write("sys/fs/cgroup/memory/memory.stat", f"cache 5\ninactive_file {600 << 20}\n")
    machine.write("sys/fs/cgroup/pids/pids.max", "100\n")
    machine.write("sys/fs/cgroup/pids/pids.current", "40\n")
    situation = machine.situation()
    assert container_cores(situation) == 2.0
    assert container_memory(situation) == (300 << 20, 1 << 30)
    assert container_pids(situation) == (40, 100)


@pytest.mark.parametrize("text", ["max\n", f"{2**63 - 4096}\n", "", "junk\n"])
def test_no_limit_is_no_limit(machine: Machine, text: str) -> None:
    machine.write("proc/self/cgroup", "0::/\n4:memory:/\n")
    machine.write("sys/fs/cgroup/cgroup.controllers", "memory\n")
    machine.write("sys/fs/cgroup/memory.max", text)
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", text)
    assert container_memory(machine.situation()) is None


def test_threads_beyond_the_cores(machine: Machine) -> None:
    have = resources.available_cores(machine.situation())
    many = machine.situation(Options(nproc=1), environ={"OMP_NUM_THREADS": str(int(have * 4))})
    outcome = resources.cores(many)
    assert outcome.status is Status.WARN
    assert outcome.findings[0].paste == f"export OMP_NUM_THREADS={int(have)}"
    fair = machine.situation(Options(nproc=1), environ={"OMP_NUM_THREADS": str(int(have))})
    assert resources.cores(fair).status is Status.PASS


@pytest.mark.parametrize(
    ("available", "ranks", "gpus", "status"),
    [
        (8 << 20, 2, 0, Status.PASS),
        (500 << 10, 2, 0, Status.WARN),
        (200 << 10, 2, 0, Status.FAIL),
        (8 << 20, 8, 8, Status.WARN),
    ],
)
def test_memory_to_start_with(
    machine: Machine, available: int, ranks: int, gpus: int, status: Status
) -> None:
    text = f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {available} kB\n"
    machine.write("proc/meminfo", text)
    outcome = resources.memory(machine.situation(Options(nproc=ranks), gpus=gpus))
    assert outcome.status is status


def test_the_containers_memory(machine: Machine) -> None:
    text = f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n"
    machine.write("proc/meminfo", text)
    machine.write("proc/self/cgroup", "0::/\n")
    machine.write("sys/fs/cgroup/cgroup.controllers", "memory\n")
    machine.write("sys/fs/cgroup/memory.max", f"{256 << 20}\n")
    machine.write("sys/fs/cgroup/memory.current", f"{128 << 20}\n")
    machine.write(".dockerenv", "")
    (finding,) = resources.memory(machine.situation()).findings
    assert finding.message.startswith("128 MiB of memory are left by the container's limit")
    assert finding.paste == "docker run --memory 1g ..."


@pytest.mark.parametrize(
    ("files", "environ", "appears"),
    [
        ({}, {}, False),
        ({".dockerenv": "", "etc/resolv.conf": "nameserver 10.0.0.2\n"}, {}, False),
        ({".dockerenv": "", "etc/resolv.conf": "search a\nnameserver 127.0.0.11\n"}, {}, True),
        ({"etc/resolv.conf": "nameserver 127.0.0.11\n"}, {}, False),
        ({"run/.containerenv": ""}, {}, True),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, True),
    ],
)
def test_where_a_name_comes_with_its_container(
    machine: Machine, files: dict[str, str], environ: dict[str, str], appears: bool
) -> None:
    for path, text in files.items():
        machine.write(path, text)
    situation = machine.situation(environ=environ)
    assert appears_when_started(situation) is appears


def limited(limit: int, value: int) -> Callable[[], None]:
    def before() -> None:
        resource.setrlimit(limit, (value, value))

    return before


CHECK = (sys.executable, "-m", "ddpdoctor", "check", "--json", "--only")


@pytest.mark.parametrize(
    ("limit", "value", "words", "message"),
    [
        (resource.RLIMIT_NOFILE, 100, (), "a process may open 100 files, and a rank of 2 needs"),
        (resource.RLIMIT_NOFILE, 1024, ("--nproc-per-node", "512"), "a process may open 1024"),
        (resource.RLIMIT_FSIZE, 1 << 20, (), "a file may have 1 MiB: writing a larger checkpoint"),
        (resource.RLIMIT_AS, 4 << 30, (), "a process may have 4 GiB of address space"),
        (resource.RLIMIT_NOFILE, 1024, (), ""),
    ],
)
def test_limits_of_the_shell(
    doctor: Doctor, limit: int, value: int, words: tuple[str, ...], message: str
) -> None:
    done = subprocess.run(
        [*CHECK, "limits", *words],
        env=doctor.environment(),
        capture_output=True,
        text=True,
        preexec_fn=limited(limit, value),
        timeout=LIMIT,
    )
    (told,) = json.loads(done.stdout)["checks"]
    found = [finding["message"] for finding in told["findings"]]
    assert len(found) == (1 if message else 0)
    assert all(each.startswith(message) for each in found)
    assert done.returncode in ((1, 2) if message else (0,))


def test_the_threads_of_a_container(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/\n")
    machine.write("sys/fs/cgroup/cgroup.controllers", "pids\n")
    machine.write("sys/fs/cgroup/pids.max", "100\n")
    machine.write("sys/fs/cgroup/pids.current", "20\n")
    machine.write(".dockerenv", "")
    outcome = resources.limits(machine.situation(Options(nproc=8)))
    assert outcome.status is Status.FAIL
    assert outcome.findings[0].paste == "docker run --pids-limit -1 ..."
    assert resources.limits(machine.situation(Options(nproc=1))).status is Status.PASS


def test_locked_memory_matters_with_infiniband_alone(machine: Machine) -> None:
    here = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if here == resource.RLIM_INFINITY or here >= resources.MIN_LOCKED_MEMORY:
        pytest.skip("enough memory may be locked here")
    assert resources.limits(machine.situation()).status is Status.PASS
    (machine.root / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert resources.limits(machine.situation()).status is Status.WARN


def test_a_full_neighbour_table(machine: Machine) -> None:
    check = own_address.neighbour_table
    assert check(machine.situation()).status is Status.SKIPPED
    machine.write("proc/sys/net/ipv4/neigh/default/gc_thresh3", "1024\n")
    header = "entries  allocs\n"
    for entries, nodes, status in ((8, 1, "pass"), (1000, 1, "warn"), (8, 2000, "warn")):
        machine.write("proc/net/stat/arp_cache", f"{header}{entries:08x} 00\n{entries:08x} 00\n")
        outcome = check(machine.situation(Options(nproc=1, nnodes=nodes)))
        assert outcome.status.value == status
    assert "net.ipv4.neigh.default.gc_thresh3=8192" in outcome.findings[0].paste


# -- shared memory and the checkpoint folder, on real file systems


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts small file systems in memory."""
    if os.getuid() != 0:
        pytest.skip("mounting needs the superuser")
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"tmpfs{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no mount here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def at(
    machine: Machine, shm: Path, ranks: int = 2, environ: dict[str, str] | None = None
) -> Situation:
    from dataclasses import replace

    return replace(machine.situation(Options(nproc=ranks), environ=environ), shm=shm)


def test_the_shared_memory_of_a_container(machine: Machine, tmpfs: Callable[[str], Path]) -> None:
    small = tmpfs("size=64m")
    machine.write(".dockerenv", "")
    (finding,) = resources.shared_memory(at(machine, small)).findings
    assert finding.message.endswith("has 64 MiB for 2 ranks: too small for DataLoader workers "
                                    "and NCCL")  # fmt: skip
    assert finding.paste == "docker run --shm-size=8g ..."
    pod = at(machine, small, environ={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert "emptyDir" in resources.shared_memory(pod).findings[0].paste


def test_shared_memory_that_a_dead_job_filled(
    machine: Machine, tmpfs: Callable[[str], Path]
) -> None:
    folder = tmpfs("size=256m")
    assert resources.shared_memory(at(machine, folder)).status is Status.PASS
    (folder / "nccl-Xa81Jc").write_bytes(bytes(200 << 20))
    (finding,) = resources.shared_memory(at(machine, folder)).findings
    assert "nearly full: 56 MiB of 256 MiB free" in finding.message
    assert finding.evidence == (f"200 MiB in {folder}/nccl-Xa81Jc, of user {os.getuid()}",)


def test_shared_memory_that_cannot_be_written(
    machine: Machine, tmpfs: Callable[[str], Path]
) -> None:
    outcome = resources.shared_memory(at(machine, tmpfs("size=256m,ro")))
    assert outcome.status is Status.FAIL
    assert resources.shared_memory(at(machine, Path("/nowhere"))).status is Status.SKIPPED


def folder_check(folder: Path) -> Outcome:
    options = Options(nproc=2, checkpoint_dir=folder)
    return resources.checkpoint_dir(Situation(options, environ={}))


def test_a_checkpoint_folder_that_works_is_left_as_it_was(tmp_path: Path) -> None:
    outcome = folder_check(tmp_path)
    if shutil.disk_usage(tmp_path).free > resources.MIN_CHECKPOINT_SPACE:
        assert outcome.status is Status.PASS
    assert outcome.detail.startswith("wrote, synchronized and renamed 1 MiB; ")
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_folders_that_do_not_work(tmp_path: Path, tmpfs: Callable[[str], Path]) -> None:
    full = tmpfs("size=512k")
    for folder, said in (
        (tmp_path / "none", "it does not exist"),
        (tmpfs("ro"), "it is mounted read-only"),
        (full, "its file system is full"),
        (Path("/proc"), "no file can be made there"),
    ):
        outcome = folder_check(folder)
        assert outcome.status is Status.FAIL
        assert messages(outcome) == [f"checkpoints cannot be written to {folder}: {said}"]
    assert list(full.iterdir()) == []
    assert folder_check(tmpfs("size=64m")).status is Status.WARN


def test_a_call_that_never_comes_back_is_left_behind(tmp_path: Path) -> None:
    """A named pipe blocks whoever opens it, as a dead file server does."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(TimeoutError):
        bounded(lambda: os.close(os.open(pipe, os.O_RDONLY)), 0.2)
    # Let the thread that was left behind go.
    os.close(os.open(pipe, os.O_WRONLY))
    with pytest.raises(FileNotFoundError):
        bounded(lambda: os.open(tmp_path / "none", os.O_RDONLY), 5)
    assert bounded(lambda: 7, 5) == 7


def test_an_error_has_a_word_for_people() -> None:
    assert resources._error_words(OSError(errno.EDQUOT, "x")) == "this user's quota is used up"
    assert (
        resources._error_words(OSError(errno.EIO, os.strerror(errno.EIO))) == "Input/output error"
    )
