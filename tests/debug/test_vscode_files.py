"""launch.json and tasks.json: only our entries come and go."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.job import DEFAULT_PORT, OwnOptions
from ddpdoctor.debug import vscode_configurations, vscode_files
from ddpdoctor.debug.debugging import Editor
from ddpdoctor.debug.vscode_configurations import ALL, AttachPoint, PathMapping
from ddpdoctor.run import rundir
from tests.conftest import ROOT
from tests.support.vscode_schema import SCHEMA, check, load

POINTS = [AttachPoint(rank, "127.0.0.1", 5678 + rank) for rank in range(2)]


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock and the home directory are this test's own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / ".vscode").mkdir(parents=True)
    return folder


def names(workspace: Path) -> list[str]:
    return [item["name"] for item in load(workspace / ".vscode/launch.json")["configurations"]]


def test_the_repositorys_own_file_has_the_ports_of_a_run_without_options() -> None:
    """Else the first run in a fresh clone would change a file that git tracks."""
    points = load(ROOT / ".vscode/launch.json")["configurations"]
    ports = [item["connect"]["port"] for item in points if "connect" in item]
    assert ports == [*[DEFAULT_PORT - 1] * 2, DEFAULT_PORT, DEFAULT_PORT + 1]


def refused(workspace: Path, *parts: str) -> DoctorError:
    """An update is refused, in one line with all these words; nothing is left lying about."""
    before = set((workspace / ".vscode").glob("*"))
    with pytest.raises(DoctorError) as caught:
        vscode_configurations.update_launch(workspace, POINTS)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in caught.value.message
    assert set((workspace / ".vscode").glob("*")) == before
    return caught.value


def test_the_workspace_is_the_nearest_with_a_mark(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir(parents=True)
    assert vscode_files.find_workspace(deep, None) == deep
    (tmp_path / "a" / ".git").write_text("gitdir: elsewhere\n")
    assert vscode_files.find_workspace(deep, None) == tmp_path / "a"
    (tmp_path / "a" / "b" / ".vscode").mkdir()
    assert vscode_files.find_workspace(deep, None) == tmp_path / "a" / "b"
    assert vscode_files.find_workspace(tmp_path / "a" / "b", None) == tmp_path / "a" / "b"
    assert vscode_files.find_workspace(deep, "..") == tmp_path / "a" / "b"
    assert vscode_files.find_workspace(deep, str(tmp_path)) == tmp_path


def test_the_home_directory_is_no_workspace(tmp_path: Path) -> None:
    """VS Code keeps its extensions in ~/.vscode."""
    deep = tmp_path / "home" / "project"
    deep.mkdir(parents=True)
    (tmp_path / "home" / ".vscode").mkdir()
    assert vscode_files.find_workspace(deep, None) == deep


def test_a_workspace_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for chosen in ("file", "nowhere"):
        with pytest.raises(DoctorError, match=f"the workspace {chosen} is not a directory"):
            vscode_files.find_workspace(tmp_path, chosen)


def test_every_entry_is_one_that_vs_code_knows(workspace: Path) -> None:
    every = [AttachPoint(ALL, "127.0.0.1", 5677), *POINTS]
    vscode_files.edit(
        workspace,
        {"launch.json": lambda text: vscode_configurations.with_launch_entries(text, every, [])},
    )
    mappings = [PathMapping("${workspaceFolder}", "/srv/job")]
    vscode_configurations.update_launch(
        workspace, every, label="a (b)", others=[""], mappings=mappings
    )
    written = load(workspace / ".vscode/launch.json")
    check(written, SCHEMA)
    present = names(workspace)
    assert len(present) == 7
    with pytest.raises(AssertionError, match="may not have ddpdoctor"):
        check({**written["configurations"][0], "ddpdoctor": 1}, {"$ref": "attach"})


def test_one_configuration() -> None:
    text = vscode_configurations.with_run(
        None, POINTS[1:], vscode_configurations.default_mappings(Path("/w"))
    )
    root = vscode_files.parse_jsonc(text or "").root
    assert root is not None and isinstance(root.value, dict)
    assert root.value["configurations"] == [
        {
            "name": "rank 1 (ddpdoctor)",
            "type": "debugpy",
            "request": "attach",
            "connect": {"host": "127.0.0.1", "port": 5679},
            "pathMappings": [
                {"localRoot": "${workspaceFolder}", "remoteRoot": "${workspaceFolder}"}
            ],
            "justMyCode": True,
            "presentation": {"group": "ddpdoctor", "order": 3},
        }
    ]


def test_a_workspace_under_two_names(workspace: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(workspace)
    vscode_configurations.update_launch(link, POINTS)
    first = load(workspace / ".vscode/launch.json")["configurations"][0]
    assert [mapping["remoteRoot"] for mapping in first["pathMappings"]] == [
        "${workspaceFolder}",
        str(workspace),
    ]


def test_a_file_comes_and_goes(tmp_path: Path) -> None:
    previous = os.umask(0o027)
    try:
        assert vscode_configurations.update_launch(tmp_path, POINTS)
    finally:
        os.umask(previous)
    path = tmp_path / ".vscode" / "launch.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    inode = path.stat().st_ino
    assert not vscode_configurations.update_launch(tmp_path, POINTS)
    assert path.stat().st_ino == inode
    assert vscode_files.edit(
        tmp_path, {"launch.json": vscode_configurations.without_launch_entries}
    ) == [path]
    assert not (tmp_path / ".vscode").exists()
    assert (
        vscode_files.edit(tmp_path, {"launch.json": vscode_configurations.without_launch_entries})
        == []
    )


def test_what_else_is_in_the_folder_stays(workspace: Path) -> None:
    (workspace / ".vscode/settings.json").write_text("{}")
    vscode_configurations.update_launch(workspace, POINTS)
    vscode_files.edit(workspace, {"launch.json": vscode_configurations.without_launch_entries})
    assert [path.name for path in (workspace / ".vscode").iterdir()] == ["settings.json"]


def test_an_empty_file_is_a_file(workspace: Path) -> None:
    path = workspace / ".vscode/launch.json"
    path.touch(0o600)
    path.chmod(0o604)
    vscode_configurations.update_launch(workspace, POINTS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    vscode_files.edit(workspace, {"launch.json": vscode_configurations.without_launch_entries})
    assert path.read_bytes() == b""


def test_every_byte_comes_back(workspace: Path) -> None:
    path = workspace / ".vscode/launch.json"
    content = '\ufeff{\r\n\t"configurations": [\r\r\n], // é\r\n}'.encode()
    path.write_bytes(content)
    vscode_configurations.update_launch(workspace, POINTS)
    assert len(names(workspace)) == 2
    vscode_files.edit(workspace, {"launch.json": vscode_configurations.without_launch_entries})
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{\n"configurations": null\n}', ["launch.json:2: ", "must be a list"]),
        (b"{\n[", ["launch.json:2: ", "property name"]),
        (b'{\n\n"x": "\xe9"}', ["launch.json:3: not UTF-8"]),
        ('{"x": 1}'.encode("utf-16"), ["launch.json:1: not UTF-8"]),
    ],
)
def test_a_damaged_file_is_left_alone(workspace: Path, content: bytes, words: list[str]) -> None:
    path = workspace / ".vscode/launch.json"
    path.write_bytes(content)
    assert "unchanged" in refused(workspace, *words).hint
    assert path.read_bytes() == content


def test_of_two_files_both_or_none_is_changed(workspace: Path) -> None:
    (workspace / ".vscode/tasks.json").write_text("{")
    with pytest.raises(DoctorError, match=r"tasks\.json:1: "):
        vscode_files.edit(
            workspace,
            {
                "launch.json": lambda text: vscode_configurations.with_launch_entries(
                    text, POINTS, []
                ),
                "tasks.json": lambda text: vscode_configurations.with_tasks(text, ["train.py"]),
            },
        )
    assert not (workspace / ".vscode/launch.json").exists()


def test_a_read_only_file_is_left_alone(workspace: Path) -> None:
    path = workspace / ".vscode/launch.json"
    path.write_text("{}")
    path.chmod(0o444)
    refused(workspace, "launch.json cannot be written", "read-only")
    assert path.read_text() == "{}"
    # There is nothing to change in it, so nothing to complain of.
    assert (
        vscode_files.edit(workspace, {"launch.json": vscode_configurations.without_launch_entries})
        == []
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(workspace: Path) -> None:
    (workspace / ".vscode").chmod(0o555)
    refused(workspace, "launch.json cannot be written", "Permission denied")


def test_what_is_no_file(workspace: Path) -> None:
    path = workspace / ".vscode/launch.json"
    os.mkfifo(path)
    refused(workspace, "not a file")
    path.unlink()
    path.mkdir()
    refused(workspace, "not a file")
    path.rmdir()
    path.symlink_to(path)
    refused(workspace, "launch.json")
    path.unlink()
    (workspace / ".vscode").rmdir()
    (workspace / ".vscode").write_text("")
    with pytest.raises(DoctorError, match=r"launch\.json cannot be "):
        vscode_configurations.update_launch(workspace, POINTS)


def test_a_link_out_of_the_workspace_is_left_alone(workspace: Path, tmp_path: Path) -> None:
    other = tmp_path / "project2"
    other.mkdir()
    (other / "launch.json").write_text("{}")
    path = workspace / ".vscode/launch.json"
    path.symlink_to(other / "launch.json")
    assert "--workspace" in refused(workspace, "outside the workspace").hint
    path.unlink()
    (workspace / ".vscode").rmdir()
    (workspace / ".vscode").symlink_to(other)
    refused(workspace, "outside the workspace")
    assert (other / "launch.json").read_text() == "{}"


def test_a_link_inside_the_workspace_stays_a_link(workspace: Path) -> None:
    (workspace / "shared").mkdir()
    target, path = workspace / "shared/launch.json", workspace / ".vscode/launch.json"
    target.write_text("{ }")
    path.symlink_to("../shared/launch.json")
    assert vscode_configurations.update_launch(workspace, POINTS)
    assert path.is_symlink() and len(names(workspace)) == 2
    vscode_files.edit(workspace, {"launch.json": vscode_configurations.without_launch_entries})
    assert path.is_symlink() and target.read_text() == "{ }"


WRITER = """
import sys
from pathlib import Path
from ddpdoctor.debug.vscode_configurations import AttachPoint, update_launch
workspace, label, other = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.stdin.readline()
for port in range(6000, 6015):
    points = [AttachPoint(rank, "127.0.0.1", port + rank) for rank in range(2)]
    assert update_launch(workspace, points, label=label, others=[other])
"""


def test_two_processes_at_once(workspace: Path) -> None:
    path = workspace / ".vscode/launch.json"
    path.write_text('{ // mine\n  "configurations": [\n    {"name": "mine"},\n  ]\n}\n')
    environment = {**os.environ, "TMPDIR": tempfile.gettempdir()}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(workspace), *labels],
            stdin=subprocess.PIPE,
            env=environment,
        )
        for labels in (("a", "b"), ("b", "a"))
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"go\n")
        writer.stdin.close()
    # Whoever reads meanwhile sees a whole file.
    while any(writer.poll() is None for writer in writers):
        vscode_files.parse_jsonc(path.read_text())
        time.sleep(0.001)
    assert [writer.returncode for writer in writers] == [0, 0]
    ours = [f"rank {rank} (ddpdoctor, {label})" for label in "ab" for rank in (0, 1)]
    assert sorted(names(workspace)) == sorted([*ours, "mine"])
    ports = {
        item["connect"]["port"] for item in load(path)["configurations"] if item["name"] != "mine"
    }
    assert ports == {6014, 6015}
    assert [path.name for path in (workspace / ".vscode").iterdir()] == ["launch.json"]


def test_the_lock_is_waited_for_but_not_for_ever(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vscode_files, "LOCK_SECONDS", 0.1)
    with vscode_files.locked(workspace):
        refused(workspace, "another ddpdoctor is changing")
        monkeypatch.setattr(vscode_files, "LOCK_SECONDS", 10)
        late = threading.Thread(
            target=vscode_configurations.update_launch, args=(workspace, POINTS)
        )
        late.start()
        time.sleep(0.1)
        assert not (workspace / ".vscode/launch.json").exists()
    late.join(10)
    assert len(names(workspace)) == 2
    assert [path.suffix for path in rundir.base_directory().iterdir()] == [".lock"]


def git(workspace: Path, *words: str) -> str:
    command = ["git", "-C", str(workspace), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_file_that_git_tracks_is_put_back_when_the_job_ends(workspace: Path) -> None:
    git(workspace, "init", "-q")
    vscode_configurations.update_launch(workspace, POINTS)
    git(workspace, "add", ".vscode/launch.json")
    editor = Editor(OwnOptions(workspace=str(workspace)), "train.py")
    editor.write("127.0.0.1", {0: 9000, 1: 9001, 2: 9002}, {})
    assert git(workspace, "diff", "--name-only").split() == [".vscode/launch.json"]
    editor.restore()
    editor.restore()
    assert not git(workspace, "diff", "--name-only")


def test_what_was_changed_while_the_job_ran_is_not_put_back(workspace: Path) -> None:
    git(workspace, "init", "-q")
    vscode_configurations.update_launch(workspace, POINTS)
    git(workspace, "add", ".vscode/launch.json")
    editor = Editor(OwnOptions(workspace=str(workspace)), "train.py")
    editor.write("127.0.0.1", {0: 9000}, {})
    path = workspace / ".vscode" / "launch.json"
    path.write_text(changed := path.read_text() + "\n// mine\n")
    editor.restore()
    assert path.read_text() == changed


def test_a_file_that_git_does_not_track_keeps_the_ranks(workspace: Path) -> None:
    editor = Editor(OwnOptions(workspace=str(workspace)), "train.py")
    editor.write("127.0.0.1", {0: 9000}, {})
    editor.restore()
    assert "9000" in (workspace / ".vscode" / "launch.json").read_text()
