"""``ddpdoctor check`` as a command: choosing, running and showing checks, and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ddpdoctor.preflight  # noqa: F401 (registers the checks)
from ddpdoctor.commands.check import NOT_TESTED, WRONG_USAGE, Progress, exit_status
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight import command_lines
from ddpdoctor.preflight.check import (
    CHECKS,
    Check,
    Outcome,
    Run,
    Status,
    judged,
    passed,
    run_checks,
    skipped,
)
from ddpdoctor.preflight.situation import (
    Deadline,
    Options,
    Situation,
    expand_nodelist,
    places,
    split_endpoint,
)
from ddpdoctor.render import check_screen
from ddpdoctor.render.check_screen import View
from tests.conftest import LIMIT, ROOT, Doctor


def made(name: str, run: Run, limit: float = 5.0) -> Check:
    return Check(name, "DDP001", "machine", limit, run)


def outcomes_of(*checks: Check, timeout: float = 30.0) -> list[Outcome]:
    return run_checks(checks, Situation(deadline=Deadline(timeout)), lambda outcome: None)


def broken(situation: Situation) -> Outcome:
    raise RuntimeError("no such\nthing")


def endless(situation: Situation) -> Outcome:
    while True:
        time.sleep(0.05)


def test_a_check_that_breaks_or_does_not_end_is_told_and_the_others_go_on() -> None:
    seen: list[str] = []
    checks = (
        made("endless", endless, limit=0.3),
        made("broken", broken),
        made("well", lambda situation: passed("2 of 2")),
    )
    outcomes = run_checks(
        checks, Situation(deadline=Deadline(30)), lambda outcome: seen.append(outcome.check)
    )
    assert [outcome.check for outcome in outcomes] == ["endless", "broken", "well"]
    assert [outcome.status for outcome in outcomes] == [
        Status.COULD_NOT_RUN, Status.COULD_NOT_RUN, Status.PASS,
    ]  # fmt: skip
    assert outcomes[0].detail == "no answer within 0 s"
    assert outcomes[1].detail == "RuntimeError: no such thing"
    assert sorted(seen) == ["broken", "endless", "well"]
    assert exit_status(outcomes) == NOT_TESTED


def test_an_interrupt_tells_the_checks_to_stop() -> None:
    stopped: list[float] = []

    def waits(situation: Situation) -> Outcome:
        while situation.deadline.left() > 0:
            time.sleep(0.05)
        stopped.append(situation.deadline.left())
        return skipped("stopped")

    def interrupt(outcome: Outcome) -> None:
        raise KeyboardInterrupt

    checks = [made("waits", waits), made("well", lambda situation: passed("2 of 2"))]
    with pytest.raises(KeyboardInterrupt):
        run_checks(checks, Situation(deadline=Deadline(30)), interrupt)
    assert stopped == [0.0]


def finding(severity: Severity) -> Finding:
    return Finding("DDP001", severity, "something is wrong", fix="Change it.", paste="export A=1")


@pytest.mark.parametrize(
    ("severities", "status", "code"),
    [
        ([], Status.PASS, 0),
        ([Severity.INFO], Status.PASS, 0),
        ([Severity.INFO, Severity.WARNING], Status.WARN, 1),
        ([Severity.WARNING, Severity.ERROR], Status.FAIL, 2),
    ],
)
def test_the_worst_finding_decides(severities: list[Severity], status: Status, code: int) -> None:
    outcome = judged("looked", [finding(severity) for severity in severities])
    assert outcome.status is status
    assert exit_status([outcome, skipped("no GPU")]) == code


def test_failures_and_what_was_not_tested_are_bits_of_their_own() -> None:
    outcomes = outcomes_of(
        made("broken", broken), made("bad", lambda s: judged("", [finding(Severity.ERROR)]))
    )
    assert exit_status(outcomes) == 2 + 4
    outcomes = outcomes_of(
        made("broken", broken), made("bad", lambda s: judged("", [finding(Severity.WARNING)]))
    )
    assert exit_status(outcomes) == 1 + 4


def test_the_table_fits_eighty_columns_and_names_everything() -> None:
    outcomes = outcomes_of(
        made("a-check", lambda s: passed("a detail " * 20)),
        made("another", lambda s: judged("looked", [finding(Severity.ERROR)])),
        made("third", lambda s: skipped("no GPU")),
    )
    text = check_screen.result_table(outcomes, colour=False, width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "third              skipped no GPU" in text
    assert "\x1b" not in text
    coloured = check_screen.result_table(outcomes, colour=True, width=80)
    assert "\x1b[1;31mfail" in coloured
    text = check_screen.screen(outcomes, View("vm", 2, seconds=1.23))
    assert text.startswith("not ready: vm, 2 ranks: 1 error (1.2 s)\n\nerror DDP001: ")
    assert "  paste:    export A=1\n" in text
    assert text.endswith("1 of 3 checks passed, 1 skipped (-v shows each)\n")


@pytest.fixture
def few() -> dict[str, Check]:
    return {
        "port": Check("port", "DDP002", "machine", 1, lambda s: passed("")),
        "between": Check("between", "DDP050", "nodes", 1, lambda s: passed("")),
    }


def test_choosing_checks(few: dict[str, Check]) -> None:
    def names(*words: str) -> list[str]:
        return [check.name for check in command_lines.choose(command_lines.parse(words, {}), few)]

    assert names() == ["port"]
    assert names("--nnodes", "2", "--node-rank=0") == ["port", "between"]
    assert names("--nnodes", "2", "--skip", "ddp002") == ["between"]
    assert names("--only", "between") == ["between"]
    with pytest.raises(DoctorError, match="did you mean port"):
        names("--only", "pord")
    with pytest.raises(DoctorError, match="no check is left"):
        names("--skip", "port")


def test_torchruns_own_line_is_understood() -> None:
    line = (
        "--nproc_per_node=4 --nnodes 1:2 --node_rank 1 --rdzv_backend c10d --rdzv_id job7 "
        "--rdzv-endpoint node0:29501 --max-restarts 3 -m pkg.train --lr 0.1"
    )
    options = command_lines.parse(tuple(line.split(" ")), {}).options  # fmt: skip
    assert (options.nproc, options.nnodes, options.node_rank) == (4, 2, 1)
    assert (options.endpoint, options.rdzv_id) == ("node0:29501", "job7")
    assert options.module and options.script == ("pkg.train", "--lr", "0.1")


def test_the_old_names_of_the_endpoint_are_understood() -> None:
    words = ["--master_addr", "10.0.0.1", "--master-port", "1234", "--", "-x.py"]
    options = command_lines.parse(words, {}).options
    assert (options.endpoint, options.script) == ("10.0.0.1:1234", ("-x.py",))


def test_slurm_says_which_node_this_is() -> None:
    environ = {
        "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "2",
        "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[07-08]",
    }  # fmt: skip
    options = command_lines.parse([], environ).options
    assert (options.nnodes, options.node_rank) == (2, 1)
    assert places(environ)[0].hosts == ("gpu07", "gpu08")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes", "0"], "nodes, 1 or more"),
        (["--nnodes", "2", "--node-rank", "2"], "no node 2 among 2"),
        (["--nproc-per-node", "two"], "number of ranks"),
        (["--rdzv-endpoint", "node0:http"], "not HOST:PORT"),
        (["--timeout", "soon"], "seconds"),
        (["--timeout"], "needs a number of seconds"),
        (["--jsn"], "did you mean --json"),
    ],
)
def test_a_wrong_command_line_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(DoctorError, match=message):
        command_lines.parse(words, {})


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("node1", ("node1",)),
        ("a1,b2", ("a1", "b2")),
        ("gpu[01-03,07],login", ("gpu01", "gpu02", "gpu03", "gpu07", "login")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("gpu[1-", ()),
        ("", ()),
    ],
)
def test_slurms_node_lists(nodelist: str, names: tuple[str, ...]) -> None:
    assert expand_nodelist(nodelist) == names


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node0", "node0", 29500),
        ("node0:0", "node0", 29500),
        ("node0:1234", "node0", 1234),
        ("[fd00::1]:1234", "fd00::1", 1234),
        ("[fd00::1]", "fd00::1", 29500),
        ("fd00::1", "fd00::1", 29500),
    ],
)
def test_endpoints(text: str, host: str, port: int) -> None:
    assert split_endpoint(text) == (host, port)


def test_facts_are_gathered_once() -> None:
    gathered: list[str] = []

    def gather(situation: Situation) -> str:
        gathered.append("x")
        return "fact"

    situation = Situation(Options())
    assert [situation.shared(gather), situation.within(1).shared(gather)] == ["fact", "fact"]
    assert gathered == ["x"]


def test_every_check_has_a_name_to_type() -> None:
    for check in CHECKS.values():
        assert check.name == check.name.lower().replace(" ", "-")


def test_the_commands_words(doctor: Doctor) -> None:
    listed = doctor.cli("check", "--list").stdout
    here, heading, between = listed.partition("\nAcross nodes (--nnodes 2 or more):\n")
    assert heading
    for text, scope in ((here, "machine"), (between, "nodes")):
        named = [line.split()[0] for line in text.splitlines()]
        assert named == [name for name, check in CHECKS.items() if check.scope == scope]
    assert here.startswith("versions ") and between.startswith("nodes ")
    page = doctor.cli("explain", "ddp005").stdout
    assert page.startswith("DDP005 shared-memory (check)\n")
    assert doctor.cli("explain", "shared-memory").stdout == page
    wrong = doctor.cli("check", "--only", "shared-memry")
    assert wrong.status == WRONG_USAGE
    assert wrong.stderr.splitlines() == [
        "ddpdoctor: error: there is no check 'shared-memry'",
        "ddpdoctor: did you mean shared-memory? `ddpdoctor check --list` lists them",
    ]
    nothing = doctor.cli("check", "--only", "")
    assert nothing.status == WRONG_USAGE
    assert nothing.stderr.startswith(
        "ddpdoctor: error: option --only needs the name of a check, not ''\n"
    )
    told = doctor.cli("check", "--only", "shared-memory", "--json")
    assert (told.status, told.stderr) == (0, "")
    record = json.loads(told.stdout)
    assert record["exit_status"] == 0
    assert [each["check"] for each in record["checks"]] == ["shared-memory"]


@pytest.mark.parametrize(
    ("words", "status"),
    [("check", WRONG_USAGE), ("vscode", 2), ("run --no-vscode --debug-port 0 -- /bin/true", 0)],
)
def test_a_directory_that_was_removed(tmp_path: Path, words: str, status: int) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    ran = subprocess.run(
        ["bash", "-c", f"rmdir {folder}; {sys.executable} -m ddpdoctor {words}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ran.returncode == status
    assert "the working directory was removed" in ran.stderr
    assert "Traceback" not in ran.stderr


def checking(doctor: Doctor, shell: str) -> tuple[int, str]:
    """The status of a check that a shell starts in an odd way, and what reached its stderr."""
    line = f"{sys.executable} -m ddpdoctor check --only script,cores -- missing.py"
    done = doctor.run("bash", "-c", shell.replace("CHECK", line), watch=False)
    return done.status, done.stderr


@pytest.mark.parametrize(
    ("shell", "status"),
    [
        ("CHECK >&-", 2),
        ("CHECK <&- >&- 2>&-", 2),
        ("CHECK 2>&1 >/dev/null | head -0; exit ${PIPESTATUS[0]}", 2),
        # A pipe that is no longer read, from the beginning.
        ("exec 3> >(exec true); sleep 0.2; CHECK >&3", 2),
    ],
)
def test_how_it_ended_is_told_by_the_status_wherever_the_words_go(
    doctor: Doctor, shell: str, status: int
) -> None:
    assert checking(doctor, shell) == (status, "")


def test_a_full_disk_under_the_output_is_told(doctor: Doctor) -> None:
    status, told = checking(doctor, "CHECK >/dev/full")
    assert status == WRONG_USAGE
    assert told == "ddpdoctor: error: the output cannot be written: its disk is full\n"


def test_progress_that_is_not_read_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1, closefd=True) as stream:
        progress = Progress(["links"], stream=stream)
        progress.say("waiting for node0:29500")
        progress.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
