"""Sample the training thread's stack when the supervisor asks for it.

It asks all ranks of its node when one of them is slow, and a rule compares the samples. A thread of
ours takes a few dozen samples with ``sys._current_frames()``, without signals, and ends. A sample
walks up the stack in 10 to 40 us with the GIL held. It keeps code and line but no frame, so it
keeps no tensor alive. The kernel's counters of the thread are recorded with the samples: lines show
where time is spent, counters show why.

If native code holds the GIL, a sample waits until it is released, at the line that called the code.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections import Counter
from types import CodeType
from typing import Any

from ddpdoctor.core.user_code import user_file
from ddpdoctor.probe.runtime import hot
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.shield import background
from ddpdoctor.run.mapped import MAX_PROFILES, PROFILE, RequestReader
from ddpdoctor.run.records.base import CodeFrame
from ddpdoctor.run.records.training import ProfileRecord, SampledStack

SAMPLES = 48  # number of samples in a profile
MIN_INTERVAL, MAX_INTERVAL = 0.03, 1.0  # limits of the mean time between samples, in seconds
SPANNED_STEPS = 6  # number of steps that a profile should span
MAX_ATTEMPTS = 3  # maximum number of series until a step ends during one
STEP_TIMEOUT = 60.0  # seconds that sampling waits for the end of a step, such as between two epochs
MAX_FRAMES = 32  # maximum number of the user's innermost frames in a sample
MAX_WALKED_FRAMES = 400  # maximum number of frames walked
MAX_CHILDREN = 64  # maximum number of child processes measured
_GOLDEN = 0.6180339887498949

_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 10_000_000

_Line = tuple[CodeType, int]
_Sample = tuple[tuple[_Line, ...], CodeType, str, int]
"""The user's frames, innermost first, the innermost frame, the thread's state, and the phase."""


class Sampler:
    """Take one profile of the training thread, in response to the supervisor's request."""

    def __init__(self, state: RankState, number: int) -> None:
        self._state = state
        self._number = number
        self._thread = state.tracker.thread
        self._task = f"/proc/self/task/{state.tracker.native}"
        self._stop = threading.Event()
        self._writing = threading.Lock()
        self._samples: list[_Sample] = []
        self._known: dict[int, tuple[CodeType, bool]] = {}
        self._before: dict[str, int] = {}
        self._children: dict[int, tuple[int, int]] = {}
        self._cost = 0
        self._collects = hot.deferring(self._on_collection)
        self._collecting = 0
        self._collected = 0
        self.over = False
        self.threads = 0  # number of threads that torch uses for one operation; 0 if unknown

    def run(self) -> None:
        """Take and record the samples in a separate thread."""
        interval = SPANNED_STEPS * self._state.tracker.last_total / 1e9 / SAMPLES
        interval = min(max(interval, MIN_INTERVAL), MAX_INTERVAL)
        status = -1
        with contextlib.suppress(OSError):
            status = os.open(f"{self._task}/stat", os.O_RDONLY | os.O_CLOEXEC)
        gc.callbacks.append(self._collects)
        try:
            for _ in range(MAX_ATTEMPTS):
                # Wait for the end of a step, since samples of a pause do not explain the steps.
                tracker = self._state.tracker
                steps, until = tracker.steps, time.monotonic() + STEP_TIMEOUT
                while tracker.steps == steps and time.monotonic() < until:
                    if self._stop.wait(interval):
                        break
                if self._take(status, interval):
                    break
        finally:
            if status >= 0:
                os.close(status)
            self.finish()

    def _take(self, status: int, interval: float) -> bool:
        """Take all samples. Return False if no step ended meanwhile."""
        self._before, self._children = self._counters(), _children()
        self._samples = []
        self._collected = 0
        for number in range(SAMPLES):
            # A factor of 0.5 to 1.5 that uses no random number and does not align with steps.
            if self._stop.wait(interval * (0.5 + number * _GOLDEN % 1.0)) or self._sample(status):
                return True
        return self._state.tracker.steps > self._before["steps"] + 1

    def finish(self) -> None:
        """Record the samples once, in the thread that gets here first."""
        self._stop.set()
        if not self._writing.acquire(blocking=False):
            return
        self.over = True
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._collects)
        self._state.budget.spend(self._cost)
        self._state.recorder.add(self._record())

    def _sample(self, status: int) -> bool:
        """Take one sample. Return whether the thread is gone."""
        began = clock()
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return True
        innermost = frame.f_code
        phase = self._state.tracker.phase
        found: list[_Line] = []
        known = self._known
        for _ in range(MAX_WALKED_FRAMES):
            if frame is None or len(found) >= MAX_FRAMES:
                break
            code = frame.f_code
            mine = known.get(id(code))
            if mine is None:
                mine = known[id(code)] = code, user_file(code.co_filename)
            if mine[1]:
                found.append((code, frame.f_lineno or 0))
            frame = frame.f_back
        lines = tuple(found)
        # A reference to the frame would keep tensors alive.
        del frame
        # Reading the file releases the GIL, so a thread that waits only for the GIL appears to run.
        self._samples.append((lines, innermost, _letter(status), phase))
        self._cost += clock() - began
        return False

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        now = time.perf_counter_ns()
        if phase == "start":
            self._collecting = now
        elif self._collecting:
            self._collected += now - self._collecting
            self._collecting = 0

    def _counters(self) -> dict[str, int]:
        """Return the kernel's counters of the training thread, as far as they can be read."""
        counted = {"wall": time.perf_counter_ns(), "steps": self._state.tracker.steps}
        with contextlib.suppress(OSError, ValueError, IndexError):
            ran, waited = _numbers(f"{self._task}/schedstat")[:2]
            counted |= {"ran": ran, "waited": waited}
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = _read(f"{self._task}/stat").rpartition(b")")[2].split()
            counted |= {
                "minor": int(fields[7]),
                "major": int(fields[9]),
                "system": int(fields[12]) * _TICK,
            }
        with contextlib.suppress(OSError, ValueError):
            words = dict(line.split(b": ") for line in _read(f"{self._task}/io").splitlines())
            counted |= {"characters": int(words[b"rchar"]) + int(words[b"wchar"])}
            counted |= {"disk": int(words[b"read_bytes"]) + int(words[b"write_bytes"])}
        return counted

    def _record(self) -> ProfileRecord:
        after, children = self._counters(), _children()
        counted = {
            name: max(after[name] - before, 0)
            for name, before in self._before.items()
            if name in after
        }
        # Workers of a new epoch are new processes, so count each separately.
        ran, waited = (
            sum(each[at] - self._children.get(pid, (0, 0))[at] for pid, each in children.items())
            for at in (0, 1)
        )
        affinity: tuple[int, ...] = ()
        with contextlib.suppress(OSError, AttributeError):
            affinity = tuple(sorted(os.sched_getaffinity(self._state.tracker.native)))
        paths = {
            each: os.path.abspath(each)
            for each in {code.co_filename for sample in self._samples for code, _ in sample[0]}
        }
        stacks: Counter[tuple[tuple[CodeFrame, ...], tuple[str, str], str, int]] = Counter()
        for lines, innermost, letter, phase in self._samples:
            frames = tuple(
                CodeFrame(paths[code.co_filename], line, code.co_name) for code, line in lines
            )
            waits = (os.path.basename(innermost.co_filename), innermost.co_name)
            stacks[frames, waits, letter, phase] += 1
        return ProfileRecord(
            time=time.time_ns(),
            asked=self._number,
            step=self._state.tracker.steps,
            samples=len(self._samples),
            **counted,
            children=min(len(self._children), len(children)),
            children_ran=max(ran, 0),
            children_waited=max(waited, 0),
            gc=self._collected,
            affinity=affinity,
            threads=self.threads,
            cost=self._cost,
            stacks=tuple(SampledStack(count, *key) for key, count in stacks.items()),
        )


def _letter(status: int) -> str:
    """Return the state of a thread from its ``stat``, or "" if that cannot be read."""
    try:
        # The thread's name before the state may contain a parenthesis.
        return os.pread(status, 128, 0).rpartition(b") ")[2][:1].decode("ascii", "replace")
    except OSError:
        return ""


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(4096)


def _numbers(path: str) -> list[int]:
    return [int(each) for each in _read(path).split()]


def child_pids() -> list[int]:
    """Return the child processes of this process."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for task in os.listdir("/proc/self/task"):
            found += _numbers(f"/proc/self/task/{task}/children")
    return found[:MAX_CHILDREN]


def _children() -> dict[int, tuple[int, int]]:
    """Return how long each child process ran and waited for a core, by pid."""
    counts: dict[int, tuple[int, int]] = {}
    for child in child_pids():
        with contextlib.suppress(OSError, ValueError):
            ran, waited = _numbers(f"/proc/{child}/schedstat")[:2]
            counts[child] = ran, waited
    return counts


class Profiles(Observer):
    """Take a profile whenever the supervisor asks for one.

    Raises:
        OSError: The run directory has no file of requests.
        ValueError: The file of requests is invalid.
    """

    def __init__(self, state: RankState, directory: str) -> None:
        super().__init__(state)
        self._asked = RequestReader(directory, PROFILE)
        self._taken = 0
        self._running: Sampler | None = None

    def look(self) -> None:
        """Begin a profile if the supervisor requested one. Called in the writing thread."""
        number = self._asked.news()
        idle = self._running is None or self._running.over
        if number and idle and self._taken < MAX_PROFILES and self.state.budget.enabled:
            self._taken += 1
            self._running = Sampler(self.state, number)
            self.wake("step_ended")
            background("profile", self._running.run).start()

    def step_ended(self, optimizer: Any, number: int) -> None:
        """Read the number of torch's threads, which depends on the calling thread."""
        self.rest("step_ended")
        if self._running is not None and not self._running.threads:
            self._running.threads = int(sys.modules["torch"].get_num_threads())

    def rank_ends(self) -> None:
        """Record the samples taken so far."""
        if self._running is not None:
            self._running.finish()
