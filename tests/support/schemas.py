"""Check JSON against the schemas of the package."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator

from tests.conftest import ROOT

SCHEMAS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text())
    for path in sorted((ROOT / "ddpdoctor" / "schemas").glob("*.json"))
}


def closed(schema: Any) -> Any:
    """The same schema, which also refuses keys that it does not name."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    if "object" in str(schema.get("type")) and isinstance(schema.get("properties"), dict):
        inner["unevaluatedProperties"] = False
    return inner


def check_schema(name: str, document: Any) -> None:
    Draft202012Validator(closed(SCHEMAS[name])).validate(document)
