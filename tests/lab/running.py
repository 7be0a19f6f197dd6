"""``ddpdoctor run`` on every host of a lab, and what it said on each."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.snapshot import Run
from tests.conftest import JOBS, LIMIT
from tests.lab.checking import PORT, Checks, interrupt


class JobOnHosts:
    """One job whose ranks are on all hosts of a lab.

    Args:
        checks: The lab.
        script: The job.
        arguments: Its arguments.
        nproc: Ranks of each host.
        how: ``static`` or ``c10d`` for torchrun; ``tasks`` for a ddpdoctor of each rank, which a
            launcher such as srun tells its rank; ``hand`` for the same with the address, the rank
            and the world size as arguments; ``spawn`` for mp.spawn on each host; ``kubeflow`` for
            what a PyTorchJob sets.
        options: Options of ddpdoctor and torchrun.
        own: More options of each ddpdoctor, by number.
        env: More variables, by host.
        nnodes: torchrun's number of nodes, if it is not that of the hosts.
    """

    def __init__(
        self,
        checks: Checks,
        script: Path,
        *arguments: str,
        nproc: int = 1,
        how: str = "static",
        options: Sequence[str] = (),
        own: Callable[[int], Sequence[str]] = lambda _: ("--no-debug", "--no-vscode"),
        env: Mapping[int, Mapping[str, str]] | None = None,
        nnodes: str = "",
    ) -> None:
        self.checks = checks
        self.processes: list[subprocess.Popen[bytes]] = []
        self.outputs: list[Path] = []
        self._errors: list[Path] = []
        self._directory = checks.directory
        hosts = checks.lab.hosts
        first = hosts[0].address
        for host in hosts:
            more = dict((env or {}).get(host.rank, {}))
            command: list[list[str]]
            world_size = str(len(hosts) * nproc)
            if how in ("tasks", "hand"):
                command = [["--", sys.executable, str(script), *arguments] for _ in range(nproc)]
                if how == "tasks":
                    more |= {"MASTER_ADDR": first, "MASTER_PORT": str(PORT)}
                    more["WORLD_SIZE"] = world_size
            elif how == "spawn":
                place = [first, str(PORT), str(host.rank * nproc), str(nproc), world_size]
                command = [["--", sys.executable, str(JOBS / "spawned.py"), str(script), *place]]
            elif how == "kubeflow":
                command = [["--", str(script), *arguments]]
                more |= {"MASTER_ADDR": hosts[0].name, "MASTER_PORT": "23456"}
                more |= {f"PET_{name}": more[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
                more |= {"PET_NNODES": str(len(hosts)), "PET_NPROC_PER_NODE": str(nproc)}
                # Of the pod, not of its ranks.
                more |= {"PET_NODE_RANK": str(host.rank), "RANK": str(host.rank)}
                more["WORLD_SIZE"] = world_size
            else:
                words = ["--nnodes", nnodes or str(len(hosts)), "--nproc-per-node", str(nproc)]
                if how == "c10d":
                    words += ["--rdzv-backend", "c10d", "--rdzv-id", "a-job"]
                    words += ["--rdzv-endpoint", f"{first}:{PORT}"]
                else:
                    words += ["--node-rank", str(host.rank)]
                    words += ["--master-addr", first, "--master-port", str(PORT)]
                command = [[*words, str(script), *arguments]]
            for local, words in enumerate(command):
                number = len(self.processes)
                if how == "tasks":
                    more |= {"RANK": str(number), "LOCAL_RANK": str(local)}
                elif how == "hand":
                    words += [f"tcp://{first}:{PORT}", str(number), world_size]
                more_options = [*own(number), "--run-dir", str(self.run_dir(number))]
                more_options += ["--json", str(self._json(number)), *options]
                process, out, err = checks.start(
                    host, [sys.executable, "-m", "ddpdoctor", "run", *more_options, *words], more
                )
                self.outputs.append(out)
                self.processes.append(process)
                self._errors.append(err)

    def run_dir(self, number: int) -> Path:
        """The run directory of one ddpdoctor. That of rank 0 has the number 0."""
        return self._directory / f"job{number}"

    def _json(self, number: int) -> Path:
        return self._directory / f"found{number}.jsonl"

    def wait(self, seconds: float = LIMIT) -> list[int]:
        """The exit statuses of all ddpdoctors."""
        until = time.monotonic() + seconds
        return [each.wait(max(0.1, until - time.monotonic())) for each in self.processes]

    def stop(self) -> None:
        """Ask all of them to end, as Ctrl-C does."""
        for each in self.processes:
            if each.poll() is None:
                interrupt(each)
        self.wait()

    def found(self, number: int = 0) -> list[dict[str, Any]]:
        """The findings above information that were reported and not withdrawn."""
        path = self._json(number)
        lines = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        found: list[dict[str, Any]] = []
        for each in lines:
            if "retracts" in each:
                found = [other for other in found if other["id"] != each["id"]]
            elif "message" in each and each["severity"] != "info":
                found.append(each)
        return found

    def until(
        self, code: str, fits: Callable[[dict[str, Any]], bool] = lambda _: True
    ) -> dict[str, Any]:
        """Wait until the first node reports a finding of a code that fits; the finding."""
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            for each in self.found():
                if each["code"] == code and fits(each):
                    return each
            assert any(each.poll() is None for each in self.processes), self.told(0)
            time.sleep(0.2)
        raise AssertionError(f"no {code}: {self.told(0)}")

    def told(self, number: int) -> str:
        """What one ddpdoctor wrote to the terminal."""
        lines = self._errors[number].read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if line.startswith("ddpdoctor: "))

    def until_told(self, number: int, text: str, seconds: float = LIMIT) -> None:
        """Wait until a ddpdoctor has written a text."""
        until = time.monotonic() + seconds
        while text not in self.told(number):
            assert time.monotonic() < until, f"not told: {text!r}\n{self.told(number)}"
            time.sleep(0.1)

    def run(self, number: int = 0) -> Run:
        """A snapshot of a run directory."""
        return RunReader(self.run_dir(number)).snapshot()
