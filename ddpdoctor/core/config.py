"""Options from a file: ``[tool.ddpdoctor]`` in pyproject.toml, or ``ddpdoctor.toml``.

The nearest of them counts, from the working directory upwards. What is typed counts instead of what
stands there. Since an option can name a command to run (``--notify``), a file above the working
directory that belongs to somebody else is not read.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ddpdoctor.core import opening
from ddpdoctor.core.commands import COMMANDS
from ddpdoctor.core.control_characters import shown
from ddpdoctor.core.users import whose

if TYPE_CHECKING:
    from ddpdoctor.core.options import Parser, Value

FILE, PROJECT = "ddpdoctor.toml", "pyproject.toml"
SHARED = ("select", "ignore")
"""Options that stand above the commands' tables, and count for each command that has them."""

_MOST = 1 << 20
_TABLE = re.compile(rb"^\s*\[\s*tool\s*\.\s*ddpdoctor\s*[\].]", re.MULTILINE)


def configured(parser: Parser) -> dict[str, Any]:
    """The options of a command that a file sets, by name.

    Raises:
        DoctorError: The file is no TOML, or holds what no option takes.
    """
    found = _nearest(parser)
    if found is None:
        return {}
    path, table = found
    strange = [key for key in table if key not in (*SHARED, *COMMANDS)]
    if strange:
        raise parser.wrong(
            f"{path}: there is no {strange[0]}",
            f"options of a command stand under {_header(path, parser.command)}",
        )
    options: dict[str, Any] = {}
    for key in SHARED:
        if key in table and f"--{key}" in parser.options:
            options |= _option(parser, path, key, table[key])
    own = table.get(parser.command, {})
    if not isinstance(own, dict):
        raise parser.wrong(f"{path}: {parser.command} needs options, not {own!r}")
    for key, value in own.items():
        options |= _option(parser, path, key, value)
    return options


def _option(parser: Parser, path: str, key: str, value: Any) -> dict[str, Any]:
    name = f"--{key.replace('_', '-')}"
    if name not in parser.options or name == "--help":
        error = parser.unknown(name, parser.options)
        raise parser.wrong(f"{path}: {error.message}", error.hint)
    takes: Value | None = parser.options[name]
    if isinstance(value, bool) and (takes is None or takes.omitted is not None):
        return {name: True if takes is None else takes.omitted} if value else {}
    if takes is None:
        raise parser.wrong(f"{path}: {key} needs true or false, not {value!r}")
    try:
        if isinstance(value, (bool, dict)):
            raise ValueError(value)
        if takes.repeated:
            several = value if isinstance(value, list) else [value]
            return {name: [takes.convert(str(each)) for each in several]}
        words = map(str, value) if isinstance(value, list) else [str(value)]
        return {name: takes.convert(",".join(words))}
    except ValueError:
        raise parser.wrong(f"{path}: {key} needs {takes.wanted}, not {value!r}") from None


def _header(path: str, command: str) -> str:
    return f"[tool.ddpdoctor.{command}]" if path.endswith(PROJECT) else f"[{command}]"


# -- the file


def _nearest(parser: Parser) -> tuple[str, Mapping[str, Any]] | None:
    """The nearest file that has options, as a person would name it, and its table."""
    try:
        here = Path.cwd()
        owners = _trusted(here)
    except OSError:
        return None
    for folder in (here, *here.parents):
        for name in (FILE, PROJECT):
            path = folder / name
            try:
                if not path.is_file():
                    continue
                # Of the open file: by then another one may have its name.
                with opening.file(path, links=True) as file:
                    owner = os.fstat(file.fileno()).st_uid
                    text = file.read(_MOST + 1)
            except OSError:
                continue
            if len(text) > _MOST or (name == PROJECT and b"ddpdoctor" not in text):
                continue
            shown_path = os.path.relpath(path)
            if owner not in owners:
                _remark(f"{shown_path} is not read: it belongs to {whose(owner)}")
                continue
            table = _table(parser, shown_path, name, text)
            if table is not None:
                return shown_path, table
    return None


def _trusted(folder: Path) -> set[int]:
    """Whose files are read: one's own, root's, and those of whose code it is that runs here."""
    return {os.getuid(), 0, folder.stat().st_uid}


def _table(parser: Parser, path: str, name: str, text: bytes) -> Mapping[str, Any] | None:
    toml = _toml()
    if toml is None:
        if name == FILE or _TABLE.search(text):
            _remark(f"{path} is not read: this Python has no tomllib; pip install tomli")
        return None
    try:
        table = toml.loads(text.decode())
    except ValueError as error:
        if name == PROJECT and not _TABLE.search(text):
            return None
        raise parser.wrong(f"{path} is no TOML: {error}") from None
    if name == PROJECT:
        tools = table.get("tool")
        table = tools.get("ddpdoctor") if isinstance(tools, dict) else None
    return table if isinstance(table, dict) else None


def _toml() -> ModuleType | None:
    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


_remarked: set[str] = set()


def _remark(text: str) -> None:
    """A line on stderr, once."""
    if text not in _remarked and sys.stderr is not None:
        _remarked.add(text)
        print(f"ddpdoctor: {shown(text)}", file=sys.stderr)
