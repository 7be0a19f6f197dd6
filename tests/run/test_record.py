"""Run directories as a whole: missing, damaged and newer files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.reader import RunReader, read_manifest
from ddpdoctor.run.records.base import JsonObject, json_line
from ddpdoctor.run.records.process import OpenRecord
from tests.support.journals import PACKAGE, new_page, new_run, step


def test_no_file_is_ever_unpickled() -> None:
    """A run directory may come from another machine; reading it must not run what is in it."""
    banned = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    # The Flight Recorder hands a rank's own collectives to it as a pickle, in memory.
    in_memory = {
        PACKAGE / "probe" / "observers" / "collective_calls.py",
        # A kept step is read by `ddpdoctor replay` alone, if it is of the reader's account.
        PACKAGE / "run" / "capsule.py",
        # Memory snapshots are written as torch writes them, for memory_viz, and never read.
        PACKAGE / "probe" / "runtime" / "torch_memory.py",
    }
    # A function is made of the names of the parameters that a function of torch has.
    of_names = {
        PACKAGE / "probe" / "observers" / "collective_calls.py",
        # A constructor is made of the names of the fields that a class of ours declares.
        PACKAGE / "run" / "records" / "base.py",
        # The classes of a script are executed to read a kept step.
        PACKAGE / "replay" / "definitions.py",
        # What the user of `ddpdoctor eval` and of a debugger typed is evaluated in the rank.
        PACKAGE / "probe" / "runtime" / "evaluation.py",
        PACKAGE / "probe" / "runtime" / "frame_values.py",
    }
    for path in set(PACKAGE.rglob("*.py")) - in_memory:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                assert not banned & {alias.name.split(".")[0] for alias in node.names}, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in banned, path
            elif isinstance(node, ast.Name) and path not in of_names:
                assert node.id not in ("eval", "exec"), f"{path}:{node.lineno}"


def test_a_run_is_read_while_its_files_are_still_missing(tmp_path: Path) -> None:
    reader = RunReader(new_run(tmp_path))
    assert reader.snapshot().ranks == ()
    new_page(tmp_path / "rank-0003.r2.status", rank=3)
    (rank,) = reader.snapshot().ranks
    assert (rank.rank, rank.restart, rank.opened, rank.steps) == (
        3,
        2,
        OpenRecord(format=FORMAT, rank=3),
        (),
    )
    (tmp_path / "rank-0003.r2.jsonl").write_bytes(
        json_line({"kind": "open", "host": "here"}) + step(0)
    )
    (rank,) = reader.snapshot().ranks
    assert rank.opened.host == "here"
    assert len(rank.steps) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "new"}', "null", "{}"])
def test_a_damaged_manifest_is_refused_in_words(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(DoctorError, match="is damaged"):
        read_manifest(tmp_path)


def test_a_missing_manifest_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(DoctorError, match="not a run directory"):
        RunReader(tmp_path)


def test_a_run_of_a_newer_format_is_refused_in_words(tmp_path: Path) -> None:
    new_run(tmp_path, {"format": FORMAT + 1})
    with pytest.raises(DoctorError, match=rf"newer ddpdoctor \(format {FORMAT + 1}; .* {FORMAT}\)"):
        RunReader(tmp_path)


def test_a_rank_of_a_newer_format_is_left_out_and_named(tmp_path: Path) -> None:
    new_run(tmp_path)
    new_page(tmp_path / "rank-0000.r0.status", rank=0)
    new_page(tmp_path / "rank-0001.r0.status", rank=1)
    (tmp_path / "rank-0000.r0.jsonl").write_bytes(json_line({"kind": "open", "format": FORMAT}))
    (tmp_path / "rank-0001.r0.jsonl").write_bytes(json_line({"kind": "open", "format": FORMAT + 1}))
    run = RunReader(tmp_path).snapshot()
    assert [rank.rank for rank in run.ranks] == [0]
    assert len(run.unreadable) == 1
    assert "rank-0001.r0" in run.unreadable[0]
    assert f"format {FORMAT + 1}" in run.unreadable[0]


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("rank-0000.r0.jsonl", {"kind": "open", "format": "newest"}),
        ("process-17.jsonl", {"kind": "error", "time": "soon"}),
        ("process-17.jsonl", {"kind": "error", "restart": "first"}),
        ("supervisor.jsonl", {"kind": "rank_exit", "rank": 0}),
        ("supervisor.jsonl", {"kind": "rank_exit", "rank": "zero", "restart": 0}),
        ("supervisor.jsonl", {"kind": "job"}),
        ("supervisor.jsonl", {"kind": "job", "status": "fine"}),
        ("supervisor.jsonl", {"kind": "signal"}),
    ],
)
def test_records_with_odd_values_do_not_keep_a_run_from_being_read(
    tmp_path: Path, name: str, record: JsonObject
) -> None:
    new_run(tmp_path)
    new_page(tmp_path / "rank-0000.r0.status", rank=0)
    if not name.startswith("rank"):
        (tmp_path / "rank-0000.r0.jsonl").write_bytes(json_line({"kind": "open"}))
    (tmp_path / name).write_bytes(json_line(record))
    run = RunReader(tmp_path).snapshot()
    assert run.restarts == (0,)
    assert run.exit_status is None
    assert run.stopped_at is None


def test_a_damaged_page_is_named_and_its_rank_stays(tmp_path: Path) -> None:
    new_run(tmp_path)
    (tmp_path / "rank-0000.r0.status").write_bytes(b"")
    (tmp_path / "rank-0000.r0.jsonl").write_bytes(
        json_line({"kind": "open", "host": "here"}) + step(0)
    )
    run = RunReader(tmp_path).snapshot()
    (rank,) = run.ranks
    assert rank.status is None
    assert len(rank.steps) == 1
    assert "rank-0000.r0.status" in run.unreadable[0]
