"""``ddpdoctor report`` on real run directories: whole, copied, damaged, live, and none at all."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from ddpdoctor.commands import report
from ddpdoctor.core.errors import DoctorError
from tests.conftest import JOBS, LIMIT, Doctor, Result, marked

TRAIN = str(JOBS / "train.py")
TWO = ("--nproc-per-node", "2")


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A job whose rank 1 raised an exception in step 3, from a script of its own."""
    token = uuid.uuid4().hex
    doctor = Doctor(tmp_path_factory.mktemp("failed"), token)
    script = doctor.directory / "train.py"
    script.write_text(Path(TRAIN).read_text())
    result = doctor.run(
        "--no-vscode",
        "--json",
        str(doctor.directory / "found"),
        *TWO,
        str(script),
        "--fail",
        "exception",
    )
    assert not marked(token)
    return result


@pytest.fixture
def copy(failed: Result, tmp_path: Path) -> Path:
    """The run directory on another machine."""
    path = tmp_path / "copy"
    shutil.copytree(failed.run_dir, path)
    manifest = json.loads((path / "run.json").read_bytes())
    (path / "run.json").write_text(json.dumps({**manifest, "host": "elsewhere"}))
    return path


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = report.main(words)
    return status, capsys.readouterr().out


@pytest.mark.slow
def test_it_says_what_the_run_said(
    failed: Result, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(failed.run_dir.parent)
    status, out = said([str(failed.run_dir)], capsys)
    assert status == 2
    heard = [line.removeprefix("ddpdoctor: ") for line in failed.ours.splitlines()]
    # What came of it on other ranks was not known yet when the run said it.
    for line in heard:
        assert _squeezed(line) in _squeezed(out)


def _squeezed(text: str) -> str:
    """Without blanks: lines are wrapped elsewhere."""
    return "".join(text.split())


def test_the_json_is_the_same(failed: Result, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = said(["--json", str(failed.run_dir)], capsys)
    assert status == 2
    written, end = (failed.run_dir.parent / "found").read_text().splitlines()
    now, then = json.loads(out), json.loads(written)
    assert json.loads(end)["event"] == "end"
    assert now.pop("evidence")[: len(then["evidence"])] == then.pop("evidence")
    assert now == then
    assert now["code"] == "DDP901"


def test_problems_for_an_editor(failed: Result, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = said(["--output", "problems", str(failed.run_dir)], capsys)
    assert status == 2
    assert out.startswith(f"{failed.run_dir.parent}/train.py:")
    assert ":1: error DDP901 rank 1 raised ValueError" in out


def test_the_whole_traceback_is_kept(failed: Result) -> None:
    (path,) = failed.run_dir.glob("traceback-*.txt")
    assert "in full:" in failed.ours
    assert path.name in failed.ours
    text = path.read_text()
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.rstrip().endswith("ValueError: the wrong sort of batch")


def test_a_copy_tells_the_same(
    failed: Result, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = said([str(copy)], capsys)
    assert status == 2
    assert "rank 1 raised ValueError: the wrong sort of batch" in out
    assert "# guilty: exception" in out, "the traceback proves that the line is the same"


@pytest.mark.parametrize("change", ["moved on", "gone"])
def test_sources_that_have_changed_are_not_shown(
    failed: Result, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = failed.run_dir.parent / "train.py"
    before = source.read_text()
    try:
        if change == "gone":
            source.unlink()
        else:
            source.write_text(f'"""Another line."""\n{before}')
        status, out = said([str(failed.run_dir)], capsys)
    finally:
        source.write_text(before)
    assert status == 2
    assert "  --> " in out
    assert " | " not in out


def test_without_run_json(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "run.json").unlink()
    status, out = said([str(copy)], capsys)
    assert status == 2
    assert "error DDP901" in out
    assert "not read: " in out


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_damaged_run_json(content: bytes, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "run.json").write_bytes(content)
    status, out = said([str(copy)], capsys)
    assert status == 2
    assert "run.json is damaged" in out


def test_a_newer_format_is_refused(copy: Path) -> None:
    (copy / "run.json").write_text('{"format": 999}')
    with pytest.raises(DoctorError, match="newer ddpdoctor") as raised:
        report.main([str(copy)])
    assert raised.value.status == 3


def test_any_damage_is_survived(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files that are cut short, overwritten, or gone: never a traceback of ours."""
    rng = random.Random(11)
    whole = {path: path.read_bytes() for path in copy.iterdir() if path.is_file()}
    for _ in range(60):
        for path, content in whole.items():
            path.write_bytes(content)
        for path in rng.sample(sorted(whole), 3):
            content = whole[path]
            kind = rng.choice(("cut", "noise", "gone", "types"))
            if kind == "gone":
                path.unlink()
                continue
            if kind == "types":
                content = content.replace(b'"time":', b'"time":null,"was":')
            elif content:
                at = rng.randrange(len(content))
                content = content[:at] if kind == "cut" else content[:at] + rng.randbytes(99)
            path.write_bytes(content)
        if not (copy / "run.json").exists() and not list(copy.glob("*.jsonl")):
            continue
        status, out = said([str(copy)], capsys)
        assert status in (0, 1, 2)
        assert "findings: " in out


def test_a_job_whose_supervisor_was_killed(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy / "supervisor.jsonl"
    lines = [line for line in path.read_bytes().splitlines(True) if b'"kind":"job"' not in line]
    path.write_bytes(b"".join(lines))
    _, out = said([str(copy)], capsys)
    assert "how the job ended is unknown" in out


@pytest.mark.slow
def test_a_live_run(doctor: Doctor, capsys: pytest.CaptureFixture[str]) -> None:
    live = doctor.start(*TWO, "--grace", "2", TRAIN, "--steps", "5000", "--pause", "0.02")
    live.wait_for_steps(3)
    status, out = said([str(live.run_dir)], capsys)
    assert status == 0
    assert "the run is live; these are the findings so far" in out
    live.process.terminate()
    live.finish()


@pytest.mark.slow
def test_the_newest_run_that_is_over(doctor: Doctor) -> None:
    script = doctor.write("fail.py", "import sys\nraise ValueError('again')\n")
    command = [sys.executable, "-m", "ddpdoctor", "run", "--debug-port", "0", "--nproc-per-node"]
    assert doctor.run(*command, "1", str(script), watch=False).status == 1
    result = doctor.cli("report")
    assert result.status == 2
    assert "a process of the job raised ValueError" in result.stdout or "rank 0" in result.stdout
    named = Path(result.stdout.split("records in ")[1].strip()).name
    assert doctor.cli("report", named).stdout == result.stdout


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        ([], "there is no run yet", "--log FILE reads a log"),
        (["nothing"], "no run named nothing", "runs are kept in"),
        (["."], ". is not a run directory", "--log"),
        (["job.log"], "job.log is a file, not a run directory", "report --log job.log"),
        (["--log"], "option --log needs a file", "stdin"),
        (["--log", "gone.log"], "no such file: gone.log", "standard input"),
        (["--log", "."], ". has no log files", "standard input"),
        (["a", "b"], "no run named a", "runs are kept in"),
        (["a", "b", "c"], "report takes one run, or two to compare", "--log FILE"),
        (["--jsn"], "unknown option --jsn", "did you mean --json?"),
        (["--output", "xml"], "option --output needs text or problems", ""),
        (["--wait", "x"], "option --wait needs a number of seconds", ""),
    ],
)
def test_bad_input_is_one_clear_line(
    words: list[str], said: str, hint: str, doctor: Doctor
) -> None:
    if words == ["job.log"]:
        doctor.write("job.log", "x")
    result = doctor.cli("report", *words)
    assert result.status == 3
    assert result.stderr.startswith(f"ddpdoctor: error: {said}")
    assert hint in result.stderr
    assert "Traceback" not in result.stderr


def test_nothing_heavy_is_imported(failed: Result) -> None:
    code = (
        "import sys\nfrom ddpdoctor.cli import main\n"
        f"main(['report', {str(failed.run_dir)!r}])\n"
        "heavy = {'torch', 'textual', 'debugpy', 'pynvml'} & "
        "{name.split('.')[0] for name in sys.modules}\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=LIMIT)


def test_a_log_from_a_pipe_in_plain_ascii(doctor: Doctor) -> None:
    log = Path(__file__).parents[1] / "logs" / "collectives_differ.log"
    done = subprocess.run(
        [sys.executable, "-m", "ddpdoctor", "report", "--log", "-"],
        input=log.read_bytes(),
        capture_output=True,
        env={**doctor.environment(), "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "COLUMNS": "80"},
        timeout=LIMIT,
    )
    assert (done.returncode, done.stderr) == (2, b"")
    assert done.stdout.startswith(b"error DDP803: ")
    assert b"\x1b" not in done.stdout


def test_a_fault_of_ours_is_a_line_and_no_traceback() -> None:
    code = (
        "import sys\nfrom ddpdoctor import cli\nfrom ddpdoctor.commands import report\n"
        "report.main = lambda words: {}['missing']\n"
        "sys.exit(cli.main(['report']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 70
    assert done.stdout == ""
    assert done.stderr.startswith(
        "ddpdoctor: error: internal error in ddpdoctor report: KeyError('missing') at "
    )
    assert done.stderr.endswith("please report this line)\n")
    assert done.stderr.count("\n") == 1
