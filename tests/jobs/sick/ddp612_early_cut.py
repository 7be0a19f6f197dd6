"""The first stage has two layers, the second has ten."""

# fix: Move the cut: give {}

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

LAYERS = 12
WIDTH = 384
MICRO_BATCHES = 4
CUT = 2


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    module = nn.Sequential(*(layers[:CUT] if rank == 0 else layers[CUT:]))
    like = torch.zeros(64, WIDTH)
    stage = PipelineStage(  # expect: DDP612 rank 1
        module,
        rank,
        2,
        torch.device("cpu"),
        input_args=(like if rank == 0 else like.clone().requires_grad_(),),
        output_args=like.clone().requires_grad_(),
    )
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for _ in range(40):
        inputs = torch.randn(64 * MICRO_BATCHES, WIDTH)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=inputs.sin())
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
