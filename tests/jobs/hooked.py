"""Ends in the ways that its arguments name, having set hooks of its own.

Each way is that of a forked rank 0, an attempt of its own; its exit status is printed.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import faulthandler
import os
import socket
import sys
import threading
import traceback
from typing import Any

import torch
import torch._dynamo  # DDP imports it: once for all children
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def mine(kind: Any, error: Any, trace: Any) -> None:
    print("my own hook:", kind.__name__, error, flush=True)


def mine_and_out(kind: Any, error: Any, trace: Any) -> None:
    print("my own hook:", kind.__name__, error, flush=True)
    os._exit(5)


def chained(before: Any) -> Any:
    def hook(kind: Any, error: Any, trace: Any) -> None:
        print("before the others", flush=True)
        before(kind, error, trace)

    return hook


def leave_thread() -> None:
    thread = threading.Thread(target=lambda: sys.exit(6))
    thread.start()
    thread.join()


def catch_exit() -> None:
    with contextlib.suppress(SystemExit):
        sys.exit(7)
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--number", type=int)
    with contextlib.suppress(SystemExit):
        argparse.ArgumentParser(add_help=False).parse_args(["--unknown"])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> None:
    for attempt, how in enumerate(sys.argv[1:]):
        print(f"== {how}", flush=True)
        child = os.fork()
        if child == 0:
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
            end(how)
            return
        _, status = os.waitpid(child, 0)
        print("status", os.waitstatus_to_exitcode(status), flush=True)


def end(how: str) -> None:
    if how == "faulthandler early":
        faulthandler.enable(sys.stdout)
    where = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(torch.ones(4, 4)).sum().backward()
    optimizer.step()
    if how == "hook":
        sys.excepthook = mine
    elif how == "hook and out":
        sys.excepthook = mine_and_out
    elif how == "hook chained":
        sys.excepthook = chained(sys.excepthook)
    elif how == "hook of python":
        sys.excepthook = sys.__excepthook__
    elif how == "faulthandler":
        faulthandler.enable(sys.stdout)
    elif how == "faulthandler if none":
        if not faulthandler.is_enabled():
            faulthandler.enable(sys.stdout)
    elif how == "faulthandler state":
        print("enabled", faulthandler.is_enabled())
    elif how == "atexit":
        atexit.register(lambda: os._exit(8))
    elif how == "thread exits":
        leave_thread()
    elif how == "exit caught":
        catch_exit()
    elif how == "error caught":
        try:
            ddp(torch.ones(4, 5))
        except RuntimeError:
            traceback.print_exc(limit=0, file=sys.stdout)
    elif how == "thread fails":
        threading.excepthook = lambda args: print("thread", args.exc_type.__name__, flush=True)
        thread = threading.Thread(target=lambda: ddp(torch.ones(4, 5)))
        thread.start()
        thread.join()
    if how.startswith("hook"):
        raise ValueError("the wrong sort of batch")
    if how.startswith("faulthandler") and not how.endswith("state"):
        sys.stdout.flush()
        ctypes.string_at(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
