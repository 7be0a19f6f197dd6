"""``ddpdoctor check`` across nodes, in a lab: what the nodes have."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.lab import faults
from tests.lab.checking import WITHOUT_TORCH, Make, agreeing, silent


@pytest.mark.parametrize(
    ("shift", "severity", "status"), [(-20.0, "error", 2), (3.0, "warning", 1)]
)
def test_a_clock_that_is_wrong(
    nodes: Make, tmp_path: Path, shift: float, severity: str, status: int
) -> None:
    checks = nodes(3)
    faults.clock_shifted(checks.lab.hosts[1], shift, tmp_path)
    said = checks.run(*WITHOUT_TORCH)
    side = "behind" if shift < 0 else "ahead of"
    assert agreeing(said, "DDP052") == (
        f"the clock of node1 (node 1) is {abs(shift):.1f} s {side} the others"
    )
    assert {each.findings("clocks")[0]["severity"] for each in said} == {severity}
    assert {each.status for each in said} == {status}


def test_another_torch_and_other_settings(nodes: Make, tmp_path: Path) -> None:
    """The other torch is a shim: the version is read from the file that torch keeps it in."""
    checks = nodes(3)
    shim = tmp_path / "other" / "torch"
    shim.mkdir(parents=True)
    (shim / "__init__.py").write_text("")
    (shim / "version.py").write_text("__version__ = '2.4.1'\n")
    other = {"PYTHONPATH": str(shim.parent), "NCCL_ALGO": "Ring"}
    said = checks.run(*WITHOUT_TORCH, env={2: other})
    told = agreeing(said, "DDP057").splitlines()
    assert told[0].startswith("torch is 2.4.1 on node2 (node 2), and 2.")
    assert told[1] == "NCCL_ALGO is not the same on all nodes"


@pytest.mark.slow
def test_another_commit_and_other_changes(nodes: Make, tmp_path: Path) -> None:
    checks = nodes(4)
    repository = tmp_path / "code"
    repository.mkdir()
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    (repository / "train.py").write_text("print(1)\n")
    (repository / "model.py").write_text("width = 1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    for name in ("later", "changed"):
        subprocess.run(["cp", "-r", str(repository), str(tmp_path / name)], check=True)
    (tmp_path / "later" / "model.py").write_text("width = 2\n")
    later = ["git", "-C", str(tmp_path / "later"), *git[3:]]
    subprocess.run([*later, "commit", "-qam", "two"], check=True)
    (tmp_path / "changed" / "model.py").write_text("width = 3\n")
    script = ("--", str(repository / "train.py"))
    faults.folder_of_its_own(checks.lab.hosts[2], repository, tmp_path / "changed")
    said = checks.run(*WITHOUT_TORCH, *script)
    assert agreeing(said, "DDP058") == (
        "the uncommitted changes are not the same: node2 (node 2) differs from the others"
    )
    faults.folder_of_its_own(checks.lab.hosts[1], repository, tmp_path / "later")
    said = checks.run(*WITHOUT_TORCH, *script)
    assert agreeing(said, "DDP058").startswith(f"the commit of {script[1]} differs: node1 (node 1)")


@pytest.mark.slow
def test_a_folder_that_is_not_shared(nodes: Make, tmp_path: Path) -> None:
    checks = nodes(3)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    silent(checks.run(*WITHOUT_TORCH, "--checkpoint-dir", str(folder)))
    faults.folder_of_its_own(checks.lab.hosts[2], folder, tmp_path / "private")
    said = checks.run(*WITHOUT_TORCH, "--checkpoint-dir", str(folder))
    assert agreeing(said, "DDP059") == (
        f"{folder} is another folder on node2 (node 2) than on node0 (node 0)"
    )
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_shared_folder_of_which_a_node_sees_other_files(nodes: Make, tmp_path: Path) -> None:
    """One folder for all, and in it a file that is longer as one node sees it, as of old caches."""
    checks = nodes(3)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step in range(5):
        (folder / f"step{step}.pt").write_bytes(bytes(100))
    words = (*WITHOUT_TORCH, "--checkpoint-dir", str(folder))
    silent(checks.run(*words))
    longer = tmp_path / "longer"
    longer.write_bytes(bytes(200))
    checks.lab.hosts[1].run("mount", "--bind", str(longer), str(folder / "step3.pt"))
    said = checks.run(*words)
    assert agreeing(said, "DDP059") == (
        f"the nodes see the same {folder}, but not the same files in it"
    )
    for each in said:
        (finding,) = each.findings("shared-folder")
        assert (finding["severity"], each.status) == ("warning", 1)
        assert finding["paste"] == f"ls -la {folder}"


# On a machine that is busy it is too short.
@pytest.mark.slow
def test_a_short_time_limit_leaves_time_for_torch(nodes: Make) -> None:
    silent(nodes(2).run("--timeout", "16", "--only", "nodes,gloo-nodes"))


def test_torch_that_one_node_cannot_import_is_not_waited_for(nodes: Make, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.12')\n")
    broken = {1: {"PYTHONPATH": f"{tmp_path}:{ROOT}"}}
    said = nodes(2).run("--only", "nodes,gloo-nodes", env=broken)
    assert agreeing(said, "DDP060") == "torch cannot be imported on node1 (node 1)"


@pytest.mark.parametrize(
    "chosen",
    [
        ("--only", "links"),
        pytest.param(("--skip", "nodes,gloo-nodes"), marks=pytest.mark.slow),
    ],
)
def test_a_check_without_the_other_nodes_is_not_green(nodes: Make, chosen: tuple[str, str]) -> None:
    checks = nodes(3)
    for hosts, why in (
        (checks.lab.hosts[:1], "no other node is here"),
        (checks.lab.hosts[1:2], "this node did not meet the others"),
        (checks.lab.hosts[:2], "2 of 3 nodes are here: 2 of 2 directions between nodes are open"),
    ):
        for each in checks.run("--timeout", "3", *chosen, hosts=hosts):
            assert (each.status, each.outcome("links")["detail"]) == (4, why)
