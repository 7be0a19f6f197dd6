"""The Debug Adapter Protocol, as far as a gateway has to know it.

Messages are JSON with a ``Content-Length`` header:
https://microsoft.github.io/debug-adapter-protocol/overview
"""

from __future__ import annotations

import json
from typing import Any

from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer

Message = dict[str, Any]

_HEADER_END = b"\r\n\r\n"
_RESUME = (1 << 30) + 1
"""The number of our ``continue``."""
_MOST_HEADER = 512
_LEAVING = frozenset({"disconnect", "terminate"})
_RESUMING = frozenset(
    {"continue", "next", "stepIn", "stepOut", "stepBack", "reverseContinue", "goto"}
)


class NotDapError(Exception):
    """The bytes are no messages of the protocol."""


def encode(message: Message) -> bytes:
    """A message as it goes over the wire."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


class Decoder:
    """Cuts a stream into messages."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def rest(self) -> bytes:
        """What has come of a message that is not whole yet."""
        return self._rest

    def feed(self, data: bytes) -> list[Message]:
        """The messages that ``data`` completes.

        Raises:
            NotDapError: This is no such stream.
        """
        return [message for message, _ in self.cut(data)]

    def cut(self, data: bytes) -> list[tuple[Message, bytes]]:
        """The messages that ``data`` completes, each with the bytes it came in.

        Raises:
            NotDapError: This is no such stream.
        """
        self._rest += data
        messages: list[tuple[Message, bytes]] = []
        while True:
            head, found, rest = self._rest.partition(_HEADER_END)
            if not found:
                if len(head) > _MOST_HEADER or not _could_begin(head):
                    raise NotDapError
                return messages
            length = _length(head)
            if len(rest) < length:
                return messages
            self._rest, body = rest[length:], rest[:length]
            messages.append((_parse(body), head + found + body))


def _could_begin(head: bytes) -> bool:
    return head[:8].lower() == b"content-"[: len(head)]


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        digits = value.strip()
        if name.strip().lower() == b"content-length" and digits.isdigit() and len(digits) < 9:
            return int(digits)
    raise NotDapError


def _parse(body: bytes) -> Message:
    try:
        message = opening.loads(body)
    except ValueError:
        raise NotDapError from None
    if not isinstance(message, dict):
        raise NotDapError
    return message


class Tap:
    """Follows one session from the messages that pass: attached, stopped and where, ended."""

    def __init__(self) -> None:
        self.attached = False
        """The client has set its breakpoints and is through with its configuration."""
        self.stopped = False
        self.place = ""
        """``path:line`` of the stop, once the client asked for the stack."""
        self.leaving = False
        """The client has asked for the end of the session."""
        self.ended = False
        """The rank has answered that."""
        self.stopped_by_client = False
        """The client asked for the end of the session, and not to begin another one."""
        self.at_gate = False
        """It began while the ranks were held before their first line."""
        self.terminates = False
        """The client waits for the event that the session is over."""
        self.unanswered: dict[int, str] = {}
        """Requests of the client that wait for their response: the command by its number."""
        self.pausing: object = None
        """The thread that the client has asked to pause, until something has stopped."""
        self.shown: object = None
        """The thread in native code that the client was shown as stopped."""
        self.for_client: list[Message] = []
        self.for_rank: list[Message] = []
        """What the gateway itself has to say to either side."""
        self._resumes = False
        """The client has let a shown thread go on, before it could stop."""
        self.breakpoints: dict[str, list[Message]] = {}
        """By file, as the rank has answered them."""
        self._files: dict[int, str] = {}
        self._from_client = Decoder()
        self._from_rank = Decoder()
        self._blind = False

    def to_rank(self, data: bytes) -> bytes:
        """What the rank gets of a client's bytes: all of it, but nothing that would end the rank.

        VS Code's Stop asks all sessions of a compound but one to end their process. A rank that
        ends alone leaves its peers hanging, so each is a detach; whether the job ends is decided
        for all ranks together.

        Raises:
            NotDapError: This is no such stream; what ends a rank could hide in it.
        """
        passed = []
        for message, raw in self._from_client.cut(data):
            if message.get("type") == "request" and isinstance(message.get("seq"), int):
                if message.get("command") == "continue" and self.shown is not None:
                    # debugpy answers only for a thread that stands.
                    self.shown, self._resumes = None, True
                    self.for_client.append(_continued(message))
                    continue
                if message.get("command") in _LEAVING:
                    message, raw = self._leave(message)
                self._asked(message["seq"], str(message.get("command")), message.get("arguments"))
            passed.append(raw)
        return b"".join(passed)

    def _asked(self, seq: int, command: str, arguments: object) -> None:
        self.unanswered[seq] = command
        given = arguments if isinstance(arguments, dict) else {}
        if command == "pause":
            self.pausing, self._resumes = given.get("threadId"), False
        elif command in _RESUMING or command in _LEAVING:
            self.pausing = None
        elif command == "setBreakpoints" and isinstance(given.get("source"), dict):
            self._files[seq] = str(given["source"].get("path"))

    def _leave(self, request: Message) -> tuple[Message, bytes]:
        """The detach in place of a request that ends the session."""
        arguments = request.get("arguments")
        arguments = arguments if isinstance(arguments, dict) else {}
        self.stopped_by_client |= not arguments.get("restart")
        self.terminates |= request.get("command") == "terminate"
        self.leaving = True
        detach = {**DISCONNECT, "seq": request["seq"]}
        return detach, encode(detach)

    def vanish(self) -> bytes:
        """Return what a client that vanished should have sent the rank."""
        self.unanswered[DISCONNECT["seq"]] = "disconnect"
        return encode(DISCONNECT)

    def to_client(self, data: bytes) -> list[tuple[Message, bytes]]:
        """What the client gets of a rank's bytes: whole messages, each with its bytes.

        What is no stream of messages is passed as it is, with an empty message.
        """
        if self._blind:
            return [({}, data)]
        try:
            messages = self._from_rank.cut(data)
        except NotDapError:
            self._blind = True
            return [({}, self._from_rank.rest)]
        return [(message, raw) for message, raw in messages if self._take(message)]

    def _take(self, message: Message) -> bool:
        """Take in a message of the rank; whether it is one for the client."""
        if message.get("type") == "response":
            if message.get("request_seq") == _RESUME:
                return False
            self._answered(message)
        elif message.get("event") == "stopped":
            body = message.get("body")
            if self._resumes and isinstance(body, dict) and body.get("reason") == "pause":
                self._resumes = False
                self.for_rank.append(_resume(body.get("threadId")))
                return False
            self.stopped, self.place, self.pausing, self.shown = True, "", None, None
        elif message.get("event") == "continued":
            self.stopped = False
        return True

    def file_of(self, response: Message) -> str | None:
        """The file whose breakpoints a message answers, which are kept; None for all others."""
        path = self._files.pop(integer(response, "request_seq"), None)
        body = response.get("body")
        found = body.get("breakpoints") if isinstance(body, dict) else None
        if path is None or not response.get("success") or not isinstance(found, list):
            return None
        self.breakpoints[path] = [each for each in found if isinstance(each, dict)]
        return path

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
            self.place = _top(message)


def _continued(request: Message) -> Message:
    """Our answer to a ``continue``."""
    return {
        "seq": 0,
        "type": "response",
        "request_seq": request["seq"],
        "command": "continue",
        "success": True,
        "body": {"allThreadsContinued": True},
    }


def _resume(thread: object) -> Message:
    """Our own ``continue``."""
    arguments = {"threadId": thread}
    return {"seq": _RESUME, "type": "request", "command": "continue", "arguments": arguments}


def _top(message: Message) -> str:
    try:
        frame = message["body"]["stackFrames"][0]
        return f"{frame['source']['path']}:{frame['line']}"
    except (KeyError, IndexError, TypeError):
        return ""


def refusal(request: Message, text: str) -> list[Message]:
    """The answer to a request of a client that cannot be served.

    ``initialize`` succeeds, so that the client goes on to ``attach``, whose error it shows to the
    person.
    """
    response: Message = {
        "seq": 1,
        "type": "response",
        "request_seq": request.get("seq", 0),
        "command": request.get("command", ""),
        "success": True,
    }
    if request.get("command") == "initialize":
        return [{**response, "body": {"supportsConfigurationDoneRequest": True}}]
    if request.get("command") == "disconnect":
        return [response]
    error = {"id": 1, "format": text.replace("{", "(").replace("}", ")"), "showUser": True}
    return [
        {**response, "success": False, "message": text, "body": {"error": error}},
        event("terminated", {}),
    ]


def event(name: str, body: Message) -> Message:
    """An event of ours."""
    return {"seq": 0, "type": "event", "event": name, "body": body}


def output(text: str) -> Message:
    """A line for the client's debug console."""
    return event("output", {"category": "important", "output": text + "\n"})


DISCONNECT: Message = {
    "seq": 1 << 30,
    "type": "request",
    "command": "disconnect",
    "arguments": {"restart": False, "terminateDebuggee": False},
}
"""What a client that vanished should have said."""
