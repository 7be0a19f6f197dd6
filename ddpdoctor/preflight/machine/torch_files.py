"""What the files of the installed torch say, without importing it."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Torch:
    """The installed torch.

    Attributes:
        folder: Where it lies.
        version: Such as ``2.13.0+cpu``.
        cuda: The CUDA it was built for, such as ``12.8``; empty for one without.
        hip: The same of ROCm.
    """

    folder: Path
    version: str
    cuda: str = ""
    hip: str = ""


@cache
def torch() -> Torch | None:
    """The torch that a job in this interpreter would import; None if there is none."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        with contextlib.suppress(OSError):
            text = (Path(folder) / "version.py").read_text()
            return Torch(Path(folder), **{name: _value(text, name) for name in _NAMES.values()})
    return None


_NAMES = {"__version__": "version", "cuda": "cuda", "hip": "hip"}


def _value(text: str, name: str) -> str:
    """The string that ``version.py`` assigns to a name; empty for None."""
    written = next(key for key, value in _NAMES.items() if value == name)
    match = re.search(rf"^{written}\s*(?::[^=]*)?=\s*['\"]([^'\"]*)['\"]", text, re.MULTILINE)
    return match[1] if match else ""


@cache
def torchrun_picks_a_port() -> bool:
    """Whether torchrun takes a free port on one machine when none is given, not 29500.

    Since torch 2.13 it then turns its static rendezvous into one at ``localhost:0``.
    """
    found = torch()
    if found is None:
        return False
    with contextlib.suppress(OSError):
        text = (found.folder / "distributed" / "run.py").read_text()
        return bool(re.search(r"args\.master_port is None\s*\)?\s*:", text))
    return False
