"""Digits of 28x28 pixels: the standard files of MNIST, or drawn ones of the same shape."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from job_setup import InputError
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

CLASSES = 10
SIZE = 28

GLYPHS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
"""The digits 0 to 9, five pixels wide and seven high."""


@dataclass(frozen=True, eq=False)
class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Pictures, uint8 ``[count, 28, 28]``, and the digits on them, int64 ``[count]``."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one image, float from 0 to 1, ``[1, 28, 28]``, and its label, a scalar."""
        return self.pixels[index].unsqueeze(0).float() / 255, self.labels[index]


def draw_digits(count: int, seed: int, max_angle: float = 0.0) -> Digits:
    """Return ``count`` drawn digits at random places, turned by up to ``max_angle`` degrees."""
    generator = torch.Generator().manual_seed(seed)
    glyphs = torch.tensor([[[float(dot) for dot in row] for row in g.split()] for g in GLYPHS])
    # Three by three pixels a dot, in the middle of an empty picture.
    glyphs = glyphs.repeat_interleave(3, dim=1).repeat_interleave(3, dim=2)
    pictures = functional.pad(glyphs, (6, 7, 3, 4)).unsqueeze(1)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    angles = torch.empty(count).uniform_(-1.0, 1.0, generator=generator)
    angles *= math.radians(max_angle)
    shifts = torch.empty(count, 2, 1).uniform_(-0.15, 0.15, generator=generator)
    cosines, sines = angles.cos(), angles.sin()
    turns = torch.stack([cosines, -sines, sines, cosines], dim=1).view(count, 2, 2)
    grid = functional.affine_grid(
        torch.cat([turns, shifts], dim=2), [count, 1, SIZE, SIZE], align_corners=False
    )
    drawn = functional.grid_sample(pictures[labels], grid, align_corners=False).squeeze(1)
    noise = torch.empty(count, SIZE, SIZE).uniform_(-0.2, 0.2, generator=generator)
    return Digits((drawn + noise).clamp_(0.0, 1.0).mul_(255).to(torch.uint8), labels)


def read_idx(path: Path) -> Tensor:
    """Return the uint8 tensor in an idx file, or in its ``.gz``."""
    packed = path.with_name(path.name + ".gz")
    try:
        content = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{path}: cannot be read, nor its .gz ({error}); --data must name the folder with "
            "the four idx files of MNIST"
        ) from error
    # Two zeros, 8 for unsigned bytes, the number of dimensions; then a big-endian size for each.
    dimensions = content[3] if content[:3] == b"\0\0\x08" else 0
    header, values = content[4 : 4 + 4 * dimensions], content[4 + 4 * dimensions :]
    complete = dimensions in (1, 3) and len(header) == 4 * dimensions
    shape = struct.unpack(f">{dimensions}I", header) if complete else (-1,)
    if len(values) != math.prod(shape):
        raise InputError(f"{path}: no complete idx file of bytes; download MNIST again")
    return torch.frombuffer(bytearray(values), dtype=torch.uint8).view(shape)


def read_digits(folder: Path, part: str) -> Digits:
    """Return the ``train`` or the ``t10k`` part of MNIST in ``folder``."""
    pixels = read_idx(folder / f"{part}-images-idx3-ubyte")
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte").long()
    if pixels.shape != (len(labels), SIZE, SIZE) or not len(labels) or labels.max() >= CLASSES:
        raise InputError(f"{folder}: the {part} images and labels are not those of MNIST")
    return Digits(pixels, labels)
