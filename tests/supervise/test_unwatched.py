"""Ranks that nothing of ddpdoctor's can enter, and what is said of that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.supervise.rank_processes import Unwatched, bare_option
from ddpdoctor.supervise.run_watch import ENTRY
from tests.conftest import Doctor


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("python -S train.py", "-S"),
        ("/opt/bin/python3.11 -u -W ignore -X dev -I train.py", "-I"),
        ("srun -n 4 python -uE -m pkg.train", "-E"),
        ("env A=1 python3 -Wignore -OS train.py", "-S"),
        ("python -u train.py -S", ""),
        ("python -m pkg.train -I", ""),
        ("python -W -S train.py", ""),
        ("python --check-hash-based-pycs always -s -P train.py", ""),
        ("bash -c train.sh -S", ""),
        ("accelerate launch train.py --with python -S", "-S"),
        ("python launch.py python -S", ""),
        ("python -", ""),
    ],
)
def test_options_that_leave_the_probe_out(words: str, option: str) -> None:
    assert bare_option(words.split()) == option


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("--no-python -- python -S train.py", "-S"),
        ("--no-python python train.py -S", ""),
        ("-- train.py python -S", ""),
    ],
)
def test_options_of_what_torchrun_starts(words: str, option: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    assert bare_option([*torchrun, *words.split()], through_torchrun=True) == option


SLEEPS = "import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("options", "environment", "says"),
    [
        (["-I"], {"RANK": "0", "PYTHONPATH": ENTRY}, "`python -I` does not load"),
        ([], {"RANK": "0"}, "PYTHONPATH"),
        ([], {"RANK": "0", "PYTHONPATH": f"{ENTRY}{os.pathsep}/more"}, ""),
        # No rank, so it may be anything.
        (["-I"], {"PYTHONPATH": ENTRY}, ""),
    ],
)
def test_processes_that_were_started_as_ranks(
    options: list[str], environment: dict[str, str], says: str
) -> None:
    # One of its own below, which is no rank though its environment says so.
    source = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {SLEEPS!r}])"
    keep = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    process = subprocess.Popen(
        [sys.executable, *options, "-c", source],
        env={**keep, **environment},
        start_new_session=True,
    )
    try:
        while not _children(process.pid):
            assert process.poll() is None
        told = list(Unwatched(ENTRY).find(process.pid))
    finally:
        os.killpg(process.pid, 9)
        process.wait()
    assert [says in each.why for each in told] == ([True] if says else [])


def _children(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


HELLO = """\
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""


def test_a_module_behind_the_separator(doctor: Doctor) -> None:
    (doctor.directory / "pkg").mkdir()
    doctor.write("pkg/train.py", HELLO + "import sys\nprint(__spec__.name, sys.argv[1:])\n")
    result = doctor.run("--nproc-per-node", "1", "--", "-m", "pkg.train", "--lr", "1")
    result.check_success()
    assert result.stdout == "pkg.train ['--lr', '1']\n"
    assert len(result.run.ranks) == 1


def test_that_nothing_enters_is_said(doctor: Doctor) -> None:
    script = doctor.write("train.py", "print('trained')\n")
    result = doctor.run("--", sys.executable, "-S", str(script))
    assert (result.status, result.stdout) == (0, "trained\n")
    assert "leave out -S, or this process is not watched" in result.ours
    assert "no rank was watched: `python -S` does not load" in result.ours


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["env -u PYTHONPATH", "env PYTHONPATH=/elsewhere", "env"])
def test_a_wrapper_that_changes_the_environment(doctor: Doctor, wrapper: str) -> None:
    script = doctor.write("train.py", HELLO + "import time; time.sleep(3)\n")
    words = [*wrapper.split(), sys.executable, str(script)]
    result = doctor.run("--nproc-per-node", "2", "--no-python", "--", *words)
    result.check_success()
    unwatched = "no rank was watched: PYTHONPATH, through which ddpdoctor's probe is loaded,"
    assert (unwatched in result.ours) == ("PYTHONPATH" in wrapper)
