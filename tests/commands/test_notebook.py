"""``%load_ext ddpdoctor`` in a real kernel: cells that run as jobs, and cells that fork ranks."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import LIMIT, ROOT, Doctor
from tests.support.launching import wait_until

pytest.importorskip("IPython")

from ddpdoctor import notebook

LOAD = "%load_ext ddpdoctor"


def test_lines_of_the_script_have_the_numbers_of_the_cell() -> None:
    cell = "from __future__ import annotations\nimport helper\nraise ValueError"
    script = notebook._script("--nproc 2", cell)
    compile(script, "cell", "exec")
    assert script.splitlines()[2:] == cell.splitlines()[1:]
    assert f"sys.path[0] = {os.getcwd()!r}" in script.splitlines()[0]


@pytest.mark.parametrize(
    ("code", "starts"),
    [
        (
            "from accelerate import notebook_launcher\nnotebook_launcher(main, num_processes=2)",
            True,
        ),
        ("import torch.multiprocessing as mp\nmp.spawn(main, nprocs=2)", True),
        ('Trainer(strategy="ddp_notebook", devices=2).fit(model)', True),
        ('DataLoader(data, multiprocessing_context="spawn")', False),
        ("import torch.distributed as dist\ndist.init_process_group()", False),
        ("no python", False),
    ],
)
def test_code_that_starts_its_ranks_itself(code: str, starts: bool) -> None:
    assert notebook._starts_ranks(code) is starts


def outputs(doctor: Doctor, cells: Sequence[str]) -> list[str]:
    """What each cell put out, as text, with the HTML of what it displayed."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
    client = nbclient.NotebookClient(made, timeout=LIMIT, allow_errors=True)
    client.execute(env=doctor.environment(), cwd=str(doctor.directory))
    return ["".join(map(text_of, cell.outputs)) for cell in made.cells]


def text_of(output: Any) -> str:
    data = output.get("data", {})
    texts = (output.get("text"), data.get("text/html"), output.get("evalue"))
    return next((text for text in texts if text), "")


@pytest.mark.slow
def test_a_cell_is_run_and_its_findings_are_shown(doctor: Doctor) -> None:
    sick = (ROOT / "sample_jobs" / "sick" / "ddp103_no_set_epoch.py").read_text()
    doctor.write("helper.py", 'print("the helper is imported")\n')
    _, ran, broken, wrong, again = outputs(
        doctor,
        [
            LOAD,
            f"%%ddp --nproc 2 --no-debug\nimport helper\n{sick}",
            "%%ddp\n!pip list",
            "%%ddp --nproz 2\nprint(1)",
            "%ddp",
        ],
    )
    line = next(n for n, text in enumerate(sick.splitlines(), 3) if "# expect" in text)
    assert ran.count("the helper is imported") == 2
    for html in (ran.partition("<div>")[2], again):
        assert "<b>warning DDP103: every rank draws the same samples" in html
        assert f"--&gt; cell-2.py:{line}\n" in html
        assert "Call set_epoch(epoch)" in html
    assert "without lines that begin with % or !" in broken
    assert "did you mean --nproc-per-node?" in wrong
    assert "<div>" not in wrong


FORKED = """\
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def train(rank):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:PORT", rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Linear(4, 4))
    for step in range(9):
        model(torch.randn(8, 4)).sum().backward()
        if step == 5 and rank == 1:
            raise ValueError("<b>a bad batch</b>")

mp.start_processes(train, nprocs=2, start_method="fork")
"""


@pytest.mark.slow
def test_ranks_that_a_cell_forks(doctor: Doctor) -> None:
    from tests.conftest import _free_port

    cell = FORKED.replace("PORT", str(_free_port()))
    _, unwatched, watched = outputs(doctor, [LOAD, cell, f"%%ddp\n{cell}"])
    assert "the ranks of this cell are not watched" in unwatched
    html = watched.partition("<div>")[2]
    assert "<b>error DDP901: rank 1 raised ValueError: &lt;b&gt;a bad batch" in html
    assert "--&gt; cell-3.py:14" in html
    assert "the job ended with status 1" in watched


ENDLESS = """\
%%ddp --nproc 2
import os, pathlib, time
pathlib.Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
while True:
    print("it runs", flush=True)
    time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interrupt", "kill"])
def test_an_interrupt_and_the_end_of_the_kernel_end_the_job(doctor: Doctor, how: str) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    cells = [nbformat.v4.new_code_cell(each) for each in (LOAD, ENDLESS)]
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(cells=cells), timeout=LIMIT, allow_errors=True
    )
    pids = [Path(doctor.directory, f"pid-{rank}") for rank in (0, 1)]

    async def stop() -> None:
        await asyncio.to_thread(wait_until, lambda: all(map(ready, pids)), "the ranks run")
        while "it runs" not in "".join(map(text_of, cells[1].outputs)):
            await asyncio.sleep(0.1)
        if how == "interrupt":
            await client.km.interrupt_kernel()
        else:
            await client.km.signal_kernel(9)

    async def run() -> None:
        stopping = asyncio.create_task(stop())
        try:
            await client.async_execute(env=doctor.environment(), cwd=str(doctor.directory))
        except nbclient.exceptions.DeadKernelError:
            assert how == "kill"
        await stopping

    asyncio.run(asyncio.wait_for(run(), LIMIT))
    if how == "interrupt":
        assert "interrupted; the job has ended" in "".join(map(text_of, cells[1].outputs))
    wait_until(lambda: not any(psutil.pid_exists(int(each.read_text())) for each in pids))


def ready(path: Path) -> bool:
    return path.exists() and bool(path.read_text())


CLIENT = """\
import pathlib, nbclient, nbformat
cells = pathlib.Path("cells").read_text().split("---\\n")
made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
nbclient.NotebookClient(made, timeout=300, allow_errors=True).execute()
print(made.cells[1].outputs, made.cells[2].outputs[0].data["text/html"])
"""


@pytest.mark.slow
def test_ranks_that_a_kernel_forks_under_ddpdoctor(doctor: Doctor) -> None:
    pytest.importorskip("nbclient")
    from tests.conftest import _free_port

    doctor.write("client.py", CLIENT)
    cell = FORKED.replace("PORT", str(_free_port()))
    Path(doctor.directory, "cells").write_text("---\n".join([f"{LOAD}\n", cell, "%ddp\n"]))
    result = doctor.run("--no-vscode", "--", sys.executable, "client.py")
    assert result.codes == ["DDP901"]
    assert "not watched" not in result.stdout
    assert "<b>error DDP901: rank 1 raised ValueError" in result.stdout
    assert "--&gt; cell-2.py:13" in result.stdout
