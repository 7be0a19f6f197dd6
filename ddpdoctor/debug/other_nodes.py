"""Debug ports for the ranks of other nodes, whose connections the exchange carries there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.opening import integer
from ddpdoctor.debug import dap
from ddpdoctor.debug.clients import (
    CHUNK,
    FIRST_MESSAGE,
    PARTING,
    Clients,
    first_message,
    refuse,
)
from ddpdoctor.debug.gateway_ranks import Message, Ranks
from ddpdoctor.nodes.asking import SOCKET
from ddpdoctor.run.names import short_path
from ddpdoctor.run.records.supervisor import DebugRecord

if TYPE_CHECKING:
    from ddpdoctor.debug.gateway import Admission, Ports

MAX_PORTS = 256  # Ports for ranks of other nodes


@dataclass
class _FarPort:
    """A port of this node that leads to one of another node."""

    node: int
    host: str
    index: int  # Of the port there
    rank: int
    number: int
    close: Callable[[], None]
    lost: str = ""  # Why it leads nowhere any more


class OtherNodes:
    """The ports for the ranks of other nodes.

    Args:
        ranks: The ranks of this node, which also hear of those of other nodes.
        clients: Runs the sessions.
        admission: Admits the same users as to the ports of this node.
        bind: Listens on a number of ports from a given one on.
        first: The port of rank 0.
        directory: The run directory.
    """

    def __init__(
        self,
        ranks: Ranks,
        clients: Clients,
        admission: Admission,
        bind: Callable[[int, int], Ports],
        first: int,
        directory: Path,
    ) -> None:
        self._ranks = ranks
        self._clients = clients
        self._admission = admission
        self._bind = bind
        self._first = first
        self._directory = directory
        self._ports: dict[tuple[int, int], _FarPort] = {}
        ranks.on_node = self._update

    @property
    def ports(self) -> dict[int, int]:
        """The ports by global rank."""
        return {each.rank: each.number for each in list(self._ports.values())}

    @property
    def hosts(self) -> dict[int, str]:
        """The hosts by global rank."""
        return {each.rank: each.host for each in list(self._ports.values())}

    def close(self) -> None:
        """Close all ports."""
        for port in self._ports.values():
            port.close()

    def _update(self, message: Message) -> None:
        """Take in the ranks of a node. Without a node all nodes are lost."""
        node, lost = integer(message, "node"), str(message.get("lost") or "")
        if not node or lost:
            for key in [key for key in self._ports if not node or key[0] == node]:
                self._lose(self._ports.pop(key), lost or "the link to the other nodes has ended")
            return
        own = {slot.rank for slot in self._ranks.linked}
        for index, rank, pid in message["ranks"]:
            port = self._ports.get((node, index))
            if rank in own or (port is not None and port.rank == rank):
                continue
            if port is None:
                port = self._open(node, str(message.get("host")), index, rank)
            if port is not None:
                port.rank = rank
                self._report(port, "port", pid=pid)

    def _open(self, node: int, host: str, index: int, rank: int) -> _FarPort | None:
        if len(self._ports) >= MAX_PORTS:
            return None
        try:
            ports = self._bind(self._first + rank, 1)
        except DoctorError:
            return None

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._clients.guard(self._client(port, reader, writer), writer)

        def close() -> None:
            stop()
            ports.close()

        number = ports.numbers[0]
        stop = self._admission.open(ports.listeners[0], f"debug port {number}", serve)
        port = _FarPort(node, host, index, rank, number, close)
        self._ports[node, index] = port
        return port

    def _lose(self, port: _FarPort, why: str) -> None:
        port.lost = why
        port.close()
        self._report(port, "lost", why=why)

    def _report(self, port: _FarPort, state: str, *, pid: int | None = None, why: str = "") -> None:
        self._ranks.report(
            DebugRecord(
                time=time.time_ns(),
                state=state,
                rank=port.rank,
                local_rank=port.index,
                port=port.number,
                pid=pid,
                why=why,
            )
        )

    async def _client(
        self, port: _FarPort, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carry the bytes of a client to the port of the other node, and back."""
        data, requests = await asyncio.wait_for(first_message(reader), FIRST_MESSAGE)
        if not requests:
            return
        with short_path(str(self._directory / SOCKET)) as name:
            far_reader, far_writer = await asyncio.open_unix_connection(name)
        try:
            question = {"what": "debug", "node": port.node, "index": port.index}
            far_writer.write(json.dumps(question).encode() + b"\n" + data)
            chunk = await far_reader.read(CHUNK)
            if not chunk:
                text = port.lost or f"no debugger can be attached to rank {port.rank} now"
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(refuse(text, requests, reader, writer), PARTING)
                return
            writer.write(chunk)
            outward = asyncio.create_task(_carry(reader, far_writer))
            inward = asyncio.create_task(_carry(far_reader, writer))
            await asyncio.wait({outward, inward}, return_when=asyncio.FIRST_COMPLETED)
            if not outward.done():
                # The node may be lost: tell the client before the connection closes.
                writer.write(dap.encode(dap.event("terminated", {})))
            for task in (outward, inward):
                task.cancel()
            await asyncio.gather(outward, inward, return_exceptions=True)
        finally:
            far_writer.close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK):
        writer.write(chunk)
        await writer.drain()
