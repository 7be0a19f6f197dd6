"""Whether the script can be read, parsed and would find what it imports. It is not run."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.finding import Finding, Location, Severity
from ddpdoctor.preflight.check import Outcome, check, judged, passed, skipped
from ddpdoctor.preflight.situation import Situation


@dataclass(frozen=True)
class _Import:
    """A module that is imported whenever the script runs."""

    module: str
    line: int


@check("script", "DDP016")
def script(situation: Situation) -> Outcome:
    """The script does not exist, does not parse, or imports what is not there.

    What it finds
        A script or module that cannot be found or read, a syntax error, and top-level imports of
        modules that this Python does not find.

    Why it is bad
        Every rank spends seconds on importing torch to find out, and the message comes N times.

    How to fix it
        Correct the path or the line, or install the missing package on every node.

    Example
        Wrong: `import wandb` in an environment without wandb.
        Right: `pip install wandb`, or an import within `try`.

    When it stays silent
        About imports within functions, `try`, and `if`, about parts of packages that are there, and
        when no script was named. What the script runs is not executed.

    Since
        0.1.0
    """
    if not situation.options.script:
        return skipped("no script named: ddpdoctor check -- train.py")
    name = situation.options.script[0]
    if situation.options.module:
        return _module(name)
    path = Path(name)
    if path.is_dir():
        path = path / "__main__.py"
    if path.suffix != ".py" and path.is_file() and os.access(path, os.X_OK):
        return skipped(f"{name} is a program, not a Python script")
    try:
        source = path.read_bytes()
    except OSError as error:
        return judged(f"{name} cannot be read", [_unreadable(name, error)])
    if zipfile.is_zipfile(path):
        return skipped(f"{name} is an archive")
    return _examined(path, source)


def _module(name: str) -> Outcome:
    roots = [os.getcwd(), *sys.path]
    parts = name.split(".")
    for root in roots:
        stem = Path(root, *parts)
        for path in (stem.with_name(f"{stem.name}.py"), stem / "__main__.py"):
            if path.is_file():
                return _examined(path, path.read_bytes())
    finding = Finding(
        "DDP016",
        Severity.ERROR,
        f"there is no module {name}",
        fix="Check its name, or start the job where it can be imported.",
        paste=f"python -c 'import {parts[0]}'",
    )
    return judged(f"no module {name}", [finding])


def _unreadable(name: str, error: OSError) -> Finding:
    import difflib

    folder = Path(name).parent
    close: list[str] = []
    if isinstance(error, FileNotFoundError) and folder.is_dir():
        here = [each.name for each in folder.iterdir() if each.suffix == ".py"]
        close = difflib.get_close_matches(Path(name).name, here, n=1)
    hint = f"; did you mean {folder / close[0]}?" if close else ""
    return Finding(
        "DDP016",
        Severity.ERROR,
        f"the script {name} cannot be read: {(error.strerror or str(error)).lower()}",
        fix=f"Check the path{hint}" if hint else "Check the path and the working directory.",
        paste=f"ddpdoctor run {folder / close[0]}" if close else f"ls -l {folder}",
    )


def _examined(path: Path, source: bytes) -> Outcome:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source, str(path))
            compile(source, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        finding = Finding(
            "DDP016",
            Severity.ERROR,
            f"{path} is no Python that {sys.version_info[0]}.{sys.version_info[1]} understands: "
            f"{getattr(error, 'msg', None) or error}",
            location=Location(str(path), line),
            fix="Correct the line.",
            paste=f"python -m py_compile {path}",
        )
        return judged(f"{path.name} does not parse", [finding])
    wanted = list(_imports(tree.body))
    missing = [each for each in wanted if not _exists(each.module, path.parent)]
    modules = len({each.module for each in wanted})
    if not missing:
        return passed(f"{path.name} parses, and its {modules} imports are there; it was not run")
    return judged(
        f"{len(missing)} of {modules} imports of {path.name} are missing",
        [_missing(path, each) for each in {each.module: each for each in missing}.values()],
    )


def _imports(body: list[ast.stmt]) -> Iterator[_Import]:
    """The modules that these statements import for certain, by their first name."""
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _Import(alias.name.partition(".")[0], node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield _Import(node.module.partition(".")[0], node.lineno)
        elif isinstance(node, (ast.With, ast.AsyncWith)) and not _suppresses(node):
            yield from _imports(node.body)


def _suppresses(node: ast.With | ast.AsyncWith) -> bool:
    """Whether a ``with`` may be there to survive a missing module."""
    return any("suppress" in ast.dump(item.context_expr) for item in node.items)


def _exists(module: str, folder: Path) -> bool:
    """Whether Python would find a top-level module; nothing is imported."""
    if module in sys.builtin_module_names or module in sys.stdlib_module_names:
        return True
    if (folder / f"{module}.py").exists() or (folder / module).is_dir():
        return True
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):
        # Loaded already in an odd way; a job may well import it.
        return True


def _missing(path: Path, each: _Import) -> Finding:
    return Finding(
        "DDP016",
        Severity.ERROR,
        f"{path.name} imports {each.module}, which this Python ({sys.executable}) does not find",
        location=Location(str(path), each.line),
        fix="Install it in the environment of the job, on every node, or correct PYTHONPATH.",
        paste=f"{sys.executable} -m pip install {each.module}",
        about=each.module,
    )
