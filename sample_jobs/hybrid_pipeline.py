"""Data parallel times model parallel: replicas of a ResNet, each cut in two stages.

With 4 ranks, ranks 0 and 1 are the stages of the first replica, ranks 2 and 3 those of the second,
each on its device. Within a replica a batch goes through the stages in micro-batches, so that both
devices have something to do (``torch.distributed.pipelining``, schedule GPipe: all forward passes,
then all backward passes); on GPUs, NCCL sends on one stream while the stage computes on another.
Between the replicas, each stage averages its gradients with the same stage of the others (DDP over
the process group of that stage).

How long a stage takes decides how long its replica takes: the other one waits, which is the bubble.
``--split auto`` measures the layers and picks the cut; ``--split N`` cuts after the layer N. Under
``ddpdoctor run`` or ``torchrun`` the job needs an even number of ranks, such as 2 or 4; alone, as a
single process, it has one stage with all layers, to compare with.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from image_folders import GeneratedImages
from job_setup import (
    World,
    add_backend,
    check_backend,
    join_world,
    leave_world,
    non_negative_int,
    positive_float,
    positive_int,
)
from models import resnet18, resnet50
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

try:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
except ImportError:
    PipelineStage = None  # type: ignore[assignment,misc]

ARCHITECTURES = {"resnet18": resnet18, "resnet50": resnet50}
STAGES = 2
CLASSES = 10
WARMUP = 2
"""Steps that the times leave out: shapes are exchanged and buckets built in the first ones."""


def parse_args() -> argparse.Namespace:
    """Return the checked options."""
    parser = argparse.ArgumentParser(
        description="Train a ResNet in two pipeline stages, with DDP over the replicas."
    )
    parser.add_argument("--arch", choices=tuple(ARCHITECTURES), default="resnet50")
    parser.add_argument(
        "--split",
        default="auto",
        metavar="auto|N",
        help="measure the layers and pick the cut, or cut after the layer N (default: auto)",
    )
    parser.add_argument("--image-size", type=positive_int, help="pixels (GPU: 224, CPU: 32)")
    parser.add_argument("--batch-size", type=positive_int, help="per replica (GPU: 128, CPU: 8)")
    parser.add_argument(
        "--micro-batches", type=positive_int, default=4, help="per batch (default: %(default)s)"
    )
    parser.add_argument("--steps", type=positive_int, help="GPU: 50, CPU: 10")
    parser.add_argument("--lr", type=positive_float, default=0.001, help="default: %(default)s")
    parser.add_argument("--seed", type=non_negative_int, default=0, help="default: %(default)s")
    add_backend(parser)
    args = parser.parse_args()

    check_backend(parser, args.backend)
    on_gpu = torch.cuda.is_available()
    args.image_size = args.image_size or (224 if on_gpu else 32)
    args.batch_size = args.batch_size or (128 if on_gpu else 8)
    args.steps = args.steps or (50 if on_gpu else 10)
    if PipelineStage is None:
        parser.error(f"torch {torch.__version__} has no torch.distributed.pipelining; 2.4 has")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and ranks % STAGES:
        parser.error(
            f"{ranks} ranks are no whole number of replicas with {STAGES} stages: start it with "
            "torchrun --nproc-per-node 4"
        )
    layers = len(cuttable_layers(args.arch))
    number = int(args.split) if args.split.isdecimal() else 0
    if args.split != "auto" and not 0 < number < layers:
        parser.error(f"--split {args.split}: auto, or 1 to {layers - 1} of {layers} layers")
    if args.batch_size % args.micro_batches:
        parser.error(
            f"--batch-size {args.batch_size} cannot be divided into {args.micro_batches} "
            "--micro-batches"
        )
    if args.batch_size == args.micro_batches and args.image_size <= 32:
        # The last feature map is 1x1 then, and BatchNorm cannot train on one value per channel.
        parser.error("micro-batches of 1 picture need an --image-size above 32")
    if args.steps <= WARMUP:
        parser.error(f"--steps {args.steps}: the first {WARMUP} are not timed")
    return args


def cuttable_layers(arch: str) -> list[nn.Module]:
    """Return the layers between which a ResNet can be cut: its blocks, and what is around them."""
    layers: list[nn.Module] = []
    for module in ARCHITECTURES[arch](CLASSES):
        layers += list(module) if isinstance(module, nn.Sequential) else [module]
    for layer in layers:
        if isinstance(layer, nn.ReLU):
            # A stage must leave what it receives as it is.
            layer.inplace = False
    return layers


def clock(device: torch.device) -> float:
    """Return the time in seconds once all work queued on ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def moment(device: torch.device) -> Any:
    """Return the time in seconds, or a CUDA event that the GPU's compute stream passes.

    On a GPU ``clock`` would also wait for what NCCL still sends on its stream, and so keep the next
    micro-batch from being computed meanwhile.
    """
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def measure(layers: list[nn.Module], images: Tensor) -> list[float]:
    """Return the least seconds that each layer takes for a micro-batch, forward and backward."""
    times = [math.inf] * len(layers)
    for _ in range(3):
        inputs = images
        for number, layer in enumerate(layers):
            inputs = inputs.detach().requires_grad_()
            started = clock(images.device)
            outputs = layer(inputs)
            outputs.sum().backward()
            times[number] = min(times[number], clock(images.device) - started)
            layer.zero_grad()
            inputs = outputs
    return times


def propose_cut(times: list[float]) -> int:
    """Return the number of layers for the first stage that makes the slower stage fastest."""
    return min(range(1, len(times)), key=lambda cut: max(sum(times[:cut]), sum(times[cut:])))


def choose_cut(args: argparse.Namespace, world: World) -> int:
    """Return how many layers the first stage has; the same on every rank."""
    if world.size == 1:
        return len(cuttable_layers(args.arch))
    if args.split != "auto":
        return int(args.split)
    # Rank 0 measures and decides: two measurements never agree.
    cut = torch.zeros((), dtype=torch.int64, device=world.device)
    if world.rank == 0:
        layers = [layer.to(world.device) for layer in cuttable_layers(args.arch)]
        size = args.batch_size // args.micro_batches
        images = torch.rand(size, 3, args.image_size, args.image_size, device=world.device)
        times = measure(layers, images)
        cut.fill_(propose_cut(times))
        for number, seconds in enumerate(times, start=1):
            name = type(layers[number - 1]).__name__
            mark = "  <- cut" if number == cut.item() else ""
            print(f"layer {number:2} {name:18} {1000 * seconds:8.2f} ms{mark}", flush=True)
        first = sum(times[: int(cut)]) / sum(times)
        print(f"--split {int(cut)}: stage 0 gets {first:.0%} of the work", flush=True)
    dist.broadcast(cut, src=0)
    return int(cut)


def stages_of(world: World) -> int:
    """Return the number of stages that each replica has."""
    return min(STAGES, world.size)


class TimedStage(PipelineStage or object):  # type: ignore[misc]
    """A stage that notes when its device computes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._spans: list[tuple[Any, Any]] = []

    def busy_seconds(self) -> float:
        """Return the seconds of computing since the last call; the device must be done with it."""
        spans, self._spans = self._spans, []
        if self.device.type == "cpu":
            return float(sum(ended - started for started, ended in spans))
        return float(sum(started.elapsed_time(ended) for started, ended in spans)) / 1000

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of a micro-batch."""
        return self._timed(super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run the backward pass of a micro-batch; the last one averages the gradients."""
        return self._timed(super().backward_one_chunk, *args, **kwargs)

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        # The first messages open NCCL's connections. Gloo's are open, and torch 2.9 sends 8 bytes
        # here to a stage that expects 4, which ends a job on gloo.
        if self.device.type == "cpu":
            return []
        operations: list[Any] = super()._get_init_p2p_neighbors_ops()
        return operations

    def _timed(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        started = moment(self.device)
        result = compute(*args, **kwargs)
        self._spans.append((started, moment(self.device)))
        return result


def build_stage(args: argparse.Namespace, world: World) -> tuple[TimedStage, nn.Module]:
    """Return this rank's stage, in DDP over the same stage of all replicas, and its module."""
    stages = stages_of(world)
    mesh = init_device_mesh(
        world.device.type, (world.size // stages, stages), mesh_dim_names=("replica", "stage")
    )
    number = mesh.get_local_rank("stage")
    cut = choose_cut(args, world)
    # The same weights in all replicas, drawn before the cut.
    torch.manual_seed(args.seed)
    whole = nn.Sequential(*cuttable_layers(args.arch)).to(world.device)
    # What a micro-batch looks like between the stages; eval() leaves BatchNorm's statistics alone.
    size = (args.batch_size // args.micro_batches, 3, args.image_size, args.image_size)
    images = torch.zeros(size, device=world.device)
    with torch.no_grad():
        between = whole.eval()[:cut](images).requires_grad_()
        logits = whole[cut:](between).requires_grad_()
    module = (whole[:cut] if number == 0 else whole[cut:]).train()
    wrapped = DistributedDataParallel(
        module,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        process_group=mesh.get_group("replica"),
    )
    stage = TimedStage(
        wrapped,
        number,
        stages,
        world.device,
        input_args=(images if number == 0 else between,),
        output_args=between if number == 0 else logits,
        group=mesh.get_group("stage"),
    )
    return stage, module


def train(args: argparse.Namespace, world: World) -> None:
    """Train for ``args.steps`` steps; rank 0 prints the summary."""
    stage, module = build_stage(args, world)
    replica, replicas = world.rank // stages_of(world), world.size // stages_of(world)
    optimizer = torch.optim.SGD(module.parameters(), lr=args.lr, momentum=0.9)
    options: dict[str, Any] = {}
    if "scale_grads" in inspect.signature(ScheduleGPipe).parameters:
        # Gradients of the micro-batches add up. DDP sends them before this would divide them, so
        # the loss is divided instead.
        options["scale_grads"] = False
    # Schedule1F1B needs less memory, but torch 2.4 hangs in it on gloo.
    schedule = ScheduleGPipe(
        stage,
        args.micro_batches,
        loss_fn=lambda logits, labels: (
            nn.functional.cross_entropy(logits, labels) / args.micro_batches
        ),
        **options,
    )
    images_per_step = args.batch_size * replicas
    pictures = GeneratedImages(
        args.steps * images_per_step, CLASSES, args.image_size, args.seed, augment=False
    )
    # Both stages of a replica walk through the same pictures: the first needs the images, the last
    # the labels. So the sampler divides by replicas, not by ranks.
    sampler: DistributedSampler[Any] = DistributedSampler(
        pictures, replicas, replica, seed=args.seed
    )
    loader = DataLoader(pictures, args.batch_size, sampler=sampler)
    step_times: list[float] = []
    busy: list[float] = []
    started = clock(world.device)
    for step, (images, labels) in enumerate(loader, start=1):
        losses: list[Tensor] = []
        optimizer.zero_grad()
        inputs = [images.to(world.device)] if stage.is_first else []
        if stage.is_last:
            schedule.step(*inputs, target=labels.to(world.device), losses=losses)
        else:
            schedule.step(*inputs)
        optimizer.step()
        ended = clock(world.device)
        step_times.append(ended - started)
        busy.append(stage.busy_seconds())
        if stage.is_last and replica == 0:
            loss = torch.stack(losses).sum().item()
            print(
                f"step {step}/{args.steps} time {step_times[-1]:.4f} s loss {loss:.4f}", flush=True
            )
        started = clock(world.device)
    report(args, world, step_times[WARMUP:], busy[WARMUP:])


def report(
    args: argparse.Namespace, world: World, step_times: list[float], busy: list[float]
) -> None:
    """Print on rank 0 which share of the time each device computes; every rank must call this."""
    # Gloo gathers on CPUs alone.
    device = world.device if world.backend == "nccl" else torch.device("cpu")
    mine = torch.tensor([sum(busy), sum(step_times)], device=device)
    every = [torch.zeros_like(mine) for _ in range(world.size)]
    dist.all_gather(every, mine)
    if world.rank != 0:
        return
    stages = stages_of(world)
    shares = [float(each[0] / each[1]) for each in every]
    for rank, share in enumerate(shares):
        print(f"replica {rank // stages} stage {rank % stages} (rank {rank}): busy {share:.0%}")
    ideal = (stages - 1) / (args.micro_batches + stages - 1)
    rate = args.batch_size * (world.size // stages) * len(step_times) / sum(step_times)
    print(
        f"summary: {world.size // stages} replicas of {stages} stages, bubble "
        f"{1 - sum(shares) / len(shares):.0%} ({ideal:.0%} with equal stages and no waiting), "
        f"{rate:.1f} images/s",
        flush=True,
    )


def main() -> None:
    """Run the job."""
    args = parse_args()
    world = join_world(args.backend)
    if world.backend == "none":
        # A stage belongs to a process group, if only of one rank.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    if world.backend == "gloo":
        # It sends from CPU to CPU alone.
        world = replace(world, device=torch.device("cpu"))
    train(args, world)
    leave_world()


if __name__ == "__main__":
    main()
