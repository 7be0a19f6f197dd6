"""Debuggers on the head's node attach to ranks of other nodes, in a lab."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run.records.supervisor import DebugRecord
from ddpdoctor.run.snapshot import FOREVER, Run
from tests.conftest import JOBS, LIMIT
from tests.debug.test_debug_ports import STRANGER, as_another_user, attack, needs_another_user
from tests.debug.test_debugger import KEEPS_TIMEOUT, mark, place, unwrapped
from tests.lab.checking import Checks, Make
from tests.lab.running import JobOnHosts
from tests.nodes.test_run_on_nodes import pids_of
from tests.support.dap_client import DapClient, DapError, DapUnavailable, install_modules

pytestmark = pytest.mark.slow

PAUSING = JOBS / "pausing.py"
JOB = JOBS / "debugged.py"


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return install_modules(tmp_path_factory.mktemp("dap"))
    except DapUnavailable as error:
        pytest.skip(f"no DAP test client: {error}")


class Debugged:
    """A job on two hosts, and the debuggers on the first one."""

    def __init__(
        self, checks: Checks, modules: Path, script: Path, *words: str, options: Sequence[str] = ()
    ) -> None:
        self.hosts = checks.lab.hosts
        self.clients: list[DapClient] = []
        self.stop = checks.directory / "stop"
        self._checks = checks
        self._modules = modules
        self.job = JobOnHosts(checks, script, *words, own=self._own, options=options)

    def _own(self, node: int) -> list[str]:
        self.workspace(node).mkdir()
        return ["--debug-nodes", "--workspace", str(self.workspace(node))]

    def workspace(self, node: int) -> Path:
        return self._checks.directory / f"workspace{node}"

    def until(self, node: int, true: Callable[[Run], object]) -> Run:
        """Wait until the run of a node is as wanted."""
        deadline = time.monotonic() + LIMIT
        while True:
            with contextlib.suppress(DoctorError):
                run = self.job.run(node)
                if true(run):
                    return run
            assert time.monotonic() < deadline, self.job.told(node)
            time.sleep(0.2)

    def state(self, node: int, rank: int, *states: str) -> DebugRecord:
        """Wait until the debugger's state of a rank is one of these."""
        run = self.until(
            node, lambda run: rank in run.debug_states and run.debug_states[rank].state in states
        )
        return run.debug_states[rank]

    def port(self, rank: int) -> int:
        """The port of a rank on the first host."""
        run = self.until(0, lambda run: rank in run.debug_states and run.debug_states[rank].port)
        return run.debug_states[rank].port or 0

    def client(self, rank: int) -> DapClient:
        """A client on the first host, at the port of a rank."""
        enter = self.hosts[0].namespace.enter
        client = DapClient(
            self._modules, self.port(rank), env=self._checks.environment, enter=enter
        )
        self.clients.append(client)
        return client

    def listed(self, node: int = 0) -> str:
        """What `ddpdoctor attach` prints on a node."""
        words = (sys.executable, "-m", "ddpdoctor", "attach", str(self.job.run_dir(node)))
        return self.hosts[node].run(*words)

    def end(self) -> list[str]:
        """Let the job end; what its nodes printed."""
        self.stop.touch()
        assert self.job.wait() == [0, 0], self.job.told(0)
        return [out.read_text() for out in self.job.outputs]


@pytest.fixture
def start(nodes: Make, modules: Path) -> Iterator[Callable[..., Debugged]]:
    made: list[Debugged] = []

    def start(script: Path, *words: str, options: Sequence[str] = ()) -> Debugged:
        made.append(Debugged(nodes(2), modules, script, *words, options=options))
        return made[-1]

    yield start
    for each in made:
        for client in each.clients:
            client.close()


def held(run: Run) -> bool:
    """Whether a debugger holds a rank."""
    return any(span.end == FOREVER for span in run.debugged)


def test_the_terminal_debugger_and_eval_reach_both_nodes(
    start: Callable[..., Debugged], tmp_path: Path
) -> None:
    made = start(JOB, "--stop", str(tmp_path / "stop"), "--how", "none")
    made.port(1)
    made.until(0, lambda run: len(run.last) == 2 and all(rank.steps for rank in run.last))

    def cli(*words: str) -> str:
        return made.hosts[0].run(sys.executable, "-m", "ddpdoctor", *words)

    run = str(made.job.run_dir(0))
    assert cli("eval", "rank, options.how", run) == "rank 0: (0, 'none')\nrank 1: (1, 'none')\n"
    line = mark("all_reduce")
    commands = f"b debugged.py:{line}", "c", "c", "p 6 * 7", "p rank", "q"
    seen = cli("debug", *(word for each in commands for word in ("-c", each)), run)
    assert f":{line} in" in seen and "ranks 0-1: 42\nrank 0: 0\nrank 1: 1\n" in seen
    made.end()


@pytest.mark.skipif(KEEPS_TIMEOUT, reason="gloo keeps the timeout that its group was made with")
def test_a_rank_of_another_node_is_debugged_from_the_head(
    start: Callable[..., Debugged], tmp_path: Path
) -> None:
    made = start(JOB, "--stop", str(tmp_path / "stop"), "--timeout", "10")
    port = made.port(1)
    assert port == made.port(0) + 1
    made.until(0, lambda run: len(run.last) == 2 and all(rank.steps for rank in run.last))
    assert "on node1: step" in made.listed() and str(port) in made.listed()
    assert "node1" not in made.listed(1) and str(port) not in made.listed(1)
    launch = (made.workspace(0) / ".vscode" / "launch.json").read_text()
    assert '"rank 0 (ddpdoctor)"' in launch and '"rank 1 on node1 (ddpdoctor)"' in launch

    client = made.client(1)
    client.attach({JOB: [mark("after all_reduce")]})
    thread = client.wait_for_stop()
    frame = client.stack(thread)[0]
    assert frame.line == mark("after all_reduce")
    assert client.locals(frame)["rank"] == "1"
    assert client.evaluate("rank + 41", frame) == "42"
    with pytest.raises(DapError, match="rank 1 is in a debugger already"):
        made.client(1).attach()
    # Longer than the timeout of the group, in which rank 0 waits.
    time.sleep(14)
    made.state(0, 1, "stopped")
    assert held(made.job.run())
    assert "rank 1 is held by the debugger at" in unwrapped(made.job.told(0))
    client.set_breakpoints(JOB, [])
    client.continue_(thread)
    client.disconnect()
    made.until(0, lambda run: not held(run))

    # The same the other way: rank 1 waits for one of the head's node.
    client = made.client(0)
    client.attach({JOB: [mark("after all_reduce")]})
    assert place(client) == mark("after all_reduce")
    time.sleep(14)
    client.disconnect()
    made.until(0, lambda run: not held(run))
    time.sleep(1)
    assert all("timeout 10, traced False" in out for out in made.end())
    assert not any(each["code"].startswith("DDP8") for each in made.job.found())


@pytest.mark.skipif(KEEPS_TIMEOUT, reason="gloo keeps the timeout that its group was made with")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_once_its_debugger_has_left(
    start: Callable[..., Debugged], tmp_path: Path, rank: int
) -> None:
    words = ("--how", "away", "--rank", str(rank), "--at", "300", "--seconds", "30")
    timeout = ("--stop", str(tmp_path / "stop"), "--timeout", "10")
    made = start(JOB, *timeout, *words, options=("--hang-after", "6"))
    client = made.client(rank)
    client.attach({JOB: [mark("away")]})
    assert place(client) == mark("away")
    # Longer than the timeout of the group and the time after which a hang is examined.
    time.sleep(14)
    assert held(made.job.run()) and made.job.found() == []
    client.disconnect()
    found = made.job.until("DDP802")
    assert found["ranks"] == [rank] and found["location"]["line"] == mark("away"), found
    assert not held(made.job.run())
    assert all("timeout 10, traced False" in out for out in made.end())
    assert made.job.found(1) == []


def test_a_rank_of_another_node_waits_at_a_breakpoint(start: Callable[..., Debugged]) -> None:
    made = start(PAUSING)
    made.job.until_told(0, "rank 1 on node1 waits at")
    assert 'attach with F5 "rank 1 on node1 (ddpdoctor)"' in unwrapped(made.job.told(0))
    client = made.client(1)
    client.attach()
    thread = client.wait_for_stop()
    assert client.stack(thread)[0].line == mark("after breakpoint", PAUSING)
    client.continue_(thread)
    assert place(client) == mark("after second", PAUSING)
    client.disconnect()
    assert "rank 1 has 6" in made.end()[1]
    assert made.job.found() == []


@needs_another_user
def test_another_user_is_refused_and_a_lost_node_lets_go(
    start: Callable[..., Debugged], tmp_path: Path
) -> None:
    made = start(JOB, "--stop", str(tmp_path / "stop"), "--how", "none")
    port, attacked = made.port(1), tmp_path / "attacked"
    words = ("/usr/bin/env", "python3", "-I", "-c", STRANGER, "tcp", "stay", str(port))
    subprocess.run(
        made.hosts[0].namespace.enter(*as_another_user(*words)),
        input=attack(attacked),
        capture_output=True,
        timeout=LIMIT,
    )
    made.job.until_told(0, f"at debug port {port}")
    assert "refused: uid" in made.job.told(0)

    client = made.client(1)
    client.attach({JOB: [mark("loop")]})
    assert place(client) == mark("loop")
    (exchange,) = pids_of(made.hosts[1], "nodes.exchange", made.job.run_dir(1))
    os.kill(exchange, signal.SIGKILL)
    # The rank goes on, without its breakpoints.
    made.state(1, 1, "detached")
    client.wait_for_event("terminated")
    made.state(0, 1, "lost")
    assert not held(made.job.run())
    assert "the link to node1 is lost" in made.listed()
    assert "node1" not in (made.workspace(0) / ".vscode" / "launch.json").read_text()
    made.end()
    assert not attacked.exists()
