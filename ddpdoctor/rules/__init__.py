"""The rules: importing this package registers them all in `ddpdoctor.finding.RULES`."""

from ddpdoctor.rules import (
    buffers,
    checkpoints,
    crashes,
    data,
    decisions,
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
    optimizers,
    placement,
    shards,
    speed,
    stalls,
    streams,
    unreduced,
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
    "optimizers",
    "placement",
    "shards",
    "speed",
    "stalls",
    "streams",
    "unreduced",
]

# Last, since the table also adds to codes that others have.
failures.register()
