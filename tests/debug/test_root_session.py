"""One debug session with all ranks, with Microsoft's test client of the Debug Adapter Protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Doctor
from tests.debug.test_debugger import JOB, Job, mark, place
from tests.support.dap_client import DapClient


class Session(Job):
    """A job, its root session and the sessions that this has started."""

    root: DapClient

    def attach_all(self, *marks: str, **arguments: Any) -> list[DapClient]:
        """Attach to all ranks as VS Code does."""
        port = self.live.wait_for(lambda run: True).manifest["debug"]["root"]
        self.root = DapClient(self.modules, port, env=self.doctor.environment())
        self.clients.append(self.root)
        self.lines = {JOB: [mark(name) for name in marks]}
        self.root.attach(self.lines, name="all", **arguments)
        return [self.child() for _ in arguments.get("ranks", (0, 1))]

    def child(self) -> DapClient:
        """Start the session that the root session asks for next."""
        wanted = self.root.wait_for_event("debugpyAttach")
        client = DapClient(self.modules, wanted["connect"]["port"], env=self.doctor.environment())
        self.clients.append(client)
        client.attach(self.lines, **wanted)
        client.name = wanted["name"]
        return client


@pytest.fixture
def session(doctor: Doctor, modules: Path) -> Iterator[Session]:
    session = Session(doctor, modules)
    yield session
    for client in session.clients:
        client.close()


@pytest.mark.slow
@pytest.mark.parametrize("pause", ["0", "0.05"])
def test_after_a_late_attach_all_ranks_stop_in_the_same_step(session: Session, pause: str) -> None:
    session.start("--pause", pause)
    session.live.wait_for_steps(5)
    for _ in range(3):
        ranks = session.attach_all("after all_reduce")
        assert [client.name for client in ranks] == ["rank 0", "rank 1"]
        steps = []
        for client in ranks:
            frame = client.stack(client.wait_for_stop())[0]
            assert frame.line == mark("after all_reduce")
            steps.append(client.evaluate("step", frame))
        assert steps[0] == steps[1]
        session.root.disconnect()
        for client in ranks:
            client.wait_for_event("terminated")
    session.end().check_success()


@pytest.mark.slow
def test_stop_of_one_session_ends_a_job_that_was_held_for_it(session: Session) -> None:
    session.start(options=("--wait-for-attach", "--stop-with-debugger"))
    ranks = session.attach_all("first")
    assert [place(client) for client in ranks] == [mark("first")] * 2
    session.root.leave(terminate=True)
    for client in ranks:
        client.wait_for_event("terminated")
    assert session.live.finish().status != 0


@pytest.mark.slow
def test_a_restarted_rank_gets_a_new_session_and_chosen_ranks_alone(session: Session) -> None:
    session.start("--how", "restart", options=("--max-restarts", "1"))
    (only,) = session.attach_all("loop", ranks=[1])
    assert only.name == "rank 1"
    (session.doctor.directory / "restart").touch()
    only.wait_for_event("terminated")
    again = session.child()
    assert (again.name, place(again)) == ("rank 1", mark("loop"))
    session.root.disconnect()
    session.end()
