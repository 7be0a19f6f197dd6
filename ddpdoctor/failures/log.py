"""Search a log for known failures and tracebacks, at tens of megabytes a second."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ddpdoctor.core.finding import Severity
from ddpdoctor.core.opening import whole
from ddpdoctor.failures import recognise
from ddpdoctor.failures.entry import Weight
from ddpdoctor.failures.lines import (
    TASK,
    Line,
    clean,
    margin_of,
    rank_of_file,
    segments,
    split_line,
    time_of,
    unwrapped,
)
from ddpdoctor.failures.occurrences import (
    ENDED,
    LAST_WORDS,
    LAUNCHER,
    REMARKS,
    STATUS,
    Occurrence,
    corrected,
    is_mention,
    likely,
    name_of,
)
from ddpdoctor.failures.scan import AT_THE_END, Scan
from ddpdoctor.failures.table import TABLE
from ddpdoctor.failures.tracebacks import (
    FRAME,
    SUMMARY_RANK,
    Printed,
    Tracebacks,
    cut_off,
    says_more,
)
from ddpdoctor.failures.work import (
    COMPLAINT,
    DONE,
    ERROR_LINE,
    PROGRESS,
    WORDS,
    beginning_of,
    is_newest_first,
    is_plain,
    is_step,
    shape_of,
    tells_of_failure,
)

WENT_ON = 3  # Plain lines of the same rank after a failure that prove that it was caught
PATIENCE = 3_000  # Maximum number of lines that are read one by one to decide that
AT_WORK = 5  # Plain lines that differ only in their numbers and prove that a job works
_FOLLOWS = 300  # Lines after a launcher's end that are read to decide that
_MANY = 1_000  # Lines after an end that always belong to a later run

_HELD_BACK = 1 << 14
"""Bytes that Python's stdout may buffer until its process ends, if it is no terminal."""

_BLOCK = 1 << 18
_MAX_TURNED = 1 << 28  # Maximum bytes of a log whose lines are put into the opposite order
_LONGEST = 1 << 22  # Maximum bytes of a line. A longer one is cut.
_ENDS = 16_000  # Bytes at both ends of a log that are searched for all failures
_EARLIER = 4_000  # Bytes before a line that are searched for its time and rank

_ROOT = "Root Cause (first observed failure)"
_UNSTARTED = re.compile(r", in (?:_initialize_workers|_find_and_load)$", re.MULTILINE)
"""In tracebacks of launchers without ranks, and of imports, whose stdout buffers nothing."""

_NAMED = {each.known.name: each for each in TABLE}
_NOTICED = _NAMED["child-failed"]
"""What a launcher's traceback says whose end is missing."""

_AT_LAST = {
    fact: replace(_NAMED[name], known=_NAMED[name].known._replace(name=fact))
    for fact, name in (("port-taken", "port-in-use-logged"), ("store-not-there", "store-connect"))
}
"""What warnings about a connection mean with which a log ends."""

_ENDS_WITH = replace(
    ERROR_LINE,
    known=ERROR_LINE.known._replace(name=LAST_WORDS),
    says="printed a line that reports a failure",
)
"""Reported for a log without a known failure whose last lines sound like one."""

_SPAWNING = re.compile(r"[/\\]torch[/\\]multiprocessing[/\\]spawn\.py$")
"""The innermost file of a process that waits for those that it spawned."""

_MEETING = re.compile(
    r", in (?:_?rendezvous|next_rendezvous|_create_\w*store|create_backend)$", re.M
)
"""In the traceback of a launcher that fails itself, before it has started any rank."""

_STATED = re.compile(
    r"\b[A-Z]\w*(?:Error|Exception)\b|^(?:[a-z]\w*\.)+(?:error|timeout): |\bError\(s\)"
    r"|has failed to |Address already in use"
)
"""Words for a failure that count also where other lines without progress follow."""

_RECOVERS = re.compile(
    r"(?i)\bretr(?:y|ies)|\bfall(?:s|ing)? ?back|\bskip|\bignor|\binstead\b|\bdefault|\bcontinu"
)
"""Words by which a job says that it continues after an error."""

_UNBROKEN = re.compile(r"before timing out|\.$")  # In the line of a timeout that is complete
_BROKEN = re.compile(r"\[Rank (\d+)\] *Watchdog caught collective *operation *timeout: WorkNCCL")
_LOCAL_RANK = re.compile(r"local_rank: (\d+)")


class LogReader:
    """Reads a log piece by piece.

    Args:
        source: The log's name, for people.
        place: Its index among the logs of a job.
    """

    def __init__(self, source: str, place: int = 0) -> None:
        self.source = source
        self._place = place
        self._rank = rank_of_file(source)
        self._occurrences: list[Occurrence] = []
        self._undecided: list[Occurrence] = []
        self._end: Occurrence | None = None
        """The last end of a process, until it is known whether another run follows."""
        self._work = Counter[str]()
        self._head: frozenset[str] = frozenset()
        """Shapes of the log's first lines, with which each run begins."""
        self._begins = False  # Whether such a line followed that end
        self._tracebacks = Tracebacks()
        self._scan = Scan()
        self._before: deque[str] = deque(maxlen=40)
        self._earlier = b""
        self._rest = b""
        self._offset = 0
        self._number = 1
        self._margin: re.Pattern[bytes] | None = None
        self._newest_first: list[bytes] = []
        """The pieces of a log whose newest line comes first, which is read when it is complete."""

    def feed(self, data: bytes) -> None:
        """Read a piece of any size."""
        if self._newest_first or (not self.size and is_newest_first(data)):
            self._newest_first.append(data)
            if self.size < _MAX_TURNED:
                return
            data, self._newest_first = b"".join(self._newest_first), []
        data = self._without_margin(data)
        if not self.size:
            data = unwrapped(data)
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

    def _without_margin(self, data: bytes) -> bytes:
        if not self.size:
            self._margin = margin_of(data)
        if self._margin is None:
            return data
        # The piece may begin within a line.
        start = data.find(b"\n") + 1 if self._rest and not self._rest.endswith(b"\n") else 0
        return data[:start] + self._margin.sub(b"", data[start:])

    @property
    def size(self) -> int:
        """Number of bytes that were read."""
        return self._offset + len(self._rest) + sum(map(len, self._newest_first))

    def close(self) -> list[Occurrence]:
        """Finish the log. Return everything that was found, in the order of the lines."""
        if self._newest_first:
            lines = b"".join(self._newest_first).removesuffix(b"\n").split(b"\n")
            found = read(self.source, [b"\n".join(reversed(lines))], self._place)
            end = len(lines) + 1
            return [
                replace(
                    each,
                    line=end - each.line,
                    last=end - each.last,
                    numbers=tuple(end - number for number in each.numbers),
                )
                for each in found
            ]
        if self._rest:
            self._head = self._head or beginning_of(self._rest[:_ENDS])
            self._block(self._rest.removesuffix(b"\n") + b"\n", is_end=True)
            self._rest = b""
        open_ = self._tracebacks.rest()
        if not open_:
            cut = cut_off([split_line(each) for each in self._past], self._number)
            open_ = [] if cut is None else [cut]
        for printed in open_:
            earlier = len(self._undecided)
            self._exception(printed)
            del self._undecided[:earlier]
            after = self._number - printed.last - 1
            for text in list(self._past)[-after:] if after > 0 else ():
                self._went_on(split_line(text))
        self._cut_report()
        found = corrected(sorted(self._occurrences, key=lambda each: each.order))
        self._was_done(found)
        self._count_behind(found)
        # Consequences of another failure say less than a line that reports one.
        reported = any(
            (each.final or each.uncaught)
            and (each.weight > Weight.CONSEQUENCE or each.weight == Weight.REMARK)
            for each in found
        )
        known = max((each.last for each in found if each.traceback), default=0)
        return found if reported else [*self._without_progress(found), *self._last_words(known)]

    def _cut_report(self) -> None:
        """Add the first failure of torchrun's report if the log is cut off before its status."""
        last = [split_line(each).text for each in list(self._past)[-5:]]
        roots = [at for at, text in enumerate(last) if _ROOT in text]
        named = [*filter(None, map(SUMMARY_RANK.match, last[roots[-1] :]))] if roots else []
        if named and not any(map(STATUS.search, last)):
            number = self._number - 1
            self._add(
                Occurrence(
                    failure=_NOTICED,
                    groups={},
                    text=named[-1][0].strip(),
                    source=self.source,
                    line=number,
                    last=number,
                    order=(self._place, self._offset),
                    rank=whole(named[-1][1]),
                    root=True,
                )
            )

    def _without_progress(self, found: list[Occurrence]) -> list[Occurrence]:
        """Take the last failure for the end of the job if no progress follows it.

        A script that catches an exception prints the data that it failed on, which is no work.
        """
        if any((each.final or each.uncaught) and each.weight >= Weight.WRAPPER for each in found):
            return found
        for at, each in reversed([*enumerate(found)]):
            if name_of(each) in ("launch", "deprecated-launcher") or self._is_followed(each):
                break
            if _is_serious(each):
                if any(_is_repeated(one, each) for one in found[:at]):
                    break
                ended = each.failure and likely(each, each.failure, Severity.WARNING)
                found[at] = ended or replace(each, final=True)
                break
        return found

    def _is_followed(self, failure: Occurrence) -> bool:
        """Return whether the log shows progress after a failure, or too many lines to tell."""
        texts = [split_line(text).text for text in self._behind(failure)]
        progress = any(is_step(text) or DONE.search(text) for text in texts)
        return progress or failure.last + len(texts) + 1 < self._number

    def _last_words(self, after: int) -> list[Occurrence]:
        """Return the last lines that report a failure, unless the job continues or had finished.

        Some of them mention a known cause without the form in which it reports itself.

        Args:
            after: The last line of the exceptions, which are known.
        """
        found: list[Occurrence] = []
        mentions = {
            each.line: likely(each, each.failure, Severity.WARNING)
            for each in self._occurrences
            if each.mention and each.failure
        }
        mentions |= {
            each.line: likely(each, _AT_LAST[name_of(each)], Severity.WARNING)
            for each in self._occurrences
            if name_of(each) in _AT_LAST
        }
        plain, steps, offset = 0, 0, self._offset
        for back, text in enumerate(reversed(list(self._past))):
            line, number = split_line(text), self._number - back - 1
            offset -= len(text.encode()) + 1
            steps += is_step(line.text)
            if number <= after or (plain >= WENT_ON and steps):
                break
            if DONE.search(line.text):
                return []
            if plain >= WENT_ON and not _is_stated(line.text):
                continue
            plain += is_plain(line.text) and WORDS.search(line.text) is not None
            if number in mentions:
                plain = 0
                found.append(mentions[number])
            elif tells_of_failure(line.text):
                plain = 0
                found.append(
                    Occurrence(
                        failure=_ENDS_WITH,
                        groups={},
                        text=line.text.strip(),
                        source=self.source,
                        line=number,
                        last=number,
                        order=(self._place, offset),
                        rank=self._rank if line.rank is None else line.rank,
                        time=self._time(text),
                        who=line.who,
                    )
                )
        return found

    def _count_behind(self, found: Sequence[Occurrence]) -> None:
        """Count the lines after each occurrence until the next end."""
        ends = [each for each in found if each.final or each.uncaught]
        end = max(ends, key=lambda each: each.last, default=None)
        goes_on = end and (self._number > end.last + _MANY or self._goes_on(end))
        next_ = self._number if goes_on else 0
        size, is_last = self._offset, True
        named = _named_later(found)
        for each in reversed(found):
            behind = size - each.order[1] - len(each.traceback)
            held_back = _may_hold_back(each) and behind < _HELD_BACK
            each.behind = 0 if held_back else max(0, next_ - each.last - 1)
            of_rank = each.rank is not None and each.weight not in ENDED
            if of_rank and ((not is_last and each.behind < _MANY) or id(each) in named):
                # Other ranks of its run ended long after it.
                each.behind = 0
            if each.final or each.uncaught:
                next_, size, is_last = each.line, each.order[1], False

    def _behind(self, end: Occurrence) -> list[str]:
        """Return the lines after an end, at most the last ones of the log."""
        past = list(self._past)
        return past[max(0, len(past) - (self._number - end.last - 1)) :]

    def _was_done(self, found: Sequence[Occurrence]) -> None:
        """Mark the last failure as followed if the log ends with steps and the job's normal end."""
        failed = [e for e in found if (e.final or e.uncaught) and e.weight >= Weight.REMARK]
        last = max(failed, key=lambda each: each.last, default=None)
        if last is None or _may_hold_back(last):
            return
        texts = [split_line(each).text for each in self._behind(last)]
        done = next((at for at, text in enumerate(texts) if DONE.search(text)), len(texts))
        clean = not any(is_step(each) or COMPLAINT.search(each) for each in texts[done:])
        last.followed |= done < len(texts) and sum(map(is_step, texts[:done])) >= WENT_ON and clean

    def _goes_on(self, end: Occurrence) -> bool:
        """Return whether the last lines after an end are those of a working job."""
        behind = self._behind(end)
        times = [when for each in behind if (when := time_of(each)) is not None]
        if end.time is not None and times and max(times) < end.time:
            # The log was joined from several ones, and the lines after it were written before.
            return False
        last = [split_line(each).text for each in behind]
        plain = sum(is_plain(each) or is_step(each) for each in last)
        complaints = sum(COMPLAINT.search(each) is not None for each in last)
        return plain > complaints or not complaints

    def _block(self, block: bytes, is_end: bool) -> None:
        """Read a piece of whole lines. Most of them are skipped by the scan."""
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
            # Line by line until nothing is pending.
            end = block.find(b"\n", at) + 1 or size
            self._raw_line(block[at:end], self._offset + at, number)
            at, number = end, number + 1
        self._skipped(block[max(at, size - _EARLIER) :])
        self._number = number + block.count(b"\n", at)
        self._offset += size

    def _skipped(self, lines: bytes) -> None:
        """Remember the last skipped lines, which may add to the next line."""
        if len(lines) >= _EARLIER:
            self._before.clear()
            self._earlier = b""
        self._earlier += lines

    @property
    def _past(self) -> deque[str]:
        """The lines before this one. They are decoded on demand."""
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
        """Read a line. Return whether it says anything about a failure."""
        line = split_line(text)
        belongs, ended = self._tracebacks.take(
            line, offset, number, self._time, lambda: [split_line(each).text for each in self._past]
        )
        for printed in ended:
            self._exception(printed)
        known = None if belongs else recognise(line.text)
        if not belongs and known is None and self._is_wrapped(line.text, number):
            return True
        if known is not None:
            failure, groups = known
            is_status = STATUS.search(text) is not None
            rank = self._rank_in_summary(text) if is_status else line.rank
            if rank is None and failure is _NAMED["nccl-timeout"] and self._past:
                broken = _BROKEN.search(split_line(self._past[-1]).text + line.text)
                rank = whole(broken[1]) if broken else None
            mention = is_mention(line.text, failure)
            self._add(
                Occurrence(
                    failure=failure,
                    groups=groups,
                    text=line.text.strip(),
                    source=self.source,
                    line=number,
                    last=number,
                    order=(self._place, offset),
                    rank=self._rank if rank is None else rank,
                    time=self._time(text),
                    final=not mention,
                    mention=mention,
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

    def _is_wrapped(self, text: str, number: int) -> bool:
        """Return whether a line is the rest of a timeout that a terminal broke, and add it."""
        last = self._occurrences[-1] if self._occurrences else None
        if last is None or number - last.last != 1 or _UNBROKEN.search(last.text):
            return False
        if name_of(last) not in ("nccl-timeout", "nccl-timeout-unnumbered"):
            return False
        joined = last.text + text.rstrip()
        groups = _NAMED["nccl-timeout"].match(joined)
        if groups is not None:
            last.failure, last.text, last.groups = _NAMED["nccl-timeout"], joined, groups
            last.last = number
        return groups is not None

    def _went_on(self, line: Line) -> None:
        """Read a line without failure. After enough of them, earlier exceptions were caught."""
        plain = is_plain(line.text) and not says_more(line.text)
        for each in self._undecided:
            each.lines_after += 1
            # A line without a rank may be of any rank, but not if others have one.
            same = each.rank in (line.rank, self._rank) and each.who == line.who
            # An uncaught exception of a Ray worker is raised again in the driver.
            each.plain_after += plain and (same or "pid=" in each.who)
            if each.plain_after >= WENT_ON or each.lines_after > PATIENCE:
                each.final = each.lines_after > PATIENCE and each.plain_after == 0
                each.lines_after = -1
        self._undecided = [each for each in self._undecided if each.lines_after >= 0]

    def _works(self, line: Line, number: int) -> None:
        """Decide by a plain line after an end whether another run works there.

        After a rank's exception, buffered lines and progress bars of other ranks may follow. So
        the beginning of another run has to be seen first.
        """
        if self._end is None:
            return
        text = line.text
        task = line.who.partition(",")[0]
        if task.startswith(TASK) and task != TASK + self._end.groups.get("task", task[len(TASK) :]):
            # Other tasks of the same run still work.
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
        """Add a complete traceback."""
        message = printed.message
        if not message and not printed.frames:
            return
        failure, groups = printed.known
        if not message and _waits_for_ranks(printed.text):
            failure = _NOTICED
        self._add(
            Occurrence(
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
                numbers=tuple(printed.numbers),
                context=printed.context,
                who=printed.who,
                bare=printed.of_thread or not (printed.frames and message),
                interleaved=printed.interleaved,
                uncaught=printed.ended_it and printed.frames and bool(message),
            ),
            decided=printed.uncaught and printed.frames,
        )

    def _survived(self, occurrence: Occurrence) -> None:
        """Mark exceptions that a process printed and survived, if this one ended it."""
        for each in self._undecided:
            printed = each.traceback and not each.uncaught and each.text != occurrence.text
            same = (each.rank, each.who) == (occurrence.rank, occurrence.who)
            if printed and each.plain_after and same:
                each.final, each.went_on = False, True

    def _add(self, occurrence: Occurrence, decided: bool = False) -> None:
        if occurrence.rank is None and "of" in occurrence.groups:
            occurrence.rank = whole(occurrence.groups["of"])
        if occurrence.uncaught and occurrence.weight == Weight.CAUSE:
            self._survived(occurrence)
        self._occurrences.append(occurrence)
        alone = occurrence.uncaught and occurrence.rank is None
        if alone or (occurrence.weight == Weight.WRAPPER and occurrence.final):
            self._end, self._begins = occurrence, False
            self._work.clear()
        if (
            not decided
            and occurrence.final
            and occurrence.weight not in (Weight.STOPPED, Weight.DECISIVE)
            and (
                occurrence.weight >= Weight.BARE
                or occurrence.weight == Weight.REMARK
                or occurrence.traceback
                or (occurrence.failure is not None and occurrence.failure.known.name in AT_THE_END)
            )
            and not STATUS.search(occurrence.text)
        ):
            self._undecided.append(occurrence)

    def _activity(self) -> str:
        """Return the last earlier line in which the job says what it does."""
        for each in reversed(self._past):
            text = split_line(each).text
            known = says_more(text) or recognise(text) is not None
            if WORDS.search(text) and is_plain(text) and not known:
                return text.strip()
        return ""

    def _rank_in_summary(self, text: str) -> int | None:
        """Return the rank whose exit torchrun reports, from some lines before the status."""
        for each in list(self._past)[-4:]:
            match = SUMMARY_RANK.match(split_line(each).text)
            if match:
                return whole(match[1])
        local = _LOCAL_RANK.search(text)
        return whole(local[1]) if local else None

    def _time(self, *texts: str) -> float | None:
        times = (time_of(each) for each in (*texts, *reversed(self._past)))
        return next((each for each in times if each is not None), None)


def read(source: str, chunks: Iterable[bytes], place: int = 0) -> list[Occurrence]:
    """Return all failures in a log, in the order of its lines."""
    reader = LogReader(source, place)
    for chunk in chunks:
        reader.feed(chunk)
    return reader.close()


def _named_later(found: Sequence[Occurrence]) -> set[int]:
    """Return the ids of exceptions whose rank a launcher reports later in the same run."""
    later, ranks = set[int](), set[int | None]()
    for each in reversed(found):
        if STATUS.search(each.text):
            ranks.add(each.rank)
        elif each.uncaught and each.rank in ranks:
            later.add(id(each))
            ranks.remove(each.rank)
        elif each.failure is not None and each.failure.known.name == "launch":
            ranks.clear()
    return later


def _is_repeated(earlier: Occurrence, later: Occurrence) -> bool:
    """Return whether the job survived a failure before, as other ranks do not print it later."""
    apart = later.line - earlier.last >= REMARKS
    return apart and shape_of(earlier.text) == shape_of(later.text)


def _is_stated(text: str) -> bool:
    """Return whether a line names an exception that the job does not say to handle."""
    return _STATED.search(text) is not None and not _RECOVERS.search(text)


def _is_serious(each: Occurrence) -> bool:
    """Return whether an occurrence may have ended its process, other than by Ctrl-C."""
    stated = each.weight == Weight.REMARK and not _RECOVERS.search(each.text)
    serious = each.weight >= Weight.CONSEQUENCE or stated
    survived = each.ignored or each.is_warning or each.warned
    return serious and not survived and not each.text.startswith("KeyboardInterrupt")


def _waits_for_ranks(traceback: str) -> bool:
    """Return whether a traceback is of a process that reports the failure of its ranks."""
    if LAUNCHER.search(traceback):
        return _MEETING.search(traceback) is None
    frames = [*filter(None, map(FRAME.match, traceback.splitlines()))]
    spawns = bool(frames) and _SPAWNING.search(frames[-1]["path"]) is not None
    return spawns and frames[-1]["name"] != "_wrap"


def _may_hold_back(occurrence: Occurrence) -> bool:
    """Return whether the process may print buffered output after this exception."""
    return bool(occurrence.traceback) and not _UNSTARTED.search(occurrence.traceback)
