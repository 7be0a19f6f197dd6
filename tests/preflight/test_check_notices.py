"""What node 0 hears by UDP of nodes that do not get through by TCP."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from ddpdoctor.preflight.protocol import wire
from ddpdoctor.preflight.protocol.coordinator import Coordinator, listen
from ddpdoctor.preflight.protocol.joining import half_open, notice, send_notice
from ddpdoctor.preflight.protocol.messages import Caller

KEY = wire.key_of("job7")


def heard(*datagrams: bytes, key: bytes = KEY, blocked: str = "dropped") -> list[Caller]:
    """What a coordinator remembers of datagrams, and of a notice after them."""

    async def run() -> list[Caller]:
        listening = listen(0)
        port = listening.getsockname()[1]
        here = Coordinator(listening, KEY, 3)
        await here.open()
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
                for each in datagrams:
                    sending.sendto(each, ("127.0.0.1", port))
            answer = await send_notice("127.0.0.1", port, key, notice(key, "node1", 1, blocked))
            assert answer == ("" if key == KEY else None)
            return here.blocked
        finally:
            await here.close()

    return asyncio.run(run())


def test_a_notice_is_heard_and_answered() -> None:
    assert heard() == [Caller("node1", "127.0.0.1", 1, "dropped")]
    assert heard(blocked="") == []


def test_what_proves_no_id_is_not_heard() -> None:
    assert heard(key=wire.key_of("another")) == []


def test_damaged_datagrams_change_nothing() -> None:
    good = wire.packed(notice(KEY, "node9", 1, "dropped"))
    bad = (b"", b"x", b"[" * 1400, good[:-9], good.replace(b"node9", b"\x1b[2J9"), b"\xff" * 2000)
    assert heard(*bad) == [Caller("node1", "127.0.0.1", 1, "dropped")]


def test_half_open_connections_are_read_from_the_kernel(tmp_path: Path) -> None:
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt"
    rest = "00000000:00000000 01:00000018 00000000     0        0 0"
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(
        f"{head}\n   0: 00000000:733C 00000000:0000 0A {rest}\n"
        f"   1: 01004D0A:733C 03004D0A:C224 03 {rest}\n"
        f"   2: 01004D0A:733D 04004D0A:C224 03 {rest}\n"
    )
    mapped, six = "0000000000000000FFFF0000", "770000FD0000000000000000"
    (tmp_path / "net" / "tcp6").write_text(
        f"{head}\n   0: {mapped}01004D0A:733C {mapped}02004D0A:C224 03 {rest}\n"
        f"   1: {six}01000000:733C {six}02000000:1 03 {rest}\n"
    )
    assert half_open(29500, tmp_path) == {"10.77.0.3", "10.77.0.2", "fd00:77::2"}
