"""``ddpdoctor check`` on the machine itself: made-up /proc and /sys, real limits, real folders."""

from __future__ import annotations

import errno
import json
import os
import pty
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path

import psutil
import pytest

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.preflight import arguments
from ddpdoctor.preflight.check import Outcome, Status
from ddpdoctor.preflight.deadline import bounded
from ddpdoctor.preflight.machine import (
    cgroups,
    checkpoints,
    container,
    cores,
    launch_environment,
    limits,
    memory,
    neighbours,
    orphans,
    script,
    shared_memory,
    variables,
)
from ddpdoctor.preflight.situation import Once, Options, Situation, gpu_facts
from ddpdoctor.supervise.torchrun_options import read_options, torchrun_source
from ddpdoctor.system.gpu.health import GpuFacts, Health
from tests.conftest import LIMIT, Doctor
from tests.test_check_gpus import device


class Machine:
    """A machine whose /proc, /sys and /dev/shm are folders of the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("proc/self", "sys", "shm"):
            (root / name).mkdir(parents=True)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def situation(
        self,
        options: Options | None = None,
        gpus: int = 0,
        environ: dict[str, str] | None = None,
    ) -> Situation:
        once = Once()
        once.put(gpu_facts, GpuFacts(gpus=tuple(Health(device(each)) for each in range(gpus))))
        root = self.root
        return Situation(
            options or Options(nproc=2), environ=environ or {}, hostname="node1",
            proc=root / "proc", sys=root / "sys", shm=root / "shm", once=once,
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def messages(outcome: Outcome) -> list[str]:
    return [finding.message for finding in outcome.findings]


# -- the launcher's variables

SLURM = {
    "SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8", "SLURM_NNODES": "2",
    "SLURM_NODEID": "0", "SLURM_LOCALID": "3", "SLURM_STEP_NODELIST": "gpu[1-2]",
}  # fmt: skip
TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0", "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
        TORCHRUN,
        SLURM,
        {**SLURM, **TORCHRUN, "TORCHELASTIC_RUN_ID": "none"},
        {**SLURM, "RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu1", "MASTER_PORT": "29500"},
        {"MASTER_ADDR": "fd00::1", "MASTER_PORT": "29500"},
    ],
    ids=["none", "master", "torchrun", "slurm", "torchrun in slurm", "by hand", "ipv6"],
)
def test_a_sound_environment_is_silent(machine: Machine, environ: dict[str, str]) -> None:
    outcome = launch_environment.launch_environment(machine.situation(environ=environ))
    assert (outcome.status, outcome.findings) == (Status.PASS, ())


@pytest.mark.parametrize(
    ("environ", "status", "message"),
    [
        ({**TORCHRUN, "RANK": "2"}, "fail", "RANK is 2, but WORLD_SIZE is 2: ranks count from 0"),
        ({**TORCHRUN, "LOCAL_RANK": "x"}, "fail", "LOCAL_RANK is 'x', which is no number"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "fail", "MASTER_PORT is 99999, which is no port"),
        (
            {**TORCHRUN, "MASTER_ADDR": "tcp://node0:29500"}, "fail",
            "MASTER_ADDR is 'tcp://node0:29500': it takes a name or an address, without scheme "
            "and port",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2"}, "warn",
            "RANK and WORLD_SIZE are set, but not MASTER_ADDR, MASTER_PORT",
        ),
        (
            {**SLURM, "RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "29500"},
            "fail", "RANK is 0, but Slurm says that this is task 3 of 8",
        ),
    ],
)  # fmt: skip
def test_an_environment_that_cannot_work(
    machine: Machine, environ: dict[str, str], status: str, message: str
) -> None:
    outcome = launch_environment.launch_environment(machine.situation(environ=environ))
    assert (outcome.status.value, messages(outcome)) == (status, [message])
    assert outcome.findings[0].paste


def test_torchrun_started_by_each_of_several_tasks(machine: Machine) -> None:
    environ = {**SLURM, "SLURM_NTASKS_PER_NODE": "4"}
    outcome = launch_environment.launch_environment(
        machine.situation(Options(nproc=4), environ=environ)
    )
    assert messages(outcome) == ["Slurm starts 4 tasks on this node, and each would start 4 ranks"]
    alone = launch_environment.launch_environment(
        machine.situation(Options(nproc=1), environ=environ)
    )
    assert alone.status is Status.PASS


def test_the_shell_of_salloc_is_one_task_of_one_node(machine: Machine) -> None:
    """It may be a step of its own, whose variables tell the numbers of the job beside it."""
    shell = {
        "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "16",
        "SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_LOCALID": "0",
        "SLURM_NTASKS_PER_NODE": "8", "SLURM_STEP_NODELIST": "gpu1",
        "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_NODELIST": "gpu[1-2]",
    }  # fmt: skip
    asked = arguments.parse(["--nproc-per-node", "8"], shell)
    assert asked.options.nnodes == 1
    outcome = launch_environment.launch_environment(machine.situation(asked.options, environ=shell))
    assert outcome.findings == ()


@pytest.mark.parametrize(
    ("options", "environ", "healthy"),
    [
        (Options(nproc=2, nnodes=2), {}, False),
        (Options(nproc=2, nnodes=2, endpoint="localhost:29500"), {}, False),
        (Options(nproc=2, nnodes=2, endpoint="0.0.0.0:29500"), {}, False),
        (Options(nproc=2, nnodes=2, endpoint="[::]:29500"), {}, False),
        (Options(nproc=2, nnodes=2, endpoint="localhost7:29500"), {}, True),
        (Options(nproc=2, nnodes=2), {"MASTER_ADDR": "127.0.0.1"}, False),
        (Options(nproc=2, nnodes=2, endpoint="node0:29500"), {}, True),
        (Options(nproc=2, nnodes=2), {"MASTER_ADDR": "node0"}, True),
        (Options(nproc=2, nnodes=2), SLURM, True),
        (Options(nproc=2, endpoint="localhost:29500"), {}, True),
    ],
)
def test_where_several_nodes_meet(
    machine: Machine, options: Options, environ: dict[str, str], healthy: bool
) -> None:
    outcome = launch_environment.launch_environment(machine.situation(options, environ=environ))
    assert outcome.status is (Status.PASS if healthy else Status.FAIL)


# -- variables that were left over


@pytest.mark.parametrize(
    ("environ", "gpus", "status"),
    [
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, 0, Status.FAIL),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, 2, Status.WARN),
        ({"TORCH_DISTRIBUTED_DEBUG": "INFO"}, 0, Status.PASS),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, 1, Status.WARN),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, 1, Status.PASS),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, 0, Status.PASS),
        ({"NCCL_P2P_DISABLE": "1"}, 8, Status.WARN),
        ({"NCCL_P2P_DISABLE": "1"}, 1, Status.PASS),
        ({"NCCL_IB_DISABLE": "1"}, 8, Status.PASS),
        ({"NCCL_ASYNC_ERROR_HANDLING": "0"}, 8, Status.WARN),
        ({"NCCL_DEBUG": "INFO"}, 8, Status.PASS),
    ],
)
def test_leftover_variables(
    machine: Machine, environ: dict[str, str], gpus: int, status: Status
) -> None:
    assert variables.variables(machine.situation(gpus=gpus, environ=environ)).status is status


def test_infiniband_turned_off_between_nodes(machine: Machine) -> None:
    (machine.root / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    several = machine.situation(
        Options(nproc=2, nnodes=2), gpus=8, environ={"NCCL_IB_DISABLE": "1"}
    )
    assert variables.variables(several).status is Status.WARN
    one = machine.situation(gpus=8, environ={"NCCL_IB_DISABLE": "1"})
    assert variables.variables(one).status is Status.PASS


def test_variables_in_nccls_files(machine: Machine) -> None:
    machine.write("etc/nccl.conf", "# for a test\nNCCL_P2P_DISABLE=1\n#NCCL_SHM_DISABLE=1\n")
    (finding,) = variables.variables(machine.situation(gpus=2)).findings
    assert finding.evidence == (f"it stands in {machine.root}/etc/nccl.conf",)
    # The environment goes before the file.
    assert (
        variables.variables(machine.situation(gpus=2, environ={"NCCL_P2P_DISABLE": "0"})).findings
        == ()
    )


# -- cores, memory, limits


def quota(machine: Machine, cores_allowed: float) -> None:
    machine.write("proc/self/cgroup", "0::/job/step\n")
    machine.write("sys/fs/cgroup/cgroup.controllers", "cpu memory pids\n")
    machine.write("sys/fs/cgroup/job/cpu.max", f"{int(cores_allowed * 100_000)} 100000\n")
    machine.write("sys/fs/cgroup/job/step/cpu.max", "max 100000\n")


def test_the_quota_of_a_container_counts(machine: Machine) -> None:
    quota(machine, 1.5)
    assert cgroups.cores(machine.situation()) == 1.5
    eight = machine.situation(Options(nproc=8))
    outcome = cores.cores(eight)
    assert outcome.status is Status.WARN
    assert messages(outcome) == ["8 ranks will share 1.5 cores and wait for each other"]
    assert outcome.findings[0].paste == "docker run --cpus=8 ..."
    slurm = machine.situation(Options(nproc=8), environ={"SLURM_JOB_ID": "1"})
    assert cores.cores(slurm).findings[0].paste == "#SBATCH --cpus-per-task=8"


def test_two_ranks_on_one_core_are_worth_a_word_alone(machine: Machine) -> None:
    quota(machine, 1)
    assert cores.cores(machine.situation(Options())).status is Status.PASS
    assert cores.cores(machine.situation(Options(nproc=2))).status is Status.WARN


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
    assert cgroups.cores(situation) == 2.0
    assert cgroups.memory(situation) == (300 << 20, 1 << 30)
    assert cgroups.pids(situation) == (40, 100)


@pytest.mark.parametrize("text", ["max\n", f"{2**63 - 4096}\n", "", "junk\n"])
def test_no_limit_is_no_limit(machine: Machine, text: str) -> None:
    machine.write("proc/self/cgroup", "0::/\n4:memory:/\n")
    machine.write("sys/fs/cgroup/cgroup.controllers", "memory\n")
    machine.write("sys/fs/cgroup/memory.max", text)
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", text)
    assert cgroups.memory(machine.situation()) is None


def test_threads_beyond_the_cores(machine: Machine) -> None:
    have = cores.available(machine.situation())
    many = machine.situation(Options(nproc=1), environ={"OMP_NUM_THREADS": str(int(have * 4))})
    outcome = cores.cores(many)
    assert outcome.status is Status.WARN
    assert outcome.findings[0].paste == f"export OMP_NUM_THREADS={int(have)}"
    fair = machine.situation(Options(nproc=1), environ={"OMP_NUM_THREADS": str(int(have))})
    assert cores.cores(fair).status is Status.PASS


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
    outcome = memory.memory(machine.situation(Options(nproc=ranks), gpus=gpus))
    assert outcome.status is status


def test_the_containers_memory(machine: Machine) -> None:
    text = f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n"
    machine.write("proc/meminfo", text)
    machine.write("proc/self/cgroup", "0::/\n")
    machine.write("sys/fs/cgroup/cgroup.controllers", "memory\n")
    machine.write("sys/fs/cgroup/memory.max", f"{256 << 20}\n")
    machine.write("sys/fs/cgroup/memory.current", f"{128 << 20}\n")
    machine.write(".dockerenv", "")
    (finding,) = memory.memory(machine.situation()).findings
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
    assert container.appears_when_started(situation) is appears


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
    outcome = limits.limits(machine.situation(Options(nproc=8)))
    assert outcome.status is Status.FAIL
    assert outcome.findings[0].paste == "docker run --pids-limit -1 ..."
    assert limits.limits(machine.situation(Options(nproc=1))).status is Status.PASS


def test_locked_memory_matters_with_infiniband_alone(machine: Machine) -> None:
    here = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if here == resource.RLIM_INFINITY or here >= limits.PINNED:
        pytest.skip("enough memory may be locked here")
    assert limits.limits(machine.situation()).status is Status.PASS
    (machine.root / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert limits.limits(machine.situation()).status is Status.WARN


def test_a_full_neighbour_table(machine: Machine) -> None:
    check = neighbours.neighbour_table
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
    (finding,) = shared_memory.shared_memory(at(machine, small)).findings
    assert finding.message.endswith("has 64 MiB for 2 ranks: too small for DataLoader workers "
                                    "and NCCL")  # fmt: skip
    assert finding.paste == "docker run --shm-size=8g ..."
    pod = at(machine, small, environ={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert "emptyDir" in shared_memory.shared_memory(pod).findings[0].paste


def test_shared_memory_that_a_dead_job_filled(
    machine: Machine, tmpfs: Callable[[str], Path]
) -> None:
    folder = tmpfs("size=256m")
    assert shared_memory.shared_memory(at(machine, folder)).status is Status.PASS
    (folder / "nccl-Xa81Jc").write_bytes(bytes(200 << 20))
    (finding,) = shared_memory.shared_memory(at(machine, folder)).findings
    assert "nearly full: 56 MiB of 256 MiB free" in finding.message
    assert finding.evidence == (f"200 MiB in {folder}/nccl-Xa81Jc, of user {os.getuid()}",)


def test_shared_memory_that_cannot_be_written(
    machine: Machine, tmpfs: Callable[[str], Path]
) -> None:
    outcome = shared_memory.shared_memory(at(machine, tmpfs("size=256m,ro")))
    assert outcome.status is Status.FAIL
    assert shared_memory.shared_memory(at(machine, Path("/nowhere"))).status is Status.SKIPPED


def folder_check(folder: Path) -> Outcome:
    options = Options(nproc=2, checkpoint_dir=folder)
    return checkpoints.checkpoint_dir(Situation(options, environ={}))


def test_a_checkpoint_folder_that_works_is_left_as_it_was(tmp_path: Path) -> None:
    outcome = folder_check(tmp_path)
    if shutil.disk_usage(tmp_path).free > checkpoints.LEAST:
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
    assert checkpoints._words(OSError(errno.EDQUOT, "x")) == "this user's quota is used up"
    assert checkpoints._words(OSError(errno.EIO, os.strerror(errno.EIO))) == "Input/output error"


# -- the script

SCRIPT = """\
from __future__ import annotations
import os, torch
import torch.distributed as dist
from helpers import thing
from . import relative
try:
    import apex_of_old
except ImportError:
    apex_of_old = None
if os.environ.get("WANDB"):
    import wandb_of_old
def main():
    import tensorboard_of_old
"""


def script_check(path: Path, *more: str, module: bool = False) -> Outcome:
    options = Options(nproc=2, script=(str(path), *more), module=module)
    return script.script(Situation(options, environ={}))


def test_a_script_that_would_start(tmp_path: Path) -> None:
    train = tmp_path / "train.py"
    train.write_text(SCRIPT)
    (tmp_path / "helpers.py").touch()
    outcome = script_check(train, "--lr", "0.1")
    assert outcome.status is Status.PASS
    assert outcome.detail == "train.py parses, and its 4 imports are there; it was not run"


def test_a_script_that_would_not(tmp_path: Path) -> None:
    train = tmp_path / "train.py"
    train.write_text("import os\nimport no_such_package.part as part\n")
    (finding,) = script_check(train).findings
    assert finding.location is not None and finding.location.line == 2
    assert "train.py imports no_such_package, which this Python" in finding.message
    assert finding.paste == f"{sys.executable} -m pip install no_such_package"
    train.write_text("def main(:\n    pass\n")
    (finding,) = script_check(train).findings
    assert finding.location is not None and finding.location.line == 1
    (finding,) = script_check(tmp_path / "trian.py").findings
    assert "did you mean" in finding.fix and "train.py" in finding.paste


def test_modules_and_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__main__.py").write_text("import os\n")
    monkeypatch.chdir(tmp_path)
    assert script_check(Path("pkg"), module=True).status is Status.PASS
    assert script_check(Path("pkg.none"), module=True).status is Status.FAIL
    assert script_check(package).status is Status.PASS
    assert script_check(Path("/bin/sh")).status is Status.SKIPPED
    assert script_check(tmp_path / "missing.py").status is Status.FAIL


@pytest.mark.parametrize(
    "change",
    [
        "import sys\nsys.path.insert(0, 'lib')\n",
        "from sys import path\npath.append('lib')\n",
        "import os, sys\nif os.name:\n    sys.path.append('lib')\n",
        "import site\nsite.addsitedir('lib')\n",
        "import _paths\n",
    ],
)
def test_what_comes_after_a_change_of_the_search_path_is_not_judged(
    tmp_path: Path, change: str
) -> None:
    train = tmp_path / "train.py"
    (tmp_path / "_paths.py").write_text("import sys\nsys.path.append('lib')\n")
    train.write_text(f"{change}import only_found_later\n")
    outcome = script_check(train)
    assert outcome.status is Status.PASS
    assert "up to where sys.path is changed" in outcome.detail
    train.write_text(f"import missing_before\n{change}import only_found_later\n")
    (finding,) = script_check(train).findings
    assert finding.about == "missing_before"


def test_modules_beside_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('nothing is imported')")
    (package / "train.py").write_text("import helpers\nfrom pkg import models\nimport built\n")
    (tmp_path / "helpers.py").touch()
    (tmp_path / f"built{EXTENSION_SUFFIXES[0]}").touch()
    (tmp_path / "spread" / "inner").mkdir(parents=True)
    (tmp_path / "spread" / "inner" / "train.py").write_text("import spread.inner\n")
    monkeypatch.chdir(tmp_path)
    for name in ("pkg.train", "spread.inner.train"):
        assert script_check(Path(name), module=True).findings == ()
    (finding,) = script_check(Path("pkg"), module=True).findings
    assert finding.message == "pkg is a package without __main__.py: it cannot be run"


def test_a_module_that_is_installed_in_an_editable_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("import os\n")

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            if name != "edited":
                return None
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(tmp_path)]
            return spec

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert script_check(Path("edited.train"), module=True).status is Status.PASS
    assert script_check(Path("edited.none"), module=True).status is Status.FAIL


def test_what_is_no_script_is_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert script_check(pipe).status is Status.SKIPPED
    options = Options(nproc=2, script=("bash", "run.sh"), program=True)
    assert script.script(Situation(options, environ={})).status is Status.SKIPPED


def test_the_line_for_a_missing_import_installs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "my project"
    (root / "tools").mkdir(parents=True)
    (root / "ours.py").touch()
    train = root / "tools" / "train.py"
    train.write_text("import ours, utils, cv2\n")
    monkeypatch.chdir(root)
    ours, utils, cv2 = (each.paste for each in script_check(train).findings)
    assert ours == f"export PYTHONPATH='{root}'${{PYTHONPATH:+:$PYTHONPATH}}"
    assert utils == "find . -name utils.py -o -name utils -type d"
    assert cv2 == f"{sys.executable} -m pip install opencv-python"
    broken = root / "it's.py"
    broken.write_text("def f(:")
    (finding,) = script_check(broken).findings
    assert shlex.split(finding.paste)[-1] == str(broken)


def test_a_file_that_is_no_text_does_not_reach_the_terminal(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "weights.py").write_bytes(b"\x7fELF\x1b[2J\0")
    result = doctor.cli("check", "--only", "script", "--", "weights.py")
    assert result.status == 2
    assert "\x1b" not in result.stdout and "\0" not in result.stdout


# -- orphans


def started(machine: Machine, pid: int, parent: int, session: int, environ: dict[str, str],
            words: str = "python train.py") -> None:  # fmt: skip
    fields = ["S", str(parent), str(session), str(session), *["0"] * 15, "100", *["0"] * 20]
    machine.write(f"proc/{pid}/stat", f"{pid} (py) thon) {' '.join(fields)}\n")
    machine.write(f"proc/{pid}/cmdline", words.replace(" ", "\0") + "\0")
    machine.write(f"proc/{pid}/statm", "9 5000 1\n")
    text = "".join(f"{name}={value}\0" for name, value in environ.items())
    machine.write(f"proc/{pid}/environ", text)


RANK = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}


def orphans_of(machine: Machine) -> list[int]:
    machine.write("proc/uptime", "1000.0 1.0\n")
    return sorted(each.process.pid for each in orphans.find(machine.situation()))


def test_only_ranks_without_a_launcher_are_orphans(machine: Machine) -> None:
    started(machine, 1, 0, 1, {}, "/sbin/init")
    started(machine, 50, 1, 50, {}, "/usr/lib/systemd/systemd --user")
    living = {**RANK, "MASTER_PORT": "29400"}
    started(machine, 100, 50, 90, {}, "python -m torch.distributed.run train.py")
    started(machine, 101, 100, 101, living)  # a living job
    started(machine, 102, 101, 101, living)  # its DataLoader worker
    started(machine, 200, 1, 200, RANK)  # left by a dead torchrun
    started(machine, 201, 50, 201, RANK)  # taken in by the user's systemd
    started(machine, 202, 200, 200, RANK)  # a DataLoader worker of an orphan
    started(machine, 300, 1, 300, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"})  # by hand
    started(machine, 301, 1, 301, {})  # anybody's daemon
    started(machine, 302, 1, 90, RANK)  # in a shell's session
    assert orphans_of(machine) == [200, 201]


def test_what_a_living_job_put_into_the_background_is_its_own(machine: Machine) -> None:
    """A logger's service, in a session of its own, whose parent has ended."""
    started(machine, 1, 0, 1, {}, "/sbin/init")
    started(machine, 100, 1, 100, {}, "python -m torch.distributed.run train.py")
    started(machine, 101, 100, 101, RANK)
    started(machine, 110, 1, 110, RANK, "logger-service")
    assert orphans_of(machine) == []
    other = {**RANK, "MASTER_PORT": "29501"}
    started(machine, 200, 1, 200, other)
    started(machine, 201, 200, 200, other)
    assert orphans_of(machine) == [200]
    (machine.root / "proc/100/stat").unlink()
    shutil.rmtree(machine.root / "proc/100")
    started(machine, 101, 1, 101, RANK)
    assert orphans_of(machine) == [101, 110, 200]


@pytest.mark.parametrize(
    ("first", "found"),
    [
        ("sleep infinity", [200]),
        ("tini -- bash", [200]),
        ("/usr/bin/python3 /usr/local/bin/torchrun train.py", []),
        ("python -m ddpdoctor run train.py", []),
        ("python launch.py", []),
    ],
)
def test_in_a_container_the_launcher_may_be_process_one(
    machine: Machine, first: str, found: list[int]
) -> None:
    started(machine, 1, 0, 1, {}, first)
    started(machine, 200, 1, 200, RANK)
    assert orphans_of(machine) == found


def test_who_has_just_started_is_no_orphan_yet(machine: Machine) -> None:
    started(machine, 1, 0, 1, {}, "/sbin/init")
    started(machine, 200, 1, 200, RANK)
    machine.write("proc/uptime", "3.0 1.0\n")
    assert orphans.find(machine.situation()) == []


def test_real_orphans_are_found_and_ended_when_asked_to(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun is killed; its rank lives on, until somebody says yes."""
    words = Path("/proc/1/cmdline").read_bytes().decode("utf-8", "replace")
    if any(each in words for each in orphans._LAUNCHERS):
        pytest.skip("process 1 may be a launcher here, so that nothing counts as an orphan")
    monkeypatch.setattr(orphans, "YOUNG", 0.0)
    source = """
        import socket, time
        server = socket.create_server(("127.0.0.1", 0))
        open("port", "w").write(str(server.getsockname()[1]))
        time.sleep(600)
    """
    sleeper = doctor.write("sleeper.py", source)
    live = doctor.start(
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", str(sleeper),
        watch=False,
    )  # fmt: skip
    launcher = psutil.Process(live.process.pid)
    deadline = time.monotonic() + LIMIT
    while not launcher.children() and time.monotonic() < deadline:
        time.sleep(0.1)
    (rank,) = launcher.children()
    while not (doctor.directory / "port").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    port = (doctor.directory / "port").read_text()
    situation = Situation(Options(nproc=1), environ={})

    def mine() -> list[orphans.Orphan]:
        return [each for each in orphans.find(situation) if each.process.pid == rank.pid]

    assert mine() == []
    live.process.send_signal(signal.SIGKILL)
    live.process.wait(LIMIT)
    deadline = time.monotonic() + LIMIT
    while not mine() and time.monotonic() < deadline:
        time.sleep(0.1)
    (orphan,) = mine()
    assert orphans.describe(orphan).startswith(f"rank 0: {Path(sys.executable).name} ")
    assert f", port {port}, " in orphans.describe(orphan)
    assert list(orphans.kill([orphan])) == []
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE


START = """\
{python} -m torch.distributed.run --nproc-per-node 2 {sleeper} &
until [ "$(pgrep -fc -- '-u {sleeper}')" = 2 ]; do sleep 0.2; done
kill -9 $!
sleep {young}
{python} -m ddpdoctor check --only orphans --kill-orphans
pgrep -fc -- '-u {sleeper}'
"""


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "left"), [("y", "0"), ("n", "2")])
def test_it_asks_and_ends_them_in_a_machine_of_their_own(
    doctor: Doctor, answer: str, left: str
) -> None:
    """In a pid namespace, so that it can mean no process but these."""
    command = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"]).returncode:
        pytest.skip("no pid namespaces here")
    sleeper = doctor.write("sleeper.py", "import time\ntime.sleep(600)\n")
    young = orphans.YOUNG + 2
    text = START.format(python=sys.executable, sleeper=sleeper, young=young)
    start = doctor.write("start.sh", text)
    head, tail = pty.openpty()
    with subprocess.Popen(
        [*command, "sh", str(start)],
        env=doctor.environment({"TERM": "dumb"}),
        stdin=tail,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        os.write(head, f"{answer}\n".encode())
        shown, _ = process.communicate(timeout=LIMIT)
    os.close(tail)
    os.close(head)
    assert ("2 of 2 ended" if answer == "y" else "nothing was ended") in shown
    assert ("0 among" if answer == "y" else "2 among") in shown
    assert shown.splitlines()[-1] == left


def test_nothing_is_ended_without_being_asked(doctor: Doctor) -> None:
    result = doctor.cli("check", "--only", "shared-memory", "--kill-orphans")
    if "no rank of an earlier job is left" not in result.stdout:
        assert result.status == 3
        assert "asks before it ends anything" in result.stderr


# -- the whole, on a terminal and elsewhere


def test_on_a_terminal_it_shows_what_is_running_and_cleans_up_after(doctor: Doctor) -> None:
    head, tail = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ddpdoctor", "check", "--skip", "collectives,orphans"],
        env=doctor.environment({"TERM": "xterm", "LANG": "C", "LC_ALL": "C"}),
        stdin=tail,
        stdout=tail,
        stderr=tail,
        cwd=doctor.directory,
    )
    os.close(tail)
    shown = b""
    while True:
        try:
            chunk = os.read(head, 4096)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    os.close(head)
    assert process.wait(LIMIT) == 0, shown
    assert b"checks done; running: " in shown
    assert b"\x1b[32mpass" in shown
    assert b"Traceback" not in shown
    shown.decode("ascii")


def test_letters_that_the_encoding_has_not(doctor: Doctor) -> None:
    env = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    result = doctor.cli("check", "--only", "script", "--", "tr\u00e4in.py", env=env)
    assert (result.status, result.stderr) == (2, "")
    assert "the script tr\\xe4in.py cannot be read" in result.stdout


def test_a_usual_machine_is_healthy_in_a_pipe(doctor: Doctor) -> None:
    """This one, with two ranks; what others leave on it is not looked at."""
    env = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"}
    result = doctor.cli("check", "--skip", "collectives,orphans", env=env)
    assert (result.status, result.stderr) == (0, ""), result.stdout
    lines = result.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert result.stdout.isascii() and "\x1b" not in result.stdout
    assert any(line == "gpu-driver         skipped no GPU" for line in lines) or shutil.which(
        "nvidia-smi"
    )


@pytest.mark.parametrize("name", sorted(read_options(torchrun_source()).takes_value))
def test_each_option_of_this_torchrun_is_understood(name: str) -> None:
    if name.replace("_", "-") == "--print-completion":
        pytest.skip("it starts no job")
    takes_value = read_options(torchrun_source()).takes_value[name]
    said = ""
    try:
        arguments.parse([name, "1"] if takes_value else [name], {})
    except DoctorError as error:
        # What it says of the value is its own affair.
        said = error.message
    assert "option" not in said
