"""Import all rules on source code, which registers them."""

from __future__ import annotations

from ddpdoctor.lint import (  # noqa: F401
    rules_checkpoints,
    rules_collectives,
    rules_data,
    rules_forward,
    rules_gradients,
    rules_launch,
    rules_metrics,
    rules_model,
    rules_samplers,
)
