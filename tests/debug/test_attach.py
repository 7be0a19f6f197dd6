"""``ddpdoctor attach``, and what a run writes into the editor's files."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ddpdoctor.commands import attach
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.debug import attach_points, bridge
from tests.conftest import JOBS, LIMIT, Doctor, Live
from tests.support.dap_client import DapClient
from tests.support.odd_jobs import interpreter

JOB = JOBS / "debugged.py"
QUICK = ("--nproc-per-node", "1", "--", "-c", "pass")


def launch(folder: Path) -> dict[str, object]:
    """launch.json without the comments that are ours."""
    text = (folder / ".vscode" / "launch.json").read_text()
    plain: dict[str, object] = json.loads(re.sub(r"// \S.*", "", text))
    return plain


def names(folder: Path) -> list[str]:
    document = launch(folder)
    entries = document["configurations"]
    assert isinstance(entries, list)
    return [str(entry["name"]) for entry in entries]


@pytest.fixture
def two(doctor: Doctor) -> Iterator[Live]:
    """A live run of two ranks."""
    live = doctor.start("--nproc-per-node", "2", "--", str(JOB))
    live.wait_for_steps(3)
    yield live
    (doctor.directory / "stop").touch()
    live.finish().check_success()


@pytest.mark.slow
def test_a_live_run_from_every_side(doctor: Doctor, two: Live) -> None:
    ports = two.snapshot().manifest["debug"]["ports"]
    shown = doctor.cli("attach")
    assert shown.status == 0
    for rank, port in enumerate(ports):
        status = two.snapshot().ranks[rank].status
        assert status is not None
        assert re.search(rf"^  {rank} +{port} +{status.pid} +step \d+, ", shown.stdout, re.M)
    assert max(map(len, shown.stdout.splitlines())) <= 80 + len(str(JOB))
    assert doctor.cli("attach", str(two.run_dir)).stdout.splitlines()[1:2] == [
        "  rank  port   pid      state"
    ]

    line = doctor.cli("attach", "--rank", "1")
    assert f'host = "127.0.0.1", port = {ports[1]}' in line.stdout
    assert line.stdout.count("\n") == 1
    tunnel = doctor.cli("attach", "--tunnel").stdout
    assert f"-L {ports[0]}:127.0.0.1:{ports[0]} -L {ports[1]}:127.0.0.1:{ports[1]} " in tunnel

    (doctor.directory / "other" / ".vscode").mkdir(parents=True)
    words = ("attach", "--write", "--workspace", "other", "--path-map", "/here=/there")
    assert doctor.cli(*words).stdout == "wrote other/.vscode/launch.json\n"
    assert doctor.cli(*words).stdout == "unchanged: other/.vscode/launch.json\n"
    mine = names(doctor.directory)
    assert mine == names(doctor.directory / "other")
    assert mine == ["ddpdoctor: attach all ranks", "rank 0 (ddpdoctor)", "rank 1 (ddpdoctor)"]
    written = launch(doctor.directory / "other")["configurations"]
    assert isinstance(written, list)
    assert written[0]["pathMappings"] == [{"localRoot": "/here", "remoteRoot": "/there"}]

    other = subprocess.Popen(["sleep", "60"], env=doctor.environment())
    expected: dict[tuple[str, ...], str] = {
        ("attach", "--rank", "7"): "no live run has a rank 7",
        ("attach", "--rank", "x"): "option --rank needs a number, 0 or more, not 'x'",
        ("attach", "--rnak", "1"): "did you mean --rank?",
        ("attach", "nowhere"): "no run named nowhere",
        ("attach", "--debug", str(other.pid)): "is not a Python process",
        ("attach", "--debug", "4194303"): "there is no process 4194303",
        ("attach", "a", "b"): "one run at a time",
    }
    for wrong, said in expected.items():
        refused = doctor.cli(*wrong)
        assert refused.status == 2, wrong
        assert said in refused.stderr
        assert "Traceback" not in refused.stderr
    other.kill()
    other.wait()


@pytest.mark.slow
def test_two_runs_in_one_workspace(doctor: Doctor, two: Live) -> None:
    second = doctor.start("--nproc-per-node", "1", "--", str(JOB), "--stop", "now")
    second.wait_for_steps(1, ranks=1)
    port = second.snapshot().manifest["debug"]["ports"][0]
    label = f"debugged.py :{port}"
    assert names(doctor.directory) == [
        f"ddpdoctor: attach all ranks ({label})",
        f"rank 0 (ddpdoctor, {label})",
        "ddpdoctor: attach all ranks",
        "rank 0 (ddpdoctor)",
        "rank 1 (ddpdoctor)",
    ]
    assert f"({label})" in doctor.cli("attach").stdout
    (doctor.directory / "now").touch()
    second.finish().check_success()
    # What has ended is taken out by the next one.
    third = doctor.run("--nproc-per-node", "1", "--", str(JOB), "--steps", "1")
    assert third.status == 0
    assert label not in (doctor.directory / ".vscode" / "launch.json").read_text()


@pytest.mark.slow
def test_two_jobs_in_two_folders(doctor: Doctor) -> None:
    for folder in ("a", "b"):
        (doctor.directory / folder).mkdir()
    live = doctor.start("--workspace", "a", "--nproc-per-node", "2", "--", str(JOB))
    live.wait_for_steps(3)
    failing = doctor.write("failing.py", "raise ValueError('the fault of b')\n")
    failed = doctor.run("--workspace", "b", "--nproc-per-node", "1", "--", str(failing))
    assert failed.status == 1
    problems = ("report", "latest", "--output", "problems", "--exit-zero", "--workspace")
    of_a, of_b = (doctor.cli(*problems, folder) for folder in ("a", "b"))
    assert (of_a.stdout, of_a.status) == ("", 0)
    assert "the fault of b" in of_b.stdout and of_b.status == 0
    assert doctor.cli("report", "--workspace", "b").status == 2
    assert "there is no run of c yet" in doctor.cli("report", "--workspace", "c").stderr
    assert " in " not in doctor.cli("attach", "--workspace", "a").stdout.splitlines()[0]
    there = f"in {doctor.directory / 'a'}, for"
    assert there in doctor.cli("attach", "--workspace", "b").stdout.splitlines()[0]
    for folder, kind in (("a", "run"), ("b", "machine")):
        shown = doctor.cli("top", "--json", "--workspace", folder)
        assert json.loads(shown.stdout)["kind"] == kind, shown.stderr
    (doctor.directory / "stop").touch()
    live.finish().check_success()


@pytest.mark.slow
def test_without_a_live_run(doctor: Doctor) -> None:
    nothing = doctor.cli("attach")
    assert nothing.status == 2
    assert "no run is live" in nothing.stderr
    done = doctor.run("--nproc-per-node", "1", "--", str(JOB), "--steps", "1")
    ended = doctor.cli("attach", str(done.run_dir))
    assert ended.status == 2
    assert "has ended" in ended.stderr


@pytest.mark.parametrize("newest", [False, True], ids=["gdb", "pep768"])
@pytest.mark.slow
def test_a_process_without_a_probe(doctor: Doctor, modules: Path, newest: bool) -> None:
    python = interpreter("3.14") if newest else sys.executable
    if not newest and shutil.which("gdb") is None:
        pytest.skip("gdb is not installed")
    script = doctor.write("bare.py", "import time\nwhile True:\n    time.sleep(0.05)\n")
    bare = subprocess.Popen([python, "-I", str(script)], env=doctor.environment())
    try:
        if not newest and attach_points.breaks_sleepers():
            # On such a machine it is refused, and the process lives on.
            command = [sys.executable, "-m", "ddpdoctor", "attach", "--debug", str(bare.pid)]
            refused = doctor.run(*command, watch=False)
            assert refused.status == 2
            assert f"gdb would break process {bare.pid}" in refused.ours
            assert bare.poll() is None
            return
        # Whoever has the first port does not get the debugger's client.
        with taken_port() as taken:
            for _ in range(2):
                command = [sys.executable, "-m", "ddpdoctor", "attach", "--debug", str(bare.pid)]
                serving = doctor.start(*command, watch=False)
                port = debug_port(serving)
                assert port != taken
                with DapClient(modules, port, env=doctor.environment()) as client:
                    client.attach({script: [3]}, timeout=LIMIT)
                    assert client.stack(client.wait_for_stop(120))[0].line == 3
                    client.disconnect()
                # It listens itself: nothing of the process or of an adapter does.
                assert listening(bare.pid) == set()
                assert listening(serving.process.pid) == {port}
                serving.process.send_signal(signal.SIGINT)
                closed = serving.finish()
                assert closed.status == 0, closed.stderr
                assert "goes on" in closed.stdout
                assert bare.poll() is None
    finally:
        bare.kill()
        bare.wait()


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    """The first port that ddpdoctor tries is another process's."""
    try:
        with socket.create_server(("127.0.0.1", 5678)):
            yield 5678
    except OSError:
        # Somebody else's, which does as well.
        yield 5678


def debug_port(live: Live) -> int:
    deadline = time.monotonic() + LIMIT
    while not (found := re.search(r"attach to 127\.0\.0\.1:(\d+)", live.out.read_text())):
        assert live.process.poll() is None, live.err.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return int(found[1])


def listening(pid: int) -> set[int]:
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return {
        each.laddr.port
        for process in processes
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }


# -- launch.json of a run


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"configurations": [', "launch.json:1:"),
        pytest.param(
            '{\n"configurations": null}', "launch.json:2:", id="null", marks=pytest.mark.slow
        ),
        pytest.param("\udcff", "not UTF-8", id="bytes", marks=pytest.mark.slow),
    ],
)
def test_a_launch_json_that_cannot_be_edited(doctor: Doctor, content: str, said: str) -> None:
    folder = doctor.directory / ".vscode"
    folder.mkdir()
    file = folder / "launch.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    result = doctor.run("--", "true")
    result.check_success()
    assert file.read_bytes() == content.encode(errors="surrogateescape")
    # A command that starts no rank has nothing to write.
    assert result.ours.count("launch.json") == 0
    result = doctor.run(*QUICK[:2], "--no-python", "--", "true")
    result.check_success()
    assert said in " ".join(result.ours.split())
    assert "is left as it is" in " ".join(result.ours.split())
    assert file.read_bytes() == content.encode(errors="surrogateescape")


@pytest.mark.slow
def test_the_first_launch_json_is_said_in_one_line(doctor: Doctor) -> None:
    words = (*QUICK[:2], "--no-python", "--", "true")
    folder = doctor.directory / ".vscode"
    folder.mkdir()
    (folder / "launch.json").write_text('{"configurations": [{"name": "mine"}]}')
    (line,) = [each for each in doctor.run(*words).ours.splitlines() if "launch.json" in each]
    assert line == (
        "ddpdoctor: wrote .vscode/launch.json, for F5 in VS Code; --no-vscode, or no-vscode = true "
        "under [tool.ddpdoctor.run] in pyproject.toml, switches this off for good"
    )
    assert {"mine", "rank 0 (ddpdoctor)"} <= {*names(doctor.directory)}
    assert "launch.json" not in doctor.run(*words).ours, "the second time"
    assert {"mine", "rank 0 (ddpdoctor)"} <= {*names(doctor.directory)}
    # What the line says is true.
    shutil.rmtree(folder)
    doctor.write("pyproject.toml", "[tool.ddpdoctor.run]\nno-vscode = true\n")
    assert "launch.json" not in doctor.run(*words).ours
    assert not folder.exists()


@pytest.mark.slow
def test_no_vscode_and_a_workspace_that_is_named(doctor: Doctor) -> None:
    words = ("--nproc-per-node", "3", "--no-python", "--", "true")
    assert doctor.run("--no-vscode", *words).status == 0
    assert doctor.run("--no-debug", *words).status == 0
    assert not (doctor.directory / ".vscode").exists()
    (doctor.directory / "there").mkdir()
    assert doctor.run("--workspace", "there", "--path-map", "/a=/b", *words).status == 0
    assert names(doctor.directory / "there")[::3] == [
        "ddpdoctor: attach all ranks",
        "rank 2 (ddpdoctor)",
    ]
    assert not (doctor.directory / ".vscode").exists()
    refused = doctor.run("--workspace", "nowhere", *words)
    assert refused.status == 2
    assert "nowhere is not a directory" in refused.stderr


# -- the Problems panel


@pytest.mark.slow
def test_findings_as_lines_for_a_problem_matcher(doctor: Doctor) -> None:
    job = JOBS / "train.py"
    words = ("--nproc-per-node", "2", "--", str(job), "--fail=exception")
    result = doctor.run("--output", "problems", "--quiet", *words)
    assert result.status == 1
    doctor.cli("vscode", "--", "train.py")
    tasks = json.loads(
        re.sub(r"// \S.*", "", (doctor.directory / ".vscode" / "tasks.json").read_text())
    )
    matcher = next(t for t in tasks["tasks"] if t["label"] == "ddpdoctor: run")["problemMatcher"]
    pattern = matcher["pattern"]
    found = [m for line in result.stderr.splitlines() if (m := re.match(pattern["regexp"], line))]
    assert len(found) == 1
    assert found[0][pattern["file"]] == str(job)
    line = int(found[0][pattern["line"]])
    assert job.read_text().splitlines()[line - 1].endswith("# guilty: exception")
    assert found[0][pattern["severity"]] == "error"
    assert found[0][pattern["code"]] == "DDP901"
    assert "rank 1 raised ValueError" in found[0][pattern["message"]]


@pytest.mark.slow
def test_a_command_leads_to_ranks_that_nothing_else_reaches(
    doctor: Doctor, two: Live, modules: Path
) -> None:
    """``env`` stands for ``srun --overlap`` or ``ssh -J``: it starts the far end."""
    words = ["attach", "--through", "env", "--write", "--workspace", str(doctor.directory)]
    (doctor.directory / ".vscode").mkdir(exist_ok=True)
    forward = doctor.start(
        sys.executable, "-m", "ddpdoctor", *words, str(two.run_dir), watch=False
    )  # fmt: skip
    ends = time.monotonic() + LIMIT
    while "Ctrl-C" not in forward.out.read_text() and time.monotonic() < ends:
        time.sleep(0.05)
    ports = [
        int(each) for each in re.findall(r"attach to 127.0.0.1:(\d+)", forward.out.read_text())
    ]
    assert len(ports) == 2, forward.err.read_text()
    assert names(doctor.directory)[-2:] == ["rank 0 (ddpdoctor)", "rank 1 (ddpdoctor)"]
    with DapClient(modules, ports[1], env=doctor.environment()) as client:
        client.attach({})
        thread = next(iter(client.threads()))
        client.pause(thread)
        frame = client.stack(client.wait_for_stop())[0]
        assert client.evaluate("__import__('os').environ['RANK']", frame) == "'1'"
        client.disconnect()
    forward.process.send_signal(signal.SIGINT)
    assert forward.process.wait(LIMIT) == 130
    gone = doctor.cli("attach", "--through", "false", str(two.run_dir))
    assert gone.status == 2
    assert "false reaches no rank" in gone.stderr


def test_a_forward_that_cannot_be_made_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--through", "ssh 'node"], ["--through", "false"], ["--through", "echo []"]):
        with pytest.raises(DoctorError) as raised:
            attach.main(words)
        assert raised.value.hint
    with bridge.listen(10**6) as listener:
        assert listener.getsockname()[1] > 0
