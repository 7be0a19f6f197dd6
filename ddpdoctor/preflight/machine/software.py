"""Whether the script can run, and whether the installed software fits together."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import platform
import re
import sys
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.user_code import Location
from ddpdoctor.lint import job
from ddpdoctor.preflight.check import (
    Outcome,
    check,
    failure,
    judged,
    passed,
    skipped,
    typed,
    warning,
)
from ddpdoctor.preflight.situation import Situation, gpu_facts, visible_gpus

# -- the script: it is parsed, and never run


_SEARCHED = frozenset({"path", "modules", "meta_path", "path_hooks"})
"""Attributes of ``sys`` that decide what an import finds."""

_CHANGING = frozenset({"rootutils", "pyrootutils"})
"""Packages whose purpose is to change ``sys.path``."""

MAX_MODULES = 200  # Maximum number of the project's modules whose imports are read
_LEVELS = 4  # How many directories above the script are searched for a missing module


@dataclass(frozen=True)
class Import:
    """A top-level module that is imported whenever the script runs."""

    module: str
    line: int


@dataclass(frozen=True)
class Imports:
    """The imports of a script that always run."""

    certain: tuple[Import, ...]
    cut: bool  # Whether more may follow: after a change of ``sys.path`` imports cannot be resolved


def imports_of(tree: ast.Module, folder: Path) -> Imports:
    """Return the imports that always run, up to where the script changes ``sys.path`` or the like.

    ``folder`` is where Python looks first.
    """
    found: list[Import] = []
    known: set[str] = set()
    for node in tree.body:
        new = list(_imported(node))
        found += new
        modules = {each.module for each in new} - known
        known |= modules
        if _changes_search(node) or any(_changes_when_imported(each, folder) for each in modules):
            return Imports(tuple(found), cut=True)
    return Imports(tuple(found), cut=False)


def exists(module: str, folder: Path) -> bool:
    """Return whether Python would find a top-level module."""
    if module in sys.builtin_module_names or module in sys.stdlib_module_names:
        return True
    return _top(module, [str(folder)]) is not None


def nearby(module: str, folder: Path) -> Path | None:
    """Return the directory near the script, or the working one, that has a missing module."""
    try:
        here = Path.cwd()
        above = [folder.resolve(), *folder.resolve().parents][:_LEVELS]
    except OSError:
        return None
    for root in (here, *above):
        for each in (root, root / "src"):
            if (each / f"{module}.py").is_file() or (each / module / "__init__.py").is_file():
                return each
    return None


def module_spec(name: str) -> ModuleSpec | None:
    """Return where ``python -m name`` would find a module, without running its parents."""
    first, *rest = name.split(".")
    # With ``-m`` the working directory comes first.
    spec = _top(first, [""])
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # Search by the last name. A dotted one would import the parent.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec


def _top(module: str, folders: list[str]) -> ModuleSpec | None:
    try:
        spec = PathFinder.find_spec(module, [*folders, *sys.path])
        # An editable installation has its own finder.
        return spec or importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        # It is loaded already in an unusual way. A job can probably import it.
        return ModuleSpec(module, None)


def _imported(node: ast.stmt) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name.partition(".")[0], node.lineno)
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        yield Import(node.module.partition(".")[0], node.lineno)
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        # Within contextlib.suppress the script may survive a missing module.
        survives = any("suppress" in ast.dump(item.context_expr) for item in node.items)
        for each in () if survives else node.body:
            yield from _imported(each)


def _changes_search(node: ast.stmt) -> bool:
    """Return whether a statement changes what an import finds."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            on_sys = each.value.id == "sys" and each.attr in _SEARCHED
            if on_sys or each.attr == "addsitedir":
                return True
        if isinstance(each, ast.ImportFrom) and each.module == "sys":
            changed = any(alias.name in _SEARCHED for alias in each.names)
            if changed:
                return True
    return False


def _changes_when_imported(module: str, folder: Path) -> bool:
    """Return whether importing a module changes what later imports find."""
    if module in _CHANGING:
        return True
    for path in (folder / f"{module}.py", folder / module / "__init__.py"):
        try:
            return b"sys.path" in path.read_bytes()
        except OSError:
            continue
    return False


DISTRIBUTIONS = {
    "Crypto": "pycryptodome", "PIL": "pillow", "attr": "attrs", "bs4": "beautifulsoup4",
    "cv2": "opencv-python", "dateutil": "python-dateutil", "dotenv": "python-dotenv",
    "faiss": "faiss-cpu", "fitz": "pymupdf", "git": "gitpython", "hydra": "hydra-core",
    "pkg_resources": "setuptools", "serial": "pyserial", "skimage": "scikit-image",
    "sklearn": "scikit-learn", "yaml": "pyyaml",
}  # fmt: skip
"""The package that provides a module with another name."""

_OWN = frozenset({
    "clip", "common", "config", "configs", "core", "data", "dataset", "engine",
    "helper", "helpers", "layers", "lib", "loss", "losses", "metrics", "misc", "model", "models",
    "modules", "networks", "nets", "src", "tools", "train", "trainer", "util", "utils",
})  # fmt: skip
"""Names that projects give to their own modules. On PyPI they are other packages."""


@check("script", "DDP016")
def script(situation: Situation) -> Outcome:
    """The script does not exist, has a syntax error, or imports a missing module.

    What it finds
        A script or module that cannot be found or read, a syntax error, or a top-level import of a
        module that this Python does not have, in the script or in a module beside it that it
        imports. Errors of `ddpdoctor lint` are warnings here, with their own codes.

    Why it is bad
        Every rank spends seconds importing torch before it fails, and the message is printed once
        per rank.

    How to fix it
        Correct the path or the line, or install the missing package on every node.

    Example
        Wrong: `import wandb` in an environment without wandb.
        Right: `pip install wandb`, or an import inside `try`.

    When it stays silent
        For imports inside functions, `try` or `if`, for imports after a change of `sys.path`, for
        submodules of packages that are installed, and if no script is given. The script is parsed,
        never executed.
    """
    options = situation.options
    if not options.script:
        return skipped("no script named: ddpdoctor check -- train.py")
    name = options.script[0]
    path, folder = Path(name), Path(name).parent
    if options.module:
        spec, problem = module_spec(name), f"there is no module {name}"
        if spec is not None and spec.submodule_search_locations is not None:
            spec = module_spec(f"{name}.__main__")
            problem = f"{name} is a package without __main__.py: it cannot be run"
        if spec is None:
            missing = failure(
                problem,
                fix="Check its name, or start the job where it can be imported.",
                paste=typed("python -m {} --help", name),
            )
            return judged(f"no module {name}", [missing])
        if spec.origin is None or not spec.origin.endswith(".py"):
            return skipped(f"{name} is not Python source")
        path, folder = Path(spec.origin), Path()
    else:
        if path.is_dir():
            path = path / "__main__.py"
            folder = path.parent
        executable = path.suffix != ".py" and path.is_file() and os.access(path, os.X_OK)
        if options.program or executable:
            return skipped(f"{name} is a program, not a Python script")
        if path.exists() and not path.is_file():
            return skipped(f"{name} is not a regular file, and can be read only once")
    try:
        source = path.read_bytes()
    except OSError as error:
        shown = str(path) if options.module else name
        return judged(f"{name} cannot be read", [_unreadable(shown, error)])
    if zipfile.is_zipfile(path):
        return skipped(f"{name} is an archive")
    if source.startswith(importlib.util.MAGIC_NUMBER):
        return skipped(f"{name} is compiled")
    return _examined(path, source, folder)


def _unreadable(name: str, error: OSError) -> Finding:
    import difflib

    folder = Path(name).parent
    close: list[str] = []
    if isinstance(error, FileNotFoundError) and folder.is_dir():
        here = [each.name for each in folder.iterdir() if each.suffix == ".py"]
        close = difflib.get_close_matches(Path(name).name, here, n=1)
    hint = f"; did you mean {folder / close[0]}?" if close else ""
    return failure(
        f"the script {name} cannot be read: {(error.strerror or str(error)).lower()}",
        fix=f"Check the path{hint}" if hint else "Check the path and the working directory.",
        paste=typed("ls -l {}", folder / close[0] if close else folder),
    )


def _examined(path: Path, source: bytes, folder: Path) -> Outcome:
    """Judge a script. ``folder`` is where Python looks first when it runs."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source, str(path))
            compile(source, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        finding = failure(
            f"{path} is not valid Python {sys.version_info[0]}.{sys.version_info[1]}: "
            f"{getattr(error, 'msg', None) or error}",
            location=Location(str(path), line),
            fix="Correct the line.",
            paste=typed("python -m py_compile {}", path),
        )
        return judged(f"{path.name} does not parse", [finding])
    found = imports_of(tree, folder)
    modules: dict[str, Import] = {}
    for each in found.certain:
        modules.setdefault(each.module, each)
    missing = [(path, each) for name, each in modules.items() if not exists(name, folder)]
    if not found.cut:
        missing += _missing_inside(list(modules), folder)
    until = " up to where sys.path is changed" if found.cut else ""
    if not missing:
        if misuse := _misuse(path):
            return judged(f"{path.name} parses, but misuses DDP; it was not run", misuse)
        imports = f"{len(modules)} imports{until}"
        return passed(f"{path.name} parses, and its {imports} are there; it was not run")
    return judged(
        f"{len(missing)} of {len(modules)} imports of {path.name}{until} are missing",
        [_missing(source, folder, each) for source, each in missing],
    )


def _misuse(path: Path) -> list[Finding]:
    """Return the errors that `ddpdoctor lint` finds. They are not faults of the machine."""
    try:
        found = job.errors(str(path))
    except Exception:
        return []
    paste = typed("ddpdoctor lint {}", path)
    return [replace(each, severity=Severity.WARNING, paste=paste) for each in found]


def _missing_inside(modules: list[str], folder: Path) -> list[tuple[Path, Import]]:
    """Return the missing imports of modules in the script's folder, and of those they import."""
    missing, seen, left = [], set(modules), list(modules)
    while left and len(seen) < MAX_MODULES:
        name = left.pop()
        for path in (folder / f"{name}.py", folder / name / "__init__.py"):
            try:
                tree = ast.parse(opening.contents(path, opening.MOST_PARSED, links=True))
            except (OSError, SyntaxError, ValueError, RecursionError):
                # A module that does not parse may be written for another Python.
                continue
            for each in imports_of(tree, folder).certain:
                if each.module not in seen:
                    seen.add(each.module)
                    left.append(each.module)
                    if not exists(each.module, folder):
                        missing.append((path, each))
            break
    return missing


def _missing(path: Path, folder: Path, each: Import) -> Finding:
    root = nearby(each.module, folder)
    if root is not None:
        fix = f"It is in {root}, where Python does not look: add that to PYTHONPATH, on every node."
        paste = typed("export PYTHONPATH={}${{PYTHONPATH:+:$PYTHONPATH}}", root)
    elif each.module in _OWN:
        fix = "It looks like a module of the project: add its folder to PYTHONPATH. To find it:"
        paste = typed("find . -name {}.py -o -name {} -type d", each.module, each.module)
    else:
        fix = "Install it in the environment of the job, on every node, or correct PYTHONPATH."
        name = DISTRIBUTIONS.get(each.module, each.module)
        paste = typed("{} -m pip install {}", sys.executable, name)
    return failure(
        f"{path.name} imports {each.module}, which this Python ({sys.executable}) does not find",
        location=Location(str(path), each.line),
        fix=fix,
        paste=paste,
        about=each.module,
    )


# -- the installed software: read from files, without importing it


@dataclass(frozen=True)
class Torch:
    """The installed torch, such as ``2.13.0+cpu``, and the CUDA or ROCm it was built for."""

    folder: Path
    version: str
    cuda: str = ""
    hip: str = ""


@cache
def installed_torch() -> Torch | None:
    """Return the torch that a job in this interpreter would import; None if there is none."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        with contextlib.suppress(OSError):
            text = (Path(folder) / "version.py").read_text()
            pattern = r"^(\w+)\s*(?::[^=\n]*)?=\s*['\"]([^'\"]*)['\"]"
            found = dict(re.findall(pattern, text, re.MULTILINE))
            version, cuda, hip = (found.get(name, "") for name in ("__version__", "cuda", "hip"))
            return Torch(Path(folder), version, cuda, hip)
    return None


@cache
def torchrun_picks_a_port() -> bool:
    """Return whether, on one machine, torchrun picks a free port by default instead of 29500.

    Since torch 2.13 it turns its static rendezvous into one at ``localhost:0``.
    """
    found = installed_torch()
    if found is None:
        return False
    with contextlib.suppress(OSError):
        text = (found.folder / "distributed" / "run.py").read_text()
        return bool(re.search(r"args\.master_port is None\s*\)?\s*:", text))
    return False


@dataclass(frozen=True)
class Versions:
    """The installed versions, or empty texts, and the newest CUDA that the driver supports."""

    python: str
    torch: str
    cuda: str
    nccl: str
    driver: str
    cuda_of_driver: str
    pynvml: str
    hip: str = ""


def versions(situation: Situation) -> Versions:
    """Read the installed versions from files and from the driver, without importing torch."""
    torch = installed_torch()
    facts = situation.shared(gpu_facts)
    return Versions(
        python=platform.python_version(),
        torch=torch.version if torch else "",
        cuda=torch.cuda if torch else "",
        nccl=_installed("nvidia-nccl-cu13") or _installed("nvidia-nccl-cu12") or "",
        driver=facts.driver,
        cuda_of_driver=facts.cuda,
        pynvml=_installed("pynvml"),
        hip=torch.hip if torch else "",
    )


def _installed(package: str) -> str:
    """Return the version of an installed package; empty if it is missing."""
    prefix = package.replace("-", "_") + "-"
    if not any(name.startswith(prefix) for name in _folders()):
        return ""
    # Imported here because it is slow to import and rarely needed.
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@cache
def _folders() -> frozenset[str]:
    """Return the lower-case names in all directories that Python imports from."""
    found: set[str] = set()
    for folder in sys.path:
        with contextlib.suppress(OSError):
            found.update(name.lower() for name in os.listdir(folder or "."))
    return frozenset(found)


@check("versions", "DDP014")
def version_fit(situation: Situation) -> Outcome:
    """torch, CUDA and the NVIDIA driver do not match, or torch is missing.

    What it finds
        A missing torch. A torch without CUDA on a machine with NVIDIA GPUs. A torch built for a
        newer major version of CUDA than the driver supports. The deprecated package pynvml (below
        version 12), which overwrites files of nvidia-ml-py.

    Why it is bad
        The job fails with "The NVIDIA driver on your system is too old", or silently trains on the
        CPU.

    How to fix it
        Install a torch build that matches the driver, or a newer driver.

    Example
        Wrong: torch for CUDA 13 with driver 550, which supports CUDA 12.4.
        Right: torch for CUDA 12 with that driver.

    When it stays silent
        For a newer minor version of CUDA than the driver's, which NVIDIA's minor version
        compatibility allows. For a torch without CUDA on a machine without GPUs.
    """
    found = versions(situation)
    without = f"ROCm {found.hip}" if found.hip else "no CUDA"
    supports = f" (CUDA {found.cuda_of_driver})" if found.cuda_of_driver else ""
    parts = (
        f"Python {found.python}",
        f"torch {found.torch}" if found.torch else "no torch",
        f"CUDA {found.cuda}" if found.cuda else without,
        f"NCCL {found.nccl}" if found.nccl else "",
        f"driver {found.driver}{supports}" if found.driver else "",
    )
    return judged(", ".join(filter(None, parts)), judge(found, situation.shared(visible_gpus)))


def judge(found: Versions, gpus: int) -> Iterator[Finding]:
    """Yield the mismatches, for a job that would see this many GPUs."""
    if not found.torch:
        yield failure(
            "torch is not installed in this Python",
            fix="Install it, or run ddpdoctor in the environment of the job.",
            paste="pip install torch",
            about="torch",
        )
    elif gpus and not found.cuda and not found.hip:
        yield warning(
            f"torch {found.torch} is built without CUDA, and {gpus} GPUs stay unused",
            fix="Install the build of torch for this driver.",
            paste="pip install --force-reinstall torch",
            about="no CUDA",
        )
    elif gpus and found.cuda and found.cuda_of_driver:
        wanted, has = _major(found.cuda), _major(found.cuda_of_driver)
        if wanted > has > 0:
            yield failure(
                f"torch {found.torch} is built for CUDA {found.cuda}, and driver {found.driver} "
                f"runs CUDA {found.cuda_of_driver} at most",
                fix=f"Install a torch for CUDA {has}, or a newer driver.",
                paste="nvidia-smi --query-gpu=driver_version --format=csv",
                about="driver",
            )
    if found.pynvml and _major(found.pynvml) < 12:
        yield warning(
            f"the deprecated package pynvml {found.pynvml} overwrites files of nvidia-ml-py",
            fix="Remove it, and reinstall nvidia-ml-py.",
            paste="pip uninstall -y pynvml && pip install --force-reinstall nvidia-ml-py",
            about="pynvml",
        )


def _major(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isdigit() else 0
