"""Logs as people have them: prefixes, encodings, archives, tracebacks of several ranks in one."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from ddpdoctor.commands import report
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import Finding
from ddpdoctor.failures import files
from ddpdoctor.failures.files import recoded
from ddpdoctor.failures.lines import split_line, time_of
from ddpdoctor.failures.log import read
from ddpdoctor.failures.verdict import findings

TRACEBACK = """\
Traceback (most recent call last):
  File "/job/train.py", line 22, in <module>
    main()
  File "/job/train.py", line 7, in main
    raise ValueError("bad batch")
ValueError: bad batch
"""


def one(text: str | bytes) -> Finding:
    (found,) = findings(read("job.log", [text.encode() if isinstance(text, str) else text]))
    return found


def prefixed(*prefixes: str) -> str:
    turns = itertools.cycle(prefixes)
    return "".join(f"{next(turns)}{line}\n" for line in TRACEBACK.splitlines())


@pytest.mark.parametrize(
    "prefixes",
    [
        ("2026-09-03T15:46:37.123456789Z ", "2026-09-03T15:46:38.2Z "),
        ("2026-09-03T15:46:37.123456789+02:00 stderr F ",),
        ("[pod/trainer-0/pytorch] ",),
        ("worker-1  | ",),
        ("train_worker.1.ab12@node1    | ",),
        ("Sep 03 15:46:37 node7 train.sh[4711]: ", "Sep 03 15:46:38 node7 train.sh[4711]: "),
        ("(RayTrainWorker pid=4711, ip=10.0.0.7) ",),
        ("(TorchTrainer pid=4711) ",),
        ("stderr: ",),
        ("node0: ",),
        ("10.0.0.2: ",),
        ("> ",),
        ("> > ",),
        ("        ",),
        ("[default0]:",),
        ("[1,0]<stderr>:",),
        ("[1,mpirank:0,algo-1]<stderr>:",),
        ("[2026-09-03 15:46:37,123] ",),
        ("2026-09-03 15:46:37,123 ERROR a.py:8 - ", "2026-09-03 15:46:37,124 ERROR a.py:8 - "),
        ("some tag 17 of ours # ", "some tag 18 of ours # "),
        ("\x1b[31m",),
    ],
    ids=lambda prefixes: prefixes[0],
)  # fmt: skip
def test_a_prefix_is_stripped(prefixes: tuple[str, ...]) -> None:
    found = one(prefixed(*prefixes))
    assert "raised ValueError: bad batch" in found.message
    assert found.location is not None
    assert (found.location.path, found.location.line) == ("/job/train.py", 7)


def test_prefixes_say_whose_a_line_is() -> None:
    assert split_line("node3: [rank5]: x")[:3] == (5, True, "x")
    assert split_line("[pod/trainer-2/pytorch] x").who == "trainer-2/pytorch"
    assert split_line("[rank: 3] x").rank == 3
    assert split_line("[E ProcessGroupNCCL.cpp:737] [PG 0 (default_pg) Rank 6] x").rank == 6


@pytest.mark.parametrize(
    "head",
    [
        "[E ProcessGroupNCCL.cpp:737] ",
        "[E903 15:46:37.250 ProcessGroupNCCL.cpp:616] ",
        "[E1122 15:46:37.250 ProcessGroupNCCL.cpp:616] ",
        "[rank1]:[E903 15:46:37.250123456 ProcessGroupNCCL.cpp:690] ",
        "",
    ],
)
@pytest.mark.parametrize("number", ["SeqNum=9, ", ""], ids=["numbered", "unnumbered"])
def test_glog_of_any_version(head: str, number: str) -> None:
    found = one(
        f"{head}[Rank 1] Watchdog caught collective operation timeout: WorkNCCL({number}"
        "OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800116 milliseconds before timing out.\n"
    )
    assert (found.code, found.ranks) == ("DDP907", (1,))


def test_a_month_of_one_digit_is_a_month() -> None:
    one_, two = time_of("[E903 15:46:37.25 x.cpp:1]"), time_of("[E1003 15:46:37.25 x.cpp:1]")
    assert one_ is not None and two is not None
    assert abs(two - one_) > 20 * 86_400


@pytest.mark.parametrize("coding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_encodings(coding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.log"
    mark = b"\xfe\xff" if coding == "utf-16-be" else b""
    path.write_bytes(mark + (TRACEBACK * 20).encode(coding))
    assert report.main(["--log", str(path)]) == 2
    assert "raised ValueError: bad batch" in capsys.readouterr().out


@pytest.mark.parametrize(
    "bar",
    [
        " 33%|███▎      | 1/3 [00:01<00:02,  1.0it/s, loss=2]",
        " 33%|███▎",
        "12it [00:01, 3.2it/s]",
        " 10%|#         | 1/10 [00:00<00:01]\r 20%|##        | 2/10 [00:00<00:01]\r",
    ],
)
def test_what_is_glued_to_a_progress_bar(bar: str) -> None:
    assert "raised ValueError: bad batch" in one(bar + TRACEBACK).message
    found = one(bar + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    assert found.code == "DDP928"


def test_carriage_returns_before_and_after() -> None:
    found = one(
        "RuntimeError: CUDA error: device-side assert triggered\r 50%|## | 1/2 [00:01<00:01]"
    )
    assert found.code == "DDP929"
    assert one(TRACEBACK.replace("\n", "\r\n")).location is not None


def woven(*texts: str, by: int = 1) -> str:
    """Texts line by line, ``by`` lines of each in turn."""
    lines = [text.splitlines(True) for text in texts]
    return "".join(
        line
        for at in range(0, max(map(len, lines)), by)
        for each in lines
        for line in each[at : at + by]
    )


@pytest.mark.parametrize("by", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_same_traceback_of_several_ranks(by: int, ranks: int) -> None:
    found = one(woven(*[TRACEBACK] * ranks, by=by))
    assert "raised ValueError: bad batch" in found.message
    assert found.location is not None
    assert found.location.line == 7


OTHER = """\
Traceback (most recent call last):
  File "/job/train.py", line 22, in <module>
    main()
  File "/job/train.py", line 9, in main
    load(path)
  File "/job/data.py", line 31, in load
    raise KeyError(path)
KeyError: 'a'
"""


@pytest.mark.parametrize("by", [1, 2])
def test_different_tracebacks_are_separated_or_said_to_be_mixed(by: int) -> None:
    """Never the message of one with the line of the other."""
    lines = {"ValueError": ("/job/train.py", 7), "KeyError": ("/job/data.py", 31)}
    for text in (woven(TRACEBACK, OTHER, by=by), woven(OTHER, TRACEBACK, by=by)):
        for each in read("job.log", [text.encode()]):
            right = lines[each.text.partition(":")[0]]
            if each.location is None:
                assert each.interleaved
            else:
                assert (each.location.path, each.location.line) == right


def test_lines_of_two_prints_in_one() -> None:
    glued = TRACEBACK.replace("last):\n", "last):Traceback (most recent call last):\n", 1)
    assert "raised ValueError: bad batch" in one(glued).message
    frames = TRACEBACK.replace("    main()\n", "    main()", 1)
    assert one(frames).location is not None


def test_the_whole_message_is_kept() -> None:
    found = one(
        'Traceback (most recent call last):\n  File "/job/train.py", line 3, in <module>\n'
        "    dist.barrier()\n"
        "torch.distributed.DistBackendError: NCCL error in: /opt/ProcessGroupNCCL.cpp:1333, "
        "invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.19.3\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
        "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 50000\n"
    )
    assert (found.code, found.ranks) == ("DDP203", (1,))
    assert found.location is not None


def test_a_log_that_begins_in_the_middle() -> None:
    cut = TRACEBACK.partition("main()\n")[2]
    found = one(cut)
    assert "raised ValueError: bad batch" in found.message
    assert found.location is not None
    assert found.location.line == 7


def test_a_log_that_ends_in_the_middle() -> None:
    found = one(TRACEBACK.partition("    raise")[0])
    assert found.severity.label == "error"
    assert "cut off" in found.message
    assert found.location is not None
    assert found.location.line == 7


def test_a_log_that_ends_among_frames_of_libraries() -> None:
    found = one(
        "  0%|     | 0/23260 [00:00<?, ?it/s]Traceback (most recent call last):\n"
        '  File "<frozen runpy>", line 88, in _run_code\n'
        '  File "/lib/python3.12/site-packages/trainers/__main__.py", line 624, in <module>\n'
    )
    assert found.severity.label == "error"
    assert "__main__.py" in found.evidence[0]
    assert "missing: the end of its traceback" in found.evidence


def test_a_traceback_within_json() -> None:
    lines = [{"log": f"{line}\n", "stream": "stderr"} for line in TRACEBACK.splitlines()]
    docker = "".join(f"{json.dumps(line)}\n" for line in lines)
    handler = (
        "ERROR:torch.distributed.elastic.multiprocessing.errors.error_handler:{\n"
        '  "message": {\n    "message": "ValueError: bad batch",\n    "extraInfo": {\n      '
        f'"py_callstack": {json.dumps(TRACEBACK)},\n      '
        '"timestamp": "1634000000"\n    }\n  }\n}\n'
    )
    for text in (docker, handler):
        found = one(text)
        assert "ValueError: bad batch" in found.message
        assert found.location is not None


def _compressed(kind: str, data: bytes) -> bytes:
    if kind == "bz2":
        return bz2.compress(data)
    if kind == "xz":
        return lzma.compress(data)
    return gzip.compress(data) if kind == "gz" else data


def packed(kind: str, folder: Path) -> Path:
    data = TRACEBACK.encode()
    path = folder / f"job.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("logs/rank1.log", data)
            archive.writestr("model.pt", b"ValueError: no log\n")
    elif kind.startswith("tar"):
        inside = io.BytesIO()
        with tarfile.open(fileobj=inside, mode="w") as archive_:
            member = tarfile.TarInfo("logs/rank1.log")
            member.size = len(data)
            archive_.addfile(member, io.BytesIO(data))
        path.write_bytes(_compressed(kind.partition(".")[2], inside.getvalue()))
    else:
        path = folder / f"rank1.log.{kind}"
        path.write_bytes(_compressed(kind, data))
    return path


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz", "tar.xz", "gz", "bz2", "xz"])
def test_archives(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = packed(kind, tmp_path)
    assert report.main(["--log", str(path)]) == 2
    said = capsys.readouterr().out
    assert "rank 1 raised ValueError: bad batch" in said
    assert "in 1 file" in said
    cut = path.with_name("cut")
    cut.write_bytes(path.read_bytes()[:-30])
    assert report.main(["--log", str(cut)]) in (0, 2)


def test_zstd_takes_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(DoctorError, match="is compressed with zstd") as raised:
        list(files.unpacked("job.zst", io.BytesIO(b"\x28\xb5\x2f\xfd and more")))
    assert "pip install zstandard" in raised.value.hint


@pytest.mark.parametrize(
    "names",
    [
        ("slurm-4711.out", "slurm-4711.err"),
        ("attempt_0/1/stderr.log", "attempt_0/1/stdout.log"),
        ("ns_trainer-0_1234/pytorch/0.log", "ns_trainer-0_1234/pytorch/0.log.20260903-154637"),
        ("run-20260903/files/output.log", "run-20260903/logs/debug-internal.log"),
        ("job.e4711", "job.o4711"),
    ],
)
def test_directories(
    names: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in zip(names, (TRACEBACK, "training\n"), strict=True):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert report.main(["--log", str(tmp_path)]) == 2
    said = capsys.readouterr().out
    assert "raised ValueError: bad batch" in said
    assert f"in {1 if 'debug-internal' in names[1] else 2} file" in said


def test_after_a_failure_the_rest_of_the_block_is_read() -> None:
    """However the log comes in pieces."""
    plain = "going on\n" * 20
    text = f"{TRACEBACK}{plain}RuntimeError: CUDA error: device-side assert triggered\n"
    data = text.encode()
    whole = read("job.log", [data])
    assert len(whole) == 2
    for size in (10, 100, 512):
        assert read("job.log", [data[at : at + size] for at in range(0, len(data), size)]) == whole


_RAISED_BY_RANK = (
    "[rank1]: Traceback (most recent call last):\n"
    '[rank1]:   File "/job/train.py", line 9, in <module>\n'
    "[rank1]:     main()\n"
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
)


@pytest.mark.parametrize("coding", ["utf-16-be", "utf-16-le", "utf-16"])
def test_utf_16_is_read_in_either_order(coding: str) -> None:
    data = recoded(iter([_RAISED_BY_RANK.encode(coding)]))
    (found,) = findings(read("job.log", data))
    assert (found.code, found.ranks) == ("DDP928", (1,))


def test_lines_in_an_array_of_json_have_their_ranks() -> None:
    """As a notebook keeps its output."""
    lines = _RAISED_BY_RANK.splitlines(keepends=True)
    text = json.dumps({"outputs": [{"name": "stderr", "text": lines}]}, indent=1)
    found = one(text)
    assert (found.code, found.ranks) == ("DDP928", (1,))
    assert found.location is not None and found.location.line == 9
    # Configurations stay as they are.
    assert (
        findings(read("job.log", [json.dumps({"a": "b", "c": ["d", "e"]}, indent=1).encode()]))
        == []
    )


@pytest.mark.parametrize(
    "record",
    [
        {"log": "{}\n", "stream": "stderr"},
        {"event": "line", "data": "{}\n", "pipe": "stderr"},
        {"ts": "2026-01-01T10:00:00Z", "level": "ERROR", "msg": "{}"},
    ],
    ids=lambda each: next(iter(each)),
)
def test_lines_are_records_of_json(record: dict[str, str]) -> None:
    lines = [
        json.dumps({name: value.replace("{}", line) for name, value in record.items()})
        for line in _RAISED_BY_RANK.splitlines()
    ]
    found = one("\n".join(lines))
    assert (found.code, found.ranks) == ("DDP928", (1,))
    assert found.location is not None and found.location.line == 9
    # A record may have a whole traceback.
    whole = {name: value.replace("{}", _RAISED_BY_RANK) for name, value in record.items()}
    assert one(json.dumps(whole)).code == "DDP928"


def test_a_cut_traceback_says_less_than_a_lost_peer() -> None:
    found = one(
        "ERROR:torch.distributed.elastic.multiprocessing.errors.error_handler:{\n"
        '  "message": {\n    "message": "RendezvousClosedError: ",\n    "extraInfo": {\n'
        '      "py_callstack": "Traceback (most recent call last):\\n  File \\"/lib/errors.py\\", '
        'line 345, in wrapper\\n    return f(*args)\\n  File \\"/lib/dis'
    )
    assert (found.code, "store" in found.message) == ("DDP907", True)


def test_an_exception_in_a_debugger_is_quoted() -> None:
    found = one("Exception has occurred: KeyError\n'lr'\n\n  File \"a.py\", line 3, in main\n")
    assert found.code == "DDP900"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "nothing in it"),
        (b"\x7fELF\x02\x01\0\0\0", "does not begin with text"),
        ("größere Schritte\n".encode("latin-1"), ""),
        ("训练步骤 1\n".encode(), ""),
    ],
)
def test_a_file_that_is_no_log_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, said: str
) -> None:
    (tmp_path / "a.log").write_bytes(data)
    assert report.main(["--log", str(tmp_path / "a.log")]) == 0
    told = "".join(capsys.readouterr())
    assert said in told
    assert ("nothing in it" in told or "does not begin" in told) == bool(said)


def test_a_record_in_json_with_the_traceback_beside_its_message_is_read() -> None:
    for key, said in (
        ("exc_info", TRACEBACK),
        ("stack_trace", TRACEBACK.splitlines()),
        ("jsonPayload", {"error": {"stack": TRACEBACK}}),
    ):
        record = json.dumps({"level": "error", "message": "it failed", key: said})
        assert one(f"{record}\n").message == "a process of the job raised ValueError: bad batch"


def test_the_prefixes_of_horovodrun_and_determined_are_read() -> None:
    assert one(prefixed("[3]<stderr>:")).ranks == (3,)
    container = "<info>    [2026-09-03 15:46:37] 087c0ee7 || "
    assert "a process of 087c0ee7 raised ValueError" in one(prefixed(container)).message


def test_a_library_or_program_before_a_colon_is_no_node() -> None:
    assert split_line("libcudart.so.11.0: cannot open shared object").who == ""
    assert split_line("python3: command not found").who == ""
    assert split_line("node3: ready").who == "node3"
