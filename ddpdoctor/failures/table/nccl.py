"""Failures of NCCL: timeouts, its own errors, the network and the links."""

from __future__ import annotations

from ddpdoctor.core.finding import Severity
from ddpdoctor.failures.entry import Failure, Known, Page, Weight

# -- Reports of NCCL and CUDA


_LAST = r"(?:[\s\S]{0,999}?Last error: *\n?(?P<last>\S[^\n]{0,160}))?"
"""NCCL's own words, which newer versions print behind the kind of the error."""

_NEARER = (
    *("infiniband-retries", "infiniband-port", "p2p-unusable", "nccl-connect", "nvlink-sharp"),
    *("nccl-warns-of-cuda", "interface-missing", "ranks-alike", "libfabric"),
)
"""Warnings of NCCL that say more than the kind of its error."""

_SHARED_REFUSED = r"Permission denied|No such file|not permitted|attaching to"

NCCL = (
    Failure(
        Known("DDP203", "two-ranks-on-one-gpu", Weight.CAUSE, "NCCL 2.x init.cc"),
        r"Duplicate GPU detected(?: : rank (?P<rank>\d+) and rank (?P<peer>\d+))?"
        r"|Multiple Ranks are using the same GPU/Partition",
        examples=(
            "node0:812:901 [0] init.cc:943 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000",
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:268, invalid usage, NCCL version 2.30.7\nLast error:\nMultiple Ranks are using the same GPU/Partition",
        ),
        says="uses the same GPU as [rank {peer}, which is ]another rank",
        fix='Call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before anything touches '
        "CUDA, and start no more ranks than there are GPUs.",
        page=Page(
            "Two ranks share one GPU.",
            "NCCL's error that two ranks use the same GPU, or torch's warning at a barrier that "
            "the process's GPU is not known.",
            "All ranks of a node use GPU 0: NCCL raises or hangs, or GPU 0 runs out of memory.",
            'Start the script with `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))`, or '
            "pass `device_id` to `init_process_group`. Start at most as many ranks as there are "
            "GPUs.",
            "Wrong:\n"
            "    model.cuda()  # GPU 0 on every rank\n"
            "Right:\n"
            '    local_rank = int(os.environ["LOCAL_RANK"])\n'
            "    torch.cuda.set_device(local_rank)\n"
            "    model.to(local_rank)",
            "On CPUs, and if CUDA_VISIBLE_DEVICES shows each process a single GPU.",
        ),
    ),
    Failure(
        Known("DDP203", "barrier-without-device", Weight.NOTE, "2.x"),
        r"to perform barrier as devices used by this process are currently unknown",
        says="came to a barrier before its GPU was known, and guesses it",
        examples=(
            "[W ProcessGroupNCCL.cpp:1569] Rank 0 using best-guess GPU 0 to perform barrier as devices used by this process are currently unknown.",
        ),
        fix="Call torch.cuda.set_device(LOCAL_RANK) first, or init_process_group(device_id=...).",
        severity=Severity.INFO,
    ),
    Failure(
        Known("DDP920", "nccl-versions-differ", Weight.CAUSE, "NCCL init.cc"),
        r"Mismatched NCCL version detected : rank (?P<rank>\d+) version (?P<version>\d+)",
        examples=(
            "node1:33:70 [1] bootstrap.cc:301 NCCL WARN Mismatched NCCL version detected : rank 3 version 21805 rank 0 version 22105",
        ),
        says="has another NCCL ({version}) than its peers",
        fix="Install the same torch wheel on every node; look for a libnccl in LD_LIBRARY_PATH or "
        "LD_PRELOAD.",
        page=Page(
            "Nodes have different versions of NCCL.",
            "NCCL's version check at the start.",
            "NCCL's protocol changes between versions: the communicator cannot be created.",
            "Use the same torch wheel or container image on every node, and no libnccl in "
            "LD_LIBRARY_PATH that replaces it.",
            "Wrong: torch 2.6 on one node and 2.8 on the other.\nRight: one image for all nodes.",
            "If the versions are equal.",
        ),
    ),
    Failure(
        Known("DDP005", "nccl-shared-memory", Weight.CAUSE, "nccl#342, nccl#525"),
        r"(?:NCCL WARN|Last error:)\s+"
        r"(?:Error: failed to extend|Error while creating shared memory"
        r"|Call to posix_fallocate failed)"
        r"|(?:failed to extend|shared memory segment) (?:/dev/shm/)?nccl-",
        examples=(
            "node0:55:99 [1] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-abc123 to 9637892 bytes, error: No space left on device (28)",
            "Error while creating shared memory segment /dev/shm/nccl-6VbKGJ (size 9637888), error: No space left on device (28)",
            "node0:55:99 [1] misc/shmutils.cc:87 NCCL WARN Error: failed to extend /dev/shm/nccl-8e1g3s to 9637892 bytes",
        ),
        unless=_SHARED_REFUSED,
        says="has no shared memory left for NCCL: /dev/shm is full or too small",
        fix="`df -h /dev/shm`; in docker start with --shm-size=8g or --ipc=host.",
    ),
    Failure(
        Known("DDP005", "nccl-shared-memory-refused", Weight.CAUSE, "nccl#328, nccl#1589"),
        r"shared memory segment (?:/dev/shm/)?nccl-[^\n]{0,200}error: (?P<why>(?!No space)[A-Z][\w ]+)"
        r"|Call to shm_open failed ?: (?P<open>(?!No space)[\w ]+)"
        r"|Error while attaching to shared memory",
        says="cannot open the shared memory of a peer for NCCL[: {why}][: {open}]",
        fix="Permission denied: `ls -ld /dev/shm` has to show drwxrwxrwt. No such file: the ranks of one "
        "node see different /dev/shm, since each has its own container (--ipc=host), or the peer has "
        "already ended. NCCL_SHM_DISABLE=1 as a test.",
        examples=(
            "node0:55:99 [0] misc/shmutils.cc:129 NCCL WARN Error while attaching to shared memory segment /dev/shm/nccl-ab12 (size 64), error: No such file or directory (2)",
            "node0:55:99 [0] include/shm.h:27 NCCL WARN Call to shm_open failed : Permission denied",
        ),
    ),
    Failure(
        Known("DDP006", "locked-memory", Weight.CAUSE, "nccl-tests#206"),
        r"ibv_(?:reg_mr|create_cq|create_qp)\S* failed with error Cannot allocate memory",
        examples=(
            "node0:55:99 [0] transport/net_ib.cc:640 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
        ),
        says="may not lock memory for InfiniBand: the limit `ulimit -l` is too low",
        fix="`ulimit -l unlimited` (limits.conf, LimitMEMLOCK of the service, "
        "docker --ulimit memlock=-1).",
    ),
    Failure(
        Known("DDP921", "nccl-connect", Weight.GENERIC, "nccl#388, nccl#697"),
        r"NCCL WARN[^\n]{0,999}[Cc]onnect to (?P<address>\S+) (?:returned|failed)"
        r"|NCCL WARN[^\n]{0,999}Call to connect[^\n]{0,999}(?:failed|timed out|refused)",
        examples=(
            "node1:41:88 [1] misc/socket.cc:484 NCCL WARN connect to 172.18.0.3<43215> returned Connection timed out, exceeded error retry count after 34 attempts",
        ),
        says="could not connect to a peer of NCCL[ at {address}]",
        fix="Set NCCL_SOCKET_IFNAME to the interface of the network between the nodes, and open "
        "the range net.ipv4.ip_local_port_range there.",
        page=Page(
            "NCCL cannot connect to a peer.",
            "NCCL's warning about a connection that failed or timed out.",
            "The peer's address is on an interface that this node cannot reach (docker0, a "
            "management network), or a firewall blocks the ephemeral ports.",
            "Set NCCL_SOCKET_IFNAME on every node, and open the ephemeral ports between the "
            "nodes. `NCCL_DEBUG=INFO` prints the interface that NCCL chose.",
            "Wrong: no setting, and NCCL chooses docker0.\n"
            "Right: `export NCCL_SOCKET_IFNAME=eth0` on every node.",
            "If any rank has an independent failure: then this follows from it.",
        ),
    ),
    Failure(
        Known("DDP922", "nccl-system-error", Weight.GENERIC, "nccl#207"),
        r"(?:ncclSystemError:|unhandled system error)" + _LAST,
        examples=(
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:291, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.19.3\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
            "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3",
        ),
        says="had a system call fail within NCCL[: {last}]",
        yields_to=_NEARER,
        fix="A line with NCCL WARN names the socket, shared memory or verbs call that failed; without "
        "any, run again with NCCL_DEBUG=WARN.",
        page=Page(
            "A system call of NCCL failed.",
            '"ncclSystemError" or "unhandled system error" without a warning that explains it.',
            "The cause may be a socket, shared memory, or InfiniBand. Only NCCL's warnings show "
            "which.",
            "Run the job with `NCCL_DEBUG=WARN`: ddpdoctor reads those lines.",
            'Wrong: `torchrun train.py`, which prints "unhandled system error" only.\n'
            "Right: `NCCL_DEBUG=WARN torchrun train.py`",
            "If a line of NCCL says what failed (DDP921, DDP005, DDP006).",
        ),
    ),
    Failure(
        Known("DDP923", "nccl-cuda-error", Weight.GENERIC, "NCCL documentation"),
        r"(?:ncclUnhandledCudaError:|unhandled cuda error)" + _LAST,
        examples=(
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:291, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.19.3\nncclUnhandledCudaError: Call to CUDA function failed.",
        ),
        says="had a CUDA call fail within NCCL[: {last}]",
        yields_to=_NEARER,
        fix="Run again with NCCL_DEBUG=WARN; look at `dmesg | grep -i xid` and whether the driver "
        "is as new as torch's CUDA (`nvidia-smi`).",
        page=Page(
            "A CUDA call of NCCL failed.",
            '"ncclUnhandledCudaError" or "unhandled cuda error".',
            "The driver is older than the CUDA version of torch, the GPU's memory is full, or the "
            "GPU reported a fault (XID).",
            "`NCCL_DEBUG=WARN` names the call. Check `dmesg | grep -i xid` and `nvidia-smi`.",
            "Wrong: a driver for CUDA 11 with a torch built for CUDA 12.\n"
            "Right: a driver at least as new as torch's CUDA version.",
            "If another line names the cause (DDP928 for memory).",
        ),
    ),
    Failure(
        Known("DDP926", "no-infiniband", Weight.NOTE, "nccl-tests#14"),
        r"Failed to open libibverbs|NET/IB : No device found"
        r"|NCCL_IB_DISABLE set by environment to 1",
        examples=("node0:12:12 [0] misc/ibvwrap.cc:94 NCCL WARN Failed to open libibverbs.so[.1]",),
        says="talks over TCP: NCCL found no InfiniBand",
        fix="If the machines have InfiniBand: install libibverbs1 (in the container, too), unset "
        "NCCL_IB_DISABLE. If not, all is well.",
        page=Page(
            "NCCL does not use InfiniBand.",
            "NCCL's line (with NCCL_DEBUG=INFO) that the verbs library is missing or InfiniBand "
            "is disabled.",
            "NCCL uses TCP, which is several times slower if the machines have InfiniBand.",
            "Install libibverbs1 in the image, pass `--device /dev/infiniband`, and unset "
            "NCCL_IB_DISABLE.",
            "Wrong: an image without libibverbs1 on an InfiniBand cluster.\n"
            "Right: `apt install libibverbs1`, and `docker run --device /dev/infiniband ...`",
            "Without NCCL_DEBUG=INFO, NCCL prints nothing about it.",
        ),
        severity=Severity.INFO,
    ),
    Failure(
        Known("DDP927", "invalid-device-ordinal", Weight.CAUSE, "apex#1138"),
        r"(?:CUDA|HIP) error: invalid device ordinal"
        r"|(?:RuntimeError|AcceleratorError): [^\n]{0,999}invalid device ordinal",
        examples=(
            "RuntimeError: CUDA error: invalid device ordinal\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.",
        ),
        says="asked for a GPU that this node does not have",
        fix="Use LOCAL_RANK, not RANK, as the device, and start at most as many ranks as GPUs are "
        "visible (CUDA_VISIBLE_DEVICES).",
        page=Page(
            "A rank uses a GPU that does not exist.",
            'CUDA\'s "invalid device ordinal".',
            "On the second node, RANK starts at 8 while the GPUs count from 0. Or there are more "
            "ranks than visible GPUs.",
            'Use `int(os.environ["LOCAL_RANK"])` as the device, and set `--nproc-per-node` to at '
            "most the number of visible GPUs.",
            "Wrong: `torch.cuda.set_device(dist.get_rank())` on two nodes.\n"
            'Right: `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))`',
            "If another exception came first.",
        ),
    ),
    Failure(
        Known("DDP928", "gpu-memory", Weight.CAUSE, "1.13 to 2.13; pytorch#1223"),
        # Others may mention it, too, such as a script that estimates its batch size.
        r"(?:OutOfMemoryError|RuntimeError): (?:CUDA|HIP|XPU|NPU) out of memory"
        r"\.?(?:[^\n]{0,999}?Tried to allocate (?P<size>[\d.]+ [KMGT]iB))?"
        r"|(?:Error:|what\(\):) +CUDA error: out of memory"
        r"|(?:CUDA|HIP|XPU|NPU) out of memory\. Tried to allocate (?P<asked>[\d.]+ [KMGT]iB)",
        examples=("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",),
        says="ran out of GPU memory[ when it wanted {size}][ when it wanted {asked}]",
        fix="See who else holds it (`nvidia-smi`: an orphan of an earlier job?), whether other "
        "ranks also use this GPU, then a smaller batch or checkpointed activations.",
        page=Page(
            "A rank ran out of GPU memory.",
            "torch's OutOfMemoryError for CUDA.",
            "One rank's failure ends the job. If only one rank fails, its batch is larger, it "
            "holds more than the others (evaluation, logging), or another process uses its GPU.",
            "Check `nvidia-smi` for other processes. Use smaller batches or activation "
            "checkpointing, and do not keep graphs alive: `del loss`, `.item()`.",
            "Wrong: `losses.append(loss)`, which keeps every graph.\n"
            "Right: `losses.append(loss.item())`",
            "For errors that the script catches: the job continues.",
        ),
    ),
    Failure(
        Known("DDP209", "no-cuda", Weight.CAUSE, "1.13, 2.6, 2.13, 2.15"),
        r"Distributed package doesn't have NCCL built in"
        r"|ProcessGroupNCCL is only supported with GPUs|nccl2 requires at least one CUDA device"
        r"|Found no NVIDIA driver"
        r"|has no attribute '_cuda_setDevice'|Torch not compiled with CUDA enabled"
        r"|Error: [^\n]{0,999}Cuda is not available",
        examples=(
            "AssertionError: Torch not compiled with CUDA enabled",
            "RuntimeError: nccl2 requires at least one CUDA device",
            "RuntimeError: Distributed package doesn't have NCCL built in",
        ),
        says="asked for CUDA or NCCL, and this torch or this machine has none",
        fix='`python -c "import torch; print(torch.version.cuda, torch.cuda.is_available())"`: '
        "None means a CPU wheel, False no driver (docker --gpus all). On CPUs use backend gloo.",
        page=Page(
            "The job uses NCCL or CUDA where they are not available.",
            "The exceptions of a torch built without NCCL or CUDA, or of a machine without a "
            "driver.",
            "The CPU build of torch is installed, the container was started without GPUs, or the "
            "script requires a backend without checking for it.",
            "Install a CUDA build of torch, start the container with `--gpus all`, or choose the "
            "backend by what is available.",
            'Wrong: `dist.init_process_group("nccl")` on a machine without a GPU.\n'
            'Right: `dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")`',
            "If the script handles the exception.",
        ),
    ),
)


# -- Network, timeouts and internal errors


_WARN = (
    "A line with NCCL WARN names the call that failed; without any, run again with NCCL_DEBUG=WARN "
    "(of every rank)."
)
_FIRST = (
    "Its cause is on the rank that ended or hung first: look at all ranks' output for the earliest "
    "error, and at the nodes."
)

NETWORK = (
    Failure(
        Known("DDP203", "invalid-usage", Weight.GENERIC, "NCCL 2.x"),
        r"(?:ncclInvalidUsage|NCCL error[^\n]{0,200}invalid usage)" + _LAST,
        says="used NCCL in a way that it refuses: [{last}; ]mostly two ranks on one GPU",
        yields_to=_NEARER,
        fix='torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before anything touches CUDA; no more '
        "ranks than GPUs. Else " + _WARN[0].lower() + _WARN[1:],
        likely=True,
        examples=(
            "RuntimeError: NCCL error in: ../torch/lib/c10d/ProcessGroupNCCL.cpp:911, invalid usage, NCCL version 2.7.8",
        ),
    ),
    Failure(
        Known("DDP922", "no-network-plugin", Weight.CAUSE, "NCCL 2.27 on, plugin/net.cc"),
        r"Failed to initialize any NET plugin|Error: network \S+ not found\.",
        examples=(
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.29.3\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nFailed to initialize any NET plugin",
        ),
        says="could not load the network that NCCL is to use",
        fix="NCCL_NET and NCCL_NET_PLUGIN name it: its library (libnccl-net.so, aws-ofi-nccl) has to "
        "be in LD_LIBRARY_PATH on every node, inside the container, and its devices have to be "
        "free. NCCL_NET=Socket does without it.",
    ),
    Failure(
        Known("DDP924", "nccl-internal-error", Weight.GENERIC, "NCCL 2.x"),
        r"(?:ncclInternalError|NCCL error[^\n]{0,200}internal error)" + _LAST,
        says="had NCCL fail an internal check[: {last}]",
        yields_to=_NEARER,
        fix=_WARN
        + " Often the network (NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE=1 as a test), the topology "
        "of the container or VM (NCCL_P2P_DISABLE=1 as a test), or a bug: try another NCCL.",
        examples=(
            "ncclInternalError: Internal check failed.",
            "RuntimeError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1269, internal error, NCCL version 2.14.3",
        ),
        page=Page(
            "An internal check of NCCL failed.",
            '"ncclInternalError" or "internal error" without a warning that explains it.',
            "Only NCCL's warnings say which check: the topology, the network plugin, a peer's answer.",
            "Run with `NCCL_DEBUG=WARN` on all ranks. As tests, one at a time: NCCL_IB_DISABLE=1, "
            "NCCL_P2P_DISABLE=1, NCCL_NET=Socket, another version of NCCL.",
            "Wrong: `torchrun train.py`, which prints the error alone.\n"
            "Right: `NCCL_DEBUG=WARN torchrun train.py`",
            "If a line of NCCL says what failed.",
        ),
    ),
    Failure(
        Known("DDP924", "nccl-invalid-argument", Weight.GENERIC, "NCCL 2.x"),
        r"(?:ncclInvalidArgument|NCCL error[^\n]{0,200}invalid argument)" + _LAST,
        says="passed an argument that NCCL refuses[: {last}]",
        yields_to=_NEARER,
        fix="NCCL_DEBUG=WARN names it. Mostly the tensor: on another GPU than the communicator, not "
        "contiguous, of a dtype that this NCCL does not know; or a root rank outside of the group.",
        examples=(
            "RuntimeError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1269, invalid argument, NCCL version 2.14.3",
        ),
    ),
    Failure(
        Known("DDP923", "nvlink-sharp", Weight.GENERIC, "NCCL nvls.cc; nccl#976, nccl#1672"),
        r"nvls\.cc:\d+ (?:\([^)\n]{0,80}\) )?NCCL WARN (?P<what>\S[^\n]{0,120})|NVLink SHARP \(NVLS\)[^\n]{0,120}"
        r"(?:CUDA error|Cuda failure) (?P<error>\d+ ?'[^'\n]{1,80}')|(?:CUDA error|Cuda failure) 802\b",
        says="cannot use NVLink SHARP (NVLS)[: {what}][: {error}]",
        fix="Mostly the node's fabric manager, restarted without a reset of its GPUs: `systemctl status "
        "nvidia-fabricmanager`, `nvidia-smi -q | grep -A2 Fabric`, reboot the node. NCCL_NVLS_ENABLE=0 "
        "does without it.",
        examples=(
            "node1:77:77 [0] transport/nvls.cc:254 NCCL WARN Cuda failure 1 'invalid argument'",
            "Last error:\nFailed to bind NVLink SHARP (NVLS) Multicast memory of size 64 : CUDA error 401 'not in this state'",
        ),
    ),
    Failure(
        Known("DDP915", "infiniband-retries", Weight.GENERIC, "NCCL net_ib.cc; nccl#214"),
        r"Got completion (?:from peer (?P<peer>\S+) )?with (?:error|status=(?:12|IBV_WC_RETRY_EXC_ERR)\b)(?:\((?:12)\))? ?(?:12\b)?"
        r"(?!(?: | status=)?(?:4|5|9|10|11|13)\b)|IBV_WC_RETRY_EXC_ERR|transport retry counter exceeded",
        says="got no answer over InfiniBand or RoCE[ from {peer}]: the peer or the link went away",
        fix="See whether that peer ended first. If not: `ibstat`, `ibv_devinfo`, cables and switch, MTU, "
        "NCCL_IB_GID_INDEX and PFC on RoCE; NCCL_IB_TIMEOUT=22 and NCCL_IB_RETRY_CNT=7 bridge gaps.",
        examples=(
            "node3:77:101 [2] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.0.7<40731> with error 12, opcode 0, len 0, vendor err 129",
        ),
        page=Page(
            "InfiniBand or RoCE lost a peer.",
            "NCCL's completion errors: 12 (retries exceeded), 5 (flushed), 4 and 10 (access), and the "
            "port's events.",
            "Error 12 is silence from the peer: it died, or the link or its configuration is bad. "
            "Error 5 follows from another one.",
            "Look for the first error over all ranks. Test the link (`ib_write_bw`) between those two "
            "nodes.",
            "Wrong: NCCL_IB_GID_INDEX unset on RoCE v2.\nRight: the index that `show_gids` lists as v2.",
            "If any rank failed by itself: then this follows from it.",
        ),
    ),
    Failure(
        Known("DDP915", "infiniband-flushed", Weight.CONSEQUENCE, "NCCL net_ib.cc"),
        r"Got completion (?:from peer \S+ )?with (?:error (?:4|5|9|10|11|13)\b|status=(?:4|5|9|10|11|13)\b)",
        says="had a transfer over InfiniBand or RoCE cut off, as a consequence of another error",
        fix=_FIRST,
        examples=(
            "node3:77:101 [2] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.0.7<40731> with error 5, opcode 0, len 0, vendor err 244",
        ),
    ),
    Failure(
        Known("DDP915", "infiniband-port", Weight.GENERIC, "NCCL net_ib.cc"),
        r"NET/IB : [^\n]{0,60}Got async (?:fatal )?event ?: (?P<event>[\w ]+)|ibv_modify_qp[^\n]{0,60}failed"
        r"|Call to ibv_\w+ failed|ibv_\w+ failed with error (?!Cannot allocate)(?P<why>[\w ]+)",
        says="has trouble with its InfiniBand or RoCE port[: {event}][: {why}]",
        fix="`ibstat` and `ibv_devinfo` on that node; NCCL_IB_HCA names the right cards, "
        "NCCL_IB_GID_INDEX the right address. NCCL_IB_DISABLE=1 as a test.",
        examples=(
            "node3:77:101 [2] NCCL WARN NET/IB : mlx5_0:1 Got async event : port error",
            "node3:77:101 [2] misc/ibvwrap.cc:284 NCCL WARN Call to ibv_modify_qp failed with error No such device",
        ),
    ),
    Failure(
        Known("DDP915", "libfabric", Weight.GENERIC, "aws-ofi-nccl"),
        r"NET/OFI (?P<what>(?:Request \S+ completed with error|Unable to (?:register|create|open|get|insert)|Couldn't)[^\n]{0,90})",
        says="had a transfer over EFA or another libfabric network fail: {what}",
        fix="See whether the peer ended first. If not: the security group has to allow all traffic "
        "within itself, `ulimit -l` be unlimited, the container's memory limit and huge pages be large "
        "enough, and aws-ofi-nccl fit the EFA driver. FI_LOG_LEVEL=warn says more.",
        examples=(
            "node1:199:263 [2] process_err_completion:1562 NCCL WARN NET/OFI Request 0x7f08 completed with error. RC: 5.",
        ),
    ),
    Failure(
        Known("DDP907", "nccl-peer-gone", Weight.CONSEQUENCE, "NCCL socket.cc"),
        r"Call to (?:recv|send|read|write|recvmsg)\b[^\n]{0,120}failed|Connection closed by remote peer|Net : Connection closed"
        r"|socket(?:Progress|PollConnect|TryAccept)[^\n]{0,99}(?:closed|returned)(?![^\n]{0,99}retrying)|Failed to connect to peer",
        says="lost its connection to a peer in NCCL",
        fix=_FIRST,
        examples=(
            "node3:77:101 [2] include/socket.h:416 NCCL WARN Call to recv from 10.0.0.7<53204> failed : Broken pipe",
            "node3:77:101 [2] misc/socket.cc:538 NCCL WARN Net : Connection closed by remote peer node7<40731>",
        ),
    ),
    Failure(
        Known("DDP921", "p2p-unusable", Weight.GENERIC, "NCCL p2p.cc; pytorch#53395"),
        r"Could not enable P2P between dev|[Pp]eer access is not supported|P2P is disabled between|peer mapping resources exhausted"
        r"|cuIpc\w+ failed|failed to open CUDA IPC handle"
        r"|pidfd_open[^\n]{0,60}not permitted|Could not find (?:NVLink|real path)|unable to open real path",
        says="cannot reach the other GPUs of its node directly",
        fix="As a test NCCL_P2P_DISABLE=1 (then NCCL_CUMEM_ENABLE=0). In VMs and containers: --ipc=host, "
        "the whole of /sys, ACS and IOMMU off.",
        examples=(
            "node3:77:101 [2] transport/p2p.cc:136 NCCL WARN Could not enable P2P between dev 1(=41000) and dev 0(=24000)",
        ),
    ),
    Failure(
        Known("DDP921", "exchange-broken", Weight.CAUSE, "1.13 to 2.13"),
        r"Rank (?P<one>\d+) has (?P<many>\d+) params, while rank (?P<peer>\d+) has inconsistent 0 params",
        says="got zeros in place of what rank {peer} sent: the exchange between them is broken, not the "
        "model",
        likely=True,
        fix="As a test NCCL_P2P_DISABLE=1; if that helps, turn off ACS and IOMMU in the BIOS or the VM. "
        "Else see whether rank {peer} ended, or started with other arguments or another torch.",
        examples=(
            "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 4 params, while rank 1 has inconsistent 0 params.",
        ),
    ),
    Failure(
        Known("DDP923", "nccl-warns-of-cuda", Weight.GENERIC, "NCCL 2.x"),
        r"(?:NCCL WARN |^|\]: )(?:Cuda|HIP) failure:? (?:\d+ )?'(?!out of memory|peer access)(?P<what>[^'\n]{1,80})'",
        says="had a CUDA call fail within NCCL: {what}",
        fix="Look at `dmesg | grep -i xid`, whether the driver is as new as torch's CUDA "
        "(`nvidia-smi`), and for an earlier CUDA error of that rank.",
        examples=("node1:77:77 [0] init.cc:1200 NCCL WARN Cuda failure 'unknown error'",),
    ),
    Failure(
        Known("DDP917", "watchdog-stuck", Weight.SYMPTOM, "2.2 to 2.13; pytorch#119054"),
        r"watchdog got stuck for (?P<seconds>\d+) ?seconds|Heartbeat monitor timed out|watchdog thread got stuck",
        says="had NCCL's watchdog stand still[ for {seconds} s]: a CUDA or NCCL call, or the GIL, held it",
        fix="See first whether other ranks report a time-out or an error. If not: the stack of this "
        "rank (py-spy dump --native) shows the call; TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC gives more time.",
        likely=True,
        examples=(
            "[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank 3] Heartbeat monitor timed out! Process will be terminated after dumping debug info. workMetaList_.size()=2",
            "[F ProcessGroupNCCL.cpp:1185] [PG 0 Rank 3] [PG 0 Rank 3] ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress in monitoring enqueued collectives.",
        ),
        page=Page(
            "NCCL's watchdog thread made no progress.",
            '"Heartbeat monitor timed out", "watchdog got stuck for 600 seconds".',
            "The watchdog asks CUDA about each collective. It stands still when a CUDA or NCCL call "
            "blocks (a broken GPU or link, an abort that waits), or a thread holds the GIL.",
            "Look at the rank's stacks (`py-spy dump --native --pid`), `dmesg | grep -i xid`, and at "
            "the other ranks: theirs may be the cause.",
            "Wrong: only raising TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC.\n"
            "Right: `ddpdoctor run`, which shows where each rank stands.",
            "If a rank failed before, or a collective timed out.",
        ),
        yields_to=("nccl-timeout",),
    ),
    Failure(
        Known("DDP907", "timed-out-elsewhere", Weight.CONSEQUENCE, "2.2 to 2.13"),
        r"Received a (?:dump signal due to a collective timeout|timeout signal) from (?:this local )? ?rank ?(?P<first>\d+)?"
        r"(?:[^\n]{0,200}?[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d+))?"
        r"|Observed flight recorder dump signal from another rank|Some NCCL operations have failed or timed out"
        r"|To avoid data inconsistency, we are taking the entire process down",
        says="ended since a collective had failed or timed out[, first on rank {first}]",
        yields_to=("nccl-aborted",),
        fix="Look for the rank that the others waited for: the one with the lowest number, or without "
        "any line. `ddpdoctor run` names it.",
        examples=(
            "[E ProcessGroupNCCL.cpp:455] Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.",
        ),
    ),
    Failure(
        Known("DDP907", "nccl-progress", Weight.FACT, "2.2 to 2.13"),
        r"(?:\bat (?:NCCL )?work(?: sequence id)?: (?P<at>\d+)[^\n]{0,20}?)?"
        r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), last completed (?:NCCL )?work: (?P<completed>-?\d+)",
        says="had enqueued collective #{enqueued} and completed #{completed}",
        fix="",
        examples=(
            "[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank 2] Timeout detected by watchdog at work: 9, last enqueued NCCL work: 10, last completed NCCL work: 8.",
        ),
    ),
    Failure(
        Known("DDP924", "nccl-warn", Weight.REMARK, "NCCL 2.x"),
        r"NCCL WARN (?P<text>\S[^\n]{0,300})",
        says="warned: {text}",
        fix="See whether the job failed, and what the other ranks print. NCCL_DEBUG=INFO of every rank "
        "shows what led to it.",
        # NCCL goes on after them.
        unless=r"iommu=pt|NUMA (?:auto )?balancing|[Mm]issing \"|may be hanging|(?i:fall(?:ing)? ?back)"
        r"|libibverbs|[Pp]lugin|MSCCL|not (?:found|set|supported)[^\n]{0,20}(?:using|default|ignor)|ignor(?:ed|ing)",
        examples=("node3:77:101 [2] NCCL WARN Some words that only a later NCCL says",),
    ),
)
