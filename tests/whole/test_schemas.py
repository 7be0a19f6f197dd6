"""What `--json` prints fits the schemas that ship with the package."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from ddpdoctor.commands import report, runs, stacks
from ddpdoctor.core.finding import Finding, Severity, from_record, to_record
from ddpdoctor.core.user_code import Location
from ddpdoctor.render import json_lines
from ddpdoctor.run.records.supervisor import Frame, RankStacks, Thread
from ddpdoctor.run.reported import Reported, Withdrawn, from_journal, to_journal
from ddpdoctor.scale import table
from ddpdoctor.top import output, snapshot
from tests.conftest import ROOT, Doctor
from tests.support.drawn_runs import write_run
from tests.support.scale_runs import measured, outcome, planned
from tests.support.schemas import SCHEMAS, check_schema
from tests.support.top_snapshots import CASES

FOUND = Finding(
    "DDP403",
    Severity.ERROR,
    "rank 1 alone left the training loop",
    (1,),
    Location("/w/train.py", 35),
    ("rank 1 took 9 batches",),
    "Reduce it over the ranks",
    paste="ls",
    restart=0,
)


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_schema_is_one_and_is_documented(name: str) -> None:
    Draft202012Validator.check_schema(SCHEMAS[name])
    assert f"`{name}.json`" in (ROOT / "docs" / "api.md").read_text()


def test_there_is_one_for_each_json() -> None:
    names = {
        "check", "compare", "eval", "findings", "parity", "runs", "scale", "stacks", "top",
    }  # fmt: skip
    assert set(SCHEMAS) == names


def test_a_finding_is_the_same_everywhere() -> None:
    (finding, *_) = SCHEMAS["findings"]["oneOf"]
    for name in ("check", "parity", "scale"):
        assert SCHEMAS[name]["$defs"]["finding"]["properties"] == finding["properties"]


def test_lines_of_findings() -> None:
    head = json_lines.head()
    gone = Withdrawn(2, Reported(1, FOUND, 0), "over", "it has recovered")
    for line in (
        json_lines.line(FOUND, head),
        json_lines.line(Finding("ACME101", Severity.INFO, "no place"), head),
        json_lines.retraction(gone, head),
        json_lines.end(-9, [FOUND], head),
    ):
        check_schema("findings", json.loads(line))
        for broken in ({"format": 2}, {"colour": "red"}, {"ranks": "all"}):
            with pytest.raises(ValidationError):
                check_schema("findings", {**json.loads(line), **broken})


def test_the_id_is_made_as_documented() -> None:
    facts = b'["DDP403", [1], "/w/train.py", 35, 0]'
    assert FOUND.id == hashlib.sha256(facts).hexdigest()[:16] == to_record(FOUND)["id"]
    others = [
        replace(FOUND, code="DDP402"),
        replace(FOUND, ranks=(1, 2)),
        replace(FOUND, location=None),
        replace(FOUND, restart=1),
    ]
    assert len({FOUND.id, *(each.id for each in others)}) == 5
    assert replace(FOUND, message="rank 1 left", severity=Severity.INFO).id == FOUND.id


def test_the_id_survives_the_journal_and_json() -> None:
    back = from_record(json.loads(json_lines.line(FOUND, {})))
    kept = to_journal(Reported(1, FOUND, 0), 5)
    assert back is not None and not isinstance(kept, Withdrawn)
    assert back.id == FOUND.id
    assert from_journal(kept).id == FOUND.id  # type: ignore[arg-type, union-attr]


@pytest.mark.slow
def test_a_job_and_its_report_have_the_same_ids(doctor: Doctor) -> None:
    doctor.write("fails.py", "import torch.distributed as d\nd.init_process_group('gloo')\n1/0\n")
    result = doctor.run(
        "--nproc-per-node", "1", "--json", "found.jsonl", "--no-vscode", "--strict", "fails.py"
    )
    text = (doctor.directory / "found.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        check_schema("findings", line)
    *found, end = lines
    assert end["event"] == "end" and end["exit_status"] == result.status == 1
    assert end["findings"] == {"error": len(found), "warning": 0, "info": 0}
    assert {each["run"] for each in lines} == {end["run"]}
    reported = doctor.cli("report", "--json", str(result.run_dir)).stdout.splitlines()
    assert [json.loads(line)["id"] for line in reported] == [each["id"] for each in found] != []
    for line in reported:
        check_schema("findings", json.loads(line))
    shown = doctor.cli("top", "--json", str(result.run_dir)).stdout
    check_schema("top", json.loads(shown))
    assert [each["id"] for each in json.loads(shown)["findings"]] == [each["id"] for each in found]


def test_check(doctor: Doctor) -> None:
    only = "launch-environment,memory,host-name,shared-memory,limits"
    told = doctor.cli("check", "--only", only, "--json")
    check_schema("check", json.loads(told.stdout))


def test_runs_and_their_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write_run(tmp_path / "before", slow=-1)
    after = write_run(tmp_path / "after", manifest={"command": ["python", "train.py"]})
    monkeypatch.setattr("ddpdoctor.run.rundir.newest_first", lambda: [before, after])
    assert runs.main(["--json"]) == 0
    for line in capsys.readouterr().out.splitlines():
        check_schema("runs", json.loads(line))
    assert report.main(["--json", str(before), str(after)]) == 0
    check_schema("compare", json.loads(capsys.readouterr().out))


def test_stacks() -> None:
    frames = (Frame("/w/train.py", 35, "main"), Frame("/w/model.py", 7, "forward"))
    main = Thread(1, "MainThread", True, frames)
    found = (
        RankStacks(0, 0, 11, "node0", (main,)),
        RankStacks(1, 0, 12, "node0", (replace(main, frames=frames[:1]),)),
        RankStacks(2, 0, 13, "node0", trouble="stopped (SIGSTOP)"),
    )
    taken = stacks._Taken("1", 0, found, 5, "")
    check_schema("stacks", json.loads(json.dumps(stacks._as_json(taken))))


@pytest.mark.parametrize("published", [False, True])
def test_scale(published: bool) -> None:
    made = [outcome(planned(ranks), measured(ranks, exposed=0.01)) for ranks in (1, 2)]
    made.append(replace(outcome(planned(4), None, failure="it failed"), findings=(FOUND,)))
    facts = {
        "command": ["t.py"], "repeats": 1, "warmup": 5, "scaling": "weak", "directory": "/r"
    }  # fmt: skip
    check_schema("scale", json.loads(table.document(made, facts, published=published)))


@pytest.mark.parametrize("case", ["2-ranks", "dead", "hung", "mig", "machine", "ended", "no-gpu"])
def test_top(case: str) -> None:
    check_schema("top", json.loads(output.line(CASES[case]()[0])))


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("verdict", snapshot.Verdict),
        ("job", snapshot.Job),
        ("rank", snapshot.RankRow),
        ("gpu", snapshot.Gpu),
        ("machine", snapshot.Machine),
        ("times", snapshot.Times),
    ],
)
def test_every_field_of_top_is_in_its_schema(name: str, declared: Any) -> None:
    fields = {each.name for each in dataclasses.fields(declared)}
    assert set(SCHEMAS["top"]["$defs"][name]["properties"]) - {"own"} == fields
