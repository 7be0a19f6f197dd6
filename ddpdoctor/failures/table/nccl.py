"""Failures that NCCL and CUDA print."""

from __future__ import annotations

from ddpdoctor.core.finding import Severity
from ddpdoctor.failures.model import Failure, Known, Page, Weight

FAILURES = (
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
        says="has no shared memory left for NCCL: /dev/shm is full or too small",
        fix="`df -h /dev/shm`; in docker start with --shm-size=8g or --ipc=host.",
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
        r"NCCL WARN[^\n]{0,999}connect to (?P<address>\S+) returned [^,]+, "
        r"(?:exceeded error retry|retrying)|NCCL WARN[^\n]{0,999}Call to connect[^\n]{0,999}"
        r"(?:failed|timed out|refused)",
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
        r"ncclSystemError:|unhandled system error",
        examples=(
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:291, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.19.3\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
            "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3",
        ),
        says="had a system call fail within NCCL",
        yields_to=(
            "infiniband-retries",
            "infiniband-port",
            "p2p-unusable",
            "nccl-connect",
            "nccl-warns-of-cuda",
            "interface-missing",
        ),
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
        r"ncclUnhandledCudaError:|unhandled cuda error",
        examples=(
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:291, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.19.3\nncclUnhandledCudaError: Call to CUDA function failed.",
        ),
        says="had a CUDA call fail within NCCL",
        yields_to=(
            "infiniband-retries",
            "infiniband-port",
            "p2p-unusable",
            "nccl-connect",
            "nccl-warns-of-cuda",
            "interface-missing",
        ),
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
        r"CUDA error: invalid device ordinal"
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
        # Others may speak of it, too: a script that estimates its batch, say.
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
