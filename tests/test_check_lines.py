"""The lines to type that checks end in, with values that a shell or a tool would trip over."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.finding import Finding
from ddpdoctor.preflight import checkpoints, launch_environment, variables
from ddpdoctor.preflight.meeting.caller import Problem
from ddpdoctor.preflight.meeting.meet import Meeting
from ddpdoctor.preflight.meeting.place import Seat
from ddpdoctor.preflight.nodes.command import let_through, open_port
from ddpdoctor.preflight.nodes.unreached import own_problem
from ddpdoctor.preflight.situation import Options, Situation


def shell(line: str) -> str:
    """What a line writes."""
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    return done.stdout


def unreached(host: str, problem: Problem, rank: int = 1) -> Finding:
    meeting = Meeting(Seat(2, rank, host, 29500, "none"), problem=problem)
    return own_problem(meeting, problem, Situation(Options(nproc=1), hostname="gpu7"))


def test_ipv6_has_rules_of_its_own() -> None:
    assert open_port(29500, "10.0.0.1").startswith("sudo iptables ")
    assert open_port(29500, "fd00::1").startswith("sudo ip6tables ")
    assert let_through("INPUT", "-s", ["10.0.0.1", "fd00::1", "10.0.0.2"]) == (
        "sudo iptables -I INPUT -p tcp -s 10.0.0.1,10.0.0.2 -j ACCEPT && "
        "sudo ip6tables -I INPUT -p tcp -s fd00::1 -j ACCEPT"
    )
    finding = unreached("fd00::1", Problem("dropped", "fd00::1", echoes=True))
    assert finding.message.startswith("[fd00::1]:29500 does not answer")
    assert finding.paste == open_port(29500, "fd00::1")
    nobody = unreached("fd00::1", Problem("nobody", "fd00::1"))
    assert nobody.message == "no machine answers at fd00::1"


def test_without_an_endpoint_no_node_is_told_to_wait_for_itself() -> None:
    assert "--rdzv-endpoint NODE0:29500" in unreached("", Problem("unresolved")).paste
    assert "--rdzv-endpoint gpu7:29500" in unreached("", Problem("unresolved"), rank=0).paste


def test_a_node_that_is_started_twice_is_not_one_too_many() -> None:
    full = Problem("full", "10.0.0.1", "2 of 2 nodes are there: head, gpu7", here=("head", "gpu7"))
    finding = unreached("head", full)
    assert "runs already, with gpu7 among its nodes" in finding.message
    assert "--nnodes 2 " in finding.paste
    other = unreached("head", replace(full, here=("head", "gpu8")))
    assert "had all its nodes already" in other.message and "--nnodes 3 " in other.paste


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("tcp://node0:29500", "node0"),
        ("node0:29500", "node0"),
        ("node0/", "node0"),
        ("tcp://[fd00::1]:29500", "fd00::1"),
        ("http://x;reboot:1", "x;reboot"),
    ],
)
def test_an_address_with_more_in_it(address: str, host: str) -> None:
    situation = Situation(Options(nproc=1), environ={"MASTER_ADDR": address})
    (finding,) = launch_environment.launch_environment(situation).findings
    assert shell(f"{finding.paste}; echo $MASTER_ADDR") == f"{host}\n"


def test_a_folder_whose_name_has_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "my checkpoints; touch pwned"
    situation = Situation(Options(nproc=1, checkpoint_dir=folder), environ={})
    (finding,) = checkpoints.checkpoint_dir(situation).findings
    shell(finding.paste)
    assert [each.name for each in tmp_path.iterdir()] == [folder.name]
    folder.rmdir()
    folder.touch()
    (finding,) = checkpoints.checkpoint_dir(situation).findings
    assert shlex.split(finding.paste)[:3] == ["ls", "-ld", f"{folder};"]


def test_a_variable_is_taken_out_of_a_file_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "my home" / ".nccl.conf"
    file.parent.mkdir()
    file.write_text(" NCCL_P2P_DISABLE = 1\nNCCL_P2P_DISABLE_NOT=1\nNCCL_DEBUG=INFO\n")
    shell(variables._without("NCCL_P2P_DISABLE", str(file)))
    assert file.read_text() == "NCCL_P2P_DISABLE_NOT=1\nNCCL_DEBUG=INFO\n"
