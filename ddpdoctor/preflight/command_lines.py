"""The lines to type: those that start the job and the check, and those that open a firewall."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace

from ddpdoctor.preflight.check import typed
from ddpdoctor.preflight.place import Seat, seat
from ddpdoctor.preflight.protocol.addresses import own_host
from ddpdoctor.preflight.situation import Situation, joined_endpoint

NO_ID = "none"
"""The rendezvous id where none was given, as torchrun has it."""

PLACEHOLDER = "train.py"
"""Stands for the script where none was named."""


def run_line(situation: Situation, *words: str) -> str:
    """`ddpdoctor run` with these options, and with the script that the check was given."""
    options = situation.options
    line = ["ddpdoctor", "run", *words]
    if options.module:
        line.append("-m")
    if options.program:
        line.append("--no-python")
    return shlex.join([*line, "--", *(options.script or (PLACEHOLDER,))])


def words(place: Seat, nproc: int) -> list[str]:
    """The options that place a node in a job, for `ddpdoctor check` and `ddpdoctor run` alike."""
    found = ["--nnodes", str(place.nnodes)]
    if place.rank is not None:
        found += ["--node-rank", str(place.rank)]
    found += ["--nproc-per-node", str(nproc)]
    if place.host:
        found += ["--rdzv-endpoint", place.endpoint]
    if place.rdzv_id != NO_ID:
        found += ["--rdzv-id", place.rdzv_id]
    return found


def check_line(
    place: Seat,
    nproc: int,
    *,
    nnodes: int | None = None,
    rank: int | None = None,
    host: str | None = None,
    rdzv_id: str | None = None,
) -> str:
    """The line that starts the check on a node: this one's, with what is changed."""
    changed = replace(
        place,
        nnodes=place.nnodes if nnodes is None else nnodes,
        rank=place.rank if rank is None else rank,
        host=place.host if host is None else host,
        rdzv_id=place.rdzv_id if rdzv_id is None else rdzv_id,
    )
    return shlex.join(["ddpdoctor", "check", *words(changed, nproc)])


def line_on_node_0(place: Seat, nproc: int) -> str:
    """The line that starts the check on node 0, typed there, where this node does not know it."""
    line = check_line(place, nproc, rank=0, host="")
    return line + typed(' --rdzv-endpoint "$(hostname):{}"', place.port)


def corrected_line(
    situation: Situation, *, nproc: int | None = None, port: int | None = None
) -> str:
    """The line to go on with: the job's on one machine, and of several nodes the check's.

    Args:
        situation: What was asked for.
        nproc: Another number of ranks.
        port: Another port for the rendezvous.
    """
    if situation.options.nnodes > 1:
        place = seat(situation)
        place = place if port is None else replace(place, port=port)
        return check_line(place, situation.nproc if nproc is None else nproc)
    found = [] if nproc is None else ["--nproc-per-node", str(nproc)]
    local = situation.options.endpoint.startswith("127.0.0.1:")
    if port is not None and situation.endpoint and situation.options.endpoint and not local:
        found += ["--rdzv-endpoint", joined_endpoint(situation.endpoint[0], port)]
    elif port is not None:
        found += ["--master-port", str(port)]
    return run_line(situation, *found)


def meeting_point(place: Seat, situation: Situation) -> tuple[str, str]:
    """What to do about it, and the line to type."""
    nproc = situation.nproc
    if place.names:
        return (
            "Name the first node, the same on every node. Here:",
            check_line(place, nproc, host=place.names[0]),
        )
    if place.rank == 0:
        return (
            "Name this machine, the same on every node. Here:",
            check_line(place, nproc, host=own_host(situation)),
        )
    if place.rank is None:
        return (
            "Name one of the nodes and a free port of it, the same on every node. If it is to be "
            "this one, on all of them:",
            check_line(place, nproc, host=own_host(situation)),
        )
    return (
        "Name node 0 and a free port of it, the same on every node. On node 0 this starts the "
        "check:",
        line_on_node_0(place, nproc),
    )


def open_port(port: int, address: str) -> str:
    """The line that opens a port in a machine's own firewall.

    Args:
        port: Which.
        address: One of the machine, or of one that is to reach it: IPv6 has its own rules.
    """
    return typed("sudo {} -I INPUT -p tcp --dport {} -j ACCEPT", _tables(address), port)


def let_through(chain: str, side: str, addresses: Iterable[str]) -> str:
    """The line that lets all of TCP through a machine's own firewall.

    Args:
        chain: ``INPUT`` or ``OUTPUT``.
        side: ``-s`` or ``-d``: which end of the way the addresses are.
        addresses: Of the other nodes.
    """
    by_family: dict[str, list[str]] = {}
    for address in addresses:
        by_family.setdefault(_tables(address), []).append(address)
    return " && ".join(
        typed("sudo {} -I {} -p tcp {} {} -j ACCEPT", tables, chain, side, ",".join(listed))
        for tables, listed in by_family.items()
    )


def _tables(address: str) -> str:
    return "ip6tables" if ":" in address else "iptables"
