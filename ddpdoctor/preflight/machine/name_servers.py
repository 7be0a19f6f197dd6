"""Which of this machine's name servers answer: a dead one costs 5 s before the next is asked."""

from __future__ import annotations

import secrets
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ddpdoctor.preflight.situation import Situation, text

MOST = 3
"""Servers that glibc asks (MAXNS of resolv.h)."""

ANSWER_S, TRIES = 1.5, 2

_HEADER = struct.Struct("!6H")
_RECURSION, _ADDRESS, _INTERNET = 0x0100, 1, 1
"""Of RFC 1035: the flag "recursion desired", the type A, the class IN."""


@dataclass(frozen=True)
class Server:
    """A server of /etc/resolv.conf, and whether it answered a question."""

    address: str
    answers: bool


def asked(situation: Situation, name: str) -> list[Server]:
    """The servers in their order, each asked for a name; that it has no such name is an answer."""
    rows = text(situation.proc.parent / "etc" / "resolv.conf").splitlines()
    words = [row.split() for row in rows]
    listed = [each[1] for each in words if len(each) > 1 and each[0] == "nameserver"][:MOST]
    if not listed:
        return []
    with ThreadPoolExecutor(len(listed)) as pool:
        return list(pool.map(lambda each: Server(each, answers(each, name)), listed))


def dead(servers: list[Server]) -> str:
    """Those that do not answer, in a line; empty if all do."""
    silent = [each.address for each in servers if not each.answers]
    if not silent:
        return ""
    first = ", the first one," if silent[0] == servers[0].address and len(servers) > 1 else ""
    line = f"name server {', '.join(silent)}{first} in /etc/resolv.conf does not answer"
    well = [each.address for each in servers if each.answers]
    return f"{line}; {', '.join(well)} does" if well else line


def answers(server: str, name: str, *, port: int = 53) -> bool:
    """Whether a name server says anything about a name."""
    question = _question(name)
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(
            server, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )
        with socket.socket(family, kind) as asking:
            asking.settimeout(ANSWER_S)
            asking.connect(address)
            for _ in range(TRIES):
                asking.send(question)
                try:
                    if asking.recv(512)[:2] == question[:2]:
                        return True
                except TimeoutError:
                    continue
    except OSError:
        pass
    return False


def _question(name: str) -> bytes:
    labels = [each.encode("ascii", "replace")[:63] for each in name.strip(".").split(".")]
    encoded = b"".join(bytes([len(each)]) + each for each in labels if each)
    head = _HEADER.pack(secrets.randbits(16), _RECURSION, 1, 0, 0, 0)
    return head + encoded + struct.pack("!BHH", 0, _ADDRESS, _INTERNET)
