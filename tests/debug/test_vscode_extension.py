"""The extension of editors/vscode, in a real VS Code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LIMIT, ROOT

EXTENSION = ROOT / "editors" / "vscode"

JOB = """\
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100_000):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.05)  # here
"""


@pytest.mark.slow
def test_f5_without_any_file(tmp_path: Path) -> None:
    """`DDPDOCTOR_CODE_SERVER` names a folder as test/end_to_end.mjs describes it."""
    home = os.environ.get("DDPDOCTOR_CODE_SERVER")
    if home is None or shutil.which("node") is None:
        pytest.skip("DDPDOCTOR_CODE_SERVER is not set, or there is no node")
    (tmp_path / "train.py").write_text(JOB)
    line = 1 + next(n for n, text in enumerate(JOB.splitlines()) if text.endswith("# here"))
    words = [str(EXTENSION / "test" / "end_to_end.mjs"), home, str(tmp_path), sys.executable]
    done = subprocess.run(
        ["node", *words, str(line)], capture_output=True, text=True, timeout=10 * LIMIT
    )
    seen = json.loads(done.stdout.splitlines()[-1])
    print(seen)
    assert "error" not in seen
    assert None not in (seen["first_stop"], seen["stepped"], seen["stop"])
    assert any(row.startswith("rank 1") for row in seen["call_stack"])
    assert any("2" in row for row in seen["expressions"] if row.startswith("dist"))
    assert any("different values" in row for row in seen["expressions"])
    assert any("step" in row for row in seen["runs"] if row.startswith("rank 1"))
    assert seen["status"]
    assert not (tmp_path / ".vscode").exists()
