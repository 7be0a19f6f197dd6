"""Each rank reduces as many counts as there are classes in its own shard."""

# fix: Make the {} the same on every rank
# ranks: 3
# status: 1

import torch
import torch.distributed as dist


def count(labels: torch.Tensor) -> torch.Tensor:
    counts = torch.bincount(labels).float()
    dist.all_reduce(counts)  # expect: DDP803 ranks 0,1,2
    return counts


def main() -> None:
    dist.init_process_group("gloo")
    shards = torch.arange(90).div(5, rounding_mode="floor").split(30)
    counts = count(shards[dist.get_rank()])
    print(f"{int(counts.sum())} samples")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
