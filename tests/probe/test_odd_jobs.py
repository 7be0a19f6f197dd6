"""Odd jobs see, print and end the same with ddpdoctor as without; what differs is documented."""

from __future__ import annotations

import json
import re
import sys
from fnmatch import fnmatchcase

import pytest

from tests.conftest import ROOT, Doctor
from tests.support.odd_jobs import ODD, TABLE, VERSIONS, differences, interpreter, seen

PAGE = ROOT / "docs" / "visible.md"
SECTIONS = ("Every Python of a job", "A process that has imported torch", "A rank")
KINDS = ("none", "torch", "rank")
"""What a process is, of which the first one, two or three sections hold."""

SAMPLE = ("plain", "sitecustomize prints", "command", "at_exit", "saved_hook", "exit 3", "SIGTERM")
"""A few jobs, for the tests of every day."""


# -- the same output, the same end


def compare(doctor: Doctor, name: str, version: str) -> None:
    job = TABLE[name]
    if int(version.partition(".")[2]) < job.since:
        pytest.skip(f"from Python 3.{job.since} on")
    python = interpreter(version, job.needs)
    bare, watched = (seen(doctor, job, python, watch=watch) for watch in (False, True))
    assert not differences(bare, watched)


@pytest.mark.parametrize("name", SAMPLE)
def test_same_output_and_status(doctor: Doctor, name: str) -> None:
    compare(doctor, name, "{}.{}".format(*sys.version_info))


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", TABLE)
def test_same_output_and_status_on_each_python(doctor: Doctor, name: str, version: str) -> None:
    compare(doctor, name, version)


# -- what code can see


def facts(doctor: Doctor, python: str, kind: str, watch: bool) -> dict[str, str]:
    """Return what `identities.py` sees, by name."""
    path = doctor.directory / f"facts-{watch}.json"
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=1"] if kind == "rank" else []
    words = [python, *torchrun, str(ODD / "identities.py"), *([] if kind == "none" else [kind])]
    # The job's stderr is a pipe in both.
    command = ["sh", "-c", 'exec "$@" 2>&1 | cat', "sh", *words]
    result = doctor.run(
        *(["--"] if watch else []), *command, env={"ODD_FACTS": str(path)}, watch=watch
    )
    assert path.exists(), result.stdout
    found: dict[str, str] = json.loads(path.read_text())
    return found


def listed(kind: str) -> list[str]:
    """Return the patterns of the facts that differ in such a process by the page."""
    found = []
    for section in SECTIONS[: KINDS.index(kind) + 1]:
        text = PAGE.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
        found += [pattern for row in rows for pattern in re.findall(r"`([^`]+)`", row)]
    return found


def differing(doctor: Doctor, kind: str, python: str) -> set[str]:
    """Return the names of the facts that are not the same with ddpdoctor."""
    bare, watched = (facts(doctor, python, kind, watch) for watch in (False, True))
    return {
        name.removeprefix("at the first line: ").removeprefix("after training: ")
        for name in bare.keys() | watched.keys()
        if bare.get(name) != watched.get(name)
    }


def unlisted(names: set[str], kind: str) -> set[str]:
    """Return the names that the page does not have."""
    return names - {
        name for pattern in listed(kind) for name in names if fnmatchcase(name, pattern)
    }


def test_nothing_but_the_environment_is_visible_without_torch(doctor: Doctor) -> None:
    names = differing(doctor, "none", sys.executable)
    assert "environment PYTHONPATH" in names
    assert not unlisted(names, "none")


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_visible_is_documented(doctor: Doctor, kind: str, version: str) -> None:
    python = interpreter(version, () if kind == "none" else ("torch",))
    names = differing(doctor, kind, python)
    assert not unlisted(names, kind)
    if version == VERSIONS[-1]:
        # Older ones do not have all of it.
        same = [each for each in listed(kind) if not any(fnmatchcase(name, each) for name in names)]
        assert not same, "listed, but not different"
