"""The tutorial and the pages by symptom: what they tell people to type is what works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.commands.completion import parsers
from ddpdoctor.commands.explain import entries
from tests.conftest import LIMIT, ROOT, Doctor

TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
SYMPTOMS = sorted((ROOT / "docs" / "symptoms").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def pattern(lines: list[str]) -> str:
    """What the output has to match: ``...`` stands for any text."""
    return r"[^\n]*\n".join(
        r"[^\n]*".join(re.escape(part) for part in line.split("..."))
        if line != "..."
        else "(?s:.*)"
        for line in lines
    ).replace(r"[^\n]*\n(?s:.*)[^\n]*\n", r"(?s:.*)")


def edited(source: str, diff: str) -> str:
    """A file in which the lines of a diff without positions were replaced."""
    before = "".join(line[1:] + "\n" for line in diff.splitlines() if line[0] != "+")
    after = "".join(line[1:] + "\n" for line in diff.splitlines() if line[0] != "-")
    assert source.count(before) == 1
    return source.replace(before, after)


@pytest.mark.slow
def test_the_tutorial(doctor: Doctor) -> None:
    job = Path(doctor.directory, "train.py")
    ran = 0
    for kind, text in BLOCK.findall(TUTORIAL):
        if kind == "python":
            job.write_text(text)
        elif kind == "diff":
            job.write_text(edited(job.read_text(), text))
        for part in text.split("$ ")[1:] if kind == "console" else ():
            command, *wanted = part.splitlines()
            if command.startswith("pip"):
                continue
            done = subprocess.run(
                re.sub(r"^ddpdoctor", f"{shlex.quote(sys.executable)} -m ddpdoctor", command),
                shell=True,
                cwd=doctor.directory,
                env=doctor.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT,
            )
            assert re.search(pattern(wanted), done.stdout), f"$ {command}\n{done.stdout}"
            ran += 1
    assert ran > 8


@pytest.mark.parametrize("path", SYMPTOMS, ids=lambda path: path.stem)
def test_a_symptom_begins_with_words_of_users_and_ends_with_a_command(path: Path) -> None:
    text = path.read_text()
    assert re.match(r"# [^\n]+\n\n> ", text)
    codes = re.findall(r"\[(DDP\d+)\]\(\.\./rules/(DDP\d+)\.md\)", text)
    assert codes
    assert all(shown == linked and shown in entries() for shown, linked in codes)
    command = re.search(r"^```\nddpdoctor (\w+) (.*)\n```\n\Z", text, re.MULTILINE)
    assert command is not None
    parser = parsers()[command[1]]
    for option in re.findall(r"--[\w-]+", command[2].partition(" -- ")[0]):
        known = option in parser.options or option in ("--nproc-per-node",)
        assert known, option
