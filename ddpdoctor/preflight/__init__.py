"""The checks: importing this package registers them all in `ddpdoctor.preflight.check.CHECKS`.

The order here is that of the table.
"""

# isort: off
from ddpdoctor.preflight import launch_environment
from ddpdoctor.preflight import versions
from ddpdoctor.preflight import script
from ddpdoctor.preflight import variables
from ddpdoctor.preflight import cores
from ddpdoctor.preflight import memory
from ddpdoctor.preflight import shared_memory
from ddpdoctor.preflight import limits
from ddpdoctor.preflight import checkpoints
from ddpdoctor.preflight import orphans
from ddpdoctor.preflight import host_name
from ddpdoctor.preflight import lookups
from ddpdoctor.preflight import network_interface
from ddpdoctor.preflight import neighbours
from ddpdoctor.preflight import store_port
from ddpdoctor.preflight import gpu_driver
from ddpdoctor.preflight import gpu_count
from ddpdoctor.preflight import gpu_memory
from ddpdoctor.preflight import gpu_health
from ddpdoctor.preflight import gpu_links
from ddpdoctor.preflight import gpu_peers
from ddpdoctor.preflight import gpu_acs
from ddpdoctor.preflight import collectives
from ddpdoctor.preflight import nodes
# isort: on

__all__ = [
    "checkpoints", "collectives", "cores", "gpu_acs", "gpu_count", "gpu_driver", "gpu_health",
    "gpu_links", "gpu_memory", "gpu_peers", "host_name", "launch_environment", "limits", "lookups",
    "memory",    "neighbours", "network_interface", "nodes", "orphans", "script", "shared_memory",
    "store_port", "variables", "versions",
]  # fmt: skip
