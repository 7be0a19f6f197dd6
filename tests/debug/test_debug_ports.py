"""Who may come in at the debug ports: the job's own user and root alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddpdoctor.debug import dap
from ddpdoctor.system import peers
from tests.conftest import LIMIT, ROOT, Doctor, Live

OTHER = 65533
"""A uid that is neither root's nor ours."""

needs_another_user = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="only root can become another user, by setpriv",
)


def as_another_user(*words: str) -> list[str]:
    return ["setpriv", "--reuid", str(OTHER), "--regid", str(OTHER), "--clear-groups", *words]


STRANGER = """
import socket, struct, sys, time
kind, how, *address = sys.argv[1:]
script = sys.stdin.buffer.read()
if kind == "unix":
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address[0])
else:
    family = socket.AF_INET6 if kind == "mapped" else socket.AF_INET
    connection = socket.socket(family)
    host = "::ffff:127.0.0.1" if kind == "mapped" else "127.0.0.1"
    connection.connect((host, int(address[0])))
if how == "reset":
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
connection.settimeout(20)
try:
    connection.sendall(script)
    if how == "half":
        connection.shutdown(socket.SHUT_WR)
    if how in ("stay", "half"):
        while True:
            data = connection.recv(65536)
            if not data:
                break
            print(data.decode(errors="replace"))
except ConnectionError:
    pass
connection.close()
"""


def attack(mark: Path) -> bytes:
    """All that runs code in a rank, sent without waiting for an answer."""
    code = f"open({str(mark)!r}, 'w').close()"
    requests: list[tuple[str, dict[str, object]]] = [
        ("initialize", {"adapterID": "debugpy", "clientID": "vscode"}),
        ("attach", {"justMyCode": False}),
        ("configurationDone", {}),
        ("evaluate", {"expression": code, "context": "repl"}),
    ]
    return b"".join(
        dap.encode({"seq": seq, "type": "request", "command": command, "arguments": arguments})
        for seq, (command, arguments) in enumerate(requests, 1)
    )


def stranger(kind: str, how: str, address: str, script: bytes) -> str:
    """What another user reads who sends ``script`` there."""
    done = subprocess.run(
        as_another_user("/usr/bin/env", "python3", "-I", "-c", STRANGER, kind, how, address),
        input=script,
        capture_output=True,
        timeout=LIMIT,
    )
    return done.stdout.decode() + done.stderr.decode()


def listening(live: Live) -> dict[int, list[psutil.Process]]:
    """The TCP ports on which processes of the run listen."""
    found: dict[int, list[psutil.Process]] = {}
    supervisor = psutil.Process(live.process.pid)
    for process in (supervisor, *supervisor.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found.setdefault(each.laddr.port, []).append(process)
    return found


def own_client(address: int | str) -> dict[str, object]:
    """What a client of this user is answered to ``initialize``."""
    with socket.socket(socket.AF_INET if isinstance(address, int) else socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect(("127.0.0.1", address) if isinstance(address, int) else address)
        client.sendall(
            dap.encode(
                {
                    "seq": 1,
                    "type": "request",
                    "command": "initialize",
                    "arguments": {"adapterID": "x"},
                }
            )
        )
        decoder = dap.Decoder()
        while True:
            data = client.recv(65536)
            assert data, "the connection was closed"
            for message in decoder.feed(data):
                if message["type"] == "response":
                    return message


@pytest.fixture
def live(doctor: Doctor) -> Live:
    """A live run of one rank, which does without torch: nothing here is about training."""
    script = doctor.write(
        "loop.py",
        """
        import os, time
        while not os.path.exists("stop"):
            time.sleep(0.05)
        """,
    )
    environment = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    live = doctor.start("--debug-port", "0", "--", sys.executable, str(script), env=environment)
    live.wait_for(lambda run: 0 in run.debug_states)
    return live


def ports(live: Live) -> list[int]:
    found: list[int] = live.snapshot().manifest["debug"]["ports"]
    return found


def let_others_into(directory: Path) -> None:
    """Make the sockets below reachable, but for what guards them themselves."""
    while directory.stat().st_uid == os.geteuid() and directory != directory.parent:
        directory.chmod(directory.stat().st_mode | 0o011)
        if directory.name.startswith("pytest-of-"):
            break
        directory = directory.parent


def end(doctor: Doctor, live: Live) -> str:
    (doctor.directory / "stop").touch()
    result = live.finish()
    result.check_success()
    return result.ours


@needs_another_user
def test_another_user_is_refused_at_every_port(doctor: Doctor, live: Live) -> None:
    before = listening(live)
    numbers = ports(live)
    assert set(numbers) <= set(before)
    mark = doctor.directory / "owned"
    doctor.directory.chmod(0o777)
    script = attack(mark)
    for kind in ("ipv4", "mapped"):
        assert "Content-Length" not in stranger(kind, "stay", str(numbers[0]), script)
    # A socket that its process has closed counts as root's in the kernel's table.
    for how in ("half", "close", "reset"):
        for _ in range(10):
            assert "Content-Length" not in stranger("ipv4", how, str(numbers[0]), script)
    assert own_client(numbers[0])["success"]
    # Nothing else listens for the sake of the debugger: neither debugpy nor an adapter.
    more = set(listening(live)) - set(before)
    assert not more, {port: listening(live).get(port) for port in more}
    for process in psutil.Process(live.process.pid).children(recursive=True):
        assert "debugpy" not in " ".join(process.cmdline())
    assert not mark.exists()
    # From the job's own user the same bytes do what they say.
    with socket.create_connection(("127.0.0.1", numbers[0])) as own:
        own.sendall(attack(doctor.directory / "mine"))
        deadline = time.monotonic() + LIMIT
        while not (doctor.directory / "mine").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
    said = end(doctor, live)
    assert not [path for path in live.run_dir.iterdir() if path.is_socket()]
    assert not mark.exists()
    assert said.count(f"refused: uid {OTHER}") == 1, said
    assert "Traceback" not in said


@needs_another_user
def test_the_unix_sockets_are_of_the_user_alone(doctor: Doctor, live: Live) -> None:
    mark = doctor.directory / "owned"
    paths = live.snapshot().manifest["debug"]["sockets"]
    assert {Path(path).stat().st_mode & 0o777 for path in paths} == {0o600}
    assert own_client(paths[0])["success"]
    for path in (paths[0], str(live.run_dir / "control")):
        assert Path(path).stat().st_mode & 0o777 == 0o600
        # The mode is one lock, the check of the peer another.
        let_others_into(live.run_dir)
        os.chmod(path, 0o777)
        said = stranger("unix", "stay", path, attack(mark))
        assert "Content-Length" not in said
        assert "PermissionError" not in said
    assert not mark.exists()
    assert f"refused: uid {OTHER}" in end(doctor, live)


@needs_another_user
def test_a_rank_takes_no_orders_from_another_user(doctor: Doctor) -> None:
    """Who puts a socket in the place of the supervisor's is not the rank's supervisor."""
    directory = doctor.directory / "theirs"
    directory.mkdir()
    directory.chmod(0o777)
    path = directory / "control"
    listener = subprocess.Popen(
        as_another_user(
            "/usr/bin/env",
            "python3",
            "-I",
            "-c",
            "import socket, sys\n"
            "s = socket.socket(socket.AF_UNIX)\n"
            "s.bind(sys.argv[1])\n"
            "s.listen()\n"
            "print('ready', flush=True)\n"
            "c, _ = s.accept()\n"
            "print(c.recv(1000), flush=True)\n",
            str(path),
        ),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert listener.stdout is not None
    try:
        let_others_into(directory)
        assert listener.stdout.readline() == "ready\n"
        script = doctor.write(
            "joins.py",
            """
            import os
            from ddpdoctor.probe.runtime import control
            from ddpdoctor.run.names import namespace
            os.environ["DDPDOCTOR_SUPERVISOR"] = f"{os.getppid()}@{namespace()}"
            try:
                control.join({"rank": 0})
            except OSError as error:
                print("refused:", error)
            print("joined:", control.is_joined())
            """,
        )
        done = doctor.run(
            *("python", str(script)),
            env={"DDPDOCTOR_RUN_DIR": str(directory), "PYTHONPATH": str(ROOT)},
            watch=False,
        )
        assert "refused:" in done.stdout
        assert "joined: False" in done.stdout
        assert listener.stdout.readline() == "b''\n"
    finally:
        listener.kill()
        listener.wait()
        listener.stdout.close()


@needs_another_user
def test_a_port_that_another_user_holds_is_warned_of(doctor: Doctor) -> None:
    code = (
        "import socket\n"
        "s = socket.create_server(('127.0.0.1', 0))\n"
        "print(s.getsockname()[1], flush=True)\n"
        "input()\n"
    )
    holder = subprocess.Popen(
        as_another_user("/usr/bin/env", "python3", "-I", "-c", code),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None and holder.stdout is not None
    with holder, holder.stdin, holder.stdout:
        port = int(holder.stdout.readline())
        # The last one of those that are given counts.
        result = doctor.run("--debug-port", str(port), "--", "true")
        holder.kill()
    assert f"port {port} is held by another user (uid {OTHER})" in " ".join(result.ours.split())


def test_the_user_of_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with far:
            assert peers.user(far) == os.getuid()
            near.close()
            with pytest.raises(peers.UnknownPeerError):
                peers.user(far)
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with far:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            near.close()
            with pytest.raises(peers.UnknownPeerError):
                peers.user(far)


def test_the_user_of_a_connection_over_ipv6() -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with server, socket.create_connection(server.getsockname()[:2]), server.accept()[0] as far:
        assert peers.user(far) == os.getuid()


def test_an_address_for_others_is_named_explicitly(doctor: Doctor) -> None:
    words = ("--debug-port", "0", "--quiet", "--", "true")
    refused = doctor.run("--debug-host", "0.0.0.0", *words)
    assert refused.status == 2
    assert "--debug-unidentified" in refused.stderr
    taken = doctor.run("--debug-host", "0.0.0.0", "--debug-unidentified", *words)
    taken.check_success()
    assert "run code as you" in " ".join(taken.ours.split())
    none = doctor.run("--debug-host", "192.0.2.1", "--debug-unidentified", *words)
    assert none.status == 2
    assert "address of this machine" in none.stderr


@needs_another_user
def test_another_user_attaches_to_nothing(doctor: Doctor, live: Live) -> None:
    """`ddpdoctor attach` of another user, to a run, a rank and a process of it, or to any other."""
    numbers = ports(live)
    let_others_into(live.run_dir)
    rank = next(p.pid for p in psutil.Process(live.process.pid).children(recursive=True))
    # A Python of ours that no run has anything to do with.
    alone = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for words in (
            ("attach", str(live.run_dir)),
            ("attach", "--rank", "0", str(live.run_dir)),
            ("attach", "--debug", str(rank)),
            ("attach", "--debug", str(alone.pid)),
            ("attach", str(alone.pid)),
            ("stacks", str(rank)),
        ):
            result = subprocess.run(
                as_another_user(sys.executable, "-m", "ddpdoctor", *words),
                capture_output=True,
                text=True,
                timeout=LIMIT,
                stdin=subprocess.DEVNULL,
                cwd="/",
                env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": "/nonexistent"},
            )
            assert result.returncode == 2, (words, result)
            assert result.stdout == "", result
            # The error, and perhaps what to do about it.
            first, *more = result.stderr.splitlines()
            assert first.startswith("ddpdoctor: error: "), result.stderr
            assert len(more) <= 1, result.stderr
    finally:
        alone.communicate(timeout=LIMIT)
    assert own_client(numbers[0])["success"]
    assert "Traceback" not in end(doctor, live)
