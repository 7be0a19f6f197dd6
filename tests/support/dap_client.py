"""Microsoft's test client of the Debug Adapter Protocol, driven from Python."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.conftest import LIMIT

DAP = Path(__file__).parents[1] / "dap"


class DapError(Exception):
    """The adapter refused, did not answer, or is gone."""


class DapUnavailable(Exception):
    """The client cannot be installed here; the message says why."""


def install_modules(directory: Path) -> Path:
    """Install the client's packages into ``directory``, and return its ``node_modules``."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise DapUnavailable("node and npm are not both on PATH")
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(DAP / name, directory / name)
    try:
        done = subprocess.run(
            [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DapUnavailable(f"npm ci: {error}") from error
    modules = directory / "node_modules"
    if done.returncode != 0 or not modules.is_dir():
        raise DapUnavailable(f"npm ci exited with {done.returncode}: {done.stdout.strip()}")
    return modules


@dataclass(frozen=True)
class Frame:
    """One frame of a stopped thread."""

    id: int
    name: str
    path: str
    line: int


class DapClient:
    """One debug session, by Microsoft's test client."""

    def __init__(
        self,
        modules: Path,
        port: int,
        *,
        host: str = "127.0.0.1",
        env: Mapping[str, str] | None = None,
        enter: Callable[..., list[str]] = lambda *words: [*words],
    ) -> None:
        self._address = {"host": host, "port": port}
        self._ids = itertools.count(1)
        self._news = threading.Condition()
        self._answers: dict[int, dict[str, Any]] = {}
        self._events: defaultdict[str, deque[dict[str, Any]]] = defaultdict(deque)
        self._noise: list[str] = []
        self.name = ""
        self._failure: str | None = None
        self._over = False
        self._process = subprocess.Popen(
            enter("node", str(DAP / "client.js"), host, str(port)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**(os.environ if env is None else env), "NODE_PATH": str(modules)},
        )
        self._reader = threading.Thread(target=self._read, name="dap-client", daemon=True)
        self._reader.start()
        try:
            self.wait_for_event("connected")
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> DapClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # The conversation.

    def request(
        self, command: str, arguments: Mapping[str, Any] | None = None, timeout: float = LIMIT
    ) -> dict[str, Any]:
        """The body of the adapter's answer."""
        return self._answer(command, self._send(command, arguments), timeout)

    def wait_for_event(self, name: str, timeout: float = LIMIT) -> dict[str, Any]:
        """The next event of that name that nobody has taken yet."""
        with self._news:
            happened = self._news.wait_for(lambda: self._events[name] or self._over, timeout)
            if self._events[name]:
                return self._events[name].popleft()
            if name == "closed" and self._over:
                return {}
            raise self._error(f"no event {name!r}", None if happened else timeout)

    def _send(self, command: str, arguments: Mapping[str, Any] | None) -> int:
        number = next(self._ids)
        message = {"id": number, "command": command, "arguments": dict(arguments or {})}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise DapError(f"{command}: the client is gone ({error})") from error
        return number

    def _answer(self, command: str, number: int, timeout: float) -> dict[str, Any]:
        with self._news:
            happened = self._news.wait_for(lambda: number in self._answers or self._over, timeout)
            if number not in self._answers:
                raise self._error(f"no answer to {command!r}", None if happened else timeout)
            answer = self._answers.pop(number)
        if not answer["success"]:
            raise DapError(str(answer.get("message")))
        body = answer["body"]
        assert isinstance(body, dict)
        return body

    def _error(self, what: str, timeout: float | None) -> DapError:
        why = f"within {timeout:g} s" if timeout is not None else "before the connection closed"
        details = [self._failure, *self._noise]
        return DapError("; ".join([f"{what} {why}", *(line for line in details if line)]))

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._take(line)
        with self._news:
            self._over = True
            self._news.notify_all()

    def _take(self, line: str) -> None:
        with self._news:
            try:
                message = json.loads(line)
            except ValueError:  # node's own words, about an error in client.js
                self._noise.append(line.rstrip())
                return
            if "id" in message:
                self._answers[message["id"]] = message
            elif message["event"] == "closed":
                self._over = True
            elif message["event"] == "failed":
                self._failure = message["message"]
            else:
                self._events[message["event"]].append(message.get("body", {}))
            self._news.notify_all()

    # What VS Code does.

    def attach(
        self,
        breakpoints: Mapping[Path, Sequence[int]] | None = None,
        timeout: float = LIMIT,
        *,
        exception_filters: Sequence[str] = (),
        **arguments: Any,
    ) -> None:
        """Attach as VS Code does, with the breakpoints and the filters that its user has set."""
        deadline = time.monotonic() + timeout
        self.request(
            "initialize",
            {
                "clientID": "vscode",
                "clientName": "Visual Studio Code",
                "adapterID": "debugpy",
                "pathFormat": "path",
                "linesStartAt1": True,
                "columnsStartAt1": True,
                "supportsVariableType": True,
                "supportsVariablePaging": True,
                "supportsProgressReporting": True,
                "supportsInvalidatedEvent": True,
                "supportsMemoryReferences": True,
                "locale": "en",
            },
            timeout,
        )
        attaching = self._send(
            "attach",
            {
                "name": "rank 0 (ddpdoctor)",
                "type": "debugpy",
                "request": "attach",
                "connect": self._address,
                "justMyCode": False,
                **arguments,
            },
        )
        with self._news:
            self._news.wait_for(
                lambda: self._events["initialized"] or attaching in self._answers or self._over,
                deadline - time.monotonic(),
            )
            refused = attaching in self._answers and not self._answers[attaching]["success"]
        if refused:
            self._answer("attach", attaching, 0)
        self.wait_for_event("initialized", max(0.0, deadline - time.monotonic()))
        for path, lines in (breakpoints or {}).items():
            self.set_breakpoints(path, lines)
        self.request("setExceptionBreakpoints", {"filters": list(exception_filters)})
        self.request("configurationDone")
        self._answer("attach", attaching, max(1.0, deadline - time.monotonic()))

    def set_breakpoints(self, path: Path, lines: Sequence[int]) -> None:
        """Replace the breakpoints of one file."""
        body = self.request(
            "setBreakpoints",
            {
                "source": {"name": path.name, "path": str(path)},
                "breakpoints": [{"line": line} for line in lines],
                "lines": list(lines),
                "sourceModified": False,
            },
        )
        bad = [each for each in body["breakpoints"] if not each["verified"]]
        if bad:
            raise DapError(f"breakpoints that the adapter rejects: {bad}")

    def wait_for_stop(self, timeout: float = LIMIT) -> int:
        """The thread that stopped."""
        return int(self.wait_for_event("stopped", timeout)["threadId"])

    def stopped_now(self) -> bool:
        """Whether a stop has been reported that nobody has taken yet."""
        with self._news:
            return bool(self._events["stopped"])

    def threads(self) -> dict[int, str]:
        """The names of the threads."""
        return {each["id"]: each["name"] for each in self.request("threads")["threads"]}

    def stack(self, thread: int) -> list[Frame]:
        """A stopped thread's frames, innermost first."""
        body = self.request("stackTrace", {"threadId": thread, "startFrame": 0, "levels": 1000})
        return [
            Frame(each["id"], each["name"], each.get("source", {}).get("path", ""), each["line"])
            for each in body["stackFrames"]
        ]

    def evaluate(self, expression: str, frame: Frame) -> str:
        """What VS Code's debug console answers."""
        arguments = {"expression": expression, "frameId": frame.id, "context": "repl"}
        return str(self.request("evaluate", arguments)["result"])

    def locals(self, frame: Frame) -> dict[str, str]:
        """The frame's local variables, as VS Code shows them."""
        scopes = self.request("scopes", {"frameId": frame.id})["scopes"]
        scope = next(each for each in scopes if each["name"] == "Locals")
        reference = {"variablesReference": scope["variablesReference"]}
        variables = self.request("variables", reference)["variables"]
        return {
            each["name"]: each["value"]
            for each in variables
            if not each["name"].endswith(" variables")  # a group, such as "special variables"
        }

    def next(self, thread: int) -> None:
        """Step over a line."""
        self.request("next", {"threadId": thread})

    def continue_(self, thread: int) -> None:
        """Continue all threads."""
        self.request("continue", {"threadId": thread})

    def pause(self, thread: int) -> None:
        """Ask a thread to stop where it is."""
        self.request("pause", {"threadId": thread})

    # The end.

    def disconnect(self) -> None:
        """Detach, as VS Code's button does; the job goes on."""
        self.request("disconnect", {"restart": False, "terminateDebuggee": False})
        self.close()

    def leave(self, *, terminate: bool) -> None:
        """End the session as VS Code's Stop does; the answer may be the end of the connection."""
        with contextlib.suppress(DapError):
            self.request("disconnect", {"restart": False, "terminateDebuggee": terminate})

    def kill(self) -> None:
        """End the client as a crash of VS Code would."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """End the client without a word to the adapter."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()
