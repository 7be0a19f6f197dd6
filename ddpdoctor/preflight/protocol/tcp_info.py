"""What the kernel counts of a TCP connection: segments that were sent again, bytes that arrived."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from typing import NamedTuple

_TOTAL_RETRANS = struct.Struct("=I")
_BYTES = struct.Struct("=QQ")
_AT_RETRANS, _AT_BYTES, _SIZE = 100, 120, 136
"""Of Linux's struct tcp_info (uapi/linux/tcp.h), whose fields never move: tcpi_total_retrans, then
tcpi_bytes_acked and tcpi_bytes_received, since Linux 4.1."""


class Counts(NamedTuple):
    """Of one connection so far.

    Attributes:
        resent: Segments that were sent again.
        acked: Bytes that the other end has acknowledged.
        received: Bytes that came.
    """

    resent: int = 0
    acked: int = 0
    received: int = 0


def counts(writer: asyncio.StreamWriter) -> Counts:
    """What the kernel counts of a connection; zeros where it does not."""
    connection = writer.get_extra_info("socket")
    if sys.platform != "linux" or connection is None:
        return Counts()
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    except OSError:
        return Counts()
    if len(info) < _SIZE:
        return Counts()
    (resent,) = _TOTAL_RETRANS.unpack_from(info, _AT_RETRANS)
    return Counts(resent, *_BYTES.unpack_from(info, _AT_BYTES))
