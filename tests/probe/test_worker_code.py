"""Which lines only DataLoader workers run, by real loaders of torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from ddpdoctor.probe.runtime import debugger, torch_private

HERE = Path(__file__)


class InWorkers(Dataset[int]):
    def __len__(self) -> int:
        return 4  # mark: length

    def __getitem__(self, index: int) -> int:
        def inner(value: int) -> int:
            return value + 1  # mark: inner

        return inner(index)  # mark: item


class InBoth(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index  # mark: both


def doubled(value: int) -> int:
    return value * 2  # mark: transform


class Added:
    def __init__(self, value: int) -> None:
        self.value = value  # mark: setup

    def __call__(self, value: int) -> int:
        return value + self.value  # mark: called


class Parts(Dataset[int]):
    def __init__(self) -> None:
        self.transforms: list[Callable[[int], int]] = [doubled, Added(1), partial(scaled, 2)]
        self.size = self.count()

    def count(self) -> int:
        return 4  # mark: count

    def __len__(self) -> int:
        return self.size

    def load(self, index: int) -> int:
        return self.decode(index) + self.count()  # mark: load

    @staticmethod
    def decode(index: int) -> int:
        return index  # mark: decode

    @torch.no_grad()
    def __getitem__(self, index: int) -> int:
        value = self.load(index)  # mark: decorated
        for transform in self.transforms:
            value = transform(value)
        return value


def scaled(factor: int, value: int) -> int:
    return factor * value  # mark: partial


def collate(values: list[int]) -> list[int]:
    return values  # mark: collate


def mark(name: str) -> int:
    lines = HERE.read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"# mark: {name}"))


def test_lines_of_workers_alone() -> None:
    calls: list[int] = []
    debugger.worker_code_found.append(lambda: calls.append(1))
    for dataset, workers in ((InWorkers(), 1), (InBoth(), 1), (InBoth(), 0)):
        loader: DataLoader[int] = DataLoader(
            dataset,
            num_workers=workers,
            collate_fn=collate if workers else None,
            multiprocessing_context="fork" if workers else None,
        )
        iterator = iter(loader)
        debugger.note_worker_code(iterator)
        assert torch_private.workers_of(iterator) == workers
        assert len(list(iterator)) == 4
    debugger.worker_code_found.pop()
    assert len(calls) == 2
    marks = {name: mark(name) for name in ("length", "inner", "item", "both", "collate")}
    found = debugger.lines_in_workers(str(HERE), marks.values())
    assert found == [marks["inner"], marks["item"], marks["collate"]]
    assert debugger.lines_in_workers(__file__ + "x", marks.values()) == []


def test_what_a_data_set_calls() -> None:
    """Wrapped data sets, transforms, and methods; not what runs when the data set is made."""
    parts = Parts()
    wrapped: ConcatDataset[int] = ConcatDataset([Subset(parts, [0, 1]), Subset(parts, [2, 3])])
    iterator = iter(DataLoader(wrapped, num_workers=1, multiprocessing_context="fork"))
    debugger.note_worker_code(iterator)
    assert len(list(iterator)) == 4
    within = ["transform", "called", "load", "decode", "decorated", "partial"]
    marks = [mark(name) for name in [*within, "setup", "count"]]
    assert debugger.lines_in_workers(str(HERE), marks) == marks[: len(within)]
