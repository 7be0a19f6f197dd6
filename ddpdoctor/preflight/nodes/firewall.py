"""The lines that open a machine's own firewall."""

from __future__ import annotations

from collections.abc import Iterable


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
