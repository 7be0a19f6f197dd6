"""Pass the job's stderr through: every byte unchanged, ddpdoctor's own lines between its lines."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable

from ddpdoctor.system.proc import pause, readable, until

TAIL = 1 << 20
"""Bytes of the job's stderr that are kept."""

_OUT = 2
_CHUNK = 1 << 16
_PATIENCE = 1.0
"""Seconds that a line of ours waits for the job to finish its line, in a pipe."""


class Passthrough:
    """Carries the job's stderr to ours.

    Where our stderr is a terminal, the job gets one, too (a pseudo-terminal), so progress bars and
    ``isatty`` stay as they were; else a pipe. One thread does all the writing: a reader that stops
    reading blocks that thread, and through it the job as it would without us, but nothing else.

    Args:
        direct: Where our stderr is a terminal, the job gets that itself, and nothing is read.
    """

    def __init__(self, direct: bool = False) -> None:
        self._direct = direct
        self._terminal = os.isatty(_OUT)
        self._stdout_shares = self._terminal and os.isatty(1)
        self._lock = threading.Lock()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self.carried = 0
        """Bytes that the job has written so far."""
        self._pending: deque[tuple[float, bytes]] = deque()
        self._line_start = True
        self._drain = threading.Event()
        self._drained = threading.Event()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._source: int | None
        self._source, self.child_end = self._open()
        self.resize()
        self._thread = threading.Thread(target=self._pump, name="ddpdoctor-stderr", daemon=True)

    def _open(self) -> tuple[int | None, int]:
        if self._terminal and self._direct:
            return None, os.dup(_OUT)
        if self._terminal:
            try:
                source, child_end = os.openpty()
                # The real terminal translates newlines; doing it here as well would do it twice.
                tty.setraw(child_end)
                return source, child_end
            except OSError:
                pass
        return os.pipe()

    def resize(self) -> None:
        """Give the job's terminal the size of ours; for SIGWINCH."""
        source = self._source
        if self._terminal and source is not None:
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(_OUT, termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(source, termios.TIOCSWINSZ, size)

    def start(self) -> None:
        """Begin to carry; call it once the child has its end."""
        os.close(self.child_end)
        self._thread.start()

    def finish(self, timeout: float | None) -> None:
        """Wait until all that was written so far is out, for at most ``timeout`` seconds.

        None waits as long as the reader needs, which is as long as the job itself would have.
        """
        if self._thread.is_alive():
            self._drained.clear()
            self._drain.set()
            self._wake()
            over = float("inf") if timeout is None else timeout
            until(lambda: self._drained.is_set() or not self._thread.is_alive(), over)
        if not self._thread.is_alive():
            # There was no job, or a fault of ours: only lines of ours wait.
            while self._pending:
                self._write(self._pending.popleft()[1])

    @property
    def tail(self) -> bytes:
        """The last megabyte that the job wrote."""
        with self._lock:
            return b"".join(self._tail)

    def last(self, size: int) -> bytes:
        """The last ``size`` bytes that the job wrote."""
        chunks: list[bytes] = []
        with self._lock:
            for chunk in reversed(self._tail):
                if size <= 0:
                    break
                chunks.append(chunk[-size:])
                size -= len(chunk)
        return b"".join(reversed(chunks))

    def say(self, text: str) -> None:
        """Have lines of ours written, never in the middle of one of the job's; does not wait."""
        self._pending.append((time.monotonic(), text.encode("utf-8", "replace")))
        self._wake()

    def _wake(self) -> None:
        # A full pipe means that it will wake up anyway.
        with contextlib.suppress(OSError):
            os.write(self._wake_writer, b"w")

    # -- the writing thread

    def _pump(self) -> None:
        try:
            self._carry_all()
        except Exception:
            # Whatever fails here, the job must not wait for a reader.
            while self._source is not None:
                if readable([self._source], _PATIENCE / 4):
                    self._take(self._write)
                elif self._drain.is_set():
                    self._drained.set()
            self._drained.set()

    def _carry_all(self) -> None:
        while True:
            sources = [self._wake_reader]
            if self._source is not None:
                sources.append(self._source)
            wait = _PATIENCE / 4 if self._pending or self._drain.is_set() else None
            ready = readable(sources, wait)
            if self._wake_reader in ready:
                os.read(self._wake_reader, _CHUNK)
            carried = self._source in ready and self._take(self._carry)
            draining = self._drain.is_set() and not carried and not self._more()
            self._release(force=draining)
            if draining and not self._pending:
                self._drain.clear()
                self._drained.set()

    def _more(self) -> bool:
        """Whether the job has written something that was not read yet."""
        return self._source is not None and bool(readable([self._source], 0))

    def _take(self, carry: Callable[[bytes], bool]) -> bool:
        """Read a chunk and pass it on; False at the end of the job's stderr."""
        assert self._source is not None
        try:
            chunk = os.read(self._source, _CHUNK)
        except OSError:
            chunk = b""
        try:
            if chunk and carry(chunk):
                return True
        except Exception:
            self._write(chunk)
            raise
        # Its end; or our reader is gone, which the job learns as it would without us.
        source, self._source = self._source, None
        os.close(source)
        return False

    def _carry(self, chunk: bytes) -> bool:
        with self._lock:
            self._tail.append(chunk)
            self._tail_size += len(chunk)
            self.carried += len(chunk)
            while self._tail_size - len(self._tail[0]) >= TAIL:
                self._tail_size -= len(self._tail.popleft())
        head, newline, rest = chunk.rpartition(b"\n")
        if self._pending and newline:
            if not self._write(head + newline):
                return False
            self._line_start = True
            self._release()
            chunk = rest
        if chunk:
            self._line_start = chunk.endswith(b"\n")
            return self._write(chunk)
        return True

    def _release(self, force: bool = False) -> None:
        """Write the waiting lines of ours if this is a place for them."""
        if not self._pending:
            return
        waited = time.monotonic() - self._pending[0][0]
        if self._terminal:
            self._write(self._fresh_line())
        elif not self._line_start:
            if not force and waited < _PATIENCE:
                return
            self._write(b"\n")
        self._line_start = True
        while self._pending:
            self._write(self._pending.popleft()[1])

    def _fresh_line(self) -> bytes:
        """What moves a terminal's cursor to an empty line, wherever it is now.

        A line's width of blanks wraps exactly if the cursor was not at the left edge; stdout may
        have moved it there without our knowing.
        """
        if not self._stdout_shares and self._line_start:
            return b""
        try:
            size = fcntl.ioctl(_OUT, termios.TIOCGWINSZ, bytes(8))
            columns = struct.unpack("HHHH", size)[1]
        except OSError:
            columns = 0
        return b" " * (columns - 1) + b"\r" if columns > 1 else b"\n"

    def _write(self, data: bytes) -> bool:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(_OUT, view) :]
            except BlockingIOError:
                # The reader is slow, and has made this end non-blocking.
                pause(0.01)
            except OSError:
                return False
        return True
