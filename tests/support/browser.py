"""A real browser without a screen, driven by its DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.conftest import LIMIT, TOKEN

_NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next((path for name in _NAMES if (path := shutil.which(name))), None)
"""The browser that is installed, None without one."""


class Browser:
    """One page of a browser of its own.

    Args:
        profile: An empty directory for it.
        token: Marks its processes, so that none is left.
    """

    def __init__(self, profile: Path, token: str) -> None:
        assert PROGRAM is not None
        self._commands, theirs = os.pipe(), os.pipe()
        self._answers = theirs
        profile.mkdir(exist_ok=True)
        flags = [
            "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--remote-debugging-pipe", "--disable-background-networking",
            "--disable-dev-shm-usage", f"--user-data-dir={profile}",
        ]  # fmt: skip

        def pipes() -> None:
            # The protocol's places: 3 is read by the browser, 4 written.
            reading, writing = os.dup(self._commands[0]), os.dup(self._answers[1])
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        self._process = subprocess.Popen(
            [PROGRAM, *flags, "about:blank"],
            preexec_fn=pipes,
            pass_fds=(3, 4),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, TOKEN: token, "HOME": str(profile)},
            start_new_session=True,
        )
        os.close(self._commands[0])
        os.close(self._answers[1])
        self._number = 0
        self._rest = b""
        self.events: list[dict[str, Any]] = []
        pages = self._send("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in pages if each["type"] == "page")
        attached = self._send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the page."""
        return self._send(method, self._session, **parameters)

    def _send(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        self._number += 1
        call: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            call["sessionId"] = session
        os.write(self._commands[1], json.dumps(call).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message["result"])
            self.events.append(message)

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + LIMIT
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers[0]], [], [], deadline - time.monotonic())
            assert ready, "the browser does not answer"
            data = os.read(self._answers[0], 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def open(self, path: Path) -> None:
        """Open a file, and wait until the report has drawn itself."""
        self.send("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + LIMIT
        while self.evaluate("document.documentElement?.dataset.ready") != "true":
            assert time.monotonic() < deadline, self.complaints()
            time.sleep(0.1)

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def complaints(self) -> list[str]:
        """What the page raised, and what its policy refused."""
        self.evaluate("0")
        errors = ("Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(each["params"]) for each in self.events if each.get("method") in errors]

    def requests(self) -> list[str]:
        """What the page asked for."""
        self.evaluate("0")
        sent = (each for each in self.events if each.get("method") == "Network.requestWillBeSent")
        return [each["params"]["request"]["url"] for each in sent]

    def media(self, *, dark: bool = False, printed: bool = False) -> None:
        """Choose the colours that the person prefers, and paper."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media="print" if printed else "", features=[scheme])

    def pdf(self) -> bytes:
        """The page on paper."""
        return base64.b64decode(self.send("Page.printToPDF", printBackground=True)["data"])

    def screenshot(self, path: Path, width: int = 1280, height: int = 1400, top: int = 0) -> None:
        """A picture of a part of the page."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        self.evaluate(f"scrollTo({{top: {top}, behavior: 'instant'}})")
        self.evaluate("new Promise(done => setTimeout(done, 700))")
        path.write_bytes(
            base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])
        )

    def close(self) -> None:
        """End the browser with all of its processes."""
        with contextlib.suppress(OSError):
            os.close(self._commands[1])
            os.close(self._answers[0])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
