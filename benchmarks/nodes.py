"""How long ``ddpdoctor check`` takes across nodes: healthy, with faults, and with many nodes.

The nodes are a lab of network namespaces on this machine (root only), so all of them share its
cores; ``many`` are plain processes on it, without the collective test, which imports torch.

    python benchmarks/nodes.py healthy --sizes 2 3 6 12 --times 10 --busy 30
    python benchmarks/nodes.py faults
    python benchmarks/nodes.py many --nodes 64
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.load import busy
from ddpdoctor.commands.check import NOT_TESTED
from tests.lab import faults
from tests.lab.checking import PORT, WITHOUT_TORCH, Checks, Said
from tests.lab.network import INTERFACE, Lab, lab, why_not

NETWORK = (
    "nodes,same-job,clocks,links,packet-size,gloo-addresses,link-speed,node-versions,same-code,"
    "shared-folder"
)


@dataclass
class Fault:
    """What is wrong in a lab of three nodes, and how the check is started in it.

    Attributes:
        each: More options, by node rank.
        env: More variables, by node rank.
        words: More options on all nodes.
        ranks: The nodes on which it is started; all if not given.
    """

    each: dict[int, Sequence[str]] = field(default_factory=dict)
    env: dict[int, dict[str, str]] = field(default_factory=dict)
    words: Sequence[str] = ()
    ranks: Sequence[int] | None = None


def only_low_ports(made: Lab, _: Path) -> None:
    """Node 0 answers at ports that nobody needs."""
    for ports in (PORT, faults.EPHEMERAL):
        faults.firewall(made, made.hosts[0], ports=ports)


def one_way_back(made: Lab, _: Path) -> None:
    """The lower address cannot be dialled by the higher one, as gloo does."""
    faults.firewall(made, made.hosts[0], source=made.hosts[1], ports=faults.EPHEMERAL)


def own_bridge(made: Lab, _: Path) -> None:
    for host in made.hosts:
        faults.container_bridge(host, named=True)


def missing_interface(made: Lab, _: Path) -> Fault:
    faults.rename_interface(made.hosts[1], "ens5")
    return Fault(env={rank: {"GLOO_SOCKET_IFNAME": INTERFACE} for rank in range(3)})


def other_torch(_: Lab, directory: Path) -> Fault:
    shim = directory / "other" / "torch"
    shim.mkdir(parents=True)
    (shim / "__init__.py").write_text("")
    (shim / "version.py").write_text("__version__ = '2.4.1'\n")
    return Fault(env={2: {"PYTHONPATH": str(shim.parent)}}, words=WITHOUT_TORCH)


def other_folder(made: Lab, directory: Path) -> Fault:
    folder = directory / "checkpoints"
    folder.mkdir()
    faults.folder_of_its_own(made.hosts[2], folder, directory / "private")
    return Fault(words=("--checkpoint-dir", str(folder)))


def other_commit(made: Lab, directory: Path) -> Fault:
    repository = directory / "code"
    repository.mkdir()
    (repository / "train.py").write_text("print(1)\n")
    git = ("git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    later = directory / "later"
    shutil.copytree(repository, later)
    (later / "train.py").write_text("print(2)\n")
    subprocess.run([*git[:2], str(later), *git[3:], "commit", "-qam", "two"], check=True)
    faults.folder_of_its_own(made.hosts[1], repository, later)
    return Fault(words=("--", str(repository / "train.py")))


def ports_of(
    rank: int, ports: int | str | None, *, reject: bool = False
) -> Callable[[Lab, Path], None]:
    return lambda made, _: faults.firewall(made, made.hosts[rank], ports=ports, reject=reject)


FAULTS: dict[str, Callable[[Lab, Path], Fault | None]] = {
    "healthy": lambda *_: None,
    "ports of one node dropped": ports_of(1, faults.EPHEMERAL),
    "ports of one node rejected": ports_of(1, faults.EPHEMERAL, reject=True),
    "one way dropped": lambda made, _: faults.firewall(
        made, made.hosts[1], source=made.hosts[0], ports=faults.EPHEMERAL
    ),
    "the other way dropped": one_way_back,
    "large packets vanish": lambda made, _: faults.packet_size_limit(made, made.hosts[1]),
    "rendezvous port dropped": ports_of(0, PORT),
    "rendezvous port rejected": ports_of(0, PORT, reject=True),
    "rendezvous and high ports dropped": only_low_ports,
    "every port dropped": ports_of(0, None),
    "own name on loopback": lambda made, _: faults.own_name_is_loopback(made.hosts[1]),
    "a bridge's address first": own_bridge,
    "no such interface": missing_interface,
    "loopback as interface": lambda *_: Fault(env={1: {"GLOO_SOCKET_IFNAME": "lo"}}),
    "name of node 0 unknown": lambda made, _: faults.name_unknown(made.hosts[1], made.hosts[0]),
    "name of node 0 wrong": lambda made, _: faults.name_wrong(
        made.hosts[1], made.hosts[0], "10.77.0.99"
    ),
    "endpoint is localhost": lambda *_: Fault(words=("--rdzv-endpoint", f"localhost:{PORT}")),
    "endpoint is another node": lambda *_: Fault(words=("--rdzv-endpoint", f"node1:{PORT}")),
    "a node absent": lambda *_: Fault(ranks=(0, 1)),
    "node 0 absent": lambda *_: Fault(ranks=(1, 2)),
    "two nodes with one rank": lambda *_: Fault(each={2: ("--node-rank", "1")}),
    "two nodes with rank 0": lambda *_: Fault(each={1: ("--node-rank", "0")}),
    "one node with fewer nnodes": lambda *_: Fault(each={1: ("--nnodes", "2")}),
    "one node with more nnodes": lambda *_: Fault(each={1: ("--nnodes", "4")}),
    "node 0 with fewer nnodes": lambda *_: Fault(each={0: ("--nnodes", "2")}),
    "node 0 with more nnodes": lambda *_: Fault(each={0: ("--nnodes", "4")}),
    "another rendezvous id": lambda *_: Fault(each={1: ("--rdzv-id", "other")}),
    "another torch": other_torch,
    "a clock 20 s behind": lambda made, directory: faults.clock_shifted(
        made.hosts[1], -20, directory
    ),
    "a folder that is not shared": other_folder,
    "another commit": other_commit,
    "slow cable (20 Mbit/s)": lambda made, _: faults.slow_cable(made, made.hosts[1], 20),
}


def cpu_seconds() -> float:
    """What all processes that were started and have ended took of the cores."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(size: int, fault: Callable[[Lab, Path], Fault | None]) -> list[Said]:
    """What a check said on each node of a new lab."""
    with tempfile.TemporaryDirectory() as name, lab(size, Path(name)) as made:
        directory = Path(name)
        how = fault(made, directory) or Fault()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        checks = Checks(made, directory, environment)
        hosts = None if how.ranks is None else [made.hosts[rank] for rank in how.ranks]
        try:
            return checks.run(*how.words, each=how.each, env=how.env, hosts=hosts)
        finally:
            checks.close()


def tell(what: str, seconds: float, before: float, statuses: Collection[int]) -> None:
    print(
        f"{what}: {seconds:.1f} s, {cpu_seconds() - before:.1f} s of CPU, "
        f"load {os.getloadavg()[0]:.1f}, exit status {sorted(statuses)}",
        flush=True,
    )


def healthy(times: int, sizes: Sequence[int]) -> None:
    """Each node has to find nothing; what has no CPU to be tested with may say so (status 4)."""
    for size in sizes:
        false, untested = 0, 0
        for _ in range(times):
            before = cpu_seconds()
            said = timed(size, FAULTS["healthy"])
            statuses = {each.status for each in said}
            tell(f"{size} nodes", max(each.seconds for each in said), before, statuses)
            false += any(status & ~NOT_TESTED for status in statuses)
            untested += any(status & NOT_TESTED for status in statuses)
            for each in said:
                for message in {found["message"] for found in each.findings()}:
                    print(f"  {each.host.name}: {message[:200]}", flush=True)
        print(
            f"{size} nodes: {times} checks, {false} with a false finding, {untested} with something"
            " not tested",
            flush=True,
        )


def with_faults(times: int, named: str) -> None:
    """Each node's own time: some see the cause, others only that somebody is absent."""
    for name, fault in FAULTS.items():
        if named not in name:
            continue
        for _ in range(times):
            said = timed(3, fault)
            print(f"{name}, load {os.getloadavg()[0]:.1f}:", flush=True)
            for each in said:
                messages = [found["message"] for found in each.findings()][:1] or ["nothing found"]
                took = float(each.document["seconds"])
                print(f"  {each.host.name} {took:4.1f} s  {messages[0][:100]}", flush=True)


def free_port() -> int:
    """A port below those that the kernel gives to whoever asks: here 64 nodes share a machine."""
    for port in range(20_000, 30_000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise SystemExit("no port is free")


def many(nodes: int, times: int) -> None:
    # As pip installs a package: compiled. Else each process compiles all of it for itself.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(
        [sys.executable, "-m", "ddpdoctor", "check", "--list"],
        env=environment,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    for _ in range(times):
        port = free_port()
        began, before = time.monotonic(), cpu_seconds()
        with contextlib.ExitStack() as stack:
            running = [
                stack.enter_context(
                    subprocess.Popen(
                        [
                            *(sys.executable, "-m", "ddpdoctor", "check"),
                            *("--nnodes", str(nodes), "--node-rank", str(rank)),
                            *("--rdzv-endpoint", f"127.0.0.1:{port}", "--nproc-per-node", "1"),
                            *("--only", NETWORK),
                        ],
                        env=environment,
                        stdout=subprocess.DEVNULL,
                    )
                )
                for rank in range(nodes)
            ]
            statuses = {process.wait() for process in running}
        tell(f"{nodes} processes", time.monotonic() - began, before, statuses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["healthy", "faults", "many"])
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--fault", default="", help="only those with this in their names")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8], help="healthy: nodes")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute meanwhile")
    asked = parser.parse_args()
    if asked.what != "many" and why_not():
        raise SystemExit(why_not())
    with busy(asked.busy, nice=0):
        if asked.what == "many":
            many(asked.nodes, asked.times)
        elif asked.what == "healthy":
            healthy(asked.times, asked.sizes)
        else:
            with_faults(asked.times, asked.fault)


if __name__ == "__main__":
    main()
