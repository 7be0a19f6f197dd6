"""The sample jobs do what their README says, alone and under torchrun."""

from __future__ import annotations

import os
import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

JOBS = Path(__file__).resolve().parents[2] / "sample_jobs"
RESNET = "resnet50_synthetic.py"
CIFAR = "cifar10.py"
TIMEOUT_S = 300.0
STOP_S = 120.0

Done = subprocess.CompletedProcess[str]

SMALL_RESNET = ("--iterations", "3", "--warmup", "1", "--batch-size", "2", "--image-size", "33")
SMALL_CIFAR = ("--train-size", "128", "--batch-size", "32")
FULL_CIFAR = "cifar-10-batches-py"
CIFAR_FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


def run_command(command: list[str], folder: Path) -> Done:
    """Run ``command`` in ``folder`` without the variables of a launcher around this test."""
    launcher = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    env = {name: value for name, value in os.environ.items() if name not in launcher}
    env["OMP_NUM_THREADS"] = "1"
    env["CUDA_VISIBLE_DEVICES"] = ""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # torchrun ends its workers on SIGTERM; SIGKILL would leave them running.
            process.terminate()
            process.communicate(timeout=STOP_S)
            raise
        finally:
            process.kill()
    return Done(command, process.returncode, stdout, stderr)


def run_alone(folder: Path, job: str, *options: str) -> Done:
    """Run a job as a single process without a launcher."""
    return run_command([sys.executable, str(JOBS / job), *options], folder)


def run_ranks(folder: Path, ranks: int, job: str, *options: str) -> Done:
    """Run a job under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return run_command([sys.executable, *launcher, str(JOBS / job), *options], folder)


def summary_of(done: Done) -> str:
    """Return the summary line of a healthy run.

    A Gloo process can abort while the interpreter shuts down, after all its work is done; such a
    run is healthy, too.
    """
    lines = [line for line in done.stdout.splitlines() if line.startswith("summary: ")]
    assert len(lines) == 1, done.stdout + done.stderr
    aborted = "terminate called without an active exception" in done.stderr
    assert done.returncode == 0 or aborted, done.stderr
    return lines[0]


def error_of(done: Done, job: str) -> str:
    """Return the one error line of a job that refused its input on every rank."""
    assert done.returncode != 0
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith(f"{job}: error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def error_of_single(done: Done, job: str) -> str:
    """Return the error line of a single process that ended with status 2 and no traceback."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return error_of(done, job)


def losses_of(done: Done) -> list[str]:
    """Return the losses as printed, one per iteration or epoch."""
    return re.findall(r" loss (\S+)", done.stdout)


def python2_string(content: bytes) -> bytes:
    """Return the pickle code of a Python 2 string, as the real files have them."""
    return b"T" + struct.pack("<I", len(content)) + content


def python2_batch(rows: int) -> bytes:
    """Return a batch of ``rows`` images with the very pickle codes of the real files."""
    image = bytes(value % 256 for value in range(3072))
    shape = b"M" + struct.pack("<H", rows) + b"M" + struct.pack("<H", 3072) + b"\x86"
    labels = b"](" + b"".join(b"K" + bytes([row % 10]) for row in range(rows)) + b"e"
    reconstruct = b"cnumpy.core.multiarray\n_reconstruct\n"
    array = reconstruct + b"cnumpy\nndarray\n" + b"K\x00\x85" + python2_string(b"b") + b"\x87R"
    dtype = b"cnumpy\ndtype\n" + python2_string(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + python2_string(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array += b"(K\x01" + shape + dtype + b"\x89" + python2_string(image * rows) + b"tb"
    items = python2_string(b"batch_label") + python2_string(b"a small batch")
    items += python2_string(b"labels") + labels + python2_string(b"data") + array
    return b"\x80\x02}(" + items + b"u."


def write_folder(folder: Path, content: bytes) -> Path:
    """Write ``content`` as each of the six batch files; return the folder around them."""
    batches = folder / FULL_CIFAR
    batches.mkdir()
    for name in CIFAR_FILES:
        (batches / name).write_bytes(content)
    return folder


@pytest.mark.slow
def test_resnet50_has_the_well_known_number_of_parameters(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(JOBS)!r}); from models import resnet50, small_cnn\n"
        "print(sum(parameter.numel() for parameter in resnet50().parameters()))\n"
        "print(len(list(small_cnn().buffers())) > 0)\n"
    )
    done = run_command([sys.executable, "-c", code], tmp_path)
    assert done.stdout.split() == ["25557032", "True"]


@pytest.mark.slow
def test_resnet50_reports_every_iteration_on_two_ranks(tmp_path: Path) -> None:
    done = run_ranks(tmp_path, 2, RESNET, *SMALL_RESNET, "--bucket-cap-mb", "5")
    summary = summary_of(done)
    line = r"iteration (\d)/3 time \d+\.\d+ s fp_time \d+\.\d+ s bp_time \d+\.\d+ s loss \d\S+"
    assert re.findall(line, done.stdout) == ["1", "2", "3"]
    assert "ranks 2, device cpu, backend gloo" in done.stdout
    numbers = r"summary: 2 iterations after 1 of warm-up, time median \S+ s p95 \S+ s, \S+ images/s"
    assert re.fullmatch(numbers, summary)


@pytest.mark.slow
def test_resnet50_alone_prints_the_same_losses_twice(tmp_path: Path) -> None:
    first, second = (run_alone(tmp_path, RESNET, *SMALL_RESNET) for _ in range(2))
    assert "2 iterations after 1 of warm-up" in summary_of(first)
    assert len(losses_of(first)) == 3
    assert losses_of(first) == losses_of(second)


@pytest.mark.slow
def test_resnet50_without_apex_says_what_to_do(tmp_path: Path) -> None:
    # A module that cannot be imported hides any installed Apex.
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "apex.py").write_text("raise ImportError('hidden')\n")
    code = (
        f"import sys, runpy; sys.path[:0] = [{str(hidden)!r}, {str(JOBS)!r}]\n"
        f"sys.argv = [{RESNET!r}, '--ddp-mode', 'apex']\n"
        f"runpy.run_path({str(JOBS / RESNET)!r}, run_name='__main__')\n"
    )
    error = error_of_single(run_command([sys.executable, "-c", code], tmp_path), RESNET)
    assert "NVIDIA Apex" in error
    assert "--ddp-mode torch" in error


@pytest.mark.parametrize(
    ("job", "options", "reason"),
    [
        (RESNET, ("--iterations", "0"), "--iterations: 0 is not above 0"),
        pytest.param(
            *(RESNET, ("--iterations", "3", "--warmup", "3"), "--warmup 3 leaves none"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(CIFAR, ("--batch-size", "-1"), "--batch-size: -1 is not above 0"),
            marks=pytest.mark.slow,
        ),
        (CIFAR, ("--resume",), "--resume needs --checkpoint"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path, job: str, options: tuple[str, ...], reason: str
) -> None:
    assert reason in error_of_single(run_alone(tmp_path, job, *options), job)


@pytest.mark.slow
def test_cifar10_learns_the_generated_images(tmp_path: Path) -> None:
    done = run_ranks(tmp_path, 2, CIFAR)
    accuracy = re.search(r"3 epochs, test accuracy (\S+) \(\d+ of 1000", summary_of(done))
    assert accuracy is not None
    assert float(accuracy[1]) > 0.5
    assert re.findall(r"epoch (\d)/3 \[#{30}\]", done.stderr) == ["1", "2", "3"]


@pytest.mark.slow
def test_cifar10_resumes_exactly_where_it_stopped(tmp_path: Path) -> None:
    options = (*SMALL_CIFAR, "--test-size", "21", "--checkpoint", "state.pt")
    whole = run_ranks(tmp_path, 2, CIFAR, *options, "--epochs", "2")
    summary_of(whole)
    (tmp_path / "state.pt").unlink()
    summary_of(run_ranks(tmp_path, 2, CIFAR, *options, "--epochs", "1"))
    resumed = run_ranks(tmp_path, 2, CIFAR, *options, "--epochs", "2", "--resume")
    assert summary_of(resumed) == summary_of(whole)
    assert "resumed from state.pt after epoch 1" in resumed.stdout
    assert "epoch 1/2" not in resumed.stdout
    assert losses_of(resumed) == losses_of(whole)[1:]
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (2, 0), (3, 0)])
def test_cifar10_tests_every_image_once(tmp_path: Path, ranks: int, workers: int) -> None:
    options = (*SMALL_CIFAR, "--test-size", "67", "--epochs", "1", "--workers", str(workers))
    done = run_ranks(tmp_path, ranks, CIFAR, *options)
    assert "of 67 test images)" in summary_of(done)
    assert f"ranks {ranks}," in done.stdout


@pytest.mark.slow
def test_cifar10_refuses_a_missing_folder_once_for_all_ranks(tmp_path: Path) -> None:
    done = run_ranks(tmp_path, 2, CIFAR, "--data", "absent")
    error = error_of(done, CIFAR)
    assert "data_batch_1: No such file or directory" in error
    assert "cifar-10-python.tar.gz" in error


@pytest.mark.parametrize(
    "damage",
    [
        "truncated",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("foreign", "misshapen")),
    ],
)
def test_cifar10_refuses_a_damaged_batch(tmp_path: Path, damage: str) -> None:
    data = write_folder(tmp_path, python2_batch(20))
    content = {
        "truncated": python2_batch(20)[:-500],
        "foreign": pickle.dumps(os.getcwd),
        "misshapen": pickle.dumps({b"data": b"", b"labels": [1]}),
    }[damage]
    (data / FULL_CIFAR / "test_batch").write_bytes(content)
    error = error_of_single(run_alone(tmp_path, CIFAR, "--data", str(data)), CIFAR)
    assert "test_batch: damaged, or no CIFAR-10 batch" in error


@pytest.mark.parametrize("content", [None, b"no checkpoint"])
@pytest.mark.slow
def test_cifar10_refuses_a_bad_checkpoint(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "state.pt").write_bytes(content)
    options = (*SMALL_CIFAR, "--checkpoint", "state.pt", "--resume")
    error = error_of_single(run_alone(tmp_path, CIFAR, *options), CIFAR)
    assert "state.pt: " in error
    assert "run without --resume" in error


@pytest.mark.slow
def test_cifar10_reads_the_real_format(tmp_path: Path) -> None:
    data = write_folder(tmp_path, python2_batch(20))
    done = run_alone(tmp_path, CIFAR, "--data", str(data / FULL_CIFAR), "--epochs", "1")
    assert "of 20 test images)" in summary_of(done)
    assert "100 for training, 20 for testing" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("protocol", [2, 5])
def test_cifar10_reads_what_numpy_pickles(tmp_path: Path, protocol: int) -> None:
    numpy: Any = pytest.importorskip("numpy", reason="numpy writes the files of this test")
    batch = {
        b"data": numpy.zeros((30, 3072), numpy.uint8),
        b"labels": [row % 10 for row in range(30)],
    }
    data = write_folder(tmp_path, pickle.dumps(batch, protocol=protocol))
    done = run_alone(tmp_path, CIFAR, "--data", str(data), "--epochs", "1")
    assert "of 30 test images)" in summary_of(done)
