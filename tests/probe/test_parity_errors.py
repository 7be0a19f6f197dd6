"""Errors, warnings, exit statuses and hooks are those of the job without ddpdoctor."""

from __future__ import annotations

import re
import socket
import sys
import uuid
from dataclasses import dataclass

import pytest

from ddpdoctor.diagnose.crashes.rank_endings import endings
from ddpdoctor.run.records.process import ErrorRecord, ExitRecord, FaultRecord
from ddpdoctor.run.snapshot import Rank
from tests.conftest import JOBS, LIMIT, Doctor, Result, marked

NEEDS_CLEAN_RERAISE = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="before Python 3.11 a raise restores the frame of a hook"
)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# -- the same tracebacks and warnings


@dataclass
class Pair:
    """The same job without and with ddpdoctor."""

    bare: Result
    watched: Result

    def section(self, label: str, result: Result) -> str:
        """What a job printed below a heading."""
        return result.stdout.partition(f"== {label}\n")[2].partition("\n== ")[0]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    token = uuid.uuid4().hex
    doctor = Doctor(tmp_path_factory.mktemp("errors"), token)
    words = ["--nproc-per-node=1", str(JOBS / "errors.py")]
    pair = Pair(doctor.torchrun(*words), doctor.run(*words))
    pair.bare.check_success()
    pair.watched.check_success()
    assert not marked(token)
    return pair


PLACES = [
    "no backend",
    "no group",
    "no group yet",
    "forward",
    "shape in forward",
    "no such argument",
    "evaluation",
    "backward",
    "backward of no scalar",
    "backward again",
    "torch.autograd.backward",
    "getitem",
    "getitem in a worker",
    "stream",
    "next after the end",
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_gather_object",
    "send to self",
    "optimizer step",
    "closure",
    "optimizer made wrong",
    "optimizer of nothing",
    "scaler step",
    "DDP of nothing",
    "DDP options",
    "group twice",
    "sys.exit",
    "sys.exit with a text",
]


def traceback_of(section: str) -> str:
    return section.partition("alive: ")[0]


@pytest.mark.slow
@NEEDS_CLEAN_RERAISE
@pytest.mark.parametrize("place", PLACES)
def test_tracebacks_are_the_same(errors: Pair, place: str) -> None:
    bare = traceback_of(errors.section(place, errors.bare))
    assert bare.startswith("Traceback"), "the job did not fail here"
    assert traceback_of(errors.section(place, errors.watched)) == bare


@pytest.mark.parametrize("place", PLACES[3:])
@pytest.mark.slow
def test_a_caught_error_keeps_nothing_alive(errors: Pair, place: str) -> None:
    """A job that catches an out-of-memory error needs the memory of the failed step again."""
    bare = errors.section(place, errors.bare)
    alive = re.findall(r"alive: \d+", bare)
    assert re.findall(r"alive: \d+", errors.section(place, errors.watched)) == alive == ["alive: 0"]


def warnings_of(result: Result) -> list[str]:
    return [line for line in result.stdout.splitlines() if line.startswith("warning ")]


@pytest.mark.slow
def test_warnings_are_the_same_and_blame_the_same_lines(errors: Pair) -> None:
    assert len(warnings_of(errors.bare)) >= 8
    assert warnings_of(errors.watched) == warnings_of(errors.bare)


@pytest.mark.slow
def test_random_numbers_are_the_same_after_all_errors(errors: Pair) -> None:
    lines = [line for line in errors.bare.stdout.splitlines() if line.startswith("random ")]
    assert len(lines) == 1
    assert lines[0] in errors.watched.stdout.splitlines()


@pytest.mark.slow
def test_errors_that_a_job_catches_are_no_findings(errors: Pair) -> None:
    assert errors.watched.codes == []
    (rank,) = errors.watched.run.last
    assert rank.records.of(ErrorRecord) == ()
    assert rank.records.of(FaultRecord) == ()


NOISE = (
    (r"^ddpdoctor: .*\n", ""),
    (r"\b(pid|process|Process)[: =-]+\d+", r"\1 #"),
    (r"^[IWE]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ ", "# "),
    (r"\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d", "#"),
    (r"0x[0-9a-f]+", "0x#"),
    (r"(127\.0\.0\.1|localhost|tcp://[^:\s]+):\d+", r"\1:#"),
    (r"PID \d+", "PID #"),
    # Where torchrun itself begins: as a module, or by its console script.
    (r'^  File "<frozen runpy>", .*\n', ""),
    (r'^  File "[^"]*/(?:run\.py|torchrun)", line \d+, in <module>\n(?: {4}.*\n)+', ""),
)


def without_noise(text: str) -> str:
    """stderr without pids, times, ports, torchrun's first frame and ddpdoctor's own words."""
    for pattern, instead in NOISE:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text


UNCAUGHT = {
    "forward": "ddp(torch.ones(4, 5))",
    "getitem": "list(DataLoader(Bad(), num_workers=1))",
    "chained": "chained()",
    "syntax": "import wrong",
    "exit": "sys.exit('a last word')",
}

RAISES = """
    import sys, torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset

    class Bad(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            raise KeyError("in getitem")

    def chained():
        try:
            ddp(torch.ones(4, 5))
        except RuntimeError as error:
            error.add_note("a note")
            raise ValueError("instead") from error

    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    exec(sys.argv[1])
"""


@NEEDS_CLEAN_RERAISE
@pytest.mark.parametrize(
    "place",
    UNCAUGHT,
)
@pytest.mark.slow
def test_what_an_uncaught_error_prints_is_the_same(doctor: Doctor, place: str) -> None:
    script = doctor.write("raises.py", RAISES)
    doctor.write("wrong.py", "this is no python\n")
    words = ["--nproc-per-node=1", str(script), UNCAUGHT[place]]
    env = {"TORCHELASTIC_ERROR_FILE": "", "PYTHONWARNINGS": "default"}
    bare, watched = doctor.torchrun(*words, env=env), doctor.run(*words, env=env)
    assert bare.status == watched.status == 1
    assert watched.stdout == bare.stdout == ""
    assert without_noise(watched.stderr) == without_noise(bare.stderr)
    assert "ddpdoctor" not in without_noise(watched.stderr)
    assert len(watched.codes) == 1


TRAINS = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for (inputs,) in DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2):
        optimizer.zero_grad()
        ddp(inputs).sum().backward()
        optimizer.step()
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_job_that_trains_warns_of_nothing_else(doctor: Doctor) -> None:
    # Not of a variable either that ddpdoctor sets and torch calls by another name since.
    words = ["--nproc-per-node=1", str(doctor.write("trains.py", TRAINS))]
    env = {"PYTHONWARNINGS": "always"}
    bare, watched = doctor.torchrun(*words, env=env), doctor.run(*words, env=env)
    bare.check_success()
    watched.check_success()
    assert without_noise(watched.stderr) == without_noise(bare.stderr)


FORKS = """
    import os, threading

    def fork():
        if os.fork() == 0:
            os._exit(0)
        os.wait()

    fork()
    import torch
    import torch.distributed as dist
    os.fork() or os._exit(0)
    os.wait()
    dist.init_process_group("gloo")
    # From here on Python 3.12 and later warn of threads that are the job's, too.
    os.fork() or os._exit(0)
    os.wait()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_fork_is_warned_of_as_without_us(doctor: Doctor) -> None:
    words = ["--nproc-per-node=1", str(doctor.write("forks.py", FORKS))]
    env = {"PYTHONWARNINGS": ""}
    bare, watched = doctor.torchrun(*words, env=env), doctor.run(*words, env=env)
    bare.check_success()
    watched.check_success()
    assert without_noise(watched.stderr) == without_noise(bare.stderr)
    warned = sys.version_info >= (3, 12)
    assert bare.stderr.count("is multi-threaded, use of fork()") == warned


@pytest.mark.slow
@NEEDS_CLEAN_RERAISE
def test_what_an_error_in_a_spawned_rank_prints_is_the_same(doctor: Doctor) -> None:
    words = [sys.executable, str(JOBS / "spawn.py")]
    bare = doctor.run(*words, str(free_port()), "--fail", watch=False)
    watched = doctor.run("--", *words, str(free_port()), "--fail")
    assert bare.status == watched.status == 1

    def traceback_part(result: Result) -> str:
        """What the failing rank raised; of the others' consequences the order is open."""
        found = re.search(
            r"-- Process 1 terminated with the following error:\n.*?ValueError: [^\n]*\n",
            result.stderr,
            re.DOTALL,
        )
        assert found is not None, result.stderr
        return found[0]

    assert traceback_part(watched) == traceback_part(bare)
    first = watched.run.last[1].records.of(ErrorRecord)[0]
    assert first.exception == "ValueError"


# -- the same end


ENDS = ("exception", "sys-exit", "os-exit", "sigkill", "segv", "leave")


@pytest.mark.slow
def test_exit_statuses_are_the_same(doctor: Doctor) -> None:
    """Each way to end in a job of its own, all of them in one shell."""
    lines = [
        f"{sys.executable} {JOBS / 'train.py'} --steps=4 --at=2 --rank=0 --fail={how} "
        f"--world-size=1 --my-rank=0 --init=tcp://127.0.0.1:{free_port()}; echo {how} $?"
        for how in ENDS
    ]
    script = doctor.write("ends.sh", "ulimit -c 0\n" + "\n".join([*lines, "exit 17"]) + "\n")
    bare = doctor.run("bash", str(script), watch=False)
    watched = doctor.run("--", "bash", str(script))
    assert bare.status == watched.status == 17
    assert watched.stdout == bare.stdout
    expected = "exception 1\nsys-exit 4\nos-exit 7\nsigkill 137\nsegv 139\nleave 0\n"
    assert bare.stdout == expected
    assert [rank.restart for rank in watched.run.ranks] == list(range(len(ENDS)))


@pytest.mark.parametrize(
    "signal", ["KILL", *(pytest.param(each, marks=pytest.mark.slow) for each in ("TERM", "ABRT"))]
)
def test_a_job_that_dies_of_a_signal_ends_ddpdoctor_so(doctor: Doctor, signal: str) -> None:
    command = ["bash", "-c", f"ulimit -c 0; kill -{signal} $$"]
    bare = doctor.run(*command, watch=False)
    watched = doctor.run("--", *command)
    assert watched.status == bare.status < 0


HOOKED = [
    "hook",
    "hook and out",
    "hook chained",
    "hook of python",
    "faulthandler early",
    "faulthandler",
    "faulthandler if none",
    "faulthandler state",
    "atexit",
    "thread exits",
    "exit caught",
    "error caught",
    "thread fails",
]


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """All of ``jobs/hooked.py``, one after the other: each is an attempt of rank 0."""
    token = uuid.uuid4().hex
    doctor = Doctor(tmp_path_factory.mktemp("hooked"), token)
    command = ["bash", "-c", 'ulimit -c 0; "$@"; exit 0', "bash", sys.executable]
    command += [str(JOBS / "hooked.py"), *HOOKED]
    pair = Pair(
        doctor.run(*command, watch=False, timeout=LIMIT),
        doctor.run("--", *command, timeout=LIMIT),
    )
    assert not marked(token)
    return pair


def attempt(pair: Pair, how: str) -> Rank:
    return next(rank for rank in pair.watched.run.ranks if rank.restart == HOOKED.index(how))


def without_threads(text: str) -> str:
    """Without ddpdoctor's own threads and core, which faulthandler shows when it shows all."""
    blocks = re.split(r"\n(?=(?:Current thread|Thread|status) )", without_noise(text))
    kept = [block.rstrip() for block in blocks if not re.match(r"(?s)Thread .*/ddpdoctor/", block)]
    # Who looks into a crash is to see that this compiled code was there, too.
    text = re.sub(r"(, )?ddpdoctor\.probe\.runtime\._hot(?(1)|, )", "", "\n".join(kept))
    return re.sub(r"(?<=\(total: )\d+(?=\))", "N", text)


@pytest.mark.slow
@pytest.mark.parametrize("how", HOOKED)
def test_hooks_of_the_job_do_what_they_did(hooked: Pair, how: str) -> None:
    bare = without_threads(hooked.section(how, hooked.bare))
    assert "status " in bare
    assert without_threads(hooked.section(how, hooked.watched)) == bare


@pytest.mark.slow
@pytest.mark.parametrize("how", [how for how in HOOKED if how.startswith("hook")])
def test_the_error_is_recorded_whatever_excepthook_the_job_sets(hooked: Pair, how: str) -> None:
    (error,) = attempt(hooked, how).records.of(ErrorRecord)
    assert error.exception == "ValueError"
    assert error.path == str(JOBS / "hooked.py")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["thread exits", "error caught", "thread fails"])
def test_what_did_not_end_the_rank_is_not_recorded_as_its_end(hooked: Pair, how: str) -> None:
    rank = attempt(hooked, how)
    assert rank.records.of(ErrorRecord) == ()
    assert [record for record in rank.records.of(ExitRecord) if record.status] == []
    assert rank.ended is not None


@pytest.mark.slow
def test_a_caught_exit_is_no_failure(hooked: Pair) -> None:
    # The call is recorded (nothing tells that it was caught, if no step comes after it); that the
    # process ended with another status makes it no failure.
    run = hooked.watched.run
    assert attempt(hooked, "exit caught").ended is not None
    assert endings(run, HOOKED.index("exit caught")) == []


@pytest.mark.slow
def test_a_healthy_job_that_catches_an_exit_has_no_findings(doctor: Doctor) -> None:
    job = [sys.executable, str(JOBS / "hooked.py"), "exit caught", "thread exits"]
    result = doctor.run("--strict", "--", *job)
    assert result.codes == []
    result.check_success()
