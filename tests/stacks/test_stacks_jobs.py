"""``ddpdoctor stacks`` on real jobs: what it says, and that the job goes on as it would have."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from ddpdoctor.run.reader import glance
from ddpdoctor.run.records.process import FaultRecord
from ddpdoctor.stacks.capture import capture, read_declared
from ddpdoctor.stacks.frames import innermost
from tests.conftest import JOBS, LIMIT, Doctor, Live, Result, marked
from tests.support.schemas import check_schema

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="stacks are asked for by /proc"),
]

STUCK = JOBS / "stuck.py"
LINES = {
    line.partition("# at: ")[2].split()[0]: number
    for number, line in enumerate(STUCK.read_text().splitlines(), 1)
    if "# at: " in line
}


@dataclass
class Stuck:
    """A live job that is stuck, and a person beside it."""

    doctor: Doctor
    live: Live

    @property
    def run_dir(self) -> Path:
        return self.live.run_dir

    def says(self, *words: str, **env: str) -> Result:
        """``ddpdoctor stacks`` about it."""
        return self.doctor.cli("stacks", *words, str(self.run_dir), env={"COLUMNS": "80", **env})


def start(doctor: Doctor, *places: str) -> Stuck:
    live = doctor.start(f"--nproc-per-node={len(places)}", str(STUCK), *places)
    wanted = {"collective": "collective", "sleep": "sleep", "gil": "gil", "before": "before"}

    def is_stuck() -> bool:
        found = {each.rank: each for each in capture(glance(live.run_dir))}
        for rank, place in enumerate(places):
            if place not in wanted or "before" in places:
                continue
            main = found[rank].main if rank in found else None
            frame = None if main is None else innermost(main.frames)
            if frame is None or frame.line != LINES[wanted[place]]:
                return False
        return len(found) == len(places)

    deadline = time.monotonic() + LIMIT
    while not ((live.run_dir / "run.json").exists() and is_stuck()):
        assert live.process.poll() is None, live.err.read_text()
        assert time.monotonic() < deadline, "the ranks never got where they get stuck"
        time.sleep(0.2)
    return Stuck(doctor, live)


def end(stuck: Stuck) -> Result:
    """End the job as a person does who has seen enough."""
    for declared in read_declared(stuck.run_dir):
        process = psutil.Process(declared.pid)
        if process.is_running():
            process.send_signal(signal.SIGKILL)
    stuck.live.process.send_signal(signal.SIGTERM)
    return stuck.live.finish()


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stuck]:
    token = uuid.uuid4().hex
    doctor = Doctor(tmp_path_factory.mktemp("stuck"), token)
    made = start(
        doctor, "collective", "sleep", "collective", "collective", "gil", "stopped", "collective"
    )
    yield made
    end(made)
    assert not marked(token)


def test_the_odd_ones_are_marked_and_equal_frames_stand_once(stuck: Stuck) -> None:
    said = stuck.says(LANG="C", LC_ALL="")
    assert said.status == 0, said.stderr
    assert said.stdout.isascii()
    head, *tree = said.stdout.splitlines()
    stopped = f"stuck.py:{LINES['stopped']}"
    if tree[0].startswith("x"):
        # No py-spy that may look into a process that cannot answer.
        assert tree[0] == "x [5]  no stack: stopped (SIGSTOP)"
        assert "py-spy" in tree[1]
        assert head.endswith("6 of 7 ranks: [1,4] are not where the other 4 are")
        tree = tree[2:]
        assert tree[0] == "[0-4,6]"
    else:
        assert head.endswith("7 ranks: [1,4-5] are not where the other 4 are")
        assert tree[0] == "[0-6]"
        note = "    stopped (SIGSTOP); its stack was read by py-spy"
        assert stopped in tree[tree.index(note) - 1]
    text = "\n".join(tree)
    assert text.count("<module>") == 1
    odd, gil, most = text.index("! [1]  not"), text.index("! [4]  not"), text.index("  [0,2-3,6]\n")
    assert odd < most and gil < most
    assert f"stuck.py:{LINES['sleep']}" in text[odd:]
    assert "time.sleep(600)" in text[odd:]
    assert f"stuck.py:{LINES['gil']}" in text[gil:]
    assert f"stuck.py:{LINES['collective']}" in text[most:]
    assert "... 2 frames in torch, in all_reduce" in text[most:]
    assert all(len(line) <= 80 for line in said.stdout.splitlines())


def test_json_says_all_of_it(stuck: Stuck) -> None:
    said = json.loads(stuck.says("--json").stdout)
    check_schema("stacks", said)
    assert said["live"] is True
    assert [each["rank"] for each in said["ranks"]] == list(range(7))
    assert [each["gil_held"] for each in said["ranks"]] == [False] * 4 + [True, False, False]
    stopped = said["ranks"][5]
    assert stopped["state"]["letter"] == "T"
    assert "stopped (SIGSTOP)" in (stopped["trouble"] or stopped["note"])
    looked = bool(stopped["threads"])
    assert said["odd"] == ([1, 4, 5] if looked else [1, 4])
    (root,) = said["merged"]
    assert root["ranks"] == [rank for rank in range(7) if looked or rank != 5]
    assert root["children"][0]["odd"] is True


def test_some_ranks_alone(stuck: Stuck) -> None:
    said = stuck.says("--rank", "0", "--rank=2-3", "--all-frames")
    assert "3 ranks, all at one place" in said.stdout
    assert "distributed_c10d.py" in said.stdout
    none = stuck.says("--rank=9")
    assert none.status == 2
    assert none.stderr.splitlines() == [
        f"ddpdoctor: error: {stuck.run_dir.name} has no rank 9",
        "ddpdoctor: leave out --rank to see all ranks",
    ]


def test_the_newest_live_run_is_found(stuck: Stuck) -> None:
    said = stuck.doctor.cli("stacks", "--rank", "1")
    assert said.stdout.startswith(f"{stuck.run_dir.name} at ")


AS_NOBODY = """
import os, sys
from ddpdoctor import cli
words = ["stacks", sys.argv[1]]
# What it takes is imported by then: nobody may not read every user's Python.
sys.stdout = open(os.devnull, "w")
cli.main(words)
sys.stdout = sys.__stdout__
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.exit(cli.main(words))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_ranks_of_another_user_are_not_asked(stuck: Stuck) -> None:
    def as_nobody() -> Result:
        return stuck.doctor.run(
            sys.executable, "-c", AS_NOBODY, str(stuck.run_dir), watch=False, timeout=LIMIT
        )

    refused = as_nobody()
    assert refused.status == 2
    assert refused.stderr.splitlines() == [
        f"ddpdoctor: error: {stuck.run_dir} may not be read: it belongs to root",
        "ddpdoctor: run this command with sudo",
    ]
    # Each directory above is made for its owner alone.
    above = [each for each in stuck.run_dir.parents if each.stat().st_mode & 0o777 == 0o700]
    mode = {each: each.stat().st_mode for each in (*above, *stuck.run_dir.iterdir())}
    try:
        for _ in range(5):
            for each in (*above, stuck.run_dir, *stuck.run_dir.iterdir()):
                each.chmod(0o755 if each.is_dir() else 0o644)
            said = as_nobody()
            # The supervisor makes some files again meanwhile, for their owner alone.
            if "is read as a copy" in said.stderr:
                break
    finally:
        for each, before in mode.items():
            each.chmod(before)
        stuck.run_dir.chmod(0o700)
    assert f"{stuck.run_dir} belongs to root and is read as a copy" in said.stderr
    assert "cannot be asked" not in said.stdout


@pytest.mark.slow
def test_ranks_that_are_not_ranks_yet_and_the_end(doctor: Doctor) -> None:
    """One waits in init_process_group for one that never gets there."""
    made = start(doctor, "sleep", "before")
    deadline = time.monotonic() + LIMIT
    wanted = [f"stuck.py:{LINES[place]} " for place in ("init", "before")]
    while not all(place in (said := made.says()).stdout for place in wanted):
        assert time.monotonic() < deadline, said.stdout
        time.sleep(0.5)
    assert "2 ranks at 2 different places" in said.stdout
    end(made)
    after = made.says()
    assert f"{made.run_dir.name} has ended; its last stacks, of " in after.stdout
    assert f"stuck.py:{LINES['before']} " in after.stdout
    (made.run_dir / "stacks.json").unlink()
    none = made.says()
    assert none.status == 2
    assert "has ended, and no stacks were taken while it ran" in none.stderr


@pytest.mark.slow
def test_a_rank_that_was_killed_is_said_to_have_ended(doctor: Doctor) -> None:
    live = doctor.start(
        "--nproc-per-node=2", str(JOBS / "train.py"), "--pause=0.05", "--steps=4000"
    )
    run = live.wait_for_steps(2)
    status = run.ranks[1].status
    assert status is not None
    psutil.Process(status.pid).kill()
    seen = ""
    while live.process.poll() is None and seen != "has ended":
        found = capture(glance(live.run_dir))
        seen = found[1].trouble if len(found) == 2 else ""
    assert seen == "has ended"
    live.finish()


@pytest.mark.slow
def test_losses_are_the_same_bit_for_bit_while_stacks_are_taken(doctor: Doctor) -> None:
    words = ["--nproc-per-node=2", str(JOBS / "train.py"), "--print-losses", "--steps=40"]
    words += ["--workers=1", "--pause=0.01"]
    bare = doctor.torchrun(*words)
    live = doctor.start(*words)
    answers = 0
    while live.process.poll() is None:
        if (live.run_dir / "run.json").exists():
            found = capture(glance(live.run_dir))
            answers += sum(each.main is not None for each in found)
    watched = live.finish()
    bare.check_success()
    watched.check_success()
    assert sorted(watched.stdout.splitlines()) == sorted(bare.stdout.splitlines())
    assert answers > 50
    assert not [record for rank in watched.run.last for record in rank.records.of(FaultRecord)]
