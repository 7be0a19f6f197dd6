"""The lines to type that checks end in, with values that a shell or a tool would trip over."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.core.finding import Finding
from ddpdoctor.preflight.command_lines import corrected_line, let_through, open_port
from ddpdoctor.preflight.machine import launch_environment, resources
from ddpdoctor.preflight.machine.network import Interface, Lookup, interfaces, own_host, own_name
from ddpdoctor.preflight.nodes.attendance import own_problem
from ddpdoctor.preflight.protocol.joining import Problem
from ddpdoctor.preflight.protocol.meet import Meeting
from ddpdoctor.preflight.situation import NodePlace, Options, Situation


def shell(line: str) -> str:
    """What a line writes."""
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    return done.stdout


def unreached(host: str, problem: Problem, rank: int = 1) -> Finding:
    meeting = Meeting(NodePlace(2, rank, host, 29500, "none"), problem=problem)
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
    no_host = unreached("fd00::1", Problem("no host", "fd00::1"))
    assert no_host.message == "no machine answers at fd00::1"


HERE: tuple[Interface, ...] = (
    Interface("lo", ("127.0.0.1",), loopback=True),
    Interface("docker0", ("172.17.0.1",)),
    Interface("eth0", ("10.0.0.7",)),
)


def gpu7(*addresses: str, options: Options | None = None) -> Situation:
    """A machine whose name has these addresses."""
    situation = Situation(options or Options(nproc=1), environ={}, hostname="gpu7")
    situation.once.put(interfaces, HERE)
    situation.once.put(own_name, Lookup("gpu7", addresses))
    return situation


def test_a_machine_is_called_by_its_name_where_that_leads_to_it() -> None:
    assert own_host(gpu7("10.0.0.7")) == "gpu7"
    assert own_host(gpu7("127.0.1.1")) == "10.0.0.7"
    assert own_host(gpu7("127.0.1.1", "10.0.0.7")) == "gpu7"
    # The name of another machine.
    assert own_host(gpu7("10.0.0.9")) == "10.0.0.7"
    assert own_host(gpu7()) == "10.0.0.7"


@pytest.mark.parametrize("host", ["", "localhost", "127.0.0.1", "0.0.0.0"])
def test_without_an_endpoint_no_node_is_told_to_wait_for_itself(host: str) -> None:
    start = "ddpdoctor check --nnodes 2"
    kind = Problem("refused") if host else Problem("unresolved")

    def told(rank: int | None, names: tuple[str, ...] = ()) -> str:
        meeting = Meeting(NodePlace(2, rank, host, 29500, "none", names), problem=kind)
        return own_problem(meeting, kind, gpu7("10.0.0.7")).paste

    assert told(0) == f"{start} --node-rank 0 --nproc-per-node 1 --rdzv-endpoint gpu7:29500"
    assert told(None) == f"{start} --nproc-per-node 1 --rdzv-endpoint gpu7:29500"
    # Only Slurm knows what node 0 is called; else it says so itself.
    named = told(1, ("gpu6", "gpu7"))
    assert named == f"{start} --node-rank 1 --nproc-per-node 1 --rdzv-endpoint gpu6:29500"
    there = shell(f"hostname() {{ echo gpu6; }}; ddpdoctor() {{ echo $*; }}; {told(1)}")
    assert f"ddpdoctor {there}" == (
        f"{start} --node-rank 0 --nproc-per-node 1 --rdzv-endpoint gpu6:29500\n"
    )


@pytest.mark.parametrize("endpoint", ["", "localhost:29500"])
def test_where_the_nodes_meet_is_told_once(endpoint: str) -> None:
    options = Options(nproc=1, nnodes=2, node_rank=0, endpoint=endpoint)
    situation = gpu7("10.0.0.7", options=options)
    (finding,) = launch_environment.launch_environment(situation).findings
    assert finding.paste.endswith("--rdzv-endpoint gpu7:29500")
    meeting = replace(situation, chosen=frozenset({"launch-environment", "nodes"}))
    assert not launch_environment.launch_environment(meeting).findings


def test_an_unknown_name_is_made_known_by_a_line_from_its_machine() -> None:
    finding = unreached("node0", Problem("unresolved", words="Name or service not known"))
    assert finding.evidence == ("Name or service not known",)
    line = shell(f'hostname() {{ echo "10.0.0.1 172.17.0.1 "; }}; {finding.paste}')
    assert line == "10.0.0.1 node0\n"
    odd = unreached("node$(echo 1)", Problem("unresolved")).paste
    line = shell(f'hostname() {{ echo "10.0.0.1 "; }}; {odd}')
    assert line == "10.0.0.1 node$(echo 1)\n"


def test_a_corrected_line_keeps_what_was_asked_for() -> None:
    script = ("train.py", "--name", "my run")
    alone = Options(nproc=8, script=script)
    assert corrected_line(gpu7(options=alone), nproc=4) == (
        "ddpdoctor run --nproc-per-node 4 -- train.py --name 'my run'"
    )
    assert corrected_line(gpu7(options=alone), port=29501) == (
        "ddpdoctor run --master-port 29501 -- train.py --name 'my run'"
    )
    at = replace(alone, endpoint="[fd00::1]:29500", module=True, script=("train",))
    assert corrected_line(gpu7(options=at), port=29501) == (
        "ddpdoctor run --rdzv-endpoint '[fd00::1]:29501' -m -- train"
    )
    several = replace(at, nnodes=2, node_rank=1)
    assert corrected_line(gpu7(options=several), nproc=4) == (
        "ddpdoctor check --nnodes 2 --node-rank 1 --nproc-per-node 4 "
        "--rdzv-endpoint '[fd00::1]:29500'"
    )


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
    (finding,) = resources.checkpoint_dir(situation).findings
    shell(finding.paste)
    assert [each.name for each in tmp_path.iterdir()] == [folder.name]
    folder.rmdir()
    folder.touch()
    (finding,) = resources.checkpoint_dir(situation).findings
    assert shlex.split(finding.paste)[:3] == ["ls", "-ld", f"{folder};"]


def test_a_variable_is_taken_out_of_a_file_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "my home" / ".nccl.conf"
    file.parent.mkdir()
    file.write_text(" NCCL_P2P_DISABLE = 1\nNCCL_P2P_DISABLE_NOT=1\nNCCL_DEBUG=INFO\n")
    shell(launch_environment._line_without("NCCL_P2P_DISABLE", str(file)))
    assert file.read_text() == "NCCL_P2P_DISABLE_NOT=1\nNCCL_DEBUG=INFO\n"
