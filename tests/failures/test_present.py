"""Which texts a block of a log holds: in C what `bytes.find` finds."""

from __future__ import annotations

import importlib
import os
import random
from typing import Any

import pytest

from ddpdoctor.failures import scan

try:
    compiled: Any = importlib.import_module("ddpdoctor.failures._present")
except ImportError as error:
    compiled, why = None, str(error)
else:
    why = ""

pytestmark = pytest.mark.skipif(compiled is None, reason=f"it is not compiled here: {why}")


def test_it_finds_what_bytes_find_finds() -> None:
    chance = random.Random(7)
    for _ in range(3_000):
        letters = b"abc"[: chance.randint(2, 3)]
        block = bytes(chance.choices(letters, k=chance.randint(0, 40)))
        first = chance.randint(0, 6)
        texts = tuple(
            {
                bytes(chance.choices(letters, k=chance.randint(3, 6)))
                for _ in range(chance.randint(0, 6))
            }
        )
        expected = [text for text in texts if block.find(text, first) >= 0]
        assert compiled.present(block, first, texts) == expected


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((b"block", 0, (b"ab",)), ValueError),
        ((b"block", -1, (b"abc",)), ValueError),
        ((b"block", 0, (b"abc",) * 5_000), ValueError),
        ((b"block", 0, ("abc",)), TypeError),
        (("block", 0, (b"abc",)), TypeError),
        ((b"block", 0, [b"abc"]), TypeError),
    ],
)
def test_what_it_does_not_take(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        compiled.present(*arguments)


def test_a_log_is_scanned_alike_with_and_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("DDPDOCTOR_PURE_PYTHON"):
        pytest.skip("DDPDOCTOR_PURE_PYTHON asks for the one without")
    lines = [b"epoch %d loss 0.5" % number for number in range(9_000)]
    for number, anchor in enumerate(scan.ANCHORS * 20):
        lines[97 * number % len(lines)] = b"said %d: " % number + anchor
    block = b"\n".join(lines) + b"\n"
    found = list(scan.Scan().starts(block, 0))
    assert scan._compiled is not None
    monkeypatch.setattr(scan, "_compiled", None)
    assert list(scan.Scan().starts(block, 0)) == found != []
