"""The files in ``.vscode`` on disk: which workspace, links, rights, two writers, the command."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.commands import vscode
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.job import DEFAULT_PORT
from ddpdoctor.debug.vscode import files, jsonc, launch_json, tasks_json
from ddpdoctor.debug.vscode.launch_json import AttachPoint, PathMapping
from ddpdoctor.run import rundir
from tests.conftest import ROOT

POINTS = [AttachPoint(rank, "127.0.0.1", 5678 + rank) for rank in range(2)]
SCHEMA = json.loads((Path(__file__).parent / "launch_schema.json").read_text())
TYPES: dict[str, Callable[[object], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
}


def check(value: Any, schema: dict[str, Any], where: str = "launch.json") -> None:
    """Assert that a value is of a schema, as far as ours goes."""
    schema = SCHEMA["definitions"][schema["$ref"]] if "$ref" in schema else schema
    assert TYPES[schema["type"]](value), f"{where} is no {schema['type']}"
    assert value in schema.get("enum", [value]), where
    if isinstance(value, dict):
        assert set(schema.get("required", [])) <= set(value), where
        for key, item in value.items():
            if key in schema["properties"]:
                check(item, schema["properties"][key], f"{where}.{key}")
            else:
                assert schema.get("additionalProperties", True), f"{where} may not have {key}"
    if isinstance(value, list):
        for place, item in enumerate(value):
            check(item, schema["items"], f"{where}[{place}]")


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


def load(path: Path) -> Any:
    root = jsonc.parse(path.read_text()).root
    assert root is not None
    return root.value


def names(workspace: Path) -> list[str]:
    return [item["name"] for item in load(workspace / ".vscode/launch.json")["configurations"]]


def test_the_repositorys_own_file_has_the_ports_of_a_run_without_options() -> None:
    """Else the first run in a fresh clone would change a file that git tracks."""
    points = load(ROOT / ".vscode/launch.json")["configurations"]
    ports = [item["connect"]["port"] for item in points if "connect" in item]
    assert ports == [DEFAULT_PORT, DEFAULT_PORT + 1]


def refused(workspace: Path, *parts: str) -> DoctorError:
    """An update is refused, in one line with all these words; nothing is left lying about."""
    before = set((workspace / ".vscode").glob("*"))
    with pytest.raises(DoctorError) as caught:
        launch_json.update(workspace, POINTS)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in caught.value.message
    assert set((workspace / ".vscode").glob("*")) == before
    return caught.value


def test_the_workspace_is_the_nearest_with_a_mark(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir(parents=True)
    assert files.find_workspace(deep, None) == deep
    (tmp_path / "a" / ".git").write_text("gitdir: elsewhere\n")
    assert files.find_workspace(deep, None) == tmp_path / "a"
    (tmp_path / "a" / "b" / ".vscode").mkdir()
    assert files.find_workspace(deep, None) == tmp_path / "a" / "b"
    assert files.find_workspace(tmp_path / "a" / "b", None) == tmp_path / "a" / "b"
    assert files.find_workspace(deep, "..") == tmp_path / "a" / "b"
    assert files.find_workspace(deep, str(tmp_path)) == tmp_path


def test_the_home_directory_is_no_workspace(tmp_path: Path) -> None:
    """VS Code keeps its extensions in ~/.vscode."""
    deep = tmp_path / "home" / "project"
    deep.mkdir(parents=True)
    (tmp_path / "home" / ".vscode").mkdir()
    assert files.find_workspace(deep, None) == deep


def test_a_workspace_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for chosen in ("file", "nowhere"):
        with pytest.raises(DoctorError, match=f"the workspace {chosen} is not a directory"):
            files.find_workspace(tmp_path, chosen)


def test_every_entry_is_one_that_vs_code_knows(workspace: Path) -> None:
    files.edit(workspace, {"launch.json": lambda text: launch_json.installed(text, POINTS, [])})
    mappings = [PathMapping("${workspaceFolder}", "/srv/job")]
    launch_json.update(workspace, POINTS, label="a (b)", others=[""], mappings=mappings)
    written = load(workspace / ".vscode/launch.json")
    check(written, SCHEMA)
    present = names(workspace)
    assert len(present) == 4
    for compound in written["compounds"]:
        assert set(compound["configurations"]) <= set(present)
    with pytest.raises(AssertionError, match="may not have ddpdoctor"):
        check({**written["configurations"][0], "ddpdoctor": 1}, {"$ref": "attach"})


def test_one_configuration() -> None:
    text = launch_json.updated(None, POINTS[1:], launch_json.default_mappings(Path("/w")))
    root = jsonc.parse(text or "").root
    assert root is not None and isinstance(root.value, dict)
    assert root.value["configurations"] == [
        {
            "name": "ddpdoctor: rank 1",
            "type": "debugpy",
            "request": "attach",
            "connect": {"host": "127.0.0.1", "port": 5679},
            "pathMappings": [
                {"localRoot": "${workspaceFolder}", "remoteRoot": "${workspaceFolder}"}
            ],
            "justMyCode": False,
            "presentation": {"group": "ddpdoctor", "order": 3},
        }
    ]


def test_a_workspace_under_two_names(workspace: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(workspace)
    launch_json.update(link, POINTS)
    first = load(workspace / ".vscode/launch.json")["configurations"][0]
    assert [mapping["remoteRoot"] for mapping in first["pathMappings"]] == [
        "${workspaceFolder}",
        str(workspace),
    ]


def test_a_file_comes_and_goes(tmp_path: Path) -> None:
    previous = os.umask(0o027)
    try:
        assert launch_json.update(tmp_path, POINTS)
    finally:
        os.umask(previous)
    path = tmp_path / ".vscode" / "launch.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    inode = path.stat().st_ino
    assert not launch_json.update(tmp_path, POINTS)
    assert path.stat().st_ino == inode
    assert files.edit(tmp_path, {"launch.json": launch_json.removed}) == [path]
    assert not (tmp_path / ".vscode").exists()
    assert files.edit(tmp_path, {"launch.json": launch_json.removed}) == []


def test_what_else_is_in_the_folder_stays(workspace: Path) -> None:
    (workspace / ".vscode/settings.json").write_text("{}")
    launch_json.update(workspace, POINTS)
    files.edit(workspace, {"launch.json": launch_json.removed})
    assert [path.name for path in (workspace / ".vscode").iterdir()] == ["settings.json"]


def test_an_empty_file_is_a_file(workspace: Path) -> None:
    path = workspace / ".vscode/launch.json"
    path.touch(0o600)
    path.chmod(0o604)
    launch_json.update(workspace, POINTS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    files.edit(workspace, {"launch.json": launch_json.removed})
    assert path.read_bytes() == b""


def test_every_byte_comes_back(workspace: Path) -> None:
    path = workspace / ".vscode/launch.json"
    content = '\ufeff{\r\n\t"configurations": [\r\r\n], // é\r\n}'.encode()
    path.write_bytes(content)
    launch_json.update(workspace, POINTS)
    assert len(names(workspace)) == 2
    files.edit(workspace, {"launch.json": launch_json.removed})
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{\n"configurations": null\n}', ["launch.json:2: ", "must be a list"]),
        (b"{\n[", ["launch.json:2: ", "a key"]),
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
        files.edit(
            workspace,
            {
                "launch.json": lambda text: launch_json.installed(text, POINTS, []),
                "tasks.json": lambda text: tasks_json.installed(text, ["train.py"]),
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
    assert files.edit(workspace, {"launch.json": launch_json.removed}) == []


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
        launch_json.update(workspace, POINTS)


def test_a_link_out_of_the_workspace_is_left_alone(workspace: Path, tmp_path: Path) -> None:
    other = tmp_path / "project2"
    other.mkdir()
    (other / "launch.json").write_text("{}")
    path = workspace / ".vscode/launch.json"
    path.symlink_to(other / "launch.json")
    assert "--workspace" in refused(workspace, "is a link out of the workspace").hint
    path.unlink()
    (workspace / ".vscode").rmdir()
    (workspace / ".vscode").symlink_to(other)
    refused(workspace, "is a link out of the workspace")
    assert (other / "launch.json").read_text() == "{}"


def test_a_link_inside_the_workspace_stays_a_link(workspace: Path) -> None:
    (workspace / "shared").mkdir()
    target, path = workspace / "shared/launch.json", workspace / ".vscode/launch.json"
    target.write_text("{ }")
    path.symlink_to("../shared/launch.json")
    assert launch_json.update(workspace, POINTS)
    assert path.is_symlink() and len(names(workspace)) == 2
    files.edit(workspace, {"launch.json": launch_json.removed})
    assert path.is_symlink() and target.read_text() == "{ }"


WRITER = """
import sys
from pathlib import Path
from ddpdoctor.debug.vscode import launch_json
workspace, label, other = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.stdin.readline()
for port in range(6000, 6015):
    points = [launch_json.AttachPoint(rank, "127.0.0.1", port + rank) for rank in range(2)]
    assert launch_json.update(workspace, points, label=label, others=[other])
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
        jsonc.parse(path.read_text())
        time.sleep(0.001)
    assert [writer.returncode for writer in writers] == [0, 0]
    ours = [f"ddpdoctor: rank {rank} ({label})" for label in "ab" for rank in (0, 1)]
    assert sorted(names(workspace)) == sorted([*ours, "mine"])
    ports = {
        item["connect"]["port"] for item in load(path)["configurations"] if item["name"] != "mine"
    }
    assert ports == {6014, 6015}
    assert [path.name for path in (workspace / ".vscode").iterdir()] == ["launch.json"]


def test_the_lock_is_waited_for_but_not_for_ever(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.1)
    with files.locked(workspace):
        refused(workspace, "another ddpdoctor is changing")
        monkeypatch.setattr(files, "LOCK_SECONDS", 10)
        late = threading.Thread(target=launch_json.update, args=(workspace, POINTS))
        late.start()
        time.sleep(0.1)
        assert not (workspace / ".vscode/launch.json").exists()
    late.join(10)
    assert len(names(workspace)) == 2
    assert [path.suffix for path in rundir.base_directory().iterdir()] == [".lock"]


@pytest.fixture
def here(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workspace)
    return workspace


def run_task(workspace: Path) -> dict[str, Any]:
    tasks = load(workspace / ".vscode/tasks.json")["tasks"]
    ours = ("run", "report", "check", "top")
    assert [task["label"] for task in tasks] == [f"ddpdoctor: {name}" for name in ours]
    found: dict[str, Any] = tasks[0]
    return found


def test_the_files_of_this_repository(here: Path) -> None:
    """They are what the command of today makes of them."""
    for name in ("launch.json", "tasks.json"):
        (here / ".vscode").mkdir(exist_ok=True)
        (here / ".vscode" / name).write_bytes((ROOT / ".vscode" / name).read_bytes())
    script = "sample_jobs/resnet50_synthetic.py"
    (here / script).parent.mkdir()
    (here / script).touch()
    before = (here / ".vscode/tasks.json").read_bytes()
    first = load(here / ".vscode/launch.json")["configurations"][0]
    assert first["postDebugTask"] == "ddpdoctor: report"
    assert vscode.main(["--nproc-per-node", "2", script, "--break-at", "1"]) == 0
    assert (here / ".vscode/tasks.json").read_bytes() == before


def ports(workspace: Path) -> list[int]:
    configurations = load(workspace / ".vscode/launch.json")["configurations"]
    return [item["connect"]["port"] for item in configurations]


def test_the_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = ".vscode/launch.json and .vscode/tasks.json"
    press = 'press F5 and choose "ddpdoctor: run + attach"'
    assert vscode.main(["--", "--nproc-per-node", "3", "train.py", "--nproc-per-node=9"]) == 0
    assert capsys.readouterr().out == f"wrote {both}: {press}\n"
    assert ports(here) == [5678, 5679, 5680]
    compounds = load(here / ".vscode/launch.json")["compounds"]
    # Its problems stay when those of the run, which ends with the job, are taken away.
    report = load(here / ".vscode/tasks.json")["tasks"][1]
    after = [c.get("postDebugTask") for c in load(here / ".vscode/launch.json")["configurations"]]
    assert after == [report["label"], None, None]
    assert "background" not in report["problemMatcher"]
    assert "isBackground" not in report
    # Else VS Code, which starts it twice after a Stop of the compound, asks which one to end.
    assert report["runOptions"] == {"instancePolicy": "silent"}
    check(load(here / ".vscode/launch.json"), SCHEMA)
    assert compounds[1]["preLaunchTask"] == run_task(here)["label"]
    before = (here / ".vscode/launch.json").read_bytes()
    points = [AttachPoint(rank, "127.0.0.1", 5678 + rank) for rank in range(3)]
    # A run of as many ranks finds everything as it wants it.
    assert not launch_json.update(here, points)
    assert (here / ".vscode/launch.json").read_bytes() == before
    assert run_task(here)["args"] == [
        *["-m", "ddpdoctor", "run", "--wait-for-attach", "--stop-with-debugger"],
        *["--output", "problems"],
        *["--nproc-per-node", "3", "train.py", "--nproc-per-node=9"],
    ]
    assert "options" not in run_task(here)
    assert vscode.main(["--", "--nproc-per-node", "3", "train.py", "--nproc-per-node=9"]) == 0
    assert capsys.readouterr().out == f"unchanged: {both}: {press}\n"
    assert vscode.main(["--", "--nproc-per-node", "3", "other.py"]) == 0
    assert capsys.readouterr().out == f"wrote .vscode/tasks.json: {press}\n"
    (here / ".vscode/tasks.json").write_text(
        "// mine\n" + (here / ".vscode/tasks.json").read_text()
    )
    assert vscode.main(["--remove"]) == 0
    assert capsys.readouterr().out == (
        "removed .vscode/launch.json\nremoved the entries of ddpdoctor from .vscode/tasks.json\n"
    )
    assert vscode.main(["--remove"]) == 0
    assert capsys.readouterr().out == f"unchanged: no entries of ddpdoctor in {both}\n"


def test_the_open_file_is_run_if_there_is_no_script(here: Path) -> None:
    vscode.main(["--ranks", "4", "--debug-port=6000"])
    assert ports(here) == [6000, 6001, 6002, 6003]
    assert run_task(here)["args"][7:] == [
        *["--debug-port", "6000", "--nproc-per-node", "4", "${file}"]
    ]


@pytest.mark.parametrize(
    ("words", "ranks", "added"),
    [
        (["train.py"], 2, True),
        (["--standalone", "train.py", "--nproc-per-node", "8"], 2, True),
        (["--nproc_per_node=4", "train.py"], 4, False),
        (["--nproc-per-node", "gpu", "train.py"], 2, False),
        (["python", "train.py"], 2, False),
        (["--quiet", "--", "srun", "x"], 2, False),
        (["--nproc-per-node", "1" * 5000, "train.py"], 2, False),
    ],
)
def test_as_many_ranks_as_configurations(
    here: Path, words: list[str], ranks: int, added: bool
) -> None:
    vscode.main(["--", *words])
    assert len(ports(here)) == ranks
    extra = ["--nproc-per-node", str(ranks)] if added else []
    assert run_task(here)["args"][7:] == [*extra, *words]


@pytest.mark.parametrize(
    "words",
    [
        ["--nproc-per-node", "3", "train.py", "--lr", "0.1"],
        ["--nproc-per-node=3", "--hang-after", "10", "--", "train.py", "--ranks", "7"],
        ["--quiet", "--nproc-per-node", "3", "-m", "package.train"],
    ],
)
def test_the_command_line_that_run_takes(here: Path, words: list[str]) -> None:
    vscode.main(words)
    assert len(ports(here)) == 3
    assert run_task(here)["args"][7:] == words
    # Those of both commands are understood, wherever they stand before the script.
    place = words.index("train.py") if "train.py" in words else words.index("-m")
    place -= words[place - 1] == "--"
    vscode.main([*words[:place], "--debug-port", "6000", *words[place:]])
    assert ports(here) == [6000, 6001, 6002]
    assert run_task(here)["args"][7:] == ["--debug-port", "6000", *words]


def test_options_of_run_without_a_script_are_for_the_open_file(here: Path) -> None:
    vscode.main(["--quiet", "--ranks", "3"])
    assert run_task(here)["args"][7:] == ["--nproc-per-node", "3", "--quiet", "${file}"]


def test_from_a_folder_below(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "src").mkdir()
    monkeypatch.chdir(here / "src")
    vscode.main(["--path-map", ".=/app", "--path-map", "/x=/y", "--", "train.py"])
    assert run_task(here)["options"] == {"cwd": "${workspaceFolder}/src"}
    first = load(here / ".vscode/launch.json")["configurations"][0]
    assert first["pathMappings"] == [
        {"localRoot": "${workspaceFolder}/src", "remoteRoot": "/app"},
        {"localRoot": "/x", "remoteRoot": "/y"},
    ]
    assert run_task(here)["args"][7:] == [
        *["--path-map", "${workspaceFolder}/src=/app", "--path-map", "/x=/y"],
        *["--nproc-per-node", "2", "train.py"],
    ]
    assert str(here / ".vscode/launch.json") in capsys.readouterr().out
    vscode.main(["--workspace", "..", "--", "train.py"])
    assert run_task(here)["args"][7:9] == ["--workspace", "${workspaceFolder}"]


def test_the_name_that_the_shell_has_for_the_folder(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(here)
    monkeypatch.setenv("PWD", str(link))
    assert files.current_directory() == link
    monkeypatch.setenv("PWD", str(tmp_path))
    assert files.current_directory() == here


def test_the_lines_of_problems_match(here: Path) -> None:
    import re

    vscode.main([])
    matcher = run_task(here)["problemMatcher"]
    pattern = matcher["pattern"]
    line = "/a b/train.py:12:1: error DDP901 rank 1 raised ValueError: x: 1"
    found = re.match(pattern["regexp"], line)
    assert found is not None
    assert {key: found[int(group)] for key, group in pattern.items() if key != "regexp"} == {
        "file": "/a b/train.py",
        "line": "12",
        "column": "1",
        "severity": "error",
        "code": "DDP901",
        "message": "rank 1 raised ValueError: x: 1",
    }
    assert matcher["background"]["activeOnStart"] is True
    assert re.match(matcher["background"]["endsPattern"], "ddpdoctor: all ranks listening (2)")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rank", "3"], "unknown option --rank (did you mean --ranks?)"),
        (["--nproc-per-node"], "needs a value"),
        (["--quite", "train.py"], "did you mean --quiet?"),
        (["--ranks"], "option --ranks needs a value"),
        (["--ranks", "--remove"], "option --ranks needs a value"),
        (["--ranks", "0"], "from 1 to 1024, not '0'"),
        (["--ranks=²"], "needs a number"),
        (["--debug-port", "65536"], "from 1 to 65535"),
        (["--debug-port", "65535"], "beyond port 65535"),
        (["--path-map", "here"], "LOCAL=REMOTE"),
        (["--workspace", "nowhere"], "not a directory"),
        (["--remove=1"], "takes no value"),
        (["--remove", "--ranks", "2"], "no other option"),
        (["--"], "no script"),
    ],
)
def test_a_command_line_that_cannot_work(here: Path, words: list[str], message: str) -> None:
    with pytest.raises(DoctorError) as caught:
        vscode.main(words)
    assert message in str(caught.value)
    assert caught.value.status == 2
    assert list((here / ".vscode").iterdir()) == []


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert vscode.main(["--help"]) == 0
    assert capsys.readouterr().out == vscode.HELP
    assert max(map(len, vscode.HELP.splitlines())) < 80


def test_it_loads_nothing_but_the_standard_library() -> None:
    code = "import sys, ddpdoctor.commands.vscode\nprint(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "debugpy", "psutil", "rich", "textual"}
