"""Every fix has a sick job that prints it, and a healed twin that follows it to the letter."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddpdoctor.diagnose
from tests.support.marks import SICK, fix, healed

DIAGNOSE = Path(ddpdoctor.diagnose.__file__).parent

WITHOUT_JOB = (
    # They say where to look, and no change of the script follows from that.
    "Fix this exception.",
    "The line named entered the native code",
    "Raise an exception that says why",
    "The script refused its options",
    "Look for the cause on the other ranks or nodes",
    "Find out who sent it",
    "The gradient was not finite",
    "Look at what is waited for outside",
    "Compare the lines that the ranks are at",
    "Look for its file on its node",
    "Look at the worker's own output",
    "Look at the workers' own output",
    "See its native frames",
    "Look at this rank's data",
    "Look at what this rank's optimizer step does",
    "Look at what only this rank does",
    "Look for a list, a dict or an attribute that keeps results of past steps",
    "See why this line takes longer",
    # `ddpdoctor parity` prints them: tests/parity follows them.
    "Evaluate the last samples, too",
    "Divide the sum of the losses by the number of all ranks",
    # They take a GPU, several nodes, a slow core, an older torch, or a machine under load.
    "Call torch.cuda.set_device(local_rank)",
    "Keep shapes alike",
    "Measure all links with `ddpdoctor check`",
    "Check the network and the interface",
    "Look at what ddpdoctor says on the other nodes",
    "Start the command on every node",
    "Look for a kernel that does not end",
    "Let a time service run",
    "Bring every node to the same code",
    "Install the same ddpdoctor",
    "See whether {} lives",
    "Use the same environment on every node",
    "Use the same GPUs on every node",
    "See who computes on GPU",
    "Look at its cooling and power supply",
    "Not all cores of this machine are alike",
    "Look at what slows the core down",
    "See what else runs on this machine",
    "Look at this rank's device",
    "Load the data of this stage faster",
    "Delete the DDP module and the optimizer",
    "Release what waits there",
    "Let every output of forward take part",
    # They are about how the job was started, or about who stops it.
    "Give the script the options that it takes",
    "Raise the limit in the shell",
    "torchrun has started every rank already",
    "Only rank 0 opens the port",
    "Leave init_method and MASTER_PORT out",
    "Open the store once",
    "Host memory ran out",
    "Let the tracer go on",
    "Start the ranks with torchrun",
    "Let all ranks join first",
    # The tests of their rules alone have them so far.
    "Load it into `model.{}`",
    "Let the processes that the script started end",
    "Let rank {} make the call",
    "Decide on all ranks together",
    "Add numbers: `{} += loss.item()`",
    "Give it a size: `functools.lru_cache",
    "Keep what is needed: a number",
    "Bound what the data set keeps",
    "Call backward once for each forward through DDP",
    "Look at the storage that the data come from",
    "Make loading faster",
    "Something registered it for the end",
    "Give all ranks the same number of batches: as many shards",
    "Keep the workers from pass to pass",
    "Create fewer objects",
    "Keep large buffers",
    "Give the DataLoader more workers",
    "Let the thread that is waited for",
    "Let what fills the queue",
    "Start the process once",
    "Read ahead",
    "Read and write less",
    "Suspect a C or C++ extension",
    "Find what it keeps of each step",
    "Limit the length of a batch",
    "Set PYTORCH_CUDA_ALLOC_CONF",
)
"""How the other fixes begin, by the reason for which no sick job prints them."""


def fixes() -> Iterator[tuple[str, str]]:
    """The fixes that rules may print, with their files; ``{}`` stands for what varies.

    Messages and evidence have no full stop. Fixes have.
    """
    for path in sorted(DIAGNOSE.rglob("*.py")):
        for text in texts(ast.parse(path.read_text())):
            if text.endswith(".") and len(text) > 15 and text[0] != " ":
                yield text, f"{path.relative_to(DIAGNOSE)}: {text}"


def texts(node: ast.AST) -> Iterator[str]:
    """The strings of a file, without docstrings and the parts of others."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        parts = [each.value if isinstance(each, ast.Constant) else "{}" for each in node.values]
        yield "".join(map(str, parts))
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


FIXES = tuple(fixes())
PRINTED = {path.stem: fix(path) for path in SICK if fix(path)}


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for text, name in FIXES])
def test_a_fix_is_followed_by_a_healed_job(text: str) -> None:
    jobs = [stem for stem, start in PRINTED.items() if text.startswith(start)]
    excused = [start for start in WITHOUT_JOB if text.startswith(start)]
    assert bool(jobs) is not bool(excused), "write a sick job that prints it, and its healed twin"
    assert all(healed(path).exists() for path in SICK if path.stem in jobs)


@pytest.mark.parametrize("start", [*PRINTED.values(), *WITHOUT_JOB])
def test_a_job_claims_a_fix_that_exists(start: str) -> None:
    assert any(text.startswith(start) for text, _ in FIXES)
