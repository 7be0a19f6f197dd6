"""DDP2xx and DDP5xx where no short job stages them."""

from __future__ import annotations

from ddpdoctor.finding import Finding
from ddpdoctor.probe.hooks import errors
from tests.written import Written

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
    message = errors.describe(error)["message"]
    assert len(message) < 5000
    assert (
        '"module.layers.0.attention.weight"' in only(failed(written, message), "DDP502").evidence[0]
    )


def test_a_load_that_was_caught_is_left_alone(written: Written) -> None:
    error = {"kind": "error", "time": 1, "exception": "RuntimeError", "message": MISSING}
    written.rank(0, [error])
    written.exit(0, 0, 2)
    assert written.findings(status=0) == []
