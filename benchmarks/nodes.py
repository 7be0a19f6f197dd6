"""How long ``ddpdoctor check`` takes across nodes: healthy, with faults, and with many nodes.

The nodes are a lab of network namespaces on this machine (root only), so all of them share its
cores; ``many`` are plain processes on it, without the collective test, which imports torch.

    python benchmarks/nodes.py healthy
    python benchmarks/nodes.py faults
    python benchmarks/nodes.py many --nodes 64
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.lab import faults
from tests.lab.checking import PORT, Checks
from tests.lab.network import Lab, lab, why_not

NETWORK = (
    "nodes,same-job,clocks,links,packet-size,gloo-addresses,link-speed,node-versions,same-code,"
    "shared-folder"
)


def only_low_ports(made: Lab) -> None:
    """Node 0 answers at ports that nobody needs."""
    for ports in (PORT, faults.EPHEMERAL):
        faults.firewall(made, made.hosts[0], ports=ports)


FAULTS: dict[str, Callable[[Lab], None]] = {
    "healthy": lambda _: None,
    "ports of one node dropped": lambda made: faults.firewall(
        made, made.hosts[1], ports=faults.EPHEMERAL
    ),
    "ports of one node rejected": lambda made: faults.firewall(
        made, made.hosts[1], ports=faults.EPHEMERAL, reject=True
    ),
    "one way dropped": lambda made: faults.firewall(
        made, made.hosts[1], source=made.hosts[0], ports=faults.EPHEMERAL
    ),
    "large packets vanish": lambda made: faults.packet_size_limit(made, made.hosts[1]),
    "rendezvous port dropped": lambda made: faults.firewall(made, made.hosts[0], ports=PORT),
    "rendezvous port rejected": lambda made: faults.firewall(
        made, made.hosts[0], ports=PORT, reject=True
    ),
    "rendezvous and high ports dropped": only_low_ports,
    "every port dropped": lambda made: faults.firewall(made, made.hosts[0]),
    "own name on loopback": lambda made: faults.own_name_is_loopback(made.hosts[1]),
    "slow cable (20 Mbit/s)": lambda made: faults.slow_cable(made, made.hosts[1], 20),
}


def cpu_seconds() -> float:
    """What all processes that were started and have ended took of the cores."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(size: int, fault: Callable[[Lab], None]) -> tuple[float, list[float], set[int]]:
    """Seconds until the check has ended on all nodes of a new lab, on each, and exit statuses."""
    with tempfile.TemporaryDirectory() as directory, lab(size, Path(directory)) as made:
        fault(made)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        checks = Checks(made, Path(directory), environment)
        try:
            said = checks.run()
        finally:
            checks.close()
        each_took = [float(each.document["seconds"]) for each in said]
        return max(each.seconds for each in said), each_took, {each.status for each in said}


def tell(what: str, seconds: float, before: float, statuses: set[int]) -> None:
    print(
        f"{what}: {seconds:.1f} s, {cpu_seconds() - before:.1f} s of CPU, "
        f"load {os.getloadavg()[0]:.1f}, exit status {sorted(statuses)}",
        flush=True,
    )


def healthy(times: int) -> None:
    for size in (2, 4, 8):
        for _ in range(times):
            before = cpu_seconds()
            seconds, _, statuses = timed(size, FAULTS["healthy"])
            tell(f"{size} nodes", seconds, before, statuses)


def with_faults(times: int) -> None:
    for name, fault in FAULTS.items():
        for _ in range(times):
            before = cpu_seconds()
            seconds, each_took, statuses = timed(3, fault)
            shown = ", ".join(f"{took:.1f}" for took in each_took)
            tell(f"{name} (nodes by themselves {shown} s)", seconds, before, statuses)


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
    asked = parser.parse_args()
    if asked.what == "many":
        many(asked.nodes, asked.times)
        return
    if why_not():
        raise SystemExit(why_not())
    (healthy if asked.what == "healthy" else with_faults)(asked.times)


if __name__ == "__main__":
    main()
