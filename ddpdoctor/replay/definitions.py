"""Take the classes and functions of a script without running it.

A model that is declared in the script itself is pickled as a class of ``__main__``. The script's
imports, classes, functions and constants are executed, and nothing else of it.
"""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "__ddpdoctor_main__"
"""Name of the module with the script's definitions, which ``if __name__ == ...`` tells apart."""

_KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Definitions:
    """What a script declares, executed when it is first needed."""

    def __init__(self, script: str) -> None:
        self.script = script
        self._module: ModuleType | None = None

    def find(self, name: str) -> Any:
        """Return a class or function of the script.

        Raises:
            AttributeError: The script declares no such name at its top level.
            Exception: An import of the script fails, whatever that raises.
        """
        if self._module is None:
            tree = ast.parse(Path(self.script).read_bytes(), self.script)
            tree.body = [
                each for each in tree.body if isinstance(each, _KEPT) or _is_constant(each)
            ]
            module = ModuleType(MODULE)
            module.__file__ = self.script
            exec(compile(tree, self.script, "exec", dont_inherit=True), module.__dict__)
            self._module = module
        found: Any = self._module
        for part in name.split("."):
            found = getattr(found, part)
        return found


def _is_constant(statement: ast.stmt) -> bool:
    """Return whether a statement assigns literals: ``HIDDEN = 64``."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
        return False
    try:
        ast.literal_eval(statement.value)
    except ValueError:
        return False
    return True
