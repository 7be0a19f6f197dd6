"""One rank of the self-test across nodes, a program: ``python reduction.py``.

It imports torch, waits for its order, reduces, and reports, with JSON lines on its standard input
and output. It ends when its input does. The answer is written again whenever more of it is known,
with ``more`` while that is not all: NCCL may hang in a call that never returns, or end the process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

Order = dict[str, Any]

ELEMENTS = 2**16
"""Of each all_reduce; 512 KiB of float64."""
WRONG_SUM, WRONG_VALUES = "all_reduce gave a wrong sum", "broadcast gave wrong values"

BANDWIDTH_ELEMENTS = {"nccl": (2**20, 2**24), "gloo": (2**16, 2**20, 2**22)}
"""Of the all_reduces that measure the bus bandwidth, in float32; the last are 64 and 16 MiB."""

BATCHES, BATCH_S, MOST_IN_BATCH = 3, 0.05, 20
"""Batches of each size, the seconds that one is to take, and its reductions at most. The best
counts: other work makes a link look slow, and nothing makes it look fast."""

AGAIN = "with another node"  # the stage in which the nodes of a pair that failed get others
ALL_NODES = "of all nodes"  # the last stage, which a burn-in repeats

AGAIN_S, MOST_ROUNDS = 10, 2
"""Seconds and rounds for that: every node has its turn in them, unless nearly all failed."""

SLOW_S = 0.4  # a slower all_reduce is not repeated, nor tried with a larger size
OPEN_S = 30.0  # seconds for CUDA to open the GPUs
STAGE_LEAST_S = 5.0  # seconds that have to be left for a stage to begin
GRACE_S = 2.0  # seconds that a stage has after its limit to say itself what failed


def main() -> None:
    """Serve one order."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    # What a library prints is not the answer.
    os.dup2(2, 1)
    # It would look a dozen times at all that importing torch makes, which is to stay.
    gc.disable()
    import torch
    import torch.distributed  # noqa: F401

    print(json.dumps({"ready": True}), file=out)
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    threading.Thread(target=_end_with_input, daemon=True).start()
    order = json.loads(line)
    answer: dict[str, Any] = {"rank": order["rank"]}

    def report(**known: Any) -> None:
        answer.update(known)
        print(json.dumps(answer), file=out)

    ends = time.monotonic() + order["patience"]
    try:
        answer |= _gloo(order)
    except Exception as error:
        answer |= {"ok": False, "error": _one_line(error)}
    if order["stages"] and answer["ok"]:
        # Another rank ended: its starter reports how, and what this one knows is reported.
        with contextlib.suppress(Exception):
            _staged(order, ends, lambda stages: report(stages=stages, more=True))
    report(more=False)
    # Threads of gloo may still hold connections that others have closed.
    os._exit(0)


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


def _gloo(order: Order) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    limit, rank, world = timedelta(seconds=order["limit"]), order["rank"], order["world"]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        order["host"], order["port"], world, rank == 0, timeout=limit, wait_for_workers=False
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    wrong = _wrong(rank, world)
    result: dict[str, Any] = {"ok": not wrong, "error": wrong}
    if world > 1 and not wrong:
        cores, cpu = _Cores(), torch.device("cpu")
        result |= {"bus": _bus_bandwidth("gloo", cpu, world, None, limit), "idle": cores.idle()}
    until, rounds = time.monotonic() + order.get("soak", 0.0), 0
    while not (order["stages"] or wrong) and _goes_on(until, torch.device("cpu"), None, limit):
        wrong, rounds = _wrong(rank, world), rounds + 1
    result |= {"ok": not wrong, "error": wrong, "rounds": rounds}
    # As a barrier; torch's own looks for GPUs first, which is none of gloo's business.
    dist.all_reduce(torch.zeros(1))
    return result


def _goes_on(until: float, device: Any, group: Any, limit: timedelta) -> bool:
    """Whether a burn-in goes on: as long as all ranks have time left."""
    import torch
    import torch.distributed as dist

    flag = torch.tensor([float(time.monotonic() < until)], device=device)
    _finish(dist.all_reduce(flag, dist.ReduceOp.MIN, group=group, async_op=True), limit)
    return bool(flag.item())


def _wrong(rank: int, world: int) -> str:
    """Which collective gave a wrong result; empty if none did.

    Whole numbers this small are summed without rounding, so the result has to be exact.
    """
    import torch
    import torch.distributed as dist

    base = torch.arange(ELEMENTS, dtype=torch.float64) % 1009
    mine = base * (rank + 1)
    dist.all_reduce(mine)
    if not torch.equal(mine, base * (world * (world + 1) // 2)):
        return WRONG_SUM
    last = base + rank if rank == world - 1 else torch.zeros_like(base)
    dist.broadcast(last, src=world - 1)
    if not torch.equal(last, base + world - 1):
        return WRONG_VALUES
    return ""


def _staged(order: Order, ends: float, report: Callable[[dict[str, Any]], None]) -> None:
    """All ranks of each node, then pairs of nodes in log2(n) rounds, then all ranks.

    By the backend that ``order["stages"]`` names: NCCL on GPUs, or gloo on the CPU. All has to be
    over at the monotonic time ``ends``; ``report`` gets what is known whenever it is more:
    ``stages`` that ended, ``doing`` the one that has not, ``untested``, ``ok`` in the end.
    """
    import torch
    import torch.distributed as dist

    node_of: list[int] = order["node_of"]
    rank, nodes = order["rank"], max(node_of) + 1
    limit = timedelta(seconds=order["stage_limit"])
    done: list[dict[str, Any]] = []

    def known(**more: Any) -> None:
        report({"stages": done, "ok": False, **more})

    known(doing={"name": _stages(nodes)[0][0], "nodes": [node_of[rank]]})
    if order["stages"] == "nccl":
        # To wake up the GPU is no stage's fault: without persistence mode each takes seconds.
        gpu = torch.device("cuda", order["local_rank"])
        limit_s = min(OPEN_S, ends - time.monotonic() - 2 * STAGE_LEAST_S)
        _on_thread(lambda: torch.zeros(1, device=gpu), limit_s)
    known()
    # Ranks of a set that hangs come to their limit first, while the others wait here.
    signals = dist.new_group(timeout=3 * limit, backend="gloo")

    def agreed(failed: list[bool]) -> tuple[list[bool], bool]:
        """What is so on any rank: which sets failed, and whether the time is over."""
        late = time.monotonic() + STAGE_LEAST_S > ends
        flags = torch.tensor([*failed, late], dtype=torch.int64)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=signals)
        *bad, over = (bool(flag) for flag in flags.tolist())
        return bad, over

    def run(name: str, sets: list[list[int]], most: timedelta) -> tuple[list[list[int]], bool]:
        """Run a stage; the sets of nodes in which it failed, and whether the time is over."""
        within = min(most, timedelta(seconds=max(1.0, ends - time.monotonic() - GRACE_S)))
        failed = [False] * len(sets)
        # Every rank makes every group, in the same order.
        for place, chosen in enumerate(sets):
            ranks = [each for each, node in enumerate(node_of) if node in chosen]
            doing = {"name": name, "nodes": chosen}
            if rank in ranks:
                known(doing=doing)
            try:
                group = dist.new_group(ranks, timeout=within, backend=order["stages"])
            except Exception as error:  # no GPU can be used, or this torch has no NCCL
                if rank not in ranks:
                    raise
                stage = {**doing, "error": _one_line(error), "bus": 0.0}
            else:
                if rank not in ranks:
                    continue
                stage = _limited(doing, ranks, group, order, within)
            failed[place] = bool(stage["error"])
            done.append(stage)
            known()
        bad, over = agreed(failed)
        return [chosen for chosen, each in zip(sets, bad, strict=True) if each], over

    over = agreed([])[1]
    for name, sets in _stages(nodes):
        if over:
            known(untested=name)
            return
        failed, over = run(name, sets, limit)
        for pairs in _with_others(failed, nodes):
            if not over:
                _, over = run(AGAIN, pairs, min(limit, timedelta(seconds=AGAIN_S)))
        if failed:
            return
    known(ok=True)


def _on_thread(call: Callable[[], Any], seconds: float) -> list[Any]:
    """What a call returns that may never; empty if it has not within so many seconds."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    return found


def _limited(
    doing: dict[str, Any], ranks: list[int], group: Any, order: Order, limit: timedelta
) -> dict[str, Any]:
    """Run a stage on a thread: where NCCL cannot connect, its first call never returns."""
    seconds = limit.total_seconds()
    call = partial(_stage, doing["name"], doing["nodes"], ranks, group, order, limit)
    words = f"no end within {seconds:.0f} s: the ranks did not connect"
    late = {**doing, "error": words, "bus": 0.0}
    return next(iter(_on_thread(call, seconds + order.get("soak", 0.0) + GRACE_S)), late)


def _stages(nodes: int) -> list[tuple[str, list[list[int]]]]:
    """The stages with their sets of nodes: each one alone, pairs in log2(n) rounds, all."""
    stages = [("inside the node", [[node] for node in range(nodes)])]
    for power in (2**bit for bit in range((nodes - 1).bit_length())):
        pairs = [[a, a ^ power] for a in range(nodes) if a < a ^ power < nodes]
        stages.append((f"between nodes {power} apart", pairs))
    return [*stages, (ALL_NODES, [list(range(nodes))])]


def _with_others(failed: list[list[int]], nodes: int) -> list[list[list[int]]]:
    """Rounds in which each node of a pair that failed gets one that did not: is it node or link?

    None if no pairs failed, or all nodes did.
    """
    suspects = sorted({node for pair in failed for node in pair})
    others = [node for node in range(nodes) if node not in suspects]
    if any(len(each) != 2 for each in failed) or not others:
        return []
    rounds = [
        [list(pair) for pair in zip(suspects[first:], others, strict=False)]
        for first in range(0, len(suspects), len(others))
    ]
    return rounds[:MOST_ROUNDS]


def _stage(
    name: str, nodes: list[int], ranks: list[int], group: Any, order: Order, limit: timedelta
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    stage: Order = {"name": name, "nodes": nodes, "error": "", "bus": 0.0}
    try:
        backend, device = order["stages"], torch.device("cpu")
        if backend == "nccl":
            device = torch.device("cuda", order["local_rank"])
            # Of this thread.
            torch.cuda.set_device(device)
        until, again = time.monotonic() + order.get("soak", 0.0) * (name == ALL_NODES), True
        while again:
            ones = torch.full((ELEMENTS,), float(order["rank"] + 1), device=device)
            _finish(dist.all_reduce(ones, group=group, async_op=True), limit)
            if not bool((ones == float(sum(each + 1 for each in ranks))).all()):
                return {**stage, "error": WRONG_SUM}
            again = _goes_on(until, device, group, limit)
        if len(ranks) > 1:
            stage["bus"] = _bus_bandwidth(backend, device, len(ranks), group, limit)
    except Exception as error:
        stage["error"] = _one_line(error)
    return stage


def _bus_bandwidth(backend: str, device: Any, size: int, group: Any, limit: timedelta) -> float:
    """Bytes per second that an all_reduce moves over each link, as nccl-tests define it.

    ``2 (n - 1) / n`` times the bytes reduced per second, the best of several sizes and batches.
    """
    import torch
    import torch.distributed as dist

    best, sizes = 0.0, BANDWIDTH_ELEMENTS[backend]
    for elements, larger in zip(sizes, (*sizes[1:], None), strict=True):
        values = torch.ones(elements, device=device)
        _batch(values, 1, group, limit)
        # All ranks have to make as many: the slowest decides.
        slowest = torch.tensor([_batch(values, 1, group, limit)], device=device)
        _finish(dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group, async_op=True), limit)
        alone = seconds = max(float(slowest), 1e-6)
        if alone < SLOW_S:
            count = max(1, min(MOST_IN_BATCH, int(BATCH_S / alone)))
            seconds = min(_batch(values, count, group, limit) for _ in range(BATCHES))
        best = max(best, values.numel() * 4 / seconds * 2 * (size - 1) / size)
        if larger is None or alone * larger / elements > SLOW_S:
            break
    return best


def _batch(values: Any, count: int, group: Any, limit: timedelta) -> float:
    """Seconds for each of so many all_reduces, one after the other."""
    import torch.distributed as dist

    began = time.monotonic()
    for _ in range(count):
        # On a GPU the last one is done when all are. Not the sum, which would grow without end.
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=group, async_op=True)
        if values.device.type == "cpu":
            _finish(work, limit)
    _finish(work, limit)
    return (time.monotonic() - began) / count


class _Cores:
    """Whether the cores were what this process waited for, between two moments."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._unused, self._total = _machine_seconds()
        self._threads = _thread_seconds()
        self._held_back = _held_back()

    def idle(self) -> float:
        """For which part of the time even the busiest thread neither ran nor waited for a core.

        That of the machine's cores if it is less: a rank may have waited for one that waited. 0 if
        the kernel does not report it, or the container was held back by its share of the cores.
        """
        wall = time.monotonic() - self._began
        unused, total = _machine_seconds()
        busy = [each - self._threads.get(name, 0.0) for name, each in _thread_seconds().items()]
        if not busy or wall <= 0 or total <= self._total or _held_back() > self._held_back:
            return 0.0
        part = (unused - self._unused) / (total - self._total)
        return round(max(0.0, min(1 - max(busy) / wall, part)), 3)


def _thread_seconds() -> dict[str, float]:
    """For each thread of this process how long it has run, or has waited to run."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/schedstat") as file:
                found[thread] = sum(map(int, file.read().split()[:2])) / 1e9
    return found


def _machine_seconds() -> tuple[float, float]:
    """For how long this machine's cores have had nothing to do, and for how long in all."""
    with contextlib.suppress(OSError, ValueError), open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
        return float(sum(ticks[3:5])), float(sum(ticks))
    return 0.0, 0.0


def _held_back() -> int:
    """How often this container has been held back by its share of the cores."""
    for place in ("cpu.stat", "cpu/cpu.stat"):
        with contextlib.suppress(OSError, ValueError), open(f"/sys/fs/cgroup/{place}") as file:
            return int(dict(line.split() for line in file).get("nr_throttled", 0))
    return 0


def _finish(work: Any, limit: timedelta) -> None:
    """Wait for a collective without waiting forever."""
    began = time.monotonic()
    while not work.is_completed():
        waited = time.monotonic() - began
        if waited > limit.total_seconds():
            raise TimeoutError(f"no end within {limit.total_seconds():.0f} s")
        # Late by a fiftieth at most, and without keeping a core busy.
        time.sleep(min(0.005, max(0.0001, waited / 50)))
    # Where it failed, this says why: TORCH_NCCL_BLOCKING_WAIT is set.
    work.wait()


def _one_line(error: Exception) -> str:
    # torch adds a C++ stack behind the message.
    words = " ".join(str(error).split()).partition(" Exception raised from ")[0]
    return words[:500] or type(error).__name__


if __name__ == "__main__":
    # The folder of this file is no place to import from.
    del sys.path[0]
    main()
