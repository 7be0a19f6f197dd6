"""``--notify``: tell a webhook or a command what a person who is not looking should know.

Each target has a thread, so that none waits for another, and the job for none of them: at the end
it is waited for a second.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ddpdoctor import __version__
from ddpdoctor.core.finding import Finding, Severity, to_record
from ddpdoctor.core.formatting import json_text, shown
from ddpdoctor.core.job import Command
from ddpdoctor.core.relations import STANDSTILL
from ddpdoctor.render import json_lines, reporter
from ddpdoctor.run.reported import Event, Reported, in_words
from ddpdoctor.supervise import processes
from ddpdoctor.system.proc import pause, until

if TYPE_CHECKING:
    from ddpdoctor.run.snapshot import Run

TIMEOUT = 10.0
"""Seconds that a target has for one message."""

PAUSE = 1.0
"""Seconds before the second, and last, attempt."""

FAREWELL = 1.0
"""Most seconds that the end of the run waits for what is not sent yet."""

_SHELL = '(eval "$1") >/dev/null 2>&1; echo $?'
"""Prints the status: as a child's it could be taken by the supervisor, which reaps all orphans."""


class Notifications:
    """What the targets of ``--notify`` are sent.

    Findings at error level, and the withdrawal of one; the end of the job, however it ended.

    Args:
        command: The job, with its targets.
        say: Says, from another thread, that a target cannot be reached.
    """

    def __init__(self, command: Command, say: Callable[[str], None]) -> None:
        self._script = command.script
        self._host = socket.gethostname()
        self._targets = [_Target(each, say) for each in command.own.notify]

    @property
    def pids(self) -> set[int]:
        """The commands that run now, and what they started: none of the job's."""
        running = {each.pid for each in self._targets if each.pid}
        return running | processes.below(running) if running else running

    def news(self, run: Run, events: Iterable[Event]) -> None:
        """Send what was just reported, and what of it was withdrawn."""
        for event in events if self._targets else ():
            finding = event.finding if isinstance(event, Reported) else event.reported.finding
            if finding.severity < Severity.ERROR:
                continue
            if isinstance(event, Reported):
                text = f"error {finding.code}: {finding.message}"
                text += f"\nfix: {finding.fix}" if finding.fix else ""
                self._send(_kind(finding), run, text, finding=to_record(finding))
            else:
                self._send("withdrawn", run, in_words(event), finding=to_record(finding))

    def end(self, run: Run | None, status: int, found: list[Finding]) -> None:
        """Send that the job ended, and wait a little for all that is not sent yet."""
        if not self._targets:
            return
        how = next(reporter.summary_lines(run)) if run is not None else f"exit status {status}"
        self._send("end", run, f"{how}; {reporter.findings_count(found)}", status=status)
        deadline = time.monotonic() + FAREWELL
        for target in self._targets:
            target.close(max(0.0, deadline - time.monotonic()))

    def _send(self, event: str, run: Run | None, text: str, **more: Any) -> None:
        head = json_lines.head(run)
        if head["time"] is None:
            head["time"] = round(time.time(), 3)
        place = {"event": event, "host": self._host, "script": self._script}
        said = shown(f"{self._script} on {self._host}: {text}", "\n")
        for target in self._targets:
            target.put({**head, **place, "text": said, "finding": None, "status": None, **more})


def _kind(finding: Finding) -> str:
    if finding.code.startswith("DDP9"):
        return "crash"
    return "hang" if STANDSTILL in finding.subjects else "finding"


class _Target:
    """One webhook or command, and its thread."""

    def __init__(self, target: str, say: Callable[[str], None]) -> None:
        self._target = target
        self._say = say
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, name="ddpdoctor-notify", daemon=True)
        self._failed = False
        self.pid = 0
        """Of the command that runs now."""

    def put(self, message: dict[str, Any]) -> None:
        """Send a message, some time; does not wait."""
        self._messages.put(message)
        if self._thread.ident is None:
            self._thread.start()

    def close(self, seconds: float) -> None:
        """Wait at most so long until all is sent."""
        self._messages.put(None)
        if self._thread.ident is not None:
            until(lambda: not self._thread.is_alive(), seconds)

    def _serve(self) -> None:
        while (message := self._messages.get()) is not None:
            trouble = self._attempt(message)
            if trouble:
                pause(PAUSE)
                trouble = self._attempt(message)
            if trouble and not self._failed:
                self._failed = True
                self._say(f"warning: --notify {self._name}: {trouble}; the job goes on")

    @property
    def _name(self) -> str:
        """The target without what is secret in it, as the path of a webhook is."""
        if is_url(self._target):
            return urlsplit(self._target).hostname or "webhook"
        return os.path.basename(self._target.split()[0])

    def _attempt(self, message: dict[str, Any]) -> str:
        """Send it; why that failed, or nothing."""
        try:
            return self._post(message) if is_url(self._target) else self._call(message)
        except Exception as error:
            return str(getattr(error, "reason", "")) or str(error) or type(error).__name__

    def _post(self, message: dict[str, Any]) -> str:
        # Takes a third as long to import as the program to start.
        from urllib.error import HTTPError
        from urllib.request import Request, urlopen

        text = message["text"]
        for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
            # As Slack asks for; else a text might address a whole channel.
            text = text.replace(character, entity)
        body = json_text({**message, "text": text}).encode()
        headers = {"Content-Type": "application/json", "User-Agent": f"ddpdoctor/{__version__}"}
        try:
            urlopen(Request(self._target, body, headers), timeout=TIMEOUT).close()
        except HTTPError as error:
            error.close()
            return f"HTTP {error.code} {error.reason}"
        return ""

    def _call(self, message: dict[str, Any]) -> str:
        child = subprocess.Popen(
            ["/bin/sh", "-c", _SHELL, "sh", self._target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = child.pid
        try:
            status = child.communicate(json_text(message).encode() + b"\n", TIMEOUT)[0].strip()
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return f"not over after {TIMEOUT:g} s, and ended"
        finally:
            self.pid = 0
        return "" if status == b"0" else f"exit status {status.decode() or 'unknown'}"


def is_url(target: str) -> bool:
    """Whether a target is a webhook; else it is a command."""
    return target.startswith(("http://", "https://"))
