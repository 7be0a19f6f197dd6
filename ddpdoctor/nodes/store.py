"""The job's store, through which the nodes of a job find each other.

torch's ranks meet at a TCPStore, or at a file. This module adds one value of ours to theirs, on a
separate connection and without torch, so the job never waits for it. The wire format is that of
torch 2.1 and later (torch/csrc/distributed/c10d/TCPStore.cpp).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

from ddpdoctor.core import opening
from ddpdoctor.run.records.process import StoreRecord

TIMEOUT = 5.0  # Seconds for the store to respond
MAX_VALUE = 64 << 10  # Maximum bytes of a value

_VALIDATE, _SET, _GET, _CHECK, _COUNT_KEYS = 0, 1, 3, 5, 7
_MAGIC = 0x3C85F7CE
_READY = 0
_LENGTH = struct.Struct("<Q")


def read(store: StoreRecord, key: str) -> bytes | None:
    """Return the value of a key. None if it is not set.

    Raises:
        OSError: The store cannot be reached, or does not respond as expected.
    """
    if store.file:
        try:
            return opening.contents(_beside(store), MAX_VALUE, owners=(os.getuid(),))
        except FileNotFoundError:
            return None
    name = _text(f"/{key}".encode())
    with _connection(store.host, store.port) as connection:
        connection.sendall(bytes([_CHECK]) + _LENGTH.pack(1) + name)
        if _exactly(connection, 1)[0] != _READY:
            return None
        connection.sendall(bytes([_GET]) + name)
        (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
        if size > MAX_VALUE:
            raise OSError("the value in the job's store is too long")
        return _exactly(connection, size)


def write(store: StoreRecord, key: str, value: bytes) -> None:
    """Set the value of a key.

    Raises:
        OSError: The store cannot be reached, or the file cannot be written.
    """
    if store.file:
        path, fresh = _beside(store), f"{_beside(store)}.{os.getpid()}"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(value)
        os.replace(fresh, path)
        return
    name = _text(f"/{key}".encode())
    with _connection(store.host, store.port) as connection:
        # The check's response shows that the value has arrived, because a store works in order.
        connection.sendall(bytes([_SET]) + name + _text(value))
        connection.sendall(bytes([_CHECK]) + _LENGTH.pack(1) + name)
        if _exactly(connection, 1)[0] != _READY:
            raise OSError("the job's store did not take a value")


def forget(store: StoreRecord) -> None:
    """Remove our file next to the job's. A TCPStore ends with the job."""
    if store.file:
        with contextlib.suppress(OSError):
            os.unlink(_beside(store))


def _beside(store: StoreRecord) -> str:
    return f"{store.file}.ddpdoctor"


def responds(port: int, seconds: float = 1.0) -> bool:
    """Return whether a store at a port of this machine answers, with its number of keys."""
    try:
        with _connection("127.0.0.1", port, seconds) as connection:
            connection.sendall(bytes([_COUNT_KEYS]))
            (keys,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    except OSError:
        return False
    return bool(keys < 1 << 40)


def _connection(host: str, port: int, seconds: float = TIMEOUT) -> socket.socket:
    connection = socket.create_connection((host, port), seconds)
    try:
        connection.sendall(bytes([_VALIDATE]) + struct.pack("<I", _MAGIC))
    except OSError:
        connection.close()
        raise
    return connection


def _text(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received = connection.recv(size - len(data))
        if not received:
            raise ConnectionResetError("the job's store closed the connection")
        data += received
    return data
