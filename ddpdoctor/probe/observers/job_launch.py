"""Observe how a script takes its place in the launch: local rank, ``nn.DataParallel``, store ports.

torchrun gives each worker its local rank in ``LOCAL_RANK``, never on the command line: a script
that reads it from an option has the option's default on every rank. Of the ports of the job's store
it records who holds one that is taken, and which one no rank will open.
"""

from __future__ import annotations

import os
import re
import time
import weakref
from collections.abc import Iterator
from typing import Any

from ddpdoctor.core.user_code import Location
from ddpdoctor.probe.runtime import events, rank
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.sites import Site, caller
from ddpdoctor.run.names import MARK
from ddpdoctor.run.records.process import (
    DATA_PARALLEL_AFTER,
    DataParallelRecord,
    LocalRankRecord,
    OwnStoreRecord,
    PortHolder,
    ResourceFacts,
)

# -- launch options


_USES_LOCAL_RANK = re.compile(r"\.local_rank\b(?!\s*=[^=])")
_LOCAL_RANK_OPTION = re.compile(r"--?local[-_]rank$")

_option: Site | None = None
"""Where the option was added."""
_parsed_options: tuple[weakref.ref[Any], Site] | None = None
_parallel: Site | None = None


def argument_added(parser: Any, *names: Any, **kwargs: Any) -> None:
    """``ArgumentParser.add_argument`` is called."""
    global _option
    if any(isinstance(name, str) and _LOCAL_RANK_OPTION.match(name) for name in names):
        _option = caller()


def arguments_parsed(result: Any, parser: Any, *args: Any, **kwargs: Any) -> None:
    """``ArgumentParser.parse_known_args`` returned."""
    global _parsed_options
    if _parsed_options is None and hasattr(result[0], "local_rank"):
        _parsed_options = weakref.ref(result[0]), caller()


def data_parallel_built(*args: Any, **kwargs: Any) -> None:
    """An ``nn.DataParallel`` is built."""
    global _parallel
    _parallel = _parallel or caller()


class LaunchOptions(Observer):
    """What a rank made of the launch."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self._parallel_seen = False
        events.before_step(DATA_PARALLEL_AFTER, self._parallel_trains)

    def ddp_built(self, ddp: Any) -> None:
        """By now the script has had its chance to put the environment's local rank there."""
        global _parsed_options
        if _parsed_options is None:
            return
        (reference, site), _parsed_options = _parsed_options, None
        number, here = getattr(reference(), "local_rank", None), rank.environment_int("LOCAL_RANK")
        if here is None or not isinstance(number, int) or number == here:
            return
        use = _first_use(site)
        if use:
            at = _option if _option is not None and _option.path else site
            used = Location(site.path, use)
            self.state.recorder.add(
                LocalRankRecord(parsed=number, environment=here, used=used, **at.place)
            )

    def rank_ends(self) -> None:
        """Whatever became of it, there is one."""
        self._parallel_trains()

    def _parallel_trains(self) -> None:
        if _parallel is not None and not self._parallel_seen:
            self._parallel_seen = True
            self.state.recorder.add(DataParallelRecord(**_parallel.place))


def _first_use(site: Site) -> int:
    """The first line of the file that parsed the option which does anything with it; 0 if none."""
    try:
        with open(site.path, encoding="utf-8", errors="replace") as file:
            lines = enumerate(file, 1)
            return next(
                (n for n, line in lines if _USES_LOCAL_RANK.search(line.partition("#")[0])), 0
            )
    except OSError:
        return 0


# -- ports of the job's store: who holds one that is taken, and which one no rank will open


_LISTEN_FAILED = re.compile(
    r"server socket has failed to (?:listen|bind)[^\n]*?(?:port: |\]:)(?P<port>\d+)"
)
_TCP_LISTEN = "0A"
_SEARCH_SECONDS = 0.3
"""How long the holder is looked for among all processes."""


def port_facts(message: str) -> ResourceFacts | None:
    """The holder of the port that torch's store could not listen on, looked for at that moment.

    None for other messages.
    """
    refused = _LISTEN_FAILED.search(message)
    if refused is None:
        return None
    port = int(refused["port"])
    return ResourceFacts(port=port, spawned=is_spawned(), holder=_port_holder(port))


def is_spawned() -> bool:
    """Whether a worker of torchrun's has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getsid(0) != os.getpid()


def unopened_store(arguments: dict[str, Any], site: Site) -> OwnStoreRecord | None:
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
        spawned=is_spawned(),
        **site.place,
    )


def _initial_environment() -> dict[str, str]:
    """What the launcher gave this process, whatever the script made of it since."""
    try:
        with open("/proc/self/environ", "rb") as file:
            return _environment_of(file.read())
    except OSError:
        return {}


def _environment_of(data: bytes) -> dict[str, str]:
    pairs = (os.fsdecode(each).partition("=") for each in data.split(b"\0"))
    return {name: value for name, _, value in pairs}


def _port_holder(port: int) -> PortHolder | None:
    inodes = set(_listening_sockets(port))
    if not inodes:
        return None
    deadline = time.monotonic() + _SEARCH_SECONDS
    others = (int(name) for name in os.listdir("/proc") if name.isdigit())
    for pid in (os.getpid(), *sorted(others, reverse=True)):
        if _holds_socket(pid, inodes):
            return _describe_holder(pid)
        if time.monotonic() > deadline:
            break
    return None


def _listening_sockets(port: int) -> Iterator[str]:
    """The inodes of the sockets that listen on a port."""
    for name in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            with open(name) as file:
                lines = file.readlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == _TCP_LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                yield f"socket:[{words[9]}]"


def _holds_socket(pid: int, inodes: set[str]) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        return any(os.readlink(f"{folder}/{name}") in inodes for name in os.listdir(folder))
    except OSError:
        # It has ended, or is another user's.
        return False


def _describe_holder(pid: int) -> PortHolder:
    environment: dict[str, str] = {}
    words = ""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = os.fsdecode(file.read()[:400]).replace("\0", " ").strip()
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = _environment_of(file.read())
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
