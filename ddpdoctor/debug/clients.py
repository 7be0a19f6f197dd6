"""Clients of the gateway, including those that it forwards to other nodes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.opening import integer
from ddpdoctor.core.user_code import Location
from ddpdoctor.debug import dap
from ddpdoctor.debug.gateway_ranks import Message, RankLink, Ranks, SilentError, Slot, Streams
from ddpdoctor.debug.vscode_files import is_ours
from ddpdoctor.nodes.asking import SOCKET
from ddpdoctor.run.names import short_path
from ddpdoctor.run.records.supervisor import DebugRecord

if TYPE_CHECKING:
    from ddpdoctor.debug.gateway import Admission, Ports

# -- requests about the frames of a thread in native code, which debugpy refuses


NATIVE_TIMEOUT = 8.0  # Seconds for an answer. The rank evaluates for at most 3 s

SCOPES = {"Locals": "locals", "Globals": "globals"}

NATIVE_NOTE = (
    "the rank is in native code: expressions are evaluated on another thread, for 3 s at most; "
    "they may run code of the job, and what they assign is lost"
)

_FIRST_REFERENCE = 1 << 30  # Our first reference. debugpy counts from 1
_LAST_REFERENCE = (1 << 31) - 1  # The protocol has 31 bits

_EXPANDED = frozenset({"scopes", "variables", "evaluate"})


class NativeFrames:
    """The displayed values of one session, by reference."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[object, list[Any]]] = {}
        self._numbers = itertools.cycle(range(_FIRST_REFERENCE, _LAST_REFERENCE))
        self._explained = False

    def is_asked(self, command: str, arguments: Message, *, in_native: bool) -> bool:
        """Return whether a request is answered here, not by debugpy."""
        if command == "variables":
            reference = arguments.get("variablesReference")
            return isinstance(reference, int) and reference >= _FIRST_REFERENCE
        return in_native and command in _EXPANDED and "frameId" in arguments

    async def answer(self, request: Message, link: RankLink) -> list[Message]:
        """Return the messages that answer a request."""
        arguments = request["arguments"]
        command = request["command"]
        try:
            if command == "scopes":
                body: Message = {"scopes": self._scopes(arguments["frameId"])}
            elif command == "variables":
                body = {"variables": await self._variables(link, arguments)}
            else:
                asked = {"frame": arguments["frameId"], "expression": arguments.get("expression")}
                found = await _ask(link, "evaluate", asked)
                body = {**found, "variablesReference": 0}
        except SilentError as error:
            return [dap.response(request, message=str(error))]
        answers = [dap.response(request, body)]
        if command == "evaluate" and not self._explained:
            self._explained = True
            answers.append(dap.output(NATIVE_NOTE))
        return answers

    def _scopes(self, frame: object) -> list[Message]:
        return [
            {
                "name": name,
                "variablesReference": self._refer(frame, [scope]),
                "expensive": scope == "globals",
            }
            for name, scope in SCOPES.items()
        ]

    async def _variables(self, link: RankLink, arguments: Message) -> list[Message]:
        place = self._places.get(arguments["variablesReference"])
        if place is None:
            raise SilentError("the variable is gone")
        frame, path = place
        found = await _ask(link, "variables", {"frame": frame, "path": path})
        return [
            {
                "name": name,
                "value": value,
                "type": kind,
                "variablesReference": self._refer(frame, [*path, index]) if has_parts else 0,
                "presentationHint": {"attributes": ["readOnly"]},
            }
            for index, (name, value, kind, has_parts) in enumerate(found["variables"])
        ]

    def _refer(self, frame: object, path: list[Any]) -> int:
        number = next(self._numbers)
        self._places[number] = frame, path
        return number


async def _ask(link: RankLink, what: str, values: Message) -> Message:
    """Ask the rank. Raises SilentError if it does not answer, or answers with an error."""
    answer = await link.ask(what, NATIVE_TIMEOUT, **values)
    if "error" in answer:
        raise SilentError(answer["error"])
    return {key: value for key, value in answer.items() if key != "answers"}


# -- serve the debuggers that connect to the gateway, from their first message to their last


ANSWER_TIMEOUT = 5.0  # Seconds for a rank to give any answer
START_TIMEOUT = 60.0  # Seconds for debugpy to start in a rank that has answered
APPEAR_TIMEOUT = 60.0  # Seconds to wait for a rank that has not started, or is restarted

FIRST_MESSAGE_TIMEOUT = 10.0
"""Seconds for a client to send a message, so that a port scan does not start a debugger."""

CONFIGURE_TIMEOUT = 60.0  # Seconds for a client to complete its configuration, or the session ends
CLOSE_TIMEOUT = 3.0  # Seconds for a client to close its connection after the session
TAKEOVER_TIMEOUT = 3.0  # Seconds for the previous session to end when a new client comes

COMPILED_NOTE = (
    "ddpdoctor: this rank runs functions compiled by torch.compile; breakpoints in them are not hit"
)

PAUSE_TIMEOUT = 1.0  # Seconds for a thread to stop when it is asked to

NATIVE_STOP = "in native code"
"""Short, because for a longer text VS Code truncates the session's name and the rank in it."""

SESSION_OVER = "the debug session is over"

WORKERS_NOTE = (
    "DataLoader workers run this line, and no debugger is in them: set num_workers=0 to stop here"
)

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]

_MAX_FIRST_MESSAGE = 1 << 20
CHUNK_SIZE = 1 << 16

EVALUATE, PROFILE = "ddpdoctor/evaluate", "ddpdoctor/profile"
AT_STEP = {EVALUATE: "evaluate_at_step", PROFILE: "profile_steps"}
"""Maps the one request on a connection of `ddpdoctor eval` or `profile` to the rank's command."""
_ARGUMENTS = {EVALUATE: ("expression",), PROFILE: ("steps", "folder", "memory")}
MAX_WAIT = 3600.0  # Maximum seconds for which it waits for its steps
WRITE_TIMEOUT = 60.0  # Seconds for a rank to write its trace after its steps


class RefusedError(Exception):
    """A client cannot be served. ``requests`` await an answer, by default the first ones."""

    def __init__(self, text: str, requests: Sequence[Message] = ()) -> None:
        super().__init__(text)
        self.requests = list(requests)


@dataclass(frozen=True)
class Project:
    """A run's script and folders, to distinguish its clients from those of another project."""

    script: str  # The name of the job's script
    folders: tuple[str, ...]  # Its folders, the workspace first

    def objection(self, arguments: Message, port: int) -> str:
        """Return why a client must not attach to a port, or an empty string.

        An entry that an earlier run left in launch.json leads to the job that has the port now. Any
        other client knows which job it attaches to, and the folder of a client on another machine
        means nothing here.
        """
        folder = arguments.get("workspaceFolder")
        if not is_ours(arguments.get("name")) or not isinstance(folder, str):
            return ""
        if not os.path.isdir(folder) or self._has(folder):
            return ""
        mappings = arguments.get("pathMappings")
        for each in mappings if isinstance(mappings, list) else ():
            if isinstance(each, dict) and self._has(each.get("remoteRoot")):
                return ""
        return (
            f"port {port} belongs to {self.script} in {self.folders[0]} now, not to a job of "
            f"{folder}, whose launch.json is of an earlier run; start its job with ddpdoctor run, "
            "or write the port of a live one with: ddpdoctor attach --write"
        )

    def _has(self, folder: object) -> bool:
        """Return whether a folder belongs to the project, or is below or above one that does."""
        if not isinstance(folder, str) or not os.path.isabs(folder) or "\0" in folder:
            return False
        here = Path(os.path.realpath(folder))
        every = [Path(os.path.realpath(each)) for each in self.folders]
        return any(here.is_relative_to(each) or each.is_relative_to(here) for each in every)


class Clients:
    """Serve the clients of one run. See :class:`~ddpdoctor.debug.gateway.Gateway`."""

    def __init__(self, ranks: Ranks, *, ends_job: bool, project: Project | None) -> None:
        self._ranks = ranks
        self._ends_job = ends_job
        self._project = project
        ranks.on_workers = self._check_workers

    async def take(
        self,
        slot: Slot,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        by_port: bool = True,
    ) -> None:
        """Serve a connection to a debug port, or to its Unix socket."""
        tap = dap.SessionState()
        if by_port:
            tap.objects = partial(self.objection, port=slot.port)
        await self.guard(self._client(slot, tap, reader, writer), writer)

    async def guard(self, session: Coroutine[Any, Any, None], writer: asyncio.StreamWriter) -> None:
        """Run a session, report its faults, and close its connection."""
        task = asyncio.current_task()
        assert task is not None
        self._ranks.tasks.add(task)
        try:
            await session
        except (OSError, asyncio.TimeoutError, dap.NotDapError):
            pass
        except Exception as error:
            fault = DebugRecord(time=time.time_ns(), state="fault", error=repr(error))
            self._ranks.report(fault)
        finally:
            self._ranks.tasks.discard(task)
            writer.close()
            # `close` would wait for a client that does not read the written data.
            asyncio.get_running_loop().call_later(CLOSE_TIMEOUT, writer.transport.abort)

    def objection(self, arguments: Message, port: int) -> str:
        """Return why a client must not attach, as :meth:`Project.objection` does."""
        return self._project.objection(arguments, port) if self._project is not None else ""

    def end_job(self, slot: Slot) -> None:
        """End the job if Stop in the debugger is meant to end it."""
        if self._ends_job:
            self._ends_job = False
            self._ranks.report_rank(slot, "stop")

    async def _client(
        self,
        slot: Slot,
        tap: dap.SessionState,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        data, requests = await asyncio.wait_for(first_message(reader), FIRST_MESSAGE_TIMEOUT)
        if not requests:
            return
        if requests[0].get("command") in (EVALUATE, PROFILE):
            await self._at_step(slot, requests[0], writer)
            return
        text, limit = SESSION_OVER, CLOSE_TIMEOUT
        tap.at_gate = not self._ranks.gate_open
        try:
            await self._ranks.wait_until(lambda: slot.session is None, TAKEOVER_TIMEOUT)
            if slot.session is not None:
                raise RefusedError(
                    f"rank {slot.rank} is in a debugger already; disconnect that session first"
                )
            slot.session, slot.client = tap, writer
            try:
                upstream = await self._reach(slot, writer)
                try:
                    await self._pass(slot, tap, data, (reader, writer), upstream)
                finally:
                    if slot.link is not None:
                        # The rank stops tracing.
                        with contextlib.suppress(SilentError):
                            await slot.link.ask("detached", ANSWER_TIMEOUT)
            finally:
                slot.session = slot.client = None
                if tap.attached:
                    self._ranks.report_rank(slot, "detached")
                    # It may have reached a breakpoint() while the client left.
                    self._ranks.report_waits(slot)
                self._ranks.restore_timeouts()
                await self._ranks.changed()
        except RefusedError as refused:
            text, limit = str(refused), FIRST_MESSAGE_TIMEOUT
            requests = refused.requests or requests
        else:
            requests = []
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(refuse(text, requests, reader, writer), limit)

    async def _at_step(
        self, slot: Slot, request: dap.Message, writer: asyncio.StreamWriter
    ) -> None:
        """Answer with a rank's result at the end of a step. No session is needed."""
        command, wanted = str(request["command"]), request.get("arguments") or {}
        seconds = min(float(wanted["seconds"]), MAX_WAIT)
        asked = {name: wanted[name] for name in _ARGUMENTS[command]}
        found: Message
        try:
            if slot.link is None:
                raise SilentError("has not started, or has ended")
            found = await slot.link.ask(
                AT_STEP[command],
                seconds + (WRITE_TIMEOUT if command == PROFILE else ANSWER_TIMEOUT),
                step=integer(wanted, "step"),
                seconds=seconds,
                rank=slot.rank,
                **asked,
            )
        except SilentError as error:
            found = {"trouble": str(error)}
        writer.write(dap.encode(dap.response(request, found)))
        await writer.drain()

    async def _reach(self, slot: Slot, client: asyncio.StreamWriter) -> Streams:
        """Return a connection to debugpy in the rank. Start debugpy if necessary."""
        await self._ranks.wait_until(lambda: slot.link is not None, APPEAR_TIMEOUT)
        link = slot.link
        if link is None:
            raise RefusedError(f"rank {slot.rank} has not started, or has ended")
        await self._ranks.lift_timeouts()
        try:
            await link.ask("answer", ANSWER_TIMEOUT)
        except SilentError:
            raise RefusedError(
                f"rank {slot.rank} (pid {link.pid}) does not answer: native code holds Python's "
                "lock, or the process is stopped; `ddpdoctor stacks` shows what it does"
            ) from None
        key = secrets.token_hex(16)
        session = self._ranks.sessions[key] = asyncio.get_running_loop().create_future()
        try:
            answer = await link.ask("debug", START_TIMEOUT, key=key)
            if "error" in answer:
                raise RefusedError(f"rank {slot.rank} cannot start debugpy: {answer['error']}")
            # The rank connected before it sent the answer.
            upstream: Streams = await asyncio.wait_for(session, ANSWER_TIMEOUT)
        except (SilentError, asyncio.TimeoutError) as error:
            raise RefusedError(f"rank {slot.rank} cannot start debugpy: {error}") from None
        finally:
            self._ranks.sessions.pop(key, None)
        if answer.get("compiled"):
            output = {"category": "important", "output": COMPILED_NOTE + "\n"}
            client.write(dap.encode(dap.event("output", output)))
        return upstream

    async def _pass(
        self, slot: Slot, tap: dap.SessionState, data: bytes, client: Streams, upstream: Streams
    ) -> None:
        """Forward bytes in both directions until the client leaves or one side ends."""
        from_client, to_client = client
        from_rank, to_rank = upstream
        natives = NativeFrames()
        tap.answers_itself = lambda message, arguments: natives.is_asked(
            str(message.get("command")), arguments, in_native=tap.shown is not None
        )

        async def outward() -> None:
            chunk = data
            while chunk:
                to_rank.write(tap.to_rank(chunk))
                if tap.refused is not None:
                    return
                while tap.for_client:
                    to_client.write(dap.encode(tap.for_client.pop(0)))
                while tap.for_gateway:
                    request = tap.for_gateway.pop(0)
                    self._ranks.begin(self._answer(slot, natives, request, to_client))
                if tap.stopped_by_client and tap.at_gate:
                    self.end_job(slot)
                if tap.pausing is not None:
                    self._ranks.begin(self._show_pause(slot, tap, tap.pausing, to_client))
                if tap.leaving:
                    return
                await to_rank.drain()
                chunk = await from_client.read(CHUNK_SIZE)

        async def inward() -> None:
            while chunk := await from_rank.read(CHUNK_SIZE):
                before = (tap.attached, tap.stopped, tap.place)
                for message, raw in tap.to_client(chunk):
                    path = tap.file_of(message)
                    changed = path is not None and await self._in_workers(slot, tap, path)
                    if dap.put_rank_first(message, slot.rank) or changed:
                        raw = dap.encode(message)
                    to_client.write(raw)
                while tap.for_rank:
                    to_rank.write(dap.encode(tap.for_rank.pop(0)))
                if tap.ended and tap.terminates:
                    tap.terminates = False
                    to_client.write(dap.encode(dap.event("terminated", {})))
                self._report_changes(slot, tap, *before)
                if tap.ended:
                    return
                if not tap.leaving:
                    await to_client.drain()

        carried = [asyncio.create_task(outward()), asyncio.create_task(inward())]
        try:
            for limit in (CONFIGURE_TIMEOUT, None):
                await asyncio.wait(carried, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if not tap.attached:
                    break
            if not carried[1].done():
                if not tap.leaving:
                    # The client has disappeared: detach, or the rank would stay at its breakpoint.
                    to_rank.write(tap.vanish())
                await asyncio.wait(carried[1:], timeout=ANSWER_TIMEOUT)
            if not (tap.leaving and tap.ended) and tap.refused is None:
                # The rank may have ended: tell the client before the connection closes.
                to_client.write(dap.encode(dap.event("terminated", {})))
        finally:
            for task in carried:
                task.cancel()
            await asyncio.gather(*carried, return_exceptions=True)
            to_rank.close()
        if tap.refused is not None:
            raise RefusedError(tap.objection, [tap.refused])

    def tell(self, text: str, place: Location | None) -> None:
        """Print a line in the consoles of all clients, with a link to a place in the code."""
        for slot in self._ranks.slots:
            tap = slot.session
            if tap is not None and tap.attached and not tap.leaving and slot.client is not None:
                at = tap.local(place) if place is not None else None
                slot.client.write(dap.encode(dap.output(text, at)))

    async def _show_pause(
        self, slot: Slot, tap: dap.SessionState, thread: object, client: asyncio.StreamWriter
    ) -> None:
        """Show the stack of a thread that cannot stop now because it is in native code.

        It stops once Python continues. Until then the client does not request a stack by itself.
        """
        await asyncio.sleep(PAUSE_TIMEOUT)
        if tap.pausing == thread and not tap.ended:
            tap.pausing, tap.shown = None, thread
            text = f"{NATIVE_STOP}; it stops where Python goes on"
            body = {"reason": "pause", "description": NATIVE_STOP, "text": text, "threadId": thread}
            stopped = dap.event("stopped", {**body, "allThreadsStopped": False})
            dap.put_rank_first(stopped, slot.rank)
            client.write(dap.encode(stopped))

    async def _answer(
        self, slot: Slot, natives: NativeFrames, request: Message, client: asyncio.StreamWriter
    ) -> None:
        """Answer a request about a thread in native code."""
        if slot.link is not None:
            for message in await natives.answer(request, slot.link):
                client.write(dap.encode(message))

    async def _in_workers(self, slot: Slot, tap: dap.SessionState, path: str) -> list[Message]:
        """Return the unverified breakpoints of a file that only DataLoader workers would hit."""
        found = [each for each in tap.breakpoints[path] if each.get("verified")]
        if not found or slot.link is None:
            return []
        lines = [each.get("line") for each in found]
        try:
            answer = await slot.link.ask("workers", ANSWER_TIMEOUT, path=path, lines=lines)
        except SilentError:
            return []
        missed = [each for each in found if each.get("line") in answer.get("lines", ())]
        for each in missed:
            each.update(verified=False, message=WORKERS_NOTE)
        return missed

    async def _check_workers(self, slot: Slot) -> None:
        """Tell the client which breakpoints are in the code of workers that have just started."""
        tap, client = slot.session, slot.client
        if tap is None or client is None:
            return
        for path in list(tap.breakpoints):
            for each in await self._in_workers(slot, tap, path):
                changed = dap.event("breakpoint", {"reason": "changed", "breakpoint": each})
                client.write(dap.encode(changed))

    def _report_changes(
        self, slot: Slot, tap: dap.SessionState, attached: bool, stopped: bool, place: str
    ) -> None:
        """Report what has changed in a session since the given state."""
        if tap.attached and not attached:
            self._ranks.report_rank(slot, "attached")
            if slot.link is not None:
                slot.link.send("attached")
            self._ranks.check_gate()
        if tap.stopped != stopped:
            self._ranks.report_rank(slot, "stopped" if tap.stopped else "running")
        elif tap.place != place and tap.stopped:
            self._ranks.report_rank(slot, "stopped", place=tap.place)


async def first_message(reader: asyncio.StreamReader) -> tuple[bytes, list[dap.Message]]:
    """Return the bytes up to the first whole message, and the messages. Empty at the end."""
    decoder, data = dap.Decoder(), b""
    while chunk := await reader.read(CHUNK_SIZE):
        data += chunk
        if len(data) > _MAX_FIRST_MESSAGE:
            raise dap.NotDapError
        messages = decoder.feed(chunk)
        if messages:
            return data, messages
    return data, []


async def refuse(
    text: str,
    requests: list[dap.Message],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Answer a client's requests until it disconnects."""
    decoder = dap.Decoder()
    while True:
        for request in requests:
            if request.get("type") == "request":
                for message in dap.refusal(request, text):
                    writer.write(dap.encode(message))
        await writer.drain()
        if any(request.get("command") == "disconnect" for request in requests):
            return
        chunk = await reader.read(CHUNK_SIZE)
        if not chunk:
            return
        requests = decoder.feed(chunk)


# -- debug ports for the ranks of other nodes, whose connections the exchange carries there


MAX_PORTS = 256  # Maximum number of ports for ranks of other nodes


@dataclass
class _FarPort:
    """A port of this node that is forwarded to one of another node."""

    node: int
    host: str
    index: int  # Index of the port on that node
    rank: int
    number: int
    close: Callable[[], None]
    lost: str = ""  # Why it is no longer forwarded


class OtherNodes:
    """The ports for the ranks of other nodes.

    Args:
        ranks: The ranks of this node. Clients also hear about those of other nodes.
        clients: Runs the sessions.
        admission: Admits the same users as at the ports of this node.
        bind: Listens on that many consecutive ports from a given one.
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

    def server(self, number: int) -> Serve | None:
        """Return the server for a port's sessions. None if the port is not of another node."""
        found = (port for port in self._ports.values() if port.number == number)
        return next((partial(self._serve, port) for port in found), None)

    def close(self) -> None:
        """Close all ports."""
        for port in self._ports.values():
            port.close()

    def _update(self, message: Message) -> None:
        """Update the ranks of a node. Without a node, all nodes are lost."""
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

        def close() -> None:
            stop()
            ports.close()

        number = ports.numbers[0]
        port = _FarPort(node, host, index, rank, number, close)
        serve = partial(self._serve, port)
        stop = self._admission.open(ports.listeners[0], f"debug port {number}", serve)
        self._ports[node, index] = port
        self._ranks.begin(self._ranks.changed())
        return port

    async def _serve(
        self, port: _FarPort, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await self._clients.guard(self._client(port, reader, writer), writer)

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
        """Forward the bytes of a client to the port of the other node, and back."""
        data, requests = await asyncio.wait_for(first_message(reader), FIRST_MESSAGE_TIMEOUT)
        if not requests:
            return
        with short_path(str(self._directory / SOCKET)) as name:
            far_reader, far_writer = await asyncio.open_unix_connection(name)
        try:
            question = {"what": "debug", "node": port.node, "index": port.index}
            far_writer.write(json.dumps(question).encode() + b"\n" + data)
            chunk = await far_reader.read(CHUNK_SIZE)
            if not chunk:
                text = port.lost or f"no debugger can be attached to rank {port.rank} now"
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(refuse(text, requests, reader, writer), CLOSE_TIMEOUT)
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
    while chunk := await reader.read(CHUNK_SIZE):
        writer.write(chunk)
        await writer.drain()
