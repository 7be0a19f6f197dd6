"""The command line of `ddpdoctor run` means what torchrun's own parser says it means."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddpdoctor.core.errors import DoctorError, HelpRequest
from ddpdoctor.supervise import command as job_command
from ddpdoctor.supervise.command import build
from ddpdoctor.system.nvml import Device, choice, visible
from tests.fake_nvml import Machine
from tests.support.torchrun_words import doctor, torchrun_parser

TORCHRUN = (sys.executable, job_command.TORCHRUN)


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script, and an environment without torchrun's defaults."""
    for name in list(os.environ):
        if name.startswith("PET_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "train.py").write_text("print('train')\n")
    (tmp_path / "my train.py").write_text("print('train')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def meaning(words: Sequence[str]) -> dict[str, object]:
    """What torchrun understands by its words."""
    return vars(torchrun_parser().parse_args(list(words)))


def passed_on(words: Sequence[str]) -> list[str]:
    """The words that torchrun gets."""
    command = doctor(words)
    assert command.through_torchrun
    assert command.argv[: len(TORCHRUN)] == TORCHRUN
    return list(command.argv[len(TORCHRUN) :])


def assert_same_meaning(words: Sequence[str]) -> None:
    expected, actual = meaning(words), meaning(passed_on(words))
    options = words[: words.index(str(expected["training_script"]))]
    if not any(word.startswith("--nproc") for word in options):
        assert actual.pop("nproc_per_node") == "2"
        expected.pop("nproc_per_node")
    assert actual == expected


# -- every spelling means the same

SPELLINGS: list[list[str]] = [
    ["train.py"],
    ["--", "train.py"],
    ["my train.py", "two words", ""],
    ["--nproc-per-node", "2", "train.py"],
    ["--nproc_per_node", "2", "train.py"],
    ["--nproc-per-node=2", "--", "train.py"],
    ["--nproc_per_node=2", "train.py"],
    ["--nproc-per=3", "train.py"],
    ["--nproc_per", "3", "train.py"],
    ["--nproc-per-node", "2", "--nproc_per_node", "4", "train.py"],
    ["--nproc-per-node", "cpu", "train.py"],
    ["--nproc-per-node", "auto", "train.py"],
    ["--standalone", "--nproc-per-node", "1", "train.py"],
    ["--stand", "train.py"],
    ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "train.py"],
    ["--nnodes=1:2", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--", "train.py"],
    ["--nnodes", "2", "--node-rank", "1", "--master-addr", "a.b", "--master_port=1", "train.py"],
    ["--node_rank", "-1", "train.py"],
    ["--rdzv-conf", "timeout=5,is_host=1", "train.py"],
    ["--rdzv-conf=timeout=5", "train.py"],
    ["--rdzv-id=", "train.py"],
    ["--role", "", "train.py"],
    ["--role=-x", "train.py"],
    ["--role=--standalone", "train.py"],
    ["--max-restarts", "1", "train.py"],
    ["--max_r=3", "train.py"],
    ["--monitor-interval", "0.1", "train.py"],
    ["--start-method", "fork", "train.py"],
    ["--log-dir", "logs", "-r", "3", "-t", "3", "train.py"],
    ["-r3", "-t3", "train.py"],
    ["-r=3", "-t=0:1,1:2", "train.py"],
    ["-r0:1,1:2", "train.py"],
    ["--redirects", "3", "--tee=3", "train.py"],
    ["--local-ranks-filter", "0", "train.py"],
    ["--duplicate-stdout-filters", "a,b", "train.py"],
    ["--signals-to-handle", "SIGTERM,SIGUSR1", "train.py"],
    ["-m", "package.train", "--epochs", "1"],
    ["--module", "--", "package.train", "-m", "x"],
    ["-m", "-r", "3", "package.train"],
    ["-mr3", "package.train"],
    ["-mr", "3", "package.train"],
    ["--no-python", sys.executable, "train.py"],
    ["--no_python", "--", sys.executable, "-u", "train.py"],
    ["--run-path", "train.py"],
    ["--run_path", "train.py"],
    ["--virtual-local-rank", "train.py"],
    # What stands behind the script is the script's.
    ["train.py", "--nproc-per-node", "7", "--quiet", "--grace", "never", "-m", "--unknown"],
    ["--", "train.py", "--run-dir", "mine", "-r3", "--help"],
    ["train.py", "-h"],
    ["train.py", "--", "x"],
    ["train.py", "x", "--", "y", "--", "z"],
    ["--", "train.py", "--", "x"],
    ["--", "train.py", "x", "--", "y"],
    ["--nproc-per-node", "1", "--", "train.py", "--", "--", "x"],
]


@pytest.mark.parametrize("words", SPELLINGS, ids=" ".join)
def test_means_what_torchrun_says(words: list[str]) -> None:
    try:
        assert meaning(words)
    except SystemExit:
        pytest.skip("this torchrun refuses it")
    assert_same_meaning(words)


def test_the_words_themselves_are_passed_on_as_typed() -> None:
    words = ["--nproc_per=2", "-r", "3", "--max_r", "1", "--role", "a b", "train.py", "--x", ""]
    assert passed_on(words) == words


def test_a_script_whose_name_starts_with_a_dash(work: Path) -> None:
    (work / "-odd.py").write_text("")
    words = ["--nproc-per-node", "1", "--", "-odd.py"]
    assert meaning(words)["training_script"] == "-odd.py"
    assert_same_meaning(words)


def test_a_module_behind_the_separator_as_behind_python() -> None:
    before = doctor(["--nproc-per-node", "2", "-m", "pkg.train", "--lr", "1"])
    behind = doctor(["--nproc-per-node", "2", "--", "-m", "pkg.train", "--lr", "1"])
    assert behind.argv == (*TORCHRUN, "--nproc-per-node", "2", "-m", "--", *before.argv[-3:])
    assert meaning(behind.argv[len(TORCHRUN) :]) == meaning(before.argv[len(TORCHRUN) :])
    assert behind.script == before.script == "pkg.train"


def test_ours_among_torchruns(work: Path) -> None:
    words = "--quiet --nnodes 1 --grace=2.5 -r 3 --strict --run-dir here --json=f.json"
    command = doctor(
        [*words.split(), "--journal-mb", "5", "--nproc-per-node", "1", "--", "train.py", "--quiet"]
    )
    assert meaning(command.argv[len(TORCHRUN) :]) == meaning(
        ["--nnodes", "1", "-r", "3", "--nproc-per-node", "1", "train.py", "--quiet"]
    )
    assert command.own.quiet
    assert command.own.strict
    assert command.own.grace == 2.5
    assert command.own.run_dir == "here"
    assert command.own.json == "f.json"
    assert command.own.journal_mb == 5


VALUES = {
    "--nnodes": ["1", "1:2"],
    "--nproc-per-node": ["1", "3", "cpu", "gpu", "auto"],
    "--nproc_per_node": ["2"],
    "--nproc-p": ["2"],
    "--rdzv-backend": ["c10d", "static"],
    "--rdzv_end": ["localhost:0", "[::1]:1", ""],
    "--rdzv-conf": ["a=b,c=d", "-"],
    "--max-restarts": ["0", "12"],
    "--max_rest": ["3"],
    "--monitor-interval": ["0.5"],
    "--role": ["default", "a b", "a=b", "=", "quiet"],
    "--node-rank": ["0", "1", "-1"],
    "--master-port": ["1"],
    "--log-dir": ["/tmp/a b", "x=y"],
    "-r": ["3", "0:1"],
    "-t": ["1"],
    "--tee": ["3"],
    "--local-addr": ["::1"],
}
FLAGS = ["--standalone", "--stan", "--run-path", "--virtual-local-rank"]


@st.composite
def option(draw: st.DrawFn) -> list[str]:
    if draw(st.booleans()):
        return [draw(st.sampled_from(FLAGS))]
    name = draw(st.sampled_from(sorted(VALUES)))
    value = draw(st.sampled_from(VALUES[name]))
    if draw(st.booleans()):
        return [f"{name}={value}"]
    return [f"{name}{value}"] if len(name) == 2 and draw(st.booleans()) else [name, value]


OURS = [["--quiet"], ["--grace", "3"], ["--grace=3"], ["--strict"], ["--journal-mb=1"]]
TAIL = st.lists(
    st.sampled_from(["--", "-", "x", "", "--nproc-per-node", "-m", "--quiet", "-r3", "a=b", "-1"]),
    max_size=4,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    options=st.lists(option(), max_size=5),
    ours=st.lists(st.sampled_from(OURS), max_size=2),
    separator=st.booleans(),
    tail=TAIL,
    seed=st.randoms(use_true_random=False),
)
def test_any_mix_means_what_torchrun_says(
    options: list[list[str]],
    ours: list[list[str]],
    separator: bool,
    tail: list[str],
    seed: object,
) -> None:
    import random

    assert isinstance(seed, random.Random)
    rest = [*(["--"] if separator else []), "train.py", *tail]
    plain = [word for group in options for word in group] + rest
    try:
        expected = meaning(plain)
    except SystemExit:
        return
    groups = [*options]
    for group in ours:
        groups.insert(seed.randint(0, len(groups)), group)
    actual = meaning(passed_on([word for group in groups for word in group] + rest))
    if not any(word.startswith("--nproc") for group in options for word in group):
        actual["nproc_per_node"] = expected["nproc_per_node"] = None
    assert actual == expected


# -- help


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["-h", "train.py"],
        ["--nnodes", "1", "--hel", "--", "train.py"],
        ["--quiet", "-mh", "package.train"],
    ],
    ids=" ".join,
)
def test_help_among_the_options_is_ours(words: list[str]) -> None:
    with pytest.raises(HelpRequest):
        build(words, os.environ)


# -- PET_* variables


@pytest.mark.parametrize(
    "environ",
    [
        {"PET_NPROC_PER_NODE": "3"},
        {"PET_NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "2", "PET_STANDALONE": "1"},
        {"PET_MODULE": "1", "PET_NPROC_PER_NODE": "1"},
        {"PET_MODULE": "0", "PET_NPROC_PER_NODE": "1"},
        {"PET_NO_PYTHON": "0", "PET_NPROC_PER_NODE": "1"},
    ],
    ids=str,
)
def test_pet_variables(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    words = ["no.such.module" if environ.get("PET_MODULE") == "1" else "train.py", "--x"]
    assert passed_on(words) == words
    assert doctor(words).note == ""


@pytest.mark.parametrize("name", ["PET_MODULE", "PET_NO_PYTHON"])
def test_a_pet_flag_set_to_zero_is_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0")
    assert not meaning(["train.py"])[name[len("PET_") :].lower()]
    with pytest.raises(DoctorError, match="no such file"):
        doctor(["missing.py"])
    assert not doctor([sys.executable, "train.py"]).through_torchrun


def test_pet_module_takes_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MODULE", "1")
    assert passed_on(["--nproc-per-node", "1", "some.module"])[-1] == "some.module"


def test_an_option_wins_over_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "0")
    assert meaning(passed_on(["--nproc-per-node", "2", "train.py"]))["nproc_per_node"] == "2"


# -- how many ranks


def test_two_ranks_without_a_gpu_and_a_line_that_says_so() -> None:
    command = doctor(["train.py"])
    assert meaning(command.argv[len(TORCHRUN) :])["nproc_per_node"] == "2"
    assert "2 ranks" in command.note
    assert "no GPU" in command.note
    assert "--nproc-per-node" in command.note


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with four GPUs."""
    machine = Machine(tmp_path / "machine.json", monkeypatch)
    machine.has(*({"uuid": f"GPU-{number}"} for number in range(4)))
    yield
    sys.modules.pop("pynvml", None)


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        (None, 4),
        ("", 0),
        (" ", 0),
        ("-1", 0),
        ("0", 1),
        ("3,1", 2),
        ("0, 2", 2),
        ("0,0,1", 0),
        ("1gpu,2", 2),
        ("0,9,1", 1),
        ("0,-1,1", 1),
        ("none", 0),
        ("NoDevFiles", 0),
        ("GPU-3,GPU-1", 2),
        ("GPU-3,1", 1),
        ("GPU-1234,GPU-1", 0),
        ("GPU-", 0),
        ("MIG-1234", 0),
    ],
)
def test_visible_gpus(chosen: str | None, count: int, four_gpus: None) -> None:
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert visible(environ) == count


@pytest.mark.parametrize(
    ("chosen", "places", "count"),
    [
        # A process sees one instance, and no whole GPU beside it.
        (None, (0, 1, 2), 1),
        ("2", (2,), 1),
        # Without instances CUDA has nothing of a partitioned GPU.
        ("1,2", (1, 2), 1),
        ("1", (1,), 0),
        ("MIG-a,MIG-b", (0, 0), 1),
        ("MIG-GPU-0/1/0", (0,), 1),
    ],
)
def test_visible_partitions(chosen: str | None, places: tuple[int, ...], count: int) -> None:
    gpus = [
        (Device(0, "GPU-0", "A100", "", True), ("MIG-a", "MIG-b")),
        (Device(1, "GPU-1", "A100", "", True), ()),
        (Device(5, "GPU-5", "A100", "", False), ()),
    ]
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    found = choice(environ, gpus)
    assert (found.places, found.count, found.wrong) == (tuple(dict.fromkeys(places)), count, "")


def test_one_rank_per_visible_gpu(four_gpus: None) -> None:
    command = doctor(["train.py"], {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    assert meaning(command.argv[len(TORCHRUN) :])["nproc_per_node"] == "3"
    assert "3 ranks" in command.note
    assert "GPU (3)" in command.note


def test_no_note_with_nproc() -> None:
    assert doctor(["--nproc-per-node", "2", "train.py"]).note == ""
