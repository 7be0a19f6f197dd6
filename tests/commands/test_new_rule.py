"""The recipe for a new rule: what it lays out works as it stands."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LIMIT, ROOT
from tools import new_rule


def test_a_code_that_is_taken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert new_rule.main(["DDP102", "anything"], tmp_path) == 2
    assert "take another code" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["999", "name"], ["DDP99", "name"], ["DDP999", "No Name"]])
def test_words_that_are_no_code_and_name(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as raised:
        new_rule.main(words, tmp_path)
    assert raised.value.code == 2


def test_what_is_laid_out_passes_its_own_tests(tmp_path: Path) -> None:
    for name in ("ddpdoctor", "tests", "sample_jobs", "tools"):
        ignored = shutil.ignore_patterns("__pycache__", "goldens", "node_modules", "nodes", "lab")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert new_rule.main(["DDP999", "shouted-loss"], tmp_path) == 0
    assert new_rule.main(["DDP999", "shouted-loss"], tmp_path) == 2
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    names = ("shouted_loss", "rules", "fixes")
    tests = [f"tests/diagnose/test_{name}.py" for name in names]
    done = subprocess.run(
        [*command, *tests], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_its_jobs_are_a_sick_one_and_a_healthy_one(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "ddpdoctor", tmp_path / "ddpdoctor")
    (tmp_path / "tests" / "jobs" / "sick").mkdir(parents=True)
    (tmp_path / "tests" / "diagnose").mkdir(parents=True)
    assert new_rule.main(["DDP999", "shouted-loss"], tmp_path) == 0
    codes = []
    for job in sorted((tmp_path / "tests" / "jobs" / "sick").glob("*.py")):
        command = [sys.executable, "-m", "ddpdoctor", "run", "--no-vscode", "--debug-port", "0"]
        done = subprocess.run(
            [*command, "--nproc-per-node", "2", "--", str(job)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        codes.append("DDP999" in done.stderr)
    assert codes == [True, False]


def test_free_codes_are_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert new_rule.main(["--free"], tmp_path) == 0
    shown = capsys.readouterr().out
    assert "crashes: DDP9" in shown and "DDP102" not in shown
