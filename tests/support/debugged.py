"""A job with debuggers attached to its ranks."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Doctor, Live, Result
from tests.support.dap_client import DapClient


class Debugged:
    """A job under debugging, and the clients that were attached to it."""

    def __init__(self, doctor: Doctor, modules: Path) -> None:
        self.doctor = doctor
        self.modules = modules
        self.clients: list[DapClient] = []
        self.live: Live

    def end(self) -> Result:
        (self.doctor.directory / "stop").touch()
        return self.live.finish()
