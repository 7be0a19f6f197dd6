"""The network interfaces of this machine that lead nowhere."""

from __future__ import annotations

import ipaddress
from pathlib import Path

SYS = Path("/sys/class/net")


def dead_links(sys: Path = SYS) -> tuple[str, ...]:
    """Describe interfaces that have an address and no carrier, or say that none has an address.

    Bridges are left out: one without containers has no carrier.
    """
    import psutil

    found, usable = [], 0
    for name, addresses in psutil.net_if_addrs().items():
        known = (each.address.partition("%")[0] for each in addresses)
        own = [address for address in known if _usable(address)]
        if not own or (sys / name / "bridge").exists():
            continue
        usable += 1
        if _read(sys / name / "carrier") == "0":
            found.append(f"interface {name} ({own[0]}) has no carrier: its cable, or the other end")
        elif _read(sys / name / "operstate") == "down":
            found.append(f"interface {name} ({own[0]}) is down")
    return tuple(found[:4]) if usable else ("no interface but the loopback has an address",)


def _usable(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # of the link layer
        return False
    return not parsed.is_loopback and not parsed.is_link_local


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # Reading the carrier of an interface that was taken down is an error
        return ""
