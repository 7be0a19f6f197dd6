"""Import the module beside this file, before or after torch."""

import sys

if sys.argv[1] == "first":
    import statistics
import torch.distributed as dist

if sys.argv[1] == "last":
    import statistics
print(statistics.of_data())
if sys.argv[2:]:
    dist.init_process_group("gloo")
    dist.destroy_process_group()
raise ValueError("the end")
