"""Collectives that are called while an exception is being handled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Doctor

JOB = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
class Joined:
    def __enter__(self):
        return self
    def __exit__(self, *error):
        dist.barrier()
        return True
for number in range(20):
    with Joined():
        raise ValueError(number)
with Joined():
    pass
try:
    next(iter(()))
except StopIteration:
    dist.barrier()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_each_line_is_recorded_once(doctor: Doctor) -> None:
    script = doctor.directory / "job.py"
    script.write_text(JOB)
    run = doctor.directory / "run"
    result = doctor.run("--run-dir", str(run), "--nproc-per-node", "2", "--", str(script))
    assert result.status == 0
    for journal in run.glob("rank-*.jsonl"):
        lines = [json.loads(each) for each in Path(journal).read_text().splitlines()]
        found = [each for each in lines if each["kind"] == "pending_error"]
        assert [each["message"] for each in found] == ["0"]
        assert {each["collective"] for each in found} == {"barrier"}
        assert {each["called_at"][1] for each in found} == {7}
        assert {each["line"] for each in found} == {11}
