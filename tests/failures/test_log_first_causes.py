"""Failures whose cause is not what their last or loudest line says."""

from __future__ import annotations

import pytest

from tests.support.log_lines import RAISED, one

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
