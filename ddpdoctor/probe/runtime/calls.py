"""What a rank has called so far: counts that the compiled core keeps, where there is one."""

from __future__ import annotations

from typing import Any


class Calls:
    """The counts of one rank (`ddpdoctor.probe.observers.ledger.Ledger`).

    Args:
        memory: The rank's ring, which compiled code writes into by itself.
    """

    def __init__(self, memory: Any) -> None:
        self.count = 0
        """Calls so far."""
        self.wide = 0
        """Calls that may have moved gradients or parameters, unknown ones among them."""
        self.carried = 0
        """Elements that collectives were called with since the step `carried_in` began, none of
        them point to point."""
        self.carried_in = 0
        self.enough = 0
        """So many of them are waited for; 0: none are."""
        self.elsewhere = False
        """Whether other threads than the training one call collectives, too."""
