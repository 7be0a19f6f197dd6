"""A machine of made-up /proc and /sys for the tests of ``ddpdoctor check``."""

from __future__ import annotations

from pathlib import Path

from ddpdoctor.preflight.check import Outcome
from ddpdoctor.preflight.situation import Once, Options, Situation, gpu_facts
from ddpdoctor.system.nvml import GpuFacts, Health
from tests.support.gpu_stub import device


class Machine:
    """A machine whose /proc, /sys and /dev/shm are folders of the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("proc/self", "sys", "shm"):
            (root / name).mkdir(parents=True)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def situation(
        self,
        options: Options | None = None,
        gpus: int = 0,
        environ: dict[str, str] | None = None,
    ) -> Situation:
        once = Once()
        once.put(gpu_facts, GpuFacts(gpus=tuple(Health(device(each)) for each in range(gpus))))
        root = self.root
        return Situation(
            options or Options(nproc=2), environ=environ or {}, hostname="node1",
            proc=root / "proc", sys=root / "sys", shm=root / "shm", once=once,
        )  # fmt: skip


def messages(outcome: Outcome) -> list[str]:
    return [finding.message for finding in outcome.findings]


TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0", "MASTER_PORT": "29500",
}  # fmt: skip
