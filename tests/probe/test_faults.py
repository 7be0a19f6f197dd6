"""Faults of ddpdoctor's own, and of the disk: the job goes on, and somebody is told once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.process import FaultRecord
from tests.conftest import JOBS, LIMIT, SPURIOUS_ABORT, Doctor, Result, marked

TRAIN = str(JOBS / "train.py")

IN_HOOKS = [
    "observers.loaders:Loops._begin",
    "observers.sample_contents:batch_size",
    "observers.readback:loss_reader",
    "hooks.training:unscaled",
    "runtime.sites:site_of",
    "runtime.sites:caller",
    "runtime.torch_private:logging_ints",
    "runtime.torch_private:reduced_parameters",
    "runtime.torch_private:sampler_of",
    "observers.steps:StepTracker.enter",
    "observers.steps:StepTracker.leave",
    "observers.steps:StepTracker.forward",
    "observers.steps:StepTracker.fetch",
    "observers.steps:StepTracker.outside",
    "observers.steps:StepTracker.evaluated",
    "observers.steps:StepTracker.stepped",
    "observers.steps:StepTracker.close",
    "observers.steps:OpenStep.line",
]
"""What hooks call; a fault in each must be recorded."""

EARLIER = [
    "process:_open",
    "process:StepTracker",
    "process:StatusPage",
    "process:Journal",
    "process:Recorder",
    "runtime.watch:start",
    "observers.steps:StepTracker.finish",
    "hooks.exits:watch_fatal_signals",
]
"""What makes a process a rank; a fault there may leave the process without a journal."""

WRITING = [
    "process:Journal.write",
    "runtime.recorder:Recorder._drain",
    "runtime.recorder:Recorder.flush",
]
"""What writes the journal."""

BREAKS = ["nothing", *IN_HOOKS, *EARLIER, *WRITING]


class Broken:
    """A finished ``jobs/broken.py``."""

    def __init__(self, result: Result) -> None:
        self.result = result
        lines = result.stdout.splitlines()
        self.losses = {line.split()[0]: line.split()[1:] for line in lines}
        heads = [line.split()[0] for line in lines]
        self.statuses = {
            name: int(lines[heads.index(name) + 1].split()[1]) if name in heads else -999
            for name in BREAKS
        }
        self.ranks = {
            BREAKS[each.restart]: each for each in result.run.ranks if each.restart < len(BREAKS)
        }


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Broken:
    token = uuid.uuid4().hex
    doctor = Doctor(tmp_path_factory.mktemp("broken"), token)
    # Each child says which attempt it is, as torchrun tells its workers.
    source = (JOBS / "broken.py").read_text()
    source = source.replace(
        "            break_(name)\n",
        "            os.environ['TORCHELASTIC_RESTART_COUNT'] = str(sys.argv.index(name) - 1)\n"
        "            break_(name)\n",
    )
    script = doctor.directory / "broken.py"
    script.write_text(source)
    result = doctor.run("--", sys.executable, str(script), *BREAKS, timeout=4 * LIMIT)
    assert not marked(token)
    return Broken(result)


@pytest.mark.parametrize("name", BREAKS)
@pytest.mark.slow
def test_a_job_trains_the_same_whatever_is_broken(broken: Broken, name: str) -> None:
    assert broken.losses[name] == broken.losses["nothing"]
    assert len(broken.losses["nothing"]) == 9
    assert broken.statuses[name] == 0 or SPURIOUS_ABORT in broken.result.stderr


@pytest.mark.slow
def test_without_a_fault_none_is_recorded(broken: Broken) -> None:
    rank = broken.ranks["nothing"]
    assert rank.records.of(FaultRecord) == ()
    assert len(rank.steps) == 8


@pytest.mark.parametrize("name", IN_HOOKS)
@pytest.mark.slow
def test_a_fault_in_a_hook_is_recorded_once(broken: Broken, name: str) -> None:
    faults = list(broken.ranks[name].records.of(FaultRecord))
    assert faults, "nothing was recorded"
    assert all("ZeroDivisionError" in fault.error for fault in faults)
    hooks = Counter(fault.hook for fault in faults)
    assert set(hooks.values()) == {1}, hooks


@pytest.mark.slow
def test_a_fault_of_ours_is_no_finding_and_prints_no_traceback(broken: Broken) -> None:
    assert broken.result.codes == []
    assert "Traceback" not in broken.result.stderr
    assert "ZeroDivisionError" not in "".join(
        line for line in broken.result.stderr.splitlines() if not line.startswith("ddpdoctor: ")
    )


AT_INSTALL = [
    "hooks.ddp._wrap_inside",
    "runtime.torch_private.inside_forward",
    "runtime.torch_private.loader_iterator_classes",
    "observers.collective_calls.binder",
]


@pytest.mark.parametrize("name", AT_INSTALL)
@pytest.mark.slow
def test_a_hook_that_cannot_be_installed_does_not_keep_torch_from_being_imported(
    doctor: Doctor, name: str
) -> None:
    """A later torch may not have what a hook takes hold of."""
    mine = doctor.directory / "mine"
    mine.mkdir()
    module, _, attribute = name.rpartition(".")
    (mine / "sitecustomize.py").write_text(
        "import importlib, sys\n"
        "def broken(*args, **kwargs):\n"
        "    raise ZeroDivisionError('broken by the test')\n"
        "class Breaks:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch' and 'ddpdoctor.probe.process' in sys.modules:\n"
        "            sys.meta_path.remove(self)\n"
        f"            module = importlib.import_module('ddpdoctor.probe.{module}')\n"
        f"            getattr(module, {attribute!r})\n"
        f"            setattr(module, {attribute!r}, broken)\n"
        "sys.meta_path.insert(0, Breaks())\n"
    )
    words = ["--nproc-per-node=1", TRAIN, "--steps=3", "--print-losses"]
    result = doctor.run(*words, env={"PYTHONPATH": str(mine)})
    result.check_success()
    assert len(result.stdout.splitlines()) == 4
    (rank,) = result.run.last
    assert len(list(rank.records.of(FaultRecord))) == 1
    assert rank.ended is not None


@pytest.mark.slow
def test_the_probe_itself_may_be_broken(doctor: Doctor) -> None:
    """Half an update of ddpdoctor: the probe cannot be imported at all."""
    package = doctor.directory / "copy" / "ddpdoctor"
    source = Path(__file__).parents[2] / "ddpdoctor"
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "probe" / "process.py").write_text("raise ZeroDivisionError('half')\n")
    words = ["--nproc-per-node=1", TRAIN, "--steps=2", "--print-losses"]
    result = doctor.run(*words, env={"PYTHONPATH": str(package.parent)})
    result.check_success()
    assert len(result.stdout.splitlines()) == 3
    assert "this process is not watched" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.run.ranks == ()


# -- what a batch, a loss or a class of the job's own may do


ODD = """
    import sys, time
    from collections.abc import Mapping
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    class Lazy(Mapping):
        # A batch that is read from somewhere only when it is asked for.
        def __init__(self, tensor): self.tensor = tensor
        def __getitem__(self, key):
            if key != "image":
                raise OSError("not there any more")
            return self.tensor
        def __iter__(self): return iter(["gone", "image"])
        def __len__(self): return 2

    class Text(str):
        def __eq__(self, other): raise TypeError("no comparison")
        __hash__ = str.__hash__

    class Proud(Exception):
        def __str__(self): raise TypeError("no words")

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    ddp = DistributedDataParallel(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = DataLoader(
        list(torch.ones(40, 8)), batch_size=4, collate_fn=lambda rows: Lazy(torch.stack(rows))
    )
    for number, batch in enumerate(data):
        optimizer.zero_grad()
        out = ddp(batch["image"])
        if number == 3:
            z = torch.view_as_complex(out).sum().reshape(())
            torch.autograd.backward(z, torch.ones_like(z))
        elif number == 4:
            torch.autograd.backward(iter([out.sum()]))
        else:
            out.square().mean().backward()
        optimizer.step()
        time.sleep(0.04)
        print(repr(out.sum().item()))
    try:
        raise Proud
    except Proud:
        pass
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_odd_batches_and_losses_of_a_job_are_left_alone(doctor: Doctor) -> None:
    script = doctor.write("odd.py", ODD)
    words = ["--nproc-per-node=1", str(script)]
    bare, watched = doctor.torchrun(*words), doctor.run(*words)
    bare.check_success()
    watched.check_success()
    assert watched.stdout == bare.stdout
    assert len(bare.stdout.splitlines()) == 10
    (rank,) = watched.run.last
    assert len(rank.steps) == 10
    # Whatever went wrong in a hook, no phase is left open: the sleeps belong to none.
    for step in rank.steps[-3:]:
        assert step.forward > 0
        assert step.other >= 32_000_000, step
    faults = Counter(fault.hook for fault in rank.records.of(FaultRecord))
    assert all(count == 1 for count in faults.values()), faults


# -- the disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    mount = shutil.which("mount")
    if os.getuid() != 0 or mount is None:
        pytest.skip("needs root to mount a small file system")
    place = tmp_path / "disk"
    place.mkdir()
    options = ["-t", "tmpfs", "-o", "size=64k", "none", str(place)]
    if subprocess.run([mount, *options], capture_output=True).returncode != 0:
        pytest.skip("mounting is not permitted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def warnings_by_ranks(result: Result) -> list[str]:
    return [line for line in result.stderr.splitlines() if "cannot write" in line]


def losses(result: Result) -> list[str]:
    return re.findall(r"^\d\S+$", result.stdout, re.MULTILINE)


def plain_run(doctor: Doctor, place: Path, *words: str, ranks: int = 2) -> Result:
    """A run whose directory the test chooses."""
    command = [sys.executable, "-m", "ddpdoctor", "run", "--run-dir", str(place)]
    return doctor.run(*command, f"--nproc-per-node={ranks}", *words, watch=False)


@pytest.mark.slow
def test_a_disk_that_fills_up_costs_the_record_and_nothing_else(
    doctor: Doctor, small_disk: Path
) -> None:
    words = [TRAIN, "--steps=400", "--print-losses"]
    bare = doctor.torchrun("--nproc-per-node=2", *words)
    watched = plain_run(doctor, small_disk / "run", *words)
    bare.check_success()
    watched.check_success()
    assert losses(watched) == losses(bare)
    assert len(losses(bare)) == 400
    # A rank that starts late may find the disk full, which it says itself.
    assert len(warnings_by_ranks(watched)) in (1, 2)
    assert "Traceback" not in watched.stderr
    assert watched.codes == []


@pytest.mark.slow
def test_a_disk_that_is_full_from_the_start(doctor: Doctor, small_disk: Path) -> None:
    with (small_disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    watched = plain_run(doctor, small_disk / "run", TRAIN, "--steps=5", "--print-losses")
    watched.check_success()
    assert len(losses(watched)) == 5
    assert "Traceback" not in watched.stderr
    assert watched.codes == []
    said = [line for line in watched.stderr.splitlines() if line.startswith("ddpdoctor: ")]
    assert 1 <= len(said) <= 3


LIMITED = """
    import resource, signal, sys
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    sys.path.insert(0, {jobs!r})
    import train
    train.main()
"""


@pytest.mark.slow
def test_a_limit_on_file_sizes(doctor: Doctor) -> None:
    script = doctor.write("limited.py", LIMITED.format(jobs=str(JOBS)))
    words = ["--nproc-per-node=2", str(script), "--steps=120"]
    result = doctor.run(*words)
    result.check_success()
    assert len(warnings_by_ranks(result)) == 1
    assert "Traceback" not in result.stderr
    assert result.codes == []
    for rank in result.run.last:
        assert rank.steps
        assert rank.status is not None
        assert rank.status.step == 120
        assert rank.status.dropped > 0


VANISHED = """
    import os, shutil, sys, time
    import torch.distributed as dist
    sys.path.insert(0, {jobs!r})
    import train
    before = dist.init_process_group
    place = os.environ["DDPDOCTOR_RUN_DIR"]

    def vanish():
        shutil.rmtree(place, ignore_errors=True)

    def init(*args, **kwargs):
        if {early}:
            vanish()
        before(*args, **kwargs)
        if not {early}:
            dist.barrier()
            vanish()

    dist.init_process_group = init
    train.main()
"""


@pytest.mark.parametrize(
    "early",
    [
        pytest.param(True, id="before the ranks"),
        pytest.param(False, id="under the ranks"),
    ],
)
@pytest.mark.slow
def test_a_run_directory_that_vanishes(doctor: Doctor, early: bool) -> None:
    script = doctor.write("vanished.py", VANISHED.format(jobs=str(JOBS), early=early))
    result = doctor.run("--nproc-per-node=2", str(script), "--steps=5", "--print-losses")
    result.check_success()
    assert len(losses(result)) == 5
    assert len(warnings_by_ranks(result)) <= 2
    assert "Traceback" not in result.stderr
    assert result.codes == []


@pytest.mark.slow
def test_a_journal_of_many_short_steps_is_small(doctor: Doctor) -> None:
    """A line stands for several of them; none of the newest is left out."""
    script = doctor.write(
        "long.py",
        """
        import torch, torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo")
        ddp = DistributedDataParallel(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        batch = torch.ones(1, 2)
        for _ in range(6000):
            ddp(batch).sum().backward()
            optimizer.step()
        dist.destroy_process_group()
        """,
    )
    result = doctor.run("--nproc-per-node=1", str(script))
    result.check_success()
    (journal,) = result.run_dir.glob("rank-*.jsonl*")
    assert journal.stat().st_size < 1 << 18
    (rank,) = result.run.last
    assert [step.step for step in rank.steps] == list(range(rank.steps[0].step, 6000))
    assert len(rank.steps) > 1000
    assert rank.opened.rank == 0
    assert len(list(rank.records.of(DdpRecord))) == 1
    assert rank.ended is not None
    assert rank.ended.steps == 6000
