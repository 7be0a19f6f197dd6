"""Routers that translate addresses (NAT), as a program: ``translation.py ROUTER...``.

A router is ``PID,INNER,OUTER,PORTS``: the process that holds a host's network, the host's address
there, the address that everybody else sees, and the ports that are forwarded (``29500+22``, or
``all``). Each host gets an interface ``nat0`` with the inner address. Packets to an outer address
arrive if their port is forwarded, or if they belong to a connection that the host opened. All
others are dropped, and so are those to inner addresses of others.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
from dataclasses import dataclass, field

NAME = "nat0"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CHECKSUM_AT = {6: 16, 17: 6}  # Where TCP and UDP have it


def address(text: str) -> bytes:
    """Return an IPv4 address as 4 bytes."""
    return bytes(map(int, text.split(".")))


@dataclass
class Router:
    """A host, and the router in front of it.

    Attributes:
        open: The connections that the host opened: own port, other address, other port.
    """

    line: int
    inner: bytes
    outer: bytes
    ports: str
    open: set[tuple[int, bytes, int]] = field(default_factory=set)

    def forwards(self, port: int) -> bool:
        """Return whether a port is forwarded to the host."""
        return self.ports == "all" or str(port) in self.ports.split("+")


def joined(pid: int, inner: str) -> int:
    """Make the interface in the network of a process. Return its file."""
    with open(f"/proc/{pid}/ns/net") as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    line = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(line, _TUNSETIFF, struct.pack("16sH", NAME.encode(), _IFF_TUN | _IFF_NO_PI))
    for words in (
        f"address add {inner}/24 dev {NAME}",
        f"link set {NAME} up",
        f"route add default dev {NAME}",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    return line


def changed(packet: bytearray, at: int, new: bytes) -> None:
    """Replace an address of a packet, and correct its checksums (RFC 1624)."""
    old = bytes(packet[at : at + 4])
    packet[at : at + 4] = new
    head = 4 * (packet[0] & 15)
    more = _CHECKSUM_AT.get(packet[9])
    for where in (10, head + more) if more else (10,):
        total = ~int.from_bytes(packet[where : where + 2], "big") & 0xFFFF
        for word in (0, 2):
            total += ~int.from_bytes(old[word : word + 2], "big") & 0xFFFF
            total += int.from_bytes(new[word : word + 2], "big")
        while total > 0xFFFF:
            total = (total & 0xFFFF) + (total >> 16)
        packet[where : where + 2] = (~total & 0xFFFF).to_bytes(2, "big")


def forward(packet: bytearray, source: Router, routers: list[Router]) -> None:
    """Translate a packet of a host, and deliver it if its destination lets it in."""
    head = 4 * (packet[0] & 15)
    target = next((each for each in routers if packet[16:20] == each.outer), None)
    if packet[0] >> 4 != 4 or target is None or target is source or packet[9] not in _CHECKSUM_AT:
        return
    from_port, to_port = struct.unpack_from("!HH", packet, head)
    if not source.forwards(from_port) or packet[9] != 6 or packet[head + 13] & 0x12 == 0x02:
        source.open.add((from_port, target.outer, to_port))
    changed(packet, 12, source.outer)
    if (to_port, source.outer, from_port) in target.open or target.forwards(to_port):
        changed(packet, 16, target.inner)
        os.write(target.line, packet)


def main() -> None:
    """Forward until killed."""
    routers = []
    for each in sys.argv[1:]:
        pid, inner, outer, ports = each.split(",")
        routers.append(Router(joined(int(pid), inner), address(inner), address(outer), ports))
    print("ready", flush=True)
    by_line = {each.line: each for each in routers}
    while True:
        for line in select.select(list(by_line), [], [])[0]:
            forward(bytearray(os.read(line, 65536)), by_line[line], routers)


if __name__ == "__main__":
    main()
