"""Who owns a TCP socket, by Linux's ``sock_diag``: one request for one socket.

``/proc/net/tcp`` says the same, but only with all other sockets of the machine.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import NamedTuple

ESTABLISHED = 1
"""The state of a connection that neither side has closed."""

_LISTENS = 10
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLMSG_ERROR = 2
_NLM_F_REQUEST = 1
_ALL_STATES = 0xFFFFFFFF
_NO_COOKIE = (0xFFFFFFFF, 0xFFFFFFFF)
_HEADER = struct.Struct("=IHHII")
"""``struct nlmsghdr``: length, type, flags, sequence number, port."""

_WANTED = struct.Struct("=BBBxI")
"""The head of ``struct inet_diag_req_v2``: family, protocol, extensions, states."""

_FOUND = struct.Struct("=BB62xII")
"""``struct inet_diag_msg``: family, state, ..., uid, inode."""


class Found(NamedTuple):
    """A TCP socket of this network namespace."""

    state: int
    uid: int
    inode: int
    """0 if its process has closed it; then the uid may be root's."""


def find(source: tuple[object, ...], target: tuple[object, ...]) -> Found | None:
    """Look up the socket of a connection.

    Args:
        source: The socket's own address, as ``getsockname`` returns it.
        target: The address of its peer.

    Returns:
        The socket, or None if this network namespace has none with these addresses.

    Raises:
        OSError: The kernel has no ``sock_diag``, or refuses the request.
    """
    request = _request(source, target)
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_NETLINK, kind, _NETLINK_SOCK_DIAG) as kernel:
        # Connected to the kernel (port 0), it takes no message from another process.
        kernel.connect((0, 0))
        kernel.send(
            _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
            + request
        )
        # The kernel has answered before `send` returns.
        answer = kernel.recv(4096, socket.MSG_DONTWAIT)
    if _HEADER.unpack_from(answer)[1] == _NLMSG_ERROR:
        number = -struct.unpack_from("=i", answer, _HEADER.size)[0]
        if number == errno.ENOENT:
            return None
        raise OSError(number, os.strerror(number))
    _, *fields = _FOUND.unpack_from(answer, _HEADER.size)
    found = Found(*fields)
    # Without such a socket the kernel returns one that listens at the source's address.
    return None if found.state == _LISTENS else found


def _request(source: tuple[object, ...], target: tuple[object, ...]) -> bytes:
    """``struct inet_diag_req_v2`` for one TCP socket."""
    family = socket.AF_INET6 if ":" in str(source[0]) else socket.AF_INET
    near, far = (
        socket.inet_pton(family, str(each[0]).partition("%")[0]) for each in (source, target)
    )
    # Of a link-local address the interface is a part.
    interface = source[3] if len(source) > 3 else 0
    return (
        _WANTED.pack(family, socket.IPPROTO_TCP, 0, _ALL_STATES)
        + struct.pack("!HH16s16s", source[1], target[1], near, far)
        + struct.pack("=III", interface, *_NO_COOKIE)
    )
