"""Print as JSON what a process can see of its interpreter and, with an argument, of torch.

Each fact has a name and a value without addresses. `torch` imports torch and uses it, `rank` trains
a few steps in a process group, too.
"""

import sys

LOADED = sorted(sys.modules)
PLACES = list(sys.path), [repr(type(each)) for each in sys.meta_path], list(sys.path_hooks)

import argparse
import asyncio
import atexit
import builtins
import concurrent.futures.process
import contextlib
import copy
import ctypes
import faulthandler
import functools
import gc
import importlib.util
import inspect
import json
import linecache
import logging
import multiprocessing.pool
import multiprocessing.popen_forkserver
import multiprocessing.popen_spawn_posix
import os
import pickle
import random
import re
import resource
import runpy
import signal
import socket
import subprocess
import tempfile
import threading
import traceback
import types
import warnings

STANDARD = [
    argparse, asyncio, atexit, builtins, contextlib, copy, faulthandler, functools, gc, importlib,
    importlib.util, inspect, linecache, logging, os, pickle, random, runpy, signal, socket,
    subprocess, sys, tempfile, threading, traceback, warnings,
    *(sys.modules[name] for name in sorted(sys.modules)
      if name.startswith(("multiprocessing", "concurrent"))),
]  # fmt: skip

WRAPPED = (
    "torch.autograd", "torch.amp.grad_scaler", "torch.distributed.algorithms.join",
    "torch.distributed.checkpoint.state_dict", "torch.distributed.distributed_c10d",
    "torch.distributed.fsdp._fully_shard._fully_shard", "torch.distributed.pipelining.stage",
    "torch.multiprocessing.spawn", "torch.nn.modules.module", "torch.nn.parallel.data_parallel",
    "torch.nn.parallel.distributed", "torch.nn.utils.clip_grad", "torch.optim.lr_scheduler",
    "torch.optim.optimizer", "torch.optim.sgd", "torch.serialization", "torch.utils.data.dataloader",
    "torch.utils.data.dataset", "torch.utils.data.distributed",
)  # fmt: skip
"""Modules of torch that training goes through: all is compared, not the code alone."""

facts = {}
output = os.environ.pop("ODD_FACTS")


def note(name, value):
    text = re.sub(r" at 0x[0-9a-f]+|0x[0-9a-f]{8,}", "", str(value))
    # Sets have any order, and the numbers of threads any value.
    facts[name] = re.sub(r"\{\d{9,}: .*|\{<class[^}]*\}", "#", text)


def attempt(function, *args):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args)
    except Exception as error:
        return type(error).__name__


def look(name, thing, whole=True):
    """Note what code can tell of a callable, all but its address."""
    code = getattr(thing, "__code__", None)
    code = code if isinstance(code, types.CodeType) else None
    made = [type(thing), sorted(getattr(thing, "__dict__", {}))]
    if code is not None:
        made += [code.co_filename.rpartition("/")[2], code.co_name, thing.__defaults__]
    note(f"{name} code", made)
    seen = [getattr(thing, key, None) for key in ("__module__", "__qualname__", "__name__")]
    if whole:
        seen += [getattr(thing, "__doc__", None), attempt(inspect.signature, thing)]
        seen += [attempt(lambda: pickle.loads(pickle.dumps(thing)) is thing)]
        seen += [len(attempt(inspect.getsource, thing))]
    note(name, seen)


def look_into(module, whole=True):
    """Note what a module has, and what its classes have."""
    for key, value in sorted(vars(module).items()):
        own = getattr(value, "__module__", None) == module.__name__ or module in STANDARD
        name = f"{module.__name__}.{key}"
        if isinstance(value, type) and own:
            for inner, member in sorted(vars(value).items()):
                function = getattr(member, "__func__", member)
                if callable(function) or isinstance(member, property):
                    look(f"{name}.{inner}", function, whole)
        elif callable(value) and own:
            look(name, value, whole)


def process(when):
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            note(
                f"{when}descriptor {target if 'ddpdoctor' in target or '/run' in target else name}",
                target.partition(":")[0],
            )
    for thread in threading.enumerate():
        note(f"{when}thread {thread.name}", thread.daemon)
    note(f"{when}threads of the system", len(os.listdir("/proc/self/task")))
    for each in signal.Signals:
        note(f"{when}signal {each.name}", signal.getsignal(each))
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(("SigBlk", "SigIgn", "SigCgt", "NoNewPrivs", "Seccomp:")):
                note(f"{when}status {line.split()[0]}", line.split()[1])
    note(f"{when}functions at exit", atexit._ncallbacks())
    note(f"{when}sys.meta_path", [repr(type(each)) for each in sys.meta_path])
    for name in "excepthook", "displayhook", "unraisablehook", "breakpointhook":
        note(f"{when}sys.{name} is Python's", getattr(sys, name) is getattr(sys, f"__{name}__"))
    note(
        f"{when}threading.excepthook is Python's", threading.excepthook is threading.__excepthook__
    )
    note(f"{when}faulthandler is enabled", faulthandler.is_enabled())
    note(f"{when}trace functions", (sys.gettrace(), sys.getprofile()))
    if hasattr(sys, "monitoring"):
        note(f"{when}monitoring tools", [sys.monitoring.get_tool(each) for each in range(6)])
    note(
        f"{when}gc", (len(gc.callbacks), gc.isenabled(), gc.get_threshold(), gc.get_freeze_count())
    )
    note(f"{when}warnings", warnings.filters)
    note(f"{when}logging", (logging.root.handlers, logging.root.level))
    for name, value in os.environ.items():
        # torchrun chooses some values itself.
        chosen = name == "MASTER_PORT" or name.startswith("TORCHELASTIC_")
        note(f"{when}environment {name}", chosen or value)
    for module in STANDARD:
        look_into(module)


def interpreter():
    for name in LOADED:
        note(f"at the first line: module {name}", True)
    for name, value in zip(("sys.path", "sys.meta_path", "sys.path_hooks"), PLACES, strict=True):
        note(f"at the first line: {name}", value)
    note("flags", (sys.flags, sys._xoptions, sys.warnoptions))
    note("argv", (sys.argv, sys.orig_argv, sys.executable, sys.prefix, sys.base_prefix))
    note(
        "ids",
        (os.getpid() == os.getsid(0), os.getpid() == os.getpgid(0), os.umask(0o22), os.nice(0)),
    )
    note("affinity", os.sched_getaffinity(0))
    note("itimers", [signal.getitimer(each) for each in range(3)])
    note("recursion", (sys.getrecursionlimit(), sys.getswitchinterval()))
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            note(f"limit {name}", resource.getrlimit(getattr(resource, name)))
    prctl, number = ctypes.CDLL(None).prctl, ctypes.c_int()
    for option in 2, 37:  # PR_GET_PDEATHSIG, PR_GET_CHILD_SUBREAPER
        prctl(option, ctypes.byref(number), 0, 0, 0)
        note(f"prctl {option}", number.value)
    for stream in sys.stdin, sys.stdout, sys.stderr:
        note(f"stream {stream.name}", (stream.encoding, stream.errors, stream.isatty()))
    note("names of __main__", sorted(vars(sys.modules["__main__"])))


def torch_seen(rank):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    for name in WRAPPED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    model = torch.nn.Linear(4, 4)
    if rank:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=4)
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    for thing in model, optimizer, loader:
        kind = type(thing)
        note(f"{kind.__name__}: type", (kind, kind.__mro__, copy.deepcopy(kind) is kind))
        note(f"{kind.__name__}: attributes", sorted(vars(thing)))
        hooks = {key: value for key, value in vars(thing).items() if "hook" in key}
        note(f"{kind.__name__}: hooks", hooks)
    note("pickles", [len(pickle.dumps(each)) for each in (optimizer, loader)])
    for name in "torch.nn.modules.module", "torch.optim.optimizer":
        for key, value in vars(sys.modules[name]).items():
            if key.startswith("_global_"):
                note(f"{name}.{key}", len(value) if hasattr(value, "__len__") else value)
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == "torch" and isinstance(module, types.ModuleType):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                look_into(module, name in WRAPPED)
    process("after training: ")
    for name in sorted(sys.modules):
        note(f"module {name}", True)
    if rank:
        dist.destroy_process_group()


interpreter()
process("")
if sys.argv[1:]:
    torch_seen(sys.argv[1] == "rank")
with open(output, "w") as file:
    json.dump(facts, file)
