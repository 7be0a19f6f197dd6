"""What every Python of a job goes through, of whatever age, and what it leaves of it."""

from __future__ import annotations

import ast
import os
import shutil
import sys
from pathlib import Path

import pytest

from ddpdoctor.run.records.process import ErrorRecord
from ddpdoctor.supervise.run_watch import ENTRY
from tests.conftest import Doctor

OLD = ("2.7", "3.6", "3.7", "3.8", "3.9")


def python(release: str) -> str:
    """Return an interpreter of this release, from PATH or from where pyenv keeps them."""
    root = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    found = sorted(root.glob(f"versions/{release}.*/bin/python{release}"))
    path = str(found[-1]) if found else shutil.which(f"python{release}")
    if path is None:
        pytest.skip(f"no Python {release} here")
    return path


OLDEST_SYNTAX = (
    *(ast.Module, ast.Expr, ast.Constant, ast.Import, ast.alias, ast.Assign, ast.Delete),
    *(ast.If, ast.Try, ast.Compare, ast.Call, ast.Attribute, ast.Subscript, ast.Slice, ast.Name),
    *(ast.Tuple, ast.ListComp, ast.comprehension, ast.expr_context, ast.cmpop),
)


def test_any_python_can_read_the_entry() -> None:
    """Nothing in it is newer than Python 2.7: no annotation, no f-string, no nonlocal."""
    tree = ast.parse(Path(ENTRY, "sitecustomize.py").read_text())
    assert {type(each) for each in ast.walk(tree) if not isinstance(each, OLDEST_SYNTAX)} == set()


SHELL = 'x=$("$0" -c "$1" 2>&1); echo "$x"'
"""What a job does with a helper: it takes the output, errors as well, for a value."""


@pytest.mark.parametrize("site", ["none", "prints", "raises"])
@pytest.mark.parametrize("release", OLD)
def test_an_old_python_runs_as_without_us(doctor: Doctor, release: str, site: str) -> None:
    mine = doctor.directory / "mine"
    mine.mkdir()
    if site != "none":
        source = "print('of the user')\n" + ("raise ValueError('x')\n" if site == "raises" else "")
        (mine / "sitecustomize.py").write_text(source)
    program = "import sys; print(5); print('sitecustomize' in sys.modules); print(sys.path[1:])"
    command = [
        "sh",
        "-c",
        f'PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{mine}"; export PYTHONPATH; {SHELL}',
    ]
    words = [*command, python(release), program]
    bare = doctor.run(*words, watch=False)
    watched = doctor.run("--quiet", "--", *words)
    assert (watched.status, watched.stdout, watched.stderr) == (bare.status, bare.stdout, "")
    assert "5" in bare.stdout.splitlines()
    assert ("of the user" in bare.stdout) == (site != "none")


IDENTITIES = """
import atexit, builtins, os, signal, sys, threading
print(sys.excepthook is sys.__excepthook__, threading.excepthook is threading.__excepthook__)
print(sys.unraisablehook is sys.__unraisablehook__, sys.displayhook is sys.__displayhook__)
print(sys.breakpointhook is sys.__breakpointhook__, atexit._ncallbacks())
print([type(each) for each in sys.meta_path], len(sys.path_hooks), sys.path[1:])
print([str(signal.getsignal(each)).partition(' at ')[0] for each in signal.valid_signals()])
print([(name, type(getattr(builtins, name))) for name in sorted(vars(builtins))])
print([type(each) for each in (os.fork, os._exit, sys.exit)], sorted(sys.modules))
"""


def test_a_process_that_is_no_rank_has_no_hook_of_ours(doctor: Doctor) -> None:
    doctor.write("helper.py", IDENTITIES)
    bare = doctor.run(sys.executable, "helper.py", watch=False)
    watched = doctor.run("--", sys.executable, "helper.py")
    assert watched.stdout == bare.stdout
    assert bare.stdout.startswith("True True\nTrue True\nTrue 0\n")


ASKS = """
import sys
{torch}
if sys.excepthook is sys.__excepthook__:
    # As exceptiongroup does on Python 3.10: with another hook in place it stays out.
    sys.excepthook = lambda kind, error, trace: print("the cause:", error.__cause__)
try:
    int("x")
except ValueError as error:
    raise RuntimeError("the job fails") from error
"""


@pytest.mark.parametrize("torch", ["", "import torch"])
def test_code_that_asks_for_pythons_own_hook_finds_it(doctor: Doctor, torch: str) -> None:
    doctor.write("asks.py", ASKS.format(torch=torch))
    bare = doctor.run(sys.executable, "asks.py", watch=False)
    watched = doctor.run("--", sys.executable, "asks.py")
    assert (watched.status, watched.stdout) == (bare.status, bare.stdout)
    assert bare.stdout.startswith("the cause: invalid literal for int()")
    (error,) = watched.run.strays
    assert isinstance(error, ErrorRecord)
    assert (error.exception, error.message.split(":")[0]) == (
        "ValueError",
        "invalid literal for int() with base 10",
    )


IMPORTS = """
import importlib
{how}
import torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=0, world_size=1)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        'importlib.import_module("torch")',
        'importlib.import_module("torch.distributed")',
        '__import__("torch")',
        "import threading\nfirst = threading.Thread(target=lambda: __import__('torch'))\n"
        "first.start()\nfirst.join()",
    ],
    ids=["import_module", "submodule", "__import__", "thread"],
)
def test_a_process_becomes_a_rank_however_it_imports_torch(doctor: Doctor, how: str) -> None:
    from tests.probe.test_becoming import free_port

    doctor.write("imports.py", IMPORTS.format(how=how, port=free_port()))
    result = doctor.run("--", sys.executable, "imports.py")
    result.check_success()
    assert [rank.rank for rank in result.run.ranks] == [0]


def test_a_rank_of_a_python_that_is_too_old_is_explained(doctor: Doctor) -> None:
    words = [python("3.9"), "-c", "import time; time.sleep(6)"]
    result = doctor.run("--", *words, env={"RANK": "0", "WORLD_SIZE": "1"})
    assert result.status == 0
    assert "Python 3.9 is too old for ddpdoctor's probe, which needs 3.10" in result.ours


CLOSES = """
import os
first = os.open("first", os.O_WRONLY | os.O_CREAT)
print("first descriptor", first)
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
# As a process does that becomes a daemon, but for torch's own, without which it would not train.
for name in os.listdir("/proc/self/fd"):
    try:
        target = os.readlink("/proc/self/fd/" + name)
    except OSError:
        continue
    if int(name) > 2 and not target.startswith("anon_inode") and (
        "socket" not in target or int(name) > 900
    ):
        os.close(int(name))
files = [open("file%d" % number, "w") for number in range(20)]
for step in range(40):
    ddp(torch.randn(2, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
for file in files:
    file.write("of the job")
    file.close()
print("sizes", {os.path.getsize("file%d" % number) for number in range(20)})
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_job_that_closes_all_descriptors_finds_nothing_of_ours_in_its_files(
    doctor: Doctor,
) -> None:
    doctor.write("closes.py", CLOSES)
    words = ["--nproc-per-node", "1", "closes.py"]
    bare, watched = doctor.torchrun(*words), doctor.run(*words)
    bare.check_success()
    watched.check_success()
    assert watched.stdout == bare.stdout
    assert "sizes {10}" in bare.stdout.splitlines()


def test_the_probe_takes_no_file_of_the_job_for_one_of_pythons_library(doctor: Doctor) -> None:
    """The script's folder comes before the library in ``sys.path``."""
    # Not the working directory, which `python -m ddpdoctor` has in its path itself.
    (doctor.directory / "job").mkdir()
    for name in ("dataclasses", "json", "traceback", "typing"):
        doctor.write(f"job/{name}.py", f"print('{name} of the job')\n")
    doctor.write("job/fails.py", "raise ValueError('the end')\n")
    bare = doctor.run(sys.executable, "job/fails.py", watch=False)
    watched = doctor.run("--", sys.executable, "job/fails.py")
    assert (watched.status, watched.stdout) == (bare.status, bare.stdout)
    assert watched.stderr.replace(watched.ours, "") == bare.stderr
    (error,) = watched.run.strays
    assert isinstance(error, ErrorRecord) and error.message == "the end"


@pytest.mark.slow
def test_a_rank_finds_its_own_module_of_a_name_of_pythons(doctor: Doctor) -> None:
    (doctor.directory / "job").mkdir()
    doctor.write("job/statistics.py", "OWN = 17\n")
    doctor.write(
        "job/train.py",
        """
        import statistics
        print("own", statistics.OWN)
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.destroy_process_group()
        """,
    )
    result = doctor.run("--nproc-per-node", "1", "job/train.py")
    result.check_success()
    assert "own 17" in result.stdout.splitlines()
