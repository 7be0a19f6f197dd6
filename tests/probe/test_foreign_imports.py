"""No thread of ours imports anything of the job's world: the job may be importing it, too."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpdoctor.run.mapped import EXAMINATION, PROFILE
from ddpdoctor.run.records.process import FaultRecord
from ddpdoctor.run.snapshot import Run
from ddpdoctor.stacks.capture import capture
from tests.conftest import ROOT, Doctor, Live

GUARD = '''\
"""Notes what is imported by threads of ddpdoctor's and of debugpy's, and what is not theirs."""

import importlib.machinery
import os
import sys
import threading
import traceback

OWN = ("{package}", "debugpy" + os.sep)


class Guard:
    def find_spec(self, name, path=None, target=None):
        thread = threading._active.get(threading.get_ident())
        if not hasattr(thread, "pydev_do_not_trace"):
            return None
        if name.partition(".")[0] in sys.stdlib_module_names or name.startswith("_sysconfigdata"):
            # The second has the platform in its name, so the list does not have it.
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        places = spec and (spec.submodule_search_locations or [spec.origin])
        origin = str(list(places or [""])[0]) + os.sep
        own = spec is None or origin.startswith(OWN[0]) or OWN[1] in origin
        with open("own-imports" if own else "foreign-imports", "a") as file:
            file.write(f"{{thread.name}} imports {{name}}\\n")
            traceback.print_stack(file=file)
        return None


sys.meta_path.insert(0, Guard())
'''

HEAD = """\
import sys, time
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
print("joined", flush=True)
for _ in range(8):
    dist.all_reduce(torch.ones(4))
    time.sleep(0.1)
"""

TAIL = """
print("worked", flush=True)
import pathlib
asked = torch.zeros(1)
while not asked:
    time.sleep(0.1)
    asked.fill_(pathlib.Path("asked").exists())
    dist.all_reduce(asked, op=dist.ReduceOp.MIN)
dist.destroy_process_group()
"""

DYNAMO = """\
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.compile(nn.Linear(8, 4), backend="{backend}"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""

WITHOUT_OPTIMIZER = """\
for _ in range(20):
    dist.all_reduce(torch.ones(4))
    time.sleep(0.1)
import torch._dynamo
"""

SHARDED = """\
try:
    from torch.distributed.fsdp import fully_shard
    steps = 20
except ImportError:
    # Before torch 2.6, where it trains on GPUs alone.
    from torch.distributed._composable.fsdp import fully_shard
    steps = 0
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(steps):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""

TENSOR_PARALLEL = """\
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cpu", (2,))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
model = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""

JOBS = {
    "dynamo": DYNAMO.format(backend="eager"),
    "without optimizer": WITHOUT_OPTIMIZER,
    "inductor": DYNAMO.format(backend="inductor"),
    "sharded": SHARDED,
    "tensor parallel": TENSOR_PARALLEL,
}

PATIENCE = 900
"""Seconds that a job may take: it compiles, and the machine may have other work."""

GLOO_RECORDED = hasattr(torch._C._distributed_c10d, "_dump_fr_trace")
"""Whether torch's Flight Recorder has gloo's collectives (2.8 and later), or NCCL's alone."""

WHOLE = {"asked", "time", "entries" if GLOO_RECORDED else "trouble"}
"""What an answer to an examination consists of."""


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_threads_of_ours_import_nothing_of_the_jobs(doctor: Doctor, job: str) -> None:
    site = doctor.directory / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(GUARD.format(package=ROOT / "ddpdoctor"))
    script = doctor.write("train.py", HEAD + JOBS[job] + TAIL)
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    live = doctor.start("--nproc-per-node", "2", "--", str(script), env={"PYTHONPATH": path})
    _question(live, doctor.directory / "asked")
    result = live.finish(PATIENCE)
    found = doctor.directory / "foreign-imports"
    assert not found.exists(), found.read_text()
    # The guard stood there and saw our threads: they imported what is ours.
    assert (doctor.directory / "own-imports").exists()
    result.check_success()
    # gloo says lines of its own there in some versions.
    assert [result.stdout.count(word) for word in ("joined", "worked")] == [2, 2]
    assert result.codes == []
    assert not any(list(rank.records.of(FaultRecord)) for rank in result.run.ranks)


def _question(live: Live, asked: Path) -> None:
    """Examine the ranks and profile them up to their end, take their stacks, attach to each."""
    run = live.wait_for(lambda run: len(run.ranks) == 2, PATIENCE)
    ports = list(run.manifest["debug"]["ports"])
    number = 0
    shown = False
    deadline = time.monotonic() + PATIENCE
    with contextlib.ExitStack() as pages:
        files = [
            pages.enter_context(open(live.run_dir / name, "r+b")) for name in (EXAMINATION, PROFILE)
        ]
        while live.process.poll() is None:
            assert time.monotonic() < deadline, "the ranks never answered"
            number += 1
            for file in files:
                file.seek(0)
                file.write(struct.pack("<q", number))
                file.flush()
            time.sleep(0.2)
            if number % 5 == 0 and not asked.exists():
                # A rank that gets no core answers the next time.
                shown = all(each.threads for each in capture(run)) or shown
                if ports:
                    # No longer: code that is traced compiles ten times as slowly.
                    _attach_and_leave(ports.pop())
            worked = live.out.read_text().count("worked") == 2
            if worked and shown and number > 20 and _answered(run, number - 10):
                asked.touch()


def _answered(run: Run, number: int) -> bool:
    """Whether the Flight Recorders of both ranks have answered an examination, and with entries."""
    told = []
    for file in run.path.glob("*.flight.json"):
        with contextlib.suppress(ValueError):
            told.append(json.loads(file.read_bytes()))
    return len([each for each in told if each["asked"] >= number and each.keys() >= WHOLE]) == 2


# -- as much of the Debug Adapter Protocol as it takes


def _attach_and_leave(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
        connection.settimeout(PATIENCE)
        _say(connection, 1, "initialize", {"adapterID": "python"})
        _until(connection, 1)
        _say(connection, 2, "attach", {"justMyCode": False})
        _until(connection, "initialized")
        _say(connection, 3, "configurationDone", {})
        _until(connection, 2)
        _say(connection, 4, "disconnect", {"terminateDebuggee": False})
        # A rank that gets no core for five seconds is left without an answer.
        with contextlib.suppress(ConnectionRefusedError):
            _until(connection, 4)


def _say(connection: socket.socket, number: int, command: str, arguments: dict[str, Any]) -> None:
    message = {"seq": number, "type": "request", "command": command, "arguments": arguments}
    body = json.dumps(message).encode()
    connection.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)


def _until(connection: socket.socket, wanted: object) -> None:
    """Read up to the answer of that number, or the event of that name."""
    while True:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += _some(connection, 1)
        size = int(head.partition(b":")[2])
        body = b""
        while len(body) < size:
            body += _some(connection, size - len(body))
        message = json.loads(body)
        if wanted in (message.get("request_seq"), message.get("event")):
            return


def _some(connection: socket.socket, most: int) -> bytes:
    found = connection.recv(most)
    if not found:
        raise ConnectionRefusedError("the debugger was refused")
    return found
