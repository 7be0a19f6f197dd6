"""Rank 1 gives its result."""

# ranks: 1

import multiprocessing
import os
import socket

import torch
import torch.distributed as dist


def work(rank: int, port: int, results: "multiprocessing.Queue[float]") -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    if rank == 1:
        results.put(total.item())
    else:
        print(results.get())
    dist.destroy_process_group()


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # These ranks are this script's own, not torchrun's.
    for name in [name for name in os.environ if "RANK" in name or "TORCHELASTIC" in name]:
        del os.environ[name]
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[float] = context.Queue()
    ranks = [context.Process(target=work, args=(rank, port, results)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()


if __name__ == "__main__":
    main()
