"""Reading the files of CIFAR-10's Python version, without numpy and without running their pickles.

The files are pickles of numpy arrays. A pickle may call anything when it is read; this reader lets
it call stand-ins for the few names that such a file needs, and nothing else.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from job_setup import InputError, one_line
from torch import Tensor
from torch.utils.data import Dataset

CLASSES = 10
IMAGE_SHAPE = (3, 32, 32)
IMAGE_BYTES = math.prod(IMAGE_SHAPE)
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILES = ("test_batch",)


@dataclass(frozen=True, eq=False)
class Images(Dataset[tuple[Tensor, Tensor]]):
    """Pictures, uint8 ``[count, 3, 32, 32]``, and their classes, int64 ``[count]``."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one image ``[3, 32, 32]`` and its label, a scalar."""
        return self.pixels[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return a whole batch at once: images ``[batch, 3, 32, 32]``, labels ``[batch]``.

        The loader prefers this over one ``__getitem__`` per image; a batch then costs one copy.
        """
        chosen = torch.tensor(indices)
        return self.pixels[chosen], self.labels[chosen]


class PickledArray:
    """Stand-in for a numpy array in a pickle: keeps its content without needing numpy."""

    def __init__(self, *_arguments: object) -> None:
        self.shape: object = None
        self.dtype: object = None
        self.fortran_order: object = None
        self.content: object = None

    def __setstate__(self, state: tuple[object, object, object, object, object]) -> None:
        _version, self.shape, self.dtype, self.fortran_order, self.content = state

    @classmethod
    def from_buffer(
        cls, content: object, dtype: object, shape: object, order: object
    ) -> PickledArray:
        """Return the array that pickle protocol 5 describes by these four values."""
        array = cls()
        array.__setstate__((1, shape, dtype, order == "F", content))
        return array


class PickledDtype:
    """Stand-in for a numpy data type in a pickle: keeps its code, such as ``u1`` for uint8."""

    def __init__(self, code: str | bytes, *_arguments: object) -> None:
        self.code = code.decode("latin-1") if isinstance(code, bytes) else code

    def __setstate__(self, _state: object) -> None:
        """Ignore byte order and alignment: a byte has none."""


def latin1_bytes(text: str, _encoding: object) -> bytes:
    """Return bytes as Python 3 puts them into pickles of protocol 2."""
    return text.encode("latin-1")


ALLOWED_GLOBALS: dict[tuple[str, str], Callable[..., object]] = {
    ("numpy", "ndarray"): PickledArray,
    ("numpy", "dtype"): PickledDtype,
    ("numpy.core.multiarray", "_reconstruct"): PickledArray,
    ("numpy._core.multiarray", "_reconstruct"): PickledArray,
    ("numpy.core.numeric", "_frombuffer"): PickledArray.from_buffer,
    ("numpy._core.numeric", "_frombuffer"): PickledArray.from_buffer,
    ("_codecs", "encode"): latin1_bytes,
}


class BatchUnpickler(pickle.Unpickler):
    """Unpickler for CIFAR-10 batches that cannot call anything but the stand-ins above."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return the stand-in for a global of the pickle."""
        stand_in = ALLOWED_GLOBALS.get((module_name, global_name))
        if stand_in is None:
            raise pickle.UnpicklingError(f"it must not refer to {module_name}.{global_name}")
        return stand_in


def parse_batch(batch: object) -> Images:
    """Return the images of an unpickled batch; raise ValueError if it holds anything else."""
    if not isinstance(batch, dict) or not {b"data", b"labels"} <= batch.keys():
        raise ValueError("it is no dictionary with data and labels")
    array, labels = batch[b"data"], batch[b"labels"]
    if not isinstance(labels, list) or not labels:
        raise ValueError("its labels are no list")
    if not all(type(label) is int and 0 <= label < CLASSES for label in labels):
        raise ValueError(f"a label is no whole number from 0 to {CLASSES - 1}")
    if not isinstance(array, PickledArray) or not isinstance(array.dtype, PickledDtype):
        raise ValueError("its data is no numpy array")
    shape = (len(labels), IMAGE_BYTES)
    if array.shape != shape or array.dtype.code != "u1":
        raise ValueError(f"its data is not of shape {shape} and type uint8 for {shape[0]} labels")
    if not isinstance(array.content, (bytes, bytearray)) or len(array.content) != math.prod(shape):
        raise ValueError("its data is incomplete")
    # A copy, because torch wants memory that it may write to.
    pixels = torch.frombuffer(bytearray(array.content), dtype=torch.uint8)
    pixels = pixels.view(shape[::-1]).t() if array.fortran_order else pixels.view(shape)
    return Images(pixels.reshape(-1, *IMAGE_SHAPE), torch.tensor(labels))


def read_batch(path: Path) -> Images:
    """Return the images of one batch file of CIFAR-10's Python version."""
    try:
        with path.open("rb") as file:
            return parse_batch(BatchUnpickler(file, encoding="bytes").load())
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}; --data must name the folder cifar-10-batches-py, or the "
            "one around it, unpacked from cifar-10-python.tar.gz"
        ) from error
    except Exception as error:
        # Damaged bytes can make an unpickler raise nearly anything.
        raise InputError(
            f"{path}: damaged, or no CIFAR-10 batch ({one_line(error)}); unpack "
            "cifar-10-python.tar.gz again"
        ) from error


def read_cifar10(data: Path) -> tuple[Images, Images]:
    """Return the training and the test set in ``data`` or its folder cifar-10-batches-py."""
    nested = data / "cifar-10-batches-py"
    folder = nested if nested.is_dir() else data

    def read(names: tuple[str, ...]) -> Images:
        parts = [read_batch(folder / name) for name in names]
        return Images(
            torch.cat([part.pixels for part in parts]), torch.cat([part.labels for part in parts])
        )

    return read(TRAIN_FILES), read(TEST_FILES)
