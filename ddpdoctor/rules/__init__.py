"""The rules: importing this package registers them all in `ddpdoctor.core.finding.RULES`."""

from ddpdoctor.rules import (
    buffers,
    checkpoints,
    crashes,
    data,
    divergence,
    edits,
    evaluation,
    failures,
    finiteness,
    hangs,
    launch,
    mismatch,
    model,
    models,
    nothing_reduced,
    optimizers,
    placement,
    shards,
    shared_rows,
    speed,
    stalls,
    streams,
    unreduced,
)
from ddpdoctor.rules import (
    control_flow as decisions,
)

__all__ = [
    "buffers",
    "checkpoints",
    "crashes",
    "data",
    "decisions",
    "divergence",
    "edits",
    "evaluation",
    "failures",
    "finiteness",
    "hangs",
    "launch",
    "mismatch",
    "model",
    "models",
    "nothing_reduced",
    "optimizers",
    "placement",
    "shards",
    "shared_rows",
    "speed",
    "stalls",
    "streams",
    "unreduced",
]

# Last, since the table also adds to codes that others have.
failures.register()
