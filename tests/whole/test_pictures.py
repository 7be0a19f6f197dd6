"""The pictures of the README are of this ddpdoctor."""

from __future__ import annotations

import html
import re
import sys

import pytest

from tests.conftest import ROOT

PICTURE = ROOT / "docs" / "hang.svg"


def words(picture: str) -> list[str]:
    """What a picture says, without its numbers."""
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", picture)
    said = html.unescape(" ".join(texts))
    # What py-spy shows, where it is installed.
    said = " ".join(re.sub(r"\d+", "0", said).split())
    return re.sub(r"evidence: native frames .*? (?=evidence: )", "", said).split()


def test_the_picture_names_a_hang_and_fetches_nothing() -> None:
    picture = PICTURE.read_text()
    said = " ".join(words(picture))
    assert "error DDP0: rank 0 never joined DDP's all_reduce" in said
    assert "fix: Let every rank call the same collectives" in said
    assert set(re.findall(r"https?://[^\"' <>)]+", picture)) <= {
        "http://www.w3.org/2000/svg", "https://www.textualize.io",
    }  # fmt: skip
    assert "](docs/hang.svg)" in (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_picture_is_what_a_real_run_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.delitem(sys.modules, "pictures", raising=False)
    import importlib

    pictures = importlib.import_module("pictures")
    assert words(pictures.drawn(pictures.hang())) == words(PICTURE.read_text())
