"""``--notify`` and ``--log-to``: send findings, or the run, to services while the job runs.

Each target of ``--notify`` has its own thread, and the clients of experiment trackers have a
process. So neither other targets nor the job wait for them. At its end, the run does for a while.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ddpdoctor import __version__
from ddpdoctor.core.commands import in_own_process
from ddpdoctor.core.finding import Finding, Severity, to_record
from ddpdoctor.core.formatting import json_text, shown
from ddpdoctor.core.job import Command
from ddpdoctor.core.relations import STANDSTILL
from ddpdoctor.render import json_lines, reporter
from ddpdoctor.run.reported import Event, Reported, in_words
from ddpdoctor.supervise import processes
from ddpdoctor.system.proc import pause, readable, until

if TYPE_CHECKING:
    from ddpdoctor.run.snapshot import Run

SEND_TIMEOUT = 10.0  # Seconds for a target to accept a message
RETRY_DELAY = 1.0  # Seconds before the second and last attempt
LAST_TIMEOUT = 1.0  # Maximum seconds to wait for unsent messages at the end of the run

_SHELL = '(eval "$1") >/dev/null 2>&1; echo $?'
"""Prints the exit status, because the supervisor may reap the child before `subprocess` does."""


class Notifications:
    """Send findings at error level, their withdrawal, and the end of the job to the targets.

    ``say`` prints the error if a target cannot be reached. It is called in another thread.
    """

    def __init__(self, command: Command, say: Callable[[str], None]) -> None:
        self._script = command.script
        self._host = socket.gethostname()
        self._targets = [_Target(each, say) for each in command.own.notify]

    @property
    def pids(self) -> set[int]:
        """The pids of running commands and their descendants, which do not belong to the job."""
        running = {each.pid for each in self._targets if each.pid}
        return running | processes.below(running) if running else running

    def news(self, run: Run | None, events: Iterable[Event]) -> None:
        """Send findings that were just reported or withdrawn."""
        for event in events if self._targets else ():
            finding = event.finding if isinstance(event, Reported) else event.reported.finding
            if finding.severity < Severity.ERROR:
                continue
            if isinstance(event, Reported):
                text = f"error {finding.code}: {finding.message}"
                text += f"\nfix: {finding.fix}" if finding.fix else ""
                kind = "hang" if STANDSTILL in finding.subjects else "finding"
                kind = "crash" if finding.code.startswith("DDP9") else kind
                self._send(kind, run, text, finding=to_record(finding))
            else:
                self._send("withdrawn", run, in_words(event), finding=to_record(finding))

    def end(self, run: Run | None, status: int, found: list[Finding]) -> None:
        """Send the end of the job, and wait up to `LAST_TIMEOUT` for unsent messages."""
        if not self._targets:
            return
        how = next(reporter.summary_lines(run)) if run is not None else f"exit status {status}"
        self._send("end", run, f"{how}; {reporter.findings_count(found)}", status=status)
        self.close(LAST_TIMEOUT)

    def close(self, seconds: float) -> None:
        """Wait up to ``seconds`` for unsent messages."""
        deadline = time.monotonic() + seconds
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


class _Target:
    """One webhook or command, and its thread."""

    def __init__(self, target: str, say: Callable[[str], None]) -> None:
        self._target = target
        self._say = say
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, name="ddpdoctor-notify", daemon=True)
        self._failed = False
        self.pid = 0  # The pid of the running command. 0 for none

    def put(self, message: dict[str, Any]) -> None:
        """Queue a message without waiting."""
        self._messages.put(message)
        if self._thread.ident is None:
            self._thread.start()

    def close(self, seconds: float) -> None:
        """Wait up to ``seconds`` until all messages are sent."""
        self._messages.put(None)
        if self._thread.ident is not None:
            until(lambda: not self._thread.is_alive(), seconds)

    def _serve(self) -> None:
        while (message := self._messages.get()) is not None:
            trouble = self._attempt(message)
            if trouble:
                pause(RETRY_DELAY)
                trouble = self._attempt(message)
            if trouble and not self._failed:
                self._failed = True
                if is_url(self._target):
                    # The path of a webhook is secret.
                    name = urlsplit(self._target).hostname or "webhook"
                else:
                    name = os.path.basename(self._target.split()[0])
                self._say(f"warning: --notify {name}: {trouble}; the job goes on")

    def _attempt(self, message: dict[str, Any]) -> str:
        """Send a message. Return the reason for a failure, or an empty string."""
        try:
            return self._post(message) if is_url(self._target) else self._call(message)
        except Exception as error:
            return str(getattr(error, "reason", "")) or str(error) or type(error).__name__

    def _post(self, message: dict[str, Any]) -> str:
        # This import takes a third of the program's start.
        from urllib.error import HTTPError
        from urllib.request import Request, urlopen

        text = message["text"]
        for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
            # Slack requires this. Otherwise a text could notify a whole channel.
            text = text.replace(character, entity)
        body = json_text({**message, "text": text}).encode()
        headers = {"Content-Type": "application/json", "User-Agent": f"ddpdoctor/{__version__}"}
        try:
            urlopen(Request(self._target, body, headers), timeout=SEND_TIMEOUT).close()
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
            status = child.communicate(json_text(message).encode() + b"\n", SEND_TIMEOUT)[0].strip()
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return f"not over after {SEND_TIMEOUT:g} s, and ended"
        finally:
            self.pid = 0
        return "" if status == b"0" else f"exit status {status.decode() or 'unknown'}"


def is_url(target: str) -> bool:
    """Return whether a target is a webhook, not a command."""
    return target.startswith(("http://", "https://"))


# -- the process that sends the run to experiment trackers


TRACKERS_TIMEOUT = 15.0  # Seconds to send the end of the run
TRACKERS_LOG = "trackers.log"  # File in the run directory with the clients' output
_RANKS = "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"


def is_first(environ: Mapping[str, str]) -> bool:
    """Return whether this is the first of the supervisors that srun or mpirun has started."""
    return all(environ.get(name, "0") == "0" for name in _RANKS)


class Tracking:
    """Starts and ends the process that sends the run.

    The trackers' clients may hang, crash, or print. None of that reaches the job.
    """

    def __init__(self, directory: Path, targets: Sequence[str], say: Callable[[str], None]) -> None:
        self._say = say
        self._output = b""
        with open(directory / TRACKERS_LOG, "wb", buffering=0) as log:
            self._process = subprocess.Popen(
                in_own_process(str(directory), *targets, module="ddpdoctor.trackers.follow"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._reading = self._process.stdout.fileno()
        os.set_blocking(self._reading, False)

    @property
    def pid(self) -> int:
        """The pid of the tracker's process, which is not part of the job."""
        return self._process.pid

    def poll(self) -> bool:
        """Print the messages of the process. Return False once it has ended."""
        try:
            data = os.read(self._reading, 1 << 16)
        except BlockingIOError:
            return True
        *lines, self._output = (self._output + data).split(b"\n")
        for line in lines:
            self._say(line.decode(errors="replace"))
        return data != b""

    def end(self) -> None:
        """Let the process send the end of the run, and end it if that takes too long."""
        process = self._process
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        deadline = time.monotonic() + TRACKERS_TIMEOUT
        alive = True
        while alive and (left := deadline - time.monotonic()) > 0:
            readable([self._reading], min(left, 0.2))
            alive = self.poll()
        if alive:
            self._say(
                f"warning: --log-to: not all was sent within {TRACKERS_TIMEOUT:g} s; ending it"
            )
            # Clients start helpers, some in a separate session.
            helpers = processes.Job("", frozenset({process.pid})).processes()
            process.kill()
            for each in helpers:
                processes.send(each, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
