"""What `ddpdoctor scale` and `parity` override in an unedited job: arguments of torch, and seeds.

The environment of the job names them, and the probe applies them if the script gives other values.
Standard library only, since ranks load this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

VARIABLE = "DDPDOCTOR_OVERRIDES"
"""Environment variable with the overrides: ``bucket_cap_mb=25 num_workers=4``."""

DDP, LOADER, SEED, WEIGHTS = "DistributedDataParallel", "DataLoader", "seed", "weights"

Value = bool | int | float | str


class Override(NamedTuple):
    """An argument that can be overridden."""

    owner: str  # The class whose argument or behaviour it changes
    convert: Callable[[str], Value]  # Converts the text, or raises ValueError
    wanted: str  # The expected text, for the sentence "bucket_cap_mb needs ..."


def _megabytes(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise ValueError(text)
    return value


def _count(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
            raise ValueError(text)
        return int(text)

    return convert


def _one_of(**values: Value) -> Callable[[str], Value]:
    def convert(text: str) -> Value:
        try:
            return values[text.lower()]
        except KeyError:
            raise ValueError(text) from None

    return convert


_switch = _one_of(true=True, false=False)
_SWITCH = "true or false"

KNOWN: dict[str, Override] = {
    "bucket_cap_mb": Override(DDP, _megabytes, "a number of megabytes"),
    "gradient_as_bucket_view": Override(DDP, _switch, _SWITCH),
    "static_graph": Override(DDP, _switch, _SWITCH),
    "find_unused_parameters": Override(DDP, _switch, _SWITCH),
    "broadcast_buffers": Override(DDP, _switch, _SWITCH),
    "comm_hook": Override(
        DDP,
        _one_of(fp16_compress="fp16_compress", bf16_compress="bf16_compress"),
        "fp16_compress or bf16_compress",
    ),
    "accumulation": Override(DDP, _count(1), "a number of backward passes, 1 or more"),
    "ddp": Override(DDP, _one_of(apex="apex"), "apex"),
    "num_workers": Override(LOADER, _count(0), "a number, 0 or more"),
    "pin_memory": Override(LOADER, _switch, _SWITCH),
    "batch_size": Override(LOADER, _count(1), "a number of samples, 1 or more"),
    "seed": Override(SEED, _count(0), "a number, 0 or more"),
    "weights": Override(WEIGHTS, _one_of(kept="kept"), "kept"),
}
"""By name. ``comm_hook`` registers a hook of torch, ``accumulation`` all-reduces only every n-th
backward, ``ddp`` replaces the class, ``seed`` moves the seeds that the job sets, and
``weights`` leaves them as they are. All others are arguments of the constructor."""


def parse(text: str) -> dict[str, Value]:
    """Parse the environment variable into values by name.

    Raises:
        ValueError: A name is not known, or a value is not valid.
    """
    found: dict[str, Value] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        if name not in KNOWN:
            raise ValueError(name)
        found[name] = KNOWN[name].convert(value)
    return found
