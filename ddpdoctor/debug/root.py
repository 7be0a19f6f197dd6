"""Serve the root session, which asks the client to start a child session for each rank.

The root session and its children connect to one port. A child's ``attach`` request names its rank,
as debugpy's sessions of subprocesses do.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.opening import integer
from ddpdoctor.debug import dap
from ddpdoctor.debug.clients import (
    ANSWER_TIMEOUT,
    CHUNK_SIZE,
    FIRST_MESSAGE_TIMEOUT,
    Clients,
    OtherNodes,
    Serve,
    refuse,
)
from ddpdoctor.debug.dap import Message
from ddpdoctor.debug.gateway_ranks import Ranks, waits_for_others
from ddpdoctor.run import reader
from ddpdoctor.run.status import Status

CHILD = "ddpdoctor"
"""The argument of a child's ``attach`` request, with the rank's ``port`` and the ``root``."""

_NOT_INHERITED = (
    *("connect", "host", "port", "listen", "processId", "request", "restart", "ranks"),
    *("preLaunchTask", "postDebugTask", "presentation", "__sessionId"),
)
_FILTERS = {
    "raised": ("Raised Exceptions", False),
    "uncaught": ("Uncaught Exceptions", True),
    "userUnhandled": ("User Uncaught Exceptions", False),
}
CAPABILITIES: Message = {
    **dict.fromkeys(
        (
            *("supportsCompletionsRequest", "supportsConditionalBreakpoints"),
            *("supportsConfigurationDoneRequest", "supportsDelayedStackTraceLoading"),
            *("supportsEvaluateForHovers", "supportsExceptionInfoRequest"),
            *("supportsExceptionOptions", "supportsFunctionBreakpoints"),
            *("supportsHitConditionalBreakpoints", "supportsLogPoints", "supportsModulesRequest"),
            *("supportsSetExpression", "supportsSetVariable", "supportsValueFormattingOptions"),
            *("supportsTerminateDebuggee", "supportsTerminateRequest"),
            *("supportsGotoTargetsRequest", "supportsClipboardContext"),
            "supportsStepInTargetsRequest",
        ),
        True,
    ),
    "exceptionBreakpointFilters": [
        {"filter": name, "label": label, "default": on} for name, (label, on) in _FILTERS.items()
    ],
}
"""The capabilities of debugpy's adapter, which answers ``initialize`` before it has a process."""

_VSCODE = "vscode"
"""The client that starts children on debugpy's own event, and ends and restarts them together."""

_RELEASE = (1 << 30) + 2  # The sequence number of a ``continue`` that the client has not sent
_CHECK_INTERVAL = 0.05  # Seconds between two checks of ranks that have not stopped
MIN_WAIT = 0.5  # Minimum seconds in a phase for a rank to count as waiting for others
MAX_HELD = 10.0  # Maximum seconds to hide a stop, or three times the longest step


class RootPort:
    """Serve the port of the root sessions."""

    def __init__(self, ranks: Ranks, clients: Clients, others: OtherNodes, directory: Path) -> None:
        self._ranks = ranks
        self._clients = clients
        self._others = others
        self._directory = directory
        self._roots: dict[str, Root] = {}

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection."""
        await self._clients.guard(self._serve(reader, writer), writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        messages = _messages(reader)
        begun: list[tuple[Message, bytes]] = []
        while len(begun) < 2:
            begun.append(await asyncio.wait_for(_next(messages), FIRST_MESSAGE_TIMEOUT))
            if begun[0][0].get("command") != "initialize":
                return
            if len(begun) == 1:
                _respond(writer, begun[0][0], CAPABILITIES)
        (initialize, _), (attach, _) = begun
        child = _arguments(attach).get(CHILD)
        if attach.get("command") == "attach" and isinstance(child, dict):
            await self._child(child, begun, messages, reader, writer)
            return
        port = int(writer.get_extra_info("sockname")[1])
        if text := self._clients.objection(_arguments(attach), port):
            await asyncio.wait_for(refuse(text, [attach], reader, writer), FIRST_MESSAGE_TIMEOUT)
        else:
            await self._root(initialize, attach, messages, writer)

    async def _root(
        self,
        initialize: Message,
        attach: Message,
        messages: AsyncIterator[tuple[Message, bytes]],
        writer: asyncio.StreamWriter,
    ) -> None:
        root = Root(self._ranks, self._others, self._directory, writer, initialize, attach)
        self._roots[root.key] = root
        task: asyncio.Task[None] | None = None
        try:
            _respond(writer, attach, {})
            writer.write(dap.encode(dap.event("initialized", {})))
            async for message, _ in messages:
                command = message.get("command")
                if message.get("type") != "request":
                    continue
                if command in dap.LEAVING:
                    given = _arguments(message)
                    # A restart runs the task that started the job again, if there is one.
                    again = given.get("restart") and not _arguments(attach).get("preLaunchTask")
                    if root.at_gate and not again:
                        self._clients.end_job(self._ranks.slots[0])
                    await root.leave(given)
                    _respond(writer, message, {})
                    if command == "disconnect":
                        return
                    writer.write(dap.encode(dap.event("terminated", {})))
                    continue
                _respond(writer, message, _answer(message))
                if command == "configurationDone" and task is None:
                    task = asyncio.create_task(root.start_children())
            # The client has disappeared.
            await root.leave({})
        finally:
            del self._roots[root.key]
            if task is not None:
                task.cancel()
            if not root.left:
                writer.write(dap.encode(dap.event("terminated", {})))

    async def _child(
        self,
        given: Message,
        begun: list[tuple[Message, bytes]],
        messages: AsyncIterator[tuple[Message, bytes]],
        client_reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        root = self._roots.get(str(given.get("root")))
        serve = self._server(integer(given, "port"))
        if root is None or serve is None:
            text = "the rank, or the session that has started this one, has ended"
            refused = refuse(text, [begun[1][0]], client_reader, writer)
            await asyncio.wait_for(refused, FIRST_MESSAGE_TIMEOUT)
            return
        near, far = socket.socketpair()
        reader, to_rank = await asyncio.open_connection(sock=near)
        self._ranks.begin(serve(*await asyncio.open_connection(sock=far)))
        child = Child(to_rank, writer)
        port = integer(given, "port")
        root.join(port, child)

        async def outward() -> None:
            for _, raw in begun:
                to_rank.write(raw)
            async for message, raw in messages:
                if message.get("command") == "configurationDone":
                    child.configuring.add(message.get("seq"))
                to_rank.write(raw)
                await to_rank.drain()

        async def inward() -> None:
            async for message, raw in _messages(reader):
                if message.get("type") == "response":
                    number = message.get("request_seq")
                    if number == dap.DISCONNECT["seq"]:
                        child.end()
                    if number in (begun[0][0].get("seq"), _RELEASE, dap.DISCONNECT["seq"]):
                        continue
                    if number in child.configuring:
                        root.configured(child)
                elif message.get("event") == "stopped" and root.holds(child, message, raw):
                    continue
                writer.write(raw)
                await writer.drain()

        carried = [asyncio.create_task(outward()), asyncio.create_task(inward())]
        try:
            await asyncio.wait(carried, return_when=asyncio.FIRST_COMPLETED)
            if not carried[1].done():
                # The client has left or disappeared. The rank's last messages may still arrive.
                to_rank.write_eof()
                await asyncio.wait(carried[1:], timeout=ANSWER_TIMEOUT)
        finally:
            for task in carried:
                task.cancel()
            await asyncio.gather(*carried, return_exceptions=True)
            root.part(port, child)
            to_rank.close()

    def _server(self, port: int) -> Serve | None:
        """Return the server for the sessions of a rank. None if no rank has the port."""
        for slot in self._ranks.slots:
            if slot.port == port:
                return partial(self._clients.take, slot, by_port=False)
        return self._others.server(port)


class Child:
    """The session of one rank, started by a root session."""

    def __init__(self, to_rank: asyncio.StreamWriter, client: asyncio.StreamWriter) -> None:
        self._to_rank = to_rank
        self._client = client
        self._held: tuple[Message, bytes] | None = None
        self.configuring: set[object] = {None}  # Sequence numbers of ``configurationDone``
        self.configured = False
        self.released = False  # One of its stops was hidden from the client
        self.ended = asyncio.Event()

    @property
    def held(self) -> bool:
        """Whether it has stopped while the client does not know."""
        return self._held is not None

    def hold(self, message: Message, raw: bytes) -> None:
        """Withhold an event about a stop from the client."""
        self._held = message, raw

    def show(self) -> None:
        """Send the client the withheld event."""
        if self._held is not None:
            self._client.write(self._held[1])
            self._held = None

    def release(self) -> None:
        """Let the rank continue from a stop that the client does not know about."""
        if self._held is not None:
            thread = self._held[0].get("body", {}).get("threadId")
            self._held, self.released = None, True
            self._ask(_RELEASE, "continue", {"threadId": thread})

    def leave(self, arguments: Message) -> None:
        """End the session as the client would."""
        self._held = None
        self._ask(dap.DISCONNECT["seq"], "disconnect", arguments)

    def end(self) -> None:
        """Tell the client that the session is over."""
        if not self.ended.is_set():
            self.ended.set()
            self._client.write(dap.encode(dap.event("terminated", {})))

    def _ask(self, seq: int, command: str, arguments: Message) -> None:
        request = {"seq": seq, "type": "request", "command": command, "arguments": arguments}
        with contextlib.suppress(OSError, RuntimeError):
            self._to_rank.write(dap.encode(request))


class Root:
    """A root session and its children.

    A breakpoint that is not set on all ranks yet would stop only some, and leave the others in the
    next collective. So a stop in a step that began before all ranks were attached is not shown
    unless all of them stop: the ranks continue, and all stop in the next step.
    """

    def __init__(
        self,
        ranks: Ranks,
        others: OtherNodes,
        directory: Path,
        client: asyncio.StreamWriter,
        initialize: Message,
        attach: Message,
    ) -> None:
        self._ranks = ranks
        self._others = others
        self._directory = directory
        self._client = client
        self._attach = _arguments(attach)
        given = _arguments(initialize)
        self._reversed = bool(given.get("supportsStartDebuggingRequest"))
        self._reversed &= given.get("clientID") != _VSCODE
        self.key = secrets.token_hex(8)
        self.at_gate = not ranks.gate_open
        self.left = False  # The client has ended the session
        self._started: dict[int, tuple[int, int | None]] = {}  # Rank and pid by port
        self._children: dict[int, Child] = {}
        self._joining: set[int] = set()  # Ports of the requested children
        self._last: int | None = None
        """The highest step number when all ranks were attached. None before that."""
        self._settled = self.at_gate
        self._watching = False

    # -- the children

    async def start_children(self) -> None:
        """Ask the client for a session with each present and future rank."""
        while not self.left:
            for port, (rank, pid) in self._present().items():
                if self._started.get(port) != (rank, pid):
                    self._started[port] = rank, pid
                    self._joining.add(port)
                    self._ask(port, rank)
            await self._ranks.wait_until(lambda: self._present() != self._started, 60.0)

    def _present(self) -> dict[int, tuple[int, int | None]]:
        found: dict[int, tuple[int, int | None]] = {
            port: (rank, None) for rank, port in self._others.ports.items()
        }
        for slot in self._ranks.linked:
            if slot.link is not None:
                found[slot.port] = slot.rank, slot.link.pid
        wanted = self._attach.get("ranks")
        if isinstance(wanted, list) and wanted:
            found = {port: each for port, each in found.items() if each[0] in wanted}
        gone = {port: each for port, each in self._started.items() if port not in found}
        return {**gone, **found}

    def _ask(self, port: int, rank: int) -> None:
        host = self._others.hosts.get(rank)
        inherited = {key: each for key, each in self._attach.items() if key not in _NOT_INHERITED}
        body = {
            **inherited,
            "name": f"rank {rank}" + (f" on {host}" if host else ""),
            "request": "attach",
            "connect": self._attach.get("connect")
            or {"host": self._attach.get("host"), "port": self._attach.get("port")},
            CHILD: {"port": port, "root": self.key},
        }
        if self._reversed:
            arguments = {"request": "attach", "configuration": body}
            request = {"seq": port, "type": "request", "command": "startDebugging"}
            self._client.write(dap.encode({**request, "arguments": arguments}))
        else:
            self._client.write(dap.encode(dap.event("debugpyAttach", body)))

    def join(self, port: int, child: Child) -> None:
        """Add a requested session."""
        self._children[port] = child
        self._joining.discard(port)

    def part(self, port: int, child: Child) -> None:
        """Note that a session has ended."""
        if self._children.get(port) is child:
            del self._children[port]
        child.end()
        self._check_ready()

    async def leave(self, arguments: Message) -> None:
        """End all children, as the client would."""
        self.left = True
        children = list(self._children.values())
        for child in children:
            child.leave(arguments)
        ended = [asyncio.ensure_future(child.ended.wait()) for child in children]
        if ended:
            await asyncio.wait(ended, timeout=ANSWER_TIMEOUT)

    # -- stops of a late attach

    def configured(self, child: Child) -> None:
        """Note that a child's breakpoints are set."""
        child.configured = True
        self._check_ready()

    def _check_ready(self) -> None:
        ready = all(child.configured for child in self._children.values())
        if self._last is None and ready and not self._joining:
            self._last = max((each.step for each in self._statuses().values()), default=0)

    def holds(self, child: Child, message: Message, raw: bytes) -> bool:
        """Return whether a stop is hidden from the client for now."""
        body = message.get("body")
        at_breakpoint = isinstance(body, dict) and body.get("reason") == "breakpoint"
        if self._settled or not at_breakpoint:
            return False
        status = self._statuses().get(self._rank(child))
        later = self._last is not None and status is not None and status.step > self._last
        if later or child.released:
            self._settle()
            return False
        child.hold(message, raw)
        if not self._watching:
            self._watching = True
            self._ranks.begin(self._watch())
        return True

    def _rank(self, child: Child) -> int:
        ports = [port for port, each in self._children.items() if each is child]
        return self._started[ports[0]][0] if ports and ports[0] in self._started else -1

    def _settle(self) -> None:
        self._settled = True
        for child in self._children.values():
            child.show()

    async def _watch(self) -> None:
        """Wait until all ranks have stopped, or the others wait for stopped ones."""
        began = time.monotonic()
        while any(child.held for child in self._children.values()):
            await asyncio.sleep(_CHECK_INTERVAL)
            statuses = self._statuses()
            rest = [child for child in self._children.values() if not child.held]
            longest = max((each.last_total for each in statuses.values()), default=0) / 1e9
            if not (rest or self._joining) or time.monotonic() - began > max(MAX_HELD, 3 * longest):
                self._settle()
            elif self._last is not None and all(
                waits_for_others(statuses.get(self._rank(child)), MIN_WAIT, 1.5) for child in rest
            ):
                for child in self._children.values():
                    child.release()
        self._watching = False

    def _statuses(self) -> Mapping[int, Status]:
        """Return the status of each rank."""
        try:
            run = reader.glance(self._directory)
        except (DoctorError, OSError):
            return {}
        return {each.rank: each.status for each in run.last if each.status is not None}


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[tuple[Message, bytes]]:
    decoder = dap.Decoder()
    while chunk := await reader.read(CHUNK_SIZE):
        for each in decoder.cut(chunk):
            yield each


async def _next(messages: AsyncIterator[tuple[Message, bytes]]) -> tuple[Message, bytes]:
    try:
        return await messages.__anext__()
    except StopAsyncIteration:
        raise ConnectionError from None


def _arguments(message: Message) -> Message:
    given = message.get("arguments")
    return given if isinstance(given, dict) else {}


def _respond(writer: asyncio.StreamWriter, request: Message, body: Message) -> None:
    response = {"seq": 0, "type": "response", "success": True, "body": body}
    echoed = {"request_seq": request.get("seq", 0), "command": request.get("command", "")}
    writer.write(dap.encode({**response, **echoed}))


def _answer(request: Message) -> Message:
    """Return the response body of the root session, which has no thread."""
    command = request.get("command")
    if command == "threads":
        return {"threads": []}
    if command == "evaluate":
        return {"result": "choose a rank in CALL STACK", "variablesReference": 0}
    wanted = _arguments(request).get("breakpoints")
    lines = [each.get("line") for each in wanted or () if isinstance(each, dict)]
    return {"breakpoints": [{"verified": True, "line": line} for line in lines]}
