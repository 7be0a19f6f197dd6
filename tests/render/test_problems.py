"""Findings as lines for an editor's problem matcher."""

from __future__ import annotations

import pytest

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.user_code import Location
from ddpdoctor.render import console

PLACE = Location("/w/train.py", 52)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("rank 1 stands in /w/train.py:52, in all_reduce", "rank 1 stands here, in all_reduce"),
        ("the sampler built at /w/train.py:52 is idle", "the sampler built here is idle"),
        ("/w/train.py:52 differs (/w/train.py:52)", "this line differs (this line)"),
        ("rank 0 is at /w/train.py:521", "rank 0 is at /w/train.py:521"),
        ("rank 0 is at /x/w/train.py:52", "rank 0 is at /x/w/train.py:52"),
        ("rank 0 is at /w/other.py:52", "rank 0 is at /w/other.py:52"),
    ],
)
def test_a_message_does_not_repeat_its_own_place(message: str, shown: str) -> None:
    finding = Finding(
        code="DDP801",
        severity=Severity.ERROR,
        message=message,
        ranks=(1,),
        location=PLACE,
        evidence=(),
        fix="Change it",
    )
    line = console.problem_line(finding, "/w/train.py")
    assert line == f"/w/train.py:52:1: error DDP801 {shown}. Change it"
