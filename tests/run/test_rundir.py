"""Where runs are kept: private, pruned, and never a reason for the job to fail."""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ddpdoctor.commands import report
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.opening import whose
from ddpdoctor.run import rundir
from ddpdoctor.run.reader import RunReader
from tests.conftest import LIMIT

if TYPE_CHECKING:
    from tests.conftest import Doctor, Result

PYTHON = sys.executable
TRAIN = str(Path(__file__).parents[1] / "jobs" / "train.py")


def published() -> Path:
    """The directory of a new run whose job has started."""
    path = made(rundir.create(None))
    rundir.publish(path)
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The base directory of this test; not made yet."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(rundir, "_remarked", set())
    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, f"{tmp_path}/nowhere")
    (tmp_path / "nowhere").touch()
    assert rundir.base_directory() == tmp_path / f"ddpdoctor-{os.getuid()}"
    return rundir.base_directory()


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(int(request.param))
    yield int(request.param)
    os.umask(before)


def made(path: Path) -> Path:
    """A run directory as a supervisor leaves it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / rundir.MANIFEST).write_text(json.dumps({"format": 1}))
    return path


# -- private


def test_only_the_user_may_look(base: Path, umask: int) -> None:
    path = rundir.create(None)
    assert path.parent == base
    assert mode(base) == mode(path) == 0o700
    chosen = rundir.create(str(base.parent / "new" / "place"))
    assert mode(chosen) == 0o700


def test_a_base_open_to_others_is_closed(base: Path) -> None:
    base.mkdir()
    base.chmod(0o777)
    rundir.create(None)
    assert mode(base) == 0o700


def test_a_base_of_somebody_else_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 4711)
    theirs = rundir.base_directory()
    theirs.mkdir(mode=0o777)
    with pytest.raises(DoctorError, match=re.escape(f"belongs to {whose(mine)}")):
        rundir.create(None)
    assert list(theirs.iterdir()) == []


@pytest.mark.parametrize("target", ["directory", "missing", "file"])
def test_a_planted_link_is_refused(target: str, base: Path) -> None:
    victim = base.parent / "victim"
    if target == "directory":
        victim.mkdir()
        victim.chmod(0o755)
    elif target == "file":
        victim.touch()
    base.symlink_to(victim)
    with pytest.raises(DoctorError, match="refused"):
        rundir.create(None)
    if target == "directory":
        assert mode(victim) == 0o755
        assert list(victim.iterdir()) == []
    else:
        assert victim.exists() == (target == "file")


def test_a_planted_file_is_refused(base: Path) -> None:
    base.touch()
    with pytest.raises(DoctorError, match="refused"):
        rundir.create(None)


def test_a_link_named_by_run_dir_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for name in ("link", "link/"):
        with pytest.raises(DoctorError, match="refused"):
            rundir.create(str(tmp_path / name))


def test_the_attack_as_a_person_sees_it(doctor: Doctor) -> None:
    (doctor.directory / "victim").mkdir()
    (doctor.directory / f"ddpdoctor-{os.getuid()}").symlink_to("victim")
    nowhere = {"XDG_RUNTIME_DIR": "/dev/null", "XDG_STATE_HOME": "/dev/null"}
    result = doctor.cli("run", "--", PYTHON, "-c", "open('ran', 'w')", env=nowhere)
    assert result.status == 2
    assert "refused" in result.stderr.splitlines()[0]
    assert "--run-dir" in result.stderr.splitlines()[1]
    assert not (doctor.directory / "ran").exists()
    assert list((doctor.directory / "victim").iterdir()) == []


def test_every_file_of_a_run_is_behind_a_closed_door(doctor: Doctor) -> None:
    doctor.cli("run", "--", PYTHON, "-c", "pass")
    base = doctor.directory / f"ddpdoctor-{os.getuid()}"
    assert mode(base) == 0o700
    (run,) = (path.parent for path in base.glob("*/run.json") if not path.parent.is_symlink())
    assert mode(run) == 0o700
    assert (run / "run.json").is_file()


# -- a directory that was chosen


@pytest.mark.parametrize("before", [0o700, 0o755, 0o2775, 0o1777], ids=oct)
def test_an_empty_directory_keeps_its_mode(before: int, tmp_path: Path) -> None:
    chosen = tmp_path / "empty"
    chosen.mkdir()
    chosen.chmod(before)
    assert rundir.create(str(chosen)) == chosen
    assert mode(chosen) == before


def test_the_files_of_a_run_are_the_users_alone(doctor: Doctor) -> None:
    chosen = doctor.directory / "open"
    chosen.mkdir()
    chosen.chmod(0o777)
    code = "import ddpdoctor"
    result = doctor.cli("run", "--run-dir", str(chosen), "--", PYTHON, "-c", code)
    assert mode(chosen) == 0o777
    files = {path.name: oct(mode(path)) for path in chosen.iterdir() if path.is_file()}
    assert {"run.json", "lock", "supervisor.jsonl", "stderr.log"} <= files.keys()
    assert {name: each for name, each in files.items() if int(each, 8) & 0o077} == {}
    assert result.ours.count("others may write to") == 1


@pytest.mark.parametrize("option", ["--run-dir", "--json", "--workspace"])
def test_an_empty_name_is_no_name(option: str, doctor: Doctor) -> None:
    for words in ((option, ""), (f"{option}=",)):
        result = doctor.cli("run", *words, "--", PYTHON, "-c", "open('ran', 'w')")
        assert result.status == 2
        assert f"error: option {option} needs a" in result.stderr
    assert not (doctor.directory / "ran").exists()


# -- a base that is taken


@pytest.fixture
def taken(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The base directory, which somebody else has made and filled with a run."""
    made(base / "20990101-000000-abcdef")
    (base / rundir.LATEST).symlink_to("20990101-000000-abcdef")
    if os.getuid() == 0:
        os.chown(base, 4711, 4711)
    else:
        base.rename(base.with_name("theirs"))
        base.symlink_to("theirs")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(base.parent / "state"))
    return base


def test_runs_go_elsewhere_if_the_place_is_taken(
    taken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(taken.iterdir())
    path = published()
    elsewhere = taken.parent / "state" / "ddpdoctor"
    assert (path.parent, mode(elsewhere)) == (elsewhere, 0o700)
    assert rundir.find(rundir.LATEST) == rundir.find(path.name) == path.resolve()
    assert rundir.newest_first() == [path.resolve()]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert str(taken) in lines[0] and lines[0].endswith(f"runs are kept in {elsewhere}")
    assert sorted(taken.iterdir()) == before


def test_the_runtime_directory_comes_first(taken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(taken.parent / "runtime"))
    (taken.parent / "runtime").mkdir(mode=0o700)
    assert rundir.create(None).parent == taken.parent / "runtime" / "ddpdoctor"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert rundir.create(None).parent == taken.parent / "state" / "ddpdoctor"


def test_no_run_of_somebody_else_is_named(taken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (rundir.LATEST, "20990101-000000-abcdef"):
        with pytest.raises(DoctorError, match="no run named"):
            rundir.find(name)
        with pytest.raises(DoctorError, match="no run named"):
            report.main([name])
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    for name in (rundir.LATEST, "20990101-000000-abcdef"):
        with pytest.raises(DoctorError, match="refused"):
            rundir.find(name)
        with pytest.raises(DoctorError, match="refused"):
            report.main([name])


def test_a_directory_that_was_chosen_and_is_somebody_elses_now(base: Path) -> None:
    path = made(rundir.create(str(base.parent / "chosen")))
    lock = rundir.Lock(path)
    rundir.publish(path)
    assert rundir.live() == [path]
    if os.getuid() != 0:
        pytest.skip("only root can give a directory to somebody else")
    os.chown(path, 4711, 4711)
    assert rundir.live() == []
    lock.close()


@pytest.mark.parametrize(
    ("workspace", "cwd", "folder", "belongs"),
    [
        ("p", "p", "p", True),
        ("p/sub", "p/sub", "p", True),
        ("p", "p/sub", "p/sub", True),
        ("p", "p/sub/deep", "p/sub", True),
        ("p", "p", "p/sub", False),
        ("p", "p/other", "p/sub", False),
        ("q", "p", "p", False),  # it was named with --workspace
        ("q", "p", "q", True),
        (None, "p", "p", True),
        (None, None, "p", False),
        (7, "relative", "p", False),
        ("p", "p", "link", True),
    ],
)
def test_the_runs_of_a_folder(
    base: Path, workspace: object, cwd: object, folder: str, belongs: bool
) -> None:
    place = base.parent
    (place / "link").symlink_to("p")
    path = published()
    found = {"workspace": workspace, "cwd": cwd}
    if workspace != 7:
        found = {key: name and str(place / str(name)) for key, name in found.items()}
    (path / rundir.MANIFEST).write_text(json.dumps(found))
    assert rundir.newest_first(str(place / folder)) == ([path] if belongs else [])


def test_a_relative_directory_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert rundir.create("a/b") == tmp_path / "a" / "b"


@pytest.mark.parametrize("content", ["file", ".hidden", "run.json"])
def test_a_directory_with_something_in_it_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / content).write_text("precious")
    with pytest.raises(DoctorError, match="not empty"):
        rundir.create(str(tmp_path))
    assert (tmp_path / content).read_text() == "precious"


def test_a_directory_that_a_live_run_has_takes_others_below(tmp_path: Path) -> None:
    first = rundir.create(str(tmp_path))
    second = rundir.create(str(tmp_path))  # The first has not begun yet
    assert first == tmp_path and second.parent == tmp_path
    second.rmdir()
    lock = rundir.Lock(first)
    (first / "run.json").write_text("{}")
    third = rundir.create(str(tmp_path))
    assert third.parent == tmp_path and not list(third.iterdir())
    other = rundir.Lock(third)
    rundir.discard(first)
    assert third.is_dir()
    other.close()
    lock.close()
    with pytest.raises(DoctorError, match="not empty"):
        rundir.create(str(tmp_path))
    rundir.discard(first)
    assert not first.exists()


def test_a_chosen_directory_is_found_while_it_lives(base: Path) -> None:
    path = made(rundir.create(str(base.parent / "chosen")))
    lock = rundir.Lock(path)
    rundir.publish(path)
    assert rundir.live() == [path]
    assert rundir.find(rundir.LATEST) == path
    lock.close()
    assert rundir.live() == []
    assert rundir.find(rundir.LATEST) == path
    other = published()
    assert {entry.name for entry in base.iterdir()} == {other.name, rundir.LATEST}
    assert path.exists()


# -- latest


def test_latest_names_the_newest(base: Path) -> None:
    for _ in range(3):
        path = published()
        assert (base / rundir.LATEST).is_symlink()
        assert not os.path.isabs(os.readlink(base / rundir.LATEST))
        assert rundir.find(rundir.LATEST) == path.resolve()
    assert [entry.name for entry in base.iterdir() if entry.name.startswith(".")] == []


def test_a_run_whose_job_never_started_moves_nothing(base: Path) -> None:
    old = [made(base / f"20200101-0000{number:02}-abcdef") for number in range(25)]
    path = published()
    left = [each for each in old if each.exists()]
    made(rundir.create(None))
    assert rundir.find(rundir.LATEST) == path.resolve()
    assert [each for each in old if each.exists()] == left


def test_runs_of_one_second_have_names_of_their_own(base: Path) -> None:
    assert len({rundir.create(None) for _ in range(10)}) == 10


def test_find(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(rundir.create(None))
    assert rundir.find(path.name) == rundir.find(str(path)) == path.resolve()
    monkeypatch.chdir(path)
    assert rundir.find(".") == path.resolve()
    with pytest.raises(DoctorError, match="no run named nothing"):
        rundir.find("nothing")
    with pytest.raises(DoctorError, match="not a run directory"):
        rundir.find(str(tmp_path))


# -- pruning


def test_the_newest_twenty_stay(base: Path) -> None:
    old = [made(base / f"20200101-0000{number:02}-abcdef") for number in range(25)]
    (base / "notes").mkdir()
    (base / "notes" / "mine.txt").write_text("precious")
    path = published()
    (base / rundir.LATEST).unlink()
    left = sorted(entry for entry in base.iterdir() if (entry / rundir.MANIFEST).exists())
    assert left == [*old[-19:], path]
    assert len(left) == rundir.MAX_RUNS == 20
    assert (base / "notes" / "mine.txt").read_text() == "precious"


def test_a_live_run_is_never_pruned(base: Path) -> None:
    old = [made(base / f"20200101-0000{number:02}-abcdef") for number in range(25)]
    live = old[0], old[3]
    files = [open(path / "lock", "wb") for path in live]
    for file in files:
        fcntl.flock(file, fcntl.LOCK_EX)
    published()
    assert all(path.is_dir() for path in live)
    assert not old[1].exists()
    left = [path for path in old if path.exists()]
    assert len(left) == 19
    for file in files:
        file.close()
    published()
    assert not old[0].exists()
    assert all(path.exists() for path in old[-17:])


def test_all_live_runs_stay(base: Path) -> None:
    old = [made(base / f"20200101-0000{number:02}-abcdef") for number in range(23)]
    locks = [rundir.Lock(path) for path in old]
    published()
    assert all(path.is_dir() for path in old)
    for lock in locks:
        lock.close()


def test_links_are_not_followed_when_pruning(base: Path) -> None:
    victim = made(base.parent / "victim")
    base.mkdir(mode=0o700)
    (base / "20190101-000000-abcdef").symlink_to(victim)
    inside = [made(base / f"20200101-0000{number:02}-abcdef") for number in range(25)]
    (inside[0] / "link").symlink_to(victim)
    published()
    assert not inside[0].exists()
    assert (victim / rundir.MANIFEST).exists()


def test_a_running_job_survives_twenty_others(doctor: Doctor) -> None:
    live = doctor.start(
        *(PYTHON, "-m", "ddpdoctor", "run", "--", "sh", "-c", "touch ready; read line; exit 11"),
        stdin=-1,
        watch=False,
    )
    base = doctor.directory / f"ddpdoctor-{os.getuid()}"
    while not (doctor.directory / "ready").exists() or not any(base.glob("*/run.json")):
        assert live.process.poll() is None
    (mine,) = (path.parent for path in base.glob("*/run.json") if not path.parent.is_symlink())
    newer = [made(base / f"2999010{number % 10}-0000{number:02}-abcdef") for number in range(25)]
    doctor.cli("run", "--", "true")
    assert sum(path.exists() for path in newer) < 25
    assert mine.is_dir()
    live.process.communicate(b"\n", timeout=LIMIT)
    assert live.process.returncode == 11
    assert mine.is_dir()


# -- a disk that says no


def warnings_of(result: Result) -> list[str]:
    # The probe's own line, in a rank, counts as much as the supervisor's.
    words = ("warning", "unwatched", "cannot be written", "cannot write", "not watched")
    return [line for line in result.ours.splitlines() if any(word in line for word in words)]


@pytest.mark.parametrize("where", ["/proc/nowhere", "/dev/null/under", "file/under"])
def test_a_place_that_cannot_be(where: str, doctor: Doctor) -> None:
    doctor.write("file", "")
    result = doctor.cli("run", "--run-dir", where, "--", PYTHON, "-c", "print('ran'); exit(4)")
    assert (result.status, result.stdout) == (4, "ran\n")
    assert len(warnings_of(result)) == 1


def test_no_place_for_temporary_files(doctor: Doctor) -> None:
    result = doctor.run(
        *(PYTHON, "-m", "ddpdoctor", "run", "--", PYTHON, "-c", "print('ran')"),
        env={"TMPDIR": "/nowhere", "TEMP": "/nowhere", "TMP": "/nowhere"},
        watch=False,
    )
    # tempfile falls back to /tmp or the working directory; either way the job runs.
    assert (result.status, result.stdout) == (0, "ran\n")


def limited(doctor: Doctor, kilobytes: int, *words: str) -> Result:
    """``ddpdoctor run`` where no file can grow past a size, as on a full disk."""
    live = subprocess.run(
        [
            *("bash", "-c", f'ulimit -f {kilobytes}; exec "$@"', "bash"),
            *(PYTHON, "-m", "ddpdoctor", "run", "--run-dir", "rd", *words),
        ],
        cwd=doctor.directory,
        env=doctor.environment({"PYTHONDONTWRITEBYTECODE": "1"}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    from tests.conftest import Result

    return Result(live.returncode, live.stdout, live.stderr, doctor.directory / "rd", 0.0)


def test_nothing_can_be_written_at_all(doctor: Doctor) -> None:
    result = limited(doctor, 0, "--", PYTHON, "-c", "print('ran'); exit(4)")
    assert (result.status, result.stdout) == (4, "ran\n")
    assert len(warnings_of(result)) == 1
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_training_job_on_a_disk_that_fills_up(doctor: Doctor) -> None:
    words = ("--nproc-per-node", "2", TRAIN, "--steps", "400", "--print-losses")
    result = limited(doctor, 8, *words)
    result.check_success()
    assert len([line for line in result.stdout.splitlines() if line.startswith("0.")]) >= 400 // 2
    assert len(warnings_of(result)) == 1, result.ours
    assert "Traceback" not in result.stderr


def test_the_run_directory_vanishes(doctor: Doctor) -> None:
    code = (
        "import os, shutil, time; shutil.rmtree(os.environ['DDPDOCTOR_RUN_DIR']); "
        "time.sleep(1.5); print('ran'); exit(4)"
    )
    result = doctor.run("--", PYTHON, "-c", code)
    assert (result.status, result.stdout) == (4, "ran\n")
    assert len(warnings_of(result)) == 1
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_findings_that_cannot_be_written(doctor: Doctor) -> None:
    words = ("--json", "/dev/full", "--nproc-per-node", "2", TRAIN, "--fail", "exception")
    result = doctor.run(*words)
    assert result.status == 1
    assert result.codes
    assert len([line for line in result.ours.splitlines() if "/dev/full" in line]) == 1


# -- damaged


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        (b"", "damaged"),
        (b"{", "damaged"),
        (b"[]", "damaged"),
        (b"null", "damaged"),
        (b"\xff\xfe", "damaged"),
        (b'{"format": "x"}', "damaged"),
        (b'{"format": null}', "damaged"),
        (b"{}", "damaged"),
        (b'{"format": 999}', "newer"),
        (b"[" * 100_000, "damaged"),
    ],
    ids=["empty", "torn", "list", "null", "binary", "word", "none", "bare", "newer", "deep"],
)
def test_a_damaged_manifest_is_said_in_one_line(manifest: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / rundir.MANIFEST).write_bytes(manifest)
    with pytest.raises(DoctorError, match=said) as caught:
        RunReader(tmp_path)
    assert "\n" not in str(caught.value)
    assert caught.value.status == 2
