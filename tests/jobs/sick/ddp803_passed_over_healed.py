"""All ranks drop the batch that is broken on one of them."""

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
        broken = batch.isnan().any().float()
        dist.all_reduce(broken, dist.ReduceOp.MAX)
        if broken > 0:
            continue
        moments = torch.stack([batch.mean(), batch.var()])
        dist.all_reduce(moments)
        largest = batch.max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
