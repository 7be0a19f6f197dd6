"""Search a plain log for known failures and for tracebacks, at tens of megabytes a second."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from ddpdoctor.core.opening import whole
from ddpdoctor.failures import recognise
from ddpdoctor.failures.anchors import Scan
from ddpdoctor.failures.entry import Weight
from ddpdoctor.failures.lines import (
    HEAD,
    TASK,
    Line,
    clean,
    rank_of_file,
    segments,
    split_line,
    time_of,
)
from ddpdoctor.failures.sightings import ALIKE, ENDED, STATUS, Sighting, corrected, is_spoken
from ddpdoctor.failures.tracebacks import (
    SUMMARY_RANK,
    Kind,
    Printed,
    Tracebacks,
    kind_of,
    says_more,
)

# -- what a job at work prints, and what is written where one ends


_BEGINNING = 20
"""Lines at the beginning of a log that are compared with those behind an end."""

_NEUTRAL = re.compile(r"^\s|^$|^[=\-]{4}|^\s*[|+*]|^\.\.\.|^\[\d+\]:$")
"""What a job at work prints as well as one that ends: of tables and of frames."""

COMPLAINT = re.compile(
    r"[Ee]rror|[Ww]arn|[Ff]ailed|[Ff]ailure|Traceback|Exception|terminate called|srun|slurm"
    r"|destroy_process_group|resource_tracker|[Kk]illed|[Aa]bort|core dumped"
    r"|Root Cause|FAILED|^\[?[IWEF](?:\d{3,4} | \S+\.cpp)|SIG[A-Z]{3}"
    r"|^wandb: |HYDRA_FULL_ERROR"
    r"|exited|Current thread|^Thread 0x|\(most recent call first\)|no Python frame"
    r"|frame #|leaked|^<NO_OTHER|^Failures:|^terminate"
)
"""What is written where a job ends, beside what a healthy one writes."""

PROGRESS = re.compile(r"(?i)step|epoch|iter|loss|\bit/s|\bs/it|\d/\d+ ")
_STEP = re.compile(r"(?i)\b(?:step|epoch|iter\w*)\W{1,3}\d|\d/\d+ .*\d\s?(?:it/s|s/it)")
_VARYING = re.compile(r"[\d.,:]+|[ █▏▎▍▌▋▊▉#\ufffd]{2,}")
WORDS = re.compile(r"[A-Za-z]{3}")


def is_plain(text: str) -> bool:
    """Whether a line reports no failure, and is none of a frame or a table."""
    return _NEUTRAL.search(text) is None and COMPLAINT.search(text) is None


def is_step(text: str) -> bool:
    """Whether a line says how far a job has come."""
    return _STEP.search(text) is not None and COMPLAINT.search(text) is None


def shape_of(text: str) -> str:
    """The beginning of a line without its numbers and bars: steps look alike."""
    return _VARYING.sub("", text)[:ALIKE]


def beginning_of(data: bytes) -> frozenset[str]:
    """The shapes of the lines that a log begins with, up to its first step or exception.

    If it begins with an exception, those behind that.
    """
    most = 3 * _BEGINNING
    lines = [split_line(clean(raw)).text for raw in data.split(b"\n", most)[:most]]
    if HEAD in lines[0]:
        ends = (number for number, text in enumerate(lines, 1) if kind_of(text) is Kind.EXCEPTION)
        lines = lines[next(ends, most) :]
    begin = lines[:_BEGINNING]
    start = takewhile(lambda text: HEAD not in text and not _STEP.search(text), begin)
    return frozenset(shape_of(text) for text in start if WORDS.search(text))


# -- A plain log, searched for known failures and for tracebacks, at tens of megabytes a second


WENT_ON = 3
"""Plain lines of the same rank after a failure, by which it is known to have been caught."""

PATIENCE = 3_000
"""Lines that are read one by one to see that."""

AT_WORK = 5
"""Plain lines that differ in their numbers alone, by which a job is known to be at work."""

_FOLLOWS = 300
"""Lines behind a launcher's end that are read for it."""

_MANY = 1_000
"""Lines behind an end that are of a later run, whatever they are."""

_HELD_BACK = 1 << 14
"""Bytes that Python's stdout may hold back until its process ends, if it is no terminal."""

_BLOCK = 1 << 18
_LONGEST = 1 << 22
"""Bytes of a line; a longer one is cut."""

_ENDS = 16_000
"""Bytes at both ends of a log, where a job starts and ends, that are searched for all failures."""

_EARLIER = 4_000
"""Bytes before a line in which its time and its rank are looked for."""

_ROOT = "Root Cause (first observed failure)"
_UNSTARTED = re.compile(r", in (?:_initialize_workers|_find_and_load)$", re.MULTILINE)
"""In the traceback of a launcher that did not start its ranks, and of a script that still imports:
their stdout holds nothing back."""

_LOCAL_RANK = re.compile(r"local_rank: (\d+)")


class LogReader:
    """Takes a log in as it is read.

    Args:
        source: The log's name, for people.
        place: Its place among the logs that belong together.
    """

    def __init__(self, source: str, place: int = 0) -> None:
        self.source = source
        self._place = place
        self._rank = rank_of_file(source)
        self._sightings: list[Sighting] = []
        self._undecided: list[Sighting] = []
        self._end: Sighting | None = None
        """What ended a process last, while it is open whether another run follows."""
        self._work = Counter[str]()
        self._head: frozenset[str] = frozenset()
        """What the log begins with, as each run of its job does."""
        self._begins = False
        """Whether some of it came behind the end."""
        self._tracebacks = Tracebacks()
        self._scan = Scan()
        self._before: deque[str] = deque(maxlen=40)
        self._earlier = b""
        self._rest = b""
        self._offset = 0
        self._number = 1

    def feed(self, data: bytes) -> None:
        """Take a piece in, of any size."""
        data = self._rest + data
        end = data.rfind(b"\n", 0, max(0, len(data) - _ENDS)) + 1
        if not end and len(data) > _LONGEST:
            end = len(data)
        self._rest = data[end:]
        start = 0
        while start < end:
            is_head = self._offset < _ENDS
            if not self._offset:
                self._head = beginning_of(data[:_ENDS])
            stop = data.find(b"\n", start + (_ENDS if is_head else _BLOCK), end) + 1 or end
            self._block(data[start:stop], is_end=is_head)
            start = stop

    @property
    def size(self) -> int:
        """Bytes that were taken in."""
        return self._offset + len(self._rest)

    def close(self) -> list[Sighting]:
        """All that was found, in the order of the lines, once the log is at its end."""
        if self._rest:
            self._head = self._head or beginning_of(self._rest[:_ENDS])
            self._block(self._rest.removesuffix(b"\n") + b"\n", is_end=True)
            self._rest = b""
        for printed in self._tracebacks.rest():
            earlier = len(self._undecided)
            self._exception(printed)
            del self._undecided[:earlier]
            after = self._number - printed.last - 1
            for text in list(self._past)[-after:] if after > 0 else ():
                self._went_on(split_line(text))
        found = corrected(sorted(self._sightings, key=lambda each: each.order))
        self._count_behind(found)
        return found

    def _count_behind(self, found: Sequence[Sighting]) -> None:
        """How many lines of the same run, or of the next one, come behind each sighting."""
        ends = [each for each in found if each.final or each.uncaught]
        end = max(ends, key=lambda each: each.last, default=None)
        goes_on = end and (self._number > end.last + _MANY or self._goes_on(end))
        next_ = self._number if goes_on else 0
        size, is_last = self._offset, True
        for each in reversed(found):
            behind = size - each.order[1] - len(each.traceback)
            held_back = _may_hold_back(each) and behind < _HELD_BACK
            each.behind = 0 if held_back else max(0, next_ - each.last - 1)
            of_rank = each.rank is not None and each.weight not in ENDED
            if of_rank and not is_last and each.behind < _MANY:
                # The other ranks of its run end long after it.
                each.behind = 0
            if each.final or each.uncaught:
                next_, size, is_last = each.line, each.order[1], False

    def _goes_on(self, end: Sighting) -> bool:
        """Whether the last lines behind an end are a job's at work, not what is written there.

        A line that both have counts if it is a step.
        """
        past = list(self._past)
        behind = past[max(0, len(past) - (self._number - end.last - 1)) :]
        times = [when for each in behind if (when := time_of(each)) is not None]
        if end.time is not None and times and max(times) < end.time:
            # The log was put together from several: what comes behind it was written before.
            return False
        last = [split_line(each).text for each in behind]
        plain = sum(is_plain(each) or is_step(each) for each in last)
        complaints = sum(COMPLAINT.search(each) is not None for each in last)
        return plain > complaints or not complaints

    def _block(self, block: bytes, is_end: bool) -> None:
        """A piece of whole lines, most of which no Python code has to look at."""
        size = len(block)
        at, number = 0, self._number
        starts: Iterator[int] | None = None
        while at < size:
            if not self._under_way:
                if starts is None:
                    look = self._scan.candidates if is_end else self._scan.starts
                    starts = look(block, at)
                start = next((each for each in starts if each >= at), None)
                if start is None:
                    break
                number += block.count(b"\n", at, start)
                self._skipped(block[max(at, start - _EARLIER) : start])
                at = start
            # One by one until nothing is under way any more.
            end = block.find(b"\n", at) + 1 or size
            self._raw_line(block[at:end], self._offset + at, number)
            at, number = end, number + 1
        self._skipped(block[max(at, size - _EARLIER) :])
        self._number = number + block.count(b"\n", at)
        self._offset += size

    def _skipped(self, lines: bytes) -> None:
        """Lines that were not looked at, the last ones of which may say more of the next one."""
        if len(lines) >= _EARLIER:
            self._before.clear()
            self._earlier = b""
        self._earlier += lines

    @property
    def _past(self) -> deque[str]:
        """The lines before this one; those that no failure needs are not even decoded."""
        if self._earlier:
            self._before.extend(clean(each) for each in self._earlier.split(b"\n")[:-1])
            self._earlier = b""
        return self._before

    @property
    def _under_way(self) -> bool:
        return bool(self._tracebacks or self._undecided or self._end is not None)

    def _raw_line(self, raw: bytes, offset: int, number: int) -> None:
        said = [self._line(text, offset, number) for text in segments(raw)]
        if not any(said):
            self._scan.is_nothing(raw)

    def _line(self, text: str, offset: int, number: int) -> bool:
        """Take a line in; whether it says anything about a failure."""
        line = split_line(text)
        belongs, ended = self._tracebacks.take(
            line,
            offset,
            number,
            self._time,
            lambda: [split_line(each).text for each in self._past],
        )
        for printed in ended:
            self._exception(printed)
        known = None if belongs else recognise(line.text)
        if known is not None:
            failure, groups = known
            is_status = STATUS.search(text) is not None
            rank = self._rank_in_summary(text) if is_status else line.rank
            spoken = is_spoken(line.text, failure)
            self._add(
                Sighting(
                    failure=failure,
                    groups=groups,
                    text=line.text.strip(),
                    source=self.source,
                    line=number,
                    last=number,
                    order=(self._place, offset),
                    rank=self._rank if rank is None else rank,
                    time=self._time(text),
                    final=not spoken,
                    spoken=spoken,
                    root=is_status and any(_ROOT in each for each in list(self._past)[-5:]),
                    who=line.who,
                    doing=self._activity() if failure.weight == Weight.SYMPTOM else "",
                )
            )
        elif not belongs:
            self._went_on(line)
            self._works(line, number)
        if text.strip():
            self._past.append(text)
        return belongs or known is not None

    def _went_on(self, line: Line) -> None:
        """A line that no failure prints: enough of them, and what was seen was caught."""
        plain = is_plain(line.text) and not says_more(line.text)
        for each in self._undecided:
            each.lines_after += 1
            # A line without a rank may be anybody's, but not if others have theirs.
            same = each.rank in (line.rank, self._rank) and each.who == line.who
            # The exception of a Ray worker that counts is raised again in the driver.
            each.plain_after += plain and (same or "pid=" in each.who)
            if each.plain_after >= WENT_ON or each.lines_after > PATIENCE:
                each.final = each.lines_after > PATIENCE and each.plain_after == 0
                each.lines_after = -1
        self._undecided = [each for each in self._undecided if each.lines_after >= 0]

    def _works(self, line: Line, number: int) -> None:
        """A plain line behind an end: steps look alike, closing words do not.

        Behind a rank's exception the lines that stdout held back come out, too: it takes the
        beginning of another run. So it does for progress bars, of which other ranks draw a few.
        """
        if self._end is None:
            return
        text = line.text
        task = line.who.partition(",")[0]
        if task.startswith(TASK) and task != TASK + self._end.groups.get("task", task[len(TASK) :]):
            # The other tasks of its run are still at work.
            return
        shape = shape_of(text)
        self._begins = self._begins or shape in self._head
        at_work = is_plain(text) and PROGRESS.search(text)
        if at_work or (self._begins and is_step(text)):
            self._work[shape] += 1
            is_work = self._work[shape] >= AT_WORK
            self._end.followed = is_work and (self._begins or not _may_hold_back(self._end))
        if self._end.followed or number > self._end.last + _FOLLOWS:
            self._end = None

    def _exception(self, printed: Printed) -> None:
        """A traceback has come to its end."""
        message = printed.message
        if not message and not printed.frames:
            return
        failure, groups = printed.known
        self._add(
            Sighting(
                failure=failure,
                groups=groups,
                text=message,
                source=self.source,
                line=printed.number,
                last=printed.last,
                order=(self._place, printed.start),
                rank=printed.rank if printed.rank is not None else self._rank,
                time=printed.time,
                ignored=printed.survived and not message.startswith("KeyboardInterrupt"),
                location=printed.location,
                traceback=printed.text if printed.frames else "",
                context=printed.context,
                who=printed.who,
                bare=printed.of_thread or not (printed.frames and message),
                woven=printed.woven,
                uncaught=printed.ended_it and printed.frames and bool(message),
            ),
            decided=printed.uncaught and printed.frames,
        )

    def _survived(self, sighting: Sighting) -> None:
        """What a process printed and went on after did not end it, if another exception did."""
        for each in self._undecided:
            printed = each.traceback and not each.uncaught and each.text != sighting.text
            if (
                printed
                and each.plain_after
                and (each.rank, each.who)
                == (
                    sighting.rank,
                    sighting.who,
                )
            ):
                each.final, each.went_on = False, True

    def _add(self, sighting: Sighting, decided: bool = False) -> None:
        if sighting.uncaught and sighting.weight == Weight.CAUSE:
            self._survived(sighting)
        self._sightings.append(sighting)
        alone = sighting.uncaught and sighting.rank is None
        if alone or (sighting.weight == Weight.WRAPPER and sighting.final):
            self._end, self._begins = sighting, False
            self._work.clear()
        if (
            not decided
            and sighting.final
            and sighting.weight not in (Weight.STOPPED, Weight.DECISIVE)
            and (
                sighting.weight >= Weight.BARE
                or sighting.weight == Weight.REMARK
                or sighting.traceback
                or (sighting.failure is not None and sighting.failure.known.name == "left-behind")
            )
            and not STATUS.search(sighting.text)
        ):
            self._undecided.append(sighting)

    def _activity(self) -> str:
        """The last of the lines before this one that is the job's own word about what it does."""
        for each in reversed(self._past):
            text = split_line(each).text
            if WORDS.search(text) and is_plain(text) and recognise(text) is None:
                return text.strip()
        return ""

    def _rank_in_summary(self, text: str) -> int | None:
        """Whose exit torchrun reports: it names the rank some lines before the status."""
        for each in list(self._past)[-4:]:
            match = SUMMARY_RANK.match(split_line(each).text)
            if match:
                return whole(match[1])
        local = _LOCAL_RANK.search(text)
        return whole(local[1]) if local else None

    def _time(self, *texts: str) -> float | None:
        times = (time_of(each) for each in (*texts, *reversed(self._past)))
        return next((each for each in times if each is not None), None)


def read(source: str, chunks: Iterable[bytes], place: int = 0) -> list[Sighting]:
    """All failures in a log, in the order of its lines."""
    reader = LogReader(source, place)
    for chunk in chunks:
        reader.feed(chunk)
    return reader.close()


def _may_hold_back(sighting: Sighting) -> bool:
    """Whether the process that raised it may print what it held back once it ends."""
    return bool(sighting.traceback) and not _UNSTARTED.search(sighting.traceback)
