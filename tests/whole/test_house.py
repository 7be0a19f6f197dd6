"""The package stays readable: a file is one subject, and a function is no thicket."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from radon.complexity import cc_visit

from tests.conftest import ROOT

LONGEST = 1000
"""Lines of a file."""

MOST_COMPLEX = 20
"""Of a function, as radon counts: ways through it, each condition within an expression too."""

SOURCES = sorted((ROOT / "ddpdoctor").rglob("*.py"))


def test_no_file_is_too_long_to_read() -> None:
    lines = {str(path): path.read_text().count("\n") for path in SOURCES}
    assert lines
    assert not {path: count for path, count in lines.items() if count > LONGEST}


def tangled(path: Path) -> dict[str, int]:
    found = {each.name: each.complexity for each in cc_visit(path.read_text())}
    return {name: complexity for name, complexity in found.items() if complexity > MOST_COMPLEX}


@pytest.mark.parametrize(
    "room", sorted({path.parent for path in SOURCES}), ids=lambda room: str(room.relative_to(ROOT))
)
def test_no_function_is_too_complex(room: Path) -> None:
    found = {path.name: tangled(path) for path in SOURCES if path.parent == room}
    assert not {path: functions for path, functions in found.items() if functions}


@pytest.mark.parametrize("area", ["diagnose", "lint"])
def test_rules_import_no_rules(area: str) -> None:
    rules = re.compile(r"^from \S+\.rules_?\w* import", re.MULTILINE)
    own = "from ddpdoctor.lint.rules import"  # The registry
    found = {
        str(path): wrong
        for path in (ROOT / "ddpdoctor" / area).rglob("rules*.py")
        if (wrong := [each for each in rules.findall(path.read_text()) if each != own])
    }
    assert not found


def test_a_thicket_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "thicket.py"
    conditions = " or ".join(f"a == {each}" for each in range(MOST_COMPLEX))
    file.write_text(f"def f(a):\n    return {conditions} or a\n")
    assert tangled(file) == {"f": MOST_COMPLEX + 1}
