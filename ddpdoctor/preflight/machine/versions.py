"""What is installed, read from files without importing it, and whether it fits together."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ddpdoctor.core.finding import Finding
from ddpdoctor.preflight.check import Outcome, check, failure, judged, warning
from ddpdoctor.preflight.situation import Situation, gpu_facts, visible_gpus


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
def installed_torch() -> Torch | None:
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
    found = installed_torch()
    if found is None:
        return False
    with contextlib.suppress(OSError):
        text = (found.folder / "distributed" / "run.py").read_text()
        return bool(re.search(r"args\.master_port is None\s*\)?\s*:", text))
    return False


@dataclass(frozen=True)
class Versions:
    """What is installed; empty where nothing is. ``cuda_of_driver`` is the newest CUDA it runs."""

    python: str
    torch: str
    cuda: str
    nccl: str
    driver: str
    cuda_of_driver: str
    pynvml: str
    hip: str = ""


def versions(situation: Situation) -> Versions:
    """What is installed here, read from files and from the driver; torch is not imported."""
    torch = installed_torch()
    facts = situation.shared(gpu_facts)
    return Versions(
        python=platform.python_version(),
        torch=torch.version if torch else "",
        cuda=torch.cuda if torch else "",
        nccl=_installed("nvidia-nccl-cu13") or _installed("nvidia-nccl-cu12") or "",
        driver=facts.driver,
        cuda_of_driver=facts.cuda,
        pynvml=_installed("pynvml"),
        hip=torch.hip if torch else "",
    )


def _installed(package: str) -> str:
    """The version of an installed package; empty if it is not there."""
    prefix = package.replace("-", "_") + "-"
    if not any(name.startswith(prefix) for name in _folders()):
        return ""
    # With it comes the parser of e-mail headers, which most machines need not wait for.
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@cache
def _folders() -> frozenset[str]:
    """The names of what lies in the folders that Python imports from, in lower case."""
    found: set[str] = set()
    for folder in sys.path:
        with contextlib.suppress(OSError):
            found.update(name.lower() for name in os.listdir(folder or "."))
    return frozenset(found)


@check("versions", "DDP014")
def version_fit(situation: Situation) -> Outcome:
    """torch, CUDA and the NVIDIA driver do not match, or torch is missing.

    What it finds
        A missing torch. A torch without CUDA on a machine with NVIDIA GPUs. A torch built for a
        newer major version of CUDA than the driver supports. The deprecated package pynvml (below
        version 12), which overwrites files of nvidia-ml-py.

    Why it is bad
        The job fails with "The NVIDIA driver on your system is too old", or silently trains on the
        CPU.

    How to fix it
        Install a torch build that matches the driver, or a newer driver.

    Example
        Wrong: torch for CUDA 13 with driver 550, which supports CUDA 12.4.
        Right: torch for CUDA 12 with that driver.

    When it stays silent
        For a newer minor version of CUDA than the driver's, which NVIDIA's minor version
        compatibility allows. For a torch without CUDA on a machine without GPUs.
    """
    found = versions(situation)
    parts = [f"Python {found.python}"]
    parts.append(f"torch {found.torch}" if found.torch else "no torch")
    parts.append(
        f"CUDA {found.cuda}" if found.cuda else f"ROCm {found.hip}" if found.hip else "no CUDA"
    )
    if found.nccl:
        parts.append(f"NCCL {found.nccl}")
    if found.driver:
        parts.append(f"driver {found.driver}" + (f" (CUDA {found.cuda_of_driver})"
                                                if found.cuda_of_driver else ""))  # fmt: skip
    return judged(", ".join(parts), judge(found, situation.shared(visible_gpus)))


def judge(found: Versions, gpus: int) -> Iterator[Finding]:
    """What does not fit, where a job would see so many GPUs."""
    if not found.torch:
        yield failure(
            "torch is not installed in this Python",
            fix="Install it, or run ddpdoctor in the environment of the job.",
            paste="pip install torch",
            about="torch",
        )
    elif gpus and not found.cuda and not found.hip:
        yield warning(
            f"torch {found.torch} is built without CUDA, and {gpus} GPUs stay unused",
            fix="Install the build of torch for this driver.",
            paste="pip install --force-reinstall torch",
            about="no CUDA",
        )
    elif gpus and found.cuda and found.cuda_of_driver:
        wanted, has = _major(found.cuda), _major(found.cuda_of_driver)
        if wanted > has > 0:
            yield failure(
                f"torch {found.torch} is built for CUDA {found.cuda}, and driver {found.driver} "
                f"runs CUDA {found.cuda_of_driver} at most",
                fix=f"Install a torch for CUDA {has}, or a newer driver.",
                paste="nvidia-smi --query-gpu=driver_version --format=csv",
                about="driver",
            )
    if found.pynvml and _major(found.pynvml) < 12:
        yield warning(
            f"the deprecated package pynvml {found.pynvml} overwrites files of nvidia-ml-py",
            fix="Remove it, and reinstall nvidia-ml-py.",
            paste="pip uninstall -y pynvml && pip install --force-reinstall nvidia-ml-py",
            about="pynvml",
        )


def _major(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isdigit() else 0
