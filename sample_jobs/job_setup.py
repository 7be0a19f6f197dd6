"""What the sample jobs share: types of options, the process group, and files of checkpoints."""

from __future__ import annotations

import argparse
import gc
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class InputError(Exception):
    """A file that the user named cannot be used; the message is one line that says what to do."""


@dataclass(frozen=True)
class World:
    """Where this process stands: its rank, the number of ranks, its device and its backend."""

    rank: int
    size: int
    device: torch.device
    backend: str


def positive_int(text: str) -> int:
    """Parse an option whose value is a whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def non_negative_int(text: str) -> int:
    """Parse an option whose value is a whole number from 0 on."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def positive_float(text: str) -> float:
    """Parse an option whose value is a finite number above 0."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    return value


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--backend``."""
    parser.add_argument(
        "--backend",
        choices=("gloo", "nccl"),
        help="default: nccl if there is a GPU for every local rank, else gloo",
    )


def check_backend(parser: argparse.ArgumentParser, backend: str | None) -> None:
    """End with a line on stderr and status 2 if this machine has not what the backend needs."""
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if backend == "nccl" and gpus < ranks:
        # NCCL refuses two ranks on one GPU.
        needed = "a GPU" if ranks == 1 else f"a GPU for each of {ranks} local ranks"
        parser.error(f"--backend nccl needs {needed}, and {gpus} are visible; use --backend gloo")


def pick_device(local_rank: int) -> torch.device:
    """Return the GPU of a local rank, made the current one, or the CPU where there is no GPU."""
    gpus = torch.cuda.device_count()
    if not gpus:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(device)
    return device


def pick_backend(local_ranks: int) -> str:
    """Return nccl where there is a GPU for each of ``local_ranks`` ranks, else gloo."""
    # NCCL refuses two ranks on one GPU.
    enough_gpus = 0 < local_ranks <= torch.cuda.device_count()
    return "nccl" if enough_gpus and dist.is_nccl_available() else "gloo"


def join_world(backend: str | None) -> World:
    """Pick this process's device and, under a launcher, join the process group.

    Launchers such as ``torchrun`` set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR
    and MASTER_PORT; ``init_process_group`` reads them. Without them, the job is a single process
    without a process group.
    """
    device = pick_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" not in os.environ:
        return World(rank=0, size=1, device=device, backend="none")
    backend = backend or pick_backend(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    return World(dist.get_rank(), dist.get_world_size(), device, backend)


def leave_world() -> None:
    """Leave the process group, if there is one.

    The caller must have dropped the wrapped model, the optimizer and the last loss: each keeps
    the process group alive, and a group that outlives this call still runs its threads when the
    interpreter shuts down, which can end a healthy job with SIGABRT. Those objects refer to each
    other in circles, hence the collection.
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def one_line(error: Exception) -> str:
    """Return the first 200 characters of an error's text on a single line."""
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` so that ``path`` is complete at every moment; for rank 0 alone."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_checkpoint(path: Path, names: set[str]) -> dict[str, Any]:
    """Return the state in ``path``, on the CPU; it must have just the entries ``names``.

    ``load_state_dict`` then copies it to where the model is. Without ``map_location``, every rank
    would load the tensors to the GPU of the rank that wrote them.

    Raises:
        InputError: The file cannot be read, or is no such checkpoint.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror or one_line(error)}; run without --resume to start over"
        ) from error
    except Exception as error:
        # Damaged bytes can make the reader raise nearly anything.
        raise InputError(
            f"{path}: damaged, or no checkpoint ({one_line(error)}); remove the file and run "
            "without --resume to start over"
        ) from error
    if not isinstance(state, dict) or set(state) != names:
        raise InputError(f"{path}: a checkpoint of another job; run without --resume to start over")
    return state
