"""Gather what a node reports about itself to the other nodes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from ddpdoctor import __version__
from ddpdoctor.core.formatting import shown
from ddpdoctor.preflight.machine import network
from ddpdoctor.preflight.machine.gpus import chosen, no_gpu
from ddpdoctor.preflight.machine.software import versions
from ddpdoctor.preflight.protocol import wire
from ddpdoctor.preflight.protocol.messages import Facts
from ddpdoctor.preflight.selftest.collectives import why_no_nccl
from ddpdoctor.preflight.situation import NodePlace, Situation, gpu_facts, text, visible_gpus

NVLINK = 20e9
"""Minimum bytes per second of an NVLink, one way: 20 GB/s in the first generation, 25 in the second
to fourth, 50 in the fifth."""

PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second of one lane, one way, by the PCIe generation."""

_VIRTUAL_DRIVERS = frozenset(
    {"hv_netvsc", "virtio_net", "vmxnet3", "xen_netfront", "vif", "gve", "ena", "veth", "tun"}
)
"""Drivers of virtual network cards, which do not reach the speed that they report."""

_GIGABIT = 1e9 / 8


class LinkCapacity(NamedTuple):
    """A link, or why its speed is unknown, and the bytes per second it carries one way, or 0."""

    link: str
    speed: float = 0.0


def intra_node_capacity(situation: Situation) -> LinkCapacity:
    """Return the slowest link that a ring through all GPUs of this machine needs."""
    gpus = chosen(situation)
    if len(gpus) < 2:
        return LinkCapacity("a single GPU" if gpus else no_gpu(situation))
    wired = set(situation.shared(gpu_facts).nvlinked)
    indices = sorted(gpu.device.index for gpu in gpus)
    if all(pair in wired for pair in combinations(indices, 2)):
        links = min(sum(gpu.links) for gpu in gpus)
        if links:
            return LinkCapacity(f"{links} NVLinks", links * NVLINK)
    width = min(gpu.width or 0 for gpu in gpus)
    generation = min(gpu.generation_most or 0 for gpu in gpus)
    if not width or generation not in PCIE_LANE:
        return LinkCapacity("the driver does not report the PCIe link")
    return LinkCapacity(f"PCIe {generation} x{width}", width * PCIE_LANE[generation])


def inter_node_capacity(situation: Situation) -> LinkCapacity:
    """Return the link to other nodes that NCCL will use: InfiniBand or RoCE, or else a socket."""
    if situation.environ.get("NCCL_IB_DISABLE", "0") in ("", "0"):
        ports = sorted(_fabric_ports(situation.sys), key=lambda port: port.speed)
        if ports:
            return ports[0]
    choice = network.nccl_choice(situation.environ, situation.shared(network.interfaces))
    if not choice.interfaces:
        return LinkCapacity("no interface")
    return interface_speed(situation.sys, choice.interfaces[0].name)


def _fabric_ports(sys: Path) -> Iterator[LinkCapacity]:
    """Yield the active ports of InfiniBand and RoCE. NCCL uses EFA only through a plugin."""
    for port in sorted((sys / "class" / "infiniband").glob("*/ports/*")):
        # "4: ACTIVE"; "200 Gb/sec (4X HDR)"
        kind = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}.get(text(port / "link_layer"))
        with contextlib.suppress(ValueError):
            rate = float(text(port / "rate").partition(" ")[0])
            if kind and rate > 0 and "ACTIVE" in text(port / "state"):
                device = port.parent.parent.name
                yield LinkCapacity(f"{kind} {device}, {rate:.0f} Gbit/s", rate * _GIGABIT)


def interface_speed(sys: Path, name: str) -> LinkCapacity:
    """Return the speed that a network interface reports, if a real card reports it."""
    folder = sys / "class" / "net" / name
    cards = [folder]
    if (folder / "bonding").is_dir():
        cards = [folder.parent / each for each in text(folder / "bonding" / "slaves").split()]
    drivers = [card / "device" / "driver" for card in cards]
    real = (each.exists() and each.resolve().name not in _VIRTUAL_DRIVERS for each in drivers)
    if not drivers or not all(real):
        return LinkCapacity(f"{name} is virtual")
    # For an interface that is down the kernel reports nothing, or -1.
    speed = text(folder / "speed")
    megabits = int(speed) if speed.isdigit() else 0
    if not megabits:
        return LinkCapacity(f"{name} does not report its speed")
    return LinkCapacity(f"{name}, {megabits / 1000:g} Gbit/s", megabits * 1e6 / 8)


# -- facts


NO_LINK = ("no GPU", 0.0)  # The links of a node without GPUs, which does not use NCCL

_VARIABLE_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "TORCH_CPP_LOG_LEVEL")


def gather_facts(situation: Situation, place: NodePlace, pair_port: int, *, reduces: bool) -> Facts:
    """Gather this node's facts. Looking up names and asking git takes a moment."""
    gloo_address, gloo_why = network.advertised_address(situation)
    script, script_hash, commit, changes = script_and_commit(situation)
    installed = situation.shared(versions)
    folder = situation.options.checkpoint_dir
    gpus = situation.shared(visible_gpus)

    def valid(version: str) -> str:
        return version if wire.fits(version, wire.Version) else ""

    return Facts(
        host=host_of(situation),
        rank=place.rank,
        nnodes=place.nnodes,
        nproc=situation.nproc,
        machine=_machine_id(situation),
        gloo_address=gloo_address,
        gloo_why=gloo_why,
        nccl_address=network.nccl_address(situation),
        others=network.further_addresses(situation),
        lookup=situation.shared(network.own_name).seconds,
        master=_announced(situation, place),
        **_interface_facts(situation),
        pair_port=pair_port,
        reduces=reduces,
        gpus=gpus,
        no_nccl=why_no_nccl(situation, situation.nproc, nodes=place.nnodes),
        inside=intra_node_capacity(situation) if gpus else NO_LINK,
        outside=inter_node_capacity(situation) if gpus else NO_LINK,
        torch=valid(installed.torch),
        nccl=valid(installed.nccl),
        driver=valid(installed.driver),
        python=valid(installed.python),
        ddpdoctor=__version__,
        variables={
            name: shown(value)[: wire.MAX_TEXT]
            for name, value in sorted(situation.environ.items())
            if name.startswith(_VARIABLE_PREFIXES) and wire.fits(name, wire.Variable)
        },
        script=shown(script),
        script_hash=script_hash,
        commit=commit,
        changes=changes,
        folder=str(folder) if folder and str(folder).isprintable() else "",
    )


def _interface_facts(situation: Situation) -> dict[str, Any]:
    """Return the facts about this machine's interfaces."""
    found = situation.shared(network.interfaces)
    known = [each for each in found if wire.fits(each.name, wire.Interface)]
    here = [each for each in known if not each.loopback]
    return {
        "interfaces": tuple(
            (each.name, each.mtu, each.addresses)
            for each in known
            if each.running and any(not network.is_loopback(address) for address in each.addresses)
        ),
        "down": tuple(each.name for each in here if not each.running),
        "unplugged": tuple(each.name for each in here if each.unplugged),
        "networks": tuple((each.name, its) for each in here for its in each.networks or ("",)),
    }


def _announced(situation: Situation, place: NodePlace) -> str:
    """Return the MASTER_ADDR that torchrun sets on this node; empty if it uses the endpoint's."""
    if not place.elastic:
        return ""
    return shown(place.local_addr or situation.shared(network.full_name).name)


def host_of(situation: Situation) -> str:
    """Return this machine's name for other nodes, without characters that no host name has."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", situation.hostname).lstrip(".-")[:253]
    return name if name and wire.fits(name, wire.Host) else "unnamed"


def _machine_id(situation: Situation) -> str:
    """Identify the machine's boot and its network namespace, of which containers have their own."""
    boot = text(situation.proc / "sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        namespace = os.stat(situation.proc / "self/ns/net")
        if boot:
            return f"{boot}/{namespace.st_dev}/{namespace.st_ino}"
    return situation.hostname


GIT_TIMEOUT = 5.0  # Seconds for git. A large repository on a slow file system is left out.


def script_and_commit(situation: Situation) -> tuple[str, str, str, str]:
    """Return the script's name, its hash, its commit and a hash of the changes since.

    Unknown values are empty. Nothing is imported or run.
    """
    options = situation.options
    if not options.script or options.module:
        return "", "", "", ""
    script = Path(options.script[0])
    try:
        script_hash = hashlib.sha256(script.read_bytes()).hexdigest()[:16]
    except OSError:
        return str(script), "", "", ""
    folder = script.resolve().parent
    commit = _git(folder, "rev-parse", "HEAD").decode().strip()
    changed = _git(folder, "diff", "HEAD", "--no-ext-diff", "--no-textconv") if commit else b""
    changes = hashlib.sha256(changed).hexdigest()[:16] if changed else ""
    return str(script), script_hash, commit, changes


def _git(folder: Path, *words: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=GIT_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""
