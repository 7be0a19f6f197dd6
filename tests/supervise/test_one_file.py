"""ddpdoctor's lines behind half a line of the job's stdout, where both go to one file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddpdoctor.supervise import job_signals


@pytest.mark.parametrize(
    ("text", "ends"), [(b"", True), (b"step 3\n", True), (b"step 3 ..", False)]
)
def test_the_end_of_a_file(tmp_path: Path, text: bytes, ends: bool) -> None:
    (tmp_path / "log").write_bytes(text)
    with open(tmp_path / "log", "ab") as log:
        assert job_signals._ends_line(log.fileno()) is ends
        assert job_signals._is_one_file(log.fileno(), log.fileno())


def test_a_pipe_and_other_places() -> None:
    reading, writing = os.pipe()
    try:
        assert not job_signals._ends_line(writing)
        assert job_signals._is_one_file(reading, writing)
    finally:
        os.close(reading)
        os.close(writing)
    with open(os.devnull, "wb") as null, open("/dev/zero", "rb") as zero:
        assert job_signals._ends_line(null.fileno())
        assert not job_signals._is_one_file(null.fileno(), zero.fileno())
    assert not job_signals._is_one_file(1 << 20, 1)
