"""Other users who open connections to the debug ports as fast as they can."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import subprocess
from collections.abc import Iterator

import pytest

from ddpdoctor.debug import gateway
from ddpdoctor.debug.gateway import Admission
from ddpdoctor.run.records.supervisor import DebugRecord
from ddpdoctor.system import peers
from tests.conftest import LIMIT, Doctor, Live
from tests.debug.test_debug_ports import (
    OTHER,
    as_another_user,
    end,
    live,
    needs_another_user,
    own_client,
    ports,
)

__all__ = ["live"]

FLOOD = """
import os, select, socket, sys, time
port, until = int(sys.argv[1]), time.monotonic() + 60
print(flush=True)
while time.monotonic() < until and not select.select([0], [], [], 0)[0]:
    for _ in range(200):
        with socket.socket() as flood:
            flood.setblocking(False)
            flood.connect_ex(("127.0.0.1", port))
"""


@needs_another_user
@pytest.mark.slow
def test_the_owner_gets_in_while_others_flood_a_port(doctor: Doctor, live: Live) -> None:
    numbers = ports(live)
    sockets = live.snapshot().manifest["debug"]["sockets"]
    assert own_client(numbers[0])["success"]
    for flooded in numbers[:2]:
        flood = subprocess.Popen(
            as_another_user("/usr/bin/env", "python3", "-I", "-c", FLOOD, str(flooded)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with flood:
            assert flood.stdin is not None and flood.stdout is not None
            flood.stdout.readline()
            assert own_client(numbers[0])["success"]
            assert own_client(sockets[0])["success"]
            assert flood.poll() is None
            flood.stdin.close()
            assert flood.wait(LIMIT) == 0
    said = end(doctor, live)
    assert said.count(f"refused: uid {OTHER}") == 1, said
    assert "Traceback" not in said


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user is a stranger."""
    monkeypatch.setattr(peers, "is_trusted", lambda uid: False)


def refuse(count: int) -> tuple[list[DebugRecord], int]:
    """Have connections refused that all wait; the records, and the number of rests."""
    records: list[DebugRecord] = []
    rests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise AssertionError("a stranger is served")

    async def main() -> None:
        nonlocal rests
        made = Admission(False, records.append)
        made.open(block.listeners[0], "a port", serve, beside="a socket")
        with contextlib.ExitStack() as opened:
            clients = [
                opened.enter_context(socket.create_connection(("127.0.0.1", block.numbers[0])))
                for _ in range(count)
            ]
            for client in clients:
                client.setblocking(False)
                with pytest.raises(ConnectionResetError):
                    await asyncio.get_running_loop().sock_recv(client, 1)
                rests += made.paused
        made.close()

    block = gateway.bind_block("127.0.0.1", 0, 1)
    try:
        asyncio.run(asyncio.wait_for(main(), LIMIT))
    finally:
        block.close()
    return records, rests


@pytest.mark.usefixtures("strangers")
def test_strangers_are_reset_and_the_port_rests() -> None:
    records, rests = refuse(100)
    assert [each.state for each in records] == ["refused"]
    assert rests > 0


@pytest.mark.usefixtures("strangers")
def test_a_flood_is_reported_once_with_the_socket_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "MAX_BATCH", 1e-9)
    monkeypatch.setattr(gateway, "MIN_PAUSE", 1e-3)
    monkeypatch.setattr(gateway, "FLOOD_TIMEOUT", 0.0)
    records, _ = refuse(100)
    assert [each.state for each in records] == ["refused", "flooded"]
    assert gateway.flooded(records[1]) == (
        "warning: a port is flooded with connections, which may delay a debugger; "
        "a socket is not affected"
    )


@pytest.fixture(params=["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection over IPv4, IPv6, and by an IPv4 address in IPv6."""
    near = "::1" if request.param == "::1" else "127.0.0.1"
    family = socket.AF_INET6 if near == "::1" else socket.AF_INET
    try:
        server = socket.create_server((near, 0), family=family)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with server, socket.create_connection((request.param, server.getsockname()[1])) as client:
        accepted, _ = server.accept()
        with accepted:
            yield client, accepted


def test_one_socket_is_looked_up_not_all(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, accepted = pair
    try:
        found = peers.find_socket(accepted.getpeername(), accepted.getsockname())
    except OSError as error:
        pytest.skip(f"no sock_diag here: {error}")
    assert found is not None
    monkeypatch.setattr(peers, "_owner_by_table", lambda *ends: pytest.fail("reads the table"))
    assert peers.user(accepted) == found.uid
    # Neither a socket that listens nor one that its process has closed is a peer.
    listening = (accepted.getsockname(), (accepted.getsockname()[0], 9))
    assert peers.find_socket(*listening) is None
    client.close()
    monkeypatch.setattr(peers, "_check_open", lambda connection: None)
    with pytest.raises(peers.GoneError):
        peers.user(accepted)


@pytest.mark.parametrize("how", ["refused", "no module"])
def test_the_table_serves_where_the_kernel_refuses(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def find(source: tuple[object, ...], target: tuple[object, ...]) -> None:
        if how == "refused":
            raise PermissionError(errno.EPERM, "Operation not permitted")

    expected = peers.user(pair[1])
    monkeypatch.setattr(peers, "find_socket", find)
    assert peers.user(pair[1]) == expected
