"""The names that `import ddpdoctor` offers, and what they cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddpdoctor
from ddpdoctor.core.finding import RULES
from ddpdoctor.run.records.process import ErrorRecord
from tests.conftest import ROOT, Doctor
from tests.probe.test_imports import loaded_by
from tests.support.written import T0, Written

NAMES = {
    "DoctorError", "Finding", "Location", "Rule", "Run", "Severity", "__version__", "examine",
    "read_run", "rule",
}  # fmt: skip


def failed_run(written: Written) -> Path:
    written.rank(0, [])
    written.rank(1, [ErrorRecord(time=T0, exception="ValueError", message="no such fold")])
    written.findings(status=1)
    return written.path


def test_every_public_name_is_there_and_documented() -> None:
    assert set(ddpdoctor.__all__) == NAMES <= set(dir(ddpdoctor))
    page = (ROOT / "docs" / "api.md").read_text()
    for name in NAMES:
        assert getattr(ddpdoctor, name) is not None
        assert f"`{name}`" in page or f"`{name}(" in page, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'reed_run'"):
        ddpdoctor.reed_run  # type: ignore[attr-defined]  # noqa: B018


def test_the_import_loads_nothing() -> None:
    assert loaded_by("import ddpdoctor") == {"ddpdoctor"}
    loaded = loaded_by("import ddpdoctor; ddpdoctor.rule, ddpdoctor.Finding, ddpdoctor.Severity")
    assert not [each for each in loaded if each.startswith("ddpdoctor.diagnose")]


def test_a_run_is_read_and_examined_as_report_does(written: Written, doctor: Doctor) -> None:
    path = failed_run(written)
    run = ddpdoctor.read_run(str(path))
    assert isinstance(run, ddpdoctor.Run) and [rank.rank for rank in run.ranks] == [0, 1]
    found = ddpdoctor.examine(run)
    assert all(isinstance(each, ddpdoctor.Finding) for each in found)
    assert [(each.code, each.ranks) for each in found] == [("DDP901", (1,))]
    assert found[0].severity >= ddpdoctor.Severity.ERROR
    reported = doctor.cli("report", str(path), "--json").stdout.splitlines()
    assert [json.loads(line)["id"] for line in reported] == [each.id for each in found]


@pytest.mark.parametrize("name", ["missing", "file", "empty"])
def test_what_is_no_run_is_a_public_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ddpdoctor.DoctorError, match="is not a run directory") as caught:
        ddpdoctor.read_run(tmp_path / name)
    assert "Traceback" not in str(caught.value)


def test_a_rule_of_the_caller_is_applied_and_one_that_fails_is_left_out(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ddpdoctor.read_run(failed_run(written))
    ddpdoctor.examine(run)
    registry = dict(RULES)
    monkeypatch.setattr("ddpdoctor.api.RULES", registry)
    monkeypatch.setattr("ddpdoctor.core.finding.RULES", registry)

    @ddpdoctor.rule("OURS001", "two-ranks", ddpdoctor.Severity.INFO)
    def two_ranks(run: ddpdoctor.Run) -> Iterator[ddpdoctor.Finding]:
        yield ddpdoctor.Finding("OURS001", ddpdoctor.Severity.INFO, f"{len(run.ranks)} ranks")

    @ddpdoctor.rule("OURS002", "broken", ddpdoctor.Severity.INFO)
    def broken(run: ddpdoctor.Run) -> Iterator[ddpdoctor.Finding]:
        raise LookupError("no such record")
        yield

    with pytest.warns(RuntimeWarning, match=r"rule OURS002 failed: LookupError"):
        found = ddpdoctor.examine(run)
    assert [each.message for each in found if each.code == "OURS001"] == ["2 ranks"]


def test_the_citation_names_this_version() -> None:
    assert f"\nversion: {ddpdoctor.__version__}\n" in (ROOT / "CITATION.cff").read_text()
