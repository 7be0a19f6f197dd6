"""Whether the port of the rendezvous is free, and who holds it."""

from __future__ import annotations

import errno
import os
import socket
import struct

from ddpdoctor.core.finding import Finding
from ddpdoctor.preflight.check import Outcome, check, failure, judged, passed, skipped, typed
from ddpdoctor.preflight.command_lines import corrected_line
from ddpdoctor.preflight.machine import versions
from ddpdoctor.preflight.machine.interfaces import interfaces, owner
from ddpdoctor.preflight.machine.lookups import ALL, endpoint_name
from ddpdoctor.preflight.place import seat
from ddpdoctor.preflight.situation import DEFAULT_PORT, Situation
from ddpdoctor.system.proc import Listed, listed, listening, sockets

_MAGIC = 0x3C85F7CE
_VALIDATE, _COUNT_KEYS = 0, 7
"""Of torch/csrc/distributed/c10d/TCPStoreBackend.hpp, unchanged from torch 2.4 to 2.15."""


@check("port", "DDP002", limit=ALL)
def port(situation: Situation) -> Outcome:
    """The port on which rank 0 will listen is in use.

    What it finds
        A rendezvous port (--rdzv-endpoint, --master-port, MASTER_PORT, or 29500) that this user
        cannot listen on. Where it can be seen, the process that holds the port, and whether that is
        the store of another distributed job.

    Why it is bad
        torchrun fails with "The server socket has failed to listen on any local network address".
        If another job's store listens there, the ranks may even join that job and wait.

    How to fix it
        Choose another port, or end the process that holds it if it is left over.

    Example
        Wrong: two jobs on one machine, both with `--master-port 29500`.
        Right: `--master-port 29501` for the second job, or `--standalone`, which picks a free port.

    When it stays silent
        On nodes other than the first. Where torchrun picks a free port itself (one machine, no port
        given, torch 2.13 and later).
    """
    options, endpoint = situation.options, situation.endpoint
    if options.nnodes > 1 and not seat(situation).host:
        return skipped("it is not known where the nodes meet")
    if options.nnodes > 1 and not _is_first(situation):
        return skipped("node 0 listens, not this one")
    number = endpoint[1] if endpoint else DEFAULT_PORT
    if endpoint is None and options.nnodes == 1 and versions.torchrun_picks_a_port():
        return passed("torchrun takes a free one by itself")
    # Of several nodes the check itself listens there meanwhile: then only others are looked for.
    problem = _refused(number) if options.nnodes == 1 else 0
    holders = [each for each in _holders(situation, number) if each.pid != os.getpid()]
    if problem == errno.EACCES:
        return judged(f"{number} is reserved", [_reserved(situation, number)])
    if not problem and not holders and not _others_listen(situation, number):
        return passed(f"{number} is free")
    return judged(f"{number} is taken", [_taken(situation, number, holders)])


def _is_first(situation: Situation) -> bool:
    """Whether this is the node of the rendezvous: by its rank, else by the rendezvous' address."""
    if situation.options.node_rank is not None:
        return situation.options.node_rank == 0
    found = situation.shared(endpoint_name)
    here = situation.shared(interfaces)
    return found is not None and any(owner(each, here) for each in found.addresses)


def _refused(number: int) -> int:
    """The error number with which listening as torch's store does fails; 0 if it works."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                server.bind((address, number))
                server.listen()
                return 0
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return error.errno
    return 0


def _taken(situation: Situation, number: int, holders: list[Listed]) -> Finding:
    who = "; ".join(each.described for each in holders[:3])
    store = speaks_store(number)
    what = "the store of another distributed job" if store else "a process"
    owner = f"{what}: {who}" if who else f"{what} that this user may not see"
    free = next((each for each in range(number + 1, number + 100) if not _refused(each)), None)
    evidence = [f"it is held by {owner}"]
    if store:
        evidence.append("it answers in the protocol of torch's TCPStore")
    return failure(
        f"port {number}, on which rank 0 will listen, is taken",
        evidence=tuple(evidence),
        fix=f"Choose another port, the same on every node ({free} is free here), or end the "
        "process if it is a left-over.",
        paste=_with_port(situation, free) if free else typed("ss -tlnp {}", f"sport = :{number}"),
    )


def _with_port(situation: Situation, number: int) -> str:
    if situation.options.endpoint or situation.endpoint is None:
        return corrected_line(situation, port=number)
    return typed("export MASTER_PORT={}", number)


def _reserved(situation: Situation, number: int) -> Finding:
    return failure(
        f"this user may not listen on port {number}",
        evidence=("ports below 1024 are the superuser's",),
        fix="Choose a port from 1024 on.",
        paste=_with_port(situation, DEFAULT_PORT),
    )


def _listening(situation: Situation, number: int) -> set[int]:
    """The sockets that listen on a port."""
    found = listening(situation.proc)
    return {inode for inode, port_of_it in found.items() if port_of_it == number}


def _others_listen(situation: Situation, number: int) -> bool:
    """Whether a process listens there that is not this one, even one that cannot be seen."""
    return bool(_listening(situation, number) - sockets(situation.proc / "self"))


def _holders(situation: Situation, number: int) -> list[Listed]:
    """The processes that hold a listening socket of that port, as far as this user may see."""
    inodes = _listening(situation, number)
    if not inodes:
        return []
    return [each for each in listed(situation.proc) if inodes & sockets(each.folder)]


def speaks_store(number: int, host: str = "127.0.0.1", seconds: float = 1.0) -> bool:
    """Whether torch's TCPStore answers at a port: it is asked for the number of its keys."""
    question = bytes([_VALIDATE]) + struct.pack("=I", _MAGIC) + bytes([_COUNT_KEYS])
    try:
        with socket.create_connection((host, number), seconds) as connection:
            connection.settimeout(seconds)
            connection.sendall(question)
            answer = b""
            while len(answer) < 8:
                part = connection.recv(8 - len(answer))
                if not part:
                    return False
                answer += part
    except OSError:
        return False
    keys: int = struct.unpack("=q", answer)[0]
    return 0 <= keys < 1 << 40
