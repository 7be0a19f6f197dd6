"""Read the speed of a process's connections, and find interfaces without a link."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from ddpdoctor.system.peers import (
    ESTABLISHED,
    HEADER,
    NETLINK_SOCK_DIAG,
    NLM_F_REQUEST,
    SOCK_DIAG_BY_FAMILY,
)

_NLM_F_DUMP = 0x300
_TCP_INFO = 2  # `INET_DIAG_INFO`: the number of this attribute, and of its bit in a request plus 1
_TIMEOUT = 2.0  # Maximum seconds for the kernel to list all sockets

_WANTED = struct.Struct("=BBBxI48x")
"""``struct inet_diag_req_v2``: family, protocol, extensions, states, no address."""

_FOUND = struct.Struct("=BB2x4x16s16s12x16xI")
"""``struct inet_diag_msg``: family, state, ..., source, target, ..., inode."""

_ATTRIBUTE = struct.Struct("=HH")

_FIELDS = struct.Struct("=68xI48xQ32xQQQ")
"""Fields of ``struct tcp_info`` (uapi/linux/tcp.h), which never move: ``tcpi_rtt``,
``tcpi_bytes_acked``, ``tcpi_delivery_rate``, ``tcpi_busy_time``, ``tcpi_rwnd_limited``.
"""


class Traffic(NamedTuple):
    """The traffic sent over a connection since it was opened."""

    source: str  # Its own address
    target: str  # Its peer's address
    rtt: float  # Smoothed round trip in seconds
    sent: int  # Bytes that the peer's kernel has acknowledged
    rate: int  # The kernel's estimate of the current rate, in bytes per second
    busy: float  # Seconds with data in flight, except those in which the peer did not read


def traffic(inodes: Collection[int]) -> dict[int, Traffic]:
    """Return the traffic of TCP sockets of this network namespace to other addresses, by inode.

    Raises:
        OSError: The kernel lacks ``sock_diag``, or refuses the request.
    """
    found: dict[int, Traffic] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        for inode, each in _listed(family):
            if inode in inodes and each.source != each.target:
                found[inode] = each
    return found


def _listed(family: int) -> Iterator[tuple[int, Traffic]]:
    request = _WANTED.pack(family, socket.IPPROTO_TCP, 1 << _TCP_INFO - 1, 1 << ESTABLISHED)
    flags = NLM_F_REQUEST | _NLM_F_DUMP
    head = HEADER.pack(HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, flags, 0, 0)
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_NETLINK, kind, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_TIMEOUT)
        kernel.connect((0, 0))
        kernel.send(head + request)
        while True:
            answer = kernel.recv(1 << 16)
            at = 0
            while at + HEADER.size <= len(answer):
                length, what, *_ = HEADER.unpack_from(answer, at)
                if what != SOCK_DIAG_BY_FAMILY or length < HEADER.size:
                    # The end of the list, or an error.
                    return
                with contextlib.suppress(struct.error, ValueError):
                    yield from _one(answer[at + HEADER.size : at + length])
                at += length + 3 & ~3


def _one(message: bytes) -> Iterator[tuple[int, Traffic]]:
    family, _, source, target, inode = _FOUND.unpack_from(message)
    at = _FOUND.size
    while at + _ATTRIBUTE.size <= len(message):
        size, what = _ATTRIBUTE.unpack_from(message, at)
        if what == _TCP_INFO:
            fields = _FIELDS.unpack_from(message, at + _ATTRIBUTE.size)
            rtt, sent, rate, busy, unread = fields
            places = _address(family, source), _address(family, target)
            yield inode, Traffic(*places, rtt / 1e6, sent, rate, (busy - unread) / 1e6)
        at += max(size, _ATTRIBUTE.size) + 3 & ~3


def _address(family: int, packed: bytes) -> str:
    if family == socket.AF_INET:
        return str(ipaddress.IPv4Address(packed[:4]))
    address = ipaddress.IPv6Address(packed)
    return str(address.ipv4_mapped or address)


# -- interfaces without a link


SYS = Path("/sys/class/net")


def dead_links(sys: Path = SYS) -> tuple[str, ...]:
    """Describe interfaces with an address but no carrier, or say that none has an address.

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
    except ValueError:  # an address of the link layer
        return False
    return not parsed.is_loopback and not parsed.is_link_local


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # Reading the carrier of a disabled interface is an error
        return ""
