"""How a debugger takes its leave: no client ends a rank by itself.

The sequences are those of VS Code: Stop on a compound with ``stopAll`` sends the focused session a
``disconnect`` and each sibling one with ``terminateDebuggee``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import JOBS, LIMIT, Doctor
from tests.support.dap_client import DapClient, DapError
from tests.support.debugged import Debugged

JOB = JOBS / "held.py"


class Held(Debugged):
    """Two ranks, and a client attached to each."""

    def start(self, *options: str) -> None:
        self.live = self.doctor.start("--debug-port", "0", *options, "--", sys.executable, str(JOB))
        self.live.wait_for(lambda run: set(run.debug_states) == {0, 1}, 240)

    def attach(self) -> None:
        ports = self.live.snapshot().manifest["debug"]["ports"]
        for port in ports[:2]:
            client = DapClient(self.modules, port, env=self.doctor.environment())
            self.clients.append(client)
            client.attach(timeout=LIMIT)

    def stop_all(self) -> None:
        """What VS Code's Stop does to a compound whose sessions stop together."""
        focused, *siblings = self.clients
        focused.leave(terminate=False)
        for sibling in siblings:
            sibling.leave(terminate=True)
        for client in self.clients:
            client.close()
        self.clients = []

    def count(self, rank: int) -> int:
        return int((self.doctor.directory / f"count-{rank}").read_text() or 0)

    def check_both_go_on(self) -> None:
        before = [self.count(rank) for rank in (0, 1)]
        deadline = time.monotonic() + LIMIT
        while not all(self.count(rank) > before[rank] for rank in (0, 1)):
            assert self.live.process.poll() is None, self.live.err.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.fixture
def held(doctor: Doctor, modules: Path) -> Iterator[Held]:
    held = Held(doctor, modules)
    yield held
    for client in held.clients:
        client.close()


def test_a_stop_of_attached_sessions_detaches(held: Held) -> None:
    held.start()
    held.attach()
    held.stop_all()
    held.check_both_go_on()
    # Neovim and others have another request for it.
    held.attach()
    for client in held.clients:
        client.request("terminate", {})
        client.wait_for_event("terminated")
    held.check_both_go_on()
    result = held.end()
    assert result.status == 0
    assert "the job succeeded" in result.ours


def test_a_stop_of_run_and_attach_ends_the_whole_job(held: Held) -> None:
    held.start("--wait-for-attach", "--stop-with-debugger")
    held.attach()
    held.stop_all()
    result = held.live.finish(120)
    assert result.status != 0
    assert result.codes == []
    assert result.ours.count("the debugger was stopped: ending the job") == 1
    assert "the job was ended by the debugger" in result.ours


@pytest.mark.slow
def test_later_sessions_of_run_and_attach_only_detach(held: Held) -> None:
    held.start("--wait-for-attach", "--stop-with-debugger")
    held.attach()
    # A client that crashes, or begins again, has decided nothing.
    held.clients[0].kill()
    held.clients[1].request("disconnect", {"restart": True, "terminateDebuggee": True})
    held.clients[1].close()
    held.clients = []
    held.check_both_go_on()
    held.attach()
    held.stop_all()
    held.check_both_go_on()
    assert held.end().status == 0


@pytest.mark.slow
def test_a_pause_in_native_code_shows_the_stack_at_once(held: Held) -> None:
    held.start()
    held.attach()
    (held.doctor.directory / "native").touch()
    deadline = time.monotonic() + LIMIT
    while not (held.doctor.directory / "native-0").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    client = held.clients[0]
    main = next(number for number, name in client.threads().items() if name.endswith("MainThread"))
    client.pause(main)
    stopped = client.wait_for_event("stopped")
    assert (stopped["reason"], stopped["threadId"]) == ("pause", main)
    # VS Code shows it beside the rank's name, which a long one hides.
    assert stopped["description"] == "rank 0: in native code"
    assert stopped["text"] == "in native code; it stops where Python goes on"
    lines = JOB.read_text().splitlines()
    frame = client.stack(main)[0]
    assert lines[frame.line - 1].endswith("# mark: native")
    # debugpy has no variables of such a thread.
    count = client.locals(frame)["count"]
    assert client.evaluate("count * 2", frame) == str(2 * int(count))
    with pytest.raises(DapError, match="NameError"):
        client.evaluate("nothing_of_this_name", frame)
    client.continue_(main)
    # It does not stop either when the native code returns.
    held.check_both_go_on()
    assert not client.stopped_now()
    held.stop_all()
    held.check_both_go_on()
    assert held.end().status == 0


def test_what_stops_with_the_debugger_needs_a_gate(doctor: Doctor) -> None:
    refused = doctor.run("--stop-with-debugger", "--", "true")
    assert refused.status == 2
    assert "add --wait-for-attach" in refused.stderr
