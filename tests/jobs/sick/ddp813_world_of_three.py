"""The ranks wait for a third one that nobody starts."""

# fix: Start the missing ranks, or correct the world size
# run: --hang-after 3 --kill-on-hang
# status: 4

import os

import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=3)  # expect: DDP813
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
