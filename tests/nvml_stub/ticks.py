"""Reads the GPUs once for each line of stdin, which says what time it is."""

import json
import sys

from ddpdoctor.system.gpu_poll import Poller
from ddpdoctor.system.nvml import NvmlReader

now = 0.0
poller = Poller(NvmlReader(lambda: now), lambda: now)
for line in sys.stdin:
    now = float(line)
    print(json.dumps(poller.read()), flush=True)
