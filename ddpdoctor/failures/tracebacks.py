"""Tracebacks in a log, also where those of several ranks are woven into each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from ddpdoctor.core.opening import whole
from ddpdoctor.failures.lines import HEAD
from ddpdoctor.failures.prefixes import Line, shape
from ddpdoctor.failures.printed import FRAME, SPAWNED_BY, Kind, Printed, kind_of
from ddpdoctor.failures.sightings import WARNING

_MOST_OPEN = 64
"""Tracebacks of one kind of mark that are under way at a time."""

_STALE = 200
"""Lines of others after which a traceback is taken to be at its end."""

_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?:: |:?$)")
"""The line of an exception whose traceback is not in the log."""

_REPORT = re.compile(r"^\s*traceback : $")
"""Before a traceback in torchrun's report, all lines of which are indented by two spaces."""

_INDENTED = re.compile(r"  ")
SUMMARY_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)")

_SPAWNED = re.compile(r"-- Process (\d+) terminated with the following error:")
_IGNORED = re.compile(
    r"Exception ignored in|Error in atexit|^--- Logging error ---"
    r"|(?:Task|Future) exception was never retrieved|^Exception in callback "
)
"""Before a traceback that Python prints and goes on after: of ``logging``, of ``asyncio``."""

_BEFORE_STACK = re.compile(r"^We expect that some modules will need time to support NumPy 2")
"""Before a stack that NumPy prints under a traceback's head, and the job goes on."""

_OF_NUMPY = "AttributeError: _ARRAY_API not found"
"""What may stand behind such a stack."""

_OF_RANK = re.compile(rf"{re.escape(HEAD)}: \(RANK (\d+)\)$")
"""Before what another rank raised, in the message of a ``CheckpointException``."""

_IN_THREAD = re.compile(r"^Exception in thread ")
_OF_PROCESS = re.compile(r"Exception during training:$|^Process \S+:$")
"""Before what ended a process: of detectron2 and fvcore, which raise it again, and of
``multiprocessing``."""


def _frames(lines: Iterable[str]) -> list[str]:
    """The frames at the end of some lines: those of a traceback whose head is not in the log."""
    frames: list[str] = []
    for text in reversed(list(lines)):
        if kind_of(text) not in (Kind.FRAME, Kind.SOURCE) or not text.strip():
            break
        frames.insert(0, text)
    return frames if any(map(FRAME.match, frames)) else []


def _reported_rank(lines: Iterable[str]) -> int | None:
    """The rank that torchrun's report names in some lines."""
    found = next(filter(None, map(SUMMARY_RANK.match, lines)), None)
    return whole(found[1]) if found else None


_Key = tuple[int | None, bool, str]


class Tracebacks:
    """The tracebacks under way, by the marks of their lines."""

    def __init__(self) -> None:
        self._open: dict[_Key, list[Printed]] = {}
        self._held: dict[_Key, list[Printed]] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def take(
        self,
        line: Line,
        offset: int,
        number: int,
        when: Callable[[], float | None],
        before: Callable[[], Iterable[str]],
    ) -> tuple[bool, list[Printed]]:
        """Take a line in.

        Args:
            line: The line.
            offset: Where it begins in the log.
            number: Its number.
            when: When it was written, if that is known.
            before: Lines before it, some of which may be its frames if the head is lost.

        Returns:
            Whether it belongs to a traceback, and those that have ended before it.
        """
        ended = self._stale(number) if self._open and number % 64 == 0 else []
        key = (line.rank, line.uncaught, line.who)
        under_way = self._open.get(key, [])
        if (taker := _taker(under_way, line.text, number)) is not None:
            text = taker.stripped(line.text)
            taker.add(text, kind_of(text), number)
            return True, ended
        ended += self._end(key, [each for each in under_way if each.complete])
        head = HEAD in line.text
        if not head and (line.text == _OF_NUMPY or not _RAISED.match(line.text)):
            return False, ended
        earlier = [*before()]
        above = earlier[-2:]
        if any(_BEFORE_STACK.match(text) for text in above):
            return False, ended
        under_way = self._open.setdefault(key, [])
        if len(under_way) >= _MOST_OPEN:
            ended += self._end(key, under_way[:1])
            under_way = self._open.setdefault(key, [])
        under_way.append(_begun(line, earlier, offset, number, when()))
        return True, ended

    def rest(self) -> list[Printed]:
        """Those that the end of the log ended."""
        return [each for key in list(self._open) for each in self._end(key, self._open[key])]

    def _stale(self, number: int) -> list[Printed]:
        return [
            each
            for key, under_way in list(self._open.items())
            for each in self._end(key, [p for p in under_way if number - p.last > _STALE])
        ]

    def _end(self, key: _Key, over: Sequence[Printed]) -> list[Printed]:
        """End some; those of the same marks come out together, since they may be alike."""
        held = self._held.setdefault(key, [])
        held += over
        left = [each for each in self._open.get(key, []) if each not in over]
        if left:
            self._open[key] = left
            if any(each.woven for each in (*held, *left)):
                return []
        else:
            self._open.pop(key, None)
        for each in held:
            # All that might have been mixed up says the same.
            each.woven = each.woven and any(p.lines != each.lines for p in held if p.woven)
        return self._held.pop(key)


def _begun(
    line: Line, earlier: Sequence[str], offset: int, number: int, when: float | None
) -> Printed:
    """The traceback that begins with a line, or ends with it, some frames of it above."""
    head, above = HEAD in line.text, earlier[-2:]
    prefix = line.text.partition(HEAD)[0] if head else ""
    reported = _REPORT.match(prefix) is not None
    spawned = next(filter(None, map(_SPAWNED.match, reversed(above))), None)
    of_rank = _OF_RANK.search(line.text)
    rank = whole(of_rank[1]) if of_rank else line.rank
    # What torch logs so it goes on without.
    warned = WARNING.match(prefix) is not None
    return Printed(
        start=offset,
        number=number,
        rank=_reported_rank(earlier[-4:]) if reported else rank,
        uncaught=line.uncaught and not warned,
        time=when,
        lines=[f"{HEAD}:"] if head else [*_frames(earlier), line.text],
        last=number,
        state=Kind.HEAD if head else Kind.EXCEPTION,
        who=line.who or (f"process {spawned[1]}{SPAWNED_BY}" if spawned else ""),
        prefix=_INDENTED if reported else shape(prefix) if prefix else None,
        ignored=warned or any(_IGNORED.search(text) for text in above),
        in_thread=any(_IN_THREAD.match(text) for text in above),
        reported=reported or any(_OF_PROCESS.search(text) for text in above),
    )


def _taker(under_way: Sequence[Printed], text: str, number: int) -> Printed | None:
    """The traceback that a line goes on with; None if it goes on with none of them."""
    fitting = [
        (each, own)
        for each in under_way
        if each.fits(own := each.stripped(text), kind_of(own), number)
    ]
    if len(fitting) < 2:
        return fitting[0][0] if fitting else None
    text = fitting[0][1]
    kind = kind_of(text)
    several = _awaiting(fitting, kind)
    chosen = _repeating(several, under_way, text) or _calling(several, text, kind)
    if chosen is not None:
        return chosen
    if any(each.lines != several[0].lines for each in several):
        for each in several:
            each.woven = True
    return min(several, key=lambda each: (-len(each.lines), each.last))


def _awaiting(fitting: Sequence[tuple[Printed, str]], kind: Kind) -> Sequence[Printed]:
    """Of the tracebacks that a line may go on with, those that it most likely does."""
    # The rest of a message is that of the last one that printed any.
    open_ = [each for each, _ in fitting if not each.complete]
    several = open_ or [max((each for each, _ in fitting), key=lambda each: each.last)]
    if kind is Kind.SOURCE:
        return [each for each in several if each.state is Kind.FRAME] or several
    if kind is Kind.EXCEPTION:
        return [each for each in several if each.state is not Kind.HEAD] or several
    return several


def _repeating(several: Sequence[Printed], others: Sequence[Printed], text: str) -> Printed | None:
    """The one that says what another has said, line by line."""
    for each in several:
        so_far = [*each.lines, text]
        if any(other.lines[: len(so_far)] == so_far for other in others if other is not each):
            return each
    return None


def _calling(several: Sequence[Printed], text: str, kind: Kind) -> Printed | None:
    """The only one whose code calls the function of a frame, or raises the exception."""
    if kind is Kind.FRAME and (frame := FRAME.match(text)) and frame["name"]:
        words = re.compile(rf"\b{re.escape(frame['name'])}\(")
        starts = frame["name"] == "<module>"
        calling = [
            e for e in several if (e.state is Kind.HEAD if starts else words.search(e.source))
        ]
    elif kind is Kind.EXCEPTION:
        name = re.split(r"[:(]", text)[0].rpartition(".")[2]
        calling = [e for e in several if re.search(rf"\braise \S*{re.escape(name)}\b", e.source)]
    else:
        return several[0] if len(several) == 1 else None
    alike = all(each.lines == calling[0].lines for each in calling)
    return min(calling, key=lambda each: each.last) if calling and alike else None
