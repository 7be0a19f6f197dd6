"""Odd jobs see, print and end the same with ddpdoctor as without."""

from __future__ import annotations

import pytest

from tests.conftest import Doctor
from tests.odd_jobs import TABLE, VERSIONS, differences, interpreter, seen


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", TABLE)
def test_same_output_and_status(doctor: Doctor, name: str, version: str) -> None:
    job = TABLE[name]
    if int(version.partition(".")[2]) < job.since:
        pytest.skip(f"Python 3.{job.since} has it first")
    python = interpreter(version, job.needs)
    bare, watched = (seen(doctor, job, python, watch=watch) for watch in (False, True))
    assert not differences(bare, watched)
