"""The ranks of the self-test, a program: ``python ranks.py``.

It imports torch, writes ``{"ready": true}``, and reads one order. Orders and answers are lines of
JSON on standard input and output. The program ends when its standard input does.

An order with ``backend`` is for all ranks of one machine, which are forked, so that many start in
the time of one. Each writes ``did`` for a correct collective, ``wrong`` for an incorrect one,
``error`` for an exception or a signal, and ``done`` with the number of ``rounds``.

Any other order is for one rank of a job across nodes. It writes its whole answer again whenever it
knows more, with ``more`` while that is not all: NCCL may hang in a call that never returns, or end
the process.
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

WRONG_SUM, WRONG_VALUES = "all_reduce gave a wrong sum", "broadcast gave wrong values"

BANDWIDTH_ELEMENTS = {"nccl": (2**20, 2**24), "gloo": (2**16, 2**20, 2**22)}
"""Elements of the all_reduces that measure the bus bandwidth, in float32: up to 64 and 16 MiB."""

BATCHES, BATCH_S, MAX_IN_BATCH = 3, 0.05, 20
"""Batches of each size, the seconds one should take, and its most reductions. The best one counts:
other work makes a link look slow, and nothing makes it look fast."""

AGAIN = "with another node"  # the stage that tries the nodes of a failed pair with other nodes
ALL_NODES = "of all nodes"  # the last stage, which a burn-in repeats

AGAIN_S, MAX_ROUNDS = 10, 2
"""Seconds and rounds of stage `AGAIN`. Every node has its turn, unless nearly all failed."""

SLOW_S = 0.4  # an all_reduce that takes longer is not repeated, nor tried with a larger size
OPEN_S = 30.0  # seconds for CUDA to open the GPUs
MIN_STAGE_S = 5.0  # seconds that have to be left for a stage to begin
GRACE_S = 2.0  # seconds after its limit for a stage to report itself what failed

_out = 1


def report(**facts: object) -> None:
    """Write one line, in one write, so that lines of several ranks do not mix."""
    os.write(_out, (json.dumps(facts) + "\n").encode())


def main() -> None:
    """Carry out one order."""
    global _out
    _die_with_parent()
    # Keep stdout for answers: libraries print to it, NCCL in pieces of any size.
    _out = os.dup(1)
    os.dup2(2, 1)
    # Importing torch makes many objects that stay. The collector would scan them repeatedly.
    gc.disable()
    import torch.distributed  # noqa: F401

    report(ready=True)
    line = sys.stdin.readline()
    order = json.loads(line) if line else {}
    failed = 0
    if "backend" in order:
        failed = _all_ranks(order)
    elif order:
        _end_with_input()
        _rank_of_nodes(order)
    # gloo's threads race with the interpreter's own exit.
    os._exit(1 if failed else 0)


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
        # Late by a fiftieth at most, and without keeping a core busy.
        time.sleep(min(0.005, max(0.0001, waited / 50)))
    # If it failed, this raises the reason: TORCH_NCCL_BLOCKING_WAIT is set.
    work.wait()


def _goes_on(until: float, device: Any, group: Any, limit: timedelta) -> bool:
    """Return whether a burn-in goes on: all ranks still have time."""
    import torch
    import torch.distributed as dist

    flag = torch.tensor([float(time.monotonic() < until)], device=device)
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
    """Take a step of DDP. Its gradient must be the mean of the gradients of the ranks alone."""
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


TESTS: dict[str, Callable[[int, int, torch.device], str]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "barrier": _barrier,
    "a DDP step": _ddp_step,
}

SOAKING = {"a large all_reduce": _large_all_reduce}
"""Tests that a burn-in adds, so that links and memory are busy."""


# -- all ranks of one machine


def _all_ranks(order: Order) -> int:
    """Fork the ranks of this machine and be rank 0. Return how many ranks failed.

    Each collective has ``limit`` seconds. All of them are repeated for ``soak`` seconds.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is, since 1.0

    backend, ranks, limit = order["backend"], order["ranks"], timedelta(seconds=order["limit"])
    prepare(backend)
    # The store serves from a thread, so it is made after the forks: its port comes by a pipe.
    port_read, port_write = os.pipe()
    children = []
    for rank in range(1, ranks):
        pid = os.fork()
        if pid == 0:
            _die_with_parent()
            os.close(port_write)
            port = int(os.read(port_read, 16))
            store = TCPStore("127.0.0.1", port, ranks, is_master=False, timeout=limit)
            os._exit(_rank_of_machine(backend, rank, ranks, store, limit, order["soak"]))
        children.append(pid)
    os.close(port_read)
    _end_with_input()
    statuses: list[int] = []
    ended = threading.Thread(target=_follow, args=(children, statuses), daemon=True)
    ended.start()
    store = TCPStore("127.0.0.1", 0, ranks, is_master=True, timeout=limit, wait_for_workers=False)
    for _ in children:
        os.write(port_write, f"{store.port:<16}".encode())
    failed = _rank_of_machine(backend, 0, ranks, store, limit, order["soak"])
    ended.join()
    return failed + sum(status != 0 for status in statuses)


def prepare(backend: str) -> None:
    """Import before the forks what each rank would import, but nothing that opens CUDA."""
    import torch
    from torch.nn.parallel import DistributedDataParallel  # noqa: F401

    if backend != "nccl":
        with contextlib.suppress(Exception):
            # DDP's constructor imports it, which takes more than a second.
            import torch._dynamo
    # Several ranks share the cores, and a fork keeps no pool of threads.
    torch.set_num_threads(1)


def _die_with_parent() -> None:
    """Let the kernel kill this process when the one that started it ends. Linux only."""
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def _follow(children: list[int], statuses: list[int]) -> None:
    """Collect the exit statuses of forked ranks, and report at once a rank that was killed."""
    while len(statuses) < len(children):
        pid, status = os.waitpid(-1, 0)
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            report(rank=children.index(pid) + 1, error=f"the rank was ended by {name}")
        statuses.append(status)


def _rank_of_machine(
    backend: str, rank: int, ranks: int, store: Any, limit: timedelta, soak: float
) -> int:
    """Run the tests as one rank. Return 0 if every result was right, else 1."""
    import torch
    import torch.distributed as dist

    wrong = 0
    try:
        device = torch.device("cpu")
        if backend == "nccl":
            report(rank=rank, did=OPENING)
            torch.cuda.set_device(rank)
            device = torch.device("cuda", rank)
        # With a device, NCCL connects here, and its barrier knows which GPU to use.
        bound = device if device.type == "cuda" else None
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=ranks, timeout=limit, device_id=bound
        )
        report(rank=rank, did="init_process_group")
        ends, rounds = time.monotonic() + soak, 0
        while rounds == 0 or (soak and not wrong and _goes_on(ends, device, None, limit)):
            rounds += 1
            for name, test in {**TESTS, **(SOAKING if soak else {})}.items():
                problem = test(rank, ranks, device)
                if problem:
                    wrong += 1
                    report(rank=rank, wrong=f"{name}: {problem}")
                elif rounds == 1:
                    report(rank=rank, did=name)
        # No rank leaves while another may need its connection, or its GPU's memory.
        if store.add("came to the end", 1) == ranks:
            store.set("all came to the end", "1")
        store.wait(["all came to the end"], limit)
    except BaseException as error:
        import ctypes

        report(rank=rank, error=_one_line(error))
        # Print what C libraries have buffered: this process skips their exit handlers.
        ctypes.CDLL(None).fflush(None)
        return 1
    report(rank=rank, done=True, rounds=rounds)
    return 1 if wrong else 0


# -- one rank of a job across nodes: gloo over all ranks


def _rank_of_nodes(order: Order) -> None:
    """Test gloo, then the stages, and report what is known so far."""
    answer: dict[str, Any] = {"rank": order["rank"]}
    began, cores = time.monotonic(), _Cores()
    ends = began + order["patience"]
    try:
        answer |= _gloo(order)
    except Exception as error:
        late = time.monotonic() - began >= order["limit"]
        answer |= {"ok": False, "error": _one_line(error), "late": late, "idle": cores.idle()}
    if order["stages"] and answer["ok"]:

        def known(stages: dict[str, Any]) -> None:
            answer["stages"] = stages
            report(**answer, more=True)

        # If another rank ended, its starter reports how. What this rank knows was reported.
        with contextlib.suppress(Exception):
            _staged(order, ends, known)
    report(**answer, more=False)


def _gloo(order: Order) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    limit, rank, world = timedelta(seconds=order["limit"]), order["rank"], order["world"]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        order["host"], order["port"], world, rank == 0, timeout=limit, wait_for_workers=False
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    cpu, rounds = torch.device("cpu"), 0
    result: dict[str, Any] = {}

    def wrong() -> str:
        if _all_reduce(rank, world, cpu):
            return WRONG_SUM
        return WRONG_VALUES if _broadcast(rank, world, cpu) else ""

    error = wrong()
    if world > 1 and not error:
        cores = _Cores()
        result |= {"bus": _bus_bandwidth("gloo", cpu, world, None, limit), "idle": cores.idle()}
    until = time.monotonic() + order.get("soak", 0.0)
    while not (order["stages"] or error) and _goes_on(until, cpu, None, limit):
        error, rounds = wrong(), rounds + 1
    # A barrier. torch's own looks for GPUs first, which gloo does not need.
    dist.all_reduce(torch.zeros(1))
    return {**result, "ok": not error, "error": error, "rounds": rounds}


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
        # All ranks have to run as many reductions, so the slowest rank decides.
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
    """Run all_reduces one after the other. Return the seconds that each took."""
    import torch.distributed as dist

    began = time.monotonic()
    for _ in range(count):
        # MAX, because a sum would grow without end. On a GPU the last one is done when all are.
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=group, async_op=True)
        if values.device.type == "cpu":
            _finish(work, limit)
    _finish(work, limit)
    return (time.monotonic() - began) / count


class _Cores:
    """Measures whether this process waited for cores."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._unused, self._total = _machine_seconds()
        self._threads = _thread_seconds()
        self._throttled = _throttled()

    def idle(self) -> float:
        """Return the share of the time in which even the busiest thread was idle.

        Idle means that it neither ran nor waited for a core. Return the idle share of the machine's
        cores if that is less, since a rank may have waited for one that waited for a core. Return 0
        if the kernel does not report it, or if the container was throttled.
        """
        wall = time.monotonic() - self._began
        unused, total = _machine_seconds()
        busy = [each - self._threads.get(name, 0.0) for name, each in _thread_seconds().items()]
        if not busy or wall <= 0 or total <= self._total or _throttled() > self._throttled:
            return 0.0
        part = (unused - self._unused) / (total - self._total)
        return round(max(0.0, min(1 - max(busy) / wall, part)), 3)


def _thread_seconds() -> dict[str, float]:
    """Return how long each thread of this process has run or waited to run."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/schedstat") as file:
                found[thread] = sum(map(int, file.read().split()[:2])) / 1e9
    return found


def _machine_seconds() -> tuple[float, float]:
    """Return how long this machine's cores were idle, and the total."""
    with contextlib.suppress(OSError, ValueError), open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
        return float(sum(ticks[3:5])), float(sum(ticks))
    return 0.0, 0.0


def _throttled() -> int:
    """Return how often this container was throttled by its CPU quota."""
    for place in ("cpu.stat", "cpu/cpu.stat"):
        with contextlib.suppress(OSError, ValueError), open(f"/sys/fs/cgroup/{place}") as file:
            return int(dict(line.split() for line in file).get("nr_throttled", 0))
    return 0


# -- one rank of a job across nodes: NCCL, stage by stage


def _staged(order: Order, ends: float, report_stages: Callable[[dict[str, Any]], None]) -> None:
    """Reduce within each node, then between pairs of nodes in log2(n) rounds, then over all ranks.

    The backend is ``order["stages"]``: NCCL on GPUs, or gloo on the CPU. Everything ends at the
    monotonic time ``ends``. Whenever more is known, ``report_stages`` gets the ``stages`` that
    ended, the one ``doing``, the first one ``untested`` for lack of time, and finally ``ok``.
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
        # Waking a GPU is no fault of a stage: without persistence mode it takes seconds.
        gpu = torch.device("cuda", order["local_rank"])
        limit_s = min(OPEN_S, ends - time.monotonic() - 2 * MIN_STAGE_S)
        _on_thread(lambda: torch.zeros(1, device=gpu), limit_s)
    known()
    # The ranks of a set that hangs reach their limit first, while the others wait here.
    signals = dist.new_group(timeout=3 * limit, backend="gloo")

    def agree(failed: list[bool]) -> tuple[list[bool], bool]:
        """Return what is true on any rank: which sets failed, and whether the time is over."""
        late = time.monotonic() + MIN_STAGE_S > ends
        flags = torch.tensor([*failed, late], dtype=torch.int64)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=signals)
        *bad, over = (bool(flag) for flag in flags.tolist())
        return bad, over

    def run(name: str, sets: list[list[int]], most: timedelta) -> tuple[list[list[int]], bool]:
        """Run a stage. Return the sets of nodes that failed, and whether the time is over."""
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
    """Pair each node of a failed pair with one that did not fail: is it the node or the link?

    Return the rounds of pairs; none if no pair failed, or if all nodes did.
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
    """Return the result of a call that may never return; empty after so many seconds."""
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
            # Valid for this thread.
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


if __name__ == "__main__":
    # This file's directory is no place to import from.
    del sys.path[0]
    main()
