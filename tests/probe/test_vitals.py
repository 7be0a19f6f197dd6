"""What a rank's writing thread puts on its status page for who watches."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.probe.runtime import recorder, shield, torch_devices
from ddpdoctor.probe.runtime.recorder import Recorder, Vitals
from ddpdoctor.run.journal import Journal
from ddpdoctor.run.records.process import FaultRecord
from ddpdoctor.run.records.typed_json import parse
from ddpdoctor.run.status import PAGE_SIZE, Parts, StatusPage, read_status
from tests.conftest import LIMIT

UUID = "01234567-89ab-cdef-0123-456789abcdef"
PARTS = Parts(41, 1, 2, 3, 4, 5, 6, True, 7_000, 8_000)


def new_page(path: Path) -> StatusPage:
    return StatusPage(str(path), rank=0, world_size=1, local_rank=0, restart=0, started=1)


def test_a_page_on_which_nothing_was_put_knows_nothing(tmp_path: Path) -> None:
    new_page(tmp_path / "page")
    status = read_status(str(tmp_path / "page"))
    assert status.parts is None
    assert status.beat is status.rss is None
    assert status.allocated is status.reserved is status.peak is None
    assert status.gpu == ""


def test_what_was_put_is_read_back_and_nothing_else_moves(tmp_path: Path) -> None:
    page = new_page(tmp_path / "page")
    before = read_status(str(tmp_path / "page"))
    page.set_parts(PARTS)
    page.set_beat(77)
    page.set_memory(4096, (0, 2, 3))
    page.set_gpu(f"GPU-{UUID.upper()}")
    assert read_status(str(tmp_path / "page")) == before._replace(
        parts=PARTS, beat=77, rss=4096, allocated=0, reserved=2, peak=3, gpu=UUID
    )
    assert PARTS.total == 21
    assert (tmp_path / "page").stat().st_size == PAGE_SIZE
    page.set_memory(None, None)
    status = read_status(str(tmp_path / "page"))
    assert status.rss is status.allocated is None


def test_of_times_too_long_for_the_page_the_longest_is_kept(tmp_path: Path) -> None:
    page = new_page(tmp_path / "page")
    page.set_parts(PARTS._replace(waited=1 << 62))
    parts = read_status(str(tmp_path / "page")).parts
    assert parts == PARTS._replace(waited=((1 << 32) - 1) * 1000)


@pytest.mark.parametrize("uuid", ["", "GPU-", "GPU-aaaa", "nonsense", f"{UUID}00"])
def test_a_uuid_that_is_none_is_left_out(tmp_path: Path, uuid: str) -> None:
    page = new_page(tmp_path / "page")
    page.set_gpu(uuid)
    assert read_status(str(tmp_path / "page")).gpu == ""


def test_the_page_shows_the_newest_step_timed_by_ddp_or_not(tmp_path: Path) -> None:
    signs = Vitals(new_page(tmp_path / "page"))
    shown = []
    for number, split in ((0, False), (1, False), (2, True), (3, False), (4, True)):
        signs.wrote(PARTS._replace(number=number, split=split))
        signs.store()
        parts = read_status(str(tmp_path / "page")).parts
        assert parts is not None
        shown.append(parts.number)
    assert shown == [0, 1, 2, 3, 4]


def test_memory_of_the_process_without_a_gpu(tmp_path: Path) -> None:
    signs = Vitals(new_page(tmp_path / "page"))
    signs.store()
    status = read_status(str(tmp_path / "page"))
    assert status.rss is not None and status.rss > 1 << 20
    assert status.beat is not None and abs(status.beat - time.time_ns()) < 60e9
    assert status.allocated is None
    # The training thread is never made to ask.
    assert signs.due > time.perf_counter_ns() + 10 * recorder.MEMORY_EVERY


class Cuda:
    def __init__(self) -> None:
        self.asked: list[object] = []
        self.broken = False

    def is_initialized(self) -> bool:
        return True

    def get_device_properties(self, device: object) -> Any:
        return SimpleNamespace(uuid=UUID)

    def memory_stats_as_nested_dict(self, device: object) -> Any:
        self.asked.append(device)
        if self.broken:
            raise RuntimeError
        return {
            "allocated_bytes": {"all": {"current": 10, "peak": 30}},
            "reserved_bytes": {"all": {"current": 20, "peak": 20}},
        }


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return cuda


def test_the_allocator_is_asked_at_most_once_a_second(tmp_path: Path, cuda: Cuda) -> None:
    signs = Vitals(new_page(tmp_path / "page"))
    signs.use_device("cuda:3")
    now = 5_000
    for later in (
        0,
        10,
        recorder.MEMORY_EVERY - 1,
        recorder.MEMORY_EVERY,
        recorder.MEMORY_EVERY + 10,
    ):
        if now + later >= signs.due:
            signs.ask(now + later)
    assert cuda.asked == ["cuda:3", "cuda:3"]
    signs.store()
    status = read_status(str(tmp_path / "page"))
    assert (status.allocated, status.reserved, status.peak) == (10, 20, 30)
    assert status.gpu == UUID


def test_an_allocator_that_tells_nothing_is_asked_no_more(tmp_path: Path, cuda: Cuda) -> None:
    cuda.broken = True
    signs = Vitals(new_page(tmp_path / "page"))
    signs.use_device("cuda:0")
    signs.ask(0)
    signs.store()
    assert read_status(str(tmp_path / "page")).allocated is None
    assert signs.due > recorder.MEMORY_EVERY * 1000


def test_a_fault_in_a_round_is_written_and_ends_the_rounds(tmp_path: Path) -> None:
    page = new_page(tmp_path / "page")
    recorder = Recorder(page, Journal(str(tmp_path / "journal"), 1 << 20))
    calls = []

    def broken() -> None:
        calls.append(1)
        raise ValueError

    recorder.each_round.append(broken)
    recorder.start()
    deadline = time.monotonic() + LIMIT
    while b"test_vitals" not in (tmp_path / "journal").read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    recorder.close(5)
    assert calls == [1]
    lines = (tmp_path / "journal").read_bytes().splitlines()
    (fault,) = [each for each in map(parse, lines) if isinstance(each, FaultRecord)]
    assert (fault.hook, fault.error) == ("test_vitals", "ValueError")


def test_a_writing_thread_that_fails_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(str(tmp_path / "journal"), 1 << 20)
    recorder = Recorder(new_page(tmp_path / "page"), journal)
    failed: list[str] = []
    monkeypatch.setattr(recorder, "_drain", lambda last: 1 / 0)
    monkeypatch.setattr(shield, "fault", lambda hook, error: failed.append(f"{hook}: {error}"))
    recorder.start()
    recorder.add(lambda last: b"")
    recorder._thread.join(LIMIT)
    journal.close()
    assert failed == ["thread journal: division by zero"]
    assert capfd.readouterr().err == ""


def test_other_accelerators_have_what_their_module_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = {
        "allocated_bytes.all.current": 10, "reserved_bytes.all.current": 20,
        "allocated_bytes.all.peak": 30,
    }  # fmt: skip
    cuda = Cuda()
    torch = SimpleNamespace(
        xpu=SimpleNamespace(
            memory_stats_as_nested_dict=cuda.memory_stats_as_nested_dict,
            get_device_name=lambda device: f"Arc {device}",
            get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
        ),
        mps=SimpleNamespace(),
        accelerator=SimpleNamespace(
            memory_stats=lambda device: flat,
            current_accelerator=lambda: SimpleNamespace(type="xpu"),
        ),
        Event=object,
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    has_events = torch_devices.has_events.__wrapped__
    assert torch_devices.name_of("xpu:1") == "Arc xpu:1"
    assert torch_devices.total_memory("xpu:1") == 1 << 30
    assert torch_devices.allocated_memory("xpu:1") == (10, 20, 30)
    assert has_events("xpu")
    assert torch_devices.name_of("mps:0") == ""
    assert torch_devices.total_memory("mps:0") is None
    assert torch_devices.allocated_memory("mps:0") == (10, 20, 30)
    assert not has_events("mps")
    # Before 2.6 torch has CUDA's functions alone.
    del torch.accelerator, torch.mps
    assert torch_devices.name_of("npu:0") == ""
    assert not has_events("xpu")
    assert has_events("cuda")
    with pytest.raises(AttributeError):
        torch_devices.allocated_memory("npu:0")
