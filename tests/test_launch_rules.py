"""DDP2xx and DDP5xx where no short job stages them."""

from __future__ import annotations

from ddpdoctor.finding import Finding
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


def test_keys_that_differ_by_more_than_the_prefix(written: Written) -> None:
    found = failed(written, MISSING.replace("module.weight", "net.weight"))
    assert [each for each in found if each.code == "DDP502"] == []
