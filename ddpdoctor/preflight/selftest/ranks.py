"""The ranks of a test with real collectives, a program: ``python ranks.py PARENT``.

It imports torch, writes ``{"ready": true}``, reads one order, and forks the ranks of this machine:
many start in the time of one. It ends with ``PARENT``, the process that started it.

Orders and answers are lines of JSON on standard input and output. A rank writes its news:
``did`` for a correct collective, ``wrong`` for an incorrect one, ``error`` for that or an exception
or a signal, ``ended`` if it can do no more, how long it ``waited`` for a core, ``ok`` with the
number of ``rounds``, the ``stages`` so far, and ``done``. It then waits to be killed, since other
ranks may still need its connections.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Order = dict[str, Any]

ELEMENTS = 2**16  # Elements of each collective: more than one packet
LARGE = 1 << 22  # Elements of the all_reduce that a burn-in adds: 16 MiB
OPENING = "opening its GPU"  # Reported before CUDA is opened, which can take long, or never return

WRONG_SUM = "all_reduce gave a wrong sum"
ENDED_BY = "the rank was ended by"  # Before the name of a signal

BANDWIDTH_ELEMENTS = {"nccl": (2**20, 2**24), "gloo": (2**16, 2**20, 2**22)}
"""Elements of the all_reduces that measure the bus bandwidth, in float32: up to 64 and 16 MiB."""

BATCHES, BATCH_S, MAX_IN_BATCH = 3, 0.05, 20
"""Batches of each size, seconds per batch, and maximum reductions in one. The best batch counts:
other work makes a link look slow, and nothing makes it look fast."""

AGAIN = "with another node"  # the stage that tries the nodes of a failed pair with other nodes
ALL_NODES = "of all nodes"  # the last stage, which a burn-in repeats

AGAIN_S, MAX_ROUNDS = 10, 2
"""Seconds and rounds of stage `AGAIN`. Every node gets a turn unless nearly all failed."""

SLOW_S = 0.4  # a longer all_reduce is neither repeated nor tried with a larger size
OPEN_S = 30.0  # seconds for CUDA to open the GPUs
MIN_STAGE_S = 5.0  # minimum seconds left for a stage to begin
GRACE_S = 2.0  # seconds after its limit for a stage to report itself what failed

_out = 1


def report(**facts: object) -> None:
    """Write one line, in one write, so that lines of several ranks do not mix."""
    os.write(_out, (json.dumps(facts) + "\n").encode())


def main() -> None:
    """Carry out one order."""
    global _out
    _end_with(int(sys.argv[1]))
    # Keep stdout for answers: libraries print to it, NCCL in pieces of any size.
    _out = os.dup(1)
    os.dup2(2, 1)
    # Importing torch creates many lasting objects, which the collector would scan repeatedly.
    gc.disable()
    import torch.distributed  # noqa: F401

    report(ready=True)
    if line := sys.stdin.readline():
        _fork(json.loads(line))


def _end_with(parent: int) -> None:
    """End this process when its parent ends, which may have happened already."""
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _fork(order: Order) -> None:
    """Fork the ranks, serve their store if rank 0 is among them, and report those that die."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is, since 1.0

    if DDP_STEP in order["tests"]:
        prepare(order["backend"])
    # The store serves from a thread, so it is made after the forks: its port comes by a pipe.
    port_read, port_write = os.pipe()
    parent, children = os.getpid(), {}
    for local in range(order["ranks"]):
        own = {"rank": order["first"] + local, "local_rank": order.get("local_rank", 0) + local}
        pid = os.fork()
        if pid == 0:
            _end_with(parent)
            os.close(port_write)
            _rank({**order, **own, "port": int(os.read(port_read, 16))})
        children[pid] = own["rank"]
    _end_with_input()
    port, limit = order["port"], timedelta(seconds=order["limit"])
    try:
        if order["first"] == 0:
            store = TCPStore(order["host"], port, order["world"], True, limit, False)
            port = store.port
    except Exception as error:
        report(rank=0, ended=True, error=_one_line(error))
        os._exit(1)
    for _ in children:
        os.write(port_write, f"{port:<16}".encode())
    while children:
        pid, status = os.wait()
        rank = children.pop(pid)
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            report(rank=rank, ended=True, error=f"{ENDED_BY} {name}")
    # The ranks of other nodes may still need the store.
    report(over=True)
    signal.pause()


def prepare(backend: str) -> None:
    """Import before the forks the modules each rank would import, except those that open CUDA."""
    from torch.nn.parallel import DistributedDataParallel  # noqa: F401

    if backend != "nccl":
        with contextlib.suppress(Exception):
            # DDP's constructor imports it, which takes more than a second.
            import torch._dynamo  # noqa: F401


def _end_with_input() -> None:
    """End this process when its standard input does."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _one_line(error: BaseException) -> str:
    """Return an exception's type and message without what torch appends to it."""
    words = " ".join(str(error).split())
    for noise in (
        " Exception raised from ",
        " CUDA kernel errors might be asynchronously",
        " GPU device may be out of range",
        " Search for `cuda",
    ):
        words = words.partition(noise)[0]
    return f"{type(error).__name__}: {words[:500]}"


def _finish(work: Any, limit: timedelta) -> None:
    """Wait for a collective, but not forever."""
    began = time.monotonic()
    while not work.is_completed():
        waited = time.monotonic() - began
        if waited > limit.total_seconds():
            raise TimeoutError(f"no end within {limit.total_seconds():.0f} s")
        # Notice the end at most 2% late, without keeping a core busy.
        time.sleep(min(0.005, max(0.0001, waited / 50)))
    # If it failed, this raises the reason: TORCH_NCCL_BLOCKING_WAIT is set.
    work.wait()


def _agreed(holds: bool, device: Any, group: Any, limit: timedelta) -> bool:
    """Return whether something holds on all ranks."""
    import torch
    import torch.distributed as dist

    flag = torch.tensor([float(holds)], device=device)
    _finish(dist.all_reduce(flag, dist.ReduceOp.MIN, group=group, async_op=True), limit)
    return bool(flag.item())


# -- the collectives, each with an exact result


def _compare(values: torch.Tensor, expected: torch.Tensor) -> str:
    """Describe the first difference; empty if there is none."""
    differs = (values != expected).flatten().nonzero()
    if not len(differs):
        return ""
    place = int(differs[0])
    got, wanted = values.flatten()[place].item(), expected.flatten()[place].item()
    return f"element {place} is {got} instead of {wanted}"


def _numbers(device: torch.device) -> torch.Tensor:
    """Return whole numbers, which are summed without rounding."""
    import torch

    return torch.arange(ELEMENTS, dtype=torch.float64, device=device)


def _all_reduce(rank: int, ranks: int, device: torch.device) -> str:
    import torch.distributed as dist

    values = _numbers(device) + rank
    dist.all_reduce(values)
    return _compare(values, _numbers(device) * ranks + ranks * (ranks - 1) / 2)


def _large_all_reduce(rank: int, ranks: int, device: torch.device) -> str:
    import torch
    import torch.distributed as dist

    values = torch.full((LARGE,), float(rank + 1), device=device)
    dist.all_reduce(values)
    return _compare(values, torch.full_like(values, ranks * (ranks + 1) / 2))


def _broadcast(rank: int, ranks: int, device: torch.device) -> str:
    import torch.distributed as dist

    values = _numbers(device) + rank
    dist.broadcast(values, src=ranks - 1)
    return _compare(values, _numbers(device) + ranks - 1)


def _all_gather(rank: int, ranks: int, device: torch.device) -> str:
    import torch
    import torch.distributed as dist

    own = torch.full((ELEMENTS,), rank, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(gathered, own)
    return _compare(torch.stack(gathered)[:, 0].cpu(), torch.arange(ranks))


def _barrier(rank: int, ranks: int, device: torch.device) -> str:
    import torch.distributed as dist

    dist.barrier()
    return ""


def _ddp_step(rank: int, ranks: int, device: torch.device) -> str:
    """Take a step of DDP. Its gradient must be the mean of the ranks' separate gradients."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    def batch(of: int) -> torch.Tensor:
        return torch.arange(24, dtype=torch.float64, device=device).reshape(3, 8) * (of + 1) / 24

    def model() -> torch.nn.Linear:
        layer = torch.nn.Linear(8, 4, dtype=torch.float64)
        with torch.no_grad():
            for parameter in layer.parameters():
                numbers = torch.arange(parameter.numel(), dtype=torch.float64)
                parameter.copy_(numbers.reshape(parameter.shape) / 10)
        return layer.to(device)

    expected = torch.zeros(4, 8, dtype=torch.float64, device=device)
    for of in range(ranks):
        alone = model()
        alone(batch(of)).square().mean().backward()
        assert alone.weight.grad is not None
        expected += alone.weight.grad / ranks
    layer = model()
    devices = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(layer, device_ids=devices)
    wrapped(batch(rank)).square().mean().backward()
    if layer.weight.grad is None:
        return "no gradient"
    if torch.allclose(layer.weight.grad, expected, rtol=1e-6, atol=1e-9):
        return ""
    return _compare(layer.weight.grad, expected)


DDP_STEP = "a DDP step"
SOAKING = "a large all_reduce"  # A burn-in adds it, so that links and memory are busy

TESTS: dict[str, Callable[[int, int, torch.device], str]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "barrier": _barrier,
    DDP_STEP: _ddp_step,
    SOAKING: _large_all_reduce,
}

# -- one rank


def _rank(order: Order) -> None:
    """Run an order as one rank, and report what is known so far."""
    tell = partial(report, rank=order["rank"])
    began, cores = time.monotonic(), _Cores()
    ends = began + order["patience"]

    def report_waits() -> None:
        while True:
            time.sleep(max(1.0, order["limit"] / 5))
            tell(waited=cores.waited())

    threading.Thread(target=report_waits, daemon=True).start()
    try:
        right = _collectives(order, tell)
    except BaseException as error:
        import ctypes

        late = time.monotonic() - began >= order["limit"]
        tell(ended=True, error=_one_line(error), late=late, waited=cores.waited())
        # Print what C libraries have buffered: this process skips their exit handlers.
        ctypes.CDLL(None).fflush(None)
        os._exit(1)
    if order["stages"] and right:
        # If another rank ended, its parent reports how. This rank has already reported its results.
        with contextlib.suppress(Exception):
            _staged(order, ends, lambda stages: tell(stages=stages))
    tell(done=True)
    signal.pause()


def _collectives(order: Order, tell: Callable[..., None]) -> bool:
    """Test each collective, and repeat them for a burn-in. Return whether all ranks were right."""
    import torch
    import torch.distributed as dist

    backend, rank, world = order["backend"], order["rank"], order["world"]
    limit = timedelta(seconds=order["limit"])
    # With stages, the burn-in repeats the last of them.
    soak = 0.0 if order["stages"] else order["soak"]
    device = torch.device("cpu")
    if backend == "nccl":
        tell(did=OPENING)
        device = torch.device("cuda", order["local_rank"])
        torch.cuda.set_device(device)
    store = dist.TCPStore(order["host"], order["port"], world, False, limit, False)  # type: ignore[attr-defined]
    # With a device, NCCL connects here, and its barrier knows which GPU to use.
    bound = device if device.type == "cuda" else None
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=limit, device_id=bound
    )
    tell(did="init_process_group")
    names = [*order["tests"], SOAKING] if soak else order["tests"]
    until, rounds, wrong = time.monotonic() + soak, 0, False
    while True:
        rounds += 1
        for name in names:
            problem = TESTS[name](rank, world, device)
            if problem and not wrong:
                wrong = True
                tell(wrong=name, error=f"{name}: {problem}")
            elif rounds == 1 and not wrong:
                tell(did=name)
        right = _agreed(not wrong, device, None, limit)
        if right and rounds == 1 and world > 1 and order["measure"]:
            cores = _Cores()
            tell(bus=_bus_bandwidth(backend, device, world, None, limit), idle=cores.idle())
        tell(ok=not wrong, rounds=rounds)
        if not (right and soak and _agreed(time.monotonic() < until, device, None, limit)):
            return right


def _bus_bandwidth(backend: str, device: Any, size: int, group: Any, limit: timedelta) -> float:
    """Measure the bytes per second that an all_reduce moves over each link, as nccl-tests do.

    That is ``2 (n - 1) / n`` times the bytes reduced per second. The best of several sizes and
    batches counts.
    """
    import torch
    import torch.distributed as dist

    best, sizes = 0.0, BANDWIDTH_ELEMENTS[backend]
    for elements, larger in zip(sizes, (*sizes[1:], None), strict=True):
        values = torch.ones(elements, device=device)
        _batch(values, 1, group, limit)
        # All ranks have to run the same number of reductions, so the slowest rank decides.
        slowest = torch.tensor([_batch(values, 1, group, limit)], device=device)
        _finish(dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group, async_op=True), limit)
        alone = seconds = max(float(slowest), 1e-6)
        if alone < SLOW_S:
            count = max(1, min(MAX_IN_BATCH, int(BATCH_S / alone)))
            seconds = min(_batch(values, count, group, limit) for _ in range(BATCHES))
        best = max(best, values.numel() * 4 / seconds * 2 * (size - 1) / size)
        if larger is None or alone * larger / elements > SLOW_S:
            break
    return best


def _batch(values: Any, count: int, group: Any, limit: timedelta) -> float:
    """Run all_reduces one after the other. Return the seconds per all_reduce."""
    import torch.distributed as dist

    began = time.monotonic()
    for _ in range(count):
        # MAX, because a sum would grow without end. On a GPU, all are done when the last one is.
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=group, async_op=True)
        if values.device.type == "cpu":
            _finish(work, limit)
    _finish(work, limit)
    return (time.monotonic() - began) / count


class _Cores:
    """Measures how long this process ran, and waited for cores."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._unused, self._total = _machine_seconds()
        self._threads = _threads()
        self._throttled = _throttled()

    def idle(self) -> float:
        """Return the share of the time in which even the busiest thread was idle.

        Idle means that it neither ran nor waited for a core. Return the idle share of the machine's
        cores if that is less, since a rank may have waited for one that waited for a core. Return 0
        if the kernel does not report it, or if the container was throttled.
        """
        wall = time.monotonic() - self._began
        unused, total = _machine_seconds()
        busy = [sum(each) for each in self._spent()]
        if not busy or wall <= 0 or total <= self._total or _throttled() > self._throttled:
            return 0.0
        part = (unused - self._unused) / (total - self._total)
        return round(max(0.0, min(1 - max(busy) / wall, part)), 3)

    def waited(self) -> float:
        """Return the largest share of the time that a thread waited for a core; 1 if unknown."""
        wall, waits = time.monotonic() - self._began, [each[1] for each in self._spent()]
        if not waits or wall <= 0 or _throttled() > self._throttled:
            return 1.0
        return round(min(1.0, max(waits) / wall), 3)

    def _spent(self) -> list[tuple[float, float]]:
        found = ((each, self._threads.get(name, (0.0, 0.0))) for name, each in _threads().items())
        return [(now[0] - before[0], now[1] - before[1]) for now, before in found]


def _threads() -> dict[str, tuple[float, float]]:
    """Return the seconds that each thread of this process has run, and waited to run."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/schedstat") as file:
                ran, waited, _ = map(int, file.read().split())
                found[thread] = ran / 1e9, waited / 1e9
    return found


def _machine_seconds() -> tuple[float, float]:
    """Return how long this machine's cores were idle, and the total."""
    with contextlib.suppress(OSError, ValueError), open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
        return float(sum(ticks[3:5])), float(sum(ticks))
    return 0.0, 0.0


def _throttled() -> int:
    """Return the number of times this container's CPU quota throttled it."""
    for place in ("cpu.stat", "cpu/cpu.stat"):
        with contextlib.suppress(OSError, ValueError), open(f"/sys/fs/cgroup/{place}") as file:
            return int(dict(line.split() for line in file).get("nr_throttled", 0))
    return 0


# -- NCCL, stage by stage


def _staged(order: Order, ends: float, report_stages: Callable[[dict[str, Any]], None]) -> None:
    """Reduce within each node, then between pairs of nodes in log2(n) rounds, then over all ranks.

    The backend is ``order["stages"]``: NCCL on GPUs, or gloo on the CPU. Everything ends at the
    monotonic time ``ends``. With each result, ``report_stages`` gets the ``stages`` that ended,
    the one it is ``doing``, the first one ``untested`` for lack of time, and finally ``ok``.
    """
    import torch
    import torch.distributed as dist

    node_of: list[int] = order["node_of"]
    rank, nodes = order["rank"], max(node_of) + 1
    limit = timedelta(seconds=order["stage_limit"])
    done: list[dict[str, Any]] = []

    def known(**more: Any) -> None:
        report_stages({"stages": done, "ok": False, **more})

    known(doing={"name": _stages(nodes)[0][0], "nodes": [node_of[rank]]})
    if order["stages"] == "nccl":
        # Do not blame a stage for waking the GPU, which takes seconds without persistence mode.
        gpu = torch.device("cuda", order["local_rank"])
        limit_s = min(OPEN_S, ends - time.monotonic() - 2 * MIN_STAGE_S)
        _on_thread(lambda: torch.zeros(1, device=gpu), limit_s)
    known()
    # The ranks of a set that hangs reach their limit first, while the others wait here.
    signals = dist.new_group(timeout=3 * limit, backend="gloo")

    def agree(failed: list[bool]) -> tuple[list[bool], bool]:
        """Combine the ranks' flags with a logical or: which sets failed, and whether time is up."""
        late = time.monotonic() + MIN_STAGE_S > ends
        flags = torch.tensor([*failed, late], dtype=torch.int64)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=signals)
        *bad, over = (bool(flag) for flag in flags.tolist())
        return bad, over

    def run(name: str, sets: list[list[int]], most: timedelta) -> tuple[list[list[int]], bool]:
        """Run a stage. Return the sets of nodes that failed, and whether time is up."""
        within = min(most, timedelta(seconds=max(1.0, ends - time.monotonic() - GRACE_S)))
        failed = [False] * len(sets)
        # Every rank creates every group, in the same order.
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
        bad, over = agree(failed)
        return [chosen for chosen, each in zip(sets, bad, strict=True) if each], over

    over = agree([])[1]
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


def _stages(nodes: int) -> list[tuple[str, list[list[int]]]]:
    """Return the stages with their sets of nodes: each alone, pairs in log2(n) rounds, all."""
    stages = [("inside the node", [[node] for node in range(nodes)])]
    for power in (2**bit for bit in range((nodes - 1).bit_length())):
        pairs = [[a, a ^ power] for a in range(nodes) if a < a ^ power < nodes]
        stages.append((f"between nodes {power} apart", pairs))
    return [*stages, (ALL_NODES, [list(range(nodes))])]


def _with_others(failed: list[list[int]], nodes: int) -> list[list[list[int]]]:
    """Pair each node of a failed pair with one that did not fail, to tell a bad node from a link.

    Return the rounds of pairs; empty if no pair failed, or if all nodes did.
    """
    suspects = sorted({node for pair in failed for node in pair})
    others = [node for node in range(nodes) if node not in suspects]
    if any(len(each) != 2 for each in failed) or not others:
        return []
    rounds = [
        [list(pair) for pair in zip(suspects[first:], others, strict=False)]
        for first in range(0, len(suspects), len(others))
    ]
    return rounds[:MAX_ROUNDS]


def _on_thread(call: Callable[[], Any], seconds: float) -> list[Any]:
    """Return the result of a call that may never return; empty if it takes too long."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    return found


def _limited(
    doing: dict[str, Any], ranks: list[int], group: Any, order: Order, limit: timedelta
) -> dict[str, Any]:
    """Run a stage on a thread: if NCCL cannot connect, its first call never returns."""
    seconds = limit.total_seconds()
    call = partial(_stage, doing["name"], doing["nodes"], ranks, group, order, limit)
    words = f"no end within {seconds:.0f} s: the ranks did not connect"
    late = {**doing, "error": words, "bus": 0.0}
    return next(iter(_on_thread(call, seconds + order.get("soak", 0.0) + GRACE_S)), late)


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
            # CUDA's current device is per thread.
            torch.cuda.set_device(device)
        until, again = time.monotonic() + order.get("soak", 0.0) * (name == ALL_NODES), True
        while again:
            ones = torch.full((ELEMENTS,), float(order["rank"] + 1), device=device)
            _finish(dist.all_reduce(ones, group=group, async_op=True), limit)
            if not bool((ones == float(sum(each + 1 for each in ranks))).all()):
                return {**stage, "error": WRONG_SUM}
            again = _agreed(time.monotonic() < until, device, group, limit)
        if len(ranks) > 1:
            stage["bus"] = _bus_bandwidth(backend, device, len(ranks), group, limit)
    except Exception as error:
        stage["error"] = _one_line(error)
    return stage


if __name__ == "__main__":
    # Do not import modules from this file's directory.
    del sys.path[0]
    main()
