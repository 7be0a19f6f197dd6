"""The rules as a plug-in of flake8."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import ClassVar

from ddpdoctor import __version__
from ddpdoctor.core.finding import Severity
from ddpdoctor.lint.check import UNREADABLE, check
from ddpdoctor.lint.files import SourceFile


class Plugin:
    """Checks one file. flake8 itself reports what does not parse, and handles ``noqa``.

    Args:
        tree: The syntax tree.
        lines: The lines of the file.
        filename: Its name.
    """

    name: ClassVar = "ddpdoctor"
    version: ClassVar = __version__

    def __init__(self, tree: ast.Module, lines: list[str], filename: str) -> None:
        self._file = SourceFile(filename, [each.rstrip("\n") for each in lines], tree)

    def run(self) -> Iterator[tuple[int, int, str, type]]:
        """Yield line, column, text and type of each problem, as flake8 wants them."""
        for each in check([self._file]):
            if each.severity > Severity.INFO and each.code != UNREADABLE:
                yield each.line, each.column - 1, f"{each.code} {each.message}", type(self)
