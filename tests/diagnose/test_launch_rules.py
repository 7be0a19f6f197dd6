"""DDP2xx and DDP5xx where no short job stages them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ddpdoctor.core.finding import Finding
from ddpdoctor.diagnose.launch import rules
from ddpdoctor.probe.observers import ddp_modules, failures
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.process import OpenRecord
from ddpdoctor.run.snapshot import Rank, Records, Run
from tests.support.written import Written, rank_records, supervisor_records

MISSING = (
    "Error(s) in loading state_dict for Linear:\n"
    '\tMissing key(s) in state_dict: "weight", "bias". \n'
    '\tUnexpected key(s) in state_dict: "module.weight", "module.bias". '
)


def only(found: list[Finding], code: str) -> Finding:
    (finding,) = (each for each in found if each.code == code)
    return finding


def failed(written: Written, message: str) -> list[Finding]:
    error = {
        "kind": "error",
        "time": 1,
        "exception": "RuntimeError",
        "message": message,
        "path": "/job/eval.py",
        "line": 12,
    }
    written.rank(0, [error])
    written.exit(0, 1, 2)
    return written.findings(status=1)


def test_a_prefix_that_does_not_fit(written: Written) -> None:
    finding = only(failed(written, MISSING), "DDP502")
    assert finding.location is not None
    assert str(finding.location) == "/job/eval.py:12"
    assert "strip" in finding.fix


def test_each_rank_that_was_refused_is_named_once(written: Written) -> None:
    error = {
        "kind": "error", "exception": "RuntimeError", "message": MISSING, "path": "/job/eval.py",
        "line": 12,
    }  # fmt: skip
    for rank in (0, 1, 2):
        written.rank(rank, [{**error, "time": 3 - rank}])
        written.exit(rank, 1, 4)
    finding = only(written.findings(status=1), "DDP502")
    assert finding.ranks == (0, 1, 2)
    assert finding.evidence == (
        'the model has "weight", the checkpoint "module.weight"',
        "rank 1 failed on it, too",
        "rank 0 failed on it, too",
    )


def test_keys_that_differ_by_more_than_the_prefix(written: Written) -> None:
    found = failed(written, MISSING.replace("module.weight", "net.weight"))
    assert [each for each in found if each.code == "DDP502"] == []


def test_a_load_that_ends_the_job_is_no_other_crash(written: Written) -> None:
    assert "DDP901" not in [each.code for each in failed(written, MISSING)]


def test_other_keys_that_are_missing_come_first(written: Written) -> None:
    message = MISSING.replace('dict: "weight"', 'dict: "0.running_mean", "weight"')
    assert only(failed(written, message), "DDP502").severity.name == "ERROR"


def test_thousands_of_keys(written: Written) -> None:
    keys = [f"layers.{number}.attention.weight" for number in range(2000)]
    missing = ", ".join(f'"{key}"' for key in keys)
    unexpected = ", ".join(f'"module.{key}"' for key in keys)
    error = RuntimeError(
        "Error(s) in loading state_dict for Net:\n"
        f"\tMissing key(s) in state_dict: {missing}. \n"
        f"\tUnexpected key(s) in state_dict: {unexpected}. "
    )
    message = failures.describe(error).message
    assert len(message) < 5000
    assert (
        '"module.layers.0.attention.weight"' in only(failed(written, message), "DDP502").evidence[0]
    )


def test_a_load_that_was_caught_is_left_alone(written: Written) -> None:
    error = {"kind": "error", "time": 1, "exception": "RuntimeError", "message": MISSING}
    written.rank(0, [error])
    written.exit(0, 0, 2)
    assert written.findings(status=0) == []


def not_applied(**more: object) -> dict[str, object]:
    return {
        "kind": "not_applied", "number": 0, "matched": 0, "given": 4, "wanted": 4,
        "missing": ["0.weight"], "unexpected": ["module.0.weight"], "prefix": "module.",
        "of": "checkpoint", "path": "/job/train.py", "line": 9, **more,
    }  # fmt: skip


def test_a_checkpoint_of_which_nothing_was_applied(written: Written) -> None:
    save = {
        "kind": "save",
        "time": 1,
        "file": "/a.pt",
        "content": "wrapped",
        "path": "/b",
        "line": 1,
    }
    written.rank(0, [save, not_applied()])
    written.rank(1, [not_applied()])
    found = written.findings(status=0)
    finding = only(found, "DDP509")
    assert finding.severity.name == "ERROR"
    assert (finding.ranks, str(finding.location)) == ((0, 1), "/job/train.py:9")
    assert finding.message.endswith("with strict=False, and none of 4 names in it fit the model")
    assert "Strip the prefix" in finding.fix
    assert only(found, "DDP502").severity.name == "WARNING", "that it cannot be loaded is proven"


def test_less_than_half_of_a_checkpoint_is_a_warning(written: Written) -> None:
    written.rank(0, [not_applied(matched=1, prefix="", of="")])
    finding = only(written.findings(status=0), "DDP509")
    assert finding.severity.name == "WARNING"
    assert "1 of 4 names" in finding.message


def test_a_second_load_that_fits_makes_it_good(written: Written) -> None:
    written.rank(0, [not_applied(), {"kind": "applied", "number": 0}])
    assert written.findings(status=0) == []


@pytest.mark.parametrize(
    ("given", "missing", "unexpected", "told"),
    [
        (4, ["a", "b"], ["module.a", "module.b", "module.c", "module.d"], True),
        (4, ["head.a"], ["classifier.a"], False),
        (6, [], ["head.a", "head.b", "x", "y", "z"], False),
        (1, ["a", "b", "c"], [], False),
        (4, ["a", "b", "c"], ["x", "y"], True),
    ],
)
def test_what_counts_as_not_applied(
    given: int, missing: list[str], unexpected: list[str], told: bool
) -> None:
    names = dict.fromkeys([*unexpected, *map(str, range(given))][: max(given, len(unexpected))])
    record = ddp_modules.not_applied(names, missing, unexpected)
    assert (record is not None) == told


def test_the_prefix_of_either_side() -> None:
    assert ddp_modules._prefix(["a.w", "b.w"], ["module.a.w", "module.b.w"]) == (
        "module.",
        "checkpoint",
    )
    assert ddp_modules._prefix(["net.a.w"], ["a.w"]) == ("net.", "model")
    assert ddp_modules._prefix(["a.w"], ["b.w"]) == ("", "")


PARSED: JsonObject = {
    "kind": "local_rank", "parsed": 0, "environment": 1, "path": "/job/train.py", "line": 3,
}  # fmt: skip
PARALLEL: JsonObject = {"kind": "data_parallel", "path": "/job/train.py", "line": 9}
WRITTEN = [(PARSED, rules.local_rank_never_filled, 0), (PARALLEL, rules.data_parallel, 16)]


def launched(*ranks: Sequence[JsonObject], step: Sequence[int] = (), over: bool = False) -> Run:
    """A run of ranks with these records that have written the lines of these steps."""
    found = []
    for number, records in enumerate(ranks):
        opened = OpenRecord(format=1, rank=number, world_size=len(ranks))
        lines = [b'{"kind":"step","step":%d,"total":10}' % step[number]] if step else []
        every = rank_records(*records)
        found.append(Rank(number, 0, None, opened, records=every, step_lines=tuple(lines)))
    job = supervisor_records({"kind": "job", "time": 1, "status": 0}) if over else Records(())
    return Run(Path("/run"), {}, tuple(found), taken=10**12, supervisor=job)


@pytest.mark.parametrize(("record", "rule", "after"), WRITTEN)
def test_ranks_that_write_later_are_waited_for(
    record: JsonObject, rule: Callable[[Run], Iterator[Finding]], after: int
) -> None:
    assert not list(rule(launched([record], [], step=(after + 5, after - 1))))
    assert not list(rule(launched([record], [])))
    # It is past the place and has none: it is not one of them.
    (finding,) = rule(launched([record], [], step=(after, after)))
    assert finding.ranks == (0,)
    (finding,) = rule(launched([record], [record], step=(after, after)))
    assert finding.ranks == (0, 1)


@pytest.mark.parametrize(("record", "rule", "after"), WRITTEN)
def test_once_the_job_is_over_no_rank_is_waited_for(
    record: JsonObject, rule: Callable[[Run], Iterator[Finding]], after: int
) -> None:
    (finding,) = rule(launched([record], [], over=True))
    assert finding.ranks == (0,)
