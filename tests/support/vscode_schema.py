"""VS Code's files, and what its schema allows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddpdoctor.debug import vscode_files

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


def load(path: Path) -> Any:
    root = vscode_files.parse_jsonc(path.read_text()).root
    assert root is not None
    return root.value


def ports(workspace: Path) -> list[int]:
    configurations = load(workspace / ".vscode/launch.json")["configurations"]
    ranks = (item for item in configurations if item["name"].startswith("rank "))
    return [item["connect"]["port"] for item in ranks]
