"""Whether the script can be read, parsed and would find what it imports. It is not run."""

from __future__ import annotations

import ast
import importlib.util
import os
import shlex
import sys
import warnings
import zipfile
from pathlib import Path

from ddpdoctor.core.finding import Finding, Location, Severity
from ddpdoctor.preflight.check import Outcome, check, judged, passed, skipped
from ddpdoctor.preflight.machine.imports import Import, exists, imports_of, module_spec, nearby
from ddpdoctor.preflight.situation import Situation

DISTRIBUTIONS = {
    "Crypto": "pycryptodome", "PIL": "pillow", "attr": "attrs", "bs4": "beautifulsoup4",
    "cv2": "opencv-python", "dateutil": "python-dateutil", "dotenv": "python-dotenv",
    "faiss": "faiss-cpu", "fitz": "pymupdf", "git": "gitpython", "hydra": "hydra-core",
    "pkg_resources": "setuptools", "serial": "pyserial", "skimage": "scikit-image",
    "sklearn": "scikit-learn", "yaml": "pyyaml",
}  # fmt: skip
"""What pip calls a module that others publish under its own name, or nobody does."""

_OWN = frozenset({
    "clip", "common", "config", "configs", "core", "data", "dataset", "engine",
    "helper", "helpers", "layers", "lib", "loss", "losses", "metrics", "misc", "model", "models",
    "modules", "networks", "nets", "src", "tools", "train", "trainer", "util", "utils",
})  # fmt: skip
"""Names that a project gives to modules of its own. What pip has under them is something else."""


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
        About imports within functions, `try`, and `if`, about those that come after a change of
        `sys.path`, about parts of packages that are there, and when no script was named. What the
        script runs is not executed.

    Since
        0.1.0
    """
    if not situation.options.script:
        return skipped("no script named: ddpdoctor check -- train.py")
    name = situation.options.script[0]
    if situation.options.module:
        return _module(name)
    if situation.options.program:
        return skipped(f"{name} is a program, not a Python script")
    path = Path(name)
    if path.is_dir():
        path = path / "__main__.py"
    if path.suffix != ".py" and path.is_file() and os.access(path, os.X_OK):
        return skipped(f"{name} is a program, not a Python script")
    if path.exists() and not path.is_file():
        return skipped(f"{name} is no file, and can be read only once")
    try:
        source = path.read_bytes()
    except OSError as error:
        return judged(f"{name} cannot be read", [_unreadable(name, error)])
    if zipfile.is_zipfile(path):
        return skipped(f"{name} is an archive")
    if source.startswith(importlib.util.MAGIC_NUMBER):
        return skipped(f"{name} is compiled")
    return _examined(path, source, path.parent)


def _module(name: str) -> Outcome:
    spec = module_spec(name)
    if spec is None:
        return _no_module(name, f"there is no module {name}")
    if spec.submodule_search_locations is not None:
        spec = module_spec(f"{name}.__main__")
        if spec is None:
            return _no_module(name, f"{name} is a package without __main__.py: it cannot be run")
    if spec.origin is None or not spec.origin.endswith(".py"):
        return skipped(f"{name} is no Python source")
    path = Path(spec.origin)
    try:
        source = path.read_bytes()
    except OSError as error:
        return judged(f"{name} cannot be read", [_unreadable(str(path), error)])
    return _examined(path, source, Path())


def _no_module(name: str, message: str) -> Outcome:
    finding = Finding(
        "DDP016",
        Severity.ERROR,
        message,
        fix="Check its name, or start the job where it can be imported.",
        paste=f"python -m {shlex.quote(name)} --help",
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
        paste=f"ls -l {shlex.quote(str(folder / close[0] if close else folder))}",
    )


def _examined(path: Path, source: bytes, folder: Path) -> Outcome:
    """Judge a script; ``folder`` is where Python looks first when it runs."""
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
            paste=f"python -m py_compile {shlex.quote(str(path))}",
        )
        return judged(f"{path.name} does not parse", [finding])
    found = imports_of(tree, folder)
    modules: dict[str, Import] = {}
    for each in found.certain:
        modules.setdefault(each.module, each)
    missing = [each for name, each in modules.items() if not exists(name, folder)]
    until = " up to where sys.path is changed" if found.cut else ""
    if not missing:
        imports = f"{len(modules)} imports{until}"
        return passed(f"{path.name} parses, and its {imports} are there; it was not run")
    return judged(
        f"{len(missing)} of {len(modules)} imports of {path.name}{until} are missing",
        [_missing(path, folder, each) for each in missing],
    )


def _missing(path: Path, folder: Path, each: Import) -> Finding:
    root = nearby(each.module, folder)
    quoted = shlex.quote(each.module)
    if root is not None:
        fix = f"It is in {root}, where Python does not look: add that to PYTHONPATH, on every node."
        paste = f"export PYTHONPATH={shlex.quote(str(root))}${{PYTHONPATH:+:$PYTHONPATH}}"
    elif each.module in _OWN:
        fix = "It looks like a module of the project: add its folder to PYTHONPATH. To find it:"
        paste = f"find . -name {quoted}.py -o -name {quoted} -type d"
    else:
        fix = "Install it in the environment of the job, on every node, or correct PYTHONPATH."
        name = DISTRIBUTIONS.get(each.module, each.module)
        paste = f"{shlex.quote(sys.executable)} -m pip install {shlex.quote(name)}"
    return Finding(
        "DDP016",
        Severity.ERROR,
        f"{path.name} imports {each.module}, which this Python ({sys.executable}) does not find",
        location=Location(str(path), each.line),
        fix=fix,
        paste=paste,
        about=each.module,
    )
