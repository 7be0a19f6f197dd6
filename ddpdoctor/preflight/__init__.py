"""The checks: importing this package registers them all in `ddpdoctor.preflight.check.CHECKS`."""

from importlib import import_module
from pkgutil import iter_modules

from ddpdoctor.core import plugins
from ddpdoctor.preflight import machine, nodes, selftest
from ddpdoctor.preflight.check import CHECKS

_TABLE = """
    launch-environment versions script variables cores memory shared-memory limits checkpoint-dir
    temporary-dir
    orphans host-name lookups network-interface own-address neighbour-table port
    gpu-driver gpu-count gpu-memory gpu-health gpu-links gpu-peers gpu-acs collectives
    nodes same-job clocks links packet-size gloo-addresses link-speed node-versions same-code
    shared-folder gloo-nodes nccl-nodes verdicts
"""
"""The order of the table; across nodes: who is here, what is between them, what they have."""

for _package in (machine, selftest, nodes):
    for _module in iter_modules(_package.__path__, f"{_package.__name__}."):
        import_module(_module.name)
for _name in _TABLE.split():
    CHECKS[_name] = CHECKS.pop(_name)
plugins.load(plugins.CHECKS, CHECKS)
# Those of plug-ins stand behind ours, but before the checks across nodes.
for _name in [name for name, each in CHECKS.items() if each.scope == "nodes"]:
    CHECKS[_name] = CHECKS.pop(_name)
