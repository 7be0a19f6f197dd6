"""``ddpdoctor check``: the script and its imports."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path

import pytest

from ddpdoctor.preflight.check import Outcome, Status
from ddpdoctor.preflight.machine import software
from ddpdoctor.preflight.situation import Options, Situation
from tests.conftest import Doctor

# -- the script

SCRIPT = """\
from __future__ import annotations
import os, torch
import torch.distributed as dist
from helpers import thing
from . import relative
try:
    import apex_of_old
except ImportError:
    apex_of_old = None
if os.environ.get("WANDB"):
    import wandb_of_old
def main():
    import tensorboard_of_old
"""


def script_check(path: Path, *more: str, module: bool = False) -> Outcome:
    options = Options(nproc=2, script=(str(path), *more), module=module)
    return software.script(Situation(options, environ={}))


def test_a_script_that_would_start(tmp_path: Path) -> None:
    train = tmp_path / "train.py"
    train.write_text(SCRIPT)
    (tmp_path / "helpers.py").touch()
    outcome = script_check(train, "--lr", "0.1")
    assert outcome.status is Status.PASS
    assert outcome.detail == "train.py parses, and its 4 imports are there; it was not run"


def test_a_script_that_would_not(tmp_path: Path) -> None:
    train = tmp_path / "train.py"
    train.write_text("import os\nimport no_such_package.part as part\n")
    (finding,) = script_check(train).findings
    assert finding.location is not None and finding.location.line == 2
    assert "train.py imports no_such_package, which this Python" in finding.message
    assert finding.paste == f"{sys.executable} -m pip install no_such_package"
    train.write_text("def main(:\n    pass\n")
    (finding,) = script_check(train).findings
    assert finding.location is not None and finding.location.line == 1
    (finding,) = script_check(tmp_path / "trian.py").findings
    assert "did you mean" in finding.fix and "train.py" in finding.paste


def test_modules_and_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__main__.py").write_text("import os\n")
    monkeypatch.chdir(tmp_path)
    assert script_check(Path("pkg"), module=True).status is Status.PASS
    assert script_check(Path("pkg.none"), module=True).status is Status.FAIL
    assert script_check(package).status is Status.PASS
    assert script_check(Path("/bin/sh")).status is Status.SKIPPED
    assert script_check(tmp_path / "missing.py").status is Status.FAIL


@pytest.mark.parametrize(
    "change",
    [
        "import sys\nsys.path.insert(0, 'lib')\n",
        "from sys import path\npath.append('lib')\n",
        "import os, sys\nif os.name:\n    sys.path.append('lib')\n",
        "import site\nsite.addsitedir('lib')\n",
        "import _paths\n",
    ],
)
def test_what_comes_after_a_change_of_the_search_path_is_not_judged(
    tmp_path: Path, change: str
) -> None:
    train = tmp_path / "train.py"
    (tmp_path / "_paths.py").write_text("import sys\nsys.path.append('lib')\n")
    train.write_text(f"{change}import only_found_later\n")
    outcome = script_check(train)
    assert outcome.status is Status.PASS
    assert "up to where sys.path is changed" in outcome.detail
    train.write_text(f"import missing_before\n{change}import only_found_later\n")
    (finding,) = script_check(train).findings
    assert finding.about == "missing_before"


def test_modules_beside_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('nothing is imported')")
    (package / "train.py").write_text("import helpers\nfrom pkg import models\nimport built\n")
    (tmp_path / "helpers.py").touch()
    (tmp_path / f"built{EXTENSION_SUFFIXES[0]}").touch()
    (tmp_path / "spread" / "inner").mkdir(parents=True)
    (tmp_path / "spread" / "inner" / "train.py").write_text("import spread.inner\n")
    monkeypatch.chdir(tmp_path)
    for name in ("pkg.train", "spread.inner.train"):
        assert script_check(Path(name), module=True).findings == ()
    (finding,) = script_check(Path("pkg"), module=True).findings
    assert finding.message == "pkg is a package without __main__.py: it cannot be run"


def test_a_module_that_is_installed_in_an_editable_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("import os\n")

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            if name != "edited":
                return None
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(tmp_path)]
            return spec

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert script_check(Path("edited.train"), module=True).status is Status.PASS
    assert script_check(Path("edited.none"), module=True).status is Status.FAIL


def test_what_is_no_script_is_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert script_check(pipe).status is Status.SKIPPED
    options = Options(nproc=2, script=("bash", "run.sh"), program=True)
    assert software.script(Situation(options, environ={})).status is Status.SKIPPED


def test_the_line_for_a_missing_import_installs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "my project"
    (root / "tools").mkdir(parents=True)
    (root / "ours.py").touch()
    train = root / "tools" / "train.py"
    train.write_text("import ours, utils, cv2\n")
    monkeypatch.chdir(root)
    ours, utils, cv2 = (each.paste for each in script_check(train).findings)
    assert ours == f"export PYTHONPATH='{root}'${{PYTHONPATH:+:$PYTHONPATH}}"
    assert utils == "find . -name utils.py -o -name utils -type d"
    assert cv2 == f"{sys.executable} -m pip install opencv-python"
    broken = root / "it's.py"
    broken.write_text("def f(:")
    (finding,) = script_check(broken).findings
    assert shlex.split(finding.paste)[-1] == str(broken)


def test_a_file_that_is_no_text_does_not_reach_the_terminal(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "weights.py").write_bytes(b"\x7fELF\x1b[2J\0")
    result = doctor.cli("check", "--only", "script", "--", "weights.py")
    assert result.status == 2
    assert "\x1b" not in result.stdout and "\0" not in result.stdout
