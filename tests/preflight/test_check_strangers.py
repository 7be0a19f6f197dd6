"""What reaches the port of a check without knowing the rendezvous id, and a node 0 that is none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddpdoctor.preflight.machine.network import may_be_node
from ddpdoctor.preflight.protocol import meet, wire
from ddpdoctor.preflight.protocol.coordinator import MAX_REJECTED, Coordinator, listen
from ddpdoctor.preflight.protocol.joining import Call, CallError, call_once
from ddpdoctor.preflight.protocol.meet import Worker
from ddpdoctor.preflight.protocol.messages import (
    Hello,
    Order,
    unpack_facts,
)
from ddpdoctor.preflight.protocol.pairs import Listener, Target
from ddpdoctor.preflight.protocol.wire import unpacked
from ddpdoctor.preflight.selftest.collectives import Ranks
from ddpdoctor.preflight.situation import NodePlace
from ddpdoctor.run.records.base import as_json
from tests.conftest import LIMIT
from tests.preflight.test_check_meeting import FACTS

KEY = wire.key_of("job7")
STRANGER = "127.0.0.2"


def meeting(attack: Callable[[Coordinator, int], Awaitable[None]]) -> Coordinator:
    """A coordinator that is attacked, and that a node of its own reaches afterwards."""

    async def run() -> Coordinator:
        listening = listen(0)
        port = listening.getsockname()[1]
        here = Coordinator(listening, KEY, 2)
        await here.open()
        try:
            await attack(here, port)
            call = await call_once("127.0.0.1", port, KEY, "node1")
            assert call.identity == here.identity
            await call.link.close()
        finally:
            await here.close()
        return here

    return asyncio.run(run())


async def stranger(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(STRANGER, 0))


BOMBS = {
    "64 MiB of empty lists": struct.pack("!I", 64 << 20) + b"[" + b"[]," * (1 << 20),
    "deeper than any parser goes": struct.pack("!I", 200_000) + b"[" * 200_000,
    "deep, and small enough": struct.pack("!I", 4000) + b"[" * 4000,
    "a web browser": b"GET / HTTP/1.1\r\n\r\n",
    "four gigabytes": b"\xff" * 4,
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_without_a_proof_a_message_is_small_and_costs_nothing(bomb: bytes) -> None:
    process = psutil.Process()

    async def attack(here: Coordinator, port: int) -> None:
        before = process.memory_info().rss
        for _ in range(8):
            reader, writer = await stranger(port)
            writer.write(bomb)
            with contextlib.suppress(OSError):
                # What is closed with unread data is reset.
                await reader.read()
            writer.close()
        assert process.memory_info().rss - before < 16 << 20

    assert meeting(attack).members == []


def calls(held: contextlib.ExitStack, port: int, addresses: Iterable[str]) -> None:
    """Connections that stay open and say nothing."""
    for address in addresses:
        held.enter_context(socket.create_connection(("127.0.0.1", port), 60, (address, 0)))


def test_slow_connections_of_one_address_leave_room_for_the_nodes() -> None:
    async def attack(here: Coordinator, port: int) -> None:
        calls(held, port, [STRANGER] * 200)
        for _ in range(600):
            await asyncio.sleep(0.05)
            if here._admission.turned_away == 200 - wire.MAX_UNPROVED_OF_ADDRESS:
                break
        assert len(here._admission._waiting) == wire.MAX_UNPROVED_OF_ADDRESS

    with contextlib.ExitStack() as held:
        meeting(attack)


def test_of_many_addresses_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_UNPROVED", 16)

    async def attack(here: Coordinator, port: int) -> None:
        calls(held, port, [f"127.0.1.{each}" for each in range(1, 41)])
        for _ in range(600):
            await asyncio.sleep(0.05)
            if here._admission.turned_away == 40 - 16:
                break
        assert len(here._admission._waiting) == 16

    with contextlib.ExitStack() as held:
        meeting(attack)


def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PROOF_SECONDS", 0.2)

    async def attack(here: Coordinator, port: int) -> None:
        reader, writer = await stranger(port)
        assert wire.challenge_in(await reader.readexactly(wire.GREETING_BYTES))
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()

    meeting(attack)


def test_wrong_ids_are_counted_and_change_nothing() -> None:
    async def attack(here: Coordinator, port: int) -> None:
        gathering = asyncio.ensure_future(here.gather(asyncio.get_running_loop().time() + 3600))
        for number in range(MAX_REJECTED + 8):
            with pytest.raises(CallError) as caught:
                await call_once("127.0.0.1", port, wire.key_of("other"), f"node{number}")
            assert caught.value.problem.kind == "other id"
        assert not gathering.done()
        gathering.cancel()

    here = meeting(attack)
    assert here.rejected_calls == MAX_REJECTED + 8
    assert len(here.rejected) == MAX_REJECTED


def test_a_name_that_steers_a_terminal_is_no_name() -> None:
    async def attack(here: Coordinator, port: int) -> None:
        reader, writer = await stranger(port)
        await reader.readexactly(wire.GREETING_BYTES)
        writer.write(wire.packed(Hello("0" * 64, "0", "\x1b[2Jgpu7")))
        await reader.read()
        writer.close()

    here = meeting(attack)
    assert [(each.host, each.address) for each in here.rejected] == [("", STRANGER)]


HOSTILE = (
    "eth0; touch pwned", "$(touch pwned)", "`touch pwned`", "'; touch pwned; '", "-rf",
    "a\ntouch pwned", "\x1b[2J", "../../etc/passwd", "x" * 5000,
)  # fmt: skip

FIELDS: dict[str, Callable[[str], Any]] = {
    "host": lambda text: text,
    "gloo_address": lambda text: text,
    "interfaces": lambda text: [[text, 1500, ["10.0.0.1"]]],
    "torch": lambda text: text,
    "nccl": lambda text: text,
    "driver": lambda text: text,
    "python": lambda text: text,
    "ddpdoctor": lambda text: text,
    "commit": lambda text: text,
    "script_hash": lambda text: text,
    "changes": lambda text: text,
    "variables": lambda text: {text: "1"},
}


WHOLE: dict[str, Any] = json.loads(json.dumps(as_json(FACTS)))


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_is_no_name_is_refused(name: str) -> None:
    assert unpack_facts(WHOLE) == FACTS
    for text in HOSTILE:
        with pytest.raises(ValueError, match=f"facts.{name}"):
            unpack_facts({**WHOLE, name: FIELDS[name](text)})


@pytest.mark.parametrize(
    "told",
    [{"pair_port": 70000}, {"rank": -1}, {"nnodes": 1 << 40}, {"interfaces": [["eth0", 1, ["x"]]]}],
)
def test_a_number_or_an_address_that_is_none_is_refused(told: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"facts\."):
        unpack_facts({**WHOLE, **told})


@pytest.mark.parametrize(
    "told",
    [
        {"do": "dial", "targets": [{"index": 1, "address": "evil.example", "port": 1}]},
        {"do": "folder", "action": "write", "token": "../../x"},
        {"do": "reduce", "limit": float("inf")},
        {"do": "reduce", "world": 1 << 40},
    ],
)
def test_an_order_with_such_values_is_refused(told: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"order\.|target\."):
        unpacked(Order, told)


@pytest.mark.parametrize(
    ("address", "coordinator", "may"),
    [
        ("10.0.0.2", "10.0.0.1", True),
        ("192.168.4.2", "10.0.0.1", True),
        ("127.0.0.1", "10.0.0.1", False),
        ("::1", "fd00::1", False),
        ("169.254.169.254", "10.0.0.1", False),
        ("8.8.8.8", "10.0.0.1", False),
        ("8.8.8.8", "8.8.4.4", True),
        ("224.0.0.1", "10.0.0.1", False),
        ("0.0.0.0", "10.0.0.1", False),
        ("169.254.1.2", "169.254.1.1", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("", "10.0.0.1", False),
    ],
)
def test_where_another_node_may_be(address: str, coordinator: str, may: bool) -> None:
    assert may_be_node(address, coordinator) is may


def obeying(folder: Path, *orders: Order) -> Worker:
    """A worker that was given orders by somebody who plays node 0, and then left alone."""

    async def run() -> Worker:
        left, right = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=left)
        other, theirs = await asyncio.open_connection(sock=right)
        call = Call(wire.Link(reader, writer), "x", 0.0, 0.0, "10.0.0.1", "10.0.0.1")
        facts = replace(FACTS, folder=str(folder))
        place = NodePlace(2, 1, "node0", 29500, "none")
        made = Worker(call, place, facts, Listener(), Ranks(os.environ))
        for order in orders:
            theirs.write(wire.packed(order))
        await theirs.drain()
        running = asyncio.ensure_future(made.run(asyncio.get_running_loop().time() + 3600))
        for _ in range(len(orders) + 1):
            # The facts first.
            await wire.Link(other, theirs).receive(60)
        theirs.close()
        with pytest.raises(wire.WireError):
            await asyncio.wait_for(running, LIMIT)
        writer.close()
        return made

    return asyncio.run(run())


def test_a_fake_node_0_does_not_get_a_node_to_dial_its_own_machine(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        target = Target(0, "127.0.0.1", server.getsockname()[1])
        obeying(tmp_path, Order("roster", 0, "ab"), Order("dial", targets=(target,)))
        obeying(tmp_path, Order("roster", 0, "ab"), Order("speed", targets=(target,)))
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_fake_node_0_leaves_no_file(tmp_path: Path) -> None:
    kept = tmp_path / f"{meet.MARKER_PREFIX}cd"
    kept.write_text("another check's")
    write, remove = (Order("folder", token="ab", action=each) for each in ("write", "remove"))
    obeying(tmp_path, write)
    assert list(tmp_path.iterdir()) == [kept]
    # Nor is a file removed that this node did not write.
    obeying(tmp_path, replace(remove, token="cd"))
    assert list(tmp_path.iterdir()) == [kept]
