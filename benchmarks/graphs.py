"""What it costs to read the graph of a loss, and to ask for the sizes of what it keeps.

    python benchmarks/graphs.py

On a GPU that is asked for before the loss is known. Figures are CPU time of the training thread,
the median of several calls for ResNet-50, beside the forward that makes the graph.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pathlib import Path
from statistics import median

import torch

from ddpdoctor.probe.observers import origins

sys.path.insert(0, str(Path(__file__).parent.parent / "sample_jobs"))

CALLS = 15


def since(began: int) -> float:
    """Milliseconds of CPU time of this thread."""
    return (time.thread_time_ns() - began) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.parse_args()
    from models import resnet50

    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = resnet50().to(device)
    batch = torch.randn(2, 3, 64, 64, device=device)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    forwards, readings, traces = [], [], []
    for _ in range(CALLS):
        began = time.thread_time_ns()
        loss = model(batch).sum()
        forwards.append(since(began))
        began = time.thread_time_ns()
        found = origins.read_graph(loss, names, origins.MAX_TRACED)
        readings.append(since(began))
        began = time.thread_time_ns()
        traced = origins.trace(loss, ())
        traces.append(since(began))
    assert found is not None and traced is not None
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}")
    print(
        f"ResNet-50 on {device}: {len(found[0])} operations, {len(found[1])} tensors, "
        f"{traced[1] / 1e6:.0f} MB; forward {median(forwards):.0f} ms, graph read in "
        f"{median(readings):.1f} ms, with the sizes {median(traces):.1f} ms"
    )


if __name__ == "__main__":
    main()
