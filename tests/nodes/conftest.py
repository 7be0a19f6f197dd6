"""The lab of network namespaces in which nodes check each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import Doctor
from tests.lab.checking import Checks, Make
from tests.lab.network import NETWORK, Lab, lab, why_not
from tests.nvml_stub import build
from tests.support.gpu_stub import HEALTHY


@pytest.fixture
def nodes(tmp_path: Path, doctor: Doctor) -> Iterator[Make]:
    """Makes a lab of so many hosts."""
    if why_not():
        pytest.skip(why_not())
    made: list[Checks] = []
    labs: list[contextlib.AbstractContextManager[Lab]] = []

    def make(size: int, network: str = NETWORK) -> Checks:
        holder = lab(size, tmp_path / f"lab{len(labs)}", network)
        made.append(Checks(holder.__enter__(), tmp_path, doctor.environment()))
        labs.append(holder)
        return made[-1]

    before = set(psutil.net_if_addrs())
    yield make
    for checks in made:
        checks.close()
    for holder in labs:
        holder.__exit__(None, None, None)
    assert set(psutil.net_if_addrs()) == before


@pytest.fixture
def one_gpu(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with a GPU, by the stub of the driver's library."""
    control = tmp_path / "control"
    control.write_text("\n".join(("gpus 1", *HEALTHY)))
    return {"LD_LIBRARY_PATH": str(build(tmp_path)), "NVML_STUB": str(control)}
