"""One rank of the collective test: imports torch, waits for its order, reduces, tells the result.

It runs as ``python -m ddpdoctor.preflight.meeting.reduction`` and talks JSON lines on its standard
input and output. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

ELEMENTS = 2**16
"""Of each all_reduce; 512 KiB of float64."""

BANDWIDTH_ELEMENTS = 2**24
"""Of the all_reduce that measures NCCL's bus bandwidth; 64 MiB of float32."""


TIMES = 5
"""That all_reduce is repeated so often."""


def main() -> None:
    """Serve one order."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    # Whatever else a library prints is not the answer.
    os.dup2(2, 1)
    import torch
    import torch.distributed  # noqa: F401

    print(json.dumps({"ready": True}), file=out)
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    threading.Thread(target=_end_with_input, daemon=True).start()
    order = json.loads(line)
    try:
        result = _gloo(order)
        if order["stages"] and result["ok"]:
            result["stages"] = _staged(order)
    except Exception as error:
        result = {"ok": False, "error": _one_line(error)}
    print(json.dumps({"rank": order["rank"], **result}), file=out)
    # Threads of gloo may still hold connections that others have closed.
    os._exit(0)


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


def _gloo(order: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    limit = timedelta(seconds=order["limit"])
    began = time.monotonic()
    rank, world = order["rank"], order["world"]
    # All of it within one limit: the store's waits, the connections, and each collective.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        order["host"], order["port"], world, rank == 0, timeout=limit, wait_for_workers=False
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    wrong = _wrong(rank, world, "cpu")
    dist.barrier()
    return {"ok": not wrong, "error": wrong, "seconds": round(time.monotonic() - began, 3)}


def _wrong(rank: int, world: int, device: str, group: Any = None) -> str:
    """Which collective gave a wrong result; empty if none did.

    Whole numbers this small are summed without rounding, so the result has to be exact.
    """
    import torch
    import torch.distributed as dist

    base = torch.arange(ELEMENTS, dtype=torch.float64, device=device) % 1009
    mine = base * (rank + 1)
    dist.all_reduce(mine, group=group)
    if not torch.equal(mine, base * (world * (world + 1) // 2)):
        return "all_reduce gave a wrong sum"
    last = base + rank if rank == world - 1 else torch.zeros_like(base)
    dist.broadcast(last, src=world - 1, group=group)
    if not torch.equal(last, base + world - 1):
        return "broadcast gave wrong values"
    return ""


def _staged(order: dict[str, Any]) -> dict[str, Any]:
    """All ranks of each node, then pairs of nodes in log2(n) rounds, then all ranks.

    By the backend that ``order["stages"]`` names: NCCL on GPUs, or gloo on the CPU.
    """
    import torch
    import torch.distributed as dist

    backend = order["stages"]
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", order["local_rank"])
        torch.cuda.set_device(device)
    limit = timedelta(seconds=order["limit"])
    node_of: list[int] = order["node_of"]
    nodes = max(node_of) + 1
    stages = [("inside the node", [[node] for node in range(nodes)])]
    power = 1
    while power < nodes:
        pairs = [[a, a ^ power] for a in range(nodes) if a < a ^ power < nodes]
        stages.append((f"between nodes {power} apart", pairs))
        power *= 2
    stages.append(("of all nodes", [list(range(nodes))]))
    done = []
    for name, sets in stages:
        mine = None
        # Every rank makes every group, in the same order.
        for chosen in sets:
            ranks = [rank for rank, node in enumerate(node_of) if node in chosen]
            group = dist.new_group(ranks, timeout=limit, backend=backend)
            if order["rank"] in ranks:
                mine = (ranks, group, chosen)
        if mine is not None:
            ranks, group, chosen = mine
            done.append(_stage(name, chosen, ranks, group, order["rank"], device, limit))
        dist.barrier()
        if done and done[-1]["error"]:
            break
    return {"stages": done, "ok": bool(done) and all(not each["error"] for each in done)}


def _stage(
    name: str, nodes: list[int], ranks: list[int], group: Any, rank: int, device: Any, limit: Any
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    stage: dict[str, Any] = {"name": name, "nodes": nodes, "error": "", "bus": 0.0}
    try:
        ones = torch.full((ELEMENTS,), float(rank + 1), device=device)
        _finish(dist.all_reduce(ones, group=group, async_op=True), limit)
        if not bool((ones == float(sum(each + 1 for each in ranks))).all()):
            return {**stage, "error": "all_reduce gave a wrong sum"}
        large = torch.ones(BANDWIDTH_ELEMENTS, device=device)
        _finish(dist.all_reduce(large, group=group, async_op=True), limit)
        began = time.monotonic()
        for _ in range(TIMES):
            # One after the other on the stream; the last one is done when all are.
            work = dist.all_reduce(large, group=group, async_op=True)
        _finish(work, limit)
        seconds = (time.monotonic() - began) / TIMES
        size = len(ranks)
        if size > 1:
            # What each link carries, as nccl-tests define it.
            stage["bus"] = large.numel() * 4 / seconds * 2 * (size - 1) / size
    except Exception as error:
        stage["error"] = _one_line(error)
    return stage


def _finish(work: Any, limit: timedelta) -> None:
    """Wait for a collective on the GPU without waiting forever."""
    until = time.monotonic() + limit.total_seconds()
    while not work.is_completed():
        if time.monotonic() > until:
            raise TimeoutError(f"no end within {limit.total_seconds():.0f} s")
        time.sleep(0.001)
    # Where it failed, this says why.
    work.wait()


def _one_line(error: Exception) -> str:
    words = " ".join(str(error).split())
    # torch adds a C++ stack behind the message.
    return words.partition(" Exception raised from ")[0][:500] or type(error).__name__


if __name__ == "__main__":
    main()
