"""What a line that waits waits for: read off its code and the standard library's frames."""

from __future__ import annotations

import re

from ddpdoctor.analysis.profiles import Spot
from ddpdoctor.stacks.code import code_of

_FILES = {
    "subprocess.py": "a process that it started",
    "socket.py": "the network",
    "ssl.py": "the network",
    "client.py": "the network",
    "queue.py": "a queue",
    "queues.py": "a queue",
    "connection.py": "a queue",
    "threading.py": "a lock or another thread",
}
"""What a function of these files of the standard library waits for."""

_WORDS = (
    (re.compile(r"\bsleep\("), "sleep"),
    (re.compile(r"lock\b|\.acquire\(|semaphore", re.IGNORECASE), "a lock"),
    (re.compile(r"\.join\("), "a lock or another thread"),
    (re.compile(r"subprocess|\.communicate\(|\bsystem\(|check_(?:call|output)"), "process"),
    (re.compile(r"\bfsync\(|\.flush\("), "the disk"),
    (re.compile(r"queue", re.IGNORECASE), "a queue"),
    (re.compile(r"\.?read(?:line|lines|into)?\(|\bopen\(|\bload\("), "a file"),
)
"""The same, by what stands in the line."""

_SOCKET = re.compile(r"\.(?:recv(?:from|msg)?(?:_into)?|sendall|accept|connect)\(|urlopen\(")
"""Calls that wait in native code, so that no file of the standard library is seen."""

ADVICE = {
    "sleep": "Take the pause out of the training loop: retry in a thread, or before training.",
    "a lock": "Find who holds the lock: another process or thread. Take it less often, or not in "
    "every step.",
    "a lock or another thread": "Let the thread that is waited for work ahead, or do not wait for "
    "it in every step.",
    "a queue": "Let what fills the queue work ahead: more workers, a longer queue.",
    "a process that it started": "Start the process once, or let it run while training goes on.",
    "the network": "Fetch ahead of time, in a thread, or once before training.",
    "a file": "Read ahead: in loader workers or a thread, in larger pieces, from a faster disk.",
    "the disk": "Read and write less in the loop: every hundredth step, in a thread, or on a "
    "faster disk.",
}
"""What to do about such a wait."""


def awaited(place: Spot) -> str:
    """What a line waits for, as it and the function that it is in show; empty if they do not."""
    text = code_of([place.frame], place.taken).get(place.frame, "")
    for pattern, what in _WORDS:
        if pattern.search(text):
            return "a process that it started" if what == "process" else what
    files = [stack.waits[0] for stack in place.stacks]
    known = next((_FILES[each] for each in files if each in _FILES), "")
    return known or ("the network" if _SOCKET.search(text) else "")
