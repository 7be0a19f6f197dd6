"""The next step after a failure: by an exception's type and frames, or by what a timeout shows."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from ddpdoctor.core.formatting import named
from ddpdoctor.core.opening import whole
from ddpdoctor.failures.entry import Weight
from ddpdoctor.failures.lines import shortened, users_file
from ddpdoctor.failures.occurrences import Occurrence, name_of
from ddpdoctor.failures.table import KINDS, PHASES, PHRASES, WORDS, Advice, Phase
from ddpdoctor.failures.tracebacks import FRAME, before_last, is_handled

# -- Exceptions that the table of failures does not know


_FIRST = "Fix this exception first; failures of other ranks follow from it."

_CUT = (
    "Get the rest of that rank's output, which names the exception: torchrun --log-dir DIR "
    "--redirects 3 --tee 3 keeps each rank's."
)

_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]|.*[/\\]python\d[\d.]*[/\\]")
"""The directory of a library's package in a path."""

_OVERFLOWS = 3  # Minimum falls of the loss scale that explain an end
_IN_WORKER = re.compile(r"_utils[/\\]worker\.py\"|Caught \w+ in DataLoader worker")
_RAISES = re.compile(r"\n +raise\b[^\n]*\n(?! *File )[^\n]*\Z")
"""The end of a traceback whose innermost line raises its exception itself."""

_CONDITION = re.compile(r"[^\n]* ASSERT FAILED at \S+, please report a bug to PyTorch\.?")
"""The C++ code of an assertion, whose words are names of variables."""

_COLLATES = re.compile(r"_utils[/\\]collate\.py\"")


class _Place(NamedTuple):
    """A frame of a traceback."""

    path: str
    line: int
    function: str

    @property
    def short(self) -> str:
        """The path within the packages that are installed."""
        return shortened(_INSTALLED.sub("", self.path))

    @property
    def package(self) -> str:
        """The first directory of that path, or the module."""
        return re.split(r"[/\\]", self.short)[0].removesuffix(".py")

    def __str__(self) -> str:
        return f"{self.short}:{self.line}" + (f" ({self.function})" if self.function else "")


def _places(first: Occurrence) -> list[_Place]:
    """Return the frames of an exception. Empty if they may be another process's."""
    own = "" if first.interleaved else before_last(first.traceback, first.text)
    frames = filter(None, map(FRAME.match, own.splitlines()))
    return [_Place(each["path"], whole(each["line"]), each["name"] or "") for each in frames]


def where(first: Occurrence) -> Iterator[str]:
    """Name the line of a library in which an exception was raised or cut off."""
    places = _places(first)
    if places and not users_file(places[-1].path):
        yield f"{'raised in' if first.text else 'the last frame shown is'} {places[-1]}"


def phase(first: Occurrence) -> Phase | None:
    """Return what a process was doing when it raised an exception, by the innermost frame."""
    frames: list[str] = []
    for text in () if first.interleaved else first.traceback.splitlines():
        if FRAME.match(text):
            frames.append(text)
        elif frames:
            frames[-1] += f"\n{text}"
    # Of a line with several calls, only the innermost frame shows which one was under way.
    outer = (each if each.count("(") < 2 else each.partition("\n")[0] for each in frames[-2::-1])
    found = (p for text in (*frames[-1:], *outer) for p in PHASES if p.frame.search(text))
    return next(found, None)


def for_exception(first: Occurrence, failed: Collection[int], all_: Sequence[Occurrence]) -> str:
    """Return what to do about an exception that the table does not know.

    Args:
        first: The exception.
        failed: The ranks that raised it.
        all_: All occurrences in the run.
    """
    worker, own = _by_worker(first), of_text(first.text, first.traceback)
    if not first.text:
        known = phase(first)
        if sum(name_of(each) == "loss-scale-falls" for each in all_) >= _OVERFLOWS:
            worker = (
                "Gradients overflow in fp16: use bf16 if the GPU supports it, or else a lower "
                "learning rate."
            )
        own = f"{known.usual} {_CUT}" if known is not None else _CUT
    if not own and not worker:
        said = _CONDITION.sub("", first.text)
        own = f"{of_text(said, advice=WORDS)} {_by_place(first)}".strip()
    rest = _CUT if is_handled(first.text) else ""
    steps = [*filter(None, (worker, own, rest, _by_rank(failed, all_)))]
    others = any(e.rank is not None and e.rank not in failed for e in all_)
    return " ".join([*steps, *([_FIRST] if others or not steps else ())])


def _by_worker(first: Occurrence) -> str:
    """Return advice on an exception of a DataLoader worker."""
    if not _IN_WORKER.search(first.traceback):
        return ""
    if _COLLATES.search(first.traceback):
        return (
            "The samples of a batch differ in their keys, types or shapes: compare what the "
            "dataset returns, or pass a collate_fn."
        )
    return (
        "The dataset raised it in a DataLoader worker, for one of its samples: num_workers=0 stops "
        "there, and __getitem__ can print the index."
    )


def _by_place(first: Occurrence) -> str:
    """Return advice by whose line raised an exception of any type."""
    places = _places(first)
    if not places:
        return ""
    place, checks = places[-1], first.text.startswith("AssertionError")
    if users_file(place.path):
        if checks or _RAISES.search(first.traceback):
            return "It is a check of the script: print what it compares, on that rank."
        if first.text.startswith(("KeyError", "IndexError")):
            return "Print the keys, or the length, just before that line, on that rank."
        return "`ddpdoctor run --debug-on-error` holds that rank there, with its variables."
    if checks:
        return (
            f"It is a check of {place.package}, whose condition stands at {place.short}:"
            f"{place.line}: compare it with the configuration and the number of ranks."
        )
    passed = f"{first.location or 'the script'} passes to {place.package}"
    return f"See what {passed}, and whether its installed version is the intended one."


def of_text(text: str, traceback: str = "", advice: Sequence[Advice] = (*PHRASES, *KINDS)) -> str:
    """Return advice by an exception's own words. Empty if there is none."""
    for each in advice:
        found = each.pattern.search(text)
        if found and each.within.search(f"{traceback}\n{text}"):
            return found.expand(each.step)
    return ""


def _by_rank(failed: Collection[int], all_: Sequence[Occurrence]) -> str:
    """Return what the ranks that raised it tell of its cause."""
    # A launcher reports that it stopped the others, which may not have come to raise it.
    seen = {e.rank for e in all_ if e.rank is not None and e.weight != Weight.WRAPPER}
    if len(failed) > 1 and seen <= {*failed}:
        return (
            f"All ranks of the log ({named(failed)}) raised it, so it hardly depends on the rank: "
            "try it with one process."
        )
    if len(failed) == 1 and len(seen) > 1:
        return f"The log shows it only for {named(failed)}: check its data, node and branches."
    return ""


# -- GPU memory


_AMOUNT = r"([\d.]+) ([KMG])iB"
_CAPACITY = re.compile(rf"total capaci?ty of {_AMOUNT}|{_AMOUNT} total capacity")
_FREE = re.compile(rf"{_AMOUNT} (?:is )?free")
_ALLOWED = re.compile(rf"{_AMOUNT} allowed")
_USED = re.compile(rf"{_AMOUNT} (?:is allocated by PyTorch|already allocated)")
_UNUSED = re.compile(rf"{_AMOUNT} is reserved by PyTorch but unallocated")
_RESERVED = re.compile(rf"{_AMOUNT} reserved in total")
_GIB = {"K": 2.0**-20, "M": 2.0**-10, "G": 1.0}
_SMALLER = "Otherwise, use a smaller batch on each rank, or activation checkpointing."
_MUCH = 0.15  # Share of a GPU's memory that is worth a remark


def for_memory(first: Occurrence) -> str:
    """Return who holds the memory of a GPU, as the message of torch's allocator shows it."""
    capacity, free, used = (_gib(each, first.text) for each in (_CAPACITY, _FREE, _USED))
    if not capacity or not used or not name_of(first).startswith("gpu-memory"):
        return ""
    allowed = _gib(_ALLOWED, first.text)
    if 0 < allowed < (1 - _MUCH) * capacity:
        return (
            f"The process may use {allowed:.1f} of the GPU's {capacity:.1f} GiB: see its share "
            f"(torch.cuda.set_per_process_memory_fraction). {_SMALLER}"
        )
    if name_of(first) == "gpu-memory-refused":
        return ""
    unused = _gib(_UNUSED, first.text) or max(0.0, _gib(_RESERVED, first.text) - used)
    others = capacity - free - used - unused
    if others > _MUCH * capacity:
        return (
            f"{others:.1f} of the GPU's {capacity:.1f} GiB are not held by this process's tensors: "
            "`nvidia-smi` shows an orphan of an earlier job, other ranks on this GPU "
            f"(torch.cuda.set_device(local_rank)), or another user. {_SMALLER}"
        )
    if unused > _MUCH * capacity:
        return (
            f"{unused:.1f} GiB are reserved, but in pieces that are too small: "
            f"set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. {_SMALLER}"
        )
    return (
        f"This process's own tensors hold {used:.1f} of the GPU's {capacity:.1f} GiB: use a "
        "smaller batch on each rank, shorter samples, activation checkpointing, bf16, FSDP or ZeRO."
    )


def _gib(pattern: re.Pattern[str], text: str) -> float:
    found = pattern.search(text)
    number, unit = [each for each in found.groups() if each] if found else ("0", "G")
    return float(number.rstrip(".") or 0) * _GIB[unit] if number.count(".") < 2 else 0.0


# -- Timeouts of NCCL


_RECORD = (
    "To know more, run it with TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 "
    "TORCH_FR_DUMP_TEMP_FILE=/shared/fr_ (before 2.8 TORCH_NCCL_TRACE_BUFFER_SIZE, before 2.9 "
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE): `ddpdoctor report --flight /shared` names rank and line."
)
_DUMPED = (
    "If torch's Flight Recorder was on, as it is by default from torch 2.12, `ddpdoctor report "
    "--flight DIR` reads what each rank wrote: DIR is that of TORCH_FR_DUMP_TEMP_FILE, else "
    "~/.cache/torch or /tmp of each node."
)
_FIRST_ONE = (
    "It is the first collective: try NCCL_P2P_DISABLE=1 (GPUs of one node), NCCL_IB_DISABLE=1 and "
    "NCCL_SOCKET_IFNAME (several nodes), one at a time."
)
_PREPARES = re.compile(
    r"(?i)\b(?:tokeniz|pre-?process|download|load|cach|pack|index|sav|evaluat|validat)\w*ing\b"
    r"|\b(?:map|tokenize|pre-?process|filter|evaluat|validat)\w*\b[^\n]*\d ?%|running tokenizer"
)
_SLOW = (
    "The line before it shows preparation, a save or an evaluation: if one rank did that while the "
    "others waited, do it before the start, or set init_process_group(timeout=timedelta(hours=2))."
)


def for_timeout(first: Occurrence, fix: str, all_: Sequence[Occurrence]) -> str:
    """Add to a fix what else to do after a timeout of NCCL, as far as the log shows it."""
    if name_of(first) not in ("nccl-timeout", "watchdog-stuck", "timed-out-elsewhere"):
        return fix
    texts = [each.text for each in all_]
    off = any("FlightRecorder is disabled" in text for text in texts)
    dumped = any("preparing to dump debug info" in text for text in texts)
    steps = (
        _SLOW if _PREPARES.search(first.doing) else "",
        fix,
        _FIRST_ONE if first.groups.get("seq") == "1" else "",
        _DUMPED if dumped and not off else "",
        _RECORD,
    )
    return " ".join(filter(None, steps))
