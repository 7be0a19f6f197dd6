"""Failures of the store, through which ranks find each other."""

from __future__ import annotations

from ddpdoctor.failures.model import Failure, Known, Weight
from ddpdoctor.failures.table.rendezvous import LEAVING

_LOST = r"Broken pipe|Connection reset by peer|Connection was likely closed"
"""What a store says that had answered before."""

_RANK_0 = (
    "Look at the rank that it names first: it came late, failed, or is in another collective. If it "
    "is only slow (a download, a tokenizer), let all ranks wait for it, or raise the timeout."
)

_ENDED_FIRST = (
    "The cause is on the rank or node that ended first, mostly the one with rank 0: look at its "
    "output. `ddpdoctor run` sees all ranks."
)

FAILURES = (
    Failure(
        Known("DDP907", "arguments-cut", Weight.CONSEQUENCE, "any"),
        r"UnpicklingError: pickle data was truncated",
        unless=r"torch[/\\]serialization\.py",
        says="lost the process that was starting it",
        fix="The cause is what ended the main process: see its output, before these lines.",
        examples=("_pickle.UnpicklingError: pickle data was truncated",),
    ),
    Failure(
        Known("DDP907", "parent-gone", Weight.CONSEQUENCE, "any"),
        r"EOFError: Ran out of input|ConnectionResetError|EOFError$",
        within=r"multiprocessing[/\\](?:spawn|forkserver|connection|reduction|resource_sharer)\.py",
        unless=r"in rebuild_storage_f",
        says="lost the process that had started it",
        fix="The cause is what ended the main process: see its output, before these lines.",
        examples=(
            'Traceback (most recent call last):\n  File "/usr/lib/python3.8/multiprocessing/spawn.py", line 126, in _main\n    self = reduction.pickle.load(from_parent)\nEOFError: Ran out of input',
        ),
    ),
    Failure(
        Known("DDP919", "nccl-id-missing", Weight.SYMPTOM, "1.9 to 2.13; pytorch#75658"),
        r"\[(?P<other>\d+)\] is setting up NCCL communicator and retrieving ncclUniqueId from "
        r"\[(?P<peer>\d+)\][^\n]{0,200}got error: (?P<why>[^\n.]{1,60})",
        says="waited at its first NCCL collective for rank {peer}, which did not come ({why})",
        yields_to=("store-unreachable", "name-unresolved"),
        fix=_RANK_0,
        examples=(
            "RuntimeError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by store->get('0'), but store->get('0') got error: Socket Timeout",
        ),
    ),
    Failure(
        Known("DDP813", "store-barrier", Weight.SYMPTOM, "1.8 to 2.1"),
        r"Timed out initializing process group in store based barrier on rank:? (?P<other>\d+)"
        r"[^\n]{0,99}world_size=(?P<all>\d+), worker_count=(?P<came>\d+)",
        says="waited in init_process_group, and {came} of {all} ranks came",
        fix="More than all: a store of an earlier start, so take a new port or file. Fewer: see on "
        "the other nodes whether the job was started, with the same world size.",
        examples=(
            "RuntimeError: Timed out initializing process group in store based barrier on rank: 0, for key: store_based_barrier_key:1 (world_size=2, worker_count=1, timeout=0:30:00)",
        ),
    ),
    Failure(
        Known("DDP912", "store-connect", Weight.SYMPTOM, "1.7 to 2.13"),
        r"connect\(\) timed out|TCP ?[Cc]lient failed to connect|failed to connect to (?:\(|\[)?[^\n]{0,99}"
        r"no error details|The client socket has failed to connect to any network address of \("
        r"(?P<address>[^,)]+), (?P<port>\d+)\)|RendezvousConnectionError",
        unless=rf"{LEAVING}|{_LOST}",
        says="got no answer from the job's store[ at {address}][ port {port}]",
        fix="See whether rank 0 (the first node) was started and still lives; then MASTER_ADDR, "
        "MASTER_PORT, and a firewall: `nc -vz ADDRESS PORT` from this node.",
        examples=(
            "RuntimeError: connect() timed out. Original timeout was 1800000 ms.",
            "torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of (node1, 29500).",
        ),
    ),
    Failure(
        Known("DDP919", "store-wait", Weight.SYMPTOM, "1.7 to 2.13"),
        r"(?:Error|Exception|what\(\)): [^\n]{0,200}Socket Timeout|Timeout waiting for key: (?P<key>\S+)"
        r"|Wait timeout$|FileStore[^\n]{0,200}[Tt]ime",
        says="waited in vain for what another rank should write to the store[ ({key})]",
        yields_to=("nccl-id-missing",),
        fix="Another rank is late, ended, or never started: see the other ranks' output. With "
        "file://, delete the file before each start.",
        examples=(
            "RuntimeError: Socket Timeout",
            "RuntimeError: Timeout waiting for key: default_pg/0/0 after 1800000 ms",
        ),
    ),
    Failure(
        Known("DDP907", "store-lost", Weight.CONSEQUENCE, "1.7 to 2.13"),
        r"(?:RuntimeError|DistNetworkError|what\(\)): (?:\[[^\n]{0,200}\] )?(?:Connection reset by peer|Broken pipe)\b"
        r"|Stop_waiting response is expected|DistNetworkError: (?:Failed to recv|Connection)",
        says="lost the job's store, which ends with rank 0 or its torchrun",
        fix=_ENDED_FIRST,
        unless=r"[/\\](?:requests|urllib3?|aiohttp|socketserver|http)[/\\]|(?<!elastic)[/\\]multiprocessing[/\\]",
        examples=(
            "RuntimeError: Connection reset by peer",
            "torch.distributed.DistNetworkError: Connection was likely closed.",
        ),
    ),
    Failure(
        Known("DDP907", "agent-lost-store", Weight.CONSEQUENCE, "1.9 to 2.13"),
        r"Rendezvous(?:Closed|Connection)Error|Agent\.is_failed|The node '[^']{1,99}' has",
        says="lost the job's store, which ends with rank 0 or its torchrun",
        fix=_ENDED_FIRST,
        # The ranks whose statuses are in the log were those of another node.
        yields_to=("exit-status-1",),
        examples=("torch.distributed.elastic.rendezvous.api.RendezvousClosedError",),
    ),
)
