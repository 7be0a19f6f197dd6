"""A job that gets stuck, its ranks in several places."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist


def wait_for_others() -> None:
    """A collective that the other ranks never join."""
    dist.all_reduce(torch.ones(64))  # at: collective


def sleep() -> None:
    """A rank that is elsewhere."""
    time.sleep(600)  # at: sleep


def hold_gil() -> None:
    """A call into native code that keeps the GIL; a signal ends it, so it is made again."""
    libc = ctypes.PyDLL(None)
    while True:
        libc.pause()  # at: gil


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("places", nargs="+", help="of rank 0, of rank 1, ...")
    places = parser.parse_args().places
    place = places[int(os.environ["RANK"])]
    if place == "before":
        time.sleep(600)  # at: before
    dist.init_process_group("gloo")  # at: init
    if place == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)  # at: stopped
    if place == "dead":
        os.kill(os.getpid(), signal.SIGKILL)
    {"collective": wait_for_others, "sleep": sleep, "gil": hold_gil}[place]()


if __name__ == "__main__":
    main()
