"""Entries of launch.json for tests."""

from __future__ import annotations

import json
import re
from typing import Any

from ddpdoctor.debug import vscode_configurations
from ddpdoctor.debug.vscode_configurations import ALL, AttachPoint, PathMapping

POINTS = [AttachPoint(rank, "127.0.0.1", 5678 + rank) for rank in (ALL, 0, 1)]
MORE = [AttachPoint(rank, "127.0.0.1", 7000 + rank) for rank in (ALL, 0, 1, 2)]
MAPPINGS = [PathMapping("${workspaceFolder}", "${workspaceFolder}")]


def add(text: str | None) -> str:
    done = vscode_configurations.with_launch_entries(text, POINTS, MAPPINGS)
    assert done is not None
    return done


def independent(text: str) -> Any:
    """The value of a document by other means: comments and trailing commas off, then json."""
    tokens = re.findall(
        r'"(?:\\.|[^"\\])*"|//[^\r\n]*|/\*.*?\*/|[ \t\r\n]+|[\w.+-]+|.',
        text.removeprefix("\ufeff"),
        re.DOTALL,
    )
    kept = [
        token for token in tokens if token.strip(" \t\r\n") and not token.startswith(("//", "/*"))
    ]
    plain = [
        token
        for token, following in zip(kept, [*kept[1:], ""], strict=False)
        if not (token == "," and following in ("]", "}"))
    ]
    return json.loads(" ".join(plain)) if plain else None
