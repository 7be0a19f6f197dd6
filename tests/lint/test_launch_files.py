"""What cannot start is found in batch and shell scripts, manifests and configurations."""

from __future__ import annotations

import importlib.util
import json
import textwrap

import pytest

from ddpdoctor.core.finding import Severity
from ddpdoctor.lint import check, files

needs_yaml = pytest.mark.skipif(
    importlib.util.find_spec("yaml") is None, reason="PyYAML is not installed"
)


def problems(path: str, text: str, least: Severity = Severity.WARNING) -> list[tuple[int, str]]:
    """Return line and code of what is found."""
    source = files.parse(path, textwrap.dedent(text).lstrip().encode())
    return [(each.line, each.code) for each in check.check([source]) if each.severity >= least]


BATCH = """
    #!/bin/bash
    #SBATCH --nodes={nodes}
    #SBATCH --ntasks-per-node={tasks}
    #SBATCH --gres=gpu:a100:{gpus}
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    {line}
"""
MEET = "--rdzv-backend c10d --rdzv-endpoint $head:29500"


@pytest.mark.parametrize(
    ("nodes", "tasks", "gpus", "line", "codes"),
    [
        (2, 1, 4, f"srun torchrun --nnodes 2 --nproc-per-node 4 {MEET} train.py", []),
        (2, 1, 4, f"srun torchrun --nnodes=$SLURM_NNODES --nproc_per_node=4 {MEET} t.py", []),
        (1, 1, 4, "torchrun --standalone --nproc-per-node=4 train.py", []),
        (1, 4, 4, "torchrun --nproc-per-node=4 train.py", []),
        (2, 4, 4, "srun python train.py", []),
        (2, 4, 8, f"srun --ntasks-per-node=1 torchrun --nnodes 2 --nproc-per-node 8 {MEET} t", []),
        (2, 1, 4, f"srun bash -c 'torchrun --nnodes 2 --nproc-per-node 4 {MEET} t.py'", []),
        (2, 1, 4, f"for h in $hosts; do ssh $h torchrun --nnodes 2 {MEET} t.py; done", []),
        (2, 1, 4, f"torchrun --nnodes 2 --nproc-per-node 4 {MEET} train.py", ["DDP001"]),
        (2, 1, 4, f"python -m torch.distributed.run --nnodes 2 {MEET} t.py", ["DDP001"]),
        (2, 1, 4, f"srun torchrun --nnodes 4 --nproc-per-node 4 {MEET} train.py", ["DDP001"]),
        (2, 4, 4, f"srun torchrun --nnodes 2 --nproc-per-node 4 {MEET} train.py", ["DDP001"]),
        (2, 1, 4, f"srun torchrun --nnodes 2 --nproc-per-node 8 {MEET} train.py", ["DDP021"]),
        (2, 1, 4, f"srun bash -c 'torchrun --nnodes 2 --nproc-per-node 8 {MEET} t'", ["DDP021"]),
        (2, 1, 4, "srun torchrun --nnodes 2 --rdzv-endpoint localhost:29500 t.py", ["DDP001"]),
        (2, 1, 4, "srun torchrun --nnodes 2 --nproc-per-node 4 train.py", ["DDP001"]),
        (1, 1, 4, "torchrun --nproc-per-node 4 --master_port 70000 train.py", ["DDP002"]),
        (1, 1, 4, "GPUS=8; torchrun --nproc-per-node $GPUS train.py", ["DDP021"]),
        (1, 1, 4, "torchrun --nproc-per-node ${GPUS:-8} train.py", []),
        (1, 1, 4, "export NCCL_P2P_DISABLE=1; torchrun --nproc-per-node 4 t.py", ["DDP007"]),
        (1, 1, 4, "export NCCL_P2P_DISABLE=1  # broken riser\n    torchrun t.py", []),
        (1, 1, 4, "echo torchrun --nproc-per-node 8 train.py > run.txt", []),
    ],
)
def test_batch_scripts(nodes: int, tasks: int, gpus: int, line: str, codes: list[str]) -> None:
    text = BATCH.format(nodes=nodes, tasks=tasks, gpus=gpus, line=line)
    assert [code for _, code in problems("job.sbatch", text)] == codes


def test_lines_that_continue_and_texts_that_are_written_elsewhere() -> None:
    found = problems(
        "run.sh",
        """
        cat <<EOF > other.sh
        torchrun --nnodes 2 train.py
        EOF
        torchrun \\
            --nproc-per-node 4 \\
            --nnodes 2 \\
            train.py  # noqa: DDP002
        torchrun --nnodes 2 train.py  # noqa: DDP001
        """,
    )
    assert found == [(4, "DDP001")]


@pytest.mark.parametrize("text", ["", "'", "torchrun 'open", "\\", "#SBATCH", "cat <<EOF\nx", "\0"])
def test_scripts_that_the_shell_refuses(text: str) -> None:
    assert problems("run.sh", text) == []


JOB = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
spec:
  pytorchReplicaSpecs:
    Master:
      replicas: {masters}
      template: &pod
        spec:
          containers:
            - name: pytorch
              command: [torchrun, --nnodes={nodes}, --nproc-per-node={ranks}, train.py]
              env:
                - {{name: NCCL_DEBUG, value: INFO}}
              resources:
                limits: {{nvidia.com/gpu: 4}}
              volumeMounts:
                - mountPath: {mount}
                  name: shm
    Worker:
      replicas: 1
"""


@needs_yaml
@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, []),
        ({"masters": 2}, [(6, "DDP001"), (11, "DDP001")]),
        ({"nodes": 3}, [(11, "DDP001")]),
        ({"ranks": 8}, [(15, "DDP021")]),
        ({"mount": "/data"}, [(10, "DDP005")]),
    ],
)
def test_pytorch_jobs(changed: dict[str, object], found: list[tuple[int, str]]) -> None:
    values = {"masters": 1, "nodes": 2, "ranks": 4, "mount": "/dev/shm"} | changed
    assert problems("job.yaml", JOB.format(**values)) == found


ACCELERATE = """
distributed_type: MULTI_GPU
gpu_ids: {gpus}
machine_rank: {rank}
main_process_ip: {address}
main_process_port: {port}
num_machines: {machines}
num_processes: {ranks}
"""


@needs_yaml
@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, []),
        ({"machines": 1, "address": "null", "gpus": "0,1", "ranks": 2}, []),
        ({"ranks": 9}, [(7, "DDP001")]),
        ({"rank": 2}, [(3, "DDP001")]),
        ({"address": "null"}, [(4, "DDP001")]),
        ({"port": 70000}, [(5, "DDP002")]),
        ({"machines": 1, "gpus": "0,1", "ranks": 4}, [(7, "DDP021")]),
    ],
)
def test_accelerate_configurations(
    changed: dict[str, object], found: list[tuple[int, str]]
) -> None:
    values = {"gpus": "all", "rank": 0, "address": "10.0.0.1", "port": 29500, "machines": 2}
    assert (
        problems("accelerate.yaml", ACCELERATE.format(**values | {"ranks": 8} | changed)) == found
    )


ON, AUTO = {"enabled": True}, {"enabled": "auto"}


@pytest.mark.parametrize(
    ("config", "codes"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8}, []),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 8}, []),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, ["DDP001"]),
        (
            {"zero_optimization": {}, "fp16": ON, "bf16": ON},
            ["DDP001"],
        ),
        ({"zero_optimization": {}, "fp16": AUTO, "bf16": ON}, []),
    ],
)
def test_deepspeed_configurations(config: dict[str, object], codes: list[str]) -> None:
    found = problems("ds.json", json.dumps(config, indent=2))
    assert [code for _, code in found] == codes


@pytest.mark.parametrize("path", ["a.yaml", "a.json"])
@pytest.mark.parametrize("text", ["", "[", "PyTorchJob: [", "zero_optimization", "- a\n- b", "\0"])
def test_other_files_are_left_alone(path: str, text: str) -> None:
    assert problems(path, text) == []
