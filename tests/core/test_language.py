"""The words that people read: the project's former private language does not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddpdoctor.commands.explain import entries
from tests.conftest import ROOT

DIALECT = (
    "told",
    "says again",
    "mend",
    "stands still since",
    "goes apart",
    "of its own",
    "anew",
    "nobody",
    "whereabouts",
)
"""CONTRIBUTING.md lists them, and what to write instead."""

SPOKEN = (*DIALECT, "without a word", "goes around DDP", "never come to it")
"""What pages and guides avoid besides."""

GUIDES = (
    "README.md", "SECURITY.md", "CHANGELOG.md", "docs", "sample_jobs/README.md",
    "benchmarks/README.md",
)  # fmt: skip

AREAS = sorted(
    f"ddpdoctor/{path.name}"
    for path in (ROOT / "ddpdoctor").iterdir()
    if path.is_dir() and any(path.glob("*.py"))
)


def used(text: str, words: tuple[str, ...]) -> list[str]:
    """The banned words in a text, also over the end of a line or within a name."""
    plain = " ".join(re.sub(r"\n *(?:#|- )", " ", text).split())
    return [word for word in words if re.search(rf"(?<![A-Za-z]){word}(?![A-Za-z])", plain, re.I)]


def files(place: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.is_file() else sorted(path.rglob("*.md"))


@pytest.mark.parametrize("code", entries())
def test_pages(code: str) -> None:
    assert not used(entries()[code].page, SPOKEN)


@pytest.mark.parametrize("place", GUIDES)
def test_guides(place: str) -> None:
    found = {str(path): used(path.read_text(), SPOKEN) for path in files(place)}
    assert found
    assert not {path: words for path, words in found.items() if words}


@pytest.mark.parametrize("area", AREAS)
def test_code(area: str) -> None:
    sources = [
        path for ending in ("py", "c", "h", "toml") for path in (ROOT / area).rglob(f"*.{ending}")
    ]
    assert sources
    found = {str(path): used(path.read_text(), DIALECT) for path in sources}
    assert not {path: words for path, words in found.items() if words}


def test_contributing_lists_the_words() -> None:
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    assert f"Not: {', '.join(DIALECT)}." in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The ranks are told.", ["told"]),
        ("_told = 1", ["told"]),
        ("made a file of its\n    own", ["of its own"]),
        ("# Nobody is here", ["nobody"]),
        ("a twofold tolden", []),
    ],
)
def test_words_are_found_in_sentences_and_names(text: str, words: list[str]) -> None:
    assert used(text, DIALECT) == words
