"""Every reader of foreign bytes, given any: it returns, or raises what it says it raises."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import from_record as finding_from_record
from ddpdoctor.failures import verdict
from ddpdoctor.failures.log import read as read_log
from ddpdoctor.run import ring, step_series
from ddpdoctor.run.mapped import UnreadableError
from ddpdoctor.run.reader import JournalReader, RunReader, read_manifest
from ddpdoctor.run.records.typed_json import RANK_RECORDS
from ddpdoctor.run.status import PAGE_SIZE, parse_status
from ddpdoctor.stacks import capture, frames
from ddpdoctor.stacks.capture import read_declared
from ddpdoctor.top import live, output, run_files
from ddpdoctor.top.frames import WANT_ALL
from ddpdoctor.top.recording import RecordingSource
from ddpdoctor.top.run_files import Stderr

FUZZ = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""A few seconds each: all of them take less than a minute."""

NUMBERS = st.integers() | st.sampled_from([1 << 63, -(1 << 63), 10**400]) | st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
KINDS = st.sampled_from(["step", "open", "error", "finding", "hang", "debug", "rank_exit", "job"])
KEYS = st.sampled_from(
    ["rank", "restart", "time", "step", "start", "path", "line", "file", "status"]
)
RECORDS = st.builds(
    lambda kind, rest: {"kind": kind, **rest}, KINDS, st.dictionaries(KEYS, VALUES, max_size=6)
)
LINES = st.lists(RECORDS.map(json.dumps) | st.text(max_size=40), max_size=8).map(
    lambda lines: "\n".join(lines).encode("utf-8", "replace") + b"\n"
)
BYTES = st.binary(max_size=2_048) | LINES | VALUES.map(lambda value: json.dumps(value).encode())


@FUZZ
@given(st.binary(min_size=PAGE_SIZE - 8, max_size=PAGE_SIZE - 8))
def test_a_status_page(rest: bytes) -> None:
    parse_status(b"DDPDOCT\0" + struct.pack("<I", 1) + rest[4:] + bytes(8), "page")


@FUZZ
@given(st.integers(0, ring.SIZE - 8), st.binary(min_size=8, max_size=512))
def test_a_ring(at: int, noise: bytes) -> None:
    raw = bytearray(ring.SIZE)
    head = ring._HEAD.pack(ring._MAGIC, 1, ring.ENTRIES, ring._ENTRY.size, ring.SIZE // 2)
    raw[: len(head)] = head
    raw[at : at + len(noise)] = noise
    raw = raw[: ring.SIZE]
    try:
        ring.parse_ring(bytes(raw), "ring")
    except UnreadableError:
        assert bytes(raw[: len(head)]) != head or len(raw) < ring.SIZE


def journal(path: Path) -> None:
    reader = JournalReader(path)
    reader.poll()
    assert all(type(record) is RANK_RECORDS[record.kind] for record in reader.records)
    for line in reader.step_lines:
        step_series.parse_step(line)


def log(path: Path) -> None:
    verdict.findings(read_log("rank0.log", [path.read_bytes()]))


def recording(path: Path) -> None:
    source = RecordingSource(str(path))
    source.read(WANT_ALL)
    source.close()


def manifest(path: Path) -> None:
    assert isinstance(read_manifest(path.parent), dict)


def whole(path: Path) -> None:
    RunReader(path.parent, lenient=True).snapshot()


def steps(path: Path) -> None:
    found = step_series.StepLog(path)
    found.span()
    found.until(5, 3)
    found.newest(3)
    run_files.open_record(path, 1 << 20)
    run_files.last_error(path, 1 << 20)
    run_files.last_pass(path, 1 << 20)


def stderr(path: Path) -> None:
    Stderr(path.parent).read()


READERS: dict[str, tuple[str, Callable[[Path], object], tuple[type[Exception], ...]]] = {
    "journal": ("rank-0000.r0.jsonl", journal, ()),
    "steps": ("rank-0000.r0.jsonl", steps, ()),
    "manifest": ("run.json", manifest, (DoctorError,)),
    "supervisor": ("supervisor.jsonl", whole, ()),
    "stderr": ("stderr.log", stderr, ()),
    "stacks": ("stacks.json", lambda path: frames.load_stacks(path.parent), ()),
    "declared": ("stacks-1-2.txt", lambda path: read_declared(path.parent), ()),
    "log": ("rank0.log", log, ()),
    "faulthandler": (
        "x",
        lambda path: capture.parse_dump(path.read_text(errors="replace"), "/d"),
        (),
    ),
    "recording": ("top.jsonl", recording, (DoctorError,)),
    "object": ("x", lambda path: opening.json_object(path, 1 << 20), (ValueError,)),
}


@pytest.mark.parametrize("name", READERS)
@FUZZ
@given(data=BYTES)
def test_a_reader(name: str, data: bytes, tmp_path: Path) -> None:
    file, reader, raises = READERS[name]
    path = tmp_path / file
    path.write_bytes(data)
    with contextlib.suppress(*raises):
        reader(path)


@FUZZ
@given(st.dictionaries(st.sampled_from(["gpus", "host", "format", "nvml"]), VALUES))
def test_gpus(told: dict[str, Any]) -> None:
    live.gpus_of(told)


@FUZZ
@given(st.dictionaries(st.sampled_from(["code", "severity", "message", "ranks", "fix"]), VALUES))
def test_a_finding(told: dict[str, Any]) -> None:
    finding_from_record(told)


@FUZZ
@given(BYTES)
def test_a_snapshot(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        output.of_record(output.loads(data))
