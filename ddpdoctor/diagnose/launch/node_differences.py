"""Allowed differences between a job's nodes, for the rules and for `ddpdoctor check`."""

from __future__ import annotations

CLOCK_WARN_S = 1.0
CLOCK_FAIL_S = 10.0

OF_EACH_NODE = (
    "_IFNAME", "_IB_HCA", "_IB_GID_INDEX", "_DEBUG", "_DEBUG_FILE", "_TOPO_FILE", "_HOSTID",
)  # fmt: skip
"""Suffixes of variables that may differ: they name devices and files."""


def minor(version: str) -> str:
    """Return a version up to its second number."""
    return ".".join(version.split(".")[:2])
