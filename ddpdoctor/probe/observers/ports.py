"""Ports of the job's store: who holds one that is taken, and which one no rank will open."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from typing import Any

from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.run.environment import MARK
from ddpdoctor.run.records.process import OwnStoreRecord, PortHolder, ResourceFacts

_REFUSED = re.compile(
    r"server socket has failed to (?:listen|bind)[^\n]*?(?:port: |\]:)(?P<port>\d+)"
)
_LISTENS = "0A"
_SECONDS = 0.3
"""How long the holder is looked for among all processes."""


def facts(message: str) -> ResourceFacts | None:
    """The holder of the port that torch's store could not listen on, looked for at that moment.

    None for other messages.
    """
    refused = _REFUSED.search(message)
    if refused is None:
        return None
    port = int(refused["port"])
    return ResourceFacts(port=port, spawned=spawned(), holder=_holder(port))


def spawned() -> bool:
    """Whether a worker of torchrun's has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getsid(0) != os.getpid()


def unopened(arguments: dict[str, Any], site: Site) -> OwnStoreRecord | None:
    """The address that ``init_process_group`` is given, if no rank will open its port.

    Under torchrun every rank connects to the store of its agent, rank 0 as well: at another address
    no process listens.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or arguments.get("store"):
        return None
    given = _initial_environment()
    launcher = given.get("MASTER_ADDR"), given.get("MASTER_PORT")
    method = arguments.get("init_method")
    wanted: tuple[str | None, str | None]
    if isinstance(method, str) and method.startswith("tcp://"):
        # Imported only here: a start must not pay for it.
        from urllib.parse import urlsplit

        parts = urlsplit(method)
        wanted = parts.hostname, str(parts.port)
    elif method in (None, "env://"):
        wanted = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    else:
        return None
    if not launcher[1] or not wanted[1] or wanted[1] == launcher[1]:
        return None
    return OwnStoreRecord(
        time=time.time_ns(),
        host=wanted[0],
        port=wanted[1],
        launcher=f"{launcher[0]}:{launcher[1]}",
        spawned=spawned(),
        **site.place,
    )


def _initial_environment() -> dict[str, str]:
    """What the launcher gave this process, whatever the script made of it since."""
    try:
        with open("/proc/self/environ", "rb") as file:
            return _parsed(file.read())
    except OSError:
        return {}


def _parsed(data: bytes) -> dict[str, str]:
    pairs = (os.fsdecode(each).partition("=") for each in data.split(b"\0"))
    return {name: value for name, _, value in pairs}


def _holder(port: int) -> PortHolder | None:
    inodes = set(_listening(port))
    if not inodes:
        return None
    deadline = time.monotonic() + _SECONDS
    others = (int(name) for name in os.listdir("/proc") if name.isdigit())
    for pid in (os.getpid(), *sorted(others, reverse=True)):
        if _holds(pid, inodes):
            return _described(pid)
        if time.monotonic() > deadline:
            break
    return None


def _listening(port: int) -> Iterator[str]:
    """The inodes of the sockets that listen on a port."""
    for name in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            with open(name) as file:
                lines = file.readlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                yield f"socket:[{words[9]}]"


def _holds(pid: int, inodes: set[str]) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        return any(os.readlink(f"{folder}/{name}") in inodes for name in os.listdir(folder))
    except OSError:
        # It has ended, or is another user's.
        return False


def _described(pid: int) -> PortHolder:
    environment: dict[str, str] = {}
    words = ""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = os.fsdecode(file.read()[:400]).replace("\0", " ").strip()
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = _parsed(file.read())
    except OSError:
        pass
    mine = os.environ.get(MARK)
    return PortHolder(
        pid=pid,
        name=words,
        ours=bool(mine) and environment.get(MARK) == mine,
        rank=environment.get("RANK"),
        itself=pid == os.getpid(),
    )
