"""Failures for want of memory, shared memory, files, disk, network."""

from __future__ import annotations

from ddpdoctor.failures.model import Failure, Known, Page, Weight

_OF_SYSTEM = r"(?:OSError|IOError|RuntimeError|(?<!, )error: |what\(\): )"
"""How the system's own refusals begin; a script may say such words of something else, and NCCL ends
with them where /dev/shm is full."""

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

_TOO_MANY = "429 Client Error: Too Many Requests"

_SHARED = r"multiprocessing[/\\](?:synchronize|heap|shared_memory)\.py"
"""Where Python makes what its processes share."""

FAILURES = (
    Failure(
        Known("DDP936", "no-network-for-download", Weight.CAUSE, "any"),
        r"<urlopen error (?:\[Errno -?\d+\] )?(?:"
        + _NO_ANSWER
        + r")|HTTPS?ConnectionPool\(host='(?!localhost|127\.)(?P<host>[^'\s]{1,80})', port=\d+\): "
        r"Max retries exceeded with url: [^\n]{0,999}(?:"
        + _NO_ANSWER
        + r"|ConnectTimeout|Failed to resolve)"
        r"|We couldn't connect to '(?P<url>[^'\s]{1,120})'"
        r"|Cannot connect to host (?!localhost|127\.)(?P<peer>[^\s:]{1,80}):\d+ ssl[^\n]{0,999}\["
        r"|Could not connect to the endpoint URL: \"(?P<endpoint>[^\"?\s]{1,120})"
        r"|trying to locate the files? on the Hub and we cannot find",
        unless=rf"{_SERVICE}|{_TOO_MANY}",
        examples=(
            "urllib.error.URLError: <urlopen error [Errno -2] Name or service not known>",
            "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.",
        ),
        says="has no network for a download[ from {host}][ from {url}][ from {peer}]"
        "[ from {endpoint}]",
        fix=_NO_NETWORK,
        page=Page(
            "A rank tries to download a file but has no network.",
            "Exceptions of urllib, requests, aiohttp, botocore and the Hugging Face Hub for a "
            "server whose name does not resolve or that does not respond.",
            "Compute nodes often have no internet access. Every rank downloads the same files, "
            "and the first failure ends the job.",
            "Download before the job starts. With the files in the cache, set `HF_HUB_OFFLINE=1` "
            "or `local_files_only=True`.",
            'Wrong: `AutoModel.from_pretrained("bert-base-uncased")` on a node without internet '
            "access.\n"
            'Right: `AutoModel.from_pretrained("bert-base-uncased", local_files_only=True)`',
            "If the script handles the exception, for a server on this machine, and for "
            "experiment trackers and databases (DDP901).",
        ),
    ),
    Failure(
        Known("DDP936", "too-many-requests", Weight.CAUSE, "huggingface_hub"),
        rf"Error: {_TOO_MANY} for url: (?P<url>https?://[^/\s]{{1,80}})",
        unless=_SERVICE,
        says="was refused a download from {url}: too many requests",
        fix="All ranks ask for the same files: download them once before the job starts, and set "
        "HF_HUB_OFFLINE=1. A token (HF_TOKEN) raises the limit.",
        examples=(
            "requests.exceptions.HTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/gpt2/resolve/main/config.json",
        ),
    ),
    Failure(
        Known("DDP936", "no-name-for-download", Weight.CAUSE, "any"),
        r"(?m)^(?:[\w.]+\.)?(?:gaierror|ConnectError): \[Errno -?\d+\] (?:" + _NO_ANSWER + ")",
        within=r"[/\\](?:requests|urllib3?|http[/\\]client|ftplib|httpx|httpcore|aiohttp|botocore"
        r"|huggingface_hub|datasets)\b",
        unless=_SERVICE,
        examples=(
            'Traceback (most recent call last):\n  File "/opt/lib/python3.11/urllib/request.py", line 7, in call\n    call()\nsocket.gaierror: [Errno -3] Temporary failure in name resolution',
        ),
        says="has no network for a download",
        fix=_NO_NETWORK,
    ),
    Failure(
        Known("DDP005", "shared-memory-full", Weight.CAUSE, "1.13, 2.6, 2.13; pytorch#5040"),
        r"unable to allocate shared memory\s?\(shm\)"
        r"|[Uu]nexpected bus error encountered in worker|killed by signal: Bus error"
        r"|unable to (?:write to|open|resize) (?:shared memory object|file) </torch_",
        examples=(
            "RuntimeError: unable to allocate shared memory(shm) for file </torch_14459_3860305128_0>: No space left on device (28)",
        ),
        says="has no shared memory left for its DataLoader: /dev/shm is full or too small",
        fix="`df -h /dev/shm`; in docker start with --shm-size=8g or --ipc=host; else fewer "
        "workers or a smaller prefetch_factor.",
        page=Page(
            "/dev/shm is too small for the ranks of this node, or cannot be written.",
            "A /dev/shm that is missing or cannot be written (error), or whose size or free space "
            "is below 64 MiB per rank or 128 MiB in total.",
            "DataLoader workers pass batches through shared memory, and NCCL connects the ranks "
            'of a node through it. When it is full, the job fails with "Bus error", "No space '
            'left on device" or "Error while creating shared memory segment". Containers have 64 '
            "MiB by default.",
            "Give the container more: `docker run --shm-size=8g`, or in Kubernetes an `emptyDir` "
            "with `medium: Memory` mounted at /dev/shm. If it is full, remove the files that dead "
            "jobs left there.",
            "Wrong: `docker run --gpus all image torchrun train.py`\n"
            "Right: `docker run --gpus all --shm-size=8g image torchrun train.py`",
            "If there is enough space, and on systems without /dev/shm.",
        ),
    ),
    Failure(
        Known("DDP005", "semaphores-full", Weight.CAUSE, "any"),
        r"\[Errno 28\] No space left on device",
        within=_SHARED,
        examples=(
            'Traceback (most recent call last):\n  File "/opt/lib/python3.11/multiprocessing/synchronize.py", line 57, in __init__\n    sl = self._semlock = _multiprocessing.SemLock(\nOSError: [Errno 28] No space left on device',
        ),
        says="could not create a semaphore or shared memory: /dev/shm is full or too small",
        fix="`df -h /dev/shm`; remove the files that dead jobs left there, start fewer workers, or "
        "give the container more (docker run --shm-size=8g, --ipc=host).",
    ),
    Failure(
        Known("DDP931", "worker-killed", Weight.CAUSE, "1.13, 2.6, 2.13"),
        r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]+)\) "
        r"(?:is killed by signal: (?!Terminated|Aborted)(?P<signal>[\w ]+)|exited unexpectedly)",
        examples=("RuntimeError: DataLoader worker (pid(s) 13823, 13824) exited unexpectedly",),
        says="lost a DataLoader worker (pid {pid})[, killed by signal {signal}]",
        fix="Killed: most likely the out-of-memory killer (dmesg); use fewer workers, and keep no "
        "large Python lists in the dataset. Otherwise a native library crashed in the worker: try "
        "num_workers=0.",
        page=Page(
            "A DataLoader worker died.",
            "torch's exception that a worker was killed or exited unexpectedly.",
            "Each worker copies what the data set touches: memory grows with workers times ranks, "
            "and the out-of-memory killer ends one. Otherwise the worker crashed in native code.",
            "Check `dmesg`. Use fewer workers, and arrays (numpy, memory-mapped) instead of "
            "Python lists of objects in the data set.",
            "Wrong: eight ranks with 16 workers each on a machine with 64 GB.\n"
            "Right: no more workers in total than cores, and data in a memory-mapped array.",
            "For an exception in a worker (DDP901), and a full /dev/shm (DDP005).",
        ),
    ),
    Failure(
        Known("DDP931", "worker-gone", Weight.CAUSE, "1.1 to 2.13"),
        r"(?:ConnectionResetError|ConnectionRefusedError|EOFError|FileNotFoundError)\b",
        within=r"in rebuild_storage_f(?s:.*)multiprocessing[/\\]resource_sharer\.py",
        says="lost the DataLoader worker that had made a batch",
        fix="Most likely the out-of-memory killer ended the worker (dmesg): use fewer workers, and keep "
        "no large Python lists in the dataset. Where the job was stopped, it follows from that.",
        likely=True,
        yields_to=("worker-killed", "worker-aborted", "host-memory", "interrupted"),
        examples=(
            'Traceback (most recent call last):\n  File "/opt/lib/python3.11/site-packages/torch/multiprocessing/reductions.py", line 297, in rebuild_storage_fd\n    fd = df.detach()\n  File "/opt/lib/python3.11/multiprocessing/resource_sharer.py", line 57, in detach\n    with _resource_sharer.get_connection(self._id) as conn:\n  File "/opt/lib/python3.11/multiprocessing/connection.py", line 379, in _recv\n    chunk = read(handle, remaining)\nConnectionResetError: [Errno 104] Connection reset by peer',
        ),
    ),
    Failure(
        Known("DDP931", "worker-aborted", Weight.GENERIC, "1.13 to 2.13"),
        r"DataLoader worker \(pid[^)\n]{0,40}\) is killed by signal: Aborted",
        says="lost a DataLoader worker, which aborted",
        fix="Look above for lines of C++ (`terminate called`, `what():`) that say why. At the end of a "
        "job it follows from another failure.",
        examples=("RuntimeError: DataLoader worker (pid 4711) is killed by signal: Aborted.",),
        yields_to=("exception",),
    ),
    Failure(
        Known("DDP932", "worker-timeout", Weight.CAUSE, "2.13"),
        r"DataLoader timed out after (?P<seconds>[\d.]+) seconds",
        examples=("RuntimeError: DataLoader timed out after 2 seconds",),
        says="waited {seconds} s in vain for a batch of its DataLoader",
        fix="A worker hangs: storage that does not answer, or a lock taken before the fork. "
        "Look at its stack (py-spy dump), or raise the DataLoader's timeout.",
        page=Page(
            "The DataLoader timed out waiting for a batch.",
            "The exception of a DataLoader with a `timeout`.",
            "Storage stalls, a transform deadlocks (threads before a fork), or the timeout is "
            "shorter than a batch takes.",
            "Look at the workers' stacks (`py-spy dump --pid`), then at the storage, then at the "
            "timeout.",
            "Wrong: `DataLoader(data, num_workers=4, timeout=5)` on a network drive.\n"
            "Right: `DataLoader(data, num_workers=4, timeout=300)`",
            "Without a timeout, a DataLoader waits forever: then it is DDP809.",
        ),
    ),
    Failure(
        Known("DDP006", "too-many-open-files", Weight.CAUSE, "2.13"),
        rf"{_OF_SYSTEM}[^\n]{{0,999}}Too many open files",
        examples=("OSError: [Errno 24] Too many open files: '/dev/null'",),
        says="may open no more files (`ulimit -n`)",
        fix="`ulimit -n 65536` before the job; or torch.multiprocessing.set_sharing_strategy("
        '"file_system"), and close the files that the dataset opens.',
        page=Page(
            "A limit on open files, locked memory, processes or file sizes is too low for the "
            "ranks.",
            "A limit on open files below 256 plus two per rank of the job. Fewer processes and "
            "threads left, for this user or the container, than 64 per rank of this node. Less "
            "than 64 MiB of locked memory on a machine with InfiniBand. A limit on file sizes "
            "below 1 GiB, or on address space below 16 GiB per rank.",
            'The job fails with "Too many open files", "Resource temporarily unavailable" when a '
            'thread cannot start, "ibv_reg_mr failed: Cannot allocate memory", or SIGXFSZ when it '
            "writes a checkpoint. This usually happens hours into the job, on one rank, while the "
            "others wait.",
            "Raise the limit for the shell that starts the job, in /etc/security/limits.conf, or "
            "in the container's options.",
            "Wrong: `docker run --pids-limit 100 ...` with eight ranks.\n"
            "Right: `docker run --pids-limit -1 --ulimit memlock=-1 ...`",
            "With the usual limits: 1024 open files are enough for 384 ranks. For locked memory "
            "on machines without InfiniBand, and for processes of root.",
        ),
    ),
    Failure(
        Known("DDP934", "host-memory", Weight.CAUSE, "2.13"),
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)"
        r"(?:[^\n]{0,999}?tried to allocate (?P<bytes>\d+) bytes)?"
        r"|OSError: \[Errno 12\] Cannot allocate memory|^MemoryError\b",
        examples=(
            "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 1099511627776 bytes. Error code 12 (Cannot allocate memory)",
        ),
        says="could not get host memory[ ({bytes} bytes)]",
        fix="Host memory or its limit (ulimit -v, the job's cgroup) is used up: load less in each "
        "rank, use fewer workers, or ask for more.",
        page=Page(
            "A rank could not allocate host memory.",
            "A failed allocation in torch's CPU allocator or in Python.",
            "A limit (`ulimit -v`, a scheduler's) or the machine's memory is used up. Unlike with "
            "DDP903, the process gets an error and reports where.",
            "Memory-map the data, use fewer workers, or raise the limit.",
            'Wrong: `data = numpy.load("data.npy")` in every rank.\n'
            'Right: `data = numpy.load("data.npy", mmap_mode="r")`',
            "If the out-of-memory killer was faster (DDP903).",
        ),
    ),
    Failure(
        Known("DDP935", "disk-full", Weight.CAUSE, "1.13, 2.6, 2.13"),
        rf"{_OF_SYSTEM}[^\n]{{0,999}}(?:No space left on device|Disk quota exceeded)"
        r"|\[Errno 27\] File too large"
        r"|unexpected pos \d+ vs \d+|basic_ios::clear: iostream error"
        r"|PytorchStreamWriter failed writing"
        r"|Error[^\n]{0,99}(?:FilesystemQuotaExceeded|StorageFull)",
        # Watches of files, and semaphores in /dev/shm, are refused in the same words.
        unless=rf"inotify|{_SHARED}",
        examples=(
            "OSError: [Errno 28] No space left on device",
            "SafetensorError: Error while serializing: IoError(Os { code: 28, kind: StorageFull })",
        ),
        says="could not write a file: the disk is full, or a quota or size limit is reached",
        yields_to=("nccl-shared-memory", "shared-memory-full"),
        fix="`df -h` and `quota` where it writes; keep fewer checkpoints, and write to a temporary "
        "name that is renamed afterwards, so that the last good one stays.",
        page=Page(
            "A file could not be written because the disk is full.",
            'ENOSPC, EDQUOT or EFBIG, also as `torch.save` reports them: "unexpected pos" of '
            'inline_container.cc and "basic_ios::clear: iostream error".',
            "torch's message does not mention the disk, and a half-written checkpoint replaces "
            "the last good one.",
            "Free space or choose another directory, and check quotas. Save to a temporary name "
            "and rename it.",
            "Wrong:\n"
            '    torch.save(state, "last.pt")\n'
            "Right:\n"
            '    torch.save(state, "last.tmp")\n'
            '    os.replace("last.tmp", "last.pt")',
            "If the write was tried again and succeeded.",
        ),
    ),
)
