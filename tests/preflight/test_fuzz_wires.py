"""Every reader of bytes from peers, clients, editors and the kernel, given any.

Each returns, or raises what it documents. `tests/whole/test_fuzz.py` has files of run directories.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import io
import json
import os
import socket
import struct
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddpdoctor.debug import dap, vscode_configurations, vscode_files
from ddpdoctor.debug.gateway_ranks import RankLink
from ddpdoctor.debug.vscode_configurations import AttachPoint, PathMapping
from ddpdoctor.preflight.machine import gpus
from ddpdoctor.preflight.protocol import coordinator, pairs, wire
from ddpdoctor.preflight.protocol.messages import Facts, unpack_facts
from ddpdoctor.preflight.selftest.collectives import Ranks
from ddpdoctor.probe.runtime import control, shield
from ddpdoctor.run.records.base import as_json
from ddpdoctor.supervise import processes
from ddpdoctor.supervise.keepers import Keepers
from ddpdoctor.system import nvml, peers, process_activity
from ddpdoctor.system import proc as proc_layer
from ddpdoctor.top.prometheus import Exporter
from tests.conftest import LIMIT
from tests.whole.test_fuzz import BYTES, VALUES

FUZZ = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

DEEP = st.integers(1, 100_000).map(lambda depth: b"[" * depth)
LONG = st.integers(20, 5_000).map(lambda count: b'{"x":' + b"9" * count + b"}")
JSON = BYTES | DEEP | LONG


def message(**known: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Messages with the keys that a reader looks for, whose values are right or anything."""
    return st.fixed_dictionaries({}, optional={key: each | VALUES for key, each in known.items()})


class Nowhere:
    """A writer whose bytes nobody reads."""

    def write(self, data: bytes) -> None:
        pass

    def write_eof(self) -> None:
        pass

    def close(self) -> None:
        pass

    async def drain(self) -> None:
        pass

    async def wait_closed(self) -> None:
        pass

    def get_extra_info(self, name: str) -> tuple[str, int] | None:
        return None if name == "socket" else ("203.0.113.7", 5)


def reader(data: bytes) -> asyncio.StreamReader:
    made = asyncio.StreamReader()
    made.feed_data(data)
    made.feed_eof()
    return made


# -- the check's meeting


def framed(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data


@FUZZ
@given(JSON | JSON.map(framed))
def test_a_message_of_the_meeting(data: bytes) -> None:
    async def receive() -> None:
        with contextlib.suppress(wire.WireError):
            told = await wire.Link(reader(data), Nowhere()).receive(5)  # type: ignore[arg-type]
            assert isinstance(told, dict)

    asyncio.run(receive())


@FUZZ
@given(BYTES)
def test_a_greeting(data: bytes) -> None:
    wire.challenge_in(data)


FACTS: dict[str, st.SearchStrategy[Any]] = {
    each.name: st.text(max_size=5) | st.integers() | st.sampled_from([["a", 1.0], [], {}, None])
    for each in fields(Facts)
}


@FUZZ
@given(st.fixed_dictionaries({name: each | VALUES for name, each in FACTS.items()}) | VALUES)
def test_facts_of_a_peer(told: Any) -> None:
    with contextlib.suppress(ValueError):
        facts = unpack_facts(told)
        assert isinstance(facts.host, str)
        json.dumps(as_json(facts))


KNOCK = message(host=st.text(max_size=9), nonce=st.text(max_size=9))
TOLD = message(
    facts=st.fixed_dictionaries(FACTS),
    offset=st.floats(),
    uncertainty=st.floats(),
    blocked=VALUES,
)


@FUZZ
@given(KNOCK, st.lists(TOLD, max_size=4), st.booleans())
def test_a_peer_that_knocks(knock: dict[str, Any], told: list[Any], proves: bool) -> None:
    key = wire.key_of("run")

    class Knocking(Nowhere):
        """Sends what it has to send once it is greeted, with a proof that it knows the run."""

        def __init__(self, to: asyncio.StreamReader) -> None:
            self.to, self.greeted = to, False

        def write(self, data: bytes) -> None:
            if self.greeted:
                return
            self.greeted = True
            challenge = wire.challenge_in(data)
            if proves and challenge is not None:
                knock["proof"] = wire.proof(key, "node", challenge)
            for each in (knock, *told):
                self.to.feed_data(wire.packed(each))
            self.to.feed_eof()

    async def arrive() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            meeting = coordinator.Coordinator(listening, key, 2)
            to = asyncio.StreamReader()
            await meeting._arrive(to, Knocking(to))  # type: ignore[arg-type]
            await meeting.close()

    asyncio.run(arrive())


@FUZZ
@given(st.binary(max_size=64))
def test_a_speed_of_a_peer(data: bytes) -> None:
    answer = bytes(8) * pairs.PINGS + data

    async def measure() -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            speed = await pairs.measure_link(reader(answer), Nowhere())  # type: ignore[arg-type]
            pairs.is_slow(speed, 1.0, 1.0)

    most, pairs.MEASURE_BYTES = pairs.MEASURE_BYTES, len(pairs.CHUNK)
    try:
        asyncio.run(measure())
    finally:
        pairs.MEASURE_BYTES = most


@FUZZ
@given(st.lists(st.binary(min_size=1, max_size=80), max_size=5))
def test_an_echo_of_a_peer(replies: list[bytes]) -> None:
    payload = b"ddpdoctor-payload"
    right = (
        bytes([wire._ICMP_TYPES[socket.AF_INET][2]]) + bytes(wire._ICMP_HEADER.size - 1) + payload
    )

    async def hear() -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with mine, theirs:
            mine.setblocking(False)
            for each in (*replies, right):
                theirs.send(each)
            await asyncio.wait_for(wire._echo_reply(mine, socket.AF_INET, payload), 5)

    asyncio.run(hear())


# -- the debugger


SEQ = st.integers(0, 3)
COMMANDS = ["continue", "disconnect", "terminate", "pause", "setBreakpoints", "stackTrace", "next"]
REQUESTS = message(
    type=st.just("request"),
    seq=SEQ,
    command=st.sampled_from(COMMANDS),
    arguments=message(
        threadId=SEQ, source=message(path=st.text(max_size=5)), terminateDebuggee=st.booleans()
    ),
)
REPLIES = message(
    type=st.sampled_from(["response", "event"]),
    request_seq=SEQ,
    event=st.sampled_from(["stopped", "continued", "terminated"]),
    success=st.booleans(),
    body=message(reason=st.just("pause"), breakpoints=VALUES, stackFrames=VALUES, threadId=SEQ),
)


def stream(messages: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[bytes]:
    """Messages one after the other, with noise in between."""
    noise = st.binary(max_size=20) | JSON.map(lambda body: b"Content-Length: 9\r\n\r\n" + body)
    heads = JSON.map(lambda body: b"Content-Length: %d\r\n\r\n" % len(body) + body)
    return st.lists(messages.map(dap.encode) | heads | noise, max_size=6).map(b"".join)


@FUZZ
@given(st.lists(stream(REQUESTS) | stream(REPLIES), max_size=6))
def test_a_session_of_a_debugger(pieces: list[bytes]) -> None:
    tap = dap.SessionState()
    for number, data in enumerate(pieces):
        if number % 2:
            for said, _ in tap.to_client(data):
                tap.file_of(said)
                json.dumps(said)
            continue
        with contextlib.suppress(dap.NotDapError):
            passed = dap.Decoder().feed(tap.to_rank(data))
            # Whatever the client sends, nothing that ends the rank goes through.
            for each in passed:
                if each.get("type") == "request" and isinstance(each.get("seq"), int):
                    assert each.get("command") != "terminate"
                    if each.get("command") == "disconnect":
                        assert each["arguments"] == dap.DISCONNECT["arguments"]
            for each in passed:
                dap.refusal(each, "refused: {uid}")


@FUZZ
@given(st.lists(JSON | REQUESTS.map(lambda each: json.dumps(each).encode()), max_size=5))
def test_what_a_rank_says(lines: list[bytes]) -> None:
    async def hear() -> None:
        link = RankLink(reader(b"\n".join(lines)), Nowhere())  # type: ignore[arg-type]
        messages: AsyncIterator[dict[str, Any]] = link.messages()
        async for each in messages:
            link.introduce(each)

    asyncio.run(hear())


@FUZZ
@given(message(answers=st.integers(0, 3)))
def test_an_answer_of_a_rank(told: dict[str, Any]) -> None:
    async def hear() -> None:
        link = RankLink(reader(json.dumps(told).encode() + b"\n"), Nowhere())  # type: ignore[arg-type]
        _ = [each async for each in link.messages()]

    asyncio.run(hear())


@FUZZ
@given(JSON | message(do=st.sampled_from(["stacks", "ask"])).map(lambda m: json.dumps(m).encode()))
def test_what_the_supervisor_asks(line: bytes) -> None:
    said: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shield, "fault", lambda *what: said.append(what))
        patch.setattr(control, "_send", said.append)
        control._act(line)


# -- the editor's files

WORDS = st.sampled_from(
    [
        *(
            '{"version":"0.2.0",',
            '"configurations"',
            '"compounds"',
            '"tasks"',
            '"name"',
            '"\\ud800"',
        ),
        *('"ddpdoctor: rank 0"', "// ddpdoctor", "/*", "*/", "\n", "1e999", " ", '"\\ud800"'),
        *(":", "[", "]", "{", "}", ","),
    ]
)
TEXTS = (
    st.lists(WORDS, max_size=20).map("".join)
    | st.text(max_size=60)
    | JSON.map(lambda data: data.decode("utf-8", "replace"))
    | VALUES.map(json.dumps)
)


@FUZZ
@given(TEXTS)
def test_a_file_of_the_editor(text: str) -> None:
    points = [AttachPoint(0, "127.0.0.1", 5678)]
    mappings = [PathMapping("/here", "/there")]
    for edit in (
        vscode_files.parse_jsonc,
        lambda given: vscode_configurations.with_run(given, points, mappings),
        lambda given: vscode_configurations.with_launch_entries(given, points, mappings),
        vscode_configurations.without_launch_entries,
        lambda given: vscode_configurations.with_tasks(given, ["train.py"]),
        vscode_configurations.without_tasks,
    ):
        with contextlib.suppress(vscode_files.JsoncError):
            found = edit(text)
            if isinstance(found, str):
                vscode_files.parse_jsonc(found)


# -- requests of Prometheus


@pytest.fixture(scope="module")
def exporter() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    made = Exporter(("127.0.0.1", port), lambda: None)
    yield port
    made.close()


@settings(FUZZ, max_examples=20)
@given(st.binary(max_size=200) | st.binary(max_size=80).map(lambda path: b"GET /" + path))
def test_a_request_of_prometheus(exporter: int, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", exporter), 10) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        client.settimeout(10)
        with contextlib.suppress(ConnectionError):
            while client.recv(4096):
                pass
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(f"http://127.0.0.1:{exporter}/metrics", timeout=LIMIT).read()


# -- what the kernel says of processes, whose names are anybody's

NAMES = st.binary(max_size=15).filter(lambda name: b"\0" not in name)
COUNTS = st.lists(st.integers(0, 1 << 63).map(str), min_size=44, max_size=52).map(" ".join)


@contextlib.contextmanager
def proc(text: bytes) -> Iterator[None]:
    """All files of the kernel hold this."""

    def opened(path: Any, mode: str = "r", **how: Any) -> Any:
        if not str(path).startswith("/proc/"):
            return real(path, mode, **how)
        if "b" in mode:
            return io.BytesIO(text)
        return io.TextIOWrapper(io.BytesIO(text), "utf-8", how.get("errors", "strict"))

    real = builtins.open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", opened)
        yield


@FUZZ
@given(NAMES, COUNTS)
def test_a_stat_line(name: bytes, counts: str) -> None:
    text = b"7 (%s) S 1 2 %s" % (name, counts.encode())
    with proc(text):
        found = processes._read(7)
        assert found is not None and (found.parent, found.group) == (1, 2)
        proc_layer.zombie_status(7)
        proc_layer.session_of(7)


@FUZZ
@given(NAMES)
def test_a_status_file(name: bytes) -> None:
    shown = name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"_")
    text = b"Name:\t%s\nState:\tS (sleeping)\nSigPnd:\t0000000000000000\n" % shown
    text += b"ShdPnd:\t0000000000000002\nSigBlk:\t0\nSigCgt:\t4\nvoluntary_ctxt_switches:\t5\n"
    with proc(text):
        assert proc_layer.pending(7) == {2}
        signals = process_activity.read_signals(7, 7)
        assert signals is not None and signals.caught == 4
        process_activity.read_cpu_time(7, 7)


@FUZZ
@given(st.binary(max_size=200) | st.lists(st.integers().map(str), max_size=9).map(" ".join))
def test_other_files_of_the_kernel(text: bytes | str) -> None:
    with proc(text.encode() if isinstance(text, str) else text):
        processes._read(7)
        processes._is_marked(7, "run")
        proc_layer.zombie_status(os.getpid())
        process_activity.read_cpu_time(7, 7)
        process_activity.read_signals(7, 7)
        process_activity.read_state(7)
        peers._overflow_uid.__wrapped__()


# -- ddpdoctor's own processes, and the driver's log


@FUZZ
@given(st.lists(st.binary(max_size=30) | st.sampled_from([b"pids 1 2 3", b"ended 1"]), max_size=5))
def test_words_of_a_keeper(lines: list[bytes]) -> None:
    keepers = object.__new__(Keepers)
    keepers._partial, keepers._below, keepers.pid, keepers.status = b"", 0, 0, None
    keepers._pipe, keepers.sentinel = -1, 0
    keepers._reports, theirs = os.pipe()
    os.set_blocking(keepers._reports, False)
    os.write(theirs, b"\n".join([*lines, b""]))
    keepers.poll()
    os.close(keepers._reports)
    os.close(theirs)


@FUZZ
@given(JSON | message(rank=SEQ, did=VALUES, wrong=VALUES).map(lambda m: json.dumps(m).encode()))
def test_a_line_of_a_rank_of_the_check(line: bytes) -> None:
    Ranks({}).read(line.decode("utf-8", "replace"))


DIGITS = st.integers(0, 5_000).map(lambda count: "7" * count)


@FUZZ
@given(st.lists(DIGITS | st.text(max_size=9), max_size=4), DIGITS, DIGITS)
def test_words_of_the_driver_and_for_it(entries: list[str], number: str, stamp: str) -> None:
    nvml.choice({"CUDA_VISIBLE_DEVICES": ",".join(entries)}, [])
    record = f"4,1,{stamp},-;NVRM: Xid (PCI:0000:01:00): {number}, pid=1, x"
    for xid in gpus._parsed([record, *entries], 1.0):
        assert xid.age >= 0
