"""ddpdoctor's entry into torchrun: what it says is what the bare binary says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.supervise.command import TORCHRUN
from tests.conftest import LIMIT

BINARY = Path(sys.executable).with_name("torchrun")
HEAD = re.compile(r"^W\d{4} [\d:.]+ \d+ ", re.MULTILINE)


def run(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONWARNINGS": "ignore", "HOME": str(directory)}
    (directory / "job.py").write_text("import os\nos.write(1, b'ran\\n')\n")
    return subprocess.run(
        words, cwd=directory, env=environment, capture_output=True, text=True, timeout=LIMIT
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nnodes=a:b"], r"int\(\) with base 10: 'a'"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (["--nproc-per-node=many"], "many"),
                (["--rdzv-conf=timeout"], "rdzv_conf|configuration|key=value|format"),
                (["--redirects=9"], "9"),
                (["--max-restarts=-1"], "max_restarts must be >= 0"),
                (["--rdzv-backend=nowhere", "--rdzv-endpoint=localhost:1"], "nowhere"),
                (["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:port"], "localhost:port"),
            )
        ),
    ],
)
def test_a_bad_value_is_a_line(words: list[str], expected: str, tmp_path: Path) -> None:
    result = run(tmp_path, sys.executable, TORCHRUN, *words, "job.py")
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    (line,) = (each for each in result.stderr.splitlines() if each.startswith("torchrun: error: "))
    assert re.search(expected, line), line


@pytest.mark.skipif(not BINARY.exists(), reason="no torchrun beside this Python")
@pytest.mark.parametrize("words", [["--nproc-per-node=2", "job.py"], ["--nowhere", "job.py"]])
@pytest.mark.slow
def test_the_output_is_the_binarys(words: list[str], tmp_path: Path) -> None:
    bare = run(tmp_path, sys.executable, str(BINARY), *words)
    ours = run(tmp_path, sys.executable, TORCHRUN, *words)
    assert (ours.returncode, ours.stdout) == (bare.returncode, bare.stdout)
    assert HEAD.sub("W ", ours.stderr) == HEAD.sub("W ", bare.stderr)
    if words[0] != "--nowhere":
        assert "OMP_NUM_THREADS" in bare.stderr and HEAD.search(bare.stderr)
