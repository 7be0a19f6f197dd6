"""The checks: importing this package registers them all in `ddpdoctor.preflight.check.CHECKS`.

The order here is that of the table.
"""

# isort: off
from ddpdoctor.preflight.machine import launch_environment
from ddpdoctor.preflight.machine import versions
from ddpdoctor.preflight.machine import script
from ddpdoctor.preflight.machine import variables
from ddpdoctor.preflight.machine import cores
from ddpdoctor.preflight.machine import memory
from ddpdoctor.preflight.machine import shared_memory
from ddpdoctor.preflight.machine import limits
from ddpdoctor.preflight.machine import checkpoints
from ddpdoctor.preflight.machine import orphans
from ddpdoctor.preflight.machine import host_name
from ddpdoctor.preflight.machine import lookups
from ddpdoctor.preflight.machine import network_interface
from ddpdoctor.preflight.machine import neighbours
from ddpdoctor.preflight.machine import store_port
from ddpdoctor.preflight.machine import gpu_driver
from ddpdoctor.preflight.machine import gpu_count
from ddpdoctor.preflight.machine import gpu_memory
from ddpdoctor.preflight.machine import gpu_health
from ddpdoctor.preflight.machine import gpu_links
from ddpdoctor.preflight.machine import gpu_peers
from ddpdoctor.preflight.machine import gpu_acs
from ddpdoctor.preflight.machine import collectives
from ddpdoctor.preflight import nodes
# isort: on

__all__ = [
    "checkpoints", "collectives", "cores", "gpu_acs", "gpu_count", "gpu_driver", "gpu_health",
    "gpu_links", "gpu_memory", "gpu_peers", "host_name", "launch_environment", "limits", "lookups",
    "memory",    "neighbours", "network_interface", "nodes", "orphans", "script", "shared_memory",
    "store_port", "variables", "versions",
]  # fmt: skip
