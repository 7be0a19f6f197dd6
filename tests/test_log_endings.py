"""What is written behind the end of a job, and behind an error that it went on after."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.failures.log import read
from ddpdoctor.failures.verdict import findings
from tests.log_lines import one

OUT_OF_MEMORY = (
    'Traceback (most recent call last):\n  File "/job/train.py", line 9, in <module>\n'
    '    main()\n  File "/job/model.py", line 5, in main\n    x = x.cuda()\n'
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.90 GiB.\n"
)
UPLOADED = "wandb: \\ 0.009 MB of 0.087 MB uploaded\r"


@pytest.mark.parametrize(
    "closing",
    [
        f"{UPLOADED * 40}\nwandb: 🚀 View run at: somewhere\nwandb: Find logs at: x\n",
        "\x1b[1;34mwandb\x1b[0m: Run summary:\n" * 20,
    ],
)
def test_what_wandb_writes_at_the_end_is_no_work(closing: str) -> None:
    inside = OUT_OF_MEMORY.replace("<module>", "train")
    found = one(f"  2%|2| 7/99 [00:05<01:05]{inside}{closing}")
    assert (found.code, found.severity.label) == ("DDP928", "error")
    assert "7.90 GiB" in found.message


def test_a_command_that_a_shell_does_not_find_is_no_cause_of_what_comes_later() -> None:
    missing = "/var/spool/slurm/d/job1/slurm_script: line 9: SBATCH: command not found\n"
    assert one(missing + OUT_OF_MEMORY).code == "DDP928"
    assert one(missing).code == "DDP960"


def test_an_exception_of_a_spawned_process_ends_the_run() -> None:
    log = (Path(__file__).parent / "logs" / "spawned.log").read_text()
    steps = "".join(f"Train | Epoch {each} | loss 0.1\n" for each in range(700))
    (found,) = findings(read("job.log", [f"{log}{steps}{OUT_OF_MEMORY}".encode()]))
    assert found.code == "DDP928"
    assert "in an earlier run" in found.evidence[-1]
