"""A lab of hosts on one machine: a namespace each for network, host name, mounts and processes.

Every host is held by a process that ends when its standard input does. Nothing has a name outside
the namespaces, so when the test process ends, however it ends, the kernel takes all of it down.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NETWORK = "10.77.0"
"""The first three numbers of every host's address, unless others are chosen; node N has N + 1."""

BRIDGE = "br0"
INTERFACE = "eth0"
_TOOLS = ("ip", "tc", "unshare", "nsenter", "mount", "hostname")


class LabError(Exception):
    """A command that builds the lab failed."""


def shell(words: Sequence[str], text: str = "") -> str:
    """Run a command that must succeed; what it wrote."""
    done = subprocess.run(
        words,
        input=text,
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "LANG": "C"},
    )
    if done.returncode:
        raise LabError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Namespace:
    """Namespaces and the process that holds them."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            ["unshare", *kinds, "--fork", "--kill-child", "--propagation", "private", "--", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._kinds = kinds
        assert self.process.stdin is not None and self.process.stdout is not None
        # The echo comes once `cat` runs, which is after all namespaces were made.
        self.process.stdin.write(b".\n")
        self.process.stdin.flush()
        if self.process.stdout.readline() != b".\n":
            self.close()
            raise LabError("no new namespaces may be made here")
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        self.pid = int(children.read_text().split()[0])

    def enter(self, *words: str) -> list[str]:
        """The command that runs ``words`` inside."""
        return ["nsenter", "--target", str(self.pid), *self._kinds, "--", *words]

    def close(self) -> None:
        """End the holder, and with it every process inside."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self.process.stdout.close()


@dataclass
class Host:
    """A node of the lab."""

    rank: int
    name: str
    address: str
    namespace: Namespace
    hosts_file: Path
    environment: dict[str, str]
    wrapper: list[str] = field(default_factory=list)  # Start of every command
    outside: list[str] = field(default_factory=list)  # Start of what enters the namespaces

    @property
    def port(self) -> str:
        """The switch's end of the host's cable."""
        return f"port{self.rank}"

    def run(self, *words: str, text: str = "") -> str:
        """Run a command of the lab's own on the host; what it wrote.

        Raises:
            LabError: It failed.
        """
        return shell(self.namespace.enter(*words), text)

    def start(
        self,
        *words: str,
        cwd: Path,
        env: Mapping[str, str],
        out: Path,
        err: Path,
    ) -> subprocess.Popen[bytes]:
        """Start a command on the host, in a process group of its own."""
        with out.open("wb") as stdout, err.open("wb") as stderr:
            return subprocess.Popen(
                [*self.outside, *self.namespace.enter(*self.wrapper, *words)],
                cwd=cwd,
                env={**env, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def write_hosts(self, lines: Sequence[str]) -> None:
        """Replace the host's /etc/hosts."""
        # In place: the file is bind-mounted.
        self.hosts_file.write_text("\n".join([*lines, ""]))

    def hosts_lines(self) -> list[str]:
        """The lines of the host's /etc/hosts."""
        return self.hosts_file.read_text().splitlines()


class Lab:
    """Hosts on one switch, each with an interface ``eth0``; they know each other by name."""

    def __init__(self, size: int, directory: Path, network: str = NETWORK) -> None:
        self.network = network
        self.directory = directory
        self.hosts: list[Host] = []
        self.lanes: set[str] = set()
        self._namespaces: list[Namespace] = []
        self._firewall: Namespace | None = None
        try:
            self._build(size, network)
        except BaseException:
            self.close()
            raise

    def _build(self, size: int, network: str) -> None:
        self.switch = self._namespace("--net", "--mount")
        commands = [f"link add {BRIDGE} type bridge", f"link set {BRIDGE} up"]
        resolver = self.directory / "resolv.conf"
        # Nothing listens there: an unknown name fails at once, as with a good name server.
        resolver.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        for rank in range(size):
            namespace = self._namespace("--net", "--uts", "--mount", "--pid")
            hosts_file = self.directory / f"hosts{rank}"
            host = Host(rank, f"node{rank}", f"{network}.{rank + 1}", namespace, hosts_file, {})
            self.hosts.append(host)
            commands += [
                f"link add {host.port} type veth peer name {INTERFACE} netns {namespace.pid}",
                f"link set {host.port} master {BRIDGE} up",
            ]
        names = [f"{host.address} {host.name}" for host in self.hosts]
        self.at_switch("ip", "-batch", "-", text="\n".join(commands))
        for host in self.hosts:
            host.write_hosts(["127.0.0.1 localhost", *names])
            host.run(
                "sh",
                "-ec",
                f"hostname {host.name}\n"
                "mount -t proc proc /proc\n"
                # A mount of /sys shows the network interfaces of the namespace it was made in.
                "mount -t sysfs sysfs /sys\n"
                f"mount --bind {host.hosts_file} /etc/hosts\n"
                f"mount --bind {resolver} /etc/resolv.conf\n"
                "ip link set lo up\n"
                f"ip address add {host.address}/24 dev {INTERFACE}\n"
                f"ip link set {INTERFACE} up\n",
            )

    def _namespace(self, *kinds: str) -> Namespace:
        namespace = Namespace(kinds)
        self._namespaces.append(namespace)
        return namespace

    def at_switch(self, *words: str, text: str = "") -> str:
        """Run a command where the switch is."""
        return shell(self.switch.enter(*words), text)

    def firewall(self) -> Namespace:
        """A namespace that swallows or rejects the packets it is given, made when first needed."""
        if self._firewall is None:
            self._firewall = self._namespace("--net", "--mount")
            address = f"{self.network}.254"
            pid = self._firewall.pid
            self.at_switch(
                "ip", "-batch", "-",
                text=f"link add wall type veth peer name {INTERFACE} netns {pid}\n"
                f"link set wall master {BRIDGE} up\n",
            )  # fmt: skip
            self.in_firewall(
                "sh",
                "-ec",
                f"ip address add {address}/24 dev {INTERFACE}\nip link set {INTERFACE} up\n"
                # Only what forwards also rejects; and every packet is to be told of.
                "mount -t proc proc /proc\n"
                "for f in all default; do echo 0 > /proc/sys/net/ipv4/conf/$f/rp_filter; done\n"
                "echo 1 > /proc/sys/net/ipv4/ip_forward\n"
                "echo 0 > /proc/sys/net/ipv4/icmp_ratemask\n",
            )
        return self._firewall

    def in_firewall(self, *words: str) -> str:
        """Run a command in the firewall."""
        return shell(self.firewall().enter(*words))

    def close(self) -> None:
        """Take everything down."""
        for namespace in reversed(self._namespaces):
            namespace.close()
        self._namespaces.clear()


@contextlib.contextmanager
def lab(size: int, directory: Path, network: str = NETWORK) -> Iterator[Lab]:
    """A lab of ``size`` hosts; all of it is gone afterwards."""
    directory.mkdir(parents=True, exist_ok=True)
    made = Lab(size, directory, network)
    try:
        yield made
    finally:
        made.close()


@functools.cache
def why_not() -> str:
    """Why no lab can be made on this machine; empty if one can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no lab of network namespaces: {', '.join(missing)} not installed"
    if os.geteuid() != 0:
        return "no lab of network namespaces: only root may make one"
    import tempfile

    try:
        with tempfile.TemporaryDirectory() as directory, lab(1, Path(directory)):
            return ""
    except (LabError, OSError, IndexError) as error:
        return f"no lab of network namespaces: {error}"
