"""Who becomes a rank, however it was started; who does not; and whose sitecustomize runs."""

from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path

import pytest

from ddpdoctor.run.records.process import ErrorRecord
from ddpdoctor.run.records.training import RandomRecord, SiteRecord
from tests.conftest import JOBS, Doctor, Result

TRAIN = str(JOBS / "train.py")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def check_ranks(result: Result, steps: int, ranks: int = 2) -> None:
    """The run holds exactly these ranks, each with all its steps and a regular end."""
    result.check_success()
    run = result.run
    assert [(rank.rank, rank.restart) for rank in run.ranks] == [(n, 0) for n in range(ranks)]
    for rank in run.ranks:
        assert rank.status is not None
        assert rank.status.rank == rank.rank == rank.opened.rank
        assert rank.status.world_size == ranks == rank.opened.world_size
        assert rank.status.pid == rank.opened.pid
        assert [step.step for step in rank.steps] == list(range(steps))
        assert rank.ended is not None
    assert len({rank.opened.pid for rank in run.ranks}) == ranks
    # Loaders' workers record their generators of random numbers, and nothing else.
    assert {type(record) for record in run.strays} <= {RandomRecord}
    assert run.unreadable == ()
    assert result.codes == []


@pytest.mark.slow
def test_workers_of_torchrun(doctor: Doctor) -> None:
    result = doctor.run("--nproc-per-node=2", TRAIN, "--steps=3", "--workers=1")
    check_ranks(result, 3)
    for rank in result.run.ranks:
        assert rank.opened.local_rank == rank.rank
        assert rank.opened.launcher == "torchrun"
        assert rank.opened.argv == (TRAIN, "--steps=3", "--workers=1")
    # torchrun itself left nothing, and the workers of the loaders a file each.
    names = {path.name.split(".")[0] for path in result.run_dir.iterdir()}
    names = {name for name in names if not name.startswith("process-worker-")}
    assert {name for name in names if name.startswith(("rank", "process"))} == {
        "rank-0000",
        "rank-0001",
    }


@pytest.mark.slow
def test_a_module_of_torchrun(doctor: Doctor) -> None:
    package = doctor.directory / "project"
    package.mkdir()
    shutil.copy(TRAIN, package / "job.py")
    result = doctor.run("--nproc-per-node=2", "-m", "project.job", "--steps=3")
    check_ranks(result, 3)
    sites = {record.path for rank in result.run.ranks for record in rank.records.of(SiteRecord)}
    assert sites == {str(package / "job.py")}


@pytest.mark.slow
def test_a_program_of_torchrun_without_python(doctor: Doctor) -> None:
    script = doctor.write("job.sh", f'#!/bin/sh\nexec {sys.executable} {TRAIN} "$@"\n')
    script.chmod(0o755)
    check_ranks(doctor.run("--nproc-per-node=2", "--no-python", str(script), "--steps=3"), 3)


@pytest.mark.slow
def test_children_of_spawn(doctor: Doctor) -> None:
    result = doctor.run("--", sys.executable, str(JOBS / "spawn.py"), str(free_port()))
    check_ranks(result, 3)
    assert {rank.opened.launcher for rank in result.run.ranks} == {"other"}


@pytest.mark.slow
def test_ranks_started_by_hand(doctor: Doctor) -> None:
    start = (
        f"{sys.executable} {TRAIN} --steps=3 --world-size=2 --init=tcp://127.0.0.1:{free_port()}"
    )
    result = doctor.run("--", "bash", "-c", f"{start} --my-rank=0 & {start} --my-rank=1 & wait")
    check_ranks(result, 3)
    assert {rank.opened.local_rank for rank in result.run.ranks} == {None}


@pytest.mark.slow
def test_ranks_made_by_fork(doctor: Doctor) -> None:
    script = doctor.write(
        "forked.py",
        """
        import multiprocessing, sys
        import torch, torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        def work(rank, port):
            dist.init_process_group(
                "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
            )
            model = DistributedDataParallel(nn.Linear(4, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                model(torch.ones(4, 4)).sum().backward()
                optimizer.step()
            dist.destroy_process_group()

        context = multiprocessing.get_context("fork")
        children = [context.Process(target=work, args=(rank, sys.argv[1])) for rank in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        sys.exit(any(child.exitcode for child in children))
        """,
    )
    result = doctor.run("--", sys.executable, str(script), str(free_port()))
    result.check_success()
    assert [rank.rank for rank in result.run.ranks] == [0, 1]
    for rank in result.run.ranks:
        # multiprocessing ends its forked children without atexit: the last step may be missing.
        assert len(rank.steps) >= 2
    assert result.codes == []


@pytest.mark.parametrize("option", ["-I", pytest.param("-E", marks=pytest.mark.slow)])
def test_an_isolated_interpreter_runs_bare(doctor: Doctor, option: str) -> None:
    script = doctor.write(
        "bare.py",
        """
        import sys, torch, torch.distributed as dist
        dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
        print([name for name in sys.modules if name.startswith("ddpdoctor")])
        dist.destroy_process_group()
        """,
    )
    where = f"tcp://127.0.0.1:{free_port()}"
    result = doctor.run("--", sys.executable, option, str(script), where)
    result.check_success()
    assert result.stdout == "[]\n"
    assert result.run.ranks == ()


MANY = """
    import os, subprocess, sys
    import torch, torch.distributed as dist

    where = sys.argv[1]
    assert dist.is_available()
    # A failed attempt makes no rank.
    try:
        dist.init_process_group("no such backend")
    except Exception as error:
        print("refused", type(error).__name__)
    assert not os.path.exists(os.path.join(os.environ["DDPDOCTOR_RUN_DIR"], "rank-0000.r0.status"))
    for _ in range(2):
        dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        dist.destroy_process_group()
        where = sys.argv[2]
    # A fork and a subprocess of a rank are no ranks.
    child = os.fork()
    if child == 0:
        dist.is_initialized()
        os._exit(0)
    os.waitpid(child, 0)
    subprocess.run([sys.executable, "-c", "import torch.distributed"], check=True)
"""


@pytest.mark.slow
def test_a_group_made_twice_is_one_rank_and_its_children_are_none(doctor: Doctor) -> None:
    script = doctor.write("many.py", MANY)
    where = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    result = doctor.run("--", sys.executable, str(script), *where)
    result.check_success()
    assert result.stdout == "refused ValueError\n"
    assert [(rank.rank, rank.restart) for rank in result.run.ranks] == [(0, 0)]
    assert result.run.strays == ()


@pytest.mark.slow
def test_two_jobs_in_a_row_are_two_attempts(doctor: Doctor) -> None:
    script = doctor.write(
        "one.py",
        """
        import sys, torch.distributed as dist
        dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
        dist.destroy_process_group()
        """,
    )
    first, second = (f"{sys.executable} {script} tcp://127.0.0.1:{free_port()}" for _ in range(2))
    result = doctor.run("--", "bash", "-c", f"{first}; {second}")
    result.check_success()
    assert [(rank.rank, rank.restart) for rank in result.run.ranks] == [(0, 0), (0, 1)]
    assert len({rank.opened.pid for rank in result.run.ranks}) == 2


# -- sitecustomize of the user


SHOW = """
    import builtins, os, sys
    print("marks", getattr(builtins, "MARKS", None))
    module = sys.modules.get("sitecustomize")
    print("module", module and module.__name__, getattr(module, "__file__", None))
    print("spec", getattr(getattr(module, "__spec__", None), "origin", None))
    print("value", getattr(module, "VALUE", None))
    print("path", [entry for entry in sys.path if entry != os.path.dirname(sys.argv[0])])
    try:
        import sitecustomize
        print("import", sitecustomize.__file__)
    except Exception as error:
        print("import", repr(error))
"""

MARK = 'import builtins\nbuiltins.MARKS = getattr(builtins, "MARKS", "") + "{}"\n'

SITES = {
    "none": None,
    "module": MARK.format("m") + "VALUE = 17\n",
    "package": MARK.format("p") + "from sitecustomize.inner import VALUE\n",
    "raises": MARK.format("r") + "VALUE = 1\nraise ValueError('of the user')\n",
    "imports what is missing": MARK.format("i") + "import no_such_module\n",
    "wrong syntax": "this is no python\n",
    "exits": MARK.format("e") + "raise SystemExit(9)\n",
}


@pytest.mark.parametrize("case", SITES)
def test_the_user_s_sitecustomize_behaves_as_without_us(doctor: Doctor, case: str) -> None:
    mine = doctor.directory / "mine"
    mine.mkdir()
    source = SITES[case]
    if case == "package":
        (mine / "sitecustomize").mkdir()
        (mine / "sitecustomize" / "__init__.py").write_text(str(source))
        (mine / "sitecustomize" / "inner.py").write_text("VALUE = 18\n")
    elif source is not None:
        (mine / "sitecustomize.py").write_text(source)
    script = doctor.write("show.py", SHOW)
    env = {"PYTHONPATH": str(mine), "PYTHONDONTWRITEBYTECODE": "1"}
    # The supervisor is a Python program, too, and says what it thinks of this sitecustomize.
    command = ["sh", "-c", f"exec {sys.executable} {script} 2> errors"]
    bare = doctor.run(*command, env=env, watch=False)
    said = (doctor.directory / "errors").read_text()
    watched = doctor.run("--quiet", "--", *command, env=env)
    assert (watched.status, watched.stdout) == (bare.status, bare.stdout)
    assert (doctor.directory / "errors").read_text() == said
    if case in ("module", "package"):
        assert "value 1" in bare.stdout


def test_a_sitecustomize_in_a_site_packages_directory_runs_once(doctor: Doctor) -> None:
    """As distributions place theirs: in a directory that the interpreter adds by itself."""
    packages = doctor.directory / "home" / "lib" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "sitecustomize.py").write_text(MARK.format("s") + "VALUE = 19\n")
    before = doctor.directory / "before"
    before.mkdir()
    (before / "usercustomize.py").write_text("")
    script = doctor.write("show.py", SHOW)
    # A .pth file is read by site before sitecustomize is imported; here the test plays site.
    runner = doctor.write(
        "runner.sh",
        f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{packages}" exec {sys.executable} {script}\n',
    )
    bare = doctor.run("sh", str(runner), watch=False)
    watched = doctor.run("--quiet", "--", "sh", str(runner))
    for line in ("marks s", "value 19"):
        assert line in bare.stdout.splitlines()
        assert line in watched.stdout.splitlines()


def test_a_sitecustomize_of_the_virtual_environment_runs(doctor: Doctor, tmp_path: Path) -> None:
    import venv

    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "sitecustomize.py").write_text(MARK.format("v") + "VALUE = 20\n")
    script = doctor.write("show.py", SHOW)
    python = str(tmp_path / "venv" / "bin" / "python")
    bare = doctor.run(python, str(script), watch=False)
    watched = doctor.run("--quiet", "--", python, str(script))
    assert "marks v\n" in bare.stdout
    assert (watched.status, watched.stdout) == (bare.status, bare.stdout)


@pytest.mark.slow
def test_a_rank_is_watched_whatever_the_user_s_sitecustomize_does(doctor: Doctor) -> None:
    mine = doctor.directory / "mine"
    mine.mkdir()
    (mine / "sitecustomize.py").write_text("raise ValueError('of the user')\n")
    result = doctor.run("--nproc-per-node=1", TRAIN, "--steps=2", env={"PYTHONPATH": str(mine)})
    check_ranks(result, 2, ranks=1)


LOADED = """
import sys
print(sorted(name for name in sys.modules if "ddpdoctor" in name or "importlib.util" == name))
"""


@pytest.mark.parametrize(
    "how", ["helper", "of a worker", pytest.param("of another session", marks=pytest.mark.slow)]
)
def test_a_python_that_is_no_rank_loads_nothing_of_ours(how: str, doctor: Doctor) -> None:
    doctor.write("helper.py", LOADED)
    bare = doctor.run(sys.executable, "helper.py", watch=False)
    if how == "helper":
        result = doctor.run("--", sys.executable, "helper.py")
        result.check_success()
        assert result.stdout == bare.stdout
        return
    doctor.write(
        "worker.py",
        f"""
        import subprocess, sys
        apart = {how == "of another session"}
        environment = None
        if apart:
            import os
            environment = {{k: v for k, v in os.environ.items() if k != "LOCAL_RANK"}}
        subprocess.run([sys.executable, "helper.py"], start_new_session=apart, env=environment)
        """,
    )
    result = doctor.run("--nproc-per-node", "1", "worker.py")
    result.check_success()
    assert result.stdout == bare.stdout


def test_an_error_before_torch_is_recorded(doctor: Doctor) -> None:
    doctor.write("early.py", "import no_such_module_at_all")
    result = doctor.run("--", sys.executable, "early.py")
    assert result.status == 1
    (error,) = result.run.strays
    assert isinstance(error, ErrorRecord)
    assert error.exception == "ModuleNotFoundError"
    bare = doctor.run(sys.executable, "early.py", watch=False)
    assert result.stderr.replace(result.ours, "") == bare.stderr


def test_a_hook_that_calls_the_one_before_is_called_once(doctor: Doctor) -> None:
    doctor.write(
        "chained.py",
        """
        import sys
        before = sys.excepthook
        def hook(*args):
            print("mine")
            before(*args)
        sys.excepthook = hook
        raise ValueError("early")
        """,
    )
    result = doctor.run("--", sys.executable, "chained.py")
    bare = doctor.run(sys.executable, "chained.py", watch=False)
    assert (result.status, result.stdout) == (bare.status, bare.stdout) == (1, "mine\n")
    assert result.stderr.replace(result.ours, "") == bare.stderr
    assert len(result.run.strays) == 1
