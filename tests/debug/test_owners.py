"""Runs of another user are read as copies; no command attaches to them or acts by what they say."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.opening import as_copy, whose
from ddpdoctor.debug import attach_points, gateway
from ddpdoctor.run import rundir
from ddpdoctor.run.reader import RunReader
from ddpdoctor.system import peers
from ddpdoctor.top import actions
from tests.conftest import LIMIT, ROOT, Doctor
from tests.debug.test_debug_ports import OTHER, as_another_user, let_others_into, needs_another_user
from tests.support import top_snapshots as made

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")

ATTACKER = """
import fcntl, json, os, socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]
debug = {"host": "127.0.0.1", "ports": [port], "label": "theirs", "workspace": "/tmp"}
manifest = {
    "format": 1, "id": "theirs", "started": time.time_ns(), "command": ["theirs.py"],
    "host": socket.gethostname(), "supervisor": os.getpid(), "debug": debug,
}
record = {
    "kind": "debug", "time": time.time_ns(), "state": "ready", "rank": 0, "port": port,
    "pid": os.getpid(),
}
files = {"run.json": manifest, "supervisor.jsonl": record}
for name in sys.argv[1:]:
    if os.path.exists(name):
        os.unlink(name)
    with open(name, "w") as file:
        file.write(json.dumps(files.get(name, {})) + "\\n")
        os.fchmod(file.fileno(), 0o644)
if "lock" in sys.argv:
    lock = open("lock")
    fcntl.flock(lock, fcntl.LOCK_EX)
print(port, flush=True)
sys.stdin.read()
"""
"""Makes these files of a run in the working directory, and holds its lock and its port."""

FILES = ("run.json", "supervisor.jsonl", "lock")


@contextlib.contextmanager
def attacked(directory: Path, *files: str) -> Iterator[int]:
    """Another user has put these files into a directory, and listens on the port they name."""
    command = as_another_user("/usr/bin/env", "python3", "-I", "-c", ATTACKER, *files)
    attacker = subprocess.Popen(
        command, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert attacker.stdin is not None and attacker.stdout is not None
    with attacker, attacker.stdin, attacker.stdout:
        yield int(attacker.stdout.readline())
        attacker.kill()


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[Path]:
    """A live run of another user."""
    directory = tmp_path / "theirs"
    directory.mkdir()
    os.chown(directory, OTHER, OTHER)
    with attacked(directory, *FILES):
        yield directory


@contextlib.contextmanager
def live_run(directory: Path, port: int, **debug: object) -> Iterator[Path]:
    """A live run of this user, whose rank 0 is to be reached at a port."""
    directory.mkdir(exist_ok=True)
    manifest = {
        "format": 1, "started": time.time_ns(), "host": socket.gethostname(),
        "debug": {"host": "127.0.0.1", "ports": [port], **debug},
    }  # fmt: skip
    record = {"kind": "debug", "time": time.time_ns(), "state": "ready", "rank": 0, "port": port}
    (directory / "run.json").write_text(json.dumps(manifest))
    (directory / "supervisor.jsonl").write_text(json.dumps(record) + "\n")
    with contextlib.closing(rundir.Lock(directory)):
        yield directory


# -- a run of another user


@needs_another_user
def test_root_attaches_to_no_run_of_another_user(doctor: Doctor, theirs: Path) -> None:
    (doctor.directory / ".vscode").mkdir()
    for words in ((), ("--write",), ("--rank", "0"), ("--tunnel",)):
        refused = doctor.cli("attach", *words, str(theirs))
        assert (refused.status, refused.stdout) == (2, ""), words
        assert refused.stderr.splitlines() == [
            f"ddpdoctor: error: the run in {theirs} belongs to another user (uid {OTHER})",
            "ddpdoctor: run this command as the user whose job it is",
        ]
    assert not (doctor.directory / ".vscode" / "launch.json").exists()


@needs_another_user
def test_a_run_of_another_user_is_read_as_a_copy(doctor: Doctor, theirs: Path) -> None:
    before = sorted(theirs.iterdir())
    line = f"ddpdoctor: {as_copy(theirs)}"
    assert line.startswith(f"ddpdoctor: {theirs} belongs to another user (uid {OTHER}) and is read")
    for words in (("report",), ("report", "--json"), ("report", "--wait", "60")):
        said = doctor.cli(*words, str(theirs))
        assert (said.status, said.stderr.splitlines()) == (0, [line]), words
        assert "is live" not in said.stdout and "was killed" not in said.stdout
    compared = doctor.cli("report", str(theirs), str(theirs))
    assert compared.stderr.splitlines() == [line, line]
    stacks = doctor.cli("stacks", str(theirs))
    assert (stacks.status, stacks.stdout) == (2, "")
    assert stacks.stderr.splitlines()[:2] == [
        line,
        "ddpdoctor: error: theirs is another user's, and no stacks were taken while it ran",
    ]
    top = doctor.cli("top", "--json", str(theirs))
    frame = json.loads(top.stdout)
    assert frame["live"] is False
    assert frame["notes"] == [as_copy(theirs)]
    assert "whether the run goes on is not known" in frame["verdict"]["text"]
    assert sorted(theirs.iterdir()) == before


@needs_another_user
def test_no_key_of_the_monitor_acts_on_a_run_of_another_user(theirs: Path) -> None:
    # As a recording may have it, which somebody mailed.
    snapshot = replace(made.run(1), path=str(theirs))
    with pytest.raises(DoctorError, match=r"another user|has ended"):
        actions.signal_choices(snapshot, None)
    for act in (actions.attach_lines, actions.write_launch_json):
        with pytest.raises(DoctorError, match="belongs to another user"):
            act(snapshot)


@needs_another_user
def test_no_run_of_another_user_is_found(doctor: Doctor, theirs: Path) -> None:
    base = doctor.directory / f"ddpdoctor-{os.getuid()}"
    base.mkdir(mode=0o700)
    (base / "20990101-000000-abcdef").symlink_to(theirs)
    # As in /tmp, where anyone may have made it.
    (doctor.directory / "latest").symlink_to(theirs)
    expected: dict[tuple[str, ...], str] = {
        ("attach",): "no run is live",
        ("stacks",): "no run is live",
        ("report",): "there is no run yet",
        ("attach", "latest"): "no run named latest",
        ("report", "latest"): "no run named latest",
    }
    for words, said in expected.items():
        result = doctor.cli(*words)
        assert (result.status, result.stdout) == (3 if words[0] == "report" else 2, ""), words
        assert said in result.stderr
    assert "there is no run yet" in doctor.cli("runs").stdout
    assert json.loads(doctor.cli("top", "--json").stdout)["kind"] == "machine"


# -- a directory of this user that others may write to


@needs_another_user
def test_what_another_user_puts_into_a_directory_is_not_read(doctor: Doctor) -> None:
    chosen = doctor.directory / "open"
    chosen.mkdir()
    chosen.chmod(0o777)
    script = doctor.write(
        "loop.py",
        """
        import os, time
        while not os.path.exists("stop"):
            time.sleep(0.05)
        """,
    )
    environment = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    words = ("--debug-port", "0", "--no-vscode", "--", sys.executable, str(script))
    live = doctor.start("--run-dir", str(chosen), *words, env=environment)
    deadline = time.monotonic() + LIMIT
    while "starting" not in doctor.cli("attach", str(chosen)).stdout:
        assert time.monotonic() < deadline
    port = RunReader(chosen).manifest["debug"]["ports"][0]
    with attacked(chosen, "supervisor.jsonl", "rank-0001.r0.status", "process-7.jsonl"):
        assert str(port) not in doctor.cli("attach", str(chosen)).stdout
        said = doctor.cli("report", str(chosen)).stdout
        for name in ("supervisor.jsonl", f"{chosen}/rank-0001.r0.status"):
            assert f"not read: {name} belongs to another user (uid {OTHER})" in said
    with attacked(chosen, "run.json"):
        for option in ((), ("--write",)):
            refused = doctor.cli("attach", *option, str(chosen))
            assert (refused.status, refused.stdout) == (2, "")
            assert f"{chosen}/run.json belongs to another user (uid {OTHER})" in refused.stderr
    assert rundir.is_live(chosen)
    with attacked(chosen, "lock"):
        assert not rundir.is_live(chosen)
    (doctor.directory / "stop").touch()
    live.finish()


@needs_root
def test_files_of_another_user_in_a_closed_directory_are_a_copy(tmp_path: Path) -> None:
    """Who unpacks an archive as root keeps the uids in it."""
    with live_run(tmp_path / "copy", 5678) as directory:
        for file in directory.iterdir():
            os.chown(file, OTHER, OTHER)
        directory.chmod(0o755)
        assert RunReader(directory).snapshot().debug_states
        assert not rundir.is_live(directory)
        with pytest.raises(DoctorError, match="has ended"):
            attach_points.live_run(directory)
        # Nothing is done by what another user's run.json says.
        os.chown(directory / "lock", os.getuid(), os.getgid())
        with pytest.raises(DoctorError, match=r"run\.json belongs to another user"):
            attach_points.live_run(directory)
        with pytest.raises(DoctorError, match=r"run\.json belongs to another user"):
            actions.signal_choices(replace(made.run(1), path=str(directory)), None)
        directory.chmod(0o777)
        with pytest.raises(DoctorError, match="belongs to another user"):
            RunReader(directory)


# -- who listens


@needs_another_user
def test_a_port_of_another_user_is_neither_printed_nor_written(
    doctor: Doctor, tmp_path: Path
) -> None:
    workspace = doctor.directory / ".vscode"
    workspace.mkdir()
    (tmp_path / "theirs").mkdir()
    mine = partial(live_run, tmp_path / "run", workspace=str(doctor.directory))
    with attacked(tmp_path / "theirs") as port, mine(port) as directory:
        taken = f"port {port} is taken by another user (uid {OTHER})"
        assert taken in doctor.cli("attach", str(directory)).stdout
        for words in (("--rank", "0"), ("--tunnel",)):
            refused = doctor.cli("attach", *words, str(directory))
            assert (refused.status, refused.stdout) == (2, ""), words
        written = doctor.cli("attach", "--write", str(directory))
        assert f"rank 0 is left out: {taken}" in written.stderr
        assert not (workspace / "launch.json").exists()
        snapshot = replace(made.run(1), path=str(directory))
        assert f"rank 0 is left out: {taken}" in actions.write_launch_json(snapshot)
    # The healthy twin: the same run, and the port is ours.
    with socket.create_server(("127.0.0.1", port)):
        (directory / "lock").unlink()
        with contextlib.closing(rundir.Lock(directory)):
            assert doctor.cli("attach", "--write", str(directory)).stderr == ""
            assert str(port) in (workspace / "launch.json").read_text()
            assert f"port = {port}" in doctor.cli("attach", "--rank", "0", str(directory)).stdout
            assert f"-L {port}:" in doctor.cli("attach", "--tunnel", str(directory)).stdout


def test_a_port_at_which_no_process_listens_is_not_written(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with live_run(tmp_path / "run", port) as directory:
        run = attach_points.live_run(directory)
        assert attach_points.left_out(run) == [
            f"rank 0 is left out: nothing listens on port {port}"
        ]
        run.manifest["debug"]["ports"] = [port + 1]
        assert attach_points.left_out(run) == ["rank 0 is left out: it has no port"]
        run.manifest.update(host="elsewhere", debug={"host": "127.0.0.1", "ports": [port]})
        assert "on another machine" in attach_points.left_out(run)[0]
        assert f"-L {port}:127.0.0.1:{port} " in attach_points.tunnel(run)
        run.manifest["debug"]["host"] = "192.0.2.1"
        assert attach_points.left_out(run) == []


@needs_another_user
def test_the_listener_is_the_one_that_a_client_reaches(tmp_path: Path) -> None:
    """The kernel prefers who listens at the very address."""
    me = os.geteuid()
    with attacked(tmp_path) as port:
        assert peers.listener(port, "127.0.0.1") == OTHER
        assert peers.listener(port, "::ffff:127.0.0.1") == OTHER
        assert peers.listener(port, "127.0.0.2") is None
        with socket.create_server(("127.0.0.2", port)):
            assert peers.listener(port, "127.0.0.1") == OTHER
            assert peers.listener(port, "127.0.0.2") == me
    for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            server = socket.create_server((host, 0), family=family)
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
        with server:
            port = server.getsockname()[1]
            assert peers.listener(port, gateway.reachable(host)) == me
    assert gateway.reachable("localhost") == "127.0.0.1"


# -- what run.json says


@pytest.mark.parametrize(
    ("debug", "said"),
    [
        ({"host": "a;id"}, "is not an address"),
        ({"host": "no-such-host.invalid"}, "is not an address"),
        ({"host": ["127.0.0.1"]}, "is not an address"),
        ({"label": "\x1b[2J"}, "the label is not a line of text"),
        ({"label": "two\nlines"}, "the label is not a line of text"),
        ({"label": ["x"]}, "the label is not a line of text"),
        ({"label": "x" * 1000}, "the label is not a line of text"),
        ({"workspace": "relative"}, "is not a workspace"),
        ({"workspace": 7}, "is not a workspace"),
    ],
)
def test_what_the_manifest_says_is_data(
    debug: dict[str, object], said: str, tmp_path: Path
) -> None:
    (tmp_path / ".vscode").mkdir()
    with live_run(tmp_path / "run", 5678, **{"workspace": str(tmp_path), **debug}) as directory:
        snapshot = replace(made.run(1), path=str(directory))
        with pytest.raises(DoctorError, match="is damaged") as error:
            actions.write_launch_json(snapshot)
        assert said in error.value.message
    assert not any((tmp_path / ".vscode").iterdir())


@pytest.mark.parametrize("ports", [None, "5678", [], ["5678"], [0], [-1], [65536], [True + 0.5]])
def test_a_port_that_is_none_is_not_written(ports: object, tmp_path: Path) -> None:
    with live_run(tmp_path / "run", 5678, ports=ports) as directory:
        run = attach_points.live_run(directory)
        assert attach_points.left_out(run) == ["rank 0 is left out: it has no port"]
        with pytest.raises(DoctorError, match="no port of run can be reached"):
            attach_points.tunnel(run)


# -- sudo, and NFS


@needs_another_user
def test_a_job_that_sudo_started_is_roots(doctor: Doctor) -> None:
    doctor.cli("run", "--", "true")
    base = rundir.base_directory().name
    (run,) = (path for path in (doctor.directory / base).glob("2*") if path.is_dir())
    doctor.directory.chmod(0o1777)
    let_others_into(doctor.directory)
    said: dict[tuple[str, ...], str] = {
        ("attach",): "no run is live",
        ("attach", str(run)): f"{run} may not be read: it belongs to root",
        ("stacks", str(run)): f"{run} may not be read: it belongs to root",
        ("top", "--once", str(run)): f"{run} may not be read: it belongs to root",
        ("report", str(run)): f"{run} may not be read: it belongs to root",
    }
    for words, error in said.items():
        result = subprocess.run(
            as_another_user(sys.executable, "-m", "ddpdoctor", *words),
            capture_output=True,
            text=True,
            timeout=LIMIT,
            cwd="/",
            env={**doctor.environment(), "PYTHONPATH": str(ROOT), "HOME": "/nonexistent"},
        )
        first, hint = result.stderr.splitlines()
        assert result.returncode == (3 if words[0] == "report" else 2)
        assert (first, result.stdout) == (f"ddpdoctor: error: {error}", ""), words
        assert "sudo" in hint
    shutil.rmtree(doctor.directory / base)
    assert "use no sudo" in doctor.cli("attach", env={"SUDO_UID": "1000"}).stderr


@needs_root
def test_a_directory_that_nfs_gives_to_no_known_user(tmp_path: Path) -> None:
    """With root_squash, what root makes belongs to uid 65534."""
    (tmp_path / "squashed").mkdir()
    os.chown(tmp_path / "squashed", 65534, 65534)
    words = re.escape("belongs to an unknown user (uid 65534: NFS with root_squash")
    with pytest.raises(DoctorError, match=words) as error:
        rundir.create(str(tmp_path / "squashed"))
    assert "--run-dir" in error.value.hint
    with (
        live_run(tmp_path / "squashed", 5678) as directory,
        pytest.raises(DoctorError, match=words),
    ):
        attach_points.live_run(directory)


def test_users_in_words() -> None:
    assert whose(0) == "root"
    assert whose(1000) == "another user (uid 1000)"
