"""Failures whose cause is not what their last or loudest line says."""

from __future__ import annotations

import json

import pytest

from ddpdoctor.failures.log import read
from ddpdoctor.failures.verdict import findings
from tests.support.log_lines import FAILED, RAISED, STEPS, TIMEOUT, one

_OLD_MEMORY = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate {} (GPU 0; 11.99 GiB total "
    "capacity; {} already allocated; {} free; {}5.30 GiB reserved in total by PyTorch)"
)
_NEW_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity "
    "of 23.99 GiB of which {} is free. Including non-PyTorch memory, this process has 5.60 GiB "
    "memory in use. {}Of the allocated memory 5.43 GiB is allocated by PyTorch, and 120.00 MiB is "
    "reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    "message",
    [
        _OLD_MEMORY.format("20.00 MiB", "5.10 GiB", "5.20 GiB", ""),
        _NEW_MEMORY.format("64.00 MiB", "16.10 GiB", ""),
        _NEW_MEMORY.format("2.00 GiB", "16.10 GiB", ""),
    ],
)
def test_memory_that_was_refused_though_much_is_free_is_no_full_gpu(message: str) -> None:
    found = one(RAISED.format(message))
    assert (found.code, "though" in found.message) == ("DDP928", True)
    assert "the model is not too large" in found.fix


@pytest.mark.parametrize(
    "message",
    [
        _OLD_MEMORY.format("20.00 MiB", "5.10 GiB", "5.20 GiB", "5.50 GiB allowed; "),
        _NEW_MEMORY.format("20.00 MiB", "9.00 GiB", "5.50 GiB allowed; "),
    ],
)
def test_a_share_of_the_gpu_is_not_held_by_others(message: str) -> None:
    found = one(RAISED.format(message))
    assert "set_per_process_memory_fraction" in found.fix
    assert "held by others" not in found.fix


def test_memory_that_is_full_has_no_other_cause() -> None:
    found = one(RAISED.format(_NEW_MEMORY.format("2.00 GiB", "512.00 MiB", "")))
    assert found.message.endswith("ran out of GPU memory when it wanted 2.00 GiB")


_LISTS = '  File "/job/fairseq/distributed_utils.py", line 229, in all_gather_list\n    loads(b)\n'
_OBJECTS = (
    '  File "/opt/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2063, '
    "in _tensor_to_object\n    return _unpickler(buf).load()\n"
)


@pytest.mark.parametrize(
    "raised",
    [
        "Exception: Unable to unpickle data from other workers. all_gather_list requires all",
        _LISTS + "_pickle.UnpicklingError: invalid load key, '\\x00'.",
        _OBJECTS + "_pickle.UnpicklingError: pickle data was truncated",
        _OBJECTS + "EOFError: Ran out of input",
    ],
)
def test_ranks_out_of_step_read_data_of_another_collective(raised: str) -> None:
    found = one(RAISED.format(raised))
    assert found.code == "DDP803"
    assert "out of step" in found.message
    # Where another rank shows why, that is the cause.
    of_memory = RAISED.format("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate")
    assert one(RAISED.format(raised) + of_memory).code == "DDP928"


@pytest.mark.parametrize(
    "line",
    [
        TIMEOUT.format(1, 5, "ALLREDUCE", 8).replace("600000", "1").replace("600021", "46"),
        TIMEOUT.format(1, 5, "ALLREDUCE", 8).replace("600000", "1800").replace("600021", "1846"),
        RAISED.format("RuntimeError: [/g/unbound_buffer.cc:81] Timed out waiting 30ms for recv op")
        .replace("recv op", "recv operation to complete"),
        RAISED.format("torch.distributed.DistStoreError: wait timeout after 60ms, keys: /a/b"),
    ],
)  # fmt: skip
def test_a_timeout_of_milliseconds_is_the_cause(line: str) -> None:
    found = one(STEPS + line)
    assert (found.code, "its timeout is too short" in found.message) == ("DDP907", True)
    assert "timedelta" in found.fix
    assert one(STEPS + line + RAISED.format("KeyError: 5")).code == "DDP901"


def test_a_short_timeout_makes_no_rank_late() -> None:
    short = "".join(
        TIMEOUT.format(rank, 9 - rank, "ALLREDUCE", 8).replace("=600000", "=1") for rank in (0, 1)
    )
    assert "held the job up" not in one(short).message


_SHM = "RuntimeError: unable to open shared memory object </torch_7_8> in read-write mode"


@pytest.mark.parametrize(
    "more",
    [
        "RuntimeError: received 0 items of ancdata",
        "OSError: [Errno 24] Too many open files",
        _SHM + ": Too many open files (24)",
    ],
)
def test_shared_memory_that_cannot_be_opened_for_want_of_files(more: str) -> None:
    for text in (RAISED.format(_SHM) + RAISED.format(more), RAISED.format(more)):
        assert one(text).code == "DDP006"


def test_shared_memory_that_is_full_where_files_are_left() -> None:
    full = RAISED.format(_SHM + ": No space left on device (28)")
    assert one(full).code == "DDP005"


@pytest.mark.parametrize(
    ("raised", "step"),
    [
        ("AttributeError: module 'wandb' has no attribute 'init'", "named wandb hides"),
        ("AttributeError: module 'torch' has no attribute 'nn'", "named torch hides"),
        ("ModuleNotFoundError: No module named 'torch.nn'; 'torch' is not a package", "torch.py"),
        ("AttributeError: partially initialized module 'queue' has no attribute 'Queue' (most "
         "likely due to a circular import)", "named queue hides"),
        ("AttributeError: module 'random' has no attribute 'seed' (consider renaming "
         "'/job/random.py' since it has the same name as the standard library module named",
         "/job/random.py hides"),
        ("ImportError: cannot import name 'load_dataset' from 'datasets' (unknown location)",
         "named datasets hides"),
        ("ImportError: cannot import name 'load_dataset' from 'datasets' (/job/datasets/a.py)",
         "/job/datasets/a.py"),
    ],
)  # fmt: skip
def test_a_module_behind_a_file_of_the_user(raised: str, step: str) -> None:
    fix = one(RAISED.format(raised)).fix
    assert step in fix
    assert "pip show" not in fix


def test_a_module_of_another_version_is_not_hidden() -> None:
    for raised in (
        "AttributeError: module 'wandb' has no attribute 'plots'",
        "ImportError: cannot import name 'x' from 'a' (/opt/lib/python3.11/site-packages/a/b.py)",
    ):
        assert "pip show" in one(RAISED.format(raised)).fix


def _event(state: str, raw_error: object) -> str:
    metadata = {"global_rank": 3, "state": state, "raw_error": json.dumps(raw_error)}
    name = f"torchelastic.worker.status.{state}"
    return json.dumps({"name": name, "source": "WORKER", "metadata": metadata}) + "\n"


_ERROR_FILE = {
    "message": "ValueError: bad label",
    "extraInfo": {
        "py_callstack": 'Traceback (most recent call last):\n  File "/job/train.py", line 4, in f\n'
        "    g()\nValueError: bad label\n",
        "timestamp": "17",
    },
}


def test_an_event_of_torchelastic_names_the_rank_and_what_it_raised() -> None:
    found = one(_event("FAILED", {"message": _ERROR_FILE}))
    assert (found.message, found.ranks) == ("rank 3 raised ValueError: bad label", (3,))
    assert found.location is not None and found.location.line == 4
    unknown = one(_event("FAILED", {"message": "<NONE>"}))
    assert (unknown.code, unknown.ranks) == ("DDP907", (3,))
    assert not findings(read("job.log", [_event("SUCCEEDED", None).encode()]))


def test_a_bus_error_explains_a_worker_that_exited() -> None:
    exited = RAISED.format("RuntimeError: DataLoader worker (pid(s) 25) exited unexpectedly")
    assert one("Bus error (core dumped)\n" + exited).code == "DDP904"
    assert "--shm-size" in one(exited).fix


@pytest.mark.parametrize(
    "line",
    [
        "Illegal instruction (core dumped)",
        "Fatal Python error: Illegal instruction",
        "  exitcode  : -4 (pid: 77)",
        "[ERROR] [launch.py:321:sigkill_handler] ['python', 'a.py'] exits with return code = -4",
        "mp.spawn.ProcessExitedException: process 0 terminated with signal SIGILL",
        "command terminated with exit code 132",
        "srun: error: n3: task 5: Illegal instruction (core dumped)",
        "mpirun noticed that process rank 3 with PID 9 on node n exited on signal 4 (Ill",
        "*** SIGILL received at time=1755448771 on cpu 2 ***",
    ],
)
def test_an_illegal_instruction_is_a_cpu_that_lacks_it(line: str) -> None:
    found = one(line + "\n")
    assert (found.code, "/proc/cpuinfo" in found.fix) == ("DDP904", True)
    assert "/proc/cpuinfo" not in one("Segmentation fault (core dumped)\n").fix


_RESTART = (
    "INFO:torch.distributed.elastic.agent.server.api:[default] Worker group FAILED. 3/3 attempts "
    "left; will restart worker group\n"
)


def test_a_log_that_ends_with_a_restart_is_not_met_with_silence() -> None:
    found = one(STEPS + _RESTART)
    assert (found.code, "restart" in found.message) == ("DDP907", True)
    assert "missing: the output of the rank that failed first" in found.evidence
    assert one(FAILED.format("bad") + _RESTART).message == "rank 1 raised ValueError: bad"


def test_a_job_that_was_restarted_and_finished_is_healthy() -> None:
    log = STEPS + _RESTART + STEPS * 3 + "Training finished\n"
    assert all(each.severity == 1 for each in findings(read("job.log", [log.encode()])))


@pytest.mark.parametrize("cut", [" exited on sig", " exited on signal 9", ""])
def test_a_report_of_mpirun_that_is_cut_names_its_rank(cut: str) -> None:
    found = one(STEPS + f"mpirun noticed that process rank 3 with PID 0 on node algo-1{cut}\n")
    assert found.ranks == (3,)


@pytest.mark.parametrize("more", ["", "Aborted (core dumped)\n"])
def test_a_gpu_of_amd_that_hangs_is_the_cause(more: str) -> None:
    line = "HW Exception by GPU node-2 (Agent handle: 0x5580f0) reason :GPU Hang\n"
    found = one(STEPS + f":0:rocdevice.cpp :2675: 1010.0 us: [pid:77] {line}{more}")
    assert (found.code, "hang" in found.message) == ("DDP930", True)


def test_a_worker_whose_own_exception_is_missing() -> None:
    found = one(RAISED.format("OSError: Caught OSError in DataLoader worker process 3."))
    assert "num_workers=0" in found.fix


def test_an_error_of_gloo_without_an_exception_is_what_aborted() -> None:
    gloo = "[/pytorch/third_party/gloo/gloo/transport/uv/libuv.h:596] uv_accept: invalid argument\n"
    found = one(gloo + "*** SIGABRT received at time=1734086759 ***\n")
    assert "uv_accept: invalid argument" in found.message


def test_asking_for_a_rank_is_no_collective() -> None:
    cut = RAISED.format(
        '  File "/lib/python3/site-packages/torch/distributed/distributed_c10d.py", line 688,'
        " in get_rank\n    group = _get_default_group()"
    )
    found = one(cut)
    assert "collective" not in found.message
    assert "init_process_group" in found.fix


def test_the_status_of_a_command_of_the_old_launcher_is_said() -> None:
    text = (
        "subprocess.CalledProcessError: Command '['/usr/bin/python', '-u', 'train.py', "
        "'--local_rank=3']' returned non-zero exit status 2.\n"
    )
    assert "status 2" in one(text).message


def test_a_process_that_was_spawned_is_named_by_its_status() -> None:
    text = "mp.spawn.ProcessExitedException: process 2 terminated with exit code 1"
    assert one(text + "\n").ranks == (2,)


@pytest.mark.parametrize(
    ("frame", "doing"),
    [
        ('/lib/torch/distributed/checkpoint/state_dict_loader.py", line 9, in load', "loaded"),
        ('/lib/torch/distributed/checkpoint/state_dict_saver.py", line 9, in save', "saved"),
        ('/lib/torch/distributed/checkpoint/filesystem.py", line 9, in _write_item', "saved"),
        ('/lib/torch/distributed/checkpoint/filesystem.py", line 9, in read_data', "loaded"),
        ('/lib/torch/distributed/fsdp/_runtime_utils.py", line 9, in _pre_forward', "in FSDP"),
    ],
)
def test_a_folder_of_the_user_does_not_say_what_its_rank_did(frame: str, doing: str) -> None:
    own = '  File "/job/engines/fsdp/strategy/base.py", line 257, in apply\n    x()\n'
    assert doing in one(RAISED.format(f'{own}  File "{frame}\n    y()')).message
    assert "FSDP" not in one(RAISED.format(own.rstrip())).message


def test_the_condition_of_an_assertion_of_torch_is_no_advice() -> None:
    failed = (
        "RuntimeError: x.size() > 1 ASSERT FAILED at /reducer.cpp:5, please report a bug to PyTorch"
    )
    assert "shapes" not in one(RAISED.format(f"{failed}. Something else")).fix
    none = one(RAISED.format(f"{failed}. Expected at least one parameter. (Reducer)"))
    assert "requires_grad" in none.fix


def test_a_console_script_is_no_line_of_the_user() -> None:
    raised = (
        'Traceback (most recent call last):\n  File "/usr/local/bin/accelerate-launch", line 8, in '
        "<module>\n    main()\ntorch.distributed.elastic.errors.ChildFailedError: \n"
    )
    assert one(raised).location is None
