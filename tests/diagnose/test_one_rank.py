"""Of a job with one rank nothing is said that takes two."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpdoctor.core.finding import Finding
from ddpdoctor.failures.table import TABLE
from ddpdoctor.run.records.base import JsonObject
from tests.support.crash_records import HEAD, error
from tests.support.hanging_ranks import findings as hang_findings
from tests.support.hanging_ranks import rank, stacks, waiting
from tests.support.written import T0, Written

PEERS = re.compile(
    r"\bpeers?\b|\bother (?:rank|node)|\banother (?:rank|node)|\bthe others\b|\ball ranks\b"
    r"|\branks that\b|\bevery rank\b|\bno rank\b|\bof this node\b|\balone was\b",
    re.IGNORECASE,
)

PRINTED = re.compile(
    r"([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout)\w*): (.+)", re.DOTALL
)

SAYS = [
    ("KeyboardInterrupt", ""),
    ("RuntimeError", "[/pytorch/gloo/pair.cc:553] Connection closed by peer [10.0.0.4]:6294"),
    ("RuntimeError", "[/g/pair.cc:537] Read error [127.0.0.1]:6862: Connection reset by peer"),
    ("RuntimeError", "[/g/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation"),
    ("RuntimeError", "Gloo connectFullMesh failed with [/g/pair.cc:1] no error"),
    ("torch.distributed.DistBackendError", "NCCL communicator was aborted on rank 0."),
    ("torch.distributed.DistNetworkError", "The client socket has timed out: Socket Timeout"),
    ("torch.distributed.DistStoreError", "wait timeout after 300000ms, keys: /a"),
    ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError", "train.py FAILED"),
    ("torch.multiprocessing.spawn.ProcessRaisedException", "-- Process 1 terminated"),
    ("subprocess.CalledProcessError", "Command '['false']' returned non-zero exit status 1."),
    ("ValueError", "too many values to unpack"),
    ("MemoryError", ""),
    ("BrokenPipeError", "[Errno 32] Broken pipe"),
    ("SystemError", "an odd one"),
]


def examples() -> Iterator[tuple[str, str]]:
    """The exceptions of all known failures."""
    for failure in TABLE:
        for text in failure.examples:
            printed = PRINTED.match(text.rpartition("\n")[2] or text)
            if printed is not None:
                yield printed[1], printed[2]


def said(finding: Finding, *without: str) -> str:
    """What a finding says, without what the job said itself."""
    text = "\n".join((finding.message, *finding.evidence, finding.fix))
    for each in (*without, *(line for part in without for line in part.splitlines())):
        text = text.replace(each, "") if each.strip() else text
    return re.sub(r"(?:it says: |raised ).*", "", text)


def check(found: list[Finding], *without: str) -> None:
    for each in found:
        assert each.code != "DDP907", each
        words = PEERS.search(said(each, *without))
        assert words is None, (words, each)


@pytest.fixture
def single(tmp_path: Path) -> Written:
    return Written(tmp_path, world_size=1)


@pytest.mark.parametrize(("exception", "message"), SAYS)
def test_an_exception(exception: str, message: str, single: Written) -> None:
    single.rank(0, [error(exception, message, step=3)])
    single.exit(0, 1, T0)
    found = single.findings(status=1)
    check(found, message)
    assert [each.code[:4] for each in found] == ["DDP9"], found


@pytest.mark.parametrize("number", range(0, len(list(examples())), 25))
def test_the_exceptions_of_known_failures(number: int, tmp_path: Path) -> None:
    for index, (exception, message) in enumerate(list(examples())[number : number + 25]):
        (tmp_path / str(index)).mkdir()
        single = Written(tmp_path / str(index), world_size=1)
        single.rank(0, [error(exception, message, step=3)])
        single.exit(0, 1, T0)
        for each in single.findings(status=1):
            assert each.code != "DDP907", each
            # What helps against it is the same with more ranks, and says so.
            assert not PEERS.search(said(each, message).replace(each.fix, "")), each


@pytest.mark.parametrize("raised", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_interrupt_that_the_script_raises_is_its_own(
    raised: bool, world_size: int, tmp_path: Path
) -> None:
    made = Written(tmp_path, world_size=world_size)
    line = "    raise KeyboardInterrupt\n" if raised else "    batch = next(batches)\n"
    record: JsonObject = error("KeyboardInterrupt", "", step=3)
    record["traceback"] = (
        f'{HEAD}  File "/job/train.py", line 7, in main\n{line}KeyboardInterrupt\n'
    )
    made.rank(0, [record])
    made.exit(0, 1, T0)
    if world_size == 2:
        lost = "[/g/pair.cc:553] Connection closed by peer [10.0.0.4]:6294"
        made.rank(1, [error("RuntimeError", lost, T0 + 1)])
        made.exit(1, 1, T0 + 1)
    (found,) = made.findings(status=1)
    assert (found.code, found.ranks) == ("DDP901" if raised else "DDP902", (0,))
    assert ("SIGINT" in found.message) is not raised
    assert (" alone " in found.message) is (world_size == 2 and not raised)


def test_ctrl_c_is_no_failure(single: Written) -> None:
    single.rank(0, [error("KeyboardInterrupt", "", step=3)])
    single.exit(0, -signal.SIGINT, T0)
    for time in (T0 - 1, T0 + 1):
        # The rank may have been quicker than the supervisor, or slower.
        single.supervisor.append({"kind": "signal", "time": time, "signal": 2})
        assert single.findings(status=1) == []
        single.supervisor.pop()
        (single.path / "supervisor.jsonl").unlink()


@pytest.mark.parametrize("status", [*range(-15, 0), 1, 2, 3, 70, 137, 255])
def test_a_status(status: int, single: Written) -> None:
    single.rank(0, [])
    single.exit(0, status, T0)
    found = single.findings(status=1)
    check(found)
    assert [each.code[:4] for each in found] == ["DDP9"], found


@pytest.mark.parametrize("record", ["exit", "shown_error", "thread_error"])
def test_an_end_by_the_script(record: str, single: Written) -> None:
    more: JsonObject = {"kind": record, "time": T0, "status": 3, "how": "sys.exit", "step": 3}
    single.rank(0, [{**error("ValueError", "no"), **more}])
    single.exit(0, 3, T0)
    check(single.findings(status=1), "no")


FRAMES = {
    "collective": ("/job/torch/distributed/distributed_c10d.py", 10, "all_reduce"),
    "joining": ("/job/torch/distributed/distributed_c10d.py", 10, "init_process_group"),
    "loader": ("/job/torch/utils/data/dataloader.py", 10, "_next_data"),
    "input": ("/job/train.py", 10, "main"),
    "socket": ("/usr/lib/python3.11/socket.py", 10, "recv"),
}


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer", "other", "wait"])
@pytest.mark.parametrize("where", sorted(FRAMES))
def test_a_hang(where: str, phase: str, joined: bool, tmp_path: Path) -> None:
    frames = (("/job/train.py", 12, "main"), FRAMES[where])
    seen = stacks(0, *frames, world_size=1)
    found = hang_findings(
        tmp_path, rank(0, phase, world_size=1, joined=joined, stacks=seen), everybody=True
    )
    check(found)


def test_a_hang_in_a_collective(tmp_path: Path) -> None:
    alone = {**waiting(0), "world_size": 1}
    check(hang_findings(tmp_path, alone, everybody=True))
