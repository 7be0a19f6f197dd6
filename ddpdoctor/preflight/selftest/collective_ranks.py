"""The ranks of the self-test: ``python collective_ranks.py BACKEND RANKS SECONDS SOAK``.

It imports torch once and forks the ranks, so that many ranks start in the time of one. Rank 0
serves the store, on a free port of the loopback. Each rank writes lines of JSON to stdout:
``{"rank": 0, "did": "all_reduce"}`` for each collective whose result was right, ``"wrong": "..."``
for one that was not, ``"error": "..."`` for an exception or for a rank that a signal ended,
``"done": true`` and the rounds of the tests at the end. The end of stdin ends it all.
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ELEMENTS = 1000
"""So that a reduction goes through more than one packet."""


LARGE = 1 << 22
"""Of those that are repeated: 16 MiB."""

OPENING = "opening its GPU"
"""What a rank reports before it opens CUDA, which can take long, or never come back."""

_out = 1


def report(rank: int, **facts: object) -> None:
    """A line for the process that started this, in one write, so that ranks do not mix."""
    os.write(_out, (json.dumps({"rank": rank, **facts}) + "\n").encode())


def _keep_output() -> None:
    """Let only `report` write to stdout: with NCCL_DEBUG, NCCL does, in any pieces."""
    global _out
    _out = os.dup(1)
    os.dup2(2, 1)


def main(backend: str, ranks: int, seconds: float, soak: float) -> int:
    """Start the ranks and wait for them; the number that did not end well.

    Args:
        backend: ``gloo`` or ``nccl``.
        ranks: How many.
        seconds: For each collective.
        soak: Seconds for which all of it is repeated.
    """
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is, since 1.0

    _keep_output()
    _prepare(backend)
    limit = timedelta(seconds=seconds)
    # Made before the forks, that all ranks know the port; it serves from a thread, so rank 0 is
    # this process.
    port_read, port_write = os.pipe()
    children = []
    for rank in range(1, ranks):
        pid = os.fork()
        if pid == 0:
            _die_with_parent()
            os.close(port_write)
            port = int(os.read(port_read, 16))
            store = TCPStore("127.0.0.1", port, ranks, is_master=False, timeout=limit)
            os._exit(_rank(backend, rank, ranks, store, limit, soak))
        children.append(pid)
    os.close(port_read)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    statuses: list[int] = []
    ended = threading.Thread(target=_follow, args=(children, statuses), daemon=True)
    ended.start()
    store = TCPStore("127.0.0.1", 0, ranks, is_master=True, timeout=limit, wait_for_workers=False)
    for _ in range(1, ranks):
        os.write(port_write, f"{store.port:<16}".encode())
    failed = _rank(backend, 0, ranks, store, limit, soak)
    ended.join()
    return failed + sum(status != 0 for status in statuses)


def _follow(children: list[int], statuses: list[int]) -> None:
    """Wait for the forked ranks, and report at once one that a signal ended: others wait for it.

    Args:
        children: Their pids, from rank 1 on.
        statuses: Where their exit statuses go, as they come.
    """
    while len(statuses) < len(children):
        pid, status = os.waitpid(-1, 0)
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            report(children.index(pid) + 1, error=f"the rank was ended by {name}")
        statuses.append(status)


def _prepare(backend: str) -> None:
    """Import before the forks what each rank would otherwise import for itself.

    Nothing that might open CUDA, which does not survive a fork.
    """
    # It would look a dozen times at all that importing makes, which is to stay.
    gc.disable()
    import torch
    from torch.nn.parallel import DistributedDataParallel  # noqa: F401

    if backend != "nccl":
        with contextlib.suppress(Exception):
            # DDP's constructor imports it, which takes more than a second.
            import torch._dynamo
    # Several ranks share the cores, and a fork keeps no pool of threads.
    torch.set_num_threads(1)


def _die_with_parent() -> None:
    """Let the kernel end this rank when the process that forked it ends. Linux only."""
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def _end_with_stdin() -> None:
    """End this process when its starter has; the other ranks end with it."""
    while os.read(0, 64):
        pass
    os._exit(1)


def _rank(backend: str, rank: int, ranks: int, store: Any, limit: Any, soak: float) -> int:
    """Take part as one rank; 0 if every result was right."""
    import torch.distributed as dist

    wrong = 0
    try:
        device = _device(backend, rank)
        # Bound to it, NCCL connects here, and its barrier knows where.
        bound = device if device.type == "cuda" else None
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=ranks, timeout=limit, device_id=bound
        )
        report(rank, did="init_process_group")
        ends, rounds = time.monotonic() + soak, 0
        while rounds == 0 or _goes_on(time.monotonic() < ends, device):
            rounds += 1
            for name, test in {**TESTS, **(SOAKING if soak else {})}.items():
                problem = test(rank, ranks, device)
                if problem:
                    wrong += 1
                    report(rank, wrong=f"{name}: {problem}")
                elif rounds == 1:
                    report(rank, did=name)
            if not soak or wrong:
                break
        # None leaves while another may still need its connection, or its GPU's memory.
        if store.add("came to the end", 1) == ranks:
            store.set("all came to the end", "1")
        store.wait(["all came to the end"], limit)
    except BaseException as error:
        report(rank, error=_one_line(error))
        _flush()
        return 1
    report(rank, done=True, rounds=rounds)
    return 1 if wrong else 0


def _goes_on(time_left: bool, device: torch.device) -> bool:
    """Whether all ranks begin another round: rank 0 has the clock."""
    import torch
    import torch.distributed as dist

    flag = torch.tensor([int(time_left)], device=device)
    dist.broadcast(flag, src=0)
    return bool(flag.item())


def _one_line(error: BaseException) -> str:
    """An exception's type and message, without what torch adds to every one of CUDA's."""
    words = " ".join(str(error).split())
    for noise in (
        " Exception raised from ",
        " CUDA kernel errors might be asynchronously",
        " GPU device may be out of range",
        " Search for `cuda",
    ):
        words = words.partition(noise)[0]
    return f"{type(error).__name__}: {words[:500]}"


def _flush() -> None:
    """Write out what C libraries have printed: the ranks end without."""
    import ctypes

    ctypes.CDLL(None).fflush(None)


def _device(backend: str, rank: int) -> torch.device:
    import torch

    if backend != "nccl":
        return torch.device("cpu")
    report(rank, did=OPENING)
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _all_reduce(rank: int, ranks: int, device: torch.device) -> str:
    import torch
    import torch.distributed as dist

    values = torch.arange(ELEMENTS, dtype=torch.float64, device=device) + rank
    dist.all_reduce(values)
    expected = torch.arange(ELEMENTS, dtype=torch.float64, device=device) * ranks
    return _compare(values, expected + ranks * (ranks - 1) / 2)


def _large_all_reduce(rank: int, ranks: int, device: torch.device) -> str:
    import torch
    import torch.distributed as dist

    values = torch.full((LARGE,), float(rank + 1), device=device)
    dist.all_reduce(values)
    return _compare(values, torch.full_like(values, ranks * (ranks + 1) / 2))


def _broadcast(rank: int, ranks: int, device: torch.device) -> str:
    import torch
    import torch.distributed as dist

    values = torch.full((ELEMENTS,), float(rank), device=device)
    dist.broadcast(values, src=ranks - 1)
    return _compare(values, torch.full_like(values, ranks - 1))


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
    """A step of DDP: its gradient must be the mean of the gradients that the ranks have alone."""
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


def _compare(values: torch.Tensor, expected: torch.Tensor) -> str:
    """Empty if they are equal, else the first difference."""
    differs = (values != expected).flatten().nonzero()
    if not len(differs):
        return ""
    place = int(differs[0])
    got, wanted = values.flatten()[place].item(), expected.flatten()[place].item()
    return f"element {place} is {got} instead of {wanted}"


TESTS: dict[str, Callable[[int, int, torch.device], str]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "barrier": _barrier,
    "a DDP step": _ddp_step,
}

SOAKING = {"a large all_reduce": _large_all_reduce}
"""What is repeated besides, so that links and memory are busy."""

if __name__ == "__main__":
    # The folder of this file is no place to import from.
    del sys.path[0]
    status = main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
    # gloo's threads race with the interpreter's own exit.
    os._exit(1 if status else 0)
