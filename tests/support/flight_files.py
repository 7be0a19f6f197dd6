"""Files as torch's Flight Recorder writes them, of jobs that use NCCL."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NOW = 1_800_000_000_000_000_000
SECOND = 1_000_000_000
TIMEOUT = 600
"""Seconds."""

TORCH = "/usr/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py"


def entry(
    number: int,
    name: str = "all_reduce",
    *shape: int,
    line: int = 0,
    path: str = "/job/train.py",
    done: bool = True,
    group: tuple[str, str] = ("0", "default_pg"),
    dtype: str = "Float",
    age: float = TIMEOUT + 10,
    **more: Any,
) -> dict[str, Any]:
    """A collective; without a line, one of DDP's own, which a thread of autograd calls."""
    sizes = [list(shape or (64,))]
    frames = [(TORCH, 2810, "all_reduce"), (path, line, "<module>")] if line else []
    return {
        "frames": [{"name": f, "filename": at, "line": n} for at, n, f in frames],
        "record_id": number - 1,
        "pg_id": int(group[0]) if group[0].isdigit() else 9,
        "process_group": group,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": NOW - int(age * SECOND),
        "input_sizes": sizes,
        "input_dtypes": [dtype],
        "output_sizes": sizes,
        "output_dtypes": [dtype],
        "state": "completed" if done else "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": NOW - int(age * SECOND) if done else None,
        "retired": done,
        "timeout_ms": TIMEOUT * 1000,
        "is_p2p": False,
        **more,
    }


def write(
    folder: Path,
    rank: int,
    entries: Sequence[Mapping[str, Any]],
    groups: Mapping[str, Sequence[int]] | None = None,
    *,
    as_json: bool = False,
    written: int = NOW,
) -> Path:
    """The file of a rank."""
    groups = {"0": (0, 1), **(groups or {})}
    newest = max((each["collective_seq_id"] for each in entries), default=0)
    found: dict[str, Any] = {
        "version": "2.10",
        "comm_lib_version": "2.28.9",
        "pg_config": {
            name: {"name": name, "desc": "default_pg" if name == "0" else "", "ranks": str([*of])}
            for name, of in groups.items()
        },
        "pg_status": {"0": {"last_enqueued_collective": newest}} if entries else {},
        "entries": list(entries),
    }
    path = folder / f"nccl_trace_rank_{rank}"
    if as_json:
        for each in found["entries"]:
            each.pop("frames")
        path.write_text(json.dumps(found))
    else:
        path.write_bytes(pickle.dumps(found, 2))
    os.utime(path, ns=(written, written))
    return path
