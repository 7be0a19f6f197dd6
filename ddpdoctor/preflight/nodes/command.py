"""The command that a node is started with, to be typed."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace

from ddpdoctor.preflight.meeting.place import Seat

NO_ID = "none"
"""The rendezvous id where none was given, as torchrun has it."""


def words(seat: Seat, nproc: int) -> list[str]:
    """The options that place a node in a job, for `ddpdoctor check` and `ddpdoctor run` alike."""
    found = ["--nnodes", str(seat.nnodes)]
    if seat.rank is not None:
        found += ["--node-rank", str(seat.rank)]
    found += ["--nproc-per-node", str(nproc), "--rdzv-endpoint", seat.endpoint]
    if seat.rdzv_id != NO_ID:
        found += ["--rdzv-id", seat.rdzv_id]
    return found


def check_line(
    seat: Seat,
    nproc: int,
    *,
    nnodes: int | None = None,
    rank: int | None = None,
    host: str | None = None,
    rdzv_id: str | None = None,
) -> str:
    """The line that starts the check on a node: this one's, with what is changed."""
    changed = replace(
        seat,
        nnodes=seat.nnodes if nnodes is None else nnodes,
        rank=seat.rank if rank is None else rank,
        host=seat.host if host is None else host,
        rdzv_id=seat.rdzv_id if rdzv_id is None else rdzv_id,
    )
    return shlex.join(["ddpdoctor", "check", *words(changed, nproc)])


def open_port(port: int, address: str) -> str:
    """The line that opens a port in a machine's own firewall.

    Args:
        port: Which.
        address: One of the machine, or of one that is to reach it: IPv6 has rules of its own.
    """
    return f"sudo {_tables(address)} -I INPUT -p tcp --dport {port} -j ACCEPT"


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
        f"sudo {tables} -I {chain} -p tcp {side} {','.join(listed)} -j ACCEPT"
        for tables, listed in by_family.items()
    )


def _tables(address: str) -> str:
    return "ip6tables" if ":" in address else "iptables"
