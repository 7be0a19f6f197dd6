"""Plain logs are named as their first line says; the table is whole, and silent on health.

``tests/logs/NAME.log`` begins with ``# expect: DDP901 rank 1``, or ``ranks 0,1``, or without ranks;
``# expect: info DDP304`` where it is no error. Those of CPU failures were printed by torch 2.13,
shortened; those of CUDA and NCCL are in the words of public reports, and of torch's source where
only a new version says them.
"""

from __future__ import annotations

import gzip
import random
import re
from pathlib import Path

import pytest

from ddpdoctor.commands import report
from ddpdoctor.core.finding import Finding
from ddpdoctor.failures import table
from ddpdoctor.failures.entry import Failure, Known, Weight
from ddpdoctor.failures.lines import clean, rank_of_file, split_line, time_of
from ddpdoctor.failures.log import read
from ddpdoctor.failures.scan import ANCHORS, COMMON
from ddpdoctor.failures.table import TABLE
from ddpdoctor.failures.verdict import findings

LOGS = Path(__file__).parents[1] / "logs"
SICK = sorted(LOGS.glob("*.log"))
_FIELD = re.compile(r"(?<!\$)\{\w+\}")
_BRACKET = re.compile(r"\[[^\[\]]*\]")
_EXPECT = re.compile(rb"# expect: (?:(info|warning) )?(DDP\d+)(?: ranks? ([\d,]+))?\n")


def found(path: Path) -> list[Finding]:
    return findings(read(path.name, [path.read_bytes()]))


@pytest.mark.parametrize("path", SICK, ids=lambda path: path.stem)
def test_a_log_is_named(path: Path) -> None:
    head = _EXPECT.match(path.read_bytes())
    assert head is not None
    (finding,) = found(path)
    severity = head[1].decode() if head[1] else "error"
    assert (finding.code, finding.severity.label) == (head[2].decode(), severity), finding
    if head[3]:
        assert finding.ranks == tuple(map(int, head[3].split(b","))), finding
    assert finding.evidence
    assert finding.fix


EXAMPLES = [
    pytest.param(failure.known.name, example, id=f"{failure.known.name}-{number}")
    for failure in TABLE
    for number, example in enumerate(failure.examples)
]


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_an_entry_is_seen_in_its_examples_and_no_other_is(name: str, example: str) -> None:
    seen = [
        each.failure.known.name if each.failure is not None else each.text
        for each in read("job.log", [example.encode() + b"\n"])
    ]
    assert set(seen) == {name}


def test_no_two_entries_have_one_name() -> None:
    files = Path(table.__file__).parent.glob("*.toml")
    names = [
        name for each in files for name in re.findall(r'(?m)^name = "(.+)"$', each.read_text())
    ]
    assert len(names) == len({*names})


def test_every_entry_has_an_example() -> None:
    assert [each.known.name for each in TABLE if not each.examples] == []


def test_what_an_entry_yields_to_is_in_the_table() -> None:
    names = {each.known.name for each in TABLE} | {"exception"}
    assert {name for each in TABLE for name in (*each.yields_to, *each.follows)} - names == set()


def test_a_scan_looks_for_few_texts() -> None:
    """Each costs half a second for each gigabyte: let new entries begin with a common one."""
    assert len(ANCHORS) <= 39, ANCHORS


def test_steps_that_print_an_error_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a short log all lines are near an end, where everything is searched for."""
    seen: list[str] = []
    monkeypatch.setattr("ddpdoctor.failures.log.recognise", lambda text: seen.append(text))
    steps = "".join(f"[rank 3] step {n} class_error = {n / 7:.3f}\n" for n in range(300))
    findings(read("job.log", [steps.encode()]))
    assert len(seen) == 1


@pytest.mark.parametrize(
    "line",
    [
        "train.py FAILED (exitcode 1)",
        "        train.py FAILED            ",
        "CHILD PROCESS FAILED WITH NO ERROR_FILE",
        "[2]+  Exit 1                  python train.py",
        "[rank1]:[E901 12:00:00.1 some.cpp:12] something that no entry knows",
        "[E socket.cpp:922] The server socket has failed to bind to 0.0.0.0:29500.",
        "Traceback (most recent ca",
    ],
)
def test_a_last_line_that_says_it_failed_is_not_met_with_silence(line: str) -> None:
    (finding,) = findings(read("job.log", [("epoch 1 step 1\n" * 9 + line).encode()]))
    assert finding.severity.label == "error"


def test_the_number_of_a_signal_is_no_shape() -> None:
    stopped = "".join(f"worker {n} exited on signal 15\n" for n in range(300))
    (finding,) = findings(read("job.log", [(stopped + "worker 4 exited on signal 9\n").encode()]))
    assert finding.code == "DDP902"


def test_what_is_looked_for_is_in_the_pattern() -> None:
    """Not in the example alone: other messages of the failure would be passed over."""
    words = {word for each in TABLE for word in each.literals}
    assert all(each.literals for each in TABLE)
    assert [each for each in ANCHORS if each.decode() not in {*COMMON, *words}] == []


def test_names_are_unique_and_each_failure_was_seen() -> None:
    names = [failure.known.name for failure in TABLE]
    assert len(set(names)) == len(names)
    for failure in TABLE:
        assert failure.said(dict.fromkeys(failure.regex.groupindex, "7"))
        assert "{" not in failure.said(dict.fromkeys(failure.regex.groupindex, "7"))
        assert failure.known.seen, failure.known.name
    pages = [failure.code for failure in TABLE if failure.page]
    assert len(set(pages)) == len(pages), "one page per code"


@pytest.mark.parametrize("failure", TABLE, ids=lambda each: each.known.name)
def test_a_placeholder_is_never_printed(failure: Failure) -> None:
    """Neither with an example's groups, nor where a pattern matched without any of them."""
    found = [failure.regex.search(example) for example in failure.examples]
    groups = [{k: v for k, v in each.groupdict().items() if v} for each in found if each]
    for each in (*groups, {}):
        assert not _FIELD.search(failure.said(each) + failure.advised(each)), each
    for each in groups:
        needed = set(_FIELD.findall(_BRACKET.sub("", f"{failure.says} {failure.fix}")))
        assert needed <= {f"{{{name}}}" for name in each}, each


def test_a_fix_names_what_the_log_names() -> None:
    known = Known("DDP999", "own", Weight.CAUSE, "any")
    failure = Failure(
        known, r"no (?P<host>\w+)(?P<port>:\d+)?", "failed", "a {host}[ b {port}] [1] ${X}"
    )
    assert failure.advised({"host": "n7"}) == "a n7 [1] ${X}"
    assert failure.advised({"host": "n7", "port": ":1"}) == "a n7 b :1 [1] ${X}"
    assert failure.advised({}) == "a ? [1] ${X}"


def test_a_pattern_looks_only_so_far_ahead() -> None:
    """Else a line of many beginnings takes a time that grows with its square."""
    unbounded = re.compile(r"\[(?:\^\\n|\\s\\S)\][*+]")
    assert unbounded.search(r"begin[^\n]*end") and unbounded.search(r"begin[\s\S]*?end")
    assert [each.known.name for each in TABLE if unbounded.search(each.pattern)] == []


@pytest.mark.parametrize(
    ("pattern", "literals"),
    [
        ("abcd", ("abcd",)),
        (r"abc\d+defgh|xyz", ("defgh", "xyz")),
        ("abcd?(?:efghij|k)", ("abc",)),
        ("abcd{0,9}|efg+h", ("abc", "efg")),
        (r"(?m)^(?:[\w.]+\.)?end: \[Errno", ("end: [Errno",)),
        ("[Ff]ailed to(?P<what>.*)", ("ailed to",)),
        ("abcd|(?:efgh)", ("abcd", "efgh")),
        (r"(?:ab|cd)\b: (?:one|two)+ (?P<x>three)?", ("one", "two")),
        (r"^begin(?!s)ning\b", ("beginning",)),
        # One alternative has none, so that any text may match.
        (r"abcd|\d+", ()),
        ("abcd|(?i:efgh)", ()),
        ("(?i)abcd", ()),
        (r"ab\w", ()),
    ],
)
def test_each_match_has_one_of_the_literals(pattern: str, literals: tuple[str, ...]) -> None:
    known = Known("DDP901", "made up", Weight.CAUSE, "nowhere")
    assert Failure(known, pattern, "", "").literals == literals


@pytest.mark.parametrize("repeat", [1, 200])
def test_a_healthy_log_is_met_with_silence(repeat: int) -> None:
    log = (LOGS / "healthy" / "training.log").read_bytes() * repeat
    assert [each for each in findings(read("healthy.log", [log])) if each.severity > 1] == []


def test_secondary_rows_are_never_the_verdict_beside_a_cause() -> None:
    """Whatever other ranks complain of, before or after, the cause stays the verdict."""
    lines = (LOGS / "exception.log").read_bytes().splitlines(True)
    cause = [line for line in lines if line.startswith(b"[rank1]")]
    victims = [
        b"[rank%d]: Traceback (most recent call last):\n[rank%d]: RuntimeError: %s\n" % (n, n, text)
        for n, text in enumerate(
            (
                b"Connection closed by peer [10.0.0.1]:99",
                b"Read error [10.0.0.1]:99: Connection reset by peer",
                b"Timed out waiting 1800000ms for recv operation to complete",
                b"NCCL communicator was aborted on rank 4",
                b"failed to recv, got 0 bytes",
            ),
            start=2,
        )
    ]
    for log in (b"".join([*victims, *cause]), b"".join([*cause, *victims])):
        (finding,) = findings(read("job.log", [log]))
        assert (finding.code, finding.ranks) == ("DDP901", (1,))
        assert finding.message == "rank 1 raised ValueError: the wrong sort of batch"


@pytest.mark.parametrize("size", [1, 7, 64, 4096])
def test_a_log_may_come_in_any_pieces(size: int) -> None:
    for name in ("exception", "sigkill", "collectives_differ"):
        data = (LOGS / f"{name}.log").read_bytes()
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        assert read("x", pieces) == read("x", [data])


def test_far_into_a_large_log() -> None:
    filler = (LOGS / "healthy" / "training.log").read_bytes()[-200:].replace(b"Trace", b"trace")
    sick = (LOGS / "exception.log").read_bytes()
    data = filler * 5_000 + sick
    (finding,) = findings(read("x.log", [data]))
    number = data[: data.index(b"[rank1]: ValueError")].count(b"\n") + 1
    assert finding.evidence[0].startswith(f"x.log:{number}: ValueError")


def test_the_end_is_read_however_often_something_was_caught_before() -> None:
    caught = (
        b"Traceback (most recent call last):\nValueError: caught\n"
        + b"going on, step 1 of many, loss 0.1\n" * 4
    )
    sick = (LOGS / "disk_full.log").read_bytes()
    (finding,) = findings(read("x.log", [caught * 3_000 + sick]))
    assert (finding.code, finding.ranks) == ("DDP935", (0, 1))


def test_garbage_is_no_failure() -> None:
    """Invalid UTF-8, no newline, and lines of any bytes."""
    rng = random.Random(7)
    for _ in range(50):
        assert findings(read("x", [rng.randbytes(5_000)])) == []
    assert findings(read("x", [b"\xff\xfe\x00" * 2_000_000])) == []
    torn = (LOGS / "exception.log").read_bytes()
    for cut in range(0, len(torn), 37):
        findings(read("x", [torn[:cut] + rng.randbytes(9) + torn[cut:]]))


@pytest.mark.parametrize("early", [0, 1])
def test_the_clock_orders_the_ranks_of_several_files(tmp_path: Path, early: int) -> None:
    """torchrun names the first exit it saw; here the times of the lines decide."""
    for rank in (0, 1):
        hour = 3 if rank == early else 4
        (tmp_path / f"rank{rank}.log").write_text(
            f"2026-11-22 0{hour}:10:00,500 INFO step 3\n"
            "Traceback (most recent call last):\n"
            f'  File "/job/train.py", line {rank + 1}, in <module>\n    go()\n'
            f"ValueError: of rank {rank}\n"
        )
    (finding,) = findings(
        [s for n in (0, 1) for s in read(f"rank{n}.log", [_bytes(tmp_path, n)], n)]
    )
    assert finding.ranks == (early,)
    assert f"of rank {early}" in finding.message
    assert "likely" not in finding.message


def _bytes(folder: Path, rank: int) -> bytes:
    return (folder / f"rank{rank}.log").read_bytes()


def test_without_times_the_order_of_files_is_said_to_be_unknown() -> None:
    text = b"Traceback (most recent call last):\nValueError: of %d\n"
    sightings = [s for n in (0, 1) for s in read(f"rank{n}.log", [text % n], n)]
    (finding,) = findings(sightings)
    assert "likely" in finding.message
    assert any("no times" in line for line in finding.evidence)


def test_marks_of_lines() -> None:
    assert split_line("[rank3]: x")[:2] == (3, True)
    assert split_line("[default2]:[rank10]: x")[:3] == (10, True, "x")
    assert split_line("7: x")[:3] == (7, False, "x")
    assert split_line("[1,5]<stderr>: x")[:3] == (5, False, "x")
    assert split_line("[E1122 10:30:21 x.cpp:1] [Rank 4] y").rank == 4
    assert split_line("12:30:01 x").rank is None
    assert rank_of_file("/logs/attempt_0/3/stderr.log") == 3
    assert rank_of_file("train_rank12.log") == 12
    assert rank_of_file("frank3.log") is None
    assert rank_of_file("low_rank8.log") is rank_of_file("lora-rank-16.out") is None
    assert rank_of_file("slow_rank2.log") == 2
    assert clean(b"10%\r20%\r\x1b[31mred\x1b[0m\r\n") == "red"
    one = time_of("[rank0]:[E1122 03:09:37.250 x.cpp:1]")
    two = time_of("E1122 03:09:38.500000 1 x")
    assert one is not None
    assert two is not None
    assert two - one == pytest.approx(1.25)
    assert time_of("no time") is None


@pytest.mark.parametrize("kind", ["plain", "gz", "cut gz", "directory"])
def test_the_command_reads_logs(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = (LOGS / "exception.log").read_bytes()
    path = tmp_path / "job.log"
    path.write_bytes(data)
    if "gz" in kind:
        path = tmp_path / "job.log.gz"
        packed = gzip.compress(data * 50)
        path.write_bytes(packed[: len(packed) - 20] if kind == "cut gz" else packed)
    elif kind == "directory":
        path = tmp_path
    assert report.main(["--log", str(path)]) == 2
    said = capsys.readouterr().out
    assert said.startswith("error DDP901: rank 1 raised ValueError: the wrong sort of batch\n")
    assert "findings: 1 error in 1 file" in said


def test_weights_say_what_the_issue_calls_secondary() -> None:
    secondary = {f.known.name for f in TABLE if f.weight in (Weight.CONSEQUENCE, Weight.WRAPPER)}
    assert secondary >= {"peer-closed", "store-gone", "stopped-by-torchrun", "child-failed"}


_TOLD = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/job/train.py", line 22, in <module>
[rank1]:     train()
[rank1]: {}
[rank0]: Traceback (most recent call last):
[rank0]:   File "/job/train.py", line 30, in <module>
[rank0]:     loss.backward()
[rank0]: RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.5]:3001
"""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("DDP914", "RuntimeError: [../gloo/transport/tcp/pair.cc:800] failed to connect, "
                   "willRetry=0, retry=10, remote=[10.0.0.5]:3001, error=Connection refused"),
        ("DDP003", "RuntimeError: Gloo connectFullMesh failed with [../pair.cc:800] failed to "
                   "connect, willRetry=0, remote=[127.0.1.1]:3001, error=Connection refused"),
        ("DDP004", "RuntimeError: [enforce fail at ../gloo/transport/tcp/device.cc:83] ifa != "
                   "nullptr. no device found matching eth7"),
        ("DDP803", "torch.distributed.DistBackendError: Mismatched collective detected"),
        ("DDP005", "RuntimeError: DataLoader worker (pid 4812) is killed by signal: Bus error."),
        ("DDP005", "RuntimeError: unable to write to file </torch_4711_1_0>: No space left (28)"),
        ("DDP209", "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!"),
        ("DDP209", "RuntimeError: Found no NVIDIA driver on your system."),
        ("DDP931", "RuntimeError: DataLoader worker (pid(s) 4812, 4813) exited unexpectedly"),
        ("DDP945", "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding "
                   "central directory"),
    ],
)  # fmt: skip
def test_other_words_for_the_same_failure(code: str, words: str) -> None:
    (found,) = findings(read("job.log", [_TOLD.format(words).encode()]))
    assert (found.code, found.ranks) == (code, (1,))


_THROUGH = """\
Traceback (most recent call last):
  File "/job/train.py", line 22, in <module>
    train()
  File "{}", line 7, in call
    call()
{}
"""
_LIB = "/usr/lib/python3.11"
_SITE = f"{_LIB}/site-packages"
_NO_NAME = "socket.gaierror: [Errno -2] Name or service not known"
_POOL = (
    "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='{}', port=443): Max retries "
)
_POOL += (
    "exceeded with url: /a (Caused by NewConnectionError('[Errno 101] Network is unreachable'))"
)


@pytest.mark.parametrize(
    ("code", "frame", "words"),
    [
        ("DDP913", f"{_SITE}/torch/distributed/rendezvous.py", _NO_NAME),
        ("DDP901", "/job/database.py", _NO_NAME),
        ("DDP901", f"{_SITE}/redis/connection.py", _NO_NAME),
        ("DDP936", f"{_LIB}/urllib/request.py", _NO_NAME),
        ("DDP936", f"{_SITE}/requests/adapters.py", _POOL.format("huggingface.co")),
        ("DDP901", f"{_SITE}/requests/adapters.py", _POOL.format("localhost")),
        ("DDP901", f"{_SITE}/wandb/sdk/internal.py", _POOL.format("api.wandb.ai")),
        ("DDP936", f"{_SITE}/aiohttp/connector.py", "aiohttp.ClientConnectorError: Cannot connect "
                   "to host data.org:443 ssl:default [Name or service not known]"),
        ("DDP901", "/job/train.py", "ValueError: expected <urlopen error> in the log"),
        ("DDP901", f"{_LIB}/urllib/request.py", "urllib.error.HTTPError: HTTP Error 404: No file"),
        ("DDP002", f"{_SITE}/torch/distributed/rendezvous.py", "torch.DistNetworkError: The server "
                   "socket has failed to listen on any local network address. port: 29500, "
                   "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"),
        ("DDP901", f"{_LIB}/socketserver.py", "OSError: [Errno 98] Address already in use"),
        ("DDP901", f"{_SITE}/zmq/sugar/socket.py", "zmq.error.ZMQError: EADDRINUSE: port 29500"),
        ("DDP901", f"{_SITE}/psycopg/connection.py", "psycopg.OperationalError: connection failed: "
                   "Connection refused"),
        ("DDP901", f"{_LIB}/socket.py", "TimeoutError: timed out"),
        ("DDP901", "/job/train.py", "FileNotFoundError: [Errno 2] No such file or directory: 'a'"),
        ("DDP006", "/job/data.py", "OSError: [Errno 24] Too many open files: '/data/1.npy'"),
        ("DDP901", "/job/data.py", "ValueError: Too many open files in the manifest: 12"),
        ("DDP935", "/job/data.py", "OSError: [Errno 28] No space left on device: '/data/1.npy'"),
        ("DDP901", "/job/data.py", "ValueError: 'No space left on device' is no label"),
        ("DDP901", f"{_SITE}/watchdog/observers/inotify_c.py",
                   "OSError: [Errno 28] inotify watch limit reached: No space left on device"),
        ("DDP928", "/job/train.py", "torch.OutOfMemoryError: CUDA out of memory. Tried"),
        ("DDP928", "/job/train.py", "RuntimeError: CUDA error: out of memory"),
        ("DDP901", "/job/train.py", "ValueError: estimate: CUDA out of memory for batch 512"),
        ("DDP927", "/job/train.py", "torch.AcceleratorError: CUDA error: invalid device ordinal"),
        ("DDP901", "/job/train.py", "ValueError: invalid device ordinal 'x' in the configuration"),
        ("DDP001", f"{_SITE}/torch/distributed/rendezvous.py", "ValueError: Error initializing "
                   "torch.distributed using env:// rendezvous: environment variable RANK expected, "
                   "but not set"),
        ("DDP901", "/job/train.py", "ValueError: environment variable DATA expected, but not set"),
        ("DDP212", f"{_LIB}/multiprocessing/reduction.py",
                   "AttributeError: Can't pickle local object 'main.<locals>.<lambda>'"),
        ("DDP901", f"{_LIB}/copy.py", "TypeError: cannot pickle '_thread.lock' object"),
        ("DDP945", f"{_SITE}/torch/serialization.py",
                   "_pickle.UnpicklingError: invalid load key, 'x'."),
        ("DDP901", "/job/data.py", "_pickle.UnpicklingError: invalid load key, 'x'."),
        ("DDP901", "/job/data.py", "RuntimeError: remote process exited with 3"),
    ],
)  # fmt: skip
def test_words_count_only_from_where_they_belong(code: str, frame: str, words: str) -> None:
    (found,) = findings(read("job.log", [_THROUGH.format(frame, words).encode()]))
    assert found.code == code


def test_what_a_download_wanted_is_named() -> None:
    text = _THROUGH.format(f"{_SITE}/requests/adapters.py", _POOL.format("huggingface.co"))
    (found,) = findings(read("job.log", [text.encode()]))
    assert "has no network for a download from huggingface.co" in found.message
    assert "HF_HUB_OFFLINE=1" in found.fix
