"""`ddpdoctor check` on every host of a lab, and what it said there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from ddpdoctor.preflight.check import CHECKS
from tests.conftest import LIMIT
from tests.lab.network import NETWORK, Host, Lab

PORT = 29500
WITHOUT_TORCH = ("--skip", "collectives,gloo-nodes,nccl-nodes")


@dataclass
class Said:
    """What the check said on a host.

    Attributes:
        status: Its exit status.
        document: Its JSON.
        seconds: From the start of all checks to the end of this one.
    """

    host: Host
    status: int
    document: dict[str, Any]
    stderr: str
    seconds: float

    def outcome(self, check: str) -> dict[str, Any]:
        """What came of one check."""
        found: dict[str, Any] = next(
            each for each in self.document["checks"] if each["check"] == check
        )
        return found

    def findings(self, *checks: str) -> list[dict[str, Any]]:
        """The findings, of these checks or of all."""
        return [
            finding
            for each in self.document["checks"]
            if not checks or each["check"] in checks
            for finding in each["findings"]
        ]

    @property
    def codes(self) -> list[str]:
        """The codes of all findings above information, each once, in order."""
        return sorted({each["code"] for each in self.findings() if each["severity"] != "info"})

    @property
    def messages(self) -> str:
        """All messages, one a line, without what marks this node."""
        lines = [str(each["message"]) for each in self.findings()]
        return "\n".join(lines).replace(", this one", "")


WITHOUT_FINDING = (
    "not asked for on every node", "no script was named", "no --checkpoint-dir was named",
    "no GPU", "torch without CUDA", "no NVIDIA driver",
)  # fmt: skip
"""Beginnings of reasons to skip a check of the nodes that are no fault."""


def require_honesty(document: dict[str, Any]) -> None:
    """Fail unless a check of nodes says what it tested, whatever it found.

    A warning or an error comes with a line to type. A row that counts "3 of 4" does not pass. What
    was skipped has the reason among the findings, or in what could not run, and a status above 0.
    """
    found = [each for row in document["checks"] for each in row["findings"]]
    worse = [each for each in found if each["severity"] != "info"]
    unknown = any(row["status"] == "could not run" for row in document["checks"])
    for each in worse:
        line = each.get("paste", "").strip()
        assert line and line[0] != "#", each
    for row in document["checks"]:
        if row["status"] == "pass":
            for some, all_ in re.findall(r"(?<!rank )\b(\d+) of (\d+)\b", row["detail"]):
                assert int(some) >= int(all_), row
        judged = CHECKS[row["check"]].scope == "nodes" and row["status"] == "skipped"
        if judged and not row["detail"].startswith(WITHOUT_FINDING):
            assert (worse or unknown) and document["exit_status"] > 0, row
    assert not worse or document["exit_status"] > 0


class Checks:
    """Starts the check on hosts of a lab.

    Args:
        lab: The lab.
        directory: Where output goes; the working directory of the checks.
        environment: Of every process.
    """

    def __init__(self, lab: Lab, directory: Path, environment: Mapping[str, str]) -> None:
        self.lab = lab
        self.directory = directory
        self.environment = environment
        self.started: list[subprocess.Popen[bytes]] = []
        self._count = 0

    def words(self, host: Host, *more: str) -> list[str]:
        """The command on a host; options in ``more`` come last and win."""
        return [
            sys.executable, "-m", "ddpdoctor", "check",
            "--nnodes", str(len(self.lab.hosts)),
            "--node-rank", str(host.rank),
            "--rdzv-endpoint", f"{self.lab.hosts[0].name}:{PORT}",
            "--nproc-per-node", "1",
            *more,
        ]  # fmt: skip

    def start(
        self, host: Host, words: Sequence[str], env: Mapping[str, str] | None = None
    ) -> tuple[subprocess.Popen[bytes], Path, Path]:
        """Start a command on a host; the process, and the files of its output and errors."""
        self._count += 1
        out = self.directory / f"{host.name}-{self._count}.out"
        err = out.with_suffix(".err")
        environment = {**self.environment, **(env or {})}
        process = host.start(*words, cwd=self.directory, env=environment, out=out, err=err)
        self.started.append(process)
        return process, out, err

    def run(
        self,
        *more: str,
        each: Mapping[int, Sequence[str]] | None = None,
        env: Mapping[int, Mapping[str, str]] | None = None,
        hosts: Sequence[Host] | None = None,
        before: Mapping[int, Sequence[str]] | None = None,
        timeout: float = LIMIT,
    ) -> list[Said]:
        """Run the check on all hosts at once.

        Args:
            more: Options on every host.
            each: More options, by node rank.
            env: More variables, by node rank.
            hosts: Where; all hosts if not given.
            before: What starts the command, by node rank.
            timeout: Most seconds.
        """
        began = time.monotonic()
        running = []
        for host in hosts if hosts is not None else self.lab.hosts:
            words = self.words(host, "--json", *more, *(each or {}).get(host.rank, ()))
            words = [*(before or {}).get(host.rank, ()), *words]
            running.append((host, *self.start(host, words, (env or {}).get(host.rank))))
        said = []
        for host, process, out, err in running:
            status = process.wait(max(1.0, timeout - (time.monotonic() - began)))
            text = out.read_text()
            assert text, err.read_text()
            seconds = time.monotonic() - began
            require_honesty(json.loads(text))
            said.append(Said(host, status, json.loads(text), err.read_text(), seconds))
        return said

    def paste(self, host: Host, finding: dict[str, Any]) -> None:
        """Do on a host what a finding says, as its user would; root needs no sudo."""
        host.run("sh", "-ec", finding["paste"].replace("sudo ", ""))

    def paste_everywhere(self, said: Sequence[Said], check: str) -> dict[int, dict[str, str]]:
        """Do on every host what it says of itself.

        Returns:
            The variables that were exported, by node rank, for the checks and jobs started there.
        """
        exported: dict[int, dict[str, str]] = {}
        for each in said:
            for finding in each.findings(check):
                if each.host.name not in finding.get("nodes", ()):
                    continue
                if finding["paste"].startswith("export "):
                    words = shlex.split(finding["paste"])[1:]
                    for name, _, value in (word.partition("=") for word in words):
                        exported.setdefault(each.host.rank, {})[name] = value
                else:
                    self.paste(each.host, finding)
        return exported

    def close(self) -> None:
        """End what still runs."""
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def interrupt(process: subprocess.Popen[bytes], number: int = signal.SIGINT) -> None:
    """Send Ctrl-C, or another signal, to a command on a host.

    The program that entered the host's namespaces is spared. It ends when the command does.
    """
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(child.pid) == process.pid:
                os.kill(child.pid, number)


class Make(Protocol):
    """Makes a lab of so many hosts."""

    def __call__(self, size: int, network: str = NETWORK) -> Checks: ...


def silent(said: list[Said]) -> None:
    """Nothing is wrong on any node."""
    for each in said:
        assert each.findings() == [], each.host.name
        assert each.status == 0, (each.host.name, each.document, each.stderr)


def agreeing(said: list[Said], code: str) -> str:
    """The messages of one code, which have to be the same on every node."""
    told = {
        "\n".join(
            finding["message"].replace(", this one", "")
            for finding in each.findings()
            if finding["code"] == code
        )
        for each in said
    }
    assert len(told) == 1, told
    return told.pop()
