"""The command lines of docs/nodes.md are ones that ``ddpdoctor run`` accepts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ddpdoctor.supervise.command import build
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "nodes.md").read_text()
KUBEFLOW = {"PET_NNODES": "4", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "8"}


def lines() -> list[list[str]]:
    """The words of each command line, from those that are typed and from containers."""
    found = []
    for block in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL):
        text = block.replace("\\\n", " ")
        found += [shlex.split(each) for each in re.findall(r"(?m)ddpdoctor run -.*$", text)]
        for first in re.findall(r"command: \[(.*)\]", text):
            rest = re.findall(r"(?m)^ +- (\S+)$", text.partition("args:")[2])
            found.append([*first.split(", "), *rest])
    return found


@pytest.mark.parametrize("words", lines(), ids=" ".join)
def test_a_command_line_of_the_page_is_accepted(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert words[:2] == ["ddpdoctor", "run"]
    kubeflow = words[2:] == ["--", "train.py"]
    command = build(words[2:], KUBEFLOW if kubeflow else {})
    if "python" in words:
        assert command.argv == ("python", "train.py") and not command.through_torchrun
    else:
        assert command.through_torchrun and not command.one_node
        assert command.local_ranks == 8 and command.script == "train.py"


def test_the_page_has_all_ways_to_start() -> None:
    assert len(lines()) == 7
