"""The private parts of ``torch.utils.data.dataloader`` that the probe reads.

As with `ddpdoctor.probe.runtime.torch_private`, each is guarded by the feature.
"""

from __future__ import annotations

from typing import Any


def loader_iterator_classes(dataloader: Any) -> list[Any]:
    """The classes of ``torch.utils.data.dataloader`` that have a ``_next_data`` (2.4 to 2.15).

    Without them data waits count as ``other``.
    """
    names = ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter")
    classes = [getattr(dataloader, name, None) for name in names]
    return [each for each in classes if "_next_data" in vars(each or object)]


def is_first_batch(iterator: Any) -> bool:
    """Whether a loader's iterator was never asked before: ``_num_yielded`` (2.4 to 2.15).

    Without it the time between epochs is charged to the first step of the next.
    """
    return getattr(iterator, "_num_yielded", None) == 0


def index_sampler_of(iterator: Any) -> Any:
    """What a loader's iterator takes indices from: ``_index_sampler`` (2.4 to 2.15), or None."""
    return getattr(iterator, "_index_sampler", None)


def sampler_of(iterator: Any) -> Any:
    """The sampler behind a loader's iterator, or None."""
    outer = index_sampler_of(iterator)
    return getattr(outer, "sampler", outer)


def loader_iterator_base(dataloader: Any) -> Any:
    """``_BaseDataLoaderIter``, whose ``_next_index`` asks the sampler for a batch (2.4 to 2.15).

    Without it what the ranks draw is not known.
    """
    base = getattr(dataloader, "_BaseDataLoaderIter", None)
    return base if hasattr(base, "_next_index") else None


LOADER_BUILT = "_DataLoader__initialized"
"""What ``DataLoader.__init__`` sets when its samplers are in place (2.4 to 2.15).

Without it a loader is named by the line that iterates over it, not by the one that built it.
"""


def samplers_of(iterator: Any) -> list[Any]:
    """The sampler behind a loader's iterator, and the batch sampler around it, if there are any."""
    outer = index_sampler_of(iterator)
    inner = getattr(outer, "sampler", None)
    return [each for each in (inner, outer) if each is not None]


def pass_of(iterator: Any) -> Any:
    """What changes when a loader's iterator begins again: ``_sampler_iter`` (2.4 to 2.15), or None.

    Without it the passes of persistent workers count as one.
    """
    return getattr(iterator, "_sampler_iter", None)


def is_iterable_style(iterator: Any) -> bool:
    """Whether the loader's data set is iterable-style: ``_dataset_kind`` (2.4 to 2.15)."""
    return getattr(iterator, "_dataset_kind", 0) == 1


def dataset_of(iterator: Any) -> Any:
    """The data set behind a loader's iterator: ``_dataset`` (2.4 to 2.15), or None."""
    return getattr(iterator, "_dataset", None)


def batches_at_once(iterator: Any) -> bool:
    """Whether the loader itself makes batches of samples: ``_auto_collation`` (2.4 to 2.15)."""
    return bool(getattr(iterator, "_auto_collation", True))


def keeps_order(iterator: Any) -> bool:
    """Whether batches come in the order they were drawn: ``_in_order`` (2.6 to 2.15), else yes."""
    return bool(getattr(iterator, "_in_order", True))


def workers_of(iterator: Any) -> int:
    """How many worker processes a loader's iterator has: ``_num_workers`` (2.4 to 2.15), or 0."""
    workers = getattr(iterator, "_num_workers", 0)
    return workers if isinstance(workers, int) else 0


def worker_functions_of(iterator: Any) -> list[Any]:
    """What a loader's workers call beside its data set: ``_collate_fn``, ``_worker_init_fn``.

    None where there is none (2.4 to 2.15 have them, the second only with workers).
    """
    return [getattr(iterator, name, None) for name in ("_collate_fn", "_worker_init_fn")]
