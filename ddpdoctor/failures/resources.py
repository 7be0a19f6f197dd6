"""Failures for want of memory, shared memory, files, disk, network."""

from __future__ import annotations

from ddpdoctor.failures.model import Failure, Page, Weight

_OF_SYSTEM = r"(?:OSError|IOError|RuntimeError|error: |what\(\): )"
"""How the system's own refusals begin; a script may say such words of something else."""

_SERVICE = r"[/\\](?:wandb|mlflow|comet_ml|neptune|clearml|redis|psycopg|pymongo|sqlalchemy)[/\\]"
"""Libraries that speak to a service of the job's, and download nothing."""

_NO_ANSWER = (
    r"Name or service not known|Temporary failure in name resolution|No address associated"
    r"|nodename nor servname|Network is unreachable|No route to host|Connection timed out|timed out"
)

_NO_NETWORK = (
    "Download before the job, on a machine that has network: then HF_HUB_OFFLINE=1 with the "
    "cache, local_files_only=True, or a path on the shared disk."
)

FAILURES = (
    Failure(
        code="DDP936",
        name="no-network-for-download",
        weight=Weight.CAUSE,
        anchors=(
            "urlopen error",
            "Max retries exceeded with url",
            "We couldn't connect to '",
            "Cannot connect to host",
            "Could not connect to the endpoint URL",
            "locate the file on the Hub",
            "locate the files on the Hub",
        ),
        pattern=r"<urlopen error (?:\[Errno -?\d+\] )?(?:"
        + _NO_ANSWER
        + r")|HTTPS?ConnectionPool\(host='(?!localhost|127\.)(?P<host>[^'\s]{1,80})', port=\d+\): "
        r"Max retries exceeded with url: [^\n]*(?:"
        + _NO_ANSWER
        + r"|ConnectTimeout|Failed to resolve)"
        r"|We couldn't connect to '(?P<url>[^'\s]{1,120})'"
        r"|Cannot connect to host (?!localhost|127\.)(?P<peer>[^\s:]{1,80}):\d+ ssl[^\n]*\["
        r"|Could not connect to the endpoint URL: \"(?P<endpoint>[^\"?\s]{1,120})"
        r"|trying to locate the files? on the Hub and we cannot find",
        unless=_SERVICE,
        says="has no network for a download[ from {host}][ from {url}][ from {peer}]"
        "[ from {endpoint}]",
        fix=_NO_NETWORK,
        page=Page(
            "A rank wants to download, and has no network.",
            "The exceptions of urllib, requests, aiohttp, botocore and the Hugging Face Hub whose "
            "server has no name here, or does not answer.",
            "Compute nodes often have no way out. Every rank would download the same besides, and "
            "the first that fails ends the job on all.",
            "Download before the job. With the files in the cache: `HF_HUB_OFFLINE=1`, or "
            "`local_files_only=True`.",
            'Wrong: `AutoModel.from_pretrained("bert-base-uncased")` on a node without network. '
            "Right: the same with `local_files_only=True`, downloaded before.",
            "When the script catches it, for a server on this machine, and for trackers and "
            "databases (DDP901).",
        ),
        torch="any",
    ),
    Failure(
        code="DDP936",
        name="no-name-for-download",
        weight=Weight.CAUSE,
        anchors=("gaierror", "ConnectError"),
        pattern=r"(?m)^(?:[\w.]+\.)?(?:gaierror|ConnectError): \[Errno -?\d+\] (?:"
        + _NO_ANSWER
        + ")",
        within=r"[/\\](?:requests|urllib3?|http[/\\]client|ftplib|httpx|httpcore|aiohttp|botocore"
        r"|huggingface_hub|datasets)\b",
        unless=_SERVICE,
        says="has no network for a download",
        fix=_NO_NETWORK,
        torch="any",
    ),
    Failure(
        code="DDP005",
        name="shared-memory-full",
        weight=Weight.CAUSE,
        anchors=(
            "unable to allocate shared memory",
            "bus error encountered in worker",
            "killed by signal: Bus error",
            "</torch_",
        ),
        pattern=r"unable to allocate shared memory\s?\(shm\)"
        r"|[Uu]nexpected bus error encountered in worker|killed by signal: Bus error"
        r"|unable to (?:write to|open|resize) (?:shared memory object|file) </torch_",
        says="has no shared memory left for its DataLoader: /dev/shm is full or too small",
        fix="`df -h /dev/shm`; in docker start with --shm-size=8g or --ipc=host; else fewer "
        "workers or a smaller prefetch_factor.",
        page=Page(
            "There is no room in /dev/shm.",
            "A DataLoader worker that ended with a bus error or could not allocate shared memory; "
            "and NCCL's warning that it cannot make a segment of it, where torch says only "
            '"unhandled system error".',
            "Workers hand their batches over through /dev/shm, ranks of a node their gradients; a "
            "container has 64 MB of it unless told. The words of the error depend on torch's "
            "version, and none says so plainly.",
            "`docker run --shm-size=8g` or `--ipc=host`; for Kubernetes an emptyDir of medium "
            "Memory on /dev/shm; fewer workers, a smaller `prefetch_factor`.",
            "Wrong: `docker run image torchrun ...`. "
            "Right: `docker run --shm-size=8g image torchrun ...`.",
            "When workers are killed by other signals (DDP931); for NCCL without NCCL_DEBUG=WARN "
            "(DDP922).",
        ),
        torch="1.13, 2.6, 2.13; pytorch#5040",
    ),
    Failure(
        code="DDP931",
        name="worker-killed",
        weight=Weight.CAUSE,
        anchors=("DataLoader worker (pid",),
        pattern=r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]+)\) "
        r"(?:is killed by signal: (?P<signal>[\w ]+)|exited unexpectedly)",
        says="lost a DataLoader worker (pid {pid})[, killed by signal {signal}]",
        fix="Killed: most likely the out-of-memory killer (dmesg); use fewer workers, and keep no "
        "large Python lists in the dataset. Otherwise a native library crashed in the worker: try "
        "num_workers=0.",
        page=Page(
            "A DataLoader worker died.",
            "The exception by which the rank learns that its worker was killed or went away.",
            "Each worker has its own copy of what the dataset touches: memory grows by workers "
            "times ranks, and the out-of-memory killer takes one. Else a native crash.",
            "Look at `dmesg`; fewer workers; arrays (numpy, memory-mapped) instead of Python lists "
            "of objects in the dataset.",
            "Wrong: eight ranks of 16 workers on a machine of 64 GB. "
            "Right: as many workers as there are cores, together.",
            "For a worker's own exception (DDP901), and a full /dev/shm (DDP005).",
        ),
        torch="1.13, 2.6, 2.13",
    ),
    Failure(
        code="DDP932",
        name="worker-timeout",
        weight=Weight.CAUSE,
        anchors=("DataLoader timed out",),
        pattern=r"DataLoader timed out after (?P<seconds>[\d.]+) seconds",
        says="waited {seconds} s in vain for a batch of its DataLoader",
        fix="A worker hangs: storage that does not answer, or a lock taken before the fork. "
        "Look at its stack (py-spy dump), or raise the DataLoader's timeout.",
        page=Page(
            "The DataLoader gave up waiting for a batch.",
            "The exception of a DataLoader that has a `timeout`.",
            "Storage stalls, a transform deadlocks (threads before a fork), or the timeout is "
            "shorter than a batch takes.",
            "Look where the workers stand (`py-spy dump --pid`); then the storage; then the "
            "timeout.",
            "Wrong: `timeout=5` on a network drive. Right: `timeout=300`.",
            "Without a timeout a DataLoader waits for ever: then it is a hang.",
        ),
        torch="2.13",
    ),
    Failure(
        code="DDP006",
        name="too-many-open-files",
        weight=Weight.CAUSE,
        anchors=("Too many open files",),
        pattern=rf"{_OF_SYSTEM}[^\n]*Too many open files",
        says="may open no more files (`ulimit -n`)",
        fix="`ulimit -n 65536` before the job; or torch.multiprocessing.set_sharing_strategy("
        '"file_system"), and close the files that the dataset opens.',
        page=Page(
            "A limit of the system is too low for the ranks.",
            "EMFILE (too many open files), in a rank or one of its workers; and a verbs call that "
            "may not lock memory for InfiniBand.",
            "Each tensor that a worker hands over takes a descriptor, each file a dataset keeps "
            "open as well; the usual limit is 1024. RDMA needs its buffers locked in memory.",
            '`ulimit -n 65536`, or `torch.multiprocessing.set_sharing_strategy("file_system")`; '
            "`ulimit -l unlimited` where the ranks start (limits.conf, LimitMEMLOCK of the "
            "scheduler's service, `docker run --ulimit memlock=-1`).",
            "Wrong: `self.files = [open(name) for name in names]`. "
            "Right: open a file when it is read.",
            "When the error is caught.",
        ),
        torch="2.13",
    ),
    Failure(
        code="DDP934",
        name="host-memory",
        weight=Weight.CAUSE,
        anchors=("DefaultCPUAllocator", "Cannot allocate memory", "MemoryError"),
        pattern=r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)"
        r"(?:[^\n]*?tried to allocate (?P<bytes>\d+) bytes)?"
        r"|OSError: \[Errno 12\] Cannot allocate memory|^MemoryError\b",
        says="could not get host memory[ ({bytes} bytes)]",
        fix="Host memory or its limit (ulimit -v, the job's cgroup) is used up: load less in each "
        "rank, use fewer workers, or ask for more.",
        page=Page(
            "A rank could not allocate host memory.",
            "torch's CPU allocator, or Python, that was refused memory.",
            "A limit (`ulimit -v`, a scheduler's) or the machine's memory is used up. Unlike with "
            "DDP903 the process was told, and could say where.",
            "Memory-map the data, load it in one rank only, fewer workers; raise the limit.",
            "Wrong: the whole data set in every rank. Right: `numpy.load(..., mmap_mode='r')`.",
            "When the out-of-memory killer was faster (DDP903).",
        ),
        torch="2.13",
    ),
    Failure(
        code="DDP935",
        name="disk-full",
        weight=Weight.CAUSE,
        anchors=(
            "No space left on device",
            "Disk quota exceeded",
            "unexpected pos",
            "basic_ios::clear",
            "PytorchStreamWriter failed",
            "File too large",
        ),
        pattern=rf"{_OF_SYSTEM}[^\n]*(?:No space left on device|Disk quota exceeded)"
        r"|\[Errno 27\] File too large"
        r"|unexpected pos \d+ vs \d+|basic_ios::clear: iostream error"
        r"|PytorchStreamWriter failed writing",
        # Watches of files, and semaphores in /dev/shm, are refused in the same words.
        unless=r"inotify|multiprocessing[/\\](?:synchronize|heap|shared_memory)\.py",
        says="could not write a file: the disk is full, or a quota or size limit is reached",
        fix="`df -h` and `quota` where it writes; keep fewer checkpoints, and write to a temporary "
        "name that is renamed afterwards, so that the last good one stays.",
        page=Page(
            "A file could not be written: the disk is full.",
            'ENOSPC, EDQUOT or EFBIG, and their disguise in `torch.save`: "unexpected pos" of '
            'inline_container.cc and "basic_ios::clear: iostream error".',
            "torch's own words never name the disk, and a half-written checkpoint lies where the "
            "last good one was.",
            "Free space or another place; look at quotas. Save to `name.tmp`, then `os.replace`.",
            'Wrong: `torch.save(state, "last.pt")` for ever on a small disk. '
            "Right: keep the last three, through a temporary name.",
            "When the write was tried again and succeeded.",
        ),
        torch="1.13, 2.6, 2.13",
    ),
)
