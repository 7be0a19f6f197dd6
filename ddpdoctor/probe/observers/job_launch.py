"""Observe how a script uses the launch: local rank, ``nn.DataParallel``, ports of the store.

torchrun passes the local rank to each worker in ``LOCAL_RANK``, never on the command line. A script
that reads it from an option gets the option's default on every rank. For the store's port we find
the process that already holds it, and detect a port that no rank will open.
"""

from __future__ import annotations

import contextlib
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

_option: Site | None = None  # the line that added the option
_parsed_options: tuple[weakref.ref[Any], Site] | None = None
_parallel: Site | None = None


def argument_added(parser: Any, *names: Any, **kwargs: Any) -> None:
    """Note the option that ``ArgumentParser.add_argument`` adds."""
    global _option
    if any(isinstance(name, str) and _LOCAL_RANK_OPTION.match(name) for name in names):
        _option = caller()


def arguments_parsed(result: Any, parser: Any, *args: Any, **kwargs: Any) -> None:
    """Note the result of ``ArgumentParser.parse_known_args``."""
    global _parsed_options
    if _parsed_options is None and hasattr(result[0], "local_rank"):
        _parsed_options = weakref.ref(result[0]), caller()


def data_parallel_built(*args: Any, **kwargs: Any) -> None:
    """Note an ``nn.DataParallel`` that is built."""
    global _parallel
    _parallel = _parallel or caller()


class LaunchOptions(Observer):
    """Record how a rank used the launch."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self._parallel_seen = False
        events.before_step(DATA_PARALLEL_AFTER, self._parallel_trains)

    def ddp_built(self, ddp: Any) -> None:
        """Compare the option with the environment. By now the script has had time to copy it."""
        global _parsed_options
        if _parsed_options is None:
            return
        (reference, site), _parsed_options = _parsed_options, None
        number, here = getattr(reference(), "local_rank", None), rank.environment_int("LOCAL_RANK")
        if here is None or not isinstance(number, int) or number == here:
            return
        # Find the first line of that file that uses the option.
        use = 0
        with (
            contextlib.suppress(OSError),
            open(site.path, encoding="utf-8", errors="replace") as file,
        ):
            uses = (_USES_LOCAL_RANK.search(line.partition("#")[0]) for line in file)
            use = next((number for number, found in enumerate(uses, 1) if found), 0)
        if use:
            at = _option if _option is not None and _option.path else site
            used = Location(site.path, use)
            self.state.recorder.add(
                LocalRankRecord(parsed=number, environment=here, used=used, **at.place)
            )

    def rank_ends(self) -> None:
        """Record an ``nn.DataParallel`` also for short jobs."""
        self._parallel_trains()

    def _parallel_trains(self) -> None:
        if _parallel is not None and not self._parallel_seen:
            self._parallel_seen = True
            self.state.recorder.add(DataParallelRecord(**_parallel.place))


# -- ports of the job's store

_LISTEN_FAILED = re.compile(
    r"server socket has failed to (?:listen|bind)[^\n]*?(?:port: |\]:)(?P<port>\d+)"
)
_TCP_LISTEN = "0A"
_SEARCH_SECONDS = 0.3  # maximum seconds to search the processes


def port_facts(message: str) -> ResourceFacts | None:
    """Return the holder of the port in torch's message that its store could not listen."""
    refused = _LISTEN_FAILED.search(message)
    if refused is None:
        return None
    port = int(refused["port"])
    return ResourceFacts(port=port, spawned=is_spawned(), holder=_port_holder(port))


def is_spawned() -> bool:
    """Return whether a worker of torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getsid(0) != os.getpid()


def unopened_store(arguments: dict[str, Any], site: Site) -> OwnStoreRecord | None:
    """Return the address passed to ``init_process_group`` if no rank will open its port.

    Under torchrun every rank, including rank 0, connects to the store of its agent. No process
    listens at another address.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or arguments.get("store"):
        return None
    given = _initial_environment()
    launcher = given.get("MASTER_ADDR"), given.get("MASTER_PORT")
    method = arguments.get("init_method")
    wanted: tuple[str | None, str | None]
    if isinstance(method, str) and method.startswith("tcp://"):
        # Imported only here, since it would delay the start.
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
    """Return the environment that the launcher gave this process."""
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
        folder = f"/proc/{pid}/fd"
        # The process may have ended, or belong to another user.
        with contextlib.suppress(OSError):
            if any(os.readlink(f"{folder}/{name}") in inodes for name in os.listdir(folder)):
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
        if time.monotonic() > deadline:
            break
    return None


def _listening_sockets(port: int) -> Iterator[str]:
    """Yield the sockets that listen on a port, named as in the links of ``/proc``."""
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
