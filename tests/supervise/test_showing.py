"""What the supervisor shows of a live job: findings in its journal, the last of stderr."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.core.finding import Finding, Severity, from_record, to_record
from ddpdoctor.core.user_code import Location
from ddpdoctor.render import json_lines
from ddpdoctor.run import rundir
from ddpdoctor.run.records.supervisor import FindingRecord, RetractionRecord
from ddpdoctor.run.reported import Reported, Withdrawn, from_journal, to_journal
from ddpdoctor.supervise import run_watch
from ddpdoctor.supervise.job_signals import Passthrough
from ddpdoctor.supervise.run_watch import StderrFile, keep_stderr
from tests.conftest import Doctor

FOUND = Finding(
    code="DDP610",
    severity=Severity.WARNING,
    message="rank 1 holds the others up",
    ranks=(1,),
    location=Location("/job/train.py", 12),
    evidence=("own time 30 ms", "the others 3 ms"),
    fix="Look at it.",
    about="rank 1",
)


class Written(Passthrough):
    """A job whose stderr is this."""

    def __init__(self) -> None:
        self.text = b""

    @property
    def carried(self) -> int:  # type: ignore[override]
        return len(self.text)

    @property
    def tail(self) -> bytes:
        return self.text

    def last(self, size: int) -> bytes:
        return self.text[-size:]


def test_a_finding_survives_its_line() -> None:
    plain = Finding(code="DDP214", severity=Severity.ERROR, message="it")
    for finding in (FOUND, plain):
        told = json.loads(json_lines.line(finding, {}))
        back = from_record({"kind": "finding", "time": 5, **told})
        assert back is not None
        assert to_record(back) == to_record(finding)


@pytest.mark.parametrize(
    "told",
    [{}, {"code": 1, "severity": "grave", "message": ""}, {**to_record(FOUND), "ranks": 5},
     {**to_record(FOUND), "location": "train.py:12"}],
)  # fmt: skip
def test_what_is_no_finding_is_none(told: dict[str, object]) -> None:
    assert from_record(told) is None


def test_what_is_said_and_withdrawn_is_written() -> None:
    told = Reported(1, FOUND, 0)
    over = Withdrawn(2, told, "over", "the newest steps do not show it")
    first, second = to_journal(told, 7), to_journal(over, 7)
    assert isinstance(first, FindingRecord)
    assert (first.code, first.number) == ("DDP610", 1)
    found = from_journal(first)
    assert found is not None
    assert to_record(found) == to_record(replace(FOUND, restart=0))
    assert isinstance(second, RetractionRecord)
    assert (second.retracts, second.why) == (1, "over")


def test_the_last_of_stderr_is_shown_where_it_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Written()
    shows, file = StderrFile(tmp_path, job), tmp_path / rundir.STDERR_SO_FAR
    shows.update()
    assert not file.exists()
    job.text = b"x" * run_watch.MAX_SHOWN + b"the end"
    shows.update()
    assert file.read_bytes() == job.text[-run_watch.MAX_SHOWN :]
    before = file.stat().st_ino
    job.text += b"."
    shows.update()
    assert file.stat().st_ino == before, "not twice within a second"
    monkeypatch.setattr(run_watch, "SHOW_INTERVAL", 0.0)
    monkeypatch.setattr(shows, "_due", 0.0)
    shows.update()
    assert file.read_bytes().endswith(b"the end.")
    keep_stderr(tmp_path, job)
    shows.end()
    assert list(tmp_path.iterdir()) == [tmp_path / rundir.STDERR], (
        "the whole end, and no part of it"
    )
    assert (tmp_path / rundir.STDERR).read_bytes() == job.text


def test_a_disk_that_says_no_is_borne(tmp_path: Path) -> None:
    job = Written()
    job.text = b"x"
    shows = StderrFile(tmp_path / "gone", job)
    shows.update()
    keep_stderr(tmp_path / "gone", job)
    shows.end()


JOB = """
import os, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 2))
sys.stderr.write("hello from the job\\n")
for epoch in range(3):
    for (batch,) in DataLoader(data, batch_size=4):
        model.module(batch).sum().backward()
        optimizer.step()
deadline = time.time() + 300
name = os.path.join(os.environ["DDPDOCTOR_RUN_DIR"], "stderr-so-far.log")
while time.time() < deadline and not os.path.exists(name):
    time.sleep(0.1)
# In one write: the other rank prints, too.
os.write(1, f"shown: {open(name).read().strip()}\\n".encode())
"""


@pytest.mark.slow
def test_a_job_is_shown(doctor: Doctor) -> None:
    result = doctor.run("--nproc-per-node", "2", str(doctor.write("train.py", JOB)))
    result.check_success()
    assert "shown: hello from the job" in result.stdout
    assert not (result.run_dir / rundir.STDERR_SO_FAR).exists()
    told = result.run.supervisor.of(FindingRecord)
    assert sorted(each.code for each in told) == sorted(result.codes)
    assert "DDP301" in result.codes
    found = from_journal(told[0])
    assert found is not None and found.fix
