"""Failures of a start: ports, names, addresses, nodes that do not come."""

from __future__ import annotations

from ddpdoctor.failures.model import Failure, Page, Weight

_IN_ALL_ELSE = "When any rank failed by itself: then this is its consequence."

FAILURES = (
    Failure(
        code="DDP002",
        name="port-in-use",
        weight=Weight.CAUSE,
        anchors=("server socket has failed to listen",),
        pattern=r"Error: (?:\[[^\n]*)?The server socket has failed to listen"
        r"(?:[^\n]*?(?:port: |\]:)(?P<port>\d+))?",
        says="could not listen[ on port {port}]: another process holds the port",
        fix="See who holds it (`ss -tlnp`): another job or a rank that an earlier job left behind. "
        "Take another --master-port, or --standalone for a single node.",
        page=Page(
            "The port of the rendezvous is taken.",
            "An exception of torch's store: it failed to listen, with EADDRINUSE. A warning of "
            "the same words that no exception follows is left alone: torchrun tries again.",
            "The job cannot start. Another job on this machine holds the port, an orphan of an "
            "earlier one, or a process of this job: two that both think they are rank 0, say.",
            "`ss -tlnp | grep PORT` names the holder. End it, or start with another "
            "`--master-port`; `--standalone` takes a free one. Give each rank its own number.",
            "Wrong: two jobs with `--master-port 29500` on one machine. "
            "Right: `torchrun --standalone ...` for each of them.",
            "For a port that a program of your own wanted (a dashboard): that is DDP901.",
        ),
        torch="1.13, 2.6, 2.13; pytorch#73320",
    ),
    Failure(
        code="DDP813",
        name="peers-missing",
        weight=Weight.SYMPTOM,
        anchors=("clients joined",),
        pattern=r"Timed out after (?P<seconds>\d+) seconds waiting for clients\. "
        r"(?P<came>\d+)/(?P<all>\d+) clients joined",
        says="waited {seconds} s at the start, and only {came} of {all} came",
        fix="Look at the nodes that are absent: was the job started there, with the same "
        "--master-addr, --master-port and --nnodes, and does the name resolve there?",
        page=Page(
            "Not all nodes came to the rendezvous.",
            "The store of rank 0, or torchrun's rendezvous, that gave up waiting for others.",
            "The whole job waits, 10 to 30 minutes, and then fails on the node that was there.",
            "On each absent node: was the job started, does the endpoint's name resolve to the "
            "first node (and not to 127.*), does its port answer? Endpoint and `--rdzv-id` must be "
            "the same everywhere.",
            "Wrong: `--rdzv-endpoint localhost:29400` on every node. "
            "Right: the first node's name on every node.",
            _IN_ALL_ELSE,
        ),
        torch="1.13, 2.6, 2.13",
    ),
    Failure(
        code="DDP813",
        name="rendezvous-timeout",
        weight=Weight.SYMPTOM,
        anchors=("RendezvousTimeoutError",),
        pattern=r"RendezvousTimeoutError",
        says="gave up the rendezvous: fewer nodes came than the job wants",
        fix="Start the job on every node with the same --rdzv-id and --rdzv-endpoint; the endpoint "
        "must not resolve to 127.* on any of them.",
        torch="2.6, 2.13; pytorch#73380",
    ),
    Failure(
        code="DDP912",
        name="store-unreachable",
        weight=Weight.SYMPTOM,
        anchors=("while trying to connect to",),
        pattern=r"client socket has timed out after \d+m?s while trying to connect to "
        r"\(?(?P<address>[^),\s]+)(?:, (?P<port>\d+))?",
        says="got no answer from {address}[ port {port}], where the job's store should be",
        fix="Try that address from this node: refused means that nothing was started there, "
        "silence means a firewall.",
        page=Page(
            "The job's store cannot be reached.",
            "A rank or torchrun that tried to connect to MASTER_ADDR until its timeout.",
            "Nothing listens there, a firewall swallows the packets, or the address is not the "
            "first node's.",
            '`nc -vz ADDRESS PORT` on the node that complains: "refused" says that the first '
            "node's launcher does not run, silence that a firewall is between.",
            "Wrong: MASTER_ADDR set to the address of a management network. "
            "Right: an address that all nodes reach.",
            _IN_ALL_ELSE,
        ),
        torch="1.13, 2.6, 2.13; pytorch#107021",
    ),
    Failure(
        code="DDP913",
        name="name-unresolved",
        # A warning about IPv6 alone is harmless; torch tries on, and says later that it gave up.
        weight=Weight.SYMPTOM,
        anchors=("cannot be retrieved",),
        pattern=r"network addresses of \((?P<host>[^,)]+)[^)]*\) cannot be retrieved "
        r"\(gai error: (?:-2|-3|8) ",
        says="could not resolve the name[ {host}] of the first node",
        fix="Put the name into /etc/hosts on every node, or give an address: --master-addr IP, or "
        "--local-addr IP on the first node.",
        page=Page(
            "A node's name does not resolve.",
            "The address of the store, or a `gaierror`, that this node's resolver does not know.",
            "torchrun publishes the first node's own name to the others; in clusters without DNS "
            "only the node itself knows it.",
            "Give an address instead of a name (`--master-addr`, `--local-addr`), or list the "
            "nodes in /etc/hosts everywhere.",
            "Wrong: `--master-addr node0` where node1 has no such name. "
            "Right: `--master-addr 10.0.0.1`.",
            "For torch's remark that an address has no name (DDP951), which is harmless; for the "
            "names of a download (DDP936).",
        ),
        torch="1.13, 2.13; pytorch#150532",
    ),
    Failure(
        code="DDP913",
        name="name-unresolved-in-python",
        weight=Weight.SYMPTOM,
        anchors=("gaierror",),
        pattern=r"(?m)^(?:[\w.]+\.)?gaierror: \[Errno",
        within=r"[/\\]torch[/\\]distributed[/\\]",
        says="could not resolve the name of the first node",
        fix="Put the name into /etc/hosts on every node, or give an address: --master-addr IP, or "
        "--local-addr IP on the first node.",
        torch="2.13",
    ),
    Failure(
        code="DDP003",
        name="loopback-address",
        weight=Weight.SYMPTOM,
        anchors=("127.",),
        pattern=r"(?:connectFullMesh failed|failed to connect, willRetry=0|Connection refused)"
        r"[^\n]*(?:remote=|connect )\[127\.\d+\.\d+\.\d+\]"
        r"|(?:SocketTimeout|Connection refused|connect) ?\[127\.0\.1\.1\]",
        says="was given a peer at a loopback address, which is itself",
        fix="On the peer's node the host name means 127.*: take that line out of /etc/hosts, or "
        "set GLOO_SOCKET_IFNAME to the network's interface.",
        page=Page(
            "A rank published a loopback address to its peers.",
            "Gloo's connection to a peer at 127.*, which failed.",
            "gloo publishes the address of the host name; where /etc/hosts says 127.0.1.1 (Debian "
            "and Ubuntu do), other nodes connect to themselves.",
            "Remove that line, or `export GLOO_SOCKET_IFNAME=eth0` on every node.",
            "Wrong: `127.0.1.1 node1` in /etc/hosts of node1. Right: `10.0.0.2 node1`.",
            _IN_ALL_ELSE,
        ),
        likely=True,
        torch="2.13; gloo#223",
    ),
    Failure(
        code="DDP004",
        name="docker-address",
        weight=Weight.SYMPTOM,
        anchors=("[172.",),
        pattern=r"(?:remote=|connect )\[172\.(?:1[7-9]|2\d|3[01])\.\d+\.1\]",
        says="was given a peer at the address of a docker bridge",
        fix="Name the network's interface: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; for NCCL "
        "also ^docker,br-.",
        page=Page(
            "A network interface does not work for this job.",
            "A connection to a peer at 172.17.0.1 or the like (a docker bridge), which failed; "
            "and a *_SOCKET_IFNAME that names no interface of this node.",
            "Every machine with docker has that address, so the others reach their own bridge. "
            "Names differ between nodes (eth0 here, ens5 there), and one setting was given to all.",
            "`ip -br address` lists them; set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to that of "
            "the network between the nodes. NCCL takes prefixes (`en,eth`, `^docker,br-`), gloo "
            "exact names.",
            "Wrong: `export GLOO_SOCKET_IFNAME=eth0` where it is ens5. "
            "Right: the name that this node has.",
            "For the address of a bridge: when any rank failed by itself.",
        ),
        likely=True,
        torch="nccl#697",
    ),
    Failure(
        code="DDP914",
        name="mesh-unreachable",
        weight=Weight.SYMPTOM,
        anchors=("connectFullMesh failed", "willRetry=0"),
        pattern=r"[Gg]loo connectFullMesh failed|failed to connect, willRetry=0",
        says="could not connect to all of its peers",
        fix="Peers talk over ephemeral ports: open net.ipv4.ip_local_port_range between the nodes, "
        "and set GLOO_SOCKET_IFNAME to the network's interface.",
        page=Page(
            "Ranks cannot connect to each other.",
            "Gloo that could not connect every rank with every other one.",
            "The store was reached, the peers were not: a firewall between ephemeral ports, or the "
            "wrong interface.",
            "Open the range of `net.ipv4.ip_local_port_range` between the nodes in both "
            "directions; set GLOO_SOCKET_IFNAME on each.",
            "Wrong: a firewall that lets port 29500 alone through. "
            "Right: all ports between the nodes of a job.",
            _IN_ALL_ELSE,
        ),
        torch="1.13, 2.13; pytorch#108732",
    ),
    Failure(
        code="DDP004",
        name="interface-missing",
        weight=Weight.CAUSE,
        anchors=("Unable to find address for", "no device found", "no socket interface found"),
        pattern=r"Unable to find address for: (?P<name>\S+)|no device found matching"
        r"|Bootstrap : no socket interface found",
        says="has no network interface[ {name}] of the name that it was given",
        fix="`ip -br address` lists the interfaces here: set GLOO_SOCKET_IFNAME and "
        "NCCL_SOCKET_IFNAME to one of them, node by node, or to a common prefix.",
        torch="2.13; NCCL bootstrap.cc",
    ),
    Failure(
        code="DDP918",
        name="network-stall",
        weight=Weight.SYMPTOM,
        anchors=("Connection timed out", "No route to host"),
        pattern=r"(?:writev|Read error|read|recv)\S* \[[^\]]+\](?::\d+)?: "
        r"(?:Connection timed out|No route to host)",
        says="silently lost its connection to a peer: packets vanish on the way",
        fix="Test with full packets, `ping -M do -s 8972 PEER` (1472 without jumbo frames): equal "
        "MTU on all nodes and switches; then the link and the card.",
        page=Page(
            "Packets between two ranks are lost silently.",
            "A connection that was open and then timed out in the kernel, or lost its route.",
            "Small packets pass and full ones vanish where MTUs differ: the job hangs in its first "
            "large collective, for 15 minutes. Else a link went down.",
            "`ping -M do -s 8972 PEER` between all nodes; give all the same MTU.",
            "Wrong: 9000 on the hosts and 1500 on the switch. Right: one MTU on the whole way.",
            _IN_ALL_ELSE,
        ),
        torch="2.13; nccl#1524",
    ),
    Failure(
        code="DDP919",
        name="store-key-missing",
        weight=Weight.SYMPTOM,
        anchors=("wait timeout after",),
        pattern=r"wait timeout after (?P<time>\d+)ms, keys: (?P<key>\S+)",
        says="waited {time} ms for what another rank never wrote to the store ({key})",
        fix="Two nodes with the same --node-rank, or a rank that ended or never started: give each "
        "node a rank of its own, and look at the other ranks' output.",
        page=Page(
            "A rank never wrote what the others wait for.",
            "torch's store that waited in vain for a key.",
            "At the start all ranks put their addresses there. One is absent, or two nodes have "
            "the same `--node-rank` and play the same ranks.",
            "Its own `--node-rank` for each node; then look at the rank that the key names.",
            "Wrong: `--node-rank 0` on both nodes. Right: 0 on the first, 1 on the second.",
            _IN_ALL_ELSE,
        ),
        likely=True,
        torch="2.13",
    ),
)
