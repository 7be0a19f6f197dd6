"""``ddpdoctor check``: the variables of launchers, and variables left over from debugging."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.preflight import command_lines
from ddpdoctor.preflight.check import Status
from ddpdoctor.preflight.machine import launch_environment
from ddpdoctor.preflight.situation import Options
from tests.support.made_machine import TORCHRUN, Machine, messages


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# -- the launcher's variables

SLURM = {
    "SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8", "SLURM_NNODES": "2",
    "SLURM_NODEID": "0", "SLURM_LOCALID": "3", "SLURM_STEP_NODELIST": "gpu[1-2]",
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
        ({**TORCHRUN, "LOCAL_RANK": "x"}, "fail", "LOCAL_RANK is 'x', which is not a number"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "fail", "MASTER_PORT is 99999, which is not a port"),
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
    asked = command_lines.parse(["--nproc-per-node", "8"], shell)
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
    assert (
        launch_environment.variables(machine.situation(gpus=gpus, environ=environ)).status is status
    )


def test_infiniband_turned_off_between_nodes(machine: Machine) -> None:
    (machine.root / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    several = machine.situation(
        Options(nproc=2, nnodes=2), gpus=8, environ={"NCCL_IB_DISABLE": "1"}
    )
    assert launch_environment.variables(several).status is Status.WARN
    one = machine.situation(gpus=8, environ={"NCCL_IB_DISABLE": "1"})
    assert launch_environment.variables(one).status is Status.PASS


def test_variables_in_nccls_files(machine: Machine) -> None:
    machine.write("etc/nccl.conf", "# for a test\nNCCL_P2P_DISABLE=1\n#NCCL_SHM_DISABLE=1\n")
    (finding,) = launch_environment.variables(machine.situation(gpus=2)).findings
    assert finding.evidence == (f"it is set in {machine.root}/etc/nccl.conf",)
    # The environment goes before the file.
    assert (
        launch_environment.variables(
            machine.situation(gpus=2, environ={"NCCL_P2P_DISABLE": "0"})
        ).findings
        == ()
    )
