"""The rules: importing this package registers them all in `ddpdoctor.finding.RULES`."""

from ddpdoctor.rules import (
    checkpoints,
    crashes,
    data,
    divergence,
    evaluation,
    finiteness,
    hangs,
    launch,
    model,
    models,
    optimizers,
    shards,
    speed,
    streams,
    unreduced,
)

__all__ = [
    "checkpoints",
    "crashes",
    "data",
    "divergence",
    "evaluation",
    "finiteness",
    "hangs",
    "launch",
    "model",
    "models",
    "optimizers",
    "shards",
    "speed",
    "streams",
    "unreduced",
]
