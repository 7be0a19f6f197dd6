"""`ddpdoctor run`: its own lines, torchrun's options, commands that start ranks, nodes."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Doctor, Result
from tests.support.launching import PYTHON, TORCHRUN

TRAIN = str(Path(__file__).parents[1] / "jobs" / "train.py")


# -- our own lines


def test_all_our_lines_carry_our_name_and_quiet_leaves_findings_only(doctor: Doctor) -> None:
    doctor.write("fail.py", "raise SystemExit(1)")
    loud = doctor.run("--", PYTHON, "fail.py")
    assert loud.stdout == ""
    assert loud.ours == loud.stderr != ""
    quiet = doctor.run("--quiet", "--", PYTHON, "-c", "pass")
    assert quiet.stderr == quiet.stdout == ""


@pytest.mark.slow
def test_quiet_still_says_findings(doctor: Doctor) -> None:
    words = ("--nproc-per-node", "2", TRAIN, "--fail", "exception")
    result = doctor.run("--quiet", *words)
    assert result.status == 1
    assert result.codes
    assert "findings:" not in result.ours
    assert "records in" not in result.ours


def test_without_nproc_two_ranks_and_a_line(doctor: Doctor) -> None:
    doctor.write(
        "rank.py",
        """
        import os
        os.write(1, f"rank {os.environ['RANK']} {os.environ['WORLD_SIZE']}\\n".encode())
        """,
    )
    result = doctor.run("--no-vscode", "rank.py", env={"CUDA_VISIBLE_DEVICES": ""})
    result.check_success()
    assert sorted(result.stdout.splitlines()) == ["rank 0 2", "rank 1 2"]
    assert "starting 2 ranks" in result.ours.splitlines()[0]


# -- the same ranks


ENVIRONMENT = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_NAME",
         "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT")
mine = {name: os.environ.get(name) for name in names}
mine["argv"] = sys.argv[1:]
mine["name"] = __name__
mine["argv0"] = os.path.basename(sys.argv[0])
sys.stdout.write(json.dumps(mine) + "\\n")
"""


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ["--standalone", "--nproc_per_node=2", "env.py", "--lr", "1", "--", "-x"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--nproc-per=1", "--role", "a b", "--max_res=3", "-m", "env", "--nproc-per-node", "5"],
            marks=pytest.mark.slow,
        ),
        ["--nproc-per-node", "1", "--no-python", "--", PYTHON, "-u", "env.py", "x"],
        pytest.param(
            [
                *("--nnodes", "1:2", "--nproc-per-node", "2", "--rdzv-backend", "c10d"),
                *("--rdzv-endpoint", "localhost:0", "--rdzv-conf=last_call_timeout=1", "env.py"),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["standalone", "module", "no-python", "elastic"],
)
def test_torchruns_options_do_what_they_do(words: list[str], doctor: Doctor) -> None:
    doctor.write("env.py", ENVIRONMENT)

    def seen(result: Result) -> list[dict[str, object]]:
        assert result.status == 0, result.stderr
        found = [json.loads(line) for line in result.stdout.splitlines()]
        return sorted(found, key=lambda item: str(item["RANK"]))

    plain = doctor.start(*TORCHRUN, *words, watch=False)
    ours = doctor.start(*words)
    assert seen(ours.finish()) == seen(plain.finish()) != []


@pytest.mark.slow
def test_pet_variables_and_tee(doctor: Doctor) -> None:
    doctor.write("hello.py", "print('hello')")
    environ = {"PET_NPROC_PER_NODE": "2", "PET_LOG_DIR": "logs"}
    result = doctor.run("-t", "3", "hello.py", env=environ)
    result.check_success()
    assert sorted(result.stdout.split()) == ["[default0]:hello", "[default1]:hello"]
    assert (doctor.directory / "logs").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train.py", "torchrun"])
def test_a_command_that_starts_the_ranks_itself(script: str, doctor: Doctor) -> None:
    if script == "torchrun":
        words = ["torchrun", "--nproc-per-node", "2", TRAIN, "--steps", "3"]
        path = f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}"
        live = doctor.start("--", *words, env={"PATH": path})
        ranks = 2
    else:
        words = [PYTHON, TRAIN, "--steps", "3", "--my-rank", "0", "--world-size", "1"]
        words += ["--init", f"file://{doctor.directory}/store"]
        live = doctor.start("--", *words)
        ranks = 1
    result = live.finish()
    result.check_success()
    assert len(result.run.ranks) == ranks


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_two_nodes_on_one_machine(doctor: Doctor) -> None:
    port = str(free_port())
    nodes = [
        doctor.start(
            *("--nnodes", "2", "--node-rank", node, "--nproc-per-node", "1"),
            *("--master-addr", "127.0.0.1", "--master-port", port),
            *(TRAIN, "--steps", "4"),
        )
        for node in ("0", "1")
    ]
    results = [node.finish(90) for node in nodes]
    for number, result in enumerate(results):
        result.check_success()
        own = [rank for rank in result.run.ranks if not rank.elsewhere]
        assert [rank.rank for rank in own] == [number]
        assert own[0].status is not None
        assert own[0].status.world_size == 2
        assert own[0].status.step == 4
