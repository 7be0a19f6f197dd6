"""Whether every node reaches every other, at the addresses of gloo and NCCL, and how fast."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ddpdoctor.core import relations
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import count, listed
from ddpdoctor.preflight.check import (
    Outcome,
    could_not_run,
    failure,
    finding,
    judged,
    skipped,
    typed,
    warning,
)
from ddpdoctor.preflight.command_lines import check_line, let_through
from ddpdoctor.preflight.machine import own_address
from ddpdoctor.preflight.machine.network import (
    EXPORT,
    UP,
    dialled_at,
    gloo_dials,
    hosts_line,
    is_loopback,
)
from ddpdoctor.preflight.nodes.ends import Fault, Network, faults, networks
from ddpdoctor.preflight.nodes.reductions import (
    Blame,
    Way,
    across_nodes,
    all_ways,
    bad_ways,
    blame,
    interface,
    short_of_files,
    with_address,
)
from ddpdoctor.preflight.protocol.meet import Meeting
from ddpdoctor.preflight.protocol.messages import Speeds
from ddpdoctor.preflight.protocol.pairs import MIN_BANDWIDTH, MIN_TO_COMPARE, STALLS, Dialled

# -- connections between all nodes, and packets of full size


MAX_WAYS = 6

UNUSED = "gloo uses another address, or dials from the higher one; NCCL would need this one"

SILENT_FIX = (
    "The port is open, so look for what is in between (a proxy, a load balancer), and whether "
    "the machine is overloaded. The way to it, from the dialling node:"
)

ROUTE_FIX = "Name an interface in a network that the nodes share, or add a route. On {}:"
LINK_FIX = "Check the interface of {}: is it up, with a carrier and this address? There:"

_DIAL_WORDS = {
    "dropped": "the packets are silently dropped",
    "refused": "the port is refused, though it is open there",
    "unreachable": "it is rejected on the way",
    "no host": "no machine answers at that address",
    "no route": "the machine has no route to it",
    "silent": "the connection opens, and then nothing comes",
    "other service": "something else answers there",
}

LOSS_FIX = (
    "Check the cable, the switch port and the interface of {}: count errors and drops. There:"
)

TRANSLATED = "an address is translated on the way (NAT, a tunnel, a container's network)"

TRANSLATED_FIX = (
    "gloo and NCCL announce a machine's own addresses and dial these: no port that is opened, or "
    "forwarded, helps. Give the nodes a network in which each is reached at an address that it has "
    "(a container: --network host; a VPN, with GLOO_SOCKET_IFNAME). What {} has:"
)


@across_nodes(
    "links",
    "DDP053",
    yields_to={"DDP018": relations.same_subject, "DDP054": relations.loses_packets},
)
def links(meeting: Meeting) -> Outcome:
    """A node cannot open a connection to another node, in one or both directions.

    What it finds
        Every node connects to every other node, in both directions, on ports chosen by the kernel,
        as gloo and NCCL do. A failed connection is tried once more. A node that no other node can
        reach, or that can reach no other node, is named as a node; a single failed connection is
        named with its direction. Packets that are lost, whatever their size, and a node behind a
        translation of addresses (NAT, a container's network) are named as such.

    Why it is bad
        gloo and NCCL do not use the rendezvous port. Every rank listens on a port chosen by the
        kernel (32768 and up), and of two nodes the one with the higher address connects. If a
        firewall closes those ports, the listening side waits without a limit: 40 minutes of silence
        were measured.

    How to fix it
        Allow all TCP ports between the nodes of a job, in the firewall of the node that is named or
        in the network's security group.

    Example
        Wrong: a security group that opens only port 29500.
        Right: a security group whose members can reach each other on every port.

    When it stays silent
        If every ordered pair of nodes exchanged 64 KiB. Packets that are too large for the path are
        DDP054. Where two machines have one address, that is named, and no firewall is blamed. A
        node that may open no more files is named as such, and its connections are not judged. It is
        a warning only where no node has a GPU and gloo does not connect in that direction.
    """
    failed = bad_ways(meeting, "route")
    failed = {way: result for way, result in failed.items() if result.outcome not in STALLS}
    ways = all_ways(meeting)
    if not ways:
        return skipped("no other node stayed")
    good = sum(way not in failed for way in ways)
    detail = f"{good} of {len(ways)} directions between nodes are open"
    short = short_of_files(meeting)
    untested = {way for way in failed if short & {*way}}
    closed = {way: result for way, result in failed.items() if way not in untested}
    tested = [way for way in ways if way not in untested]
    without = [meeting.host(each.node) for each in blame(closed, tested) if each.guilty]
    findings = [_out_of_files(meeting, node, untested) for node in sorted(short)]
    return judged(
        detail,
        [*findings, *_link_findings(meeting, closed, tested)],
        exclude=[*(meeting.host(node) for node in sorted(short)), *without],
    )


def _out_of_files(meeting: Meeting, node: int, untested: Collection[Way]) -> Finding:
    mine = sum(node in way for way in untested)
    return failure(
        f"{meeting.name(node)} may open no more files, so {count(mine, 'connection')} to and "
        "from it could not be tested",
        evidence=("it dialled, and the kernel said: Too many open files",),
        fix=f"Raise the limit in the shell that starts the check and the job, on "
        f"{meeting.host(node)}:",
        paste="ulimit -n 65536",
        about=f"files of {node}",
        nodes=(meeting.host(node),),
    )


def _link_findings(
    meeting: Meeting, failed: dict[Way, Dialled], ways: list[Way]
) -> Iterator[Finding]:
    doubled = {way for way in failed if _twins(meeting, way[1])}
    yield from _doubled(meeting, {target for _, target in doubled})
    failed = {way: result for way, result in failed.items() if way not in doubled}
    blames = blame(failed, [way for way in ways if way not in doubled])
    single = [each for each in blames if each.kind in ("way", "between")]
    more = single[MAX_WAYS:]
    for each in blames:
        if each in more:
            continue
        report = _lossy_link if failed[each.ways[0]].outcome == "lossy" else _closed_link
        yield report(meeting, each, failed, ways)
    if more:
        yield failure(
            f"{len(more)} more directions between nodes are closed",
            evidence=tuple(
                f"{meeting.name(each.ways[0][0])} to {meeting.name(each.node)}"
                for each in more[:16]
            ),
            fix="Let the nodes of the job reach each other on all TCP ports. For the first of "
            f"these, on {meeting.host(more[0].node)}:",
            paste=_paste(meeting, more[0]),
            about="more ways",
            nodes=tuple(dict.fromkeys(meeting.host(each.node) for each in more)),
        )


def _closed_link(
    meeting: Meeting, each: Blame, failed: dict[Way, Dialled], ways: list[Way]
) -> Finding:
    outcome = failed[each.ways[0]].outcome
    node, other = meeting.name(each.node), meeting.name(each.ways[0][0])
    message = {
        "both": f"{node} reaches no other node, and none reaches it",
        "into": f"no other node can open a connection to {node}",
        "out of": f"{node} can open a connection to no other node",
        "between": f"{other} and {node} cannot open connections to each other",
        "way": f"{other} cannot open a connection to {node}",
    }[each.kind]
    closed = outcome in ("dropped", "refused", "unreachable")
    used = any(_is_used(meeting, way, failed[way].address) for way in each.ways)
    evidence = tuple(_evidence(meeting, each, failed, ways))
    fix, paste = SILENT_FIX, typed("ip route get {}", failed[each.ways[0]].address)
    if outcome == "no route":
        fix = ROUTE_FIX.format(meeting.host(each.ways[0][0]))
    elif outcome == "no host":
        fix, paste = LINK_FIX.format(each.hosts(meeting)), "ip -brief link; ip -brief address"
    hidden = [end for end in {j: j for _, j in each.ways} if meeting.nodes[end].outside]
    if hidden:
        evidence = (*(_translation(meeting, end) for end in hidden[:4]), *evidence)
        fix, paste = TRANSLATED_FIX.format(meeting.host(hidden[0])), "ip -brief address"
    elif closed:
        fix, paste = _fix(meeting, each), _paste(meeting, each)
        elsewhere = {(i, j): address for i, j, address in meeting.report.open}
        other = elsewhere.get(each.ways[0], "")
        name = interface(meeting, each.ways[0][1], other)[0] if other else ""
        if name not in ("", interface(meeting, each.ways[0][1])[0]) and (
            elsewhere.keys() >= {*each.ways}
        ):
            evidence = (*evidence, f"it is open at {other} ({name}), which gloo does not take")
            fix = f"{fix.partition(' On ')[0]} Or let gloo and NCCL take {name}, which is open, in "
            fix += "the job's environment on every node (its name may differ):"
            paste = typed(EXPORT, name)
    return finding(
        Severity.ERROR if used else Severity.WARNING,
        f"{message}: {TRANSLATED if hidden else _DIAL_WORDS.get(outcome, 'it fails')}",
        evidence=evidence if used else (*evidence, UNUSED),
        fix=fix,
        paste=paste,
        about=each.about,
        nodes=each.nodes(meeting),
    )


def _translation(meeting: Meeting, index: int) -> str:
    node = meeting.nodes[index]
    own = [address for _, _, has in node.facts.interfaces for address in has]
    own = [each for each in own if not each.startswith("fe80:")]
    return f"{node.facts.host} has {', '.join(own[:4])}, and is seen at {node.outside}"


def _twins(meeting: Meeting, index: int) -> list[int]:
    node = meeting.nodes[index]
    # Containers of two machines may have the same address, which is not the fault.
    return [] if node.outside else with_address(meeting, index, node.address)


def _doubled(meeting: Meeting, nodes: Collection[int]) -> Iterator[Finding]:
    """Report addresses that several machines have: what is sent to one arrives at another."""
    first = {meeting.nodes[node].address: node for node in sorted(nodes, reverse=True)}
    for address, node in sorted(first.items()):
        holders = sorted({node, *_twins(meeting, node)})
        yield failure(
            f"{' and '.join(map(meeting.name, holders))} have the same address, {address}: what is "
            "sent to one arrives at the other",
            fix=own_address.SHARED_ADDRESS_FIX,
            paste=typed(own_address.SHARED_ADDRESS_PASTE, interface(meeting, node)[0] or "eth0"),
            about=f"address {address}",
            nodes=tuple(map(meeting.host, holders)),
            subjects=frozenset({f"address {address}"}),
        )


def _lossy_link(
    meeting: Meeting, each: Blame, failed: dict[Way, Dialled], ways: list[Way]
) -> Finding:
    return failure(
        f"packets are lost {each.words(meeting)}: 64 KiB do not arrive in time",
        evidence=(
            *_evidence(meeting, each, failed, ways),
            "a connection opens, and a part of it arrives",
        ),
        fix=LOSS_FIX.format(each.hosts(meeting)),
        paste=typed("ip -s link show dev {}", interface(meeting, each.node)[0] or "eth0"),
        about=each.about,
        nodes=each.nodes(meeting),
        subjects=each.losses,
    )


def _is_used(meeting: Meeting, way: Way, address: str) -> bool:
    """Return whether a job needs a connection to an address. gloo needs one of two directions."""
    source, target = (meeting.nodes[index].facts for index in way)
    gloo = way in bad_ways(meeting, "gloo") or address == target.gloo_address
    nccl = way in bad_ways(meeting, "nccl") or address == target.nccl_address
    return (gloo and gloo_dials(source, target)) or nccl


def _evidence(
    meeting: Meeting, each: Blame, failed: dict[Way, Dialled], ways: list[Way]
) -> Iterator[str]:
    source, target = each.ways[0]
    result = failed[source, target]
    port = meeting.nodes[target].facts.pair_port
    error = f" ({result.error})" if result.error else ""
    yield (
        f"{meeting.host(source)} dialled {result.address}, port {port}, twice: "
        f"{result.outcome} after {result.seconds:.1f} s{error}"
    )
    back = (target, source)
    if each.kind == "way" and back in ways:
        state = "closed as well" if back in failed else "open"
        yield f"the opposite direction, from {meeting.host(target)}, is {state}"
    into = [way[0] for way in ways if way[1] == target and way not in failed]
    if each.kind == "way" and into:
        yield f"{count(len(into), 'other node')} can: {meeting.hosts(into)}"


def _fix(meeting: Meeting, each: Blame) -> str:
    hosts, host = each.hosts(meeting), meeting.host(each.node)
    if each.kind == "out of":
        return (
            f"Allow outgoing connections on {host}: its own firewall, or its security group, stops "
            "those to the other nodes' ports 32768 and up."
        )
    if each.kind == "both":
        return f"Check the network of {host}: its interface, its firewall, its security group."
    if each.kind == "between":
        return (
            f"Open {hosts} for each other on all TCP ports, in their firewalls or their security "
            f"group. On {host}, and the same on the other:"
        )
    outgoing = ""
    if each.kind == "way":
        # A block at the sending end and one at the receiving end look the same.
        outgoing = f", or allow it in the outgoing rules of {meeting.host(each.ways[0][0])}"
    return (
        f"Open {host} for the other nodes on all TCP ports, in its firewall or its security "
        f"group{outgoing}. On {host}:"
    )


def _paste(meeting: Meeting, each: Blame) -> str:
    out = each.kind == "out of"
    peers = sorted({j if out or i == each.node else i for i, j in each.ways})
    addresses = [meeting.nodes[peer].address for peer in peers[:16]]
    return let_through("OUTPUT", "-d", addresses) if out else let_through("INPUT", "-s", addresses)


def _sizes_differ(cause: Finding, effect: Finding) -> bool:
    """Return whether packets are lost at a node whose packets have another size."""
    return cause.about == "mtu" and bool(set(cause.nodes) & set(effect.nodes)) and effect != cause


@across_nodes("packet-size", "DDP054", yields_to={"DDP054": _sizes_differ})
def packet_size(meeting: Meeting) -> Outcome:
    """Full-size packets are lost between nodes, or the nodes' packet sizes (MTU) differ.

    What it finds
        A path between nodes on which a connection opens and small messages arrive, but 64 KiB do
        not (error). Smaller packets are tried to find the size that passes. Nodes whose interfaces
        have different MTUs (warning).

    Why it is bad
        The job connects, and hangs in the first all_reduce that is larger than a packet. A tunnel
        (VPN, overlay network) or a switch without jumbo frames accepts less than the interface, and
        the ICMP message about it is filtered. gloo gave up after 942 s in a test.

    How to fix it
        Set the MTU that passes on every node: `sudo ip link set dev eth0 mtu 1400`, also in the
        network's configuration, so that it survives a reboot. Or allow ICMP "fragmentation needed".

    Example
        Wrong: MTU 1500 on hosts whose traffic goes through a tunnel of 1400.
        Right: MTU 1400 on those hosts.

    When it stays silent
        If 64 KiB arrived on every open path and the MTUs are equal.
    """
    lossy: dict[Way, Dialled] = {}
    closed: set[Way] = set()
    for way, result in bad_ways(meeting, "route").items():
        if result.outcome == "forth":
            lossy[way] = result
        elif result.outcome == "back":
            lossy[way[1], way[0]] = result
        else:
            closed.add(way)
    ways = [way for way in all_ways(meeting) if way not in closed]
    passed, total = sum(way not in lossy for way in ways), len({*ways, *lossy})
    if not total:
        return skipped("no connection between nodes is open")
    blames = blame(lossy, ways)
    return judged(
        f"64 KiB arrived in {passed} of {total} directions",
        [*(_loss(meeting, each, lossy) for each in blames), *_differing(meeting)],
        exclude=[meeting.host(each.node) for each in blames if each.guilty],
    )


def _loss(meeting: Meeting, each: Blame, lossy: dict[Way, Dialled]) -> Finding:
    passes, mtu = lossy[each.ways[0]].passes, interface(meeting, each.ways[0][0])[1]
    size = f"packets of {mtu} bytes" if mtu else "packets of full size"
    between, hosts = each.words(meeting), each.hosts(meeting)
    name = interface(meeting, each.node)[0] or "eth0"
    return failure(
        f"{size} are lost {between}" if passes else f"64 KiB do not arrive {between}",
        evidence=(
            "a connection opens there, and small messages pass",
            f"packets of {passes} bytes pass" if passes else "smaller packets fail as well",
        ),
        fix=f"Give the interface of {hosts} a smaller MTU, or let ICMP through on the way. On "
        f"{hosts}, and on every other node to be equal:"
        if passes
        else f"Check the network of {hosts}: its cable, its driver, a rule by packet size. "
        "Its counters of errors:",
        paste=typed("sudo ip link set dev {} mtu {}", name, passes)
        if passes
        else typed("ip -s link show dev {}", name),
        about=each.about,
        nodes=each.nodes(meeting),
        subjects=each.losses,
    )


def _differing(meeting: Meeting) -> Iterator[Finding]:
    by_mtu: dict[int, list[int]] = {}
    for index in range(len(meeting.nodes)):
        mtu = interface(meeting, index)[1]
        if mtu:
            by_mtu.setdefault(mtu, []).append(index)
    if len(by_mtu) < 2:
        return
    odd = min(by_mtu, key=lambda mtu: (len(by_mtu[mtu]), mtu))
    usual = max((mtu for mtu in by_mtu if mtu != odd), key=lambda mtu: len(by_mtu[mtu]))
    name = interface(meeting, by_mtu[odd][0])[0]
    yield warning(
        f"the largest packet (MTU) is {odd} bytes on {meeting.hosts(by_mtu[odd])} and {usual} "
        "bytes on others",
        evidence=tuple(
            f"MTU {mtu}: {meeting.hosts(indices)}" for mtu, indices in sorted(by_mtu.items())
        ),
        fix="Give the interfaces of all nodes one MTU.",
        paste=typed("sudo ip link set dev {} mtu {}", name, min(by_mtu)),
        about="mtu",
        nodes=tuple(meeting.host(index) for mtu in by_mtu if mtu != usual for index in by_mtu[mtu]),
    )


# -- the addresses that gloo and NCCL give to the other nodes


LUCK = (
    "it works while no other node's gloo has a higher address, since the higher one dials: with a "
    "second node like this it hangs"
)


@across_nodes(
    "gloo-addresses",
    "DDP055",
    dict.fromkeys(("DDP018", "DDP050", "DDP053"), relations.same_subject),
)
def gloo_addresses(meeting: Meeting) -> Outcome:
    """The address that torchrun, gloo or NCCL gives to the other nodes does not lead to this node.

    What it finds
        The address that torch's gloo will listen on, for every node: that of `GLOO_SOCKET_IFNAME`,
        or else what the node's host name resolves to. Reported if it is a loopback address while
        there are other nodes (Debian's `127.0.1.1` line), the same on several nodes (a container
        bridge), closed for the others while another address of the node is open, or missing. The
        end at fault is named: an interface that is down, without carrier or address, or in another
        network. IPv6 on some nodes and IPv4 on others. Where all nodes have GPUs, also the
        addresses of NCCL's interfaces. With `--rdzv-backend c10d`, the name that torchrun gives to
        all ranks as MASTER_ADDR, if a node does not find the first one by it.

    Why it is bad
        The other nodes connect to themselves or to no machine at all, time out after minutes, and
        name a peer that did nothing wrong.

    How to fix it
        On that node, name the interface that the nodes share (its name may differ between nodes):
        `export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0`. Or correct the host name's line in
        /etc/hosts.

    Example
        Wrong: `127.0.1.1 node1` in /etc/hosts of node1.
        Right: `10.0.0.12 node1`

    When it stays silent
        If the others reach every node at these addresses. Of two nodes, the one with the higher
        address connects, so a loopback address on the highest one is only a warning. A job that
        uses only NCCL does not need gloo, but most also make a gloo group (for barriers,
        checkpoints, objects).
    """
    findings = [*_name_findings(meeting), *_gloo_findings(meeting), *_mixed_families(meeting)]
    nodes = {index for way in all_ways(meeting) for index in way}
    closed = {
        way[1]
        for way, result in bad_ways(meeting, "route").items()
        if result.outcome not in STALLS and _is_used(meeting, way, result.address)
    }
    if not findings and (closed or not nodes):
        return skipped("not all nodes reach each other at all: links")
    touched = {int(index) for each in findings for index in each.about.split()[1].split(",")}
    good = len(nodes - closed - touched)
    both = all(node.facts.nccl_address for node in meeting.nodes)
    return judged(
        f"{good} of {len(nodes)} nodes can be reached at the address at which gloo "
        f"{'and NCCL listen' if both else 'listens'}: {_taken(meeting)}",
        findings,
        exclude=[
            meeting.host(int(index))
            for each in findings
            for what, index in [each.about.split()[:2]]
            if what == "node" and each.severity is Severity.ERROR
        ],
    )


def _taken(meeting: Meeting) -> str:
    """Say which interface gloo and NCCL take on each node."""
    said = []
    for library, of in (("gloo", "gloo_address"), ("NCCL", "nccl_address")):
        by_name: dict[str, list[int]] = {}
        for index, node in enumerate(meeting.nodes):
            if address := getattr(node.facts, of):
                by_name.setdefault(interface(meeting, index, address)[0] or address, []).append(
                    index
                )
        alike = len(by_name) == 1
        each = [
            name if alike else f"{name} on {meeting.hosts(indices)}"
            for name, indices in by_name.items()
        ]
        if each:
            said.append(f"{library} takes {listed(each, 4)}")
    return "; ".join(said)


def _name_findings(meeting: Meeting) -> Iterator[Finding]:
    lost = meeting.report.lost_names
    if not lost:
        return
    first = meeting.nodes[0]
    yield failure(
        f"{meeting.hosts([index for index, *_ in lost])} cannot find {meeting.name(0)} by the name "
        f"that torchrun gives to all ranks, {first.facts.master}",
        evidence=tuple(
            f"{meeting.host(index)}: " + ("it is " + ", ".join(at) + " there" if at else why)
            for index, at, why in lost[:8]
        ),
        fix=f"Let torchrun give the address in place of the name, with --local-addr on "
        f"{meeting.host(0)}, for the check and for the job. There:",
        paste=check_line(
            meeting.place, first.facts.nproc, rank=first.facts.rank, local_addr=first.address
        ),
        about="node 0",
        nodes=(meeting.host(0),),
    )


def _gloo_findings(meeting: Meeting) -> Iterator[Finding]:
    """Yield findings about the addresses, at most one per node at fault."""
    seen: set[str] = set()
    for network in networks(meeting):
        for fault in faults(meeting, network):
            found = _at_fault(meeting, network, fault)
            if found.about not in seen:
                seen.add(found.about)
                yield found
    for index, node in enumerate(meeting.nodes):
        address, why = node.facts.gloo_address, node.facts.gloo_why
        name = meeting.name(index)
        others = [other for other in meeting.nodes if other.facts.machine != node.facts.machine]
        if not address:
            yield _wrong_address(meeting, index, f"gloo would not start on {name}: {why}")
        elif is_loopback(address) and others:
            dialled = any(gloo_dials(other.facts, node.facts) for other in others)
            yield _wrong_address(
                meeting,
                index,
                f"gloo on {name} listens on {address}, where no other node reaches it",
                *((why,) if dialled else (why, LUCK)),
                severity=Severity.ERROR if dialled else Severity.WARNING,
            )


def _mixed_families(meeting: Meeting) -> Iterator[Finding]:
    """Report nodes with an IPv6 address where others have IPv4: gloo connects no such pair."""
    six = [index for index, node in enumerate(meeting.nodes) if ":" in node.facts.gloo_address]
    if not six or len(six) == sum(bool(node.facts.gloo_address) for node in meeting.nodes):
        return
    if any(
        kind.startswith("gloo") and ":" not in result.address and ":" in meeting.nodes[j].address
        for _, j, kind, result in meeting.report.bad
    ):
        # IPv4 is not open here. That is reported, with the IPv6 address to take.
        return
    index = six[0]
    facts = meeting.nodes[index].facts
    by_name = "GLOO_SOCKET_IFNAME" not in facts.gloo_why
    name = next((name for name, _, has in facts.interfaces if has and ":" not in has[0]), "")
    yield failure(
        f"gloo listens on IPv6 addresses on {meeting.hosts(six)} and on IPv4 addresses on the "
        "others: it connects only equals",
        evidence=tuple(
            f"{node.facts.host}: {node.facts.gloo_address} ({node.facts.gloo_why})"
            for node in meeting.nodes[:8]
        ),
        fix="Name the interface, of which gloo takes the IPv4 address, in the job's environment on "
        f"{meeting.hosts(six)}:"
        if name and by_name
        else f"Give all nodes an address of the same kind. On {meeting.host(index)}:",
        paste=typed("export GLOO_SOCKET_IFNAME={}", name)
        if name and by_name
        else "ip -brief address",
        about=f"node {index}",
    )


def _at_fault(meeting: Meeting, network: Network, fault: Fault) -> Finding:
    each, end, library = fault.blame, fault.end, network.library
    if fault.kind == "choice" or (
        fault.kind == "link" and each.node == fault.node and each.kind in ("way", "into")
    ):
        return _not_reached(meeting, network, fault)
    host, node = meeting.host(fault.node), meeting.name(fault.node)
    there = meeting.hosts(sorted({index for way in each.ways for index in way} - {fault.node}))
    if fault.kind == "down" and end.name not in meeting.nodes[fault.node].facts.unplugged:
        return failure(
            f"{end.name} is down on {node}: it does not reach {there} there",
            fix=f"Bring it up, or name another interface on all nodes. On {host}:",
            paste=typed(UP, end.name),
            about=f"node {fault.node} {end.name}",
            nodes=(host,),
        )
    result = network.failed[each.ways[0]]
    words = _DIAL_WORDS.get(result.outcome, "it fails")
    message, fix = {
        "down": (
            f"{end.name} has no carrier on {node}: it does not reach {there} there",
            f"Check its cable and its switch port on {host}.",
        ),
        "bare": (
            f"{end.name} has no address on {node}: it does not reach {there} there",
            f"Give it an address in the network of the other nodes, on {host}.",
        ),
        "apart": (
            f"{end.name} of {node} is in another network, {end.network}, than that of {there}",
            f"Give it an address in the network of the other nodes, on {host}.",
        ),
        "none": (
            f"{node} has no interface in the network that {library} takes on {there}",
            f"Connect {host} to that network.",
        ),
        "up": (
            f"{end.name} of {node} is up, but reaches no other node there: {words}",
            f"Check its cable, its switch port and its VLAN, and the firewall of {host}.",
        ),
    }[end.state]
    pair = fault.kind == "link" and each.kind in ("way", "between")
    if each.kind == "between":
        back, forth = (network.failed[way].address for way in each.ways[::-1])
        i, j = each.ways[0]
        message = (
            f"{library} takes {_side(meeting, i, back)} and {_side(meeting, j, forth)}, which "
        )
        message += f"do not reach each other: {words}"
        fix = "Check both ends: the address, the cable, the switch port, the VLAN, the firewall."
    return failure(
        message,
        evidence=(
            f"dialled {result.address} from {meeting.host(each.ways[0][0])}, twice: "
            f"{result.outcome} after {result.seconds:.1f} s",
            f"{library} takes it there by {_chosen_by(meeting, library, each.ways[0][1])}",
        ),
        fix=f"{fix} Until then, name the interface by which all nodes do reach each other, in the "
        "job's environment on every node (its name may differ):",
        paste=typed(EXPORT, interface(meeting, max(meeting.own, 0))[0] or "eth0"),
        about=f"nodes {each.ways[0][0]},{each.ways[0][1]} {end.name}"
        if pair
        else f"node {fault.node} {end.name}",
        nodes=tuple(node.facts.host for node in meeting.nodes),
    )


def _side(meeting: Meeting, index: int, address: str) -> str:
    name = interface(meeting, index, address)[0]
    return f"{address}{f' ({name})' if name else ''} on {meeting.name(index)}"


def _chosen_by(meeting: Meeting, library: str, index: int) -> str:
    facts = meeting.nodes[index].facts
    chosen = facts.variables.get("NCCL_SOCKET_IFNAME", "")
    if library == "gloo":
        return facts.gloo_why
    return f"NCCL_SOCKET_IFNAME={chosen}" if chosen else "NCCL's own order of interfaces"


def _not_reached(meeting: Meeting, network: Network, fault: Fault) -> Finding:
    index, library = fault.blame.node, network.library
    address = network.failed[fault.blame.ways[0]].address
    same = with_address(meeting, index, address)
    by = [way[0] for way in fault.blame.ways]
    return _wrong_address(
        meeting,
        index,
        f"{library} on {meeting.name(index)} listens on {address}"
        f"{f' ({called})' if (called := interface(meeting, index, address)[0]) else ''}"
        ", where other nodes do not reach it",
        _chosen_by(meeting, library, index),
        f"dialled from {meeting.hosts(by)}, twice",
        *([f"{meeting.hosts(same)} has the same address"] if same else ()),
        bad=address,
    )


def _wrong_address(
    meeting: Meeting,
    index: int,
    message: str,
    *evidence: str,
    bad: str = "",
    severity: Severity = Severity.ERROR,
) -> Finding:
    """Return a finding of a node that gives others a wrong address, ``bad`` if it is known."""
    host, reached = meeting.host(index), meeting.nodes[index].address
    name = interface(meeting, index)[0]
    taken = interface(meeting, index, bad)[0] if bad else ""
    at = f"the others do reach it at {reached}{f' ({name})' if name else ''}"
    return finding(
        severity,
        message,
        evidence=(*evidence, at),
        fix=f"Name the interface, or correct the line of {host} in /etc/hosts. On {host}, in the "
        "job's environment:",
        paste=typed(EXPORT, name) if name and name != taken else hosts_line(reached, host),
        about=f"node {index}",
        nodes=(host,),
        subjects=frozenset({f"gloo on {host}", f"address {reached}"}),
    )


# -- slow links


MAX_SLOW_LINKS = 6


def _slow_by_losses(cause: Finding, effect: Finding) -> bool:
    """Return whether the slow link is the one that loses packets."""
    return bool({f"slow {each}" for each in cause.subjects} & effect.subjects)


@across_nodes(
    "link-speed",
    "DDP056",
    yields_to={
        "DDP053": relations.loses_packets,
        "DDP054": relations.loses_packets,
        "DDP056": _slow_by_losses,
    },
)
def link_speed(meeting: Meeting) -> Outcome:
    """A link between nodes is much slower than the others, or loses packets.

    What it finds
        A link with less than half the median bandwidth, or with more than twice the median round
        trip plus 1 ms, where there are three links or more; any link below 80 Mbit/s. A link on
        which 2 % of the small messages, and 3 at least, had to be sent again (the kernel's count).
        A slow network (below 2.5 Gbit/s) if another one between all nodes is three times as fast.
        It is measured again, alone and several times, before it is reported. Up to eight nodes,
        every path is measured; with more, log2(n) paths from each node. In a run, an info: a TCP
        connection that is full while ranks wait for half of their steps.

    Why it is bad
        An all_reduce is as fast as its slowest link: one cable at 1 Gbit/s slows down all nodes.

    How to fix it
        Check the speed (`cat /sys/class/net/eth0/speed`), the cable and switch port, limits on
        outgoing traffic (`tc qdisc`), and whether the node uses another interface than the others.

    Example
        Wrong: one node on the management network.
        Right: all nodes on the fast network, with `NCCL_SOCKET_IFNAME` and `GLOO_SOCKET_IFNAME`.

    When it stays silent
        If all links are similar. Time in which either end waited for a core does not count; where
        that was most of it, or torch could not be imported in time, nothing is judged, and the
        output says so. One TCP connection in Python finds slow links, not the network's capacity:
        links of 10 Gbit/s and more are not compared.
    """
    speed = meeting.report.speed
    if speed.untested:
        return could_not_run(speed.untested)
    if not speed.measured:
        return skipped("no link could be measured")
    detail = (
        f"{count(speed.measured, 'link')}: median {bandwidth_shown(speed.bandwidth)}, round trip "
        f"{1e3 * speed.rtt:.2f} ms"
    )
    findings = [*_loss_findings(meeting, speed), *_speed_findings(meeting, speed)][:MAX_SLOW_LINKS]
    findings += _idle_findings(meeting, speed)
    if speed.starved and not findings:
        return could_not_run(
            f"{detail}; for lack of CPU, {count(speed.starved, 'link')} could not be judged"
        )
    return judged(detail, findings)


def _loss_findings(meeting: Meeting, speed: Speeds) -> Iterator[Finding]:
    lost = {(i, j): (sent, resent) for i, j, sent, resent in speed.lossy}
    for each in blame(lost, speed.cells):
        sent, resent = (sum(lost[way][place] for way in each.ways) for place in (0, 1))
        name, over = _slow_interface(meeting, each)
        yield warning(
            f"packets are lost {each.words(meeting)}: {resent} of {sent} small messages were sent "
            f"again ({100 * resent / sent:.0f} %)",
            evidence=("they were sent one at a time: no queue on the way was full", *over),
            fix=f"Check the cable, the switch port and the interface of {each.hosts(meeting)}: "
            "its errors and drops. There:",
            paste=typed("ip -s link show dev {}", name),
            about=f"lossy {each.about}",
            nodes=each.nodes(meeting),
            subjects=each.losses,
        )


def _slow_interface(meeting: Meeting, bad: Blame) -> tuple[str, tuple[str, ...]]:
    """Return the interface to examine, and the evidence if gloo or NCCL chose it."""
    source, target = (meeting.nodes[index] for index in bad.ways[0])
    kind, address = list(dialled_at(source.facts, target.facts, target.address).items())[-1]
    if kind == "route":
        return interface(meeting, bad.node)[0] or "eth0", ()
    facts = meeting.nodes[bad.node].facts
    if bad.node == bad.ways[0][0]:
        address = facts.gloo_address if kind == "gloo" else facts.nccl_address
    where = f"{facts.host} {address}"
    taken = f"gloo takes: {where} ({facts.gloo_why})" if kind == "gloo" else f"NCCL takes: {where}"
    name = interface(meeting, bad.node, address)[0] or "eth0"
    return name, (f"it is the way that {taken}",)


def _speed_findings(meeting: Meeting, speed: Speeds) -> Iterator[Finding]:
    slow = {(i, j): (rtt, bandwidth) for i, j, rtt, bandwidth in speed.slow}
    for each in blame(slow, speed.cells):
        name, over = _slow_interface(meeting, each)
        rtt = min(slow[way][0] for way in each.ways)
        bandwidth = max(slow[way][1] for way in each.ways)
        link = "the link" if each.kind in ("way", "between") else "every link"
        ends = meeting.host(each.node)
        if each.kind == "way":
            # A limit on the way out of one end looks like one on the way into the other.
            ends = f"{meeting.host(each.ways[0][0])} (on the way out) and of {ends} (on the way in)"
        yield warning(
            f"{link} {each.words(meeting, 'to', 'from', 'of')} is slow: "
            f"{bandwidth_shown(bandwidth)}, round trip {1e3 * rtt:.2f} ms",
            evidence=(
                f"the median link has {bandwidth_shown(speed.bandwidth)} "
                f"and {1e3 * speed.rtt:.2f} ms"
                if len(speed.cells) >= MIN_TO_COMPARE
                else "less than a network of 100 Mbit/s carries "
                f"({bandwidth_shown(MIN_BANDWIDTH)})",
                "it was measured again on its own, and the best result counts",
                *over,
            ),
            fix=f"Check the cable, the switch port, the chosen interface and limits on traffic of "
            f"{ends}. There:",
            # ethtool prints the same, and is not installed everywhere.
            paste=typed(
                "grep . /sys/class/net/{0}/speed /sys/class/net/{0}/duplex; tc qdisc show dev {0}",
                name,
            ),
            about=f"slow {each.about}",
            nodes=each.nodes(meeting),
            subjects=frozenset(f"slow {pair}" for pair in each.losses),
        )


def _idle_findings(meeting: Meeting, speed: Speeds) -> Iterator[Finding]:
    if not speed.idle:
        return
    own = next((each for each in speed.idle if each[1] == meeting.own), speed.idle[0])
    name, taken = interface(meeting, own[1], own[2])[0], _taken(meeting)
    yield warning(
        f"the job would use a slow network ({bandwidth_shown(speed.bandwidth)}), while another one "
        f"between all nodes carries {bandwidth_shown(min(each[3] for each in speed.idle))}",
        evidence=(
            taken,
            *(
                f"{meeting.host(i)} to {meeting.host(j)} at {address} "
                f"({interface(meeting, j, address)[0]}): {bandwidth_shown(idle)}"
                for i, j, address, idle in speed.idle[:4]
            ),
        ),
        fix="Name the fast interface in the job's environment, on every node (its name may "
        "differ):",
        paste=typed(EXPORT, name),
        about="idle",
        nodes=tuple(node.facts.host for node in meeting.nodes),
    )


def bandwidth_shown(bandwidth: float) -> str:
    """Format bytes per second in bits, the unit of network links."""
    bits = bandwidth * 8
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"
