"""Labelled pictures: a folder with one folder per class, read with Pillow, or generated ones."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from job_setup import InputError
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm"}

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
"""Of each colour in ImageNet, on a scale from 0 to 1; networks trained on it expect it removed."""

DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def scan_folder(folder: Path) -> tuple[list[tuple[Path, int]], list[str]]:
    """Return the pictures below ``folder``, each with the number of its class, and the classes.

    Raises:
        InputError: There are none, or they cannot be read here.
    """
    if importlib.util.find_spec("PIL") is None:
        raise InputError("--data needs Pillow to read pictures: pip install 'ddpdoctor[images]'")
    try:
        # Sorted: a class has the same number on every rank, whatever order the disk has.
        classes = sorted(each.name for each in folder.iterdir() if each.is_dir())
        pictures = [
            (path, number)
            for number, name in enumerate(classes)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in SUFFIXES
        ]
    except OSError as error:
        raise InputError(
            f"{folder}: {error.strerror}; name a folder with one folder of pictures per class"
        ) from error
    if not pictures:
        raise InputError(f"{folder}: no pictures; it needs one folder of pictures per class")
    return pictures, classes


@dataclass(frozen=True, eq=False)
class FolderImages(Dataset[tuple[Tensor, int]]):
    """Pictures from files, cut to a square; ``augment`` cuts and flips them at random."""

    pictures: list[tuple[Path, int]]
    size: int
    augment: bool

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return one picture, float ``[3, size, size]`` of mean 0, and its class."""
        from PIL import Image

        path, label = self.pictures[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        side = float(min(image.size))
        place = torch.full((2,), 0.5)
        if self.augment:
            side *= torch.empty(()).uniform_(0.6, 1.0).item()
            place = torch.rand(2)
        left, top = (
            float(at) * (length - side) for at, length in zip(place, image.size, strict=True)
        )
        box = (left, top, left + side, top + side)
        content = bytearray(image.resize((self.size, self.size), box=box).tobytes())
        pixels = torch.frombuffer(content, dtype=torch.uint8).view(self.size, self.size, 3)
        return prepare(pixels.permute(2, 0, 1).float() / 255, self.augment), label


@dataclass(frozen=True, eq=False)
class GeneratedImages(Dataset[tuple[Tensor, int]]):
    """``count`` pictures of coloured squares under noise; each class has its own squares."""

    count: int
    classes: int
    size: int
    seed: int
    augment: bool

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return one picture, float ``[3, size, size]`` of mean 0, and its class."""
        label = index % self.classes
        squares = torch.rand((1, 3, 4, 4), generator=torch.Generator().manual_seed(label))
        pattern = functional.interpolate(squares, size=(self.size, self.size)).squeeze(0)
        own = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        noise = torch.randn((3, self.size, self.size), generator=own)
        return prepare((pattern + 0.3 * noise).clamp_(0.0, 1.0), self.augment), label


def prepare(image: Tensor, augment: bool) -> Tensor:
    """Return an image from 0 to 1 with mean and deviation of ImageNet, flipped half of the time."""
    if augment and torch.rand(()).item() < 0.5:
        image = image.flip(2)
    return (image - MEAN) / DEVIATION
