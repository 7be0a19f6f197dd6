"""Failures of NCCL: time-outs, its own errors, the network and the links."""

from __future__ import annotations

from ddpdoctor.failures.model import Failure, Known, Page, Weight

_WARN = (
    "A line with NCCL WARN names the call that failed; without any, run again with NCCL_DEBUG=WARN "
    "(of every rank)."
)
_FIRST = (
    "Its cause is on the rank that ended or hung first: look at all ranks' output for the earliest "
    "error, and at the nodes."
)

FAILURES = (
    Failure(
        Known("DDP203", "invalid-usage", Weight.GENERIC, "NCCL 2.x"),
        r"ncclInvalidUsage|NCCL error[^\n]{0,200}invalid usage",
        says="used NCCL in a way that it refuses: mostly two ranks on one GPU",
        yields_to=(
            "infiniband-retries",
            "infiniband-port",
            "p2p-unusable",
            "nccl-connect",
            "nccl-warns-of-cuda",
            "interface-missing",
        ),
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
        r"ncclInternalError|NCCL error[^\n]{0,200}internal error|ncclInvalidArgument|NCCL error[^\n]{0,200}invalid argument",
        says="had NCCL fail an internal check",
        yields_to=(
            "infiniband-retries",
            "infiniband-port",
            "p2p-unusable",
            "nccl-connect",
            "nccl-warns-of-cuda",
            "interface-missing",
        ),
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
        Known("DDP907", "nccl-peer-gone", Weight.CONSEQUENCE, "NCCL socket.cc"),
        r"Call to (?:recv|send|read|write|recvmsg)\b[^\n]{0,120}failed|Connection closed by remote peer|Net : Connection closed"
        r"|socket(?:Progress|PollConnect|TryAccept)[^\n]{0,99}(?:closed|returned)|Failed to connect to peer",
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
        r"|cuIpc\w+ failed|failed to open CUDA IPC handle|Cuda failure '?invalid (?:resource handle|argument)"
        r"|pidfd_open[^\n]{0,60}not permitted|Could not find (?:NVLink|real path)|unable to open real path",
        says="cannot reach the other GPUs of its node directly",
        fix="As a test NCCL_P2P_DISABLE=1 (then NCCL_CUMEM_ENABLE=0). In VMs and containers: --ipc=host, "
        "the whole of /sys, ACS and IOMMU off.",
        examples=(
            "node3:77:101 [2] transport/p2p.cc:136 NCCL WARN Could not enable P2P between dev 1(=41000) and dev 0(=24000)",
        ),
    ),
    Failure(
        Known("DDP923", "nccl-warns-of-cuda", Weight.GENERIC, "NCCL 2.x"),
        r"NCCL WARN Cuda failure (?:\d+ )?'(?!out of memory)(?P<what>[^'\n]{1,80})'",
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
        r"Received a (?:dump signal due to a collective timeout|timeout signal) from (?:this local )?rank ?(?P<first>\d+)?"
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
        r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), last completed (?:NCCL )?work: (?P<completed>-?\d+)",
        says="had enqueued collective #{enqueued} and completed #{completed}",
        fix="",
        examples=(
            "[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank 2] Timeout at NCCL work: 9, last enqueued NCCL work: 10, last completed NCCL work: 8.",
        ),
    ),
    Failure(
        Known("DDP924", "nccl-warn", Weight.FACT, "NCCL 2.x"),
        r"NCCL WARN (?P<text>\S[^\n]{0,300})",
        says="warned: {text}",
        fix="",
        examples=("node3:77:101 [2] NCCL WARN Some words that only a later NCCL says",),
    ),
)
