"""Asks a machine for an echo (ICMP, as ``ping`` does): whether it is up though no port answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct

from ddpdoctor.preflight.protocol.connecting import family_of, patient

TRIES = 2

_KINDS = {
    socket.AF_INET: (socket.IPPROTO_ICMP, 8, 0),
    socket.AF_INET6: (socket.IPPROTO_ICMPV6, 128, 129),
}
"""Protocol, and the types of an echo request and its reply (RFC 792, RFC 4443)."""

_HEADER = struct.Struct("!BBHHH")
"""Type, code, checksum, identifier, sequence number."""

_PAYLOAD_BYTES = 16


async def echoes(address: str, limit: float) -> bool:
    """Whether a machine answers an echo request; False also where this process may not ask.

    Args:
        address: Of the machine.
        limit: Seconds for each of the two tries.
    """
    family = family_of(address)
    asking = _socket(family)
    if asking is None:
        return False
    with asking:
        asking.setblocking(False)
        loop = asyncio.get_running_loop()
        payload = os.urandom(_PAYLOAD_BYTES)
        async with patient() as patience:
            for number in range(1, TRIES + 1):
                # A firewall on the way may say that it is not allowed.
                with contextlib.suppress(TimeoutError, OSError):
                    if number == 1:
                        asking.connect((address, 0))
                    await loop.sock_sendall(asking, _request(family, number, payload))
                    await patience.within(_reply(asking, family, payload), limit)
                    return True
    return False


def _socket(family: socket.AddressFamily) -> socket.socket | None:
    """A socket for echo requests, if this process may have one.

    Linux gives it to the groups of ``net.ipv4.ping_group_range``, macOS to everybody; else it takes
    a raw one, which is for root.
    """
    for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
        with contextlib.suppress(OSError):
            return socket.socket(family, kind, _KINDS[family][0])
    return None


def _request(family: socket.AddressFamily, number: int, payload: bytes) -> bytes:
    kind = _KINDS[family][1]
    identifier = os.getpid() & 0xFFFF
    unsummed = _HEADER.pack(kind, 0, 0, identifier, number) + payload
    # Of ICMPv6 the kernel makes the checksum, since the addresses are part of it.
    return _HEADER.pack(kind, 0, _checksum(unsummed), identifier, number) + payload


def _checksum(data: bytes) -> int:
    """The checksum of RFC 1071, of an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF


async def _reply(asking: socket.socket, family: socket.AddressFamily, payload: bytes) -> None:
    """Return once the reply is there; a raw socket also gets what is meant for others."""
    loop = asyncio.get_running_loop()
    while True:
        data = await loop.sock_recv(asking, 512)
        if family == socket.AF_INET and data[:1] and data[0] >> 4 == 4:
            # A raw socket, and any on macOS, gets the IP header as well.
            data = data[4 * (data[0] & 15) :]
        if data[:1] == bytes([_KINDS[family][2]]) and data[_HEADER.size :] == payload:
            return
