"""Parse tracebacks in a log, and separate interleaved ones of several ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from ddpdoctor.core.opening import whole
from ddpdoctor.core.user_code import Location
from ddpdoctor.failures import recognise
from ddpdoctor.failures.entry import Failure
from ddpdoctor.failures.lines import HEAD, Line, shape, users_file
from ddpdoctor.failures.occurrences import WARNING

# -- One traceback


_ORIGINAL = "Original Traceback"
_MAX_LINES = 2_000
_APART = 50  # Maximum lines of others between a traceback and the line of its exception
_BEHIND = 8  # The same if its name may be any word before a colon

FRAME = re.compile(r'^\s*File "(?P<path>[^"\n]+)", line (?P<line>\d+)(?:, in (?P<name>.*))?$')
_EXCEPTION = re.compile(
    r"^(?!(?:Failures|Epoch|Step|Loss|Iter|INFO|WARNING|DEBUG|ERROR)\b)(?:[A-Za-z_]\w*\.)*"
    r"(?:(?:_?[A-Z]\w*|nccl[A-Z]\w+Error|error|gaierror|herror|timeout)(?:\([\w.]+\))?(?:: |:$)"
    r"|(?<=\.)[A-Z]\w*$"
    r"|\w*(?:Error|Exception|Interrupt|Exit|Iteration)$|\w*(?:Error|Exception):(?=[A-Z]))"
)
_NAMED = re.compile(r"[\w.]*(?:Error|Exception|Interrupt|Exit|Iteration)\b|(?:\w+\.)+\w+")
"""A name that can only be an exception's."""

_SEVERAL = re.compile(
    r"(?P<name>[A-Za-z_]\w*?(?:Error|Exception|Interrupt))(?:[: ]{0,3}(?P=name)(?![a-z]))+"
    r"(?P<said>.*)$"
)
_REPEATED = re.compile(r"(.{3,300}?)\1+")
_WITHIN = re.compile(rf"^[\w.]+(?:Error|Exception): {re.escape(HEAD)}")
"""An exception whose message is the traceback of a DataLoader worker (torch 1.1 and before)."""

_CHAIN = ("was the direct cause of the following", "During handling of the above")
_HANDLED = re.compile(r"^(?:\w+\.)*(?:Stop(?:Async)?Iteration|GeneratorExit|Empty|Full)\b")
"""Exceptions that programs raise and handle all the time."""
_LOGGED = re.compile(r"^\[?[IWEF](?:\d{3,4} [\d:.]+| \S+\.(?:cpp|cc|hpp|h):\d+\])")
"""The beginning of a log line of c10d or torchrun, which no exception's message has."""

_CONTINUED = re.compile(
    r"^(?:nccl\w+: |Last error:|CUDA kernel errors|For debugging consider|Compile with `|Search for"
    r"|Device-side assert|Exception raised from|frame #\d|C\+\+ CapturedTraceback|If you were att"
    r"|Parameter(?: indices which| at index|s which did)|making sure all|In addition, you can"
    r"|NCCL WARN| ?(?:Due to the asynch|might run on corr|entire process down)"
    r"|If you already have done the above|Since `find_unused|You can (?:also )?make|Hint:"
    r"|size mismatch|Missing key|Unexpected key|(?:\[[^\]]+\] )?\*\*\* "
    r"|\[ERROR\] \d{4}-|E[A-Z]\d{4}: "  # HCCL
    r"|cuda failed with error|MPI\w*\(\d+\)|\[cli_\d+\]: |system msg for |:$)"
)
"""Unindented lines of torch's and MPI's messages."""


_UNSAID = re.compile(
    r"^(?![\w.]*ChildFailed)[\w.]+(?:Error|Exception): *$|to see its traceback\): *$"
)
"""The end of an exception's line whose message stands on the next ones."""

_MAX_UNSAID = 4  # Maximum number of these lines

_UNREADABLE = ("SyntaxError", "IndentationError", "TabError")
_WRITER = "event_file_writer.py"
_STARTS = re.compile(r"^<|[/\\]threading\.py$")  # Files in which Python starts a module or a thread

_HELPER = re.compile(r"[/\\]wandb[/\\](?:__main__\.py$|sdk[/\\])")
"""The outermost files of wandb's own process and threads."""

_FINALIZERS = "_run_finalizers"
"""Where multiprocessing cleans up at exit, prints exceptions, and continues."""

_CLOSED = re.compile(r"(?:OSError: handle is closed|EOFError)$")

_OUTERMOST = ("<module>", "_run_module_as_main")
"""Outermost functions of a script and of a module (``python -m``)."""


def says_more(text: str) -> bool:
    """Return whether a line continues a message of torch."""
    return _CONTINUED.match(text) is not None


def is_handled(text: str) -> bool:
    """Return whether the last exception of a chain is cut off, and this is the one before it."""
    return _CHAIN[1] in text


def before_last(traceback: str, text: str) -> str:
    """Return a traceback without the frames of an exception that is cut off."""
    return traceback.rpartition(_CHAIN[1])[0] if is_handled(text) else traceback


def untangled(text: str) -> str:
    """Clean up the line of an exception that several processes printed at once, piece by piece.

    ``ValueErrorValueError: : badbad`` becomes ``ValueError: bad``.
    """
    several = _SEVERAL.match(text)
    if several is None:
        return text
    said = several["said"].strip(": ")
    repeated = _REPEATED.fullmatch(said)
    return f"{several['name']}: {repeated[1] if repeated else said}".rstrip(": ")


class Kind(Enum):
    """The role of a line in a traceback."""

    HEAD = auto()
    FRAME = auto()
    SOURCE = auto()
    CHAIN = auto()
    EXCEPTION = auto()
    OTHER = auto()


def kind_of(text: str) -> Kind:
    """Return the possible role of a line, without its context."""
    if HEAD in text:
        return Kind.HEAD
    if FRAME.match(text):
        return Kind.FRAME
    if any(words in text for words in _CHAIN):
        return Kind.CHAIN
    if text[:1] in (" ", "\t", ""):
        return Kind.SOURCE
    # A progress bar also has a name and a colon.
    is_exception = _EXCEPTION.match(text) and "%|" not in text
    return Kind.EXCEPTION if is_exception else Kind.OTHER


SPAWNED_BY = " of mp.spawn"  # Marks a spawned process whose exception its parent raises again


@dataclass(eq=False)
class Printed:
    """A traceback as it was printed.

    Attributes:
        start: Offset of its first line in the log.
        number: The number of that line.
        rank: The rank in the prefix of its lines, if any.
        uncaught: Its lines have torch's prefix of uncaught exceptions.
        time: Seconds, if a line shortly before it has a time.
        lines: Its lines, without prefixes.
        numbers: The number of each of them.
        last: The number of its last line so far.
        state: The role of its last line. ``EXCEPTION`` until the next head, whatever follows.
        who: The process or node in a prefix.
        prefix: Matches what else stands before each of its lines.
        interleaved: Lines of other tracebacks that fit this one, too, stand between its own.
        ignored: Python says before it that it continues in spite of it.
        in_thread: It ended a thread, and its process continues.
        reported: It is part of torchrun's report, so it ended a rank.
        torn: srun cut its message off after the colon.
    """

    start: int
    number: int
    rank: int | None
    uncaught: bool
    time: float | None
    lines: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    last: int = 0
    state: Kind = Kind.HEAD
    who: str = ""
    prefix: re.Pattern[str] | None = None
    interleaved: bool = False
    ignored: bool = False
    in_thread: bool = False
    reported: bool = False
    torn: bool = False

    @property
    def complete(self) -> bool:
        """Whether the exception was seen. What follows may be the rest of its message."""
        return self.state in (Kind.EXCEPTION, Kind.CHAIN)

    def stripped(self, text: str) -> str:
        """Return a line without this traceback's prefix."""
        found = self.prefix.match(text) if self.prefix is not None else None
        return text[found.end() :] if found is not None else text

    def fits(self, text: str, kind: Kind, number: int) -> bool:
        """Return whether a line may continue this traceback."""
        if len(self.lines) >= _MAX_LINES or _LOGGED.match(text):
            return False
        if kind is Kind.HEAD:
            started = text.startswith(_ORIGINAL) if self.complete else self.uncaught
            more = started or (self.state is Kind.SOURCE and _WITHIN.match(text) is not None)
            return more or self.state is Kind.CHAIN
        if self.uncaught:
            return True
        if self.complete:
            begins = number == self.last + 1 and self._is_unsaid
            said = kind in (Kind.OTHER, Kind.EXCEPTION) and (begins or self._says_more(text))
            frame = FRAME.match(text)
            if frame is not None:
                # Without a function it is a SyntaxError in another process's file.
                return bool(frame["name"])
            return kind in (Kind.SOURCE, Kind.CHAIN) or said
        if kind is Kind.FRAME:
            return True
        if kind is Kind.SOURCE:
            return self.state is not Kind.HEAD
        near = _APART if _NAMED.match(text) else _BEHIND
        return kind is Kind.EXCEPTION and number - self.last < near

    def _says_more(self, text: str) -> bool:
        cut = text.startswith(": ") and self.lines[-1].isidentifier()
        last = self.lines[-1]
        return says_more(text) or cut or self.torn or last.startswith("Last error:")

    @property
    def _is_unsaid(self) -> bool:
        """Whether the message of its exception stands on the next lines."""
        at = self.headline
        unsaid = at is not None and _UNSAID.search(self.lines[at]) is not None
        return unsaid and len(self.lines) - (at or 0) <= _MAX_UNSAID

    def add(self, text: str, kind: Kind, number: int) -> None:
        """Add a line that fits. srun may cut a line in two."""
        if self.complete and (text.startswith(": ") or self.torn):
            self.lines[-1] += text
            self.last = number
            self.torn = text.strip() == ":"
            return
        self.lines.append(text)
        self.numbers.append(number)
        self.last = number
        if not self.complete or kind in (Kind.HEAD, Kind.CHAIN):
            self.state = self.state if kind is Kind.OTHER else kind

    @property
    def source(self) -> str:
        """The last line of source code."""
        return self.lines[-1] if self.state is Kind.SOURCE else ""

    @property
    def headline(self) -> int | None:
        """Index of the line with the final exception, or None."""
        last = max((n for n, text in enumerate(self.lines) if HEAD in text), default=0)
        # If the last one of a chain is truncated, the one before it.
        after, before = range(last, len(self.lines)), range(last - 1, -1, -1)
        raised = (n for n in (*after, *before) if _EXCEPTION.match(self.lines[n]))
        return next((n for n in raised if HEAD not in self.lines[n]), None)

    @property
    def frames(self) -> bool:
        """Whether it has more than the exception."""
        return any(HEAD in text or FRAME.match(text) for text in self.lines)

    @property
    def ended_it(self) -> bool:
        """Whether it ended its process, as far as its own lines show."""
        whole = not self.lines[0].startswith(" ")
        return not self.ignored and (
            self.uncaught
            or self.reported
            or self._of_script
            or self.who.endswith(SPAWNED_BY)
            or (whole and any(name in _OUTERMOST for name in self._first))
        )

    @property
    def of_thread(self) -> bool:
        """Whether it ended a thread, and its process continued."""
        return self.in_thread or any(name == "_bootstrap_inner" for name in self._first)

    @property
    def survived(self) -> bool:
        """Whether its process continued.

        Python says so, or it is from cleanup code or a tracker's own thread. A known failure of a
        tracker, such as a full disk, stops the job as well.
        """
        closed = any(_CLOSED.match(text) for text in self.lines)
        writes = closed and any(_WRITER in text for text in self.lines)
        helps = _HELPER.search(self._begins) is not None and self.known[0] is None
        return self.ignored or writes or helps or next(self._first, "") == _FINALIZERS

    @property
    def _of_script(self) -> bool:
        """Whether Python cannot parse the script itself, for which it prints no head."""
        first = FRAME.match(self.lines[0])
        return first is not None and not first["name"] and self.message.startswith(_UNREADABLE)

    @property
    def _begins(self) -> str:
        """The outermost file of the last traceback of a chain, without Python's startup."""
        heads = [number for number, text in enumerate(self.lines) if HEAD in text]
        frames = map(FRAME.match, self.lines[heads[-1] if heads else 0 :])
        paths = (frame["path"] for frame in frames if frame)
        return next((path for path in paths if not _STARTS.search(path)), "")

    @property
    def _first(self) -> Iterator[str]:
        """The outermost function of each traceback of a chain."""
        of_head = False
        for text in self.lines:
            of_head = of_head or HEAD in text
            if (frame := FRAME.match(text)) and of_head:
                of_head = False
                yield frame["name"]

    @property
    def message(self) -> str:
        """The final exception with its whole message. Empty if truncated."""
        at = self.headline
        if at is None:
            return ""
        first, *more = (text for text in self.lines[at:] if text.strip())
        if is_handled("\n".join(more)) and _HANDLED.match(first) and not self.interleaved:
            return ""
        if first.rstrip().endswith(":") and more:
            first = f"{first.rstrip()} {more.pop(0).strip()}"
        return "\n".join([untangled(first), *more])

    @property
    def context(self) -> str:
        """The first exception of a chain. Empty without a chain."""
        chained = (
            []
            if self.interleaved
            else [n for n, text in enumerate(self.lines) if kind_of(text) is Kind.CHAIN]
        )
        raised = (
            [text for text in self.lines[: chained[0]] if _EXCEPTION.match(text)] if chained else []
        )
        return next((text for text in raised if HEAD not in text), "")

    @property
    def text(self) -> str:
        """All lines."""
        return "\n".join(self.lines)

    @property
    def known(self) -> tuple[Failure | None, Mapping[str, str]]:
        """The known failure that it shows, with its groups. None if it is not known."""
        at = self.headline
        # The cause may come earlier in a chain, or in a worker's own traceback.
        earlier = "\n".join(text for text in self.lines[:at] if _EXCEPTION.match(text))
        found = [recognise(text, self.text) for text in (self.message, earlier)]
        return max(
            (each for each in found if each is not None),
            key=lambda each: (each[0].weight, len(each[1])),
            default=(None, {}),
        )

    @property
    def location(self) -> Location | None:
        """The innermost line of the user's code. None if it may be another rank's."""
        own = before_last(self.text, self.message).splitlines()
        for text in reversed(() if self.interleaved else [*self.lines, *own]):
            match = FRAME.match(text)
            if match and users_file(match["path"]):
                return Location(match["path"], whole(match["line"]))
        return None


def parse(text: str) -> Printed | None:
    """Parse a complete traceback as Python formats it. None if it is none."""
    lines = text.rstrip().splitlines()
    if not any(HEAD in line for line in lines):
        return None
    return Printed(0, 1, None, True, None, lines)


# -- Interleaved tracebacks of a log


_LETTER = re.compile(r"[A-Za-z]")
_CUT_FRAMES = 2  # Minimum frames of a traceback without head and message
_MAX_OPEN = 64  # Maximum number of open tracebacks with equal prefixes
_STALE = 200  # Lines of others after which a traceback is closed

_RAISED = re.compile(
    r"^(?:(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?:\([\w.]+\))?"
    r"(?:: |:?$|:(?=[A-Z]))"
    r"|nccl[A-Z]\w+Error: |(?:[a-z]\w*\.)+(?:error|gaierror|herror|timeout): \S)"
)
"""The line of an exception without its traceback."""

_REPORT = re.compile(r"^\s*traceback : $")
"""Before a traceback in torchrun's report, which is indented by two spaces."""

_INDENTED = re.compile(r"  ")
SUMMARY_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)")

_SPAWNED = re.compile(r"-- Process (\d+) terminated with the following error:")
_IGNORED = re.compile(
    r"Exception ignored in|Error in atexit|^--- Logging error ---"
    r"|(?:Task|Future) exception was never retrieved|^Exception in callback "
)
"""Before a traceback after which Python continues, as in ``logging`` and ``asyncio``."""

_BEFORE_STACK = re.compile(r"^We expect that some modules will need time to support NumPy 2")
"""Before a stack that NumPy prints like a traceback, after which the job continues."""

_OF_NUMPY = "AttributeError: _ARRAY_API not found"  # May follow such a stack

_OF_RANK = re.compile(rf"{re.escape(HEAD)}: \(RANK (\d+)\)$")
"""Before another rank's exception in the message of a ``CheckpointException``."""

_IN_THREAD = re.compile(r"^Exception in thread ")
_OF_PROCESS = re.compile(r"Exception during training:$|^Process \S+:$")
"""Before an exception that ended a process: of detectron2 and fvcore, which raise it again, and
of ``multiprocessing``."""


def _frames(lines: Iterable[str]) -> list[str]:
    """Return the frames at the end of some lines, of a traceback whose head is missing."""
    frames: list[str] = []
    texts = [text for text in lines if text.strip()]
    for above, text in zip(["", *texts][-2::-1], texts[::-1], strict=True):
        # Some posts lost the indentation of the source below a frame.
        if kind_of(text) not in (Kind.FRAME, Kind.SOURCE) and not FRAME.match(above):
            break
        frames.insert(0, text)
    return frames if any(map(FRAME.match, frames)) else []


def _ends_frames(text: str, earlier: Sequence[str]) -> bool:
    """Return whether a line with a name and a colon is the exception of the frames above it."""
    return _NAMED.match(text) is not None and bool(_frames(earlier[-2:]))


def cut_off(lines: Sequence[Line], number: int) -> Printed | None:
    """Return the traceback with which a log ends, if it shows neither its head nor its message.

    Args:
        lines: The last lines of the log.
        number: The number of the line after them.
    """
    while lines and not _LETTER.search(lines[-1].text):
        # Marks at the end of a post are not part of the log.
        lines, number = lines[:-1], number - 1
    texts = [line.text for line in lines]
    # Terminals break lines, so the last part may have a single frame.
    if sum(FRAME.match(text) is not None for text in texts) < _CUT_FRAMES:
        return None
    frames = _frames(texts)
    if not frames:
        return None
    last = lines[-1]
    return Printed(
        start=0,
        number=number - len(frames),
        rank=last.rank,
        uncaught=last.uncaught,
        time=None,
        lines=frames,
        numbers=[*range(number - len(frames), number)],
        last=number - 1,
        state=Kind.SOURCE,
        who=last.who,
    )


def _reported_rank(lines: Iterable[str]) -> int | None:
    """Return the rank that torchrun's report names in some lines."""
    found = next(filter(None, map(SUMMARY_RANK.match, lines)), None)
    return whole(found[1]) if found else None


_Key = tuple[int | None, bool, str]


class Tracebacks:
    """The open tracebacks, by the prefixes of their lines."""

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
        """Read a line.

        Args:
            line: The line.
            offset: Its offset in the log.
            number: Its number.
            when: Returns its time, if known.
            before: Returns earlier lines, which may be its frames if the head is lost.

        Returns:
            Whether it belongs to a traceback, and the tracebacks that ended before it.
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
        if not head and (line.text == _OF_NUMPY or not _EXCEPTION.match(line.text)):
            return False, ended
        earlier = [*before()]
        if not (head or _RAISED.match(line.text) or _ends_frames(line.text, earlier)):
            return False, ended
        above = earlier[-2:]
        if any(_BEFORE_STACK.match(text) for text in above):
            return False, ended
        under_way = self._open.setdefault(key, [])
        if len(under_way) >= _MAX_OPEN:
            ended += self._end(key, under_way[:1])
            under_way = self._open.setdefault(key, [])
        under_way.append(_begun(line, earlier, offset, number, when()))
        return True, ended

    def rest(self) -> list[Printed]:
        """Close the tracebacks at the end of the log and return them."""
        return [each for key in list(self._open) for each in self._end(key, self._open[key])]

    def _stale(self, number: int) -> list[Printed]:
        return [
            each
            for key, under_way in list(self._open.items())
            for each in self._end(key, [p for p in under_way if number - p.last > _STALE])
        ]

    def _end(self, key: _Key, over: Sequence[Printed]) -> list[Printed]:
        """Close some. Those with equal prefixes are returned together, since they may be equal."""
        held = self._held.setdefault(key, [])
        held += over
        left = [each for each in self._open.get(key, []) if each not in over]
        if left:
            self._open[key] = left
            if any(each.interleaved for each in (*held, *left)):
                return []
        else:
            self._open.pop(key, None)
        for each in held:
            # Equal tracebacks may be interleaved without harm.
            each.interleaved = each.interleaved and any(
                p.lines != each.lines for p in held if p.interleaved
            )
        return self._held.pop(key)


def _begun(
    line: Line, earlier: Sequence[str], offset: int, number: int, when: float | None
) -> Printed:
    """Return the traceback that begins with a line, or that a line ends without a head."""
    head, above = HEAD in line.text, earlier[-2:]
    prefix = line.text.partition(HEAD)[0] if head else ""
    reported = _REPORT.match(prefix) is not None
    spawned = next(filter(None, map(_SPAWNED.match, reversed(above))), None)
    of_rank = _OF_RANK.search(line.text)
    rank = whole(of_rank[1]) if of_rank else line.rank
    # torch continues after what it logs as a warning.
    warned = WARNING.match(prefix) is not None
    lines = [f"{HEAD}:"] if head else [*_frames(earlier), line.text]
    return Printed(
        start=offset,
        number=number,
        rank=_reported_rank(earlier[-4:]) if reported else rank,
        uncaught=line.uncaught and not warned,
        time=when,
        lines=lines,
        numbers=[*range(number - len(lines) + 1, number + 1)],
        last=number,
        state=Kind.HEAD if head else Kind.EXCEPTION,
        who=line.who or (f"process {spawned[1]}{SPAWNED_BY}" if spawned else ""),
        prefix=_INDENTED if reported else shape(prefix) if prefix else None,
        ignored=warned or any(_IGNORED.search(text) for text in above),
        in_thread=any(_IN_THREAD.match(text) for text in above),
        reported=reported or any(_OF_PROCESS.search(text) for text in above),
    )


def _taker(under_way: Sequence[Printed], text: str, number: int) -> Printed | None:
    """Return the traceback that a line continues, or None."""
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
            each.interleaved = True
    return min(several, key=lambda each: (-len(each.lines), each.last))


def _awaiting(fitting: Sequence[tuple[Printed, str]], kind: Kind) -> Sequence[Printed]:
    """Select the tracebacks that a line most likely continues."""
    # The rest of a message belongs to the traceback with the latest line.
    open_ = [each for each, _ in fitting if not each.complete]
    several = open_ or [max((each for each, _ in fitting), key=lambda each: each.last)]
    if kind is Kind.SOURCE:
        return [each for each in several if each.state is Kind.FRAME] or several
    if kind is Kind.EXCEPTION:
        return [each for each in several if each.state is not Kind.HEAD] or several
    return several


def _repeating(several: Sequence[Printed], others: Sequence[Printed], text: str) -> Printed | None:
    """Return the traceback that repeats another one line by line."""
    for each in several:
        so_far = [*each.lines, text]
        if any(other.lines[: len(so_far)] == so_far for other in others if other is not each):
            return each
    return None


def _calling(several: Sequence[Printed], text: str, kind: Kind) -> Printed | None:
    """Return the only traceback whose code calls the frame's function, or raises the exception."""
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
