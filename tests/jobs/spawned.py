"""Start the ranks of one host with mp.spawn: SCRIPT ADDRESS PORT FIRST-RANK RANKS WORLD-SIZE."""

from __future__ import annotations

import os
import runpy
import sys

from torch.multiprocessing.spawn import spawn


def run(local: int, script: str, address: str, port: str, first: str, world_size: str) -> None:
    """Be one rank."""
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": port}
    os.environ |= {"RANK": str(int(first) + local), "WORLD_SIZE": world_size}
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    script, address, port, first, ranks, world_size = sys.argv[1:]
    given = (script, address, port, first, world_size)
    spawn(run, given, nprocs=int(ranks))  # type: ignore[no-untyped-call]
