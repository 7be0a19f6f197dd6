"""Faults of a lab's network and hosts. They end with the lab."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.conftest import LIMIT
from tests.lab import translation
from tests.lab.checking import Checks
from tests.lab.network import BRIDGE, INTERFACE, Host, Lab, LabError

EPHEMERAL = "ephemeral"
"""Ports from 32768 on, which the kernel hands out."""

SHIM = Path(__file__).parent / "clock_shift.c"


def firewall(
    lab: Lab,
    target: Host,
    *,
    source: Host | None = None,
    ports: int | str | None = None,
    reject: bool = False,
    connections_only: bool = True,
    datagrams: bool = False,
) -> None:
    """A firewall in front of ``target``, inside the switch.

    Args:
        lab: The lab.
        target: The host behind it.
        source: Whose packets it stops; None for everybody's.
        ports: A port of the target, :data:`EPHEMERAL`, or None for all.
        reject: Answer with an ICMP "administratively prohibited", as REJECT does, instead of
            dropping silently.
        connections_only: Stop the first packet of new connections only, as a stateful firewall
            does; else all of TCP.
        datagrams: Stop all of UDP, and nothing else.
    """
    lane = _lane(lab, target, reject)
    match = ["match", "ip", "protocol", "17" if datagrams else "6", "0xff"]
    if source is not None:
        match += ["match", "ip", "src", f"{source.address}/32"]
    if isinstance(ports, int):
        match += ["match", "ip", "dport", str(ports), "0xffff"]
    elif ports == EPHEMERAL:
        match += ["match", "ip", "dport", "0x8000", "0x8000"]
    if connections_only and not datagrams:
        # SYN without ACK; byte 33 holds the flags, behind an IP header without options.
        match += ["match", "u8", "0x02", "0x12", "at", "33"]
    redirect = ["action", "mirred", "egress", "redirect", "dev", lane]
    where = ["dev", target.port, "egress", "protocol", "ip", "prio", "10"]
    lab.at_switch("tc", "filter", "add", *where, "u32", *match, *redirect)


def no_echo(host: Host) -> None:
    """A host that does not answer a ping."""
    host.run("sh", "-ec", "echo 1 > /proc/sys/net/ipv4/icmp_echo_ignore_all")


def _lane(lab: Lab, target: Host, reject: bool) -> str:
    """The interface of the switch that leads into the firewall's own namespace."""
    kind = "rej" if reject else "drop"
    lane = f"{kind}{target.rank}"
    if lane in lab.lanes:
        return lane
    if not any(name.endswith(str(target.rank)) for name in lab.lanes):
        lab.at_switch("tc", "qdisc", "add", "dev", target.port, "clsact")
    wall = lab.firewall()
    lab.at_switch(
        "ip", "link", "add", lane, "type", "veth", "peer", "name", f"in{lane}", "netns",
        str(wall.pid),
    )  # fmt: skip
    # The packets keep the target's address, and are for the firewall only if it has the same.
    mac = target.run("cat", f"/sys/class/net/{INTERFACE}/address").strip()
    lab.in_firewall("ip", "link", "set", f"in{lane}", "address", mac, "up")
    lab.at_switch("ip", "link", "set", lane, "up")
    route = "prohibit" if reject else "blackhole"
    lab.in_firewall("ip", "rule", "add", "iif", f"in{lane}", "lookup", "7" if reject else "8")
    lab.in_firewall("ip", "route", "replace", route, "default", "table", "7" if reject else "8")
    lab.lanes.add(lane)
    return lane


def packet_size_limit(lab: Lab, host: Host, largest: int = 1400) -> None:
    """Packets to ``host`` above ``largest`` bytes vanish, unsaid: a tunnel without ICMP."""
    for each in lab.hosts:
        # Virtual cables carry many packets as one; on a real one each is by itself.
        each.run("ip", "link", "set", INTERFACE, "gso_max_segs", "1")
    lab.at_switch("ip", "link", "set", host.port, "mtu", str(largest))


def packet_size_hole(lab: Lab, host: Host) -> None:
    """Packets to ``host`` of 1024 bytes and more vanish; those from it pass."""
    for each in lab.hosts:
        each.run("ip", "link", "set", INTERFACE, "gso_max_segs", "1")
    lane = _lane(lab, host, reject=False)
    large = ["match", "ip", "protocol", "6", "0xff", "match", "u16", "0x0400", "0x0400", "at", "2"]
    where = ["dev", host.port, "egress", "protocol", "ip", "prio", "10"]
    redirect = ["action", "mirred", "egress", "redirect", "dev", lane]
    lab.at_switch("tc", "filter", "add", *where, "u32", *large, *redirect)


def slow_cable(lab: Lab, host: Host, megabits: int) -> None:
    """Limit what reaches ``host`` to a rate."""
    lab.at_switch(
        "tc", "qdisc", "replace", "dev", host.port, "root", "tbf",
        "rate", f"{megabits}mbit", "burst", "32kb", "latency", "50ms",
    )  # fmt: skip


def lossy_cable(lab: Lab, host: Host, *, heavy: bool = False) -> None:
    """Lose 6 % of the packets that reach ``host``, or 31 %: those with certain numbers (IP's ID).

    What is sent again has another number, and comes through.
    """
    for each in lab.hosts:
        # Virtual cables carry many packets as one, and would lose all of them.
        each.run("ip", "link", "set", INTERFACE, "gso_max_segs", "1")
    lane = _lane(lab, host, reject=False)
    where = ["dev", host.port, "egress", "protocol", "ip", "prio", "10"]
    redirect = ["action", "mirred", "egress", "redirect", "dev", lane]
    for value, mask in (("0x05", "0x0f"), *((("0x02", "0x03"),) if heavy else ())):
        tcp = ["match", "ip", "protocol", "6", "0xff", "match", "u8", value, mask, "at", "5"]
        lab.at_switch("tc", "filter", "add", *where, "u32", *tcp, *redirect)


FORWARDS = """
import socket, sys, threading
def pump(source, target):
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)
server = socket.create_server(("", int(sys.argv[2])))
while True:
    here = server.accept()[0]
    try:
        there = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)
    except OSError:
        here.close()
        continue
    there.settimeout(None)
    for pair in ((here, there), (there, here)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""
"""A load balancer in front of a port: host and port."""


NAME_SERVER = """
import socket, struct, sys
known = dict(each.split("=") for each in sys.argv[1:])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
    line.bind(("0.0.0.0", 53))
    while True:
        question, asker = line.recvfrom(512)
        at, labels = 12, []
        while question[at]:
            labels.append(question[at + 1 : at + 1 + question[at]].decode())
            at += question[at] + 1
        kind = question[at + 1 : at + 3]
        address = known.get(".".join(labels)) if kind == bytes((0, 1)) else None
        flags = 0x8180 if ".".join(labels) in known else 0x8183
        counts = struct.pack("!5H", flags, 1, 1 if address else 0, 0, 0)
        answer = question[:2] + counts + question[12 : at + 5]
        if address:
            head = struct.pack("!HHHIH", 0xC00C, 1, 1, 60, 4)
            answer += head + socket.inet_aton(address)
        line.sendto(answer, asker)
"""
"""A name server that knows what it is given: names and addresses."""


def until_listening(host: Host, port: int) -> None:
    """Wait until something listens on a port of a host."""
    host.run(
        "sh", "-ec",
        f"for i in $(seq 600); do grep -qi ':{port:04X} .* 0A ' /proc/net/tcp /proc/net/tcp6 && "
        "exit 0; sleep 0.1; done; exit 1",
    )  # fmt: skip


def second_network(lab: Lab, megabits: int, name: str = "eth1") -> str:
    """Give every host an interface on a second network, with a limit if not 0; its name."""
    lab.at_switch("ip", "-batch", "-", text="link add br1 type bridge\nlink set br1 up\n")
    for host in lab.hosts:
        port = f"slow{host.rank}"
        lab.at_switch(
            "ip", "-batch", "-",
            text=f"link add {port} type veth peer name {name} netns {host.namespace.pid}\n"
            f"link set {port} master br1 up\n",
        )  # fmt: skip
        if megabits:
            lab.at_switch(
                "tc", "qdisc", "replace", "dev", port, "root", "tbf",
                "rate", f"{megabits}mbit", "burst", "32kb", "latency", "50ms",
            )  # fmt: skip
        host.run("ip", "address", "add", f"10.88.0.{host.rank + 1}/24", "dev", name)
        host.run("ip", "link", "set", name, "up")
    return name


def apart(lab: Lab, host: Host) -> None:
    """The host's cable to the second network hangs in no switch."""
    lab.at_switch("ip", "link", "set", f"slow{host.rank}", "nomaster")


def behind_translation(
    checks: Checks, *routers: tuple[str, str, str], kept: Sequence[int] = ()
) -> None:
    """Put the hosts into networks of their own, each behind a router that translates addresses.

    Args:
        checks: The lab's checks, which end the routers.
        routers: Of each host: its own address, the one outside, and the forwarded ports.
        kept: The hosts that also keep the lab's network.
    """
    words = []
    for host, router in zip(checks.lab.hosts, routers, strict=True):
        if host.rank not in kept:
            host.run("ip", "address", "flush", "dev", INTERFACE)
            host.run("ip", "link", "set", INTERFACE, "down")
        host.write_hosts(["127.0.0.1 localhost", f"{router[0]} {host.name}"])
        words.append(",".join((str(host.namespace.pid), *router)))
    process = subprocess.Popen(
        [sys.executable, str(Path(translation.__file__)), *words],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    checks.started.append(process)
    assert process.stdout is not None
    with process.stdout as lines:
        assert lines.readline() == b"ready\n"


def cable_pulled(lab: Lab, host: Host) -> None:
    """The host's switch port goes down."""
    lab.at_switch("ip", "link", "set", host.port, "down")


def own_name_is_loopback(host: Host) -> None:
    """What Debian's installer writes: the own name on 127.0.1.1."""
    lines = [line for line in host.hosts_lines() if not line.endswith(f" {host.name}")]
    host.write_hosts(["127.0.0.1 localhost", f"127.0.1.1 {host.name}", *lines[1:]])


def name_unknown(host: Host, other: Host) -> None:
    """The host cannot resolve the other's name."""
    host.write_hosts([line for line in host.hosts_lines() if not line.endswith(f" {other.name}")])


def name_wrong(host: Host, other: Host, address: str) -> None:
    """The host resolves the other's name to a wrong address."""
    name_unknown(host, other)
    host.write_hosts([*host.hosts_lines(), f"{address} {other.name}"])


def container_bridge(host: Host, address: str = "172.17.0.1", *, named: bool = False) -> None:
    """A bridge as Docker makes one, the same on every host.

    Args:
        host: Where.
        address: Its address.
        named: The host's own name resolves to it.
    """
    host.run("ip", "link", "add", "docker0", "type", "bridge")
    host.run("ip", "address", "add", f"{address}/16", "dev", "docker0")
    host.run("ip", "link", "set", "docker0", "up")
    if named:
        name_wrong(host, host, address)


def address_of(host: Host, other: Host) -> None:
    """Give the host the address of another one, instead of its own, as a cloned machine has it."""
    host.run("ip", "address", "flush", "dev", INTERFACE)
    host.run("ip", "address", "add", f"{other.address}/24", "dev", INTERFACE)


def second_card(lab: Lab, host: Host) -> None:
    """Give the host a second card on the same switch, without an address."""
    port = f"more{host.rank}"
    lab.at_switch(
        "ip", "-batch", "-",
        text=f"link add {port} type veth peer name eth1 netns {host.namespace.pid}\n"
        f"link set {port} master {BRIDGE} up\n",
    )  # fmt: skip
    host.run("ip", "link", "set", "eth1", "up")


def rename_interface(host: Host, name: str) -> None:
    """Give the host's interface another name."""
    host.run("ip", "link", "set", INTERFACE, "down")
    host.run("ip", "link", "set", INTERFACE, "name", name)
    host.run("ip", "link", "set", name, "up")


def clock_shifted(host: Host, seconds: float, directory: Path) -> None:
    """The host's wall clock is off by ``seconds``, for all that is started there from now on."""
    library = directory / "clock_shift.so"
    if not library.exists():
        compiler = shutil.which("cc") or "gcc"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SHIM), "-ldl"],
            check=True,
            timeout=LIMIT,
        )
    host.environment.update(LD_PRELOAD=str(library), CLOCK_SHIFT_S=str(seconds))


def folder_of_its_own(host: Host, folder: Path, private: Path) -> None:
    """The host sees another folder at ``folder`` than the others do."""
    private.mkdir(parents=True, exist_ok=True)
    host.run("mount", "--bind", str(private), str(folder))


@contextlib.contextmanager
def memory_limit(host: Host, megabytes: int) -> Iterator[None]:
    """Limit the memory of all that is started on the host from now on, as of a container.

    Raises:
        LabError: This machine has no memory cgroups.
    """
    name = f"ddpdoctor-{host.namespace.pid}"
    if Path("/sys/fs/cgroup/memory").exists():
        root, kind, limit = Path("/sys/fs/cgroup/memory"), "memory", "memory.limit_in_bytes"
        mount = "mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/memory && "
        mount += "mount -t cgroup -o memory none /sys/fs/cgroup/memory"
    else:
        root, kind, limit = Path("/sys/fs/cgroup"), "", "memory.max"
        mount = "mount -t cgroup2 none /sys/fs/cgroup"
    group = root / name
    try:
        group.mkdir()
        (group / limit).write_text(str(megabytes << 20))
    except OSError as error:
        raise LabError(f"no memory cgroups: {error}") from error
    host.run("sh", "-ec", mount)
    enter = f'echo $$ > /sys/fs/cgroup/{kind}/{name}/cgroup.procs; exec "$@"'
    host.wrapper[:] = ["sh", "-ec", enter, "sh"]
    try:
        yield
    finally:
        host.namespace.close()
        until = time.monotonic() + 10
        while (group / "cgroup.procs").read_text() and time.monotonic() < until:
            time.sleep(0.05)
        group.rmdir()
