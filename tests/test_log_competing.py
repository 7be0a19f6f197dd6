"""Where several failures explain the end of a job, and whose they are."""

from __future__ import annotations

import pytest

from tests.log_lines import CANCELLED, STEPS, SUMMARY, one, timeouts

LIMIT = CANCELLED.replace(" ***\n", " DUE TO TIME LIMIT ***\n")
RAISED = (
    'Traceback (most recent call last):\n  File "/job/a.py", line 9, in <module>\n    main()\n{}\n'
)
PRINTED = (
    'Traceback (most recent call last):\n  File "/job/data.py", line 4, in load\n    open(p)\n{}\n'
)


@pytest.mark.parametrize(
    ("before", "code"),
    [
        (RAISED.format("ValueError: bad"), "DDP901"),
        (timeouts(r0=(4, "ALLREDUCE", 64), r1=(4, "ALLREDUCE", 64)), "DDP907"),
        (PRINTED.format("OSError: x") + STEPS, "DDP908"),
        ("", "DDP908"),
    ],
)
def test_a_time_limit_is_no_cause_where_a_process_had_ended_before(before: str, code: str) -> None:
    found = one(STEPS + before + LIMIT)
    assert found.code == code
    assert any("DUE TO TIME LIMIT" in each for each in found.evidence)


def test_what_a_process_went_on_after_did_not_end_it() -> None:
    caught = PRINTED.format("OSError: cannot read a.jpg")
    found = one(STEPS + caught + "trying another\n" + RAISED.format("TypeError: bad"))
    assert found.message == "a process of the job raised TypeError: bad"
    assert any("goes on after" in each and "OSError" in each for each in found.evidence)
    # If nothing was printed between them, the one may follow from the other.
    found = one(STEPS + caught + RAISED.format("TypeError: bad"))
    assert found.message == "a process of the job raised OSError: cannot read a.jpg"


def test_versions_that_are_accepted_are_no_failure() -> None:
    accepted = (
        "Installed CUDA version 12.1 does not match the version torch was compiled with 12.4 "
        "but since the APIs are compatible, accepting this combination\n"
    )
    found = one(accepted + STEPS + RAISED.format("TypeError: bad"))
    assert (found.code, found.message) == ("DDP901", "a process of the job raised TypeError: bad")
    assert not any("accepting" in each for each in found.evidence)


def test_the_report_of_torchrun_says_whose_an_exception_is() -> None:
    raised = RAISED.format("ValueError: bad")
    assert one(STEPS + raised + SUMMARY.format(77)).ranks == (1,)
    # Of two that differ it does not.
    other = RAISED.format("TypeError: other")
    assert one(STEPS + raised + other + SUMMARY.format(77)).ranks == ()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("=   KILLED BY SIGNAL: 9 (Killed)", "DDP902"),
        ("zsh: killed     python train.py", "DDP902"),
        ("[1]    4711 segmentation fault (core dumped)  python train.py", "DDP904"),
        ("Terminated", "DDP908"),
        ("Aborted!", "DDP908"),
        ("=>> PBS: job killed: mem 65011712kb exceeded limit 62914560kb", "DDP903"),
        ("/bin/sh: 1: python: not found", "DDP960"),
        ("bash: ./train.sh: Permission denied", "DDP960"),
        ("exit code: 255", "DDP907"),
        ("Loss is nan, stopping training", "DDP900"),
        ("Training job failed.", "DDP900"),
    ],
)
def test_the_last_words_of_a_job_are_heard(line: str, code: str) -> None:
    assert one(STEPS + line + "\n").code == code


def test_a_comments_mark_is_stripped() -> None:
    text = '# [rank2]: Traceback (most recent call last):\n# [rank2]:   File "/job/a.py", line 9\n'
    assert one(text + "# [rank2]: ValueError: bad\n").message == "rank 2 raised ValueError: bad"


def test_a_message_that_srun_cut_in_two() -> None:
    text = RAISED.format("AssertionError") + ": no data\n"
    assert one(text).message == "a process of the job raised AssertionError: no data"


def test_a_worker_of_old_torch_whose_message_is_a_traceback() -> None:
    text = (
        'Traceback (most recent call last):\n  File "/job/a.py", line 9, in <module>\n    go()\n'
        'KeyError: Traceback (most recent call last):\n  File "/job/data.py", line 4, in load\n'
        "    d[1]\nKeyError: 1\n"
    )
    found = one(text)
    assert found.message == "a process of the job raised KeyError: 1"
    assert found.location is not None and found.location.path == "/job/data.py"
