"""Encrypted messages between ddpdoctor's processes on several nodes.

ZeroMQ carries them. It reconnects, bounds its queues and notices dead peers. Both ends derive their
CURVE keys from a shared secret. The handshake refuses peers that do not know it.

A message is a record, declared like those of a journal, and a blob of bytes. Only the decoder of
the records reads the data of a peer.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import zmq
import zmq.auth.thread
import zmq.utils.z85 as z85

from ddpdoctor.run.records.base import Record, as_json
from ddpdoctor.run.records.typed_json import parse

MAX_MESSAGE = 8 << 20  # Maximum bytes of a message on the wire
MAX_BLOB = 64 << 20  # Maximum bytes of a blob after decompression

MAX_WAITING = 256  # Maximum number of messages waiting for one peer. Then sending fails.

HANDSHAKE_MS = 10_000
"""Milliseconds after which a connection without proof of the secret is closed."""

HEARTBEAT_MS = 3_000  # Milliseconds between two heartbeats of a connection

DEAD_MS = 20_000
"""Milliseconds without a heartbeat until a connection is closed. A busy machine may be late."""

_SERVER, _CLIENT = b"server", b"client"


class _Keys(NamedTuple):
    public: bytes
    secret: bytes


def _keys(secret: str, end: bytes) -> _Keys:
    seed = hashlib.sha256(b"ddpdoctor 1 " + end + b"\0" + secret.encode()).digest()
    key = z85.encode(seed)
    return _Keys(zmq.curve_public(key), key)


class _OnlyClient:
    """Accepts the key of clients that know the secret."""

    def __init__(self, secret: str) -> None:
        self._key = _keys(secret, _CLIENT).public

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client with this public key may connect."""
        return key == self._key


def authenticate(context: zmq.Context[Any], secret: str) -> zmq.auth.thread.ThreadAuthenticator:
    """Start to refuse clients without the secret. The caller has to stop the returned thread."""
    authenticator = zmq.auth.thread.ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", _OnlyClient(secret))
    return authenticator


def make_server(socket: zmq.Socket[Any], secret: str) -> None:
    """Prepare a ROUTER socket that accepts only clients with the secret.

    Call :func:`authenticate` for its context before you bind it.
    """
    _prepare(socket, _keys(secret, _SERVER))
    socket.curve_server = True
    # The new connection of a node that reconnects replaces the lost one.
    socket.router_handover = True
    socket.router_mandatory = True


def make_client(socket: zmq.Socket[Any], secret: str, identity: bytes) -> None:
    """Prepare a DEALER socket for a server with the secret."""
    _prepare(socket, _keys(secret, _CLIENT))
    socket.curve_serverkey = _keys(secret, _SERVER).public
    socket.routing_id = identity
    socket.reconnect_ivl = 200
    socket.reconnect_ivl_max = 5_000


def _prepare(socket: zmq.Socket[Any], keys: _Keys) -> None:
    socket.curve_publickey, socket.curve_secretkey = keys
    socket.ipv6 = True
    socket.linger = 500
    socket.maxmsgsize = MAX_MESSAGE
    socket.sndhwm = socket.rcvhwm = MAX_WAITING
    socket.handshake_ivl = HANDSHAKE_MS
    socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, DEAD_MS


def endpoint(address: str, port: int | str) -> str:
    """Return ZeroMQ's name for an address, such as ``tcp://[::1]:29400``."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def packed(message: Record, blob: bytes = b"") -> list[bytes]:
    """Return the frames of a message."""
    head = json.dumps(as_json(message), separators=(",", ":"), default=as_json).encode()
    return [head, zlib.compress(blob, 1)] if blob else [head]


def unpacked(
    frames: Iterable[bytes], kinds: Mapping[str, type[Record]]
) -> tuple[Record, bytes] | None:
    """Decode ZeroMQ frames into a message and its blob. None if its kind is unknown."""
    head, *blobs = frames
    message = parse(head, kinds)
    if message is None or len(blobs) > 1:
        return None
    if not blobs:
        return message, b""
    inflater = zlib.decompressobj()
    try:
        blob = inflater.decompress(blobs[0], MAX_BLOB)
    except zlib.error:
        return None
    return None if inflater.unconsumed_tail else (message, blob)
