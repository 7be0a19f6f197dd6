"""``ddpdoctor check`` on one machine: ports, temporary files, imports of imports, alike GPUs."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight import command_lines
from ddpdoctor.preflight.check import Status, merge_gpu_findings
from ddpdoctor.preflight.machine import launch_environment, network, resources, software
from ddpdoctor.preflight.machine.resources import temporary_dir
from ddpdoctor.preflight.situation import Options, Situation
from tests.support.made_machine import Machine


def test_a_master_port_alone_that_is_taken() -> None:
    with socket.create_server(("", 0)) as server:
        number = server.getsockname()[1]
        options = command_lines.parse(["--nproc-per-node", "2", "--master-port", str(number)], {})
        outcome = launch_environment.port(Situation(options.options, environ={}))
    assert outcome.status is Status.FAIL
    (finding,) = outcome.findings
    assert finding.message == f"port {number}, on which rank 0 will listen, is taken"
    assert finding.paste.startswith("ddpdoctor run --master-port ")


def test_a_temporary_folder_that_cannot_be_written(tmp_path: Path) -> None:
    assert temporary_dir(Situation(environ={"TMPDIR": str(tmp_path)})).findings == ()
    (finding,) = temporary_dir(Situation(environ={"TMPDIR": "/proc"})).findings
    assert finding.message.startswith("temporary files cannot be written to /proc: no file can")
    assert finding.paste == "df -h /proc; df -i /proc"


def test_a_full_file_system_and_one_without_inodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = os.statvfs(tmp_path)

    class Without:
        f_bavail, f_frsize, f_files, f_favail = facts.f_bavail, facts.f_frsize, 1000, 0

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    situation = Situation(Options(checkpoint_dir=tmp_path), environ={"TMPDIR": str(tmp_path)})
    (finding,) = resources.checkpoint_dir(situation).findings
    assert finding.message.endswith("its file system is full")
    monkeypatch.setattr(os, "statvfs", lambda _: Without)
    (finding,) = resources.checkpoint_dir(situation).findings
    assert finding.message.endswith("its file system has no inodes left for another file")
    assert f"df -i {tmp_path}" in finding.paste
    (finding,) = temporary_dir(situation).findings
    assert finding.message.endswith("no inodes left for another file")


def test_an_import_that_is_missing_in_a_module_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nimport net\n")
    (tmp_path / "net.py").write_text("import layers_of_mine\nimport net\n")
    package = tmp_path / "layers_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("import json\n\nimport no_such_package\n")
    options = Options(script=(str(tmp_path / "train.py"),))
    (finding,) = software.script(Situation(options, environ={})).findings
    assert finding.message.startswith("__init__.py imports no_such_package, which this Python")
    assert finding.location is not None
    assert (finding.location.path, finding.location.line) == (str(package / "__init__.py"), 3)
    (package / "__init__.py").write_text("try:\n    import no_such_package\nexcept E:\n    pass\n")
    assert software.script(Situation(options, environ={})).findings == ()


def test_a_variable_for_gpus_is_information_where_there_are_none(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    outcome = launch_environment.variables(machine.situation(environ={"NCCL_P2P_DISABLE": "1"}))
    (finding,) = outcome.findings
    assert (outcome.status, finding.severity) == (Status.PASS, Severity.INFO)
    assert "where there are GPUs, the GPUs of this machine exchange gradients" in finding.message


def gpu(index: int, words: str, paste: str = "") -> Finding:
    return Finding("DDP023", Severity.WARNING, f"GPU {index} {words}", fix="Reset it.", paste=paste)


def test_one_fault_of_eight_gpus_is_one_finding() -> None:
    alike = [gpu(each, "has 8 of 16 PCIe lanes", f"nvidia-smi -q -i {each}") for each in range(8)]
    (finding,) = merge_gpu_findings(alike)
    assert finding.message == "GPUs 0-7 have 8 of 16 PCIe lanes"
    assert finding.paste == "nvidia-smi -q -i 0,1,2,3,4,5,6,7"
    other = gpu(3, "is throttled at 91 degrees Celsius")
    hot = [other, gpu(5, "is throttled at 93 degrees Celsius"), *alike[:1]]
    both, one = merge_gpu_findings(hot)
    assert both.message == "GPUs 3,5 are throttled at 91 degrees Celsius"
    assert both.evidence == (hot[0].message, hot[1].message)
    assert one == alike[0]


def test_a_name_server_that_is_silent_is_told_from_one_that_knows_no_such_name() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        number = server.getsockname()[1]
        assert not network.server_answers("127.0.0.1", "node0", port=number)
        assert len(server.recv(512)) == 12 + 1 + 5 + 1 + 4
    servers = [network.NameServer("10.0.0.2", False), network.NameServer("10.0.0.3", True)]
    assert network.dead_servers(servers) == (
        "name server 10.0.0.2, the first one, in /etc/resolv.conf does not answer; 10.0.0.3 does"
    )
    assert network.dead_servers(servers[1:]) == ""
