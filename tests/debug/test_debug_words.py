"""What the gateway says to an editor: whose job it is, which rank stops, and what was found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.user_code import Location
from ddpdoctor.debug import dap
from ddpdoctor.debug.clients import Project
from tests.debug.test_debug_seat import Client, Rank

OURS = "rank 0 (ddpdoctor)"


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    found = {name: tmp_path / name for name in ("a", "a/src", "b")}
    for folder in found.values():
        folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to("a")
    names = {name: str(folder) for name, folder in found.items()}
    return {**names, "link": str(tmp_path / "link"), "elsewhere": str(tmp_path / "gone")}


def mapping(folder: str) -> dict[str, object]:
    return {"pathMappings": [{"localRoot": folder, "remoteRoot": folder}]}


@pytest.mark.parametrize(
    ("name", "folder", "mapped", "refused"),
    [
        (OURS, "b", "b", True),
        ("rank 3 on node1 (ddpdoctor, train.py :5678)", "b", "b", True),
        (OURS, "a", "a", False),
        (OURS, "a/src", "a/src", False),
        (OURS, "link", "link", False),
        (OURS, "b", "a", False),  # `attach --write` there
        (OURS, "elsewhere", "elsewhere", False),  # an editor on another machine
        ("my own attach", "b", "b", False),
    ],
)
def test_an_old_entry_of_another_project(
    folders: dict[str, str], name: str, folder: str, mapped: str, refused: bool
) -> None:
    project = Project("train.py", (folders["a"],))
    arguments = {"name": name, "workspaceFolder": folders[folder], **mapping(folders[mapped])}
    why = project.objection(arguments, 5678)
    assert bool(why) == refused
    assert not refused or f"port 5678 belongs to train.py in {folders['a']}" in why


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"name": 7, "workspaceFolder": "/"},
        {"name": OURS, "workspaceFolder": "rel\0ative"},
        {"name": OURS, "workspaceFolder": ["/"]},
        {"name": OURS, "workspaceFolder": "/", "pathMappings": [7, {"remoteRoot": None}]},
    ],
)
def test_arguments_that_say_nothing(arguments: dict[str, Any]) -> None:
    assert Project("train.py", ("/srv/nowhere",)).objection(arguments, 5678) == ""


@pytest.fixture
def rank(tmp_path: Path, folders: dict[str, str]) -> Iterator[Rank]:
    rank = Rank(tmp_path, Project("train.py", (folders["a"],)))
    yield rank
    rank.close()


def test_a_session_of_another_project_and_ones_of_this(
    rank: Rank, folders: dict[str, str], tmp_path: Path
) -> None:
    stale = rank.client()
    assert stale.ask("initialize", adapterID="debugpy")["success"]
    answer = stale.ask("attach", name=OURS, workspaceFolder=folders["b"])
    assert not answer["success"]
    assert answer["body"]["error"]["showUser"] is True
    assert "belongs to train.py" in answer["body"]["error"]["format"]
    assert stale.ask("disconnect")["success"]
    client = rank.client()
    remote = {"localRoot": "/here", "remoteRoot": "/there"}
    client.attach(name=OURS, workspaceFolder=folders["a"], pathMappings=[remote])
    rank.wait_for("attached")
    (thread, *_) = client.ask("threads")["body"]["threads"]
    assert thread["name"] == "rank 0: MainThread"
    rank.gateway.tell("error DDP901: it raised", Location("/there/train.py", 7))
    output = next_event(client, "output", "DDP901")
    assert output["output"] == "ddpdoctor: error DDP901: it raised\n"
    assert (output["source"]["path"], output["line"]) == ("/here/train.py", 7)
    client.send("pause", threadId=thread["id"])
    assert next_event(client, "stopped")["description"] == "rank 0: pause"


@pytest.mark.parametrize(("command", "shown"), [("attach", True), ("next", False)])
def test_only_a_refused_attach_is_shown(command: str, shown: bool) -> None:
    answer, _ = dap.refusal({"command": command}, "the debug session is over")
    assert answer["body"]["error"]["showUser"] is shown


def next_event(client: Client, name: str, text: str = "") -> dict[str, Any]:
    """The body of the next event of this name."""
    while data := client.socket.recv(65536):
        for message in client.decoder.feed(data):
            if message.get("event") == name and text in str(message["body"]):
                body: dict[str, Any] = message["body"]
                return body
    raise AssertionError(f"closed before the event {name}")


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        (dap.event("stopped", {"reason": "exception", "description": "ValueError"}), True),
        (dap.event("stopped", {"reason": "step"}), True),
        (dap.event("continued", {}), False),
        ({"type": "response", "command": "threads", "success": False}, False),
        ({"type": "response", "command": "threads", "body": {"threads": 7}}, False),
    ],
)
def test_the_rank_comes_first(message: dict[str, Any], changed: bool) -> None:
    assert dap.put_rank_first(message, 3) == changed
    if changed:
        assert message["body"]["description"] in ("rank 3: ValueError", "rank 3: step")
