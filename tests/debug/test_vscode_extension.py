"""The extension of editors/vscode, in a real VS Code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LIMIT, ROOT

DRIVER = ROOT / "editors" / "vscode" / "test" / "end_to_end.mjs"


@pytest.fixture(scope="module")
def home() -> str:
    """The folder that test/end_to_end.mjs describes, from the variable `DDPDOCTOR_CODE_SERVER`."""
    found = os.environ.get("DDPDOCTOR_CODE_SERVER")
    if found is None or shutil.which("node") is None:
        pytest.skip("DDPDOCTOR_CODE_SERVER is not set, or there is no node")
    return found


def drive(home: str, workspace: Path, trial: str) -> dict[str, Any]:
    """Return what a trial of test/end_to_end.mjs has seen."""
    words = [str(DRIVER), home, str(workspace), sys.executable, trial]
    done = subprocess.run(["node", *words], capture_output=True, text=True, timeout=10 * LIMIT)
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])[trial]
    print(seen)
    assert "error" not in seen
    return seen


@pytest.mark.slow
def test_f5_without_any_file(home: str, tmp_path: Path) -> None:
    seen = drive(home, tmp_path, "f5")
    assert None not in (seen["first_stop"], seen["stepped"], seen["stop"])
    assert any(row.startswith("rank 1") for row in seen["call_stack"])
    assert any("2" in row for row in seen["expressions"] if row.startswith("dist"))
    assert any("different values" in row for row in seen["expressions"])
    assert any("step" in row for row in seen["runs"] if row.startswith("rank 1"))
    assert seen["status"]
    assert not (tmp_path / ".vscode").exists()


@pytest.mark.slow
def test_f5_with_the_files_that_the_command_writes(home: str, tmp_path: Path) -> None:
    seen = drive(home, tmp_path, "files")
    assert "open the script and press F5" in seen["said"]
    assert None not in (seen["first_stop"], seen["stepped"], seen["stop"])
    assert sum("Tensor[32, 10] float32 cpu mean" in row for row in seen["values"]) == 2
    assert not seen["notifications"]


@pytest.mark.slow
def test_a_late_attach_stops_all_ranks_in_one_step(home: str, tmp_path: Path) -> None:
    seen = drive(home, tmp_path, "late")
    assert None not in (seen["first_stop"], seen["stepped"]) and seen["goes_on"]
    assert [row for row in seen["step"] if "ranks 0-1" in row] == seen["step"]
    assert any("Tensor[32, 10] float32 cpu mean" in text for text in seen["hover"])


@pytest.mark.slow
def test_a_rank_in_native_code_shows_its_values(home: str, tmp_path: Path) -> None:
    seen = drive(home, tmp_path, "waits")
    assert None not in (seen["locals"], seen["continued"], seen["paused_again"], seen["stop"])
    assert any(row.startswith("rank 0") and "Native" in row for row in seen["call_stack"])
    assert any("Tensor[] float32" in row for row in seen["expressions"])


@pytest.mark.slow
def test_the_report_of_a_finding_is_no_failed_task(home: str, tmp_path: Path) -> None:
    seen = drive(home, tmp_path, "report")
    assert (seen["failed"], seen["notifications"]) == (0, [])
    # The run has ended, and its findings stay.
    assert any(row.startswith("DDP102") for row in seen["runs_after"])
