"""What a head takes from other nodes, who gets in, and what survives a lost connection."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from ddpdoctor.core.finding import RULES, examine
from ddpdoctor.nodes import asking, link, store
from ddpdoctor.nodes.alignment import Alignment, HeadClock
from ddpdoctor.nodes.debug_relay import DebugRelay
from ddpdoctor.nodes.head import Head, Mirror, RefusedError
from ddpdoctor.nodes.member import Member
from ddpdoctor.nodes.messages import Began, Files, Hello, Over, Piece, Question, Request
from ddpdoctor.nodes.shipment import NODE, STEP_STRIDE, Shipment
from ddpdoctor.run.journal import Journal
from ddpdoctor.run.mapped import EXAMINATION, RequestWriter
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.base import as_json
from ddpdoctor.run.records.process import OpenRecord, StoreRecord
from ddpdoctor.run.records.supervisor import NodeRecord, RankExitRecord
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.ring import RingWriter
from ddpdoctor.run.status import Phase, StatusPage
from tests.conftest import LIMIT

SECOND = 1_000_000_000


class NodeFiles:
    """The run directory of a node, with one rank that this process writes."""

    def __init__(self, path: Path, rank: int, world_size: int = 2, restart: int = 0) -> None:
        path.mkdir(exist_ok=True)
        self.path = path
        (path / "run.json").write_text(json.dumps({"format": FORMAT, "host": path.name}))
        stem = str(path / f"rank-{rank:04d}.r{restart}")
        self.opened = time.time_ns()
        self.page = StatusPage(
            f"{stem}.status", rank=rank, world_size=world_size, local_rank=0, restart=restart,
            started=self.opened,
        )  # fmt: skip
        self.journal = Journal(f"{stem}.jsonl", 1 << 16)
        self.ring = RingWriter(f"{stem}.collectives")
        self.journal.write(
            [
                OpenRecord(
                    format=FORMAT, rank=rank, world_size=world_size, time=self.opened,
                    restart=restart, namespace="here", host=path.name,
                )
            ]
        )  # fmt: skip
        self.rank, self.restart = rank, restart

    @property
    def began(self) -> Began:
        return Began(restart=self.restart, world_size=2, time=self.opened)


class Pair:
    """A head and a member, each served by this process."""

    def __init__(self, directory: Path) -> None:
        self.one, self.two = NodeFiles(directory / "one", 0), NodeFiles(directory / "two", 1)
        self.head = Head(
            self.one.path, 1 << 20, "127.0.0.1", DebugRelay(self.one.path, admits=True)
        )
        self.head.began(self.one.began)
        self.answered: list[Any] = []
        self.member = Member(
            self.two.path, b"n" * 16, self._answer, DebugRelay(self.two.path, admits=True)
        )
        self.member.began(self.two.began)

    def _answer(self, what: str, arguments: Any) -> Any:
        self.answered.append((what, arguments))
        return [{"rank": 1, "since": self.two.opened, "restart": 0}]

    def turn(self) -> None:
        self.head.receive()
        self.head.accept()
        self.head.tick()
        self.member.receive()
        self.member.tick()
        time.sleep(0.005)

    def until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + LIMIT
        while not (found := condition()):
            assert time.monotonic() < deadline
            self.turn()
        return found

    def rank(self, number: int = 1) -> Any:
        """A rank as the head's reader sees it; None while there is none."""
        run = RunReader(self.one.path).snapshot()
        return next((each for each in run.ranks if each.rank == number), None)

    def close(self) -> None:
        self.member.close()
        self.head.close()
        self.one.journal.close()
        self.two.journal.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


def step(number: int, start: int) -> StepRecord:
    return StepRecord(step=number, start=start, total=SECOND, forward=SECOND)


# -- what arrives


def test_a_rank_of_another_node_is_one_of_the_run(pair: Pair) -> None:
    pair.two.page.show(int(Phase.BACKWARD), pair.two.opened, 3)
    pair.two.page.totals(7, 1, SECOND, 0)
    pair.two.journal.write([step(each, pair.two.opened) for each in range(5)])
    pair.member.invite(pair.head.invitation)
    rank = pair.until(lambda: (each := pair.rank()) and len(each.steps) == 5 and each)
    assert rank.elsewhere and rank.opened.host == "two"
    assert (rank.status.step, rank.status.phase) == (7, Phase.BACKWARD)
    run = RunReader(pair.one.path).snapshot()
    assert run.nodes[0].state in ("joined", "clock") and run.ranks_on(run.nodes[0]) == (rank,)
    assert not run.ranks[0].elsewhere


def test_its_clock_and_its_attempt_are_those_of_the_head(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path / "node", 1, restart=0)
    files.page.show(int(Phase.DATA), files.opened, 0)
    files.page.set_beat(files.opened)
    files.ring.begin(files.opened, 1, (0, 0, 0, 0, 0), (4,), 4, -1, 0)
    files.journal.write([step(3, files.opened)])
    head = tmp_path / "head"
    head.mkdir()
    (head / "run.json").write_text(json.dumps({"format": FORMAT}))
    shipment = Shipment(files.path)
    shipment.hurry()
    pieces, contents = shipment.collect(Alignment(20 * SECOND, {0: 4}, "@node"))
    mirror = Mirror(head, 1 << 20)
    mirror.take(1, pieces, contents)
    mirror.close()
    files.journal.close()
    (rank,) = RunReader(head).snapshot().ranks
    assert rank.status is not None
    then = files.opened + 20 * SECOND
    assert (rank.restart, rank.status.restart, rank.opened.restart) == (4, 4, 4)
    assert rank.status.since == rank.status.beat == rank.opened.time == rank.steps[0].start == then
    assert rank.ring is not None and rank.ring.collectives[0].began == then
    assert rank.opened.namespace == "here@node"


def test_journals_are_followed_across_rotations(pair: Pair) -> None:
    pair.member.invite(pair.head.invitation)
    pair.until(lambda: pair.rank())
    for each in range(400):
        pair.two.journal.write([step(each, pair.two.opened)])
        if each % 100 == 99:
            pair.until(lambda: len(pair.rank().steps) == each + 1)  # noqa: B023 (called at once)
    assert [each.step for each in pair.rank().steps] == list(range(400))


def test_a_backlog_is_thinned_alike_on_all_nodes(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path / "node", 1)
    files.journal.close()
    journal = Journal(str(files.path / "rank-0002.r0.jsonl"), 1 << 24)
    journal.write([step(each, files.opened) for each in range(12_000)])
    journal.close()
    shipment = Shipment(files.path)
    pieces, contents = shipment.collect(Alignment(0, {0: 0}, "@node"))
    at = next(each for each in pieces if each.name == "rank-0002.r0.jsonl")
    lines = [line for line in contents.splitlines() if line.startswith(b'{"kind":"step"')]
    sent = [json.loads(line) for line in lines]
    assert at.size < 1 << 20
    assert sent and all(each["step"] % STEP_STRIDE == 0 for each in sent)


def test_the_calls_of_all_ranks_come_with_the_end_of_one(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path / "node", 1)
    shipment = Shipment(files.path)
    ring = "rank-0001.r0.collectives"

    def sent() -> list[str]:
        files.ring.begin(files.opened, 1, (0, 0, 0, 0, 0), (4,), 4, -1, 0)
        return [each.name for each in shipment.collect(Alignment(0, {0: 0}, "@node"))[0]]

    assert ring in sent() and ring not in sent()
    supervisor = Journal(str(files.path / "supervisor.jsonl"), 1 << 16)
    supervisor.write([RankExitRecord(time=1, rank=2, restart=0, status=-9)])
    supervisor.close()
    names = sent()
    assert names.index(NODE) < names.index(ring)
    files.journal.close()


def test_nothing_is_lost_with_the_connection(pair: Pair) -> None:
    pair.member.invite(pair.head.invitation)
    pair.until(lambda: pair.rank())
    for each in range(30):
        pair.two.journal.write([step(each, pair.two.opened)])
        if each == 10:
            pair.member._connect()  # The old connection is closed, with what it had queued.
            pair.member._tried.extend(pair.head.invitation.addresses)
            pair.member.head = None
            pair.member.invite(pair.head.invitation)
        pair.turn()
    pair.until(lambda: len(pair.rank().steps) == 30)
    assert [each.step for each in pair.rank().steps] == list(range(30))


def test_the_end_of_a_node_arrives_with_its_last_records(pair: Pair) -> None:
    pair.member.invite(pair.head.invitation)
    pair.until(lambda: pair.rank())
    supervisor = Journal(str(pair.two.path / "supervisor.jsonl"), 1 << 16)
    supervisor.write([RankExitRecord(time=1, rank=1, restart=0, status=-9)])
    supervisor.close()
    ended = threading.Thread(target=pair.member.finish, args=(1, 10.0))
    ended.start()
    while ended.is_alive():
        pair.head.receive()
        pair.head.tick()
        time.sleep(0.01)
    deadline = time.monotonic() + LIMIT
    while pair.head.waits_for and time.monotonic() < deadline:
        pair.head.receive()
    run = RunReader(pair.one.path).snapshot()
    assert [each.status for each in run.supervisor.of(RankExitRecord)] == [-9]
    assert run.nodes[0].state == "left" and run.nodes[0].status == 1


def test_a_head_whose_ddpdoctor_was_killed_judges_no_other_node(pair: Pair) -> None:
    pair.member.invite(pair.head.invitation)
    pair.until(lambda: pair.rank())
    (peer,) = pair.head._peers.values()
    pair.head._send(peer, Over(killed=True))
    pair.until(lambda: pair.member.head is None)
    assert not pair.member.over and pair.member.looks_for_head


def test_a_head_that_does_not_take_the_last_records_judges_them_not(pair: Pair) -> None:
    pair.member.invite(pair.head.invitation)
    pair.until(lambda: pair.rank())
    pair.two.journal.write([step(1, pair.two.opened)])
    pair.member.finish(1, 0.5)
    assert pair.member.head is None


def test_requests_and_questions_reach_the_node(pair: Pair) -> None:
    RequestWriter(str(pair.two.path)).close()
    request = RequestWriter(str(pair.one.path))
    pair.member.invite(pair.head.invitation)
    pair.until(lambda: pair.rank())
    request.ask(7)
    pair.until(lambda: (pair.two.path / EXAMINATION).read_bytes()[0] == 7)
    found: list[Any] = []
    asked = threading.Thread(
        target=lambda: found.extend(asking.ask(pair.one.path, "examine", {"number": 7}, 20.0))
    )
    asked.start()
    pair.until(lambda: not asked.is_alive())
    assert [(each.host, each.found[0]["rank"]) for each in found] == [(socket.gethostname(), 1)]
    assert pair.answered[0][0] == "examine"


def test_the_clock_of_the_fastest_ping_counts() -> None:
    clock = HeadClock()
    clock.add(0, 10 * SECOND + 100, 1000)
    clock.add(0, 10 * SECOND + 5, 10)
    clock.add(0, 10 * SECOND + 700, 900)
    assert clock.best == (10 * SECOND, 5)
    for each in range(1, 4):
        # Somebody set the clock.
        clock.add(each, 30 * SECOND + each, each + 20)
    best = clock.best
    assert best is not None and abs(best.ahead - 30 * SECOND) < 100


def test_another_version_is_named_and_left_alone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpdoctor.nodes.member.PROTOCOL", 2)
    pair.member.invite(pair.head.invitation)
    run = pair.until(lambda: (each := RunReader(pair.one.path).snapshot()).nodes and each)
    assert run.nodes[0].state == "refused"
    found = [each for each in examine(run, [RULES["DDP215"]]) if each.code == "DDP215"]
    assert len(found) == 1 and "are not taken: its ddpdoctor is" in found[0].message
    pair.until(lambda: not pair.member.looks_for_head and pair.member._refused)
    assert pair.member.head is None


# -- who gets in


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(0)


def wrong(context: zmq.Context[Any], secret: str, endpoint: str) -> zmq.Socket[Any]:
    client: zmq.Socket[Any] = context.socket(zmq.DEALER)
    link.make_client(client, secret, b"stranger")
    client.connect(endpoint)
    client.send_multipart(link.packed(Hello(protocol=1, host="stranger")))
    return client


def test_strangers_are_not_heard(pair: Pair, context: zmq.Context[Any]) -> None:
    invitation = pair.head.invitation
    endpoint = link.endpoint("127.0.0.1", invitation.port)
    stranger = wrong(context, "another secret", endpoint)
    plain = context.socket(zmq.DEALER)
    plain.connect(endpoint)
    plain.send_multipart(link.packed(Hello(protocol=1, host="plain")))
    idle = [socket.create_connection(("127.0.0.1", invitation.port)) for _ in range(200)]
    for each in idle[:100]:
        each.sendall(os.urandom(4096))
    pair.member.invite(invitation)
    pair.until(lambda: pair.rank())
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        pair.turn()
    hosts = {each.host for each in RunReader(pair.one.path).snapshot().nodes}
    assert hosts == {socket.gethostname()}
    for each in idle:
        each.close()
    stranger.close(0)
    plain.close(0)


def test_a_recorded_conversation_cannot_be_replayed(pair: Pair, context: zmq.Context[Any]) -> None:
    recorded: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def relay() -> None:
        near, _ = listener.accept()
        listener.close()
        far = socket.create_connection(("127.0.0.1", pair.head.invitation.port))

        def pump(source: socket.socket, target: socket.socket, keep: bool) -> None:
            with source, target, contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    if keep:
                        recorded.append(data)
                    target.sendall(data)

        threading.Thread(target=pump, args=(far, near, False), daemon=True).start()
        pump(near, far, True)

    port = listener.getsockname()[1]
    threading.Thread(target=relay, daemon=True).start()
    client = context.socket(zmq.DEALER)
    link.make_client(client, pair.head.invitation.secret, b"recorded")
    client.connect(link.endpoint("127.0.0.1", port))
    client.send_multipart(link.packed(Hello(protocol=1, host="recorded")))
    pair.until(lambda: RunReader(pair.one.path).snapshot().nodes)
    client.close(0)
    with socket.create_connection(("127.0.0.1", pair.head.invitation.port)) as again:
        again.sendall(b"".join(recorded))
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            pair.turn()
    records = RunReader(pair.one.path).snapshot().supervisor.of(NodeRecord)
    assert [each.state for each in records] == ["joined"]
    assert b"recorded" not in b"".join(recorded)


HOSTILE: list[tuple[Piece, bytes]] = [
    (Piece(name="../run.json", size=2), b"{}"),
    (Piece(name="run.json", size=2), b"{}"),
    (Piece(name="supervisor.jsonl", size=3, append=True), b"{}\n"),
    (Piece(name="rank-0000.r0.status", size=1024), bytes(1024)),
    (Piece(name="rank-0000.r0.jsonl", size=3, append=True), b"{}\n"),
    (Piece(name="rank-0007.r0.status", size=5), b"short"),
    (Piece(name="rank-0007.r0.status", size=2048), bytes(2048)),
    (Piece(name="rank-0007.r0.jsonl", size=10, append=True), b"cut"),
    (Piece(name="rank-0007.r0.fault", size=-1), b""),
    (Piece(name="nodes.sock", size=0), b""),
    (Piece(name="gpus-../../x.json", size=2), b"{}"),
    (Piece(name="rank-00000000000000007.r0.jsonl", size=3, append=True), b"{}\n"),
    (Piece(name="\x1b[31mrank", size=0), b""),
]


@pytest.mark.parametrize(("piece", "contents"), HOSTILE)
def test_what_no_node_sends_is_refused(tmp_path: Path, piece: Piece, contents: bytes) -> None:
    one = NodeFiles(tmp_path / "one", 0)
    one.journal.close()
    before = {each.name: each.read_bytes() for each in one.path.iterdir()}
    with pytest.raises(RefusedError):
        Mirror(one.path, 1 << 20).take(1, [piece], contents)
    after = {each.name: each.read_bytes() for each in one.path.iterdir()}
    assert after == before and sorted(tmp_path.iterdir()) == [one.path]


def test_a_refused_piece_costs_no_other(tmp_path: Path) -> None:
    """On a machine with a ddpdoctor of each rank, all of them poll the same GPUs."""
    (tmp_path / "gpus-host.json").write_text("{}")
    mirror = Mirror(tmp_path, 1 << 20)
    page = Piece(name="rank-0001.r0.status", size=1024)
    mirror.take(1, [Piece(name="gpus-host.json", size=2), page], b"[]" + bytes(1024))
    assert (tmp_path / "gpus-host.json").read_text() == "{}"
    with pytest.raises(RefusedError):
        mirror.take(1, [Piece(name="run.json", size=2), page], b"[]" + b"\1" * 1024)
    assert (tmp_path / page.name).read_bytes() == b"\1" * 1024


def test_a_damaged_message_ends_neither_side(pair: Pair) -> None:
    pair.member.invite(pair.head.invitation)
    pair.until(lambda: pair.rank())
    (peer,) = pair.head._peers.values()
    pair.head._send(peer, Question(number=1, what="examine"), b"no json")
    pair.head._send(peer, Request(name="suspicion"), b"short")
    pair.member._send(Files(number=10_000, pieces=()), b"")
    pair.two.page.totals(9, 1, SECOND, 0)
    pair.until(lambda: pair.rank().status.step == 9)
    assert [each.state for each in RunReader(pair.one.path).snapshot().nodes] != ["refused"]


def test_a_node_writes_no_file_of_another(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, 1 << 20)
    page = Piece(name="rank-0001.r0.status", size=1024)
    mirror.take(1, [page], bytes(1024))
    with pytest.raises(RefusedError):
        mirror.take(2, [page], b"\1" * 1024)
    assert (tmp_path / page.name).read_bytes() == bytes(1024)


def test_a_node_that_floods_is_bounded(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, 1 << 16)
    line = b'{"kind":"step","step":1}\n' * 1000
    for _ in range(40):
        mirror.take(1, [Piece(name="rank-0001.r0.jsonl", size=len(line), append=True)], line)
    many = [Piece(name=f"process-{each}.jsonl", size=3, append=True) for each in range(10_000)]
    with pytest.raises(RefusedError, match="too many files"):
        mirror.take(1, many, b"{}\n" * len(many))
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) < 1 << 18
    mirror.close()


def test_a_bomb_is_not_inflated() -> None:
    bomb = zlib.compress(bytes(link.MAX_BLOB + 1), 9)
    head = link.packed(Files(number=1, pieces=()))[0]
    kinds = {"files": Files}
    assert link.unpacked([head, bomb], kinds) is None
    assert link.unpacked([head, b"no zlib"], kinds) is None
    assert link.unpacked([b"[[[["], kinds) is None
    assert link.unpacked([head, b"", b""], kinds) is None


# -- the job's store


def test_a_file_beside_a_file_store(tmp_path: Path) -> None:
    place = StoreRecord(file=str(tmp_path / "store"))
    assert store.read(place, "a") is None
    store.write(place, "a", b"where the head is")
    assert store.read(place, "a") == b"where the head is"
    assert (tmp_path / "store.ddpdoctor").stat().st_mode & 0o077 == 0
    store.forget(place)
    assert list(tmp_path.iterdir()) == []


def servers() -> Sequence[bool]:
    return (True, False)


@pytest.mark.parametrize("libuv", servers())
def test_a_store_of_torch(libuv: bool) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=libuv)
    place = StoreRecord(host="127.0.0.1", port=server.port)
    assert store.read(place, "ddpdoctor/job/0") is None
    store.write(place, "ddpdoctor/job/0", b"x" * 5000)
    assert store.read(place, "ddpdoctor/job/0") == b"x" * 5000
    assert server.get("ddpdoctor/job/0") == b"x" * 5000


def test_a_store_that_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = StoreRecord(host="127.0.0.1", port=server.getsockname()[1])
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        with pytest.raises(OSError, match=r"store|reset|pipe"):
            store.read(place, "a")


def test_the_invitation_holds_no_more_than_it_has_to(pair: Pair) -> None:
    found = as_json(pair.head.invitation)
    assert found.keys() == {"host", "addresses", "port", "secret"}
    assert len(found["secret"]) == 64
