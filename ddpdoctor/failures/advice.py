"""The next step after a failure: by an exception's type and frames, or by what a timeout shows."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from ddpdoctor.core.formatting import named
from ddpdoctor.failures.entry import Weight
from ddpdoctor.failures.lines import users_file
from ddpdoctor.failures.occurrences import Occurrence, name_of
from ddpdoctor.failures.tracebacks import FRAME

# -- Exceptions that the table of failures does not know


_FIRST = "Fix this exception first; failures of other ranks follow from it."

_CUT = (
    "Get the rest of that rank's output, which names the exception: torchrun --log-dir DIR "
    "--redirects 3 --tee 3 keeps each rank's."
)

_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]|.*[/\\]python\d[\d.]*[/\\]")
"""The directory of a library's package in a path."""

_IN_WORKER = re.compile(r"_utils[/\\]worker\.py\"|Caught \w+ in DataLoader worker")
_COLLATES = re.compile(r"_utils[/\\]collate\.py\"")

_BY_TYPE = (
    (
        r"ModuleNotFoundError: No module named '([\w.]+)'",
        r"`python -m pip show \1` in the environment of the ranks, on their node: it is not "
        "installed there, or PYTHONPATH lacks its directory.",
    ),
    (
        r"ImportError: cannot import name|AttributeError: (?:partially initialized )?module '"
        r"|TypeError: [^\n]{0,200}unexpected keyword argument",
        "The package has another version than this code was written for: compare `pip show` with "
        "what its requirements name.",
    ),
    (
        r"(?:FileNotFound|NotADirectory)Error|\[Errno 2\]",
        "See whether the path exists on the node of that rank, and in its container. A relative "
        "path starts in the working directory of the rank.",
    ),
    (
        r"FileExistsError",
        "Ranks create it at the same time: exist_ok=True, or create it on rank 0 before a barrier.",
    ),
    (
        r"PermissionError",
        "See on the node of that rank who owns the path (`ls -ld`) and who the process is (`id`), "
        "which in a container may be another user.",
    ),
    (
        r"JSONDecodeError|UnicodeDecodeError|EOFError|BadZipFile|UnpicklingError|ParserError"
        r"|UnidentifiedImageError|BadGzipFile|ArrowInvalid",
        "The file is incomplete or has another format, or another rank writes it meanwhile: write "
        "it on rank 0 to a temporary name, os.replace, then a barrier.",
    ),
    (
        r"\[Errno (?:5|116|121)\]|Stale file handle|Input/output error",
        "The file system of that node failed: see `dmesg` there, and whether others see the path.",
    ),
    (
        r"Connection(?:Error|RefusedError|ResetError)|ConnectTimeout|ReadTimeout",
        "The other end is a service and no rank: see whether it runs, and its address.",
    ),
)
"""Advice by the text of an exception."""


class _Place(NamedTuple):
    """A frame of a traceback."""

    path: str
    line: int
    function: str

    @property
    def short(self) -> str:
        """The path within the packages that are installed."""
        return _INSTALLED.sub("", self.path)

    @property
    def package(self) -> str:
        """The first directory of that path, or the module."""
        return re.split(r"[/\\]", self.short)[0].removesuffix(".py")

    def __str__(self) -> str:
        return f"{self.short}:{self.line}" + (f" ({self.function})" if self.function else "")


def _places(traceback: str) -> list[_Place]:
    """Return the frames of the last traceback of a chain."""
    frames = filter(None, map(FRAME.match, traceback.splitlines()))
    return [_Place(each["path"], int(each["line"]), each["name"] or "") for each in frames]


def where(first: Occurrence) -> Iterator[str]:
    """Name the line of a library in which an exception was raised or cut off."""
    places = [] if first.interleaved else _places(first.traceback)
    if places and not users_file(places[-1].path):
        yield f"{'raised in' if first.text else 'the last frame shown is'} {places[-1]}"


def for_exception(first: Occurrence, failed: Collection[int], all_: Sequence[Occurrence]) -> str:
    """Return what to do about an exception that the table does not know.

    Args:
        first: The exception.
        failed: The ranks that raised it.
        all_: All occurrences in the run.
    """
    own = _by_frames(first) or (_by_type(first) or _by_place(first) if first.text else _CUT)
    return " ".join(filter(None, (own, _by_rank(failed, all_), _FIRST)))


def _by_frames(first: Occurrence) -> str:
    """Return advice by where an exception was raised."""
    if _IN_WORKER.search(first.traceback):
        if _COLLATES.search(first.traceback):
            return (
                "The samples of a batch differ in their keys, types or shapes: compare what the "
                "dataset returns, or pass a collate_fn."
            )
        return (
            "The dataset raised it in a DataLoader worker, for one of its samples: num_workers=0 "
            "stops there, and __getitem__ can print the index."
        )
    places = _places(first.traceback)
    if first.text.startswith("AssertionError") and places:
        if users_file(places[-1].path):
            return "It is a check of the script: print what it compares, on that rank."
        return (
            f"It is a check of {places[-1].package}, whose condition stands at {places[-1].short}:"
            f"{places[-1].line}: compare it with the configuration and the number of ranks."
        )
    return ""


def _by_place(first: Occurrence) -> str:
    """Return advice by whose line raised an exception of any type."""
    place, own = next(reversed(_places(first.traceback)), None), first.location
    if place is None or first.interleaved:
        return ""
    if not users_file(place.path):
        passed = f"{own or 'the script'} passes to {place.package}"
        return f"See what {passed}, and whether its installed version is the one that is meant."
    if first.text.startswith(("KeyError", "IndexError")):
        return "Print the keys, or the length, just before that line, on that rank."
    return ""


def _by_type(first: Occurrence) -> str:
    """Return advice by the exception's own words."""
    for pattern, advice in _BY_TYPE:
        if found := re.search(pattern, first.text):
            return found.expand(advice)
    return ""


def _by_rank(failed: Collection[int], all_: Sequence[Occurrence]) -> str:
    """Return what the ranks that raised it tell of its cause."""
    # A launcher reports that it stopped the others, which may not have come to raise it.
    seen = {e.rank for e in all_ if e.rank is not None and e.weight != Weight.WRAPPER}
    if len(failed) > 1 and seen <= {*failed}:
        return (
            f"All ranks of the log ({named(failed)}) raised it: it does not depend on the rank, "
            "and one process shows it as well."
        )
    if len(failed) == 1 and len(seen) > 1:
        return f"The log shows it of {named(failed)} alone: see its data, its node, its branches."
    return ""


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
    r"(?i)\b(?:map|tokeniz|pre-?process|download|load|cach|pack|index|sav|checkpoint|evaluat"
    r"|validat)"
)
_SLOW = (
    "Where one rank prepares data or saves while the others wait: do it before the start, or "
    "init_process_group(timeout=timedelta(hours=2))."
)


def for_timeout(first: Occurrence, all_: Sequence[Occurrence]) -> str:
    """Return what else to do after a timeout of NCCL, as far as the log shows it."""
    if name_of(first) not in ("nccl-timeout", "watchdog-stuck", "timed-out-elsewhere"):
        return ""
    texts = [each.text for each in all_]
    off = any("FlightRecorder is disabled" in text for text in texts)
    dumped = any("preparing to dump debug info" in text for text in texts)
    steps = (
        _FIRST_ONE if first.groups.get("seq") == "1" else "",
        _SLOW if _PREPARES.search(first.doing) else "",
        _DUMPED if dumped and not off else "",
        _RECORD,
    )
    return "".join(f" {step}" for step in steps if step)
