"""What is said of an exception that the table does not know, beyond its own words."""

from __future__ import annotations

import pytest

from ddpdoctor.failures.table import KINDS, PHASES, PHRASES, WORDS
from tests.support.log_lines import one

_LIBRARY = "/opt/lib/python3.11/site-packages"
_FRAMES = (
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 9, in <module>',
    "    main()",
)
_IN = (f'  File "{_LIBRARY}/megalib/core/layers.py", line 52, in divide', "    assert a % b == 0")
_WORKER = (
    "KeyError: Caught KeyError in DataLoader worker process 0.",
    "Original Traceback (most recent call last):",
    f'  File "{_LIBRARY}/torch/utils/data/_utils/worker.py", line 7, in _worker_loop',
    "    data = fetcher.fetch(index)",
)
_COLLATE = (
    f'  File "{_LIBRARY}/torch/utils/data/_utils/collate.py", line 84, in default_collate',
    "    return elem_type({key: [d[key] for d in batch]})",
)
_ITEM = ('  File "/job/data.py", line 31, in __getitem__', "    return self.items[index]")


def raised(*lines: str, rank: int = 1) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in (*_FRAMES, *lines))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("ModuleNotFoundError: No module named 'apex.amp'",), "pip show apex` in"),
        (("ImportError: cannot import name 'x' from 'y' (/y.py)",), "another version"),
        (("TypeError: f() got an unexpected keyword argument 'dtype'",), "another version"),
        (("FileNotFoundError: [Errno 2] No such file or directory: 'a'",), "working directory"),
        (("FileExistsError: [Errno 17] File exists: 'out'",), "exist_ok=True"),
        (("PermissionError: [Errno 13] Permission denied: '/data/x'",), "ls -ld"),
        (("json.decoder.JSONDecodeError: Expecting value: line 1",), "had finished"),
        (("OSError: [Errno 116] Stale file handle: '/data/x'",), "dmesg"),
        (("ConnectionRefusedError: [Errno 111] Connection refused",), "is a service of the job"),
        (("RuntimeError: Tensors must be contiguous",), ".contiguous()"),
        (("ValueError: Invalid rank 4, rank should be in the interval",), "leave both out"),
        (("IndexError: Target 10 is out of bounds.",), "outside of 0..classes-1"),
        (("x.Timeout: The file lock '/c/x.lock' is held",), "left the lock"),
        (("KeyError: 'image'",), "lacks that key"),
        (("KeyError: 'velocity'",), "Print the keys"),
        (
            ("""KeyError: "Dataset 'pages_train' is not registered! Available""",),
            "that launch() starts",
        ),
        (("KeyError: 'state_dict'",), "The checkpoint has other keys"),
        (("NameError: name 'meter' is not defined",), "Nothing sets meter"),
        (("UnboundLocalError: local variable 'x' referenced",), "this rank did not take"),
        (("AttributeError: 'NoneType' object has no attribute 'log'",), "rank 0 alone makes"),
        (("AttributeError: 'Net' object has no attribute 'pos'",), "This Net has no pos"),
        (("TypeError: '<=' not supported between instances of 'float' and 'str'",), "1.0e-5"),
        (("ZeroDivisionError: division by zero",), "fewer samples"),
        (("ValueError: num_samples should be a positive integer value",), "is empty"),
        (("ModuleNotFoundError: No module named 'utils.misc'",), "folder of the project"),
        (("ModuleNotFoundError: No module named 'megacv._ext'",), "without its compiled part"),
        (("OSError: org/net is not a local folder and is not a valid model",), "HF_TOKEN"),
        (("ImportError: it requires `megalib>=0.20.1`: pip install",), "Install megalib >=0.20.1"),
        (("SyntaxError: invalid syntax",), "older Python"),
        (("    raise ValueError(text)", "ValueError: bad"), "check of the script"),
        (("RuntimeError: bad",), "--debug-on-error"),
        (("RuntimeError: the axis has another length",), "Print the shapes and the index"),
        (("RuntimeError: tensors on different devices",), ".to(local_rank)"),
        ((*_IN, "ValueError: unsupported mode"), "See what /job/train.py:9 passes to megalib"),
        ((*_IN, "AssertionError: 96 is not divisible by 64"), "tensor-parallel size"),
        ((*_IN, "AssertionError: bad layers"), "megalib/core/layers.py:52: compare"),
        (("AssertionError: no data",), "check of the script"),
        ((*_IN, "ValueError: bad"), "See what /job/train.py:9 passes to megalib"),
        ((*_WORKER, *_COLLATE, "KeyError: 'image'"), "The samples of a batch differ"),
        ((*_WORKER, *_ITEM, "KeyError: 'image'"), "num_workers=0"),
        (_IN, "Get the rest of that rank's output"),
    ],
)
def test_an_exception_comes_with_the_next_step(lines: tuple[str, ...], said: str) -> None:
    found = one(raised(*lines))
    assert found.code == "DDP901"
    assert said in found.fix


@pytest.mark.parametrize(
    ("frames", "doing", "step"),
    [
        ((f'  File "{_LIBRARY}/torch/optim/adamw.py", line 9, in step',), "step", "full"),
        (('  File "/job/train.py", line 9, in run', "    loss.backward()"), "backward", "full"),
        (('  File "/job/train.py", line 9, in run', "    net = DDP(net)"), "in DDP", "NCCL"),
        (('  File "/job/train.py", line 9, in <module>', "    import megalib"), "import", "built"),
        (('  File "/job/a.py", line 9, in run', "    torch.save(x, path)"), "saved", "disk"),
    ],
)
def test_an_exception_without_its_message_says_what_it_was_doing(
    frames: tuple[str, ...], doing: str, step: str
) -> None:
    found = one(raised(*frames))
    assert "cut off in the log, as it " in found.message and doing in found.message
    assert step in found.fix and "names the exception" in found.fix


def test_words_that_are_nearer_than_a_failure_replace_its_fix() -> None:
    said = "stack expects each tensor to be equal size, but got [3] at entry 0 and [4] at entry 1"
    found = one(raised(f"RuntimeError: {said}"))
    assert (found.code, "collate_fn" in found.fix) == ("DDP959", True)


def test_the_line_of_a_library_is_named_beside_the_users() -> None:
    found = one(raised(*_IN, "ValueError: bad"))
    assert str(found.location) == "/job/train.py:9"
    assert "raised in megalib/core/layers.py:52 (divide)" in found.evidence
    assert str(one(raised(*_WORKER, *_ITEM, "KeyError: 'image'")).location) == "/job/data.py:31"


def test_what_all_ranks_raise_does_not_depend_on_the_rank() -> None:
    found = one(raised("KeyError: 'x'", rank=0) + raised("KeyError: 'x'", rank=1))
    assert "All ranks of the log (ranks 0 and 1) raised it" in found.fix


def test_what_one_rank_raises_may_be_of_its_data() -> None:
    lost = "RuntimeError: [/pytorch/gloo/pair.cc:553] Connection closed by peer [10.0.0.4]:6294"
    found = one(raised("KeyError: 'x'", rank=2) + raised(lost, rank=0))
    assert found.ranks == (2,)
    assert "only for rank 2" in found.fix
    assert "only for" not in one(raised("KeyError: 'x'")).fix


def test_a_loss_scale_that_fell_is_shown_before_an_exception() -> None:
    fell = "".join(f"overflow detected, setting loss scale to: 0.{n}\n" for n in (25, 12, 6))
    assert any("fell 3 times, to 0.6" in line for line in one(fell + raised(*_IN)).evidence)
    found = one(fell.replace("0.", "64") + raised(*_IN))
    assert not any("loss scale" in line for line in found.evidence)


def test_lines_and_paths_of_any_length_are_read() -> None:
    frame = f'  File "{_LIBRARY}/{"x/" * 5000}a.py", line {"9" * 5000}, in f'
    found = one(raised(frame, "    f()", "ValueError: bad"))
    assert found.code == "DDP901"
    assert len(found.fix) < 1000


def test_advice_is_in_whole_sentences_and_looks_only_so_far_ahead() -> None:
    steps = [each[:2] for each in (*PHRASES, *KINDS, *WORDS)]
    for pattern, step in (*steps, *((each.frame, each.usual) for each in PHASES)):
        assert step.endswith("."), step
        assert "[^\\n]*" not in pattern.pattern and ".*" not in pattern.pattern


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ("1.00 GiB already allocated; 0.50 GiB free; 2.00 GiB reserved in total", "are not held"),
        ("4.00 GiB already allocated; 0.50 GiB free; 9.00 GiB reserved in total", "in pieces"),
        ("8.50 GiB already allocated; 0.50 GiB free; 9.00 GiB reserved in total", "own tensors"),
        ("1.2.3 GiB already allocated; . GiB free", "Check who else holds it"),
    ],
)
def test_who_holds_the_memory_of_a_gpu_is_read_from_the_message(held: str, said: str) -> None:
    text = "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 10.00 GiB total capacity; {})"
    assert said in one(raised(f"RuntimeError: {text.format(held)}")).fix


def test_the_newer_message_of_the_allocator_is_read() -> None:
    said = (
        "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 10.00 GiB "
        "of which 95.75 MiB is free. Of the allocated memory 9.00 GiB is allocated by PyTorch, and "
        "300.00 MiB is reserved by PyTorch but unallocated."
    )
    assert "hold 9.0 of the GPU's 10.0 GiB" in one(raised(f"torch.OutOfMemoryError: {said}")).fix


def test_an_exception_without_a_message_is_shown_with_its_line() -> None:
    found = one(
        raised(
            '  File "/job/data.py", line 3, in f', "    assert len(a) == len(b)", "AssertionError"
        )
    )
    assert found.message.endswith("raised AssertionError at `assert len(a) == len(b)`")
    assert one(raised("StopIteration")).message.endswith("raised StopIteration at `main()`")


_TO = (
    "torch.distributed.DistNetworkError: The client socket has timed out after 60s while trying to "
    "connect to ({}, 29500)."
)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (_TO.format("7712045"), "7712045 is a number"),
        (_TO.format("8d2f00c1a9be"), "8d2f00c1a9be is the name of a container"),
        (_TO.format("10.0.0.4"), "firewall"),
        (_TO.format("gpu-node-12a"), "firewall"),
        (
            "n1:4:9 [0] NCCL WARN Connect to 10.0.0.7<217> failed : Connection refused",
            "nothing listens",
        ),
        ("n1:4:9 [0] NCCL WARN Connect to 10.0.0.7<217> failed : timed out", "ip_local_port"),
    ],
)
def test_the_words_about_an_address_tell_what_is_wrong_with_it(line: str, said: str) -> None:
    assert said in one(f"epoch 1 step 1\n{line}\n").fix


@pytest.mark.parametrize(
    ("folder", "lost", "said"),
    [
        ("/home/my code", "/home/my", "has a space"),
        ("F:\\my code", "F:\\\\my", "has a space"),
        ("/home/my code", "/home/code/a.txt", "in its container"),
        ("/home/mycode", "/home/my", "in its container"),
    ],
)
def test_a_path_that_was_cut_at_a_blank_is_told(folder: str, lost: str, said: str) -> None:
    where = f'  File "{folder}/data.py", line 3, in load'
    error = f"FileNotFoundError: [Errno 2] No such file or directory: '{lost}'"
    assert said in one(raised(where, "    open(path)", error)).fix


def test_a_rank_without_a_collective_under_way_is_told() -> None:
    line = (
        "[rank5]:[E723 01:58:45.6 ProcessGroupNCCL.cpp:1743] [PG ID 0 Rank 5] Received a dump "
        "signal due to a collective timeout from  rank 2 and we will try our best to dump the "
        "debug info. Last enqueued NCCL work: {}, last completed NCCL work: 36.\n"
    )
    assert one(line.format(36)).message.endswith("none itself: it had completed all up to #36")
    assert one(line.format(37)).message.endswith("first on rank 2")
