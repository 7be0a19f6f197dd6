"""What a rank and the command line have to load; the layers are held by import-linter."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ddpdoctor
from tests.conftest import LIMIT

PACKAGE = Path(ddpdoctor.__file__).parent


def typing_only(tree: ast.Module) -> set[ast.AST]:
    """What stands under ``if TYPE_CHECKING:`` and is never run."""
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }


def modules_of(path: Path) -> set[str]:
    """All modules that a file imports, wherever in it."""
    tree = ast.parse(path.read_bytes())
    skipped = typing_only(tree)
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            module = node.module or ""
            if module == "ddpdoctor":
                found |= {f"ddpdoctor.{alias.name}" for alias in node.names}
            else:
                found.add(module)
    return found


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "probe").rglob("*.py")), ids=lambda path: path.name
)
def test_the_probe_names_no_third_party_but_torch_inside_functions(path: Path) -> None:
    tree = ast.parse(path.read_bytes())
    top = ast.Module([node for node in tree.body if not isinstance(node, ast.FunctionDef)], [])
    roots = {module.split(".")[0] for module in modules_of(path)}
    debugger = {"debugpy", "pydevd", "pydevd_tracing", "_pydev_bundle", "_pydevd_bundle"}
    # The debugger's own module, whose functions run only once somebody attaches.
    more = debugger if path.name == "debugpy_private.py" else set()
    # The entry ends with what Python would have imported in its place.
    entry = {"sitecustomize", "ddpdoctor_entry"} if path.parent.name == "entry" else set()
    assert roots <= {*sys.stdlib_module_names, "ddpdoctor", "torch", *more, *entry}
    for node in ast.walk(top):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not _inside_function(top, node):
            names = [alias.name for alias in node.names]
            module = node.module if isinstance(node, ast.ImportFrom) else names[0]
            assert (module or "").split(".")[0] not in {"torch", *more}


def _inside_function(tree: ast.Module, wanted: ast.AST) -> bool:
    return any(
        wanted in ast.walk(node)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )


def test_the_wire_needs_nothing_but_the_standard_library() -> None:
    for path in sorted((PACKAGE / "run").rglob("*.py")):
        roots = {module.split(".")[0] for module in modules_of(path)}
        assert roots - {"ddpdoctor"} <= sys.stdlib_module_names, path


def test_top_never_imports_torch() -> None:
    for path in sorted((PACKAGE / "top").rglob("*.py")):
        assert "torch" not in {module.split(".")[0] for module in modules_of(path)}, path


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter loads for a statement, beyond those of its start."""
    code = (
        f"import json, sys\nbefore = set(sys.modules)\n{statement}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def third_party(modules: set[str]) -> set[str]:
    roots = {module.split(".")[0] for module in modules}
    # An editable installation brings a finder of its own.
    return {
        root
        for root in roots
        if root not in sys.stdlib_module_names
        and root != "ddpdoctor"
        and not root.startswith(("_virtualenv", "__editable__", "_editable", "_sysconfigdata"))
    }


@pytest.mark.parametrize(
    "statement",
    [
        "import ddpdoctor.probe.process",
        "import ddpdoctor.run.records.typed_json, ddpdoctor.run.status",
        "import ddpdoctor.probe.runtime.watch",
    ],
)
def test_a_rank_loads_the_probe_and_nothing_else_of_ours(statement: str) -> None:
    loaded = loaded_by(statement)
    assert third_party(loaded) == set()
    mine = {module for module in loaded if module.split(".")[0] == "ddpdoctor"}
    allowed = ("ddpdoctor.probe", "ddpdoctor.run", "ddpdoctor.core")
    assert {module for module in mine if not module.startswith(allowed)} <= {"ddpdoctor"}


def test_the_start_of_the_probe_loads_nothing_that_a_job_would_notice() -> None:
    loaded = loaded_by("import ddpdoctor.probe.process")
    heavy = {"multiprocessing", "asyncio", "logging", "http", "unittest", "concurrent", "ctypes"}
    assert not heavy & {module.split(".")[0] for module in loaded}


def test_the_command_line_is_light() -> None:
    roots = {module.split(".")[0] for module in loaded_by("import ddpdoctor.cli")}
    assert not roots & {"torch", "textual", "debugpy", "pynvml", "rich", "psutil"}


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["run", "--help"], ["check", "--help"], ["check", "--list"]],
)
def test_help_is_light(words: list[str]) -> None:
    statement = (
        "from ddpdoctor.cli import main\nimport contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"    main({words!r})"
    )
    roots = {module.split(".")[0] for module in loaded_by(statement)}
    assert not roots & {"torch", "textual", "debugpy", "pynvml"}


def test_the_entry_needs_no_installed_ddpdoctor(tmp_path: Path) -> None:
    """The interpreter of a job may be one in which ddpdoctor was never installed."""
    entry = PACKAGE / "probe" / "entry"
    code = (
        "import sys\n"
        "assert 'ddpdoctor.probe.process' in sys.modules, 'no probe'\n"
        f"assert not any(path == {str(entry)!r} for path in sys.path), sys.path\n"
        f"assert {str(PACKAGE.parent)!r} not in sys.path, sys.path\n"
        "print(sys.modules['ddpdoctor'].__file__)"
    )
    # -S leaves site-packages out; what site would do with sitecustomize is then done by hand.
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import site; site.execsitecustomize()\n" + code],
        env={
            "PYTHONPATH": str(entry),
            "DDPDOCTOR_RUN_DIR": str(tmp_path),
            "PATH": "",
            # As a worker of torchrun, which loads the probe at once.
            **dict.fromkeys(("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK"), "0"),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        start_new_session=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(PACKAGE / "__init__.py")
    assert [path.name[:7] for path in tmp_path.iterdir()] == ["stacks-"]


def test_the_entry_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    """Whoever asks for a sitecustomize that the user does not have is told so."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import sitecustomize"],
        env={"PYTHONPATH": str(PACKAGE / "probe" / "entry"), "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'sitecustomize'"


def test_the_layers_name_every_package() -> None:
    contracts = (PACKAGE.parent / "pyproject.toml").read_text()
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert len(packages) > 10
    assert [name for name in packages if f"ddpdoctor.{name}" not in contracts] == []
