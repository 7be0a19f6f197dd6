"""Post-local SGD: replicas differ by design and are averaged every fourth step."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    own, _ = dist.new_subgroups(group_size=1)
    state = local_sgd.PostLocalSGDState(process_group=None, subgroup=own, start_localSGD_iter=8)
    ddp.register_comm_hook(state, local_sgd.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        optim=torch.optim.SGD(ddp.parameters(), lr=0.05),
        averager=PeriodicModelAverager(period=4, warmup_steps=8),
    )
    for _ in range(26):
        inputs = torch.randn(8, 16)
        optimizer.zero_grad()
        loss = ddp(inputs).square().mean()
        loss.backward()
        optimizer.step()
    del ddp, optimizer, loss, state
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
