"""The Debug Adapter Protocol, as far as a gateway has to know it.

Messages are JSON with a ``Content-Length`` header:
https://microsoft.github.io/debug-adapter-protocol/overview
"""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]

_HEADER_END = b"\r\n\r\n"
_MOST_HEADER = 512
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

    def feed(self, data: bytes) -> list[Message]:
        """The messages that ``data`` completes.

        Raises:
            NotDapError: This is no such stream.
        """
        self._rest += data
        messages: list[Message] = []
        while True:
            head, found, rest = self._rest.partition(_HEADER_END)
            if not found:
                if len(head) > _MOST_HEADER or not _could_begin(head):
                    raise NotDapError
                return messages
            length = _length(head)
            if len(rest) < length:
                return messages
            self._rest = rest[length:]
            messages.append(_parse(rest[:length]))


def _could_begin(head: bytes) -> bool:
    return head[:8].lower() == b"content-"[: len(head)]


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        digits = value.strip()
        if name.strip().lower() == b"content-length" and digits.isdigit() and len(digits) < 10:
            return int(digits)
    raise NotDapError


def _parse(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
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
        self.ended = False
        """The client has taken its leave."""
        self.unanswered: dict[int, str] = {}
        """Requests of the client that wait for their response: the command by its number."""
        self._from_client = Decoder()
        self._from_rank = Decoder()
        self._blind = False

    def to_rank(self, data: bytes) -> None:
        """Bytes of the client."""
        for message in self._decode(self._from_client, data):
            if message.get("type") == "request" and isinstance(message.get("seq"), int):
                self.unanswered[message["seq"]] = str(message.get("command"))

    def to_client(self, data: bytes) -> list[Message]:
        """Bytes of the rank; the messages in them."""
        messages = self._decode(self._from_rank, data)
        for message in messages:
            if message.get("type") == "response":
                self._answered(message)
            elif message.get("event") == "stopped":
                self.stopped, self.place = True, ""
            elif message.get("event") == "continued":
                self.stopped = False
        return messages

    def _answered(self, message: Message) -> None:
        command = self.unanswered.pop(message.get("request_seq", 0), None)
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

    def _decode(self, decoder: Decoder, data: bytes) -> list[Message]:
        """The messages; after bytes that are none, nothing more is followed, but all is passed."""
        if self._blind:
            return []
        try:
            return decoder.feed(data)
        except NotDapError:
            self._blind = True
            return []


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
