"""Answer a client's requests about the frames of a thread in native code, which debugpy refuses."""

from __future__ import annotations

import itertools
from typing import Any

from ddpdoctor.debug import dap
from ddpdoctor.debug.gateway_ranks import Message, RankLink, SilentError

TIMEOUT = 8.0  # Seconds for an answer; the rank evaluates for 3 s at most

SCOPES = {"Locals": "locals", "Globals": "globals"}

EVALUATES = (
    "the rank is in native code: expressions are evaluated on another thread, for 3 s at most; "
    "they may run code of the job, and what they assign is lost"
)

_FIRST = 1 << 30  # The first reference of ours; those of debugpy count from 1
_LAST = (1 << 31) - 1  # The protocol has 31 bits

_EXPANDED = frozenset({"scopes", "variables", "evaluate"})


class NativeFrames:
    """The values of one session that were shown, by reference."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[object, list[Any]]] = {}
        self._numbers = itertools.cycle(range(_FIRST, _LAST))
        self._explained = False

    def is_asked(self, command: str, arguments: Message, *, in_native: bool) -> bool:
        """Return whether a request is answered here, not by debugpy."""
        if command == "variables":
            reference = arguments.get("variablesReference")
            return isinstance(reference, int) and reference >= _FIRST
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
            answers.append(dap.output(EVALUATES))
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
    """Ask the rank. Raises SilentError if it does not answer, or with an error."""
    answer = await link.ask(what, TIMEOUT, **values)
    if "error" in answer:
        raise SilentError(answer["error"])
    return {key: value for key, value in answer.items() if key != "answers"}
