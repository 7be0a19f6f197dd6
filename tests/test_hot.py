"""The compiled core does what the Python beside it does, and faults in it stay ours."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddpdoctor.probe.hooks import training
from ddpdoctor.probe.runtime import events, hot, phases, rank, shield, sites, wrapping
from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.process import FaultRecord
from ddpdoctor.run.ring import SIZE as RING_SIZE
from ddpdoctor.run.ring import read_ring
from ddpdoctor.run.status import PAGE_SIZE, Phase, StatusPage
from tests.conftest import Doctor

pytestmark = pytest.mark.skipif(hot.core is None, reason="the core is not compiled here")

SHOWN = (
    "phase", "steps", "armed", "forwards", "backward_count", "reduced", "begun", "step_armed",
    "step_backwards", "now", "failed", "collective",
)  # fmt: skip


# -- phases


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["enter", "leave", "fail", "charge", "forward", "backward", "ended", "keep", "take",
             "kept", "reset", "start"]
        ),
        st.integers(1, 6),
        st.integers(0, 50),
    ),
    max_size=60,
)  # fmt: skip


def follow(one: Any, name: str, phase: int, site: Site, error: BaseException) -> object:
    """One thing that hooks do."""
    calls: dict[str, Callable[[], object]] = {
        "enter": lambda: one.enter(phase, site),
        "leave": lambda: one.leave(),
        "fail": lambda: one.leave(error),
        "charge": lambda: one.charge(),
        "forward": lambda: one.forward_begins(phase > 2),
        "backward": lambda: one.backward_begins(site),
        "ended": lambda: one.backward_ended(),
        "keep": lambda: one.keep(),
        "take": lambda: one.take(),
        "kept": lambda: one.take(kept=True),
        "reset": lambda: one.reset(),
        "start": lambda: one.start(),
    }
    return calls[name]()


@given(steps=STEPS)
def test_both_follow_the_phases_alike(
    steps: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("pages")
    time = [1000]
    before = phases._now
    phases._now = lambda: time[0]
    hot.core.set_clock(lambda: time[0])
    try:
        pages = [
            StatusPage(
                str(directory / name), rank=0, world_size=1, local_rank=0, restart=0, started=5
            )
            for name in ("python", "compiled")
        ]
        pair = [phases.Phases(pages[0]), hot.core.Phases(pages[1])]
        # Each has its own idea of the time of day.
        offset = pair[0].unix - pair[1].unix
        sites = [[Site(f"/job/train.py{n}", n) for n in range(3)] for _ in pair]
        error = ValueError("no")
        for name, phase, took in steps:
            time[0] += took
            answers = [
                follow(one, name, phase, lines[phase % 3], error)
                for one, lines in zip(pair, sites, strict=True)
            ]
            assert answers[0] == answers[1], name
            for shown in SHOWN:
                assert getattr(pair[0], shown) == getattr(pair[1], shown), (name, shown)
        passes = [
            [(began, ended and ended, site.line) for began, ended, site in one.backwards]
            for one in pair
        ]
        assert [
            (began - offset, ended and ended - offset, line) for began, ended, line in passes[0]
        ] == passes[1]
        python, compiled = (bytes(each.memory[:PAGE_SIZE]) for each in pages)
        assert python[:136] == compiled[:136], "all up to the time of the last change"
        assert python[144:] == compiled[144:]
        recorded = [[each.recorded for each in lines] for lines in sites]
        assert recorded[0] == recorded[1]
    finally:
        phases._now = before
        hot.core.set_clock(None)


def a_page() -> Any:
    """A status page of memory."""
    return SimpleNamespace(memory=bytearray(PAGE_SIZE))


def test_a_page_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="larger"):
        hot.core.Phases(SimpleNamespace(memory=bytearray(PAGE_SIZE - 1)))
    with pytest.raises(AttributeError):
        hot.core.Phases(None)


def test_what_is_watched_is_noticed_once() -> None:
    for make in (phases.Phases, hot.core.Phases):
        page = a_page()
        page.show = lambda *_: None
        one: Any = make(page)
        memory = bytearray(64)
        one.watch(memory, 8)
        assert not one.noticed()
        memory[9] = 1
        assert (one.noticed(), one.noticed()) == (True, False)
        with pytest.raises((ValueError, TypeError)):
            one.watch(bytearray(4), 0)


def test_phases_nested_without_end_are_left_again() -> None:
    one = hot.core.Phases(a_page())
    site = Site("/job/train.py", 3)
    for _ in range(1000):
        assert one.enter(int(Phase.WAIT), site)
    for _ in range(1000):
        one.leave()
    assert one.phase == Phase.OTHER
    one.leave()
    assert one.phase == Phase.OTHER


# -- calls around a function


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes a function with calls of ours around it, in a rank."""
    monkeypatch.setattr(rank, "active", SimpleNamespace())
    monkeypatch.setattr(shield, "faults", [])
    monkeypatch.setattr(shield, "_report", None)

    def make(function: Any, begin: Any, end: Any) -> Any:
        owner = SimpleNamespace(function=function)
        wrapping.around(owner, "function", "a hook", begin, end)
        return owner.function

    yield make
    shield.off.discard("a hook")


def test_what_is_called_keeps_its_name_result_and_arguments(around: Callable[..., Any]) -> None:
    seen: list[Any] = []

    def scale(value: int, *, factor: int = 2) -> int:
        """Scale it."""
        return value * factor

    def begins(*args: Any, **kwargs: Any) -> str:
        seen.append((args, kwargs))
        return "begun"

    call = around(
        scale,
        begins,
        lambda begun, result, error: seen.append((begun, result, error)),
    )
    assert (call.__name__, call.__doc__, call.__wrapped__) == ("scale", "Scale it.", scale)
    assert call(3, factor=5) == 15
    assert seen == [((3,), {"factor": 5}), ("begun", 15, None)]


def scaled(value: int) -> int:
    """Scale it."""
    return 2 * value


def test_what_is_called_is_copied_pickled_and_referred_to_as_a_function(
    around: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = around(scaled, lambda _: True, lambda *_: None)
    monkeypatch.setattr(sys.modules[__name__], "scaled", call)
    assert weakref.ref(call)() is call
    assert copy.deepcopy([call]) == copy.copy([call]) == [call]
    assert pickle.loads(pickle.dumps(call)) is call
    assert str(inspect.signature(call)) == "(value: 'int') -> 'int'"


def test_an_exception_flies_through_without_a_frame_of_ours(around: Callable[..., Any]) -> None:
    ends: list[Any] = []

    def fails() -> None:
        raise KeyError("mine")

    call = around(fails, lambda: True, lambda *end: ends.append(end))
    with pytest.raises(KeyError) as raised:
        call()
    assert [each.name for each in raised.traceback] == [
        "test_an_exception_flies_through_without_a_frame_of_ours", "fails",
    ]  # fmt: skip
    ((begun, result, error),) = ends
    assert (begun, result) == (True, None)
    assert error is raised.value


def test_a_fault_of_ours_is_noted_and_the_call_goes_on(around: Callable[..., Any]) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("ours")

    begins = around(lambda: "result", broken, lambda *_: None)
    assert begins() == "result"
    assert shield.faults == [("a hook", "RuntimeError('ours')")]
    shield.off.clear()
    shield.faults.clear()
    ends = around(lambda: "result", lambda: True, broken)
    assert ends() == "result"
    assert shield.faults == [("a hook", "RuntimeError('ours')")]
    assert ends() == "result", "off from now on"


def test_ctrl_c_within_a_hook_is_the_jobs(around: Callable[..., Any]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        around(lambda: "result", interrupted, lambda *_: None)()
    with pytest.raises(KeyboardInterrupt):
        around(lambda: "result", lambda: True, interrupted)()
    assert shield.faults == []


def test_a_function_of_a_class_stays_a_method(around: Callable[..., Any]) -> None:
    class Loader:
        def next(self, count: int) -> tuple[Any, int]:
            return self, count

    seen: list[Any] = []
    wrapping.around(Loader, "next", "a hook", lambda *args: seen.append(args), lambda *_: None)
    loader = Loader()
    assert loader.next(3) == (loader, 3)
    assert seen == [(loader, 3)]


# -- light steps


class Light(hot.Phases):
    """A rank whose step under way is light, and the calls that hooks follow in it."""

    def __init__(self) -> None:
        super().__init__(a_page())
        self.light, self.sparse, self.line, self.steps = 1, 63, 63, 1
        self.optimizer = SimpleNamespace()
        self.closer = id(self.optimizer)
        self.optimizer_code = compile("0", "/torch/optim/optimizer.py", "exec")
        self.fetch: Callable[..., None]
        self.ddp = SimpleNamespace(require_backward_grad_sync=True)

    def forward(self) -> None:
        """A forward of a DDP module."""
        with hot.core.Forward(self.ddp, contextlib.nullcontext(), None):
            pass

    def backward(self) -> None:
        """A call of autograd's engine."""
        engine = SimpleNamespace(run=lambda tensors, accumulate_grad: None)
        wrapping.around(engine, "run", "backward", lambda *_: None, lambda *_: None, backward=True)
        engine.run((), accumulate_grad=True)

    def step(self) -> None:
        """An optimizer's step."""
        assert hot.step_begins(self.optimizer)
        assert hot.step_ended(self.optimizer)


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> Light:
    """That rank, which this process is."""
    one = Light()
    monkeypatch.setattr(rank, "active", one)
    monkeypatch.setattr(shield, "faults", [])
    hot.use_torch(torch)
    return one


def test_a_line_that_is_taken_for_once_after_many_steps_is_seen(light: Light) -> None:
    engine = SimpleNamespace(run=lambda tensors, accumulate_grad: None)
    wrapping.around(engine, "run", "backward", lambda *_: None, lambda *_: None, backward=True)
    lines: set[int] = set()
    for light.steps in range(200):
        if light.steps == 150:
            engine.run((), accumulate_grad=True)
        else:
            engine.run((), accumulate_grad=True)
        lines.add(light.backwards[-1][2].line)
    assert len(lines) == 2


def interrupted(*_: object) -> None:
    """Ctrl-C while code of ours runs."""
    raise KeyboardInterrupt


MOMENTS = {"backward": "backward_ended", "step": "step_ended"}


@pytest.mark.parametrize("call", ["forward", "backward", "step"])
def test_ctrl_c_within_a_light_step_is_the_jobs(
    light: Light, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    getattr(light, call)()
    assert light.phase == Phase.OTHER
    if call in MOMENTS:
        monkeypatch.setattr(events, MOMENTS[call], (interrupted,))
    else:
        monkeypatch.setattr(Light, "site_met", interrupted, raising=False)
        sites.forget()
    with pytest.raises(KeyboardInterrupt):
        getattr(light, call)()
    assert (shield.faults, shield.off) == ([], set())


class Written(hot.Calls):
    """A ledger that knows of each call what is stored of it."""

    def __init__(self) -> None:
        super().__init__(bytearray(RING_SIZE))
        self.group = SimpleNamespace(calls=0)
        self.interrupted = False

    def like(self, name: str, tensor: Any, *_: Any) -> Any:
        """What is stored of a call that was just written down."""
        return self.group, bytes(32), tensor.dtype, tensor.shape, tensor.numel()

    def returned(self, order: int, result: object) -> None:
        """The call returned."""
        if self.interrupted:
            interrupted()


def collective(function: Callable[..., Any], first: bool = False) -> Callable[..., Any]:
    """A collective of one parameter, as compiled code follows it."""
    names, places = ("tensor", "", "", "", "", ""), (0, -1, -1, -1, -1, -1)
    in_python = hot.core.Around(function, "a hook", lambda *_: True, lambda *_: None)
    followed = hot.core.Collective(
        "all_reduce", function, in_python, names, places, first, False
    ).call
    return lambda *args: followed(args, {})


def test_a_list_that_is_emptied_while_its_collective_runs_is_no_harm(light: Light) -> None:
    light.calls = Written()
    call = collective(lambda tensors: tensors.clear(), first=True)
    for _ in range(9):
        given = [torch.zeros(3)]
        freed = weakref.ref(given[0])
        assert call(given) is None
        assert freed() is None
    assert light.calls.count > 4, "Python may move the instruction once, as it specializes it"
    assert call([]) is None
    assert shield.faults == []


def test_what_is_known_of_a_collective_may_be_forgotten_while_it_begins(
    light: Light, monkeypatch: pytest.MonkeyPatch
) -> None:
    light.calls = Written()
    names, places = ("tensor", "", "", "", "", ""), (0, -1, -1, -1, -1, -1)
    in_python = hot.core.Around(lambda _: None, "a hook", lambda *_: True, lambda *_: None)
    followed = hot.core.Collective(
        "all_reduce", lambda _: None, in_python, names, places, False, False
    )
    monkeypatch.setattr(Light, "site_met", lambda *_: followed.forget(), raising=False)
    for _ in range(20):
        followed.call((torch.zeros(3),), {})
    assert light.calls.count > 4
    assert light.calls.group.calls == light.calls.count


def test_ctrl_c_within_a_collective_is_the_jobs(light: Light) -> None:
    written = light.calls = Written()
    call, tensor = collective(lambda _: "work"), torch.zeros(3)

    def calls(interrupts: bool) -> None:
        # Only calls of one place are like the last one.
        for written.interrupted in (False, False, interrupts):
            assert call(tensor) == "work"

    with pytest.raises(KeyboardInterrupt):
        calls(True)
    assert written.count == 2
    assert (shield.faults, light.phase, light.collective) == ([], Phase.OTHER, "")


@pytest.mark.parametrize(("epoch", "shown"), [(7, 7), (1 << 63, -1), ("7", -1)])
def test_an_epoch_that_is_no_number_of_eight_bytes_is_none(
    light: Light, epoch: object, shown: int
) -> None:
    light.fetch = lambda *_: None
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(1)))
    sampler: Any = data.sampler
    sampler.epoch = epoch
    iterator = iter(data)
    assert training._batch_wanted(iterator) is iterator
    assert light.epoch == shown


# -- the core as a whole


def test_a_core_of_another_version_is_not_taken() -> None:
    code = """
        import sys, types
        sys.modules["ddpdoctor.probe.runtime._hot"] = types.SimpleNamespace(CONTRACT=0)
        from ddpdoctor.probe.runtime import hot
        print(hot.core, hot.Phases.__module__)
    """
    code = "\n".join(line.strip() for line in code.strip().splitlines())
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["None", "ddpdoctor.probe.runtime.phases"]


JOB = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.set_num_threads(1)
ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(400, 4))
loader = torch.utils.data.DataLoader(data, batch_size=4)
loss_sum = torch.zeros(1)
for epoch in range(8):
    for number, (batch,) in enumerate(loader):
        optimizer.zero_grad()
        if number % 50 == 7:
            with ddp.no_sync():
                ddp(batch).square().mean().backward()
        loss = ddp(batch).square().mean()
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach()
        dist.all_reduce(loss_sum, async_op=number % 9 == 0) if number % 3 else dist.barrier()
    ddp.eval()
    with torch.no_grad():
        ddp(batch)
    ddp.train()
dist.destroy_process_group()
"""


def recorded(doctor: Doctor, script: Path, **environment: str) -> Any:
    """What two ranks wrote of the job: facts alone, no times, for each of them."""
    result = doctor.run("--nproc-per-node", "2", str(script), env=environment)
    result.check_success()
    run = RunReader(result.run_dir).snapshot()
    found = []
    for each in run.last:
        assert not each.records.of(FaultRecord)
        ring = read_ring(str(result.run_dir / f"rank-{each.rank:04d}.r0.collectives"))
        status = each.status
        assert status is not None
        found.append(
            {
                "steps": [(step.step, step.backwards, step.epoch) for step in each.steps],
                "calls": ring.calls,
                "last": [
                    (c.order, c.sequence, c.name, c.group, c.dtype, c.reduce, c.shape, c.numel,
                     c.root, c.asynchronous, c.site, c.callers, c.ended > 0)
                    for c in ring.collectives
                ],
                "page": (status.step, status.armed, status.reduced, status.epoch, status.phase),
            }
        )  # fmt: skip
    return found


def test_what_a_job_records_is_the_same_without_it(doctor: Doctor) -> None:
    script = doctor.write("train.py", JOB)
    compiled = recorded(doctor, script)
    python = recorded(doctor, script, DDPDOCTOR_PURE_PYTHON="1")
    for ours, theirs in zip(compiled, python, strict=True):
        for name, facts in theirs.items():
            assert ours[name] == facts, name
    assert compiled[0]["page"][0] == 800
    assert len({each[0] for each in compiled[0]["steps"]}) == 800


def test_memory_does_not_grow_with_the_steps(doctor: Doctor) -> None:
    script = doctor.write(
        "train.py",
        """
        import resource, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo")
        ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        batch = torch.randn(4, 4)
        def most(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for step in range(6000):
            ddp(batch).sum().backward()
            optimizer.step()
            dist.all_reduce(batch[0])
            if step == 2000:
                before = most()
        print("grew by", most() - before)
        dist.destroy_process_group()
        """,
    )
    result = doctor.run("--nproc-per-node", "1", str(script))
    result.check_success()
    found = re.search(r"grew by (\d+)", result.stdout)
    assert found is not None
    # A reference that is kept in each step would be 64 bytes and more, of several kinds.
    assert int(found[1]) < 1024, "KiB in 4,000 steps"
