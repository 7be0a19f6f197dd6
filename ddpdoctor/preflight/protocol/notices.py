"""Tell node 0 by UDP that this node cannot connect by TCP.

A connection needs both directions, a datagram only one. So node 0 learns why a node is absent even
if its answers do not arrive there. A notice proves the id like any other message, and is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.preflight.protocol import wire
from ddpdoctor.preflight.protocol.messages import Hello, Welcome

MAX_BYTES = 1024
REPLY_TIMEOUT = 0.6  # Seconds for node 0's answer
HALF_OPEN = "half open"  # Node 0's answer if it receives the calls, but its answers do not arrive

_SYN_RECEIVED = "03"  # The state in /proc/net/tcp, of Linux's include/net/tcp_states.h


class Notices(asyncio.DatagramProtocol):
    """Node 0's end. ``hear`` takes a notice and its sender, and returns the answer."""

    def __init__(self, key: bytes, hear: Callable[[Hello, str], str]) -> None:
        self._key = key
        self._hear = hear

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        """Store the transport on which responses are sent."""
        self._transport = transport

    def datagram_received(self, data: bytes, sender: tuple[str, int]) -> None:
        """Answer a notice that proves the id. Ignore anything else."""
        with contextlib.suppress(ValueError, TypeError):
            hello = _read(Hello, data)
            if wire.proves(hello.proof, self._key, "notice", hello.nonce):
                address = sender[0].removeprefix("::ffff:").partition("%")[0]
                proof = wire.proof(self._key, "noticed", hello.nonce)
                reply = Welcome(proof=proof, refused=self._hear(hello, address))
                self._transport.sendto(wire.packed(reply), sender)


async def hear_notices(
    port: int, key: bytes, hear: Callable[[Hello, str], str]
) -> asyncio.BaseTransport | None:
    """Listen for notices; None if the port is taken."""
    dual = socket.has_dualstack_ipv6()
    family, everywhere = (socket.AF_INET6, "::") if dual else (socket.AF_INET, "")
    with contextlib.suppress(OSError):
        listening = socket.socket(family, socket.SOCK_DGRAM)
        try:
            if dual:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listening.bind((everywhere, port))
            loop = asyncio.get_running_loop()
            make = lambda: Notices(key, hear)  # noqa: E731
            return (await loop.create_datagram_endpoint(make, sock=listening))[0]
        except OSError:
            listening.close()
    return None


async def send_notice(address: str, port: int, key: bytes, hello: Hello) -> str | None:
    """Send a notice. Return node 0's answer; None if none came."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError, TimeoutError, asyncio.TimeoutError, ValueError, TypeError):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.setblocking(False)
            asking.connect((address, port))
            await loop.sock_sendall(asking, wire.packed(hello))
            data = await asyncio.wait_for(loop.sock_recv(asking, MAX_BYTES), REPLY_TIMEOUT)
            reply = _read(Welcome, data)
            if wire.proves(reply.proof, key, "noticed", hello.nonce):
                return reply.refused
    return None


def notice(key: bytes, host: str, rank: int | None, blocked: str) -> Hello:
    """Return a notice of why the rendezvous port is closed; a question if ``blocked`` is empty."""
    nonce = wire.nonce()
    proof = wire.proof(key, "notice", nonce)
    return Hello(proof=proof, nonce=nonce, host=host, rank=rank, blocked=blocked)


def _read(declared: type[wire.P], data: bytes) -> wire.P:
    message = opening.loads(data[wire.HEAD_BYTES : MAX_BYTES])
    return wire.unpacked(declared, message if isinstance(message, dict) else {})


def half_open(port: int, proc: Path = Path("/proc")) -> set[str]:
    """Return the addresses whose calls arrived at a port, but to which no answer gets through."""
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, ValueError):
            for row in (proc / "net" / name).read_text().splitlines()[1:]:
                _, local, remote, state, *_ = row.split()
                if state == _SYN_RECEIVED and int(local.rpartition(":")[2], 16) == port:
                    words = bytes.fromhex(remote.partition(":")[0])
                    # The kernel prints 32-bit words in the machine's order of bytes.
                    packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                    address = ipaddress.ip_address(packed)
                    found.add(str(getattr(address, "ipv4_mapped", None) or address))
    return found
