"""Two ranks that need no torch, for tests of the debugger alone: each counts until it is ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

RANKS = 2


def rank() -> None:
    """Count until the file ``stop`` is there."""
    count = 0
    while not Path("stop").exists():
        count += 1  # mark: count
        Path(f"count-{os.environ['RANK']}").write_text(str(count))
        time.sleep(0.05)
        if Path("native").exists():
            Path(f"native-{os.environ['RANK']}").touch()
            time.sleep(20)  # mark: native
            Path("native").unlink(missing_ok=True)


def launch() -> int:
    """Start the ranks as torchrun would, and end with the first failure."""
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__],
            env={
                **os.environ,
                "TORCHELASTIC_RUN_ID": "held",
                "RANK": str(each),
                "LOCAL_RANK": str(each),
                "WORLD_SIZE": str(RANKS),
                "LOCAL_WORLD_SIZE": str(RANKS),
            },
            start_new_session=True,
        )
        for each in range(RANKS)
    ]
    return max(abs(each.wait()) for each in ranks)


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank()
    else:
        sys.exit(launch())
