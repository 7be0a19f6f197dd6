"""Failures that NCCL and CUDA print."""

from __future__ import annotations

from ddpdoctor.core.finding import Severity
from ddpdoctor.failures.model import Failure, Page, Weight

FAILURES = (
    Failure(
        code="DDP203",
        name="two-ranks-on-one-gpu",
        weight=Weight.CAUSE,
        anchors=("Duplicate GPU detected", "Multiple Ranks are using the same GPU"),
        pattern=r"Duplicate GPU detected(?: : rank (?P<rank>\d+) and rank (?P<peer>\d+))?"
        r"|Multiple Ranks are using the same GPU/Partition",
        says="uses the same GPU as [rank {peer}, which is ]another rank",
        fix='Call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before anything touches '
        "CUDA, and start no more ranks than there are GPUs.",
        page=Page(
            "Two ranks share one GPU.",
            "NCCL that finds two ranks on one GPU, or a barrier that warns that a process's GPU is "
            "not known.",
            "All ranks of a node land on GPU 0: NCCL refuses, or hangs, or its memory runs out.",
            'First thing in the script: `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))`, or '
            "`init_process_group(device_id=...)`; `--nproc-per-node` at most the number of GPUs.",
            'Wrong: `model.cuda()` on every rank. Right: `model.to(int(os.environ["LOCAL_RANK"]))` '
            "after `set_device`.",
            "On CPUs, and when each process sees a single GPU by CUDA_VISIBLE_DEVICES.",
        ),
        torch="NCCL 2.x init.cc",
    ),
    Failure(
        code="DDP203",
        name="barrier-without-device",
        weight=Weight.NOTE,
        anchors=("to perform barrier as devices used by this process",),
        pattern=r"to perform barrier as devices used by this process are currently unknown",
        says="came to a barrier before its GPU was known, and guesses it",
        fix="Call torch.cuda.set_device(LOCAL_RANK) first, or init_process_group(device_id=...).",
        severity=Severity.WARNING,
        torch="2.x",
    ),
    Failure(
        code="DDP920",
        name="nccl-versions-differ",
        weight=Weight.CAUSE,
        anchors=("Mismatched NCCL version",),
        pattern=r"Mismatched NCCL version detected : rank (?P<rank>\d+) version (?P<version>\d+)",
        says="has another NCCL ({version}) than its peers",
        fix="Install the same torch wheel on every node; look for a libnccl in LD_LIBRARY_PATH or "
        "LD_PRELOAD.",
        page=Page(
            "Nodes have different versions of NCCL.",
            "NCCL's own comparison at the start.",
            "Its wire changes between versions: the communicator cannot be made.",
            "The same torch wheel, or the same container image, on every node; nothing in "
            "LD_LIBRARY_PATH that replaces its NCCL.",
            "Wrong: torch 2.6 here and 2.8 there. Right: one image for all nodes.",
            "When the versions are equal.",
        ),
        torch="NCCL init.cc",
    ),
    Failure(
        code="DDP005",
        name="nccl-shared-memory",
        weight=Weight.CAUSE,
        anchors=("NCCL WARN", "Last error:"),
        pattern=r"(?:NCCL WARN|Last error:)\s+"
        r"(?:Error: failed to extend|Error while creating shared memory"
        r"|Call to posix_fallocate failed)",
        says="has no shared memory left for NCCL: /dev/shm is full or too small",
        fix="`df -h /dev/shm`; in docker start with --shm-size=8g or --ipc=host.",
        torch="nccl#342, nccl#525",
    ),
    Failure(
        code="DDP006",
        name="locked-memory",
        weight=Weight.CAUSE,
        anchors=("ibv_",),
        pattern=r"ibv_(?:reg_mr|create_cq|create_qp)\S* failed with error Cannot allocate memory",
        says="may not lock memory for InfiniBand: the limit `ulimit -l` is too low",
        fix="`ulimit -l unlimited` (limits.conf, LimitMEMLOCK of the service, "
        "docker --ulimit memlock=-1).",
        torch="nccl-tests#206",
    ),
    Failure(
        code="DDP921",
        name="nccl-connect",
        weight=Weight.GENERIC,
        anchors=("connect to", "Call to connect"),
        pattern=r"NCCL WARN[^\n]*connect to (?P<address>\S+) returned [^,]+, "
        r"(?:exceeded error retry|retrying)|NCCL WARN[^\n]*Call to connect[^\n]*"
        r"(?:failed|timed out|refused)",
        says="could not connect to a peer of NCCL[ at {address}]",
        fix="Set NCCL_SOCKET_IFNAME to the interface of the network between the nodes, and open "
        "the range net.ipv4.ip_local_port_range there.",
        page=Page(
            "NCCL cannot connect to a peer.",
            "NCCL's warning about a connect that failed or timed out.",
            "The peer's address is on an interface that this node does not reach (docker0, a "
            "management network), or a firewall blocks ephemeral ports.",
            "`export NCCL_SOCKET_IFNAME=eth0` on every node; open the ephemeral ports between "
            "them; `NCCL_DEBUG=INFO` prints the interface that was chosen.",
            "Wrong: interfaces left to chance. Right: NCCL_SOCKET_IFNAME set to the data network.",
            "When any rank failed by itself: then this is its consequence.",
        ),
        torch="nccl#388, nccl#697",
    ),
    Failure(
        code="DDP922",
        name="nccl-system-error",
        weight=Weight.GENERIC,
        anchors=("ncclSystemError", "unhandled system error"),
        pattern=r"ncclSystemError:|unhandled system error",
        says="had a system call fail within NCCL, which does not say which",
        fix="Run again with NCCL_DEBUG=WARN: the line that starts with NCCL WARN names the socket, "
        "shared memory or verbs call that failed.",
        page=Page(
            "A system call of NCCL failed.",
            '"ncclSystemError" or "unhandled system error", and no warning that says more.',
            "It can be a socket, shared memory, or InfiniBand; without NCCL's own warnings "
            "nobody can tell.",
            "Start with `NCCL_DEBUG=WARN` and look again: `ddpdoctor` reads those lines.",
            "Wrong: guessing. Right: `NCCL_DEBUG=WARN torchrun ...`.",
            "When a line of NCCL says what failed (DDP921, DDP005, DDP006).",
        ),
        torch="nccl#207",
    ),
    Failure(
        code="DDP923",
        name="nccl-cuda-error",
        weight=Weight.GENERIC,
        anchors=("ncclUnhandledCudaError", "unhandled cuda error"),
        pattern=r"ncclUnhandledCudaError:|unhandled cuda error",
        says="had a CUDA call fail within NCCL",
        fix="Run again with NCCL_DEBUG=WARN; look at `dmesg | grep -i xid` and whether the driver "
        "is as new as torch's CUDA (`nvidia-smi`).",
        page=Page(
            "A CUDA call of NCCL failed.",
            '"ncclUnhandledCudaError" or "unhandled cuda error".',
            "The driver is older than the CUDA that torch was built for, the GPU's memory is full, "
            "or the GPU itself reported a fault (XID).",
            "`NCCL_DEBUG=WARN` names the call; `dmesg | grep -i xid` and `nvidia-smi` the rest.",
            "Wrong: a driver of CUDA 11 under a wheel of CUDA 12. Right: a driver as new as torch.",
            "When another line names the cause (DDP928 for memory).",
        ),
        torch="NCCL documentation",
    ),
    Failure(
        code="DDP926",
        name="no-infiniband",
        weight=Weight.NOTE,
        anchors=("libibverbs", "NET/IB", "NCCL_IB_DISABLE"),
        pattern=r"Failed to open libibverbs|NET/IB : No device found"
        r"|NCCL_IB_DISABLE set by environment to 1",
        says="talks over TCP: NCCL found no InfiniBand",
        fix="If the machines have InfiniBand: install libibverbs1 (in the container, too), unset "
        "NCCL_IB_DISABLE. If not, all is well.",
        page=Page(
            "NCCL does without InfiniBand.",
            "NCCL's line (with NCCL_DEBUG=INFO) that verbs are not there or turned off.",
            "It works, over TCP: where the machines have InfiniBand, several times slower.",
            "`apt install libibverbs1` in the image, `--device /dev/infiniband`, and no "
            "NCCL_IB_DISABLE=1.",
            "Wrong: an image without libibverbs1 on an InfiniBand cluster. "
            "Right: the library, and the devices passed in.",
            "Without NCCL_DEBUG=INFO nothing is printed.",
        ),
        severity=Severity.INFO,
        torch="nccl-tests#14",
    ),
    Failure(
        code="DDP927",
        name="invalid-device-ordinal",
        weight=Weight.CAUSE,
        anchors=("invalid device ordinal",),
        pattern=r"CUDA error: invalid device ordinal|(?:RuntimeError|AcceleratorError): [^\n]*"
        r"invalid device ordinal",
        says="asked for a GPU that this node does not have",
        fix="Use LOCAL_RANK, not RANK, as the device, and start at most as many ranks as GPUs are "
        "visible (CUDA_VISIBLE_DEVICES).",
        page=Page(
            "A rank asked for a GPU that is not there.",
            'CUDA\'s "invalid device ordinal".',
            "On the second node RANK is 8 and more while the GPUs count from 0; or more ranks than "
            "visible GPUs were started.",
            'The device is `int(os.environ["LOCAL_RANK"])`; `--nproc-per-node` at most the number '
            "of visible GPUs.",
            "Wrong: `torch.cuda.set_device(dist.get_rank())` on two nodes. "
            'Right: `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))`.',
            "When another exception came first.",
        ),
        torch="apex#1138",
    ),
    Failure(
        code="DDP928",
        name="gpu-memory",
        weight=Weight.CAUSE,
        anchors=("CUDA out of memory", "CUDA error: out of memory"),
        # Others may speak of it, too: a script that estimates its batch, say.
        pattern=r"(?:OutOfMemoryError|RuntimeError): CUDA out of memory"
        r"\.?(?:[^\n]*?Tried to allocate (?P<size>[\d.]+ [KMGT]iB))?"
        r"|(?:Error:|what\(\):) +CUDA error: out of memory",
        says="ran out of GPU memory[ when it wanted {size}]",
        fix="See who else holds it (`nvidia-smi`: an orphan of an earlier job?), whether other "
        "ranks also use this GPU, then a smaller batch or checkpointed activations.",
        page=Page(
            "A rank ran out of GPU memory.",
            "torch's OutOfMemoryError for CUDA.",
            "One rank's failure ends all. Where a single rank fails, its batch is larger, it holds "
            "what the others do not (evaluation, logging), or a stranger is on its GPU.",
            "`nvidia-smi` for other processes; smaller batches, activation checkpointing, "
            "`del loss` and `.item()` instead of kept graphs.",
            "Wrong: `losses.append(loss)`. Right: `losses.append(loss.item())`.",
            "For errors that were caught: the job goes on.",
        ),
        torch="1.13 to 2.13; pytorch#1223",
    ),
    Failure(
        code="DDP209",
        name="no-cuda",
        weight=Weight.CAUSE,
        anchors=(
            "have NCCL built in",
            "only supported with GPUs",
            "requires at least one CUDA device",
            "no NVIDIA driver",
            "'_cuda_setDevice'",
            "not compiled with CUDA",
            "uda is not available",
        ),
        pattern=r"Distributed package doesn't have NCCL built in"
        r"|ProcessGroupNCCL is only supported with GPUs|nccl2 requires at least one CUDA device"
        r"|Found no NVIDIA driver"
        r"|has no attribute '_cuda_setDevice'|Torch not compiled with CUDA enabled"
        r"|Error: [^\n]*Cuda is not available",
        says="asked for CUDA or NCCL, and this torch or this machine has none",
        fix='`python -c "import torch; print(torch.version.cuda, torch.cuda.is_available())"`: '
        "None means a CPU wheel, False no driver (docker --gpus all). On CPUs use backend gloo.",
        page=Page(
            "NCCL or CUDA is asked for where there is none.",
            "The exceptions of a torch without NCCL or CUDA, or of a machine without a driver.",
            "A CPU wheel was installed, the container was not given the GPUs, or the script names "
            "its backend without looking.",
            "Install a CUDA wheel, start the container with `--gpus all`, or choose: "
            '`"nccl" if torch.cuda.is_available() else "gloo"`.',
            'Wrong: `dist.init_process_group("nccl")` on a laptop. Right: the choice above.',
            "When the script falls back by itself.",
        ),
        torch="1.13, 2.6, 2.13, 2.15",
    ),
)
