"""The checks: importing this package registers them all in `ddpdoctor.preflight.check.CHECKS`."""

from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

from ddpdoctor.core import plugins
from ddpdoctor.preflight import machine, nodes, selftest
from ddpdoctor.preflight.check import CHECKS

_TABLE = """
    software: versions launch-environment script variables
    resources: cores memory shared-memory limits checkpoint-dir temporary-dir orphans
    network: network-interface host-name lookups own-address neighbour-table port
    gpus: gpu-count gpu-driver gpu-memory gpu-health gpu-links gpu-peers gpu-acs
    ranks: collectives
    nodes: nodes same-job clocks node-versions same-code shared-folder verdicts
    links: links packet-size gloo-addresses link-speed
    job: gloo-nodes nccl-nodes
"""
"""The groups of checks, in the order of the screen. The first check of a group speaks for it."""

for _package in (machine, selftest, nodes):
    for _module in iter_modules(_package.__path__, f"{_package.__name__}."):
        import_module(_module.name)
for _line in _TABLE.strip().splitlines():
    _group, _, _names = _line.strip().partition(": ")
    for _name in _names.split():
        CHECKS[_name] = replace(CHECKS.pop(_name), group=_group)
plugins.load(plugins.CHECKS, CHECKS)
# Checks of plug-ins come after ours, but before the checks across nodes.
for _name in [name for name, each in CHECKS.items() if each.scope == "nodes"]:
    CHECKS[_name] = CHECKS.pop(_name)
