"""The debug ports of a run: passes bytes between a debugger and the rank that it wants.

The supervisor listens; a rank starts debugpy only when the first client has sent its first message.
No rank listens: for each session it makes one more connection to the supervisor's control socket.
All of it lives on one thread with an event loop of its own, so that a slow client holds up nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ddpdoctor.debug import dap
from ddpdoctor.debug.admission import Admission
from ddpdoctor.debug.debug_ports import Ports
from ddpdoctor.debug.rank_link import Message, RankLink, SilentError
from ddpdoctor.run.control_socket import NAME, short_path
from ddpdoctor.run.record import Record

ANSWER = 5.0
"""Seconds that a rank has to answer at all."""

START = 60.0
"""Seconds that debugpy may take to start in a rank that has answered."""

APPEAR = 60.0
"""Seconds that a client waits for a rank that is not there (yet, or again after a restart)."""

FIRST_MESSAGE = 10.0
"""Seconds in which a client has to speak the protocol: a port scan does not start a debugger."""

NO_MORE = 4.0
"""Seconds without a new rank after which a gate counts those that are there."""

TURNOVER = 3.0
"""Seconds in which an old session may still end when a new client comes."""

COMPILED = (
    "ddpdoctor: this rank runs functions that torch.compile took; breakpoints in them are not hit"
)

PAUSES = 1.0
"""Seconds that a thread has to stop when it is asked to."""

NATIVE = "in native code"
"""Short: VS Code cuts the session's name, and with it the rank, for a longer one."""

IN_WORKERS = (
    "DataLoader workers run this line, and no debugger is in them: set num_workers=0 to stop here"
)

_SOCKET_STAYS: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
"""From 3.13 on asyncio removes the socket's file, by its name, which led there only to bind it."""

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_MOST_FIRST = 1 << 20
_CHUNK = 1 << 16


class RefusedError(Exception):
    """A client cannot be served; the text is for the person."""


@dataclass
class Slot:
    """One port, and the process and session behind it."""

    index: int
    port: int
    link: RankLink | None = None
    session: dap.Tap | None = None
    client: asyncio.StreamWriter | None = None
    """Where the session's messages go."""
    waits: Message | None = None
    """Where the rank stands until a debugger comes: ``why``, ``path``, ``line``."""
    last_rank: int | None = None
    """The global rank of the last process that told it."""

    @property
    def rank(self) -> int:
        """The global rank, as far as it is known."""
        return self.index if self.last_rank is None else self.last_rank


@dataclass(frozen=True)
class Stop:
    """A rank that stands still for the debugger."""

    rank: int
    place: str
    """``path:line``, empty if unknown."""


class Gateway:
    """Serves the debug ports of one run.

    Args:
        ports: The listening sockets.
        unidentified: Serve clients at the ports whose user cannot be determined, too.
        gate: Ranks that have to be attached before any may start; all of them if empty; None for
            no gate.
        ends_job: The first client that stops a session it began before the gate was open ends the
            job.
        hold_errors: Ranks hold at an uncaught exception, so timeouts are lifted from the start.
        expected: How many ranks there will be, None if only they know.
    """

    def __init__(
        self,
        ports: Ports,
        *,
        unidentified: bool,
        gate: frozenset[int] | None,
        ends_job: bool,
        hold_errors: bool,
        expected: int | None,
    ) -> None:
        self._ports = ports
        self._slots = [Slot(index, port) for index, port in enumerate(ports.numbers)]
        self._gate = gate
        self._gate_open = gate is None
        self._ends_job = ends_job
        self._stop_said = False
        self._hold_errors = hold_errors
        self._expected = expected
        self._news: Callable[[], None] = lambda: None
        self._happened: deque[Record] = deque()
        self._lifted = hold_errors
        self._error_seen = False
        self._said_listening = False
        self._hello_at = 0.0
        self._main_task: asyncio.Task[None] | None = None
        self._admission = Admission(unidentified, self._tell)
        self._links: set[RankLink] = set()
        self._sessions: dict[str, asyncio.Future[_Streams]] = {}
        """The connections that ranks were asked to make, by their key."""
        self._changed = asyncio.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._control: socket.socket | None = None
        self._doors: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, name="ddpdoctor-gateway", daemon=True)
        self.sockets: list[str] = []
        """The Unix socket beside each port, once there is one."""

    # -- from the supervisor's thread

    def open(self, directory: Path) -> None:
        """Make the sockets in ``directory``: the ranks' control socket, and one beside each port.

        Raises:
            OSError: A socket cannot be made.
        """
        self._control = _private_socket(str(directory / NAME))
        for slot in self._slots:
            path = str(directory / f"debug-{slot.index}.sock")
            self._doors.append(_private_socket(path))
            self.sockets.append(path)

    def start(self, news: Callable[[], None]) -> None:
        """Serve, from a thread of its own, which calls ``news`` when there is some to take."""
        self._news = news
        self._thread.start()

    def stop(self) -> None:
        """Close ports and sessions; a client sees the end of its session."""
        self._stopping.set()
        loop = self._loop
        if loop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._cancel)
            self._thread.join(2.0)
        self._ports.close()
        for door in (self._control, *self._doors):
            if door is not None:
                door.close()
        # Nothing listens there any more, and a socket cannot be copied with the directory.
        for path in self.sockets:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def take(self) -> list[Record]:
        """What has happened since the last call: ``debug`` records for the journal."""
        taken = []
        while self._happened:
            taken.append(self._happened.popleft())
        return taken

    @property
    def ranks(self) -> dict[int, int]:
        """The port of each global rank that has said hello."""
        return {slot.rank: slot.port for slot in self._slots if slot.link is not None}

    @property
    def stops(self) -> list[Stop]:
        """The ranks that stand still: at a breakpoint, or waiting for a client."""
        found = []
        for slot in self._slots:
            waits, session = slot.waits, slot.session
            if waits is not None:
                found.append(Stop(slot.rank, f"{waits.get('path')}:{waits.get('line')}"))
            elif session is not None and session.stopped:
                found.append(Stop(slot.rank, session.place))
        return found

    # -- the thread

    def _serve(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:
            self._tell({"state": "broken", "error": repr(error)})

    async def _main(self) -> None:
        assert self._control is not None
        self._loop = asyncio.get_running_loop()
        # Else asyncio would write its tracebacks between the job's lines.
        self._loop.set_exception_handler(self._fault)
        self._changed = asyncio.Condition()
        servers = [
            await asyncio.start_unix_server(self._take_link, sock=self._control, **_SOCKET_STAYS)
        ]
        for slot, listener in zip(self._slots, self._ports.listeners, strict=True):

            async def take_client(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, slot: Slot = slot
            ) -> None:
                await self._take_client(slot, reader, writer)

            servers.append(await asyncio.start_server(take_client, sock=listener))
            door = self._doors[slot.index]
            servers.append(await asyncio.start_unix_server(take_client, sock=door, **_SOCKET_STAYS))
        with contextlib.suppress(asyncio.CancelledError):
            self._main_task = asyncio.current_task()
            if not self._stopping.is_set():
                await asyncio.Event().wait()
        for server in servers:
            server.close()
        await self._end_sessions()

    def _fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A fault of ours that nobody waited for: into the records, not on the screen."""
        error = context.get("exception") or context.get("message")
        self._tell({"state": "fault", "error": repr(error)})

    def _cancel(self) -> None:
        if self._main_task is not None:
            self._main_task.cancel()

    async def _end_sessions(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run something beside what goes on."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tell(self, record: Record) -> None:
        self._happened.append({"kind": "debug", "time": time.time_ns(), **record})
        self._news()

    def _report(self, slot: Slot, state: str, **more: object) -> None:
        link = slot.link
        self._tell(
            {
                "state": state,
                "rank": slot.rank,
                "local_rank": slot.index,
                "port": slot.port,
                "pid": link.pid if link is not None else None,
                **more,
            }
        )

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # -- ranks

    async def _take_link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._admission.admits(writer, "the control socket of the ranks"):
            writer.close()
            return
        link = RankLink(reader, writer)
        self._links.add(link)
        slot: Slot | None = None
        try:
            async for message in link.messages():
                if message.get("say") == "hello":
                    slot = await self._hello(link, slot, message)
                elif message.get("say") == "session":
                    self._take_session(message, reader, writer)
                    return
                elif slot is not None:
                    await self._said(slot, message)
                elif message.get("say") == "waits":
                    link.tell("release")
                    self._tell({"state": "no port", "rank": link.rank})
        finally:
            self._links.discard(link)
            if slot is not None and slot.link is link:
                self._error_seen |= slot.waits is not None and slot.waits.get("why") == "error"
                self._report(slot, "gone")
                slot.link = slot.waits = None
                self._restore_timeouts()
                await self._notify()

    def _take_session(
        self, message: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """A connection that a rank has made for debugpy; what follows is debugpy's."""
        awaited = self._sessions.pop(str(message.get("key")), None)
        if awaited is None or awaited.done():
            writer.close()
        else:
            awaited.set_result((reader, writer))

    async def _hello(self, link: RankLink, slot: Slot | None, hello: Message) -> Slot | None:
        rank = link.rank
        link.introduce(hello)
        if slot is not None:
            slot.last_rank = link.rank if link.rank is not None else slot.last_rank
            if link.rank == rank:
                return slot
        if slot is None:
            slot = self._slot_for(link)
            if slot is None:
                link.tell("go")
                return None
            slot.link, slot.waits = link, None
            slot.last_rank = link.rank
            self._hello_at = time.monotonic()
            if self._lifted:
                link.tell("lift")
            if self._gate_open:
                link.tell("go")
        self._report(slot, "ready")
        self._look_at_gate()
        if not self._gate_open:
            self._begin(self._look_again())
        await self._notify()
        return slot

    def _slot_for(self, link: RankLink) -> Slot | None:
        """Its port: by local rank, else by rank, else the first that nobody has."""
        wanted = link.local_rank if link.local_rank is not None else link.rank
        if wanted is not None and wanted < len(self._slots):
            slot = self._slots[wanted]
            # torchrun starts a rank anew as soon as its predecessor has ended.
            if slot.link is None or not _lives(slot.link.pid):
                return slot
        return next((slot for slot in self._slots if slot.link is None), None)

    async def _said(self, slot: Slot, message: Message) -> None:
        link = slot.link
        if link is None:
            return
        if message.get("say") == "waits":
            if message.get("why") == "error" and self._error_seen:
                # The first failure has been looked at; this one is its consequence.
                link.tell("release")
                return
            slot.waits = message
            # Not awaited: this rank's own answer comes through the caller.
            self._begin(self._lift_timeouts())
            if slot.session is None or not slot.session.attached:
                self._report(slot, "waits", **_place(message))
        elif message.get("say") == "workers":
            self._begin(self._look_at_workers(slot))
        elif message.get("say") == "expects":
            self._report(slot, "expects", **_place(message))
        elif message.get("say") == "goes on":
            self._error_seen |= message.get("why") == "error"
            slot.waits = None
            self._report(slot, "goes on")
            self._restore_timeouts()

    # -- the gate before the first user line

    @property
    def _members(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.link is not None]

    def _all_here(self) -> bool:
        members = self._members
        links = [slot.link for slot in members if slot.link is not None]
        told = [link.local_world_size or link.world_size or 1 for link in links]
        expected = self._expected or max(told, default=1)
        if len(members) >= min(expected, len(self._slots)):
            return True
        # Started by hand on several nodes, nobody knows how many there will be on this one.
        known = self._expected is not None or any(link.local_world_size for link in links)
        return not known and bool(members) and time.monotonic() - self._hello_at >= NO_MORE

    async def _look_again(self) -> None:
        await asyncio.sleep(NO_MORE + 0.1)
        self._look_at_gate()

    def _look_at_gate(self) -> None:
        if self._gate_open or not self._all_here():
            return
        wanted = [slot for slot in self._members if not self._gate or slot.rank in self._gate]
        missing = [slot for slot in wanted if slot.session is None or not slot.session.attached]
        if missing:
            if not self._said_listening:
                self._said_listening = True
                self._tell({"state": "listening", "ranks": [slot.rank for slot in wanted]})
            return
        self._gate_open = True
        for slot in self._members:
            if slot.link is not None:
                slot.link.tell("go")
        self._tell({"state": "gate open"})

    # -- timeouts

    async def _lift_timeouts(self) -> None:
        """Lift the collective timeouts of all ranks, and wait a moment until they are."""
        if self._lifted:
            return
        self._lifted = True
        asked = [link.ask("lift", 1.0) for link in self._links]
        await asyncio.gather(*asked, return_exceptions=True)

    def _restore_timeouts(self) -> None:
        if not self._lifted or self._hold_errors:
            return
        if any(slot.session is not None or slot.waits is not None for slot in self._slots):
            return
        self._lifted = False
        for link in self._links:
            link.tell("restore")

    # -- clients

    async def _take_client(
        self, slot: Slot, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._admission.admits(writer, f"the debug port of rank {slot.rank}"):
                await self._client(slot, reader, writer)
        except (OSError, asyncio.TimeoutError, dap.NotDapError):
            pass
        except asyncio.CancelledError:
            # The run is over; asyncio.streams logs a cancelled handler as an error.
            pass
        except Exception as error:
            self._tell({"state": "fault", "error": repr(error)})
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _client(
        self, slot: Slot, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        first = await asyncio.wait_for(_first_message(reader), FIRST_MESSAGE)
        if first is None:
            return
        data, requests = first
        tap = dap.Tap()
        tap.at_gate = not self._gate_open
        try:
            await self._free(slot)
            slot.session, slot.client = tap, writer
            try:
                upstream = await self._reach(slot, writer)
                try:
                    await self._pass(slot, tap, data, (reader, writer), upstream)
                finally:
                    await self._silence(slot)
            finally:
                await self._end(slot, tap)
        except RefusedError as refused:
            await _refuse(str(refused), requests, reader, writer)

    async def _free(self, slot: Slot) -> None:
        """Wait until the session before is over."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with self._changed:
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: slot.session is None), TURNOVER
                )
        if slot.session is not None:
            raise RefusedError(
                f"rank {slot.rank} is in a debugger already; disconnect that session first"
            )

    async def _reach(self, slot: Slot, client: asyncio.StreamWriter) -> _Streams:
        """A connection to debugpy in the rank, which it starts if it has not."""
        link = await self._link_of(slot)
        await self._lift_timeouts()
        try:
            await link.ask("answer", ANSWER)
        except SilentError:
            raise RefusedError(
                f"rank {slot.rank} (pid {link.pid}) does not answer: native code holds Python's "
                "lock, or the process is stopped; `ddpdoctor stacks` shows what it does"
            ) from None
        key = secrets.token_hex(16)
        session = self._sessions[key] = asyncio.get_running_loop().create_future()
        try:
            answer = await link.ask("debug", START, key=key)
            if "error" in answer:
                raise RefusedError(f"rank {slot.rank} cannot start debugpy: {answer['error']}")
            # Made before the answer was sent.
            upstream: _Streams = await asyncio.wait_for(session, ANSWER)
        except (SilentError, asyncio.TimeoutError) as error:
            raise RefusedError(f"rank {slot.rank} cannot start debugpy: {error}") from None
        finally:
            self._sessions.pop(key, None)
        if answer.get("compiled"):
            client.write(dap.encode(dap.output(COMPILED)))
        return upstream

    async def _link_of(self, slot: Slot) -> RankLink:
        with contextlib.suppress(asyncio.TimeoutError):
            async with self._changed:
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: slot.link is not None), APPEAR
                )
        if slot.link is None:
            raise RefusedError(
                f"there is no rank at port {slot.port}: it has not started, or has ended"
            )
        return slot.link

    async def _pass(
        self,
        slot: Slot,
        tap: dap.Tap,
        data: bytes,
        client: _Streams,
        upstream: _Streams,
    ) -> None:
        """Carry bytes both ways until one side ends."""
        from_client, to_client = client
        from_rank, to_rank = upstream

        async def outward() -> None:
            chunk = data
            while chunk:
                to_rank.write(tap.to_rank(chunk))
                while tap.for_client:
                    to_client.write(dap.encode(tap.for_client.pop(0)))
                if tap.stopped_by_client:
                    self._left(slot, tap)
                if tap.pausing is not None:
                    self._begin(self._show_pause(tap, tap.pausing, to_client))
                await to_rank.drain()
                chunk = await from_client.read(_CHUNK)

        async def inward() -> None:
            while chunk := await from_rank.read(_CHUNK):
                before = (tap.attached, tap.stopped, tap.place)
                for message, raw in tap.to_client(chunk):
                    path = tap.file_of(message)
                    if path is not None and await self._in_workers(slot, tap, path):
                        raw = dap.encode(message)
                    to_client.write(raw)
                while tap.for_rank:
                    to_rank.write(dap.encode(tap.for_rank.pop(0)))
                if tap.ended and tap.terminates:
                    tap.terminates = False
                    to_client.write(dap.encode(dap.event("terminated", {})))
                await to_client.drain()
                self._follow(slot, tap, before)

        carried = [asyncio.create_task(outward()), asyncio.create_task(inward())]
        try:
            await asyncio.wait(carried, return_when=asyncio.FIRST_COMPLETED)
            if carried[1].done():
                # The rank has ended: its client is told, rather than cut off.
                to_client.write(dap.encode(dap.event("terminated", {})))
                with contextlib.suppress(OSError):
                    await to_client.drain()
            elif not tap.ended:
                # The client has vanished: the rank must not stand at its breakpoint for ever.
                to_rank.write(dap.encode(dap.DISCONNECT))
                await asyncio.wait(carried[1:], timeout=1.0)
        finally:
            for task in carried:
                task.cancel()
            await asyncio.gather(*carried, return_exceptions=True)
            to_rank.close()

    async def _show_pause(self, tap: dap.Tap, thread: object, client: asyncio.StreamWriter) -> None:
        """Show the stack of a thread that cannot stop now: it waits in native code.

        It stops where Python goes on; until then the client asks for no stack by itself.
        """
        await asyncio.sleep(PAUSES)
        if tap.pausing == thread and not tap.ended:
            tap.pausing, tap.shown = None, thread
            text = f"{NATIVE}; it stops where Python goes on"
            body = {"reason": "pause", "description": NATIVE, "text": text, "threadId": thread}
            client.write(dap.encode(dap.event("stopped", {**body, "allThreadsStopped": False})))

    async def _in_workers(self, slot: Slot, tap: dap.Tap, path: str) -> list[Message]:
        """The breakpoints of a file that only DataLoader workers would hit; unverified from now."""
        found = [each for each in tap.breakpoints[path] if each.get("verified")]
        if not found or slot.link is None:
            return []
        lines = [each.get("line") for each in found]
        try:
            answer = await slot.link.ask("workers", ANSWER, path=path, lines=lines)
        except SilentError:
            return []
        missed = [each for each in found if each.get("line") in answer.get("lines", ())]
        for each in missed:
            each.update(verified=False, message=IN_WORKERS)
        return missed

    async def _look_at_workers(self, slot: Slot) -> None:
        """A DataLoader has started workers: tell the client which breakpoints are in their code."""
        tap, client = slot.session, slot.client
        if tap is None or client is None:
            return
        for path in list(tap.breakpoints):
            for each in await self._in_workers(slot, tap, path):
                changed = dap.event("breakpoint", {"reason": "changed", "breakpoint": each})
                client.write(dap.encode(changed))

    def _left(self, slot: Slot, tap: dap.Tap) -> None:
        """A client has stopped its session; with it the job, if this was what the job ran for."""
        if self._ends_job and tap.at_gate and not self._stop_said:
            self._stop_said = True
            self._report(slot, "stop")

    def _follow(self, slot: Slot, tap: dap.Tap, before: tuple[bool, bool, str]) -> None:
        attached, stopped, place = before
        if tap.attached and not attached:
            self._report(slot, "attached")
            if slot.link is not None:
                slot.link.tell("attached")
            self._look_at_gate()
        if tap.stopped != stopped:
            self._report(slot, "stopped" if tap.stopped else "running")
        elif tap.place != place and tap.stopped:
            self._report(slot, "stopped", place=tap.place)

    async def _silence(self, slot: Slot) -> None:
        """Have the rank stop tracing."""
        if slot.link is not None:
            with contextlib.suppress(SilentError):
                await slot.link.ask("detached", ANSWER)

    async def _end(self, slot: Slot, tap: dap.Tap) -> None:
        slot.session = slot.client = None
        if tap.attached:
            self._report(slot, "detached")
        self._restore_timeouts()
        await self._notify()


def _private_socket(path: str) -> socket.socket:
    """A Unix socket that listens, for this user alone.

    Raises:
        OSError: It cannot be made.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(path) as short:
            made.bind(short)
            os.chmod(short, 0o600)
        made.listen(128)
    except OSError:
        made.close()
        raise
    return made


def _place(message: Message) -> Message:
    return {name: message.get(name) for name in ("why", "path", "line")}


def _lives(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


async def _first_message(reader: asyncio.StreamReader) -> tuple[bytes, list[dap.Message]] | None:
    """The bytes up to a first whole message, and the messages in them; None at the end."""
    decoder, data = dap.Decoder(), b""
    while chunk := await reader.read(_CHUNK):
        data += chunk
        if len(data) > _MOST_FIRST:
            raise dap.NotDapError
        messages = decoder.feed(chunk)
        if messages:
            return data, messages
    return None


async def _refuse(
    text: str,
    requests: list[dap.Message],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Answer a client's requests until it has understood."""
    decoder = dap.Decoder()
    with contextlib.suppress(asyncio.TimeoutError):
        while requests:
            for request in requests:
                if request.get("type") == "request":
                    for message in dap.refusal(request, text):
                        writer.write(dap.encode(message))
            await writer.drain()
            if any(request.get("command") == "disconnect" for request in requests):
                return
            requests = []
            while not requests:
                chunk = await asyncio.wait_for(reader.read(_CHUNK), FIRST_MESSAGE)
                if not chunk:
                    return
                requests = decoder.feed(chunk)
