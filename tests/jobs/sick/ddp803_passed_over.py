"""Rank 1 drops a batch by `continue`, and with it two collectives of that round."""

# fix: Reduce the value that decides over the ranks first
# status: 1

import torch
import torch.distributed as dist


def load(step: int) -> torch.Tensor:
    batch = torch.full((8,), float(step))
    if (dist.get_rank(), step) == (1, 6):
        batch[3] = float("nan")
    return batch


def main() -> None:
    dist.init_process_group("gloo")
    for step in range(12):
        progress = torch.ones(16)
        dist.all_reduce(progress)
        batch = load(step)
        if batch.isnan().any():
            continue  # expect: DDP803 rank 1
        moments = torch.stack([batch.mean(), batch.var()])
        dist.all_reduce(moments)
        largest = batch.max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
