"""Each rule finds what its snippets expect, and nothing else, however the code is written."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from ddpdoctor.core.finding import Severity
from ddpdoctor.lint import check, files
from ddpdoctor.lint.rules import LINT_RULES
from tests.support import marks

FOLDER = Path(__file__).with_name("snippets")


def snippets() -> Iterator[tuple[str, str]]:
    """Yield the snippets of all files with their names."""
    for path in sorted(FOLDER.glob("*.txt")):
        for part in re.split(r"(?m)^# %% ", path.read_text())[1:]:
            name, _, code = part.partition("\n")
            yield f"{path.stem}: {name}", code


CASES = dict(snippets())


def problems(code: str, path: str = "train.py") -> list[tuple[int, str]]:
    """Return line and code of what is found, without infos."""
    found = check.check([files.parse(path, code.encode())])
    return [(each.line, each.code) for each in found if each.severity > Severity.INFO]


def codes(code: str) -> list[str]:
    """Return the codes of all that is found, also of infos."""
    return sorted(each.code for each in check.check([files.parse("train.py", code.encode())]))


JOBS = [path for folder in marks.FOLDERS for path in sorted(folder.glob("*.py"))]


def expected(code: str) -> list[tuple[int, str]]:
    lines = enumerate(code.splitlines(), 1)
    return [(at, each) for at, line in lines for each in re.findall(r"# expect: (DDP\d+)", line)]


@pytest.mark.parametrize("name", CASES)
def test_snippet(name: str) -> None:
    assert problems(CASES[name]) == expected(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_layout_and_place_do_not_matter(name: str) -> None:
    code = CASES[name]
    wanted = sorted(each for _, each in expected(code))
    plain = ast.unparse(ast.parse(code))
    assert sorted(each for _, each in problems(plain)) == wanted
    typed = re.sub(r"def (\w+)\((\w+), ", r"def \1(\2: object, ", plain)
    assert sorted(each for _, each in problems(typed)) == wanted
    if "os.environ" not in code and "spawn" not in code and "parser" not in code:
        body = "\n".join(f"    {line}" for line in plain.splitlines())
        assert sorted(each for _, each in problems(f"def job():\n{body}\njob()\n")) == wanted


class Renamed(ast.NodeTransformer):
    """Gives variables and parameters other names, but not those that are imported or called by."""

    NAMES: ClassVar = {"sampler": "chooser", "loader": "batches", "model": "network", "x": "images"}

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.NAMES.get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg = self.NAMES.get(node.arg, node.arg)
        return node


@pytest.mark.parametrize("name", CASES)
def test_names_do_not_matter(name: str) -> None:
    renamed = ast.unparse(Renamed().visit(ast.parse(CASES[name])))
    wanted = sorted(each for _, each in expected(CASES[name]))
    assert sorted(each for _, each in problems(renamed)) == wanted


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_a_main_guard_does_not_matter(job: Path) -> None:
    tree = ast.parse(job.read_text())
    before = codes(ast.unparse(tree))
    guard = ast.parse('if __name__ == "__main__": pass').body[0]
    assert isinstance(guard, ast.If)
    imports = [each for each in tree.body if isinstance(each, (ast.Import, ast.ImportFrom))]
    guard.body = [each for each in tree.body if each not in imports]
    tree.body = [*imports, guard]
    assert codes(ast.unparse(tree)) == before


@pytest.mark.parametrize("name", [name for name, code in CASES.items() if "# expect" in code])
def test_noqa(name: str) -> None:
    code = re.sub(r"# expect: (DDP\d+)", r"# noqa: \1", CASES[name])
    assert problems(code) == []
    other = re.sub(r"# expect: (DDP\d+)", "# noqa: E501", CASES[name])
    assert [each for _, each in problems(other)] == [each for _, each in expected(CASES[name])]


def test_each_warning_and_error_has_a_snippet() -> None:
    severe = {code for code, rule in LINT_RULES.items() if rule.severity > Severity.INFO}
    seen = {code for each in CASES.values() for _, code in expected(each)}
    assert severe - seen == set()


def test_own_pages_have_examples() -> None:
    for rule in LINT_RULES.values():
        if rule.name:
            assert "Wrong:" in rule.page
            assert "Right:" in rule.page
            assert len(rule.page.splitlines()) <= 30


def infos(*codes: str) -> list[str]:
    """Return the codes of all that is found in some files, also of infos."""
    found = check.check([files.parse(f"f{at}.py", each.encode()) for at, each in enumerate(codes)])
    return [each.code for each in found]


WRAPPED = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
def main(net, ddp):
    model = DDP(net{})
    raw = {}
    torch.save(raw.state_dict(), "x.pt")
"""


def test_state_of_the_module_inside_is_no_wrapper() -> None:
    # Each saves on all ranks.
    assert infos(WRAPPED.format("", "model")) == ["DDP502"]
    for bare in ("model.module if ddp else model", 'getattr(model, "module", model)'):
        assert infos(WRAPPED.format("", bare)) == []
    two = WRAPPED.replace("raw.", "").replace("raw = {}\n", "state = {}\n").format("", "{}")
    two = two.replace("state_dict()", "state").format(
        "model.module.state_dict() if ddp else model.state_dict()"
    )
    assert infos(two) == []


def test_state_that_a_function_loads_into_the_wrapper_is_right() -> None:
    loads = "def load(**objects):\n    objects['net'].load_state_dict({})\n"
    assert infos(f"{WRAPPED.format('', 'model')}    load(net=model)\n{loads}") == []
    assert infos(f"{WRAPPED.format('', 'model')}    load(net=net)\n{loads}") == ["DDP502"]


NORMED = """
import argparse
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", default=SIZE)
args = parser.parse_args()
def main(data, sampler, world_size):
    loader = DataLoader(data, batch_size=args.batch_size{}, sampler=sampler)
    valid = DataLoader(data, batch_size=1)
    return DDP(torchvision.models.resnet18()), loader
main([], None, 8)
"""


def test_large_batches_need_no_synchronized_batch_norm() -> None:
    assert infos(NORMED.replace("SIZE", "4").format("")) == ["DDP309"]
    assert infos(NORMED.replace("SIZE", "32").format("")) == []
    assert infos(NORMED.replace("SIZE", "32").format(" // world_size")) == ["DDP309"]
    assert infos(NORMED.replace("SIZE", "256").format(" // world_size")) == []


def test_static_graph_is_searched_once() -> None:
    found = ", find_unused_parameters=True"
    assert infos(WRAPPED.format(found, "model.module")) == ["DDP304"]
    assert infos(WRAPPED.format(f"{found}, static_graph=True", "model.module")) == []


TRAINS = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
def load(net):
    net.load_state_dict(torch.load("resume.pt"))
def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    net = torch.nn.Linear(1, 1).cuda()
    {}
    DDP(net)(torch.ones(1, 1)).backward()
    dist.destroy_process_group()
if __name__ == "__main__":
    main()
"""
EVALUATES = "import torch\nfrom f0 import load\nload(torch.nn.Linear(1, 1))\n"


def test_a_script_of_one_process_beside_is_none_of_the_ranks() -> None:
    assert infos(TRAINS.format("load(net)"), EVALUATES) == ["DDP503"]
    assert infos(TRAINS.format(""), EVALUATES) == []


def test_the_main_function_of_a_script_beside_is_none_of_the_ranks() -> None:
    beside = (
        "import torch\n"
        "def folder():\n    return 'data'\n"
        "def main():\n    torch.save(torch.nn.Linear(1, 1).state_dict(), 'x.pt')\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    job = TRAINS.format("print(folder())")
    assert infos(f"from f1 import folder\n{job}", beside) == []
    assert infos(
        f"from f1 import folder, main as save\n{job}".replace("folder())", "save())"), beside
    ) == ["DDP501"]
