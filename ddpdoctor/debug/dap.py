"""The part of the Debug Adapter Protocol that a gateway needs.

Messages are JSON with a ``Content-Length`` header:
https://microsoft.github.io/debug-adapter-protocol/overview
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer
from ddpdoctor.core.user_code import Location

Message = dict[str, Any]

_HEADER_END = b"\r\n\r\n"
_RESUME = (1 << 30) + 1  # The sequence number of the gateway's own ``continue``
_MAX_HEADER = 512
LEAVING = frozenset({"disconnect", "terminate"})
_RESUMING = frozenset(
    {"continue", "next", "stepIn", "stepOut", "stepBack", "reverseContinue", "goto"}
)

DISCONNECT: Message = {
    "seq": 1 << 30,
    "type": "request",
    "command": "disconnect",
    "arguments": {"restart": False, "terminateDebuggee": False},
}
"""The request that detaches a client without ending the process."""


class NotDapError(Exception):
    """The bytes are not messages of the protocol."""


def encode(message: Message) -> bytes:
    """Return a message as it is sent."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


class Decoder:
    """Split a stream into messages. The bytes of an incomplete message are in ``rest``."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that ``data`` completes.

        Raises:
            NotDapError: The stream is not one of messages.
        """
        return [message for message, _ in self.cut(data)]

    def cut(self, data: bytes) -> list[tuple[Message, bytes]]:
        """Return the messages that ``data`` completes, each with its bytes.

        Raises:
            NotDapError: The stream is not one of messages.
        """
        self.rest += data
        messages: list[tuple[Message, bytes]] = []
        while True:
            head, found, rest = self.rest.partition(_HEADER_END)
            if not found:
                begins = head[:8].lower() == b"content-"[: len(head)]
                if len(head) > _MAX_HEADER or not begins:
                    raise NotDapError
                return messages
            length = _length(head)
            if len(rest) < length:
                return messages
            self.rest, body = rest[length:], rest[:length]
            try:
                message = opening.loads(body)
            except ValueError:
                raise NotDapError from None
            if not isinstance(message, dict):
                raise NotDapError
            messages.append((message, head + found + body))


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        digits = value.strip()
        if name.strip().lower() == b"content-length" and digits.isdigit() and len(digits) < 9:
            return int(digits)
    raise NotDapError


class SessionState:
    """The state of one session, derived from its messages."""

    def __init__(self) -> None:
        self.attached = False  # The client has set its breakpoints and completed its configuration
        self.stopped = False
        self.place = ""  # ``path:line`` of the stop, once the client has asked for the stack
        self.leaving = False  # The client has asked for the end of the session
        self.ended = False  # The rank has confirmed that
        self.stopped_by_client = False
        """The client asked for the end of the session, not for a restart."""
        self.at_gate = False  # The session began while the ranks were held before their first line
        self.terminates = False  # The client waits for the event that the session is over
        self.unanswered: dict[int, str] = {}
        """The commands of the client's unanswered requests, by sequence number."""
        self.pausing: object = None
        """The thread that the client asked to pause, until a thread has stopped."""
        self.shown: object = None
        """The thread in native code that was shown to the client as stopped."""
        self.answers_itself: Callable[[Message, Message], bool] = lambda _message, _arguments: False
        """Returns whether the gateway answers a request with these arguments."""
        self.for_gateway: list[Message] = []  # The requests of this kind
        self.for_client: list[Message] = []  # The gateway's own messages to the client
        self.for_rank: list[Message] = []  # The gateway's own messages to the rank
        self.attach: Message = {}  # The arguments of the request `attach`
        self.objects: Callable[[Message], str] = lambda _: ""
        """Returns why these arguments are refused, or an empty string."""
        self.objection = ""  # Its result
        self.refused: Message | None = None  # The request `attach` that was refused
        self.breakpoints: dict[str, list[Message]] = {}
        """The breakpoints by file, as confirmed by the rank."""
        self._resumes = False  # The client continued a shown thread before it could stop
        self._files: dict[int, str] = {}
        self._from_client = Decoder()
        self._from_rank = Decoder()
        self._blind = False

    def to_rank(self, data: bytes) -> bytes:
        """Return the bytes for the rank, given those of the client.

        A request that would end the rank is replaced by a detach. VS Code's Stop asks all sessions
        of a compound but one to end their process, and a rank that ends alone leaves its peers
        hanging. Whether the job ends is decided for all ranks together.

        Raises:
            NotDapError: The stream is not one of messages, so such a request could hide in it.
        """
        passed = []
        for message, raw in self._from_client.cut(data):
            if message.get("type") == "request" and isinstance(message.get("seq"), int):
                if message.get("command") == "continue" and self.shown is not None:
                    # debugpy answers only for a thread that has stopped.
                    self.shown, self._resumes = None, True
                    self.for_client.append(response(message, {"allThreadsContinued": True}))
                    continue
                arguments = message.get("arguments")
                given = arguments if isinstance(arguments, dict) else {}
                if self.answers_itself(message, given):
                    self.for_gateway.append({**message, "arguments": given})
                    continue
                if message.get("command") == "attach":
                    self.objection = self.objects(given)
                    if self.objection:
                        self.refused = message
                        break
                if message.get("command") in LEAVING:
                    self.stopped_by_client |= not given.get("restart")
                    self.terminates |= message.get("command") == "terminate"
                    self.leaving = True
                    message = {**DISCONNECT, "seq": message["seq"]}
                    raw = encode(message)
                self._asked(message["seq"], str(message.get("command")), given)
            passed.append(raw)
        return b"".join(passed)

    def _asked(self, seq: int, command: str, arguments: Message) -> None:
        self.unanswered[seq] = command
        if command == "pause":
            self.pausing, self._resumes = arguments.get("threadId"), False
        elif command in _RESUMING or command in LEAVING:
            self.pausing = None
        elif command == "attach":
            self.attach = arguments
        elif command == "setBreakpoints" and isinstance(arguments.get("source"), dict):
            self._files[seq] = str(arguments["source"].get("path"))

    def local(self, place: Location) -> Location:
        """Return a place with the client's path for it."""
        mappings = self.attach.get("pathMappings")
        for each in mappings if isinstance(mappings, list) else ():
            if not isinstance(each, dict):
                continue
            near, far = (str(each.get(key)).rstrip("/") for key in ("localRoot", "remoteRoot"))
            if place.path.startswith(f"{far}/"):
                return Location(near + place.path.removeprefix(far), place.line)
        return place

    def vanish(self) -> bytes:
        """Return the detach request that a client failed to send before it disappeared."""
        self.unanswered[DISCONNECT["seq"]] = "disconnect"
        return encode(DISCONNECT)

    def to_client(self, data: bytes) -> list[tuple[Message, bytes]]:
        """Return the messages for the client in a rank's bytes, each with its bytes.

        Bytes that are not messages are passed on with an empty message.
        """
        if self._blind:
            return [({}, data)]
        try:
            messages = self._from_rank.cut(data)
        except NotDapError:
            self._blind = True
            return [({}, self._from_rank.rest)]
        return [(message, raw) for message, raw in messages if self._follow(message)]

    def _follow(self, message: Message) -> bool:
        """Process a message of the rank. Returns whether it is for the client."""
        if message.get("type") == "response":
            if message.get("request_seq") == _RESUME:
                return False
            self._answered(message)
        elif message.get("event") == "stopped":
            body = message.get("body")
            if self._resumes and isinstance(body, dict) and body.get("reason") == "pause":
                self._resumes = False
                request = {"seq": _RESUME, "type": "request", "command": "continue"}
                thread = {"threadId": body.get("threadId")}
                self.for_rank.append({**request, "arguments": thread})
                return False
            self.stopped, self.place, self.pausing, self.shown = True, "", None, None
        elif message.get("event") == "continued":
            self.stopped = False
        return True

    def _answered(self, message: Message) -> None:
        command = self.unanswered.pop(integer(message, "request_seq"), None)
        if command == "disconnect":
            self.ended, self.stopped = True, False
        if not message.get("success"):
            return
        if command == "configurationDone":
            self.attached = True
        elif command in _RESUMING:
            self.stopped = False
        elif command == "stackTrace" and self.stopped and not self.place:
            try:
                frame = message["body"]["stackFrames"][0]
                self.place = f"{frame['source']['path']}:{frame['line']}"
            except (KeyError, IndexError, TypeError):
                pass

    def file_of(self, response: Message) -> str | None:
        """Return the file if a message confirms its breakpoints, and keep these."""
        path = self._files.pop(integer(response, "request_seq"), None)
        body = response.get("body")
        found = body.get("breakpoints") if isinstance(body, dict) else None
        if path is None or not response.get("success") or not isinstance(found, list):
            return None
        self.breakpoints[path] = [each for each in found if isinstance(each, dict)]
        return path


def put_rank_first(message: Message, rank: int) -> bool:
    """Put the rank before thread names and a stop's description. Return whether anything changed.

    VS Code cuts the end of a name. At an exception it shows the description alone.
    """
    body = message.get("body")
    if not isinstance(body, dict):
        return False
    if message.get("event") == "stopped":
        why = body.get("description") or body.get("reason")
        body["description"] = f"rank {rank}: {why}"
        return True
    threads = body.get("threads") if message.get("command") == "threads" else None
    if not isinstance(threads, list):
        return False
    for thread in threads:
        thread["name"] = f"rank {rank}: {thread.get('name')}"
    return True


def output(text: str, place: Location | None = None) -> Message:
    """Return the event that prints a line in the client's console, with a link to a place."""
    body: Message = {"category": "console", "output": f"ddpdoctor: {text}\n"}
    if place is not None:
        source = {"name": os.path.basename(place.path), "path": place.path}
        body.update(source=source, line=place.line)
    return event("output", body)


def refusal(request: Message, text: str) -> list[Message]:
    """Return the answer to a request of a client that cannot be served.

    ``initialize`` succeeds, so the client continues with ``attach``, whose error it shows to the
    user. Other requests come from a session that has just ended, which is no error.
    """
    if request.get("command") == "initialize":
        return [response(request, {"supportsConfigurationDoneRequest": True})]
    if request.get("command") == "disconnect":
        return [response(request)]
    show = request.get("command") == "attach"
    return [response(request, message=text, show=show), event("terminated", {})]


def response(
    request: Message, body: Message | None = None, *, message: str = "", show: bool = False
) -> Message:
    """Return a response of the gateway.

    ``message`` says why the request failed. With ``show``, VS Code shows it to the user.
    """
    answer: Message = {
        "seq": 0,
        "type": "response",
        "request_seq": request.get("seq", 0),
        "command": request.get("command", ""),
        "success": not message,
    }
    if not message:
        return {**answer, "body": body} if body is not None else answer
    error = {"id": 1, "format": message.replace("{", "(").replace("}", ")"), "showUser": show}
    return {**answer, "message": message, "body": {"error": error}}


def event(name: str, body: Message) -> Message:
    """Return an event of the gateway."""
    return {"seq": 0, "type": "event", "event": name, "body": body}
