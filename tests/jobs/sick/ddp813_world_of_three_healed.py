"""The ranks are as many as were started."""

import os

import torch.distributed as dist


def main() -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=world_size)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
