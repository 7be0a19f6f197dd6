"""``ddpdoctor lint`` as people and programs call it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from ddpdoctor.commands import lint
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import Severity
from ddpdoctor.lint import files
from ddpdoctor.lint.check import check
from ddpdoctor.lint.code import Code
from ddpdoctor.lint.flake8 import Plugin
from ddpdoctor.lint.rules import LINT_RULES, Hit
from tests.conftest import ROOT

SICK = """\
import torch.distributed as dist

if dist.get_rank() == 0:
    dist.barrier()
"""


@pytest.fixture
def sick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SICK)
    return path


def test_text(sick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lint.main(["train.py"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("train.py:4:5: error DDP401 only some ranks reach barrier()")
    assert "4 |     dist.barrier()\n  |     ^^^^^^^^^^^^^^\n" in out
    assert out.endswith("1 error in 1 file\n")


def test_a_rule_that_fails_is_one_line(
    sick: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(code: Code) -> Iterator[Hit]:
        raise KeyError(code.file.path)

    monkeypatch.setitem(LINT_RULES, "DDP101", replace(LINT_RULES["DDP101"], find=broken))
    sick.with_name("other.py").write_text(SICK)
    assert lint.main(["."]) == 1
    out, err = capsys.readouterr()
    assert out.count("error DDP401") == 2
    (line,) = err.splitlines()
    assert line.startswith("ddpdoctor: warning: internal error in DDP101 on other.py, DDP101 on")
    assert line.endswith("please report this line); all other rules are applied")


def test_clean(sick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sick.write_text("import torch\n")
    assert lint.main(["."]) == 0
    assert capsys.readouterr().out == "no problems in 1 file\n"


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (("--ignore", "DDP401"), 0),
        (("--select", "DDP1"), 0),
        (("--select", "DDP4"), 1),
        (("--fail-on", "error"), 1),
        (("--severity", "error"), 1),
    ],
)
def test_selection(sick: Path, options: tuple[str, ...], status: int) -> None:
    assert lint.main([*options, "train.py"]) == status


def test_configuration(sick: Path) -> None:
    (sick.parent / "pyproject.toml").write_text('[tool.ddpdoctor]\nignore = ["DDP401"]\n')
    assert lint.main(["train.py"]) == 0


def test_infos_are_pedantic(sick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sick.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    assert lint.main(["train.py"]) == 0
    assert "DDP210" not in capsys.readouterr().out
    assert lint.main(["--pedantic", "train.py"]) == 0
    assert "info DDP210" in capsys.readouterr().out
    assert lint.main(["--pedantic", "--fail-on", "info", "train.py"]) == 1


def test_formats(sick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lint.main(["--output", "problems", "train.py"])
    line = capsys.readouterr().out
    assert line.startswith("train.py:4:5: error DDP401 ")
    lint.main(["--output", "json", "train.py"])
    record = json.loads(capsys.readouterr().out)
    assert (record["line"], record["column"], record["end_column"]) == (4, 5, 19)
    lint.main(["--output", "github", "train.py"])
    assert capsys.readouterr().out.startswith("::error file=train.py,line=4,col=5,")
    lint.main(["--output", "sarif", "train.py"])
    log = json.loads(capsys.readouterr().out)
    (run,) = log["runs"]
    (result,) = run["results"]
    assert log["version"] == "2.1.0"
    assert result["ruleId"] == run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"]
    region = result["locations"][0]["physicalLocation"]["region"]
    assert region == {"startLine": 4, "startColumn": 5, "endLine": 4, "endColumn": 19}
    lint.main(["--statistics", "train.py"])
    assert "    1  DDP401  collective-under-rank-guard" in capsys.readouterr().out


def closed(**properties: object) -> dict[str, object]:
    """Return the schema of an object with these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }


def listed(items: dict[str, object]) -> dict[str, object]:
    return {"type": "array", "items": items}


TEXT = {"type": "string", "minLength": 1}
AT = {"type": "integer", "minimum": 1}
REGION = closed(startLine=AT, startColumn=AT, endLine=AT, endColumn=AT)
URI = {"type": "string", "pattern": r"^[\w./%~-]+$"}
SARIF = closed(
    **{"$schema": TEXT},
    version={"const": "2.1.0"},
    runs=listed(
        closed(
            tool=closed(
                driver=closed(
                    name=TEXT,
                    version=TEXT,
                    rules=listed(
                        closed(
                            id=TEXT,
                            name=TEXT,
                            shortDescription=closed(text=TEXT),
                            help=closed(text=TEXT),
                        )
                    ),
                )
            ),
            columnKind={"const": "unicodeCodePoints"},
            results=listed(
                closed(
                    ruleId=TEXT,
                    ruleIndex={"type": "integer", "minimum": 0},
                    level={"enum": ["error", "warning", "note"]},
                    message=closed(text=TEXT),
                    locations=listed(
                        closed(
                            physicalLocation=closed(artifactLocation=closed(uri=URI), region=REGION)
                        )
                    ),
                )
            ),
        )
    ),
)
"""What we write of SARIF 2.1.0. DDPDOCTOR_SARIF_SCHEMA names a file with the whole schema."""


def test_sarif_is_valid(sick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sick.rename(sick.with_name("my träin %.py"))
    (sick.parent / "job.sh").write_text("torchrun --nnodes 2 train.py\n")
    lint.main(["--output", "sarif", "--pedantic", "."])
    log = json.loads(capsys.readouterr().out)
    assert len(log["runs"][0]["results"]) >= 2
    jsonschema.validate(log, SARIF)
    whole = os.environ.get("DDPDOCTOR_SARIF_SCHEMA")
    if whole is not None:
        jsonschema.validate(log, json.loads(Path(whole).read_text()))


def test_bad_arguments(sick: Path) -> None:
    with pytest.raises(DoctorError, match="needs a file or a folder"):
        lint.main([])
    with pytest.raises(DoctorError, match=r"there is no nothere\.py"):
        lint.main(["nothere.py"])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"print 'x'\n", "this is Python 2"),
        (b"def f(:\n", "this does not parse"),
        (b"x = " + b"(" * 3000, "this does not parse"),
        (b"\x00\xff\xfe" * 100, "this does not parse"),
        (b"# -*- coding: nothing -*-\nx = (\n", "this does not parse"),
    ],
)
def test_what_does_not_parse_is_reported_once(
    sick: Path, capsys: pytest.CaptureFixture[str], data: bytes, said: str
) -> None:
    sick.write_bytes(data)
    assert lint.main(["--output", "problems", "train.py"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert f"error DDP016 {said}" in line


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + SICK.encode(),
        SICK.replace("    ", "\u00a0\u00a0\u00a0\u00a0").encode(),
        SICK.replace("    ", "\t").encode(),
        SICK.replace("\n", "\r\n").encode(),
        SICK.encode("utf-16"),
        ("# -*- coding: latin-1 -*-\n# \u00e9\n" + SICK).encode("latin-1"),
        b"# \xe9 in no declared encoding\n" + SICK.encode(),
    ],
)
def test_encodings_and_spaces(data: bytes) -> None:
    file = files.parse("train.py", data)
    assert file.error is None
    assert file.tree is not None


def test_notebook(sick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {
            "cell_type": "code",
            "source": ["!pip install torch\n", "import torch.distributed as dist\n"],
        },
        {"cell_type": "code", "source": "%%bash\nif [ -e x ]; then echo; fi"},
        {
            "cell_type": "code",
            "source": "%matplotlib inline\nif dist.get_rank() == 0:\n    dist.barrier()",
        },
    ]
    (sick.parent / "train.ipynb").write_text(json.dumps({"cells": cells}))
    assert lint.main(["--output", "problems", "train.ipynb"]) == 1
    assert capsys.readouterr().out.startswith("train.ipynb:cell 3:3:5: error DDP401 ")
    (sick.parent / "train.ipynb").write_text("[]")
    assert lint.main(["train.ipynb"]) == 1
    assert "this is no notebook" in capsys.readouterr().out


def test_folders_in_a_circle(sick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sick.parent / "a").mkdir()
    (sick.parent / "a" / "b").symlink_to(sick.parent)
    (sick.parent / "node_modules").mkdir()
    (sick.parent / "node_modules" / "other.py").write_text(SICK)
    assert lint.main(["."]) == 1
    assert capsys.readouterr().out.endswith("1 error in 1 file\n")


def test_files_that_import_each_other(sick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sick.parent / "helpers.py").write_text(
        "import torch.distributed as dist\n\ndef total(x):\n    dist.all_reduce(x)\n    return x\n"
    )
    sick.write_text(
        "import torch.distributed as dist\nfrom helpers import total\n\n"
        "def report(x):\n    if dist.get_rank() == 0:\n        print(total(x))\n"
    )
    assert lint.main(["."]) == 1
    assert "train.py:6:15: error DDP401 only some ranks reach all_reduce() in total()" in (
        capsys.readouterr().out
    )
    # What does not import it, is another program.
    assert lint.main(["train.py"]) == 0


ENGINE = """\
import torch

def train(model, loader, optimizer):
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    torch.save(model.state_dict(), "last.pt")
"""
SCRIPT = """\
import torch
from torch.utils.data import DataLoader
from engine import *

loader = DataLoader(data, shuffle=True)
train(model, loader, optimizer)
"""


def of_folder(folder: Path, **texts: str) -> list[tuple[str, int, str]]:
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    found = check([files.read(each) for each in files.find([str(folder)])])
    return [
        (Path(each.path).stem, each.line, each.code)
        for each in found
        if each.severity > Severity.INFO
    ]


def test_a_script_of_one_process_beside_one_of_several(tmp_path: Path) -> None:
    # They share a file, but `single.py` starts no second rank.
    assert of_folder(tmp_path, engine=ENGINE, single=SCRIPT) == []
    several = SCRIPT.replace("train(", "train(DDP(model), ").replace("model, loader", "loader")
    several = "from torch.nn.parallel import DistributedDataParallel as DDP\n" + several
    found = of_folder(tmp_path, several=several)
    assert found == [("engine", 8, "DDP501"), ("several", 6, "DDP102")]


def test_names_through_a_package_and_a_base_class(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("from .base import Base\n")
    (tmp_path / "pkg" / "base.py").write_text("""\
import torch
from torch.utils.data import DataLoader, DistributedSampler

class Base:
    def __init__(self, data):
        self.data = data
        self.loader = self.make_loader()

    def make_loader(self):
        return DataLoader(self.data, sampler=DistributedSampler(self.data))
""")
    script = """\
import torch
from pkg import Base
from torch.nn.parallel import DistributedDataParallel as DDP

class Job(Base):
    def train(self):
        model = DDP(self.model)
        for epoch in range(10):
            for x in self.loader:
                model(x).sum().backward()
"""
    assert of_folder(tmp_path, train=script) == [("base", 10, "DDP103")]


def test_healthy_jobs_and_ddpdoctor_itself_are_clean() -> None:
    paths = [*(ROOT / "sample_jobs").glob("*.py"), *(ROOT / "tests/jobs/healthy").rglob("*.py")]
    paths += [*(ROOT / "tests/jobs/sick").glob("*_healed.py")]
    paths += [*(ROOT / "sample_jobs").glob("healthy/*.py"), ROOT / "ddpdoctor/preflight/selftest"]
    sources = [files.read(each) for each in files.find([str(path) for path in paths])]
    found = [each for each in check(sources) if each.severity > Severity.INFO]
    assert [f"{each.where} {each.code}" for each in found] == []


@pytest.mark.parametrize(
    "name",
    [
        *("ddp101_sampler_not_used", "ddp102_no_sampler", "ddp103_no_set_epoch"),
        *("ddp113_seed_by_rank", "ddp206_local_rank_option", "ddp213_sampler_before_init"),
        *("ddp301_module_in_training", "ddp303_head_replaced", "ddp308_no_sync_around_backward"),
        *("ddp311_adam_in_the_loop", "ddp312_no_zero_grad", "ddp316_scaled_gradients"),
        *("ddp319_weights_loaded_on_one_rank", "ddp401_barrier_on_rank_0"),
        *("ddp401_barrier_in_helper", "ddp402_evaluation_on_rank_0", "ddp403_skip_on_local_nan"),
        *("ddp501_save_on_every_rank", "ddp503_load_onto_gpu_0"),
    ],
)
def test_faults_of_sick_jobs_that_the_source_shows(name: str) -> None:
    (path,) = [*ROOT.glob(f"*/sick/{name}.py"), *ROOT.glob(f"tests/jobs/sick/{name}.py")]
    found = check([files.read(str(path))])
    assert name[:6].upper() in {each.code for each in found}


def test_flake8(sick: Path) -> None:
    plugin = Plugin(ast.parse(SICK), SICK.splitlines(keepends=True), "train.py")
    ((line, column, text, _),) = plugin.run()
    assert (line, column, text[:6]) == (4, 4, "DDP401")


def test_no_torch_is_imported(sick: Path) -> None:
    code = (
        "import sys\nfrom ddpdoctor.commands import lint\nlint.main(['train.py'])\n"
        "assert not {'torch', 'numpy', 'textual'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_watch(sick: Path) -> None:
    command = [sys.executable, "-m", "ddpdoctor", "lint", "--watch", "--output", "problems", "."]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=sick.parent
    ) as watch:
        try:
            assert watch.stdout is not None
            assert watch.stdout.readline() == "ddpdoctor lint: checking\n"
            assert "DDP401" in watch.stdout.readline()
            assert watch.stdout.readline() == "ddpdoctor lint: done\n"
            sick.write_text("import torch\n")
            assert watch.stdout.readline() == "ddpdoctor lint: checking\n"
            assert watch.stdout.readline() == "ddpdoctor lint: done\n"
        finally:
            watch.terminate()
