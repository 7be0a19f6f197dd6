"""The checks across nodes, each a judgement of what came of one meeting of all nodes."""

# In the order of the table: who is here, what lies between them, what they have, what they can do.
# isort: off
from ddpdoctor.preflight.nodes import attendance
from ddpdoctor.preflight.nodes import agreement
from ddpdoctor.preflight.nodes import clocks
from ddpdoctor.preflight.nodes import links
from ddpdoctor.preflight.nodes import packet_size
from ddpdoctor.preflight.nodes import gloo_addresses
from ddpdoctor.preflight.nodes import link_speed
from ddpdoctor.preflight.nodes import versions
from ddpdoctor.preflight.nodes import same_code
from ddpdoctor.preflight.nodes import shared_folder
from ddpdoctor.preflight.nodes import gloo_reduction
from ddpdoctor.preflight.nodes import nccl_reduction

# isort: on

__all__ = [
    "agreement",
    "attendance",
    "clocks",
    "gloo_addresses",
    "gloo_reduction",
    "link_speed",
    "links",
    "nccl_reduction",
    "packet_size",
    "same_code",
    "shared_folder",
    "versions",
]
