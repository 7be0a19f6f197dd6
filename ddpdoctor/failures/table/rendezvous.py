"""Failures at the start: ports, names, addresses, missing nodes, and the store."""

from __future__ import annotations

from ddpdoctor.failures.entry import Failure, Known, Page, Weight

# -- Ports, names, addresses, missing nodes


_ADDRESS = (
    "Put the name into /etc/hosts on every node, or give an address: --master-addr IP, or "
    "--local-addr IP on the first node."
)

LEAVING = r"has failed to (?:send a keep-alive heartbeat|shutdown the rendezvous)"
"""Warnings of an agent that outlives the node of the store. They are no failure."""

RENDEZVOUS = (
    Failure(
        Known("DDP964", "no-libuv", Weight.CAUSE, "2.4 to 2.13 on Windows; pytorch#139990"),
        r"use_libuv was requested but PyTorch was buil[dt] without",
        says="asked for a store with libuv, which this torch was built without",
        fix="Set USE_LIBUV=0 in the environment of torchrun and of the script; or run it in WSL or on Linux.",
        examples=(
            "RuntimeError: use_libuv was requested but PyTorch was build without libuv support",
        ),
        page=Page(
            "torch's store needs libuv, which this build does not have.",
            'torch\'s exception "use_libuv was requested but PyTorch was built without libuv support".',
            "From 2.4 on, torchrun and init_process_group choose the libuv store; torch for Windows has "
            "only the older one.",
            "Set `USE_LIBUV=0`, or add `?use_libuv=0` to a tcp:// address.",
            "Wrong: `torchrun train.py` on Windows.\n"
            "Right: `set USE_LIBUV=0` before it. If torchrun itself still fails: `python train.py` with "
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.",
            "On Linux.",
        ),
    ),
    Failure(
        Known("DDP002", "port-in-use", Weight.CAUSE, "1.13, 2.6, 2.13; pytorch#73320"),
        r"Error: (?:\[[^\n]{0,999})?The server socket has failed to listen"
        r"(?:[^\n]{0,999}?(?:port: |\]:)(?P<port>\d+))?",
        examples=(
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29779, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        ),
        says="could not listen[ on port {port}]: another process holds the port",
        fix="See who holds it (`ss -tlnp`): another job or a rank that an earlier job left behind. "
        "Take another --master-port, or --standalone for a single node.",
        yields_to=("nccl-timeout",),
        page=Page(
            "The port on which rank 0 will listen is in use.",
            "A rendezvous port (--rdzv-endpoint, --master-port, MASTER_PORT, or 29500) that this "
            "user cannot listen on. Where it can be seen, the process that holds the port, and "
            "whether that is the store of another distributed job.",
            'torchrun fails with "The server socket has failed to listen on any local network '
            "address\". If another job's store listens there, the ranks may even join that job "
            "and wait.",
            "Choose another port, or end the process that holds it if it is left over.",
            "Wrong: two jobs on one machine, both with `--master-port 29500`.\n"
            "Right: `--master-port 29501` for the second job, or `--standalone`, which picks a "
            "free port.",
            "On nodes other than the first. Where torchrun picks a free port itself (one machine, "
            "no port given, torch 2.13 and later).",
        ),
    ),
    Failure(
        Known("DDP002", "port-in-use-logged", Weight.GENERIC, "1.7 to 2.13; Accelerate"),
        r"\[E[^\]\n]{0,60}\] [^\n]{0,60}The server socket has failed to listen"
        r"|not available The server socket has failed|(?:RuntimeError|what\(\)): (?:\[[^\n]{0,200}\] )?(?:bind: )?Address already in use"
        r"|launch distributed communication on port `(?P<port>\d+)`|[Pp]ort (?P<taken>\d+) is already in use(?!\W{1,3}(?:\w+ ){0,2}(?i:try|us|switch|pick|fall|choos)ing\b)",
        says="could not listen[ on port {port}][ on port {taken}]: another process holds the port",
        fix="See who holds it (`ss -tlnp`): another job or a rank that an earlier job left behind. "
        "Take another --master-port, or --standalone for a single node.",
        yields_to=("nccl-timeout",),
        examples=(
            "[E socket.cpp:500] [c10d] The server socket has failed to listen on any local network address.",
            "RuntimeError: Address already in use",
            "ConnectionError: Tried to launch distributed communication on port `29500`, but another process is utilizing it.",
        ),
    ),
    Failure(
        Known("DDP002", "address-in-use", Weight.CAUSE, "any"),
        r"OSError: \[Errno (?:98|48)\]",
        # For other servers of the job it is not the port of its store.
        within=r"(?:torch[/\\]distributed|accelerate|deepspeed|lightning\w*)[/\\]",
        says="could not listen: another process holds the port",
        fix="See who holds it (`ss -tlnp`): another job or a rank that an earlier job left behind. "
        "Take another --master-port, or --standalone for a single node.",
        examples=(
            'Traceback (most recent call last):\n  File "/opt/lib/python3.11/site-packages/torch/distributed/rendezvous.py", line 185, in _create_c10d_store\n    return TCPStore(\nOSError: [Errno 98] Address already in use',
        ),
    ),
    Failure(
        Known("DDP813", "peers-missing", Weight.SYMPTOM, "1.13, 2.6, 2.13"),
        r"Timed out after (?P<seconds>\d+) seconds waiting for clients\. "
        r"(?P<came>\d+)/(?P<all>\d+) clients joined",
        examples=(
            "torch.distributed.DistStoreError: Timed out after 5 seconds waiting for clients. 1/2 clients joined.",
        ),
        says="waited {seconds} s at the start, and only {came} of {all} came",
        yields_to=("store-unreachable", "store-connect", "name-unresolved"),
        fix="Look at the nodes that are absent: was the job started there, with the same "
        "--master-addr, --master-port and --nnodes, and does the name resolve there?",
        page=Page(
            "The job waits in the rendezvous for a node or a rank that never came.",
            "torchrun without any rank, or ranks in `init_process_group` or `new_group`, for "
            "longer than `--hang-after`.",
            "Nothing is printed until the timeout, after 10 to 30 minutes.",
            "Start the command on every node. Check world size, address, port and firewall "
            "(`ddpdoctor check`).",
            "Wrong: `torchrun --nnodes 2 ...` on one node only.\n"
            "Right: the same command on both nodes.",
            "While processes are starting (they use the CPU), for ten times `--hang-after`; while "
            "one of them, or the launcher, computes or lacks a core. If as many ranks came as "
            "expected, it is DDP814.",
        ),
    ),
    Failure(
        Known("DDP813", "rendezvous-timeout", Weight.SYMPTOM, "2.6, 2.13; pytorch#73380"),
        r"RendezvousTimeoutError",
        unless=LEAVING,
        examples=("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",),
        says="gave up the rendezvous: fewer nodes came than the job wants",
        yields_to=(
            "store-unreachable",
            "store-connect",
            "name-unresolved",
            "name-unresolved-in-python",
        ),
        fix="Start the job on every node with the same --rdzv-id and --rdzv-endpoint; the endpoint "
        "must not resolve to 127.* on any of them.",
    ),
    Failure(
        Known("DDP912", "store-unreachable", Weight.SYMPTOM, "1.13, 2.6, 2.13; pytorch#107021"),
        r"client socket has timed out after \d+m?s while trying to connect to "
        r"\(?(?P<address>[^),\s]+)(?:, (?P<port>\d+))?",
        examples=(
            "torch.distributed.DistNetworkError: The client socket has timed out after 4000ms while trying to connect to (127.0.0.1, 29778).",
        ),
        says="got no answer from {address}[ port {port}], where the job's store should be",
        fix="Try that address from this node: refused means that nothing was started there, "
        "silence means a firewall.",
        page=Page(
            "The job's store cannot be reached.",
            "A rank or torchrun that tried to connect to MASTER_ADDR until its timeout.",
            "Nothing listens there, a firewall drops the packets, or the address is not the first "
            "node's.",
            'Run `nc -vz ADDRESS PORT` on the node that reports it. "Refused" means that the '
            "first node's launcher is not running; no answer means that a firewall drops the "
            "packets.",
            "Wrong: MASTER_ADDR set to an address of a management network.\n"
            "Right: an address that all nodes can reach.",
            "If any rank has an independent failure: then this follows from it.",
        ),
    ),
    Failure(
        # A warning about IPv6 alone is harmless. torch retries, and reports it if it gives up.
        Known("DDP913", "name-unresolved", Weight.SYMPTOM, "1.13, 2.13; pytorch#150532"),
        r"network addresses of \((?P<host>[^,)]+)[^)]*\) cannot be retrieved "
        r"\(gai error: (?:-2|-3|8) ",
        examples=(
            "[W1122 03:12:06.473341242 socket.cpp:764] [c10d] The IPv6 network addresses of (nosuchhost.invalid, 29778) cannot be retrieved (gai error: -2 - Name or service not known).",
        ),
        says="could not resolve the name[ {host}] of the first node",
        fix=_ADDRESS,
        page=Page(
            "A node's name does not resolve.",
            "A store address or a `gaierror` with a name that this node's resolver does not know.",
            "torchrun announces the first node's name to the others. In clusters without DNS, "
            "only the node itself knows it.",
            "Use an address instead of a name (`--master-addr`, `--local-addr`), or list the "
            "nodes in /etc/hosts on every node.",
            "Wrong: `--master-addr node0` where node1 does not know that name.\n"
            "Right: `--master-addr 10.0.0.1`",
            "For torch's message that the reverse lookup of an address failed, which is harmless, "
            "and for the names of downloads (DDP936).",
        ),
    ),
    Failure(
        Known("DDP913", "name-unresolved-in-python", Weight.SYMPTOM, "2.13"),
        r"(?m)^(?:[\w.]+\.)?gaierror: \[Errno",
        within=r"[/\\]torch[/\\]distributed[/\\]",
        examples=(
            'Traceback (most recent call last):\n  File "/opt/lib/python3.11/site-packages/torch/distributed/rendezvous.py", line 7, in call\n    call()\nsocket.gaierror: [Errno -2] Name or service not known',
        ),
        says="could not resolve the name of the first node",
        fix=_ADDRESS,
    ),
    Failure(
        Known("DDP003", "loopback-address", Weight.SYMPTOM, "2.13; gloo#223"),
        r"(?:connectFullMesh failed|failed to connect, willRetry=0|Connection refused)"
        r"[^\n]{0,999}(?:remote=|connect )\[127\.\d+\.\d+\.\d+\]"
        r"|(?:SocketTimeout|Connection refused|connect) ?\[127\.0\.1\.1\]",
        examples=(
            "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:211] connect [127.0.1.1]:25642: Connection refused",
        ),
        says="was given a peer at a loopback address, which is itself",
        fix="On the peer's node the host name means 127.*: take that line out of /etc/hosts, or "
        "set GLOO_SOCKET_IFNAME to the network's interface.",
        page=Page(
            "This machine's host name does not resolve to an address that other machines can "
            "reach.",
            "A host name that does not resolve, a full name (`hostname -f`) that does not "
            "resolve, or a name that resolves to an address of another machine. In a job of "
            "several nodes, also a name that resolves to 127.0.0.1 or 127.0.1.1.",
            "torchrun gives the first node's name to all ranks as MASTER_ADDR. If that name does "
            "not resolve, even a job on one machine never starts and repeats a warning. gloo "
            "listens on the name's address: with 127.0.1.1, which Debian and Ubuntu write to "
            "/etc/hosts, no other node can connect.",
            "Add the machine's address and name to /etc/hosts, or choose the interface with "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
            "Wrong, in /etc/hosts of node1: `127.0.1.1 node1`\nRight: `10.0.0.5 node1`",
            "For a loopback address in a job on one machine, and where GLOO_SOCKET_IFNAME names "
            "the interface.",
        ),
        likely=True,
    ),
    Failure(
        Known("DDP004", "docker-address", Weight.SYMPTOM, "nccl#697"),
        r"(?:remote=|connect )\[172\.(?:1[7-9]|2\d|3[01])\.\d+\.1\]",
        examples=(
            "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:211] connect [172.17.0.1]:25642: Connection refused",
        ),
        says="was given a peer at the address of a docker bridge",
        fix="Name the network's interface: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; for NCCL "
        "also ^docker,br-.",
        page=Page(
            "The network interface that gloo or NCCL will use does not work for this job.",
            "A GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME that names a missing interface, one that "
            "is down, or, in a job of several nodes, the loopback or a bridge of containers or "
            "virtual machines (docker0, virbr0). Such a bridge chosen by default. A loopback "
            "interface that is down.",
            'gloo fails with "Unable to find address for: eth1", NCCL with "Bootstrap : no socket '
            'interface found". On a bridge or the loopback, the nodes wait for each other until '
            "the timeout, 10 to 30 minutes later.",
            "Set the variables to the interface that reaches the other nodes. Its name may differ "
            "between nodes.",
            "Wrong: `export NCCL_SOCKET_IFNAME=eth0` where the interface is called ens5.\n"
            "Right: `export GLOO_SOCKET_IFNAME=ens5 NCCL_SOCKET_IFNAME=ens5`",
            "On one machine, for any working interface. For NCCL's variable on a machine without "
            "a GPU.",
        ),
        likely=True,
    ),
    Failure(
        Known("DDP914", "mesh-unreachable", Weight.SYMPTOM, "1.13, 2.13; pytorch#108732"),
        r"[Gg]loo connectFullMesh failed|failed to connect, willRetry=0",
        examples=(
            "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
        ),
        says="could not connect to all of its peers",
        fix="Peers talk over ephemeral ports: open net.ipv4.ip_local_port_range between the nodes, "
        "and set GLOO_SOCKET_IFNAME to the network's interface.",
        page=Page(
            "Ranks cannot connect to each other.",
            "gloo's error that it could not connect every rank with every other one.",
            "The store was reached, but the peers were not: a firewall blocks the ephemeral "
            "ports, or gloo uses the wrong interface.",
            "Open the ports of `net.ipv4.ip_local_port_range` between the nodes in both "
            "directions, and set GLOO_SOCKET_IFNAME on each node.",
            "Wrong: a firewall that allows only port 29500.\n"
            "Right: all ports allowed between the nodes of a job.",
            "If any rank has an independent failure: then this follows from it.",
        ),
    ),
    Failure(
        Known("DDP004", "interface-missing", Weight.CAUSE, "2.13; NCCL bootstrap.cc"),
        r"Unable to find address for: (?P<name>\S+)|no device found matching"
        r"|Bootstrap : no socket interface found",
        examples=(
            "RuntimeError: [enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: nope0",
        ),
        says="has no network interface[ {name}] of the name that it was given",
        fix="`ip -br address` lists the interfaces here: set GLOO_SOCKET_IFNAME and "
        "NCCL_SOCKET_IFNAME to one of them, node by node, or to a common prefix.",
    ),
    Failure(
        Known("DDP918", "network-stall", Weight.SYMPTOM, "2.13; nccl#1524"),
        r"(?:writev|Read error|read|recv)\S* \[[^\]]+\](?::\d+)?: "
        r"(?:Connection timed out|No route to host)",
        examples=(
            "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:48812: Connection timed out",
        ),
        says="silently lost its connection to a peer: packets vanish on the way",
        fix="Test with full packets, `ping -M do -s 8972 PEER` (1472 without jumbo frames): equal "
        "MTU on all nodes and switches; then the link and the card.",
        page=Page(
            "Packets between two ranks are silently dropped.",
            "A connection that was open and then timed out in the kernel, or lost its route.",
            "If MTUs differ, small packets arrive and full-size packets are lost: the job hangs "
            "in its first large collective, for 15 minutes. Otherwise a link went down.",
            "Run `ping -M do -s 8972 PEER` between all nodes, and set the same MTU on all of them.",
            "Wrong: MTU 9000 on the hosts and 1500 on the switch.\n"
            "Right: one MTU on the whole path.",
            "If any rank has an independent failure: then this follows from it.",
        ),
    ),
    Failure(
        Known("DDP919", "store-key-missing", Weight.SYMPTOM, "2.13"),
        r"wait timeout after (?P<time>\d+)ms, keys: (?P<key>\S+)",
        examples=(
            "torch.distributed.DistStoreError: wait timeout after 30000ms, keys: /default_pg/0//cpu//0/1",
        ),
        says="waited {time} ms for what another rank never wrote to the store ({key})",
        fix="Two nodes with the same --node-rank, or a rank that ended or never started: give each "
        "node its own rank, and look at the other ranks' output.",
        page=Page(
            "A rank never wrote a store key that the others wait for.",
            "torch's store timeout while it waits for a key.",
            "At the start, all ranks write their addresses to the store. A rank is missing, or "
            "two nodes have the same `--node-rank` and start the same ranks.",
            "Give each node a different `--node-rank`, then look at the rank that the key names.",
            "Wrong: `--node-rank 0` on both nodes.\n"
            "Right: `--node-rank 0` on the first, `--node-rank 1` on the second.",
            "If any rank has an independent failure: then this follows from it.",
        ),
        likely=True,
    ),
)


# -- The store


_STORE_LOST = r"Broken pipe|Connection reset by peer|Connection was likely closed"
"""Messages about a store that had responded before."""

_RANK_0 = (
    "Look at the rank that it names first: it came late, failed, or is in another collective. If it "
    "is only slow (a download, a tokenizer), let all ranks wait for it, or raise the timeout."
)

_ENDED_FIRST = (
    "The cause is on the rank or node that ended first, mostly the one with rank 0: look at its "
    "output. `ddpdoctor run` sees all ranks."
)

STORES = (
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
        unless=rf"{LEAVING}|{_STORE_LOST}",
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
        r"|waitForInput: socket [^\n]{0,400}timed out after \d+|Wait timeout$|FileStore[^\n]{0,200}[Tt]ime",
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
        # The ranks whose statuses are in the log were on another node.
        yields_to=("exit-status-1",),
        examples=("torch.distributed.elastic.rendezvous.api.RendezvousClosedError",),
    ),
)
