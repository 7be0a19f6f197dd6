"""Known failures of memory, disks, limits, GPUs and drivers."""

from __future__ import annotations

from ddpdoctor.failures.entry import Failure, Known, Page, Weight

# -- Memory, shared memory, files, disk, network


_OF_SYSTEM = r"(?:OSError|IOError|RuntimeError|(?<!, )error: |what\(\): )"
"""How the system's own refusals begin; a script may say such words of something else, and NCCL ends
with them where /dev/shm is full."""

_SERVICE = r"[/\\](?:wandb|mlflow|comet_ml|neptune|clearml|redis|psycopg|pymongo|sqlalchemy)[/\\]"
"""Libraries that connect to a service of the job, and download nothing."""

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
"""Where Python creates objects that processes share."""

RESOURCES = (
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
        r"(?:is killed by signal: (?!Terminated|Aborted)(?P<signal>[\w ]+)|exited unexpectedly)"
        r"|Unexpected (?P<fault>segmentation fault|floating-point exception) encountered in worker",
        examples=(
            "RuntimeError: DataLoader worker (pid(s) 13823, 13824) exited unexpectedly",
            "ERROR: Unexpected segmentation fault encountered in worker.",
        ),
        says="lost a DataLoader worker[ (pid {pid})][, killed by signal {signal}][ by a {fault}]",
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
        r"|OSError: \[Errno 12\] Cannot allocate memory|^MemoryError\b|std::bad_alloc",
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
        # Watches of files, and semaphores in /dev/shm, fail with the same text.
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


# -- GPUs and CUDA libraries


_BLOCKING = (
    "CUDA reports it late: run again with CUDA_LAUNCH_BLOCKING=1 to get the line that brought it "
    "about. Then compute-sanitizer, or the same step on the CPU."
)

CUDA = (
    Failure(
        Known("DDP929", "device-side-assert", Weight.CAUSE, "1.7 to 2.13"),
        r"device-side assert triggered",
        says="failed an assertion on its GPU: mostly an index out of range",
        fix="Look above for `Assertion ... failed`; labels have to be in 0..classes-1, token ids "
        "below the embedding's size. CUDA_LAUNCH_BLOCKING=1 names the line, the CPU the index.",
        examples=("RuntimeError: CUDA error: device-side assert triggered",),
        page=Page(
            "An assertion failed in a CUDA kernel.",
            "CUDA's \"device-side assert triggered\", also where NCCL's watchdog reports it.",
            "Usually an index is out of range: a label, a token id, a position. The error shows at "
            "a later call, often in NCCL, and no CUDA call works in that process any more.",
            "Run with `CUDA_LAUNCH_BLOCKING=1`, or the failing batch on the CPU, whose exception "
            "names the index.",
            "Wrong: `CrossEntropyLoss` with label 10 and 10 classes.\n"
            "Right: labels from 0 to 9, checked where the data is loaded.",
            "For other CUDA errors (DDP930).",
        ),
    ),
    Failure(
        Known("DDP929", "index-out-of-bounds", Weight.CAUSE, "1.7 to 2.13"),
        r"\.cuh?:\d+: [^\n]{0,400}Assertion [`'](?P<what>[^\n]{0,200}?)['`]? failed",
        says="failed an assertion on its GPU: {what}",
        fix="Mostly an index out of range: labels have to be in 0..classes-1, token ids below the "
        "embedding's size.",
        examples=(
            "../aten/src/ATen/native/cuda/Indexing.cu:1146: indexSelectLargeIndex: block: [56,0,0], thread: [64,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
        ),
    ),
    Failure(
        Known("DDP930", "illegal-memory-access", Weight.CAUSE, "1.7 to 2.13; nccl#1012"),
        r"an illegal memory access was encountered|(?:CUDA|HIP) error: (?:misaligned address"
        r"|unspecified launch failure|an illegal instruction was encountered|invalid address space)"
        r"|(?:Cuda|HIP) failure:? (?:\d+ )?'?(?:unspecified launch failure|an illegal)"
        r"|Memory access fault by GPU node",
        says="had a CUDA kernel access memory that is not its own",
        fix=_BLOCKING + " Suspect custom and fused kernels, and versions that do not fit; if the "
        "same GPU fails each time, the GPU.",
        examples=(
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            "[E ProcessGroupNCCL.cpp:915] [Rank 3] NCCL watchdog thread terminated with exception: CUDA error: unspecified launch failure",
        ),
        page=Page(
            "A CUDA kernel crashed.",
            'CUDA\'s "an illegal memory access was encountered", "misaligned address", '
            '"unspecified launch failure", also where NCCL\'s watchdog reports it.',
            "A kernel read or wrote outside of its memory. The error shows at a later call, often "
            "in NCCL, which has no part in it.",
            "Run with `CUDA_LAUNCH_BLOCKING=1`. Switch off custom or fused kernels one by one. "
            "Check `dmesg | grep -i xid`: a GPU that fails alone may be broken.",
            "Wrong: searching the fault in NCCL because its watchdog prints it.\n"
            "Right: `CUDA_LAUNCH_BLOCKING=1 torchrun train.py`",
            "For assertions (DDP929) and memory that has errors (DDP933).",
        ),
    ),
    Failure(
        Known("DDP933", "gpu-broken", Weight.CAUSE, "any; NVIDIA's Xid list"),
        r"uncorrectable (?:ECC|NVLink) error|GPU has fallen off the bus|NVRM: Xid[^\n:]*: (?P<xid>\d+)"
        r"|[Nn]vlink error|hardware error|CUDA_ERROR_(?:ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE)"
        r"|\bXid (?:\([^)]*\): )?(?P<number>\d+)|Unable to determine the device handle for GPU"
        r"|row remapp(?:ing|er) failure",
        says="has a GPU that reports a fault of the hardware[: Xid {xid}][: Xid {number}]",
        fix="`nvidia-smi -q -d ECC,ROW_REMAPPER` and `dmesg | grep -i xid` on that node: drain it, "
        "reset the GPU, and have it replaced if it happens again.",
        examples=(
            "RuntimeError: CUDA error: uncorrectable ECC error encountered",
            "[E ProcessGroupNCCL.cpp:1182] [Rank 5] NCCL watchdog thread terminated with exception: CUDA error: uncorrectable NVLink error detected during the execution",
            "NVRM: Xid (PCI:0000:8b:00): 79, pid=1, GPU has fallen off the bus.",
        ),
        page=Page(
            "A GPU or its link is broken.",
            "An uncorrectable error of memory (ECC) or NVLink, an Xid, a GPU that fell off the bus.",
            "It is the machine's fault, not the script's; the other ranks only lose a peer.",
            "Take the node out of the job. Look at `dmesg | grep -i xid` and `nvidia-smi -q`, reset "
            "the GPU, and report it if it comes back.",
            "Wrong: starting again on the same node.\nRight: `--exclude=NODE`, or a drained node.",
            "For Xid 13, 31 and 43, which are usually the script's kernels (DDP930).",
        ),
    ),
    Failure(
        Known("DDP928", "gpu-memory-elsewhere", Weight.CAUSE, "1.7 to 2.13"),
        r"CUBLAS_STATUS_ALLOC_FAILED|Cuda failure (?:2 )?'out of memory'|Triton Error \[CUDA\]: out of"
        r"|Unable to find a valid cuDNN algorithm|Failed to CUDA calloc"
        r"|CUDA_ERROR_OUT_OF_MEMORY|CUDA driver error: out of memory",
        says="ran out of GPU memory, in a library that takes its own",
        fix="Leave room beside torch's own memory: a smaller batch, expandable segments "
        "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True), and see who else uses the GPU.",
        examples=(
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "node1:77:77 [0] include/alloc.h:48 NCCL WARN Cuda failure 'out of memory'",
        ),
    ),
    Failure(
        Known("DDP947", "cuda-library", Weight.GENERIC, "1.7 to 2.13"),
        r"CUBLAS_STATUS_(?!ALLOC_FAILED)(?P<cublas>\w+)|CUDNN_STATUS_(?P<cudnn>\w+)"
        r"|cuDNN error: (?P<error>\S[^\n]{0,60})|cusolver error: (?P<solver>\w+)",
        says="had a call of a CUDA library fail[: cuBLAS {cublas}][: cuDNN {cudnn}]",
        fix="Most often GPU memory is full (watch nvidia-smi, try half the batch); then an earlier "
        "kernel's error (CUDA_LAUNCH_BLOCKING=1), or libraries of another version "
        "(LD_LIBRARY_PATH).",
        likely=True,
        examples=(
            "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
            "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        ),
        page=Page(
            "A call of cuBLAS, cuDNN or cuSOLVER failed.",
            "Their status codes, such as CUBLAS_STATUS_NOT_INITIALIZED or "
            "CUDNN_STATUS_EXECUTION_FAILED.",
            "The code rarely says why. Without memory for its workspace a library cannot start; "
            "after a kernel crashed every call fails; a library of another version does not fit.",
            "Try half the batch. Then `CUDA_LAUNCH_BLOCKING=1`. Then an environment without "
            "LD_LIBRARY_PATH.",
            "Wrong: LD_LIBRARY_PATH with a system's cuDNN before torch's own.\n"
            "Right: `unset LD_LIBRARY_PATH`",
            "If another line names the cause (DDP928, DDP929).",
        ),
    ),
    Failure(
        Known("DDP930", "cuda-error", Weight.GENERIC, "1.7 to 2.13"),
        r"(?:CUDA|HIP) error: (?!out of memory|device-side|uncorrectable|no kernel|CUBLAS|CUDNN|invalid device"
        r"|all CUDA|initialization|system not|an illegal|misaligned|unspecified)(?P<what>[a-zA-Z][^\n]{1,80})"
        r"|CUDA unknown error",
        says="had a CUDA call fail[: {what}]",
        fix=_BLOCKING + " `dmesg | grep -i xid` shows whether the GPU reported a fault.",
        examples=("RuntimeError: CUDA error: unknown error",),
        yields_to=("exception",),
    ),
    Failure(
        Known("DDP948", "driver-too-old-for-ptx", Weight.CAUSE, "CUDA 11 and later"),
        r"CUDA error: the provided PTX was compiled with an unsupported toolchain",
        says="runs code of a newer CUDA than the NVIDIA driver knows",
        fix="Update the driver (`nvidia-smi` shows the newest CUDA that it knows), or install "
        "torch, and build extensions, for that CUDA or an older one.",
        examples=(
            "RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain.",
        ),
    ),
    Failure(
        Known("DDP948", "no-kernel-image", Weight.CAUSE, "1.7 to 2.13"),
        r"no kernel image is available for execution|is not compatible with the current PyTorch inst"
        r"|(?:CUDA|HIP) error: invalid device function|nvrtc: error: invalid value for --gpu-architecture",
        says="runs code that was not built for its GPU",
        fix="Install a torch build for this GPU (`torch.cuda.get_arch_list()`), and build "
        "extensions with TORCH_CUDA_ARCH_LIST for it.",
        examples=(
            "RuntimeError: CUDA error: no kernel image is available for execution on the device",
            "nvrtc: error: invalid value for --gpu-architecture (-arch)",
        ),
        page=Page(
            "torch or an extension was not built for this GPU.",
            '"no kernel image is available for execution on the device".',
            "A wheel holds code for some architectures only; a new GPU needs a newer one, an old GPU "
            "an older one.",
            "Compare `torch.cuda.get_device_capability()` with `torch.cuda.get_arch_list()`. Build "
            "extensions on the machine, or with TORCH_CUDA_ARCH_LIST.",
            "Wrong: a wheel for CUDA 11.3 on an H100.\nRight: a wheel for CUDA 12 or later.",
            "For torch's warning about it, as long as the job runs.",
        ),
    ),
    Failure(
        Known("DDP209", "driver-too-old", Weight.CAUSE, "1.7 to 2.13"),
        r"NVIDIA driver on your system is too old|driver version is insufficient for CUDA runtime"
        r"|API call is not supported in the installed CUDA driver|forward compatibility was attempted",
        says="has a driver that is older than torch's CUDA",
        fix="Update the driver, or install a torch built for an older CUDA (`nvidia-smi` names the "
        "newest that the driver can).",
        examples=(
            "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
        ),
    ),
    Failure(
        Known("DDP209", "no-gpu-visible", Weight.CAUSE, "1.7 to 2.13"),
        r"No CUDA GPUs are available|CUDA-capable devices? (?:is|are) (?:detected|busy)|no CUDA-capable "
        r"device is detected|all CUDA-capable devices are busy|CUDA (?:driver )?initialization"
        r"(?: failed|: Unexpected error)|(?:CUDA|HIP) error: system not yet initialized"
        r"|No HIP GPUs are available|(?:CUDA|HIP) error: initialization error"
        r"|cannot find any torch accelerator",
        says="sees no GPU that it can use",
        fix="`nvidia-smi` on that node, CUDA_VISIBLE_DEVICES, docker --gpus all, exclusive mode; on "
        "NVSwitch machines the fabric manager has to run.",
        examples=(
            "RuntimeError: No CUDA GPUs are available",
            "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable",
        ),
    ),
    Failure(
        Known("DDP937", "cuda-before-fork", Weight.CAUSE, "1.7 to 2.13; lightning"),
        r"Cannot re-initialize CUDA in forked subprocess|create new processes if CUDA is already init"
        r"|launch multi-GPU training from your notebook, the `?Accelerator`?[^\n]{0,99}CUDA",
        says="started processes by fork after it had used CUDA",
        fix="Use no CUDA before the start (also no torch.cuda.is_available(), no .to('cuda') at "
        "import), or mp.set_start_method('spawn').",
        examples=(
            "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method",
        ),
        page=Page(
            "A forked process uses CUDA that its parent has initialized.",
            'torch\'s "Cannot re-initialize CUDA in forked subprocess", and the same of Lightning and '
            "Accelerate in notebooks.",
            "CUDA does not survive fork. DataLoader workers and `mp.spawn` with fork inherit it.",
            "Touch CUDA only in the child: no tensors on the GPU in a dataset or a collate "
            "function, none before a notebook's launcher. Or use the spawn start method.",
            "Wrong: a dataset whose `__getitem__` returns `x.cuda()`.\n"
            "Right: `batch.cuda(non_blocking=True)` in the training loop.",
            "With the spawn start method.",
        ),
    ),
    Failure(
        Known("DDP961", "library-mismatch", Weight.CAUSE, "any"),
        r"undefined symbol: (?P<symbol>\w{1,60})|version [`'](?P<version>\w+_[\d.]+)' not found"
        r"|(?:cannot open shared object file|libcud\w+\.so[^\n]{0,40}: cannot open)"
        r"|operator torchvision::nms does not exist|symbol lookup error"
        r"|CUDA SETUP: CUDA detection failed|CUDA Setup failed despite"
        r"|requires (?:PyTorch|torch) ?(?P<needed>[<>=]=? ?[\d.]+)",
        # libibverbs tries the drivers of all network cards.
        unless=r"libibverbs: Warning",
        says="loads libraries that do not fit each other[ (no {symbol})][ (no {version})][ (torch {needed})]",
        fix="Install torch, torchvision and extensions for the same torch and CUDA, rebuild the "
        "extension, and look for other copies in LD_LIBRARY_PATH.",
        examples=(
            "ImportError: /opt/flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi",
            "ValueError: FSDP requires PyTorch >= 2.1.0",
            "ImportError: libcudart.so.11.0: cannot open shared object file: No such file or directory",
        ),
        page=Page(
            "Binary libraries do not fit each other.",
            '"undefined symbol", "version GLIBCXX_... not found", a shared library that is missing.',
            "An extension was built for another torch, or LD_LIBRARY_PATH brings another copy of a "
            "library.",
            "Reinstall the extension for the torch that is installed; `unset LD_LIBRARY_PATH`.",
            "Wrong: torch 2.6 with a flash-attn wheel for torch 2.4.\n"
            "Right: `pip install flash-attn --no-build-isolation --no-cache-dir`",
            "If the exception is caught, and the job goes on without the library.",
        ),
    ),
)
