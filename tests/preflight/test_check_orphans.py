"""``ddpdoctor check``: ranks that outlived their job."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddpdoctor.preflight.machine import resources
from ddpdoctor.preflight.situation import Options, Situation
from tests.conftest import LIMIT, Doctor
from tests.support.made_machine import TORCHRUN, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# -- orphans


def started(machine: Machine, pid: int, parent: int, session: int, environ: dict[str, str],
            words: str = "python train.py") -> None:  # fmt: skip
    fields = ["S", str(parent), str(session), str(session), *["0"] * 15, "100", *["0"] * 20]
    machine.write(f"proc/{pid}/stat", f"{pid} (py) thon) {' '.join(fields)}\n")
    machine.write(f"proc/{pid}/cmdline", words.replace(" ", "\0") + "\0")
    machine.write(f"proc/{pid}/statm", "9 5000 1\n")
    text = "".join(f"{name}={value}\0" for name, value in environ.items())
    machine.write(f"proc/{pid}/environ", text)


RANK = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}


def orphans_of(machine: Machine) -> list[int]:
    machine.write("proc/uptime", "1000.0 1.0\n")
    return sorted(each.process.pid for each in resources.find_orphans(machine.situation()))


def test_only_ranks_without_a_launcher_are_orphans(machine: Machine) -> None:
    started(machine, 1, 0, 1, {}, "/sbin/init")
    started(machine, 50, 1, 50, {}, "/usr/lib/systemd/systemd --user")
    living = {**RANK, "MASTER_PORT": "29400"}
    started(machine, 100, 50, 90, {}, "python -m torch.distributed.run train.py")
    started(machine, 101, 100, 101, living)  # a living job
    started(machine, 102, 101, 101, living)  # its DataLoader worker
    started(machine, 200, 1, 200, RANK)  # left by a dead torchrun
    started(machine, 201, 50, 201, RANK)  # taken in by the user's systemd
    started(machine, 202, 200, 200, RANK)  # a DataLoader worker of an orphan
    started(machine, 300, 1, 300, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"})  # by hand
    started(machine, 301, 1, 301, {})  # anybody's daemon
    started(machine, 302, 1, 90, RANK)  # in a shell's session
    assert orphans_of(machine) == [200, 201]


def test_what_a_living_job_put_into_the_background_is_its_own(machine: Machine) -> None:
    """A logger's service, in a session of its own, whose parent has ended."""
    started(machine, 1, 0, 1, {}, "/sbin/init")
    started(machine, 100, 1, 100, {}, "python -m torch.distributed.run train.py")
    started(machine, 101, 100, 101, RANK)
    started(machine, 110, 1, 110, RANK, "logger-service")
    assert orphans_of(machine) == []
    other = {**RANK, "MASTER_PORT": "29501"}
    started(machine, 200, 1, 200, other)
    started(machine, 201, 200, 200, other)
    assert orphans_of(machine) == [200]
    (machine.root / "proc/100/stat").unlink()
    shutil.rmtree(machine.root / "proc/100")
    started(machine, 101, 1, 101, RANK)
    assert orphans_of(machine) == [101, 110, 200]


@pytest.mark.parametrize(
    ("first", "found"),
    [
        ("sleep infinity", [200]),
        ("tini -- bash", [200]),
        ("/usr/bin/python3 /usr/local/bin/torchrun train.py", []),
        ("python -m ddpdoctor run train.py", []),
        ("python launch.py", []),
    ],
)
def test_in_a_container_the_launcher_may_be_process_one(
    machine: Machine, first: str, found: list[int]
) -> None:
    started(machine, 1, 0, 1, {}, first)
    started(machine, 200, 1, 200, RANK)
    assert orphans_of(machine) == found


def test_who_has_just_started_is_no_orphan_yet(machine: Machine) -> None:
    started(machine, 1, 0, 1, {}, "/sbin/init")
    started(machine, 200, 1, 200, RANK)
    machine.write("proc/uptime", "3.0 1.0\n")
    assert resources.find_orphans(machine.situation()) == []


def test_real_orphans_are_found_and_ended_when_asked_to(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun is killed; its rank lives on, until somebody says yes."""
    words = Path("/proc/1/cmdline").read_bytes().decode("utf-8", "replace")
    if any(each in words for each in resources._LAUNCHERS):
        pytest.skip("process 1 may be a launcher here, so that nothing counts as an orphan")
    monkeypatch.setattr(resources, "YOUNG", 0.0)
    source = """
        import socket, time
        server = socket.create_server(("127.0.0.1", 0))
        open("port", "w").write(str(server.getsockname()[1]))
        time.sleep(600)
    """
    sleeper = doctor.write("sleeper.py", source)
    live = doctor.start(
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", str(sleeper),
        watch=False,
    )  # fmt: skip
    launcher = psutil.Process(live.process.pid)
    deadline = time.monotonic() + LIMIT
    while not launcher.children() and time.monotonic() < deadline:
        time.sleep(0.1)
    (rank,) = launcher.children()
    while not (doctor.directory / "port").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    port = (doctor.directory / "port").read_text()
    situation = Situation(Options(nproc=1), environ={})

    def mine() -> list[resources.Orphan]:
        return [each for each in resources.find_orphans(situation) if each.process.pid == rank.pid]

    assert mine() == []
    live.process.send_signal(signal.SIGKILL)
    live.process.wait(LIMIT)
    deadline = time.monotonic() + LIMIT
    while not mine() and time.monotonic() < deadline:
        time.sleep(0.1)
    (orphan,) = mine()
    assert resources.describe_orphan(orphan).startswith(f"rank 0: {Path(sys.executable).name} ")
    assert f", port {port}, " in resources.describe_orphan(orphan)
    assert list(resources.kill_orphans([orphan])) == []
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE


START = """\
{python} -m torch.distributed.run --nproc-per-node 2 {sleeper} &
until [ "$(pgrep -fc -- '-u {sleeper}')" = 2 ]; do sleep 0.2; done
kill -9 $!
sleep {young}
{python} -m ddpdoctor check --only orphans --kill-orphans
pgrep -fc -- '-u {sleeper}'
"""


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "left"), [("y", "0"), ("n", "2")])
def test_it_asks_and_ends_them_in_a_machine_of_their_own(
    doctor: Doctor, answer: str, left: str
) -> None:
    """In a pid namespace, so that it can mean no process but these."""
    command = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"]).returncode:
        pytest.skip("no pid namespaces here")
    sleeper = doctor.write("sleeper.py", "import time\ntime.sleep(600)\n")
    young = resources.YOUNG + 2
    text = START.format(python=sys.executable, sleeper=sleeper, young=young)
    start = doctor.write("start.sh", text)
    head, tail = pty.openpty()
    with subprocess.Popen(
        [*command, "sh", str(start)],
        env=doctor.environment({"TERM": "dumb"}),
        stdin=tail,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        os.write(head, f"{answer}\n".encode())
        shown, _ = process.communicate(timeout=LIMIT)
    os.close(tail)
    os.close(head)
    assert ("2 of 2 ended" if answer == "y" else "nothing was ended") in shown
    assert ("0 among" if answer == "y" else "2 among") in shown
    assert shown.splitlines()[-1] == left


def test_nothing_is_ended_without_being_asked(doctor: Doctor) -> None:
    result = doctor.cli("check", "--only", "shared-memory", "--kill-orphans")
    if "no rank of an earlier job is left" not in result.stdout:
        assert result.status == 3
        assert "asks before it ends anything" in result.stderr
