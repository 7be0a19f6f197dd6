"""Ctrl-C that comes in a hook which C++ calls: it is raised where it would be without the hook."""

from __future__ import annotations

import gc
import signal
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from ddpdoctor.probe.runtime import hot
from tests.conftest import Doctor
from tests.support.launching import PYTHON

compiled = pytest.mark.skipif(hot.core is None, reason="in Python it cannot be had")


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(_: Any) -> None:
    raise KeyboardInterrupt


def innermost(error: BaseException) -> str:
    return traceback.extract_tb(error.__traceback__)[-1].name


def called_and_on(hook: Callable[[Any], None]) -> None:
    hook(None)
    while True:
        pass


@compiled
def test_it_is_raised_behind_the_hook() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        called_and_on(hot.deferring(interrupted))
    assert innermost(caught.value) == "called_and_on"


@compiled
def test_it_comes_out_of_a_collection() -> None:
    def hook(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            raise KeyboardInterrupt

    def collected_and_on() -> None:
        gc.collect()
        while True:
            pass

    callback = hot.deferring(hook)
    gc.callbacks.append(callback)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            collected_and_on()
    finally:
        gc.callbacks.remove(callback)
    assert innermost(caught.value) == "collected_and_on"


@compiled
def test_a_handler_of_the_jobs_is_called_once() -> None:
    calls = []

    def handler(number: int, frame: FrameType | None) -> None:
        calls.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handler)

    def hook(_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        hot.deferring(hook)(None)
    assert calls == [signal.SIGINT]


def test_all_else_is_as_without_it() -> None:
    seen: list[int] = []
    assert hot.deferring(seen.append)(7) is None
    assert seen == [7]

    def fails(_: Any) -> None:
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad") as caught:
        hot.deferring(fails)(None)
    assert innermost(caught.value) == "fails"


JOB = """
import os, signal, threading, time, traceback
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.set_num_threads(1)
wide = [nn.Linear(1024, 1024) for _ in range(12)]
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 1024), *wide))
loss = ddp(torch.randn(2048, 8)).square().mean()

def interrupt():
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
began = time.monotonic()
try:
    loss.backward()
    while time.monotonic() - began < 100:
        pass
except KeyboardInterrupt:
    frames = traceback.format_exc()
    print("probe" in frames, all(p.grad is not None for p in ddp.parameters()), flush=True)
dist.destroy_process_group()
"""


@compiled
@pytest.mark.slow
def test_backward_is_interrupted_where_it_is_without_us(doctor: Doctor) -> None:
    doctor.write("interrupted.py", JOB)
    done = doctor.run("--", PYTHON, "interrupted.py")
    assert done.stdout.split() == ["False", "True"], done.stderr
