"""What a node reports of itself, and what it does for the coordinator until the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from ddpdoctor import __version__
from ddpdoctor.core import opening
from ddpdoctor.core.finding import Severity
from ddpdoctor.core.formatting import shown
from ddpdoctor.preflight.check import Outcome, Status
from ddpdoctor.preflight.machine.gpu_use import chosen, no_gpu
from ddpdoctor.preflight.machine.network import (
    advertised_address,
    interfaces,
    is_loopback,
    may_be_node,
    nccl_address,
    nccl_choice,
)
from ddpdoctor.preflight.machine.software import versions
from ddpdoctor.preflight.protocol import pairs
from ddpdoctor.preflight.protocol.connecting import words_of
from ddpdoctor.preflight.protocol.joining import Call, refused
from ddpdoctor.preflight.protocol.messages import (
    Answer,
    Facts,
    Order,
    Report,
    Said,
    Verdict,
    Welcome,
)
from ddpdoctor.preflight.protocol.pairs import Dialled, Listener, Target
from ddpdoctor.preflight.protocol.wire import (
    LARGEST,
    LONGEST,
    WireError,
    is_host,
    is_interface,
    is_variable,
    is_version,
    unpacked,
)
from ddpdoctor.preflight.selftest.collectives import Ranks, why_no_nccl
from ddpdoctor.preflight.situation import Seat, Situation, Verdicts, gpu_facts, text, visible_gpus

# -- what the links of this machine are built for: NVLink or PCIe inside, the network outside


NVLINK = 20e9
"""Bytes per second that one link of any NVLink generation carries one way, or more: 20 GB/s for the
first, 25 for the second to fourth, 50 for the fifth."""

PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second of one lane, one way, by the PCIe generation."""

_SAYS_ANYTHING = frozenset(
    {"hv_netvsc", "virtio_net", "vmxnet3", "xen_netfront", "vif", "gve", "ena", "veth", "tun"}
)
"""Drivers of virtual network cards: what speed they name is not what they get."""

_GIGABIT = 1e9 / 8


class LinkCapacity(NamedTuple):
    """What a link can carry one way.

    Attributes:
        link: What it is, or why its speed is not known.
        speed: Bytes per second; 0 where it is not known.
    """

    link: str
    speed: float = 0.0


def intra_node_capacity(situation: Situation) -> LinkCapacity:
    """Between the GPUs of this machine: the slowest that a ring through all of them needs."""
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
    """To the other nodes, as NCCL will go: InfiniBand or RoCE where there is any, else a socket."""
    if situation.environ.get("NCCL_IB_DISABLE", "0") in ("", "0"):
        ports = sorted(_fabric_ports(situation.sys), key=lambda port: port.speed)
        if ports:
            return ports[0]
    choice = nccl_choice(situation.environ, situation.shared(interfaces))
    if not choice.interfaces:
        return LinkCapacity("no interface")
    return interface_speed(situation.sys, choice.interfaces[0].name)


def _fabric_ports(sys: Path) -> Iterator[LinkCapacity]:
    """The active ports of InfiniBand and RoCE; not EFA, which NCCL uses by a plugin alone."""
    for port in sorted((sys / "class" / "infiniband").glob("*/ports/*")):
        # "4: ACTIVE"; "200 Gb/sec (4X HDR)"
        kind = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}.get(text(port / "link_layer"))
        with contextlib.suppress(ValueError):
            rate = float(text(port / "rate").partition(" ")[0])
            if kind and rate > 0 and "ACTIVE" in text(port / "state"):
                device = port.parent.parent.name
                yield LinkCapacity(f"{kind} {device}, {rate:.0f} Gbit/s", rate * _GIGABIT)


def interface_speed(sys: Path, name: str) -> LinkCapacity:
    """What a network interface says of its speed, if a real card says it."""
    folder = sys / "class" / "net" / name
    behind = [folder]
    if (folder / "bonding").is_dir():
        behind = [folder.parent / each for each in text(folder / "bonding" / "slaves").split()]
    if not behind or not all(map(_is_real_card, behind)):
        return LinkCapacity(f"{name} is virtual")
    # The kernel has no answer for an interface that is down, or -1.
    speed = text(folder / "speed")
    megabits = int(speed) if speed.isdigit() else 0
    if not megabits:
        return LinkCapacity(f"{name} does not report its speed")
    return LinkCapacity(f"{name}, {megabits / 1000:g} Gbit/s", megabits * 1e6 / 8)


def _is_real_card(folder: Path) -> bool:
    """Whether a card is behind an interface, and its driver is none of a virtual machine's."""
    try:
        driver = (folder / "device" / "driver").resolve(strict=True).name
    except OSError:
        return False
    return driver not in _SAYS_ANYTHING


# -- what a node reports of itself to the others


NO_LINK = ("no GPU", 0.0)
"""Of a node without GPUs: the links are those of NCCL."""

_VARIABLE_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "TORCH_CPP_LOG_LEVEL")


def gather_facts(situation: Situation, seat: Seat, pair_port: int, *, reduces: bool) -> Facts:
    """This node's facts: names are looked up and git is asked, which takes a moment."""
    gloo_address, gloo_why = advertised_address(situation)
    script, script_hash, commit, changes = script_and_commit(situation)
    installed = situation.shared(versions)
    folder = situation.options.checkpoint_dir
    gpus = situation.shared(visible_gpus)
    return Facts(
        host=host_of(situation),
        rank=seat.rank,
        nnodes=seat.nnodes,
        nproc=situation.nproc,
        machine=_machine_id(situation),
        gloo_address=gloo_address,
        gloo_why=gloo_why,
        nccl_address=nccl_address(situation),
        interfaces=tuple(
            (each.name, each.mtu, each.addresses)
            for each in situation.shared(interfaces)
            if each.running
            and is_interface(each.name)
            and any(not is_loopback(address) for address in each.addresses)
        ),
        pair_port=pair_port,
        reduces=reduces,
        gpus=gpus,
        no_nccl=why_no_nccl(situation, situation.nproc, nodes=seat.nnodes),
        inside=intra_node_capacity(situation) if gpus else NO_LINK,
        outside=inter_node_capacity(situation) if gpus else NO_LINK,
        torch=_valid_version(installed.torch),
        nccl=_valid_version(installed.nccl),
        driver=_valid_version(installed.driver),
        python=_valid_version(installed.python),
        ddpdoctor=__version__,
        variables={
            name: shown(value)[:LONGEST]
            for name, value in sorted(situation.environ.items())
            if name.startswith(_VARIABLE_PREFIXES) and is_variable(name)
        },
        script=shown(script),
        script_hash=script_hash,
        commit=commit,
        changes=changes,
        folder=str(folder) if folder and str(folder).isprintable() else "",
    )


def host_of(situation: Situation) -> str:
    """This machine's name as the others are given it: what is no name of a machine is left out."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", situation.hostname).lstrip(".-")[:253]
    return name if is_host(name) else "unnamed"


def _valid_version(text: str) -> str:
    return text if is_version(text) else ""


def _machine_id(situation: Situation) -> str:
    """The boot of the machine and its network namespace: containers have their own."""
    boot = text(situation.proc / "sys/kernel/random/boot_id")
    try:
        network = os.stat(situation.proc / "self/ns/net")
    except OSError:
        return situation.hostname
    return f"{boot}/{network.st_dev}/{network.st_ino}" if boot else situation.hostname


GIT_LIMIT = 5.0
"""Seconds for git; a large repository on a slow file system is then left out."""


def script_and_commit(situation: Situation) -> tuple[str, str, str, str]:
    """The script's name, its hash, its commit and a hash of the changes since; empty if unknown.

    Nothing of it is imported or run.
    """
    options = situation.options
    if not options.script or options.module:
        return "", "", "", ""
    script = Path(options.script[0])
    try:
        script_hash = _hash(script.read_bytes())
    except OSError:
        return str(script), "", "", ""
    folder = script.resolve().parent
    commit = _git(folder, "rev-parse", "HEAD").decode().strip()
    changed = _git(folder, "diff", "HEAD", "--no-ext-diff", "--no-textconv") if commit else b""
    return str(script), script_hash, commit, _hash(changed) if changed else ""


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _git(folder: Path, *words: str) -> bytes:
    git = shutil.which("git")
    if git is None:
        return b""
    try:
        done = subprocess.run(
            [git, "-C", str(folder), *words],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=GIT_LIMIT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""


# -- what a node does on behalf of the coordinator, until the end


MOST_FINDINGS, MOST_SAID = 16, 500
"""Findings of a machine that the others are shown, and characters of each."""

LOOK_EVERY = 0.2
"""Seconds after which it is noticed that the coordinator is gone."""


@dataclass
class Worker:
    """A node among the others.

    Attributes:
        call: The connection to the coordinator.
        seat: This node's place in the job.
        facts: What this node reports of itself.
        listener: What the other nodes dial.
        ranks: Its processes for the collective test.
        verdicts: What the checks of this machine find.
        index: Its own among the nodes; -1 until it is known.
    """

    call: Call
    seat: Seat
    facts: Facts
    listener: Listener
    ranks: Ranks
    verdicts: Verdicts = field(default_factory=Verdicts)
    index: int = -1
    written: str = ""
    """The token of the file that this node has written into the checkpoint folder."""

    async def run(self, deadline: float) -> Report:
        """Do what is asked for until the end.

        Args:
            deadline: Monotonic time at which all has to be over.

        Returns:
            What the coordinator reports to all nodes.

        Raises:
            WireError: The coordinator is gone.
            CallError: It goes on without this node.
        """
        link, call = self.call.link, self.call
        await link.send(
            {"facts": self.facts, "offset": call.offset, "uncertainty": call.uncertainty}
        )
        try:
            return await self._obey(deadline)
        except ValueError as error:
            raise WireError(str(error)) from None
        finally:
            # Whoever plays node 0 may never ask for it.
            if self.written:
                remove_marker(Path(self.facts.folder), self.written)

    async def _obey(self, deadline: float) -> Report:
        link = self.call.link
        while True:
            message = await link.receive(max(0.1, deadline - time.monotonic()), LARGEST)
            order = unpacked(Order, message)
            if order.do == "leave":
                raise refused(unpacked(Welcome, message))
            if order.do == "end" and order.report is not None:
                with contextlib.suppress(WireError):
                    await link.send(Answer())
                return order.report
            try:
                answer = await self._while_connected(self._do(order))
            except OSError as error:
                # Too many open files, say: node 0 reports it to all.
                answer = Answer(failed=_error_words(error))
            await link.send(answer)

    async def _while_connected(self, doing: Coroutine[Any, Any, Answer]) -> Answer:
        """Do something for as long as the coordinator is there: without it, ranks wait in vain.

        Raises:
            WireError: The coordinator is gone.
        """
        task = asyncio.ensure_future(doing)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_EVERY)
                # Nothing is read here: the coordinator says nothing until it has its answer.
                if not task.done() and self.call.link.reader.at_eof():
                    raise WireError("the connection was closed")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def _do(self, order: Order) -> Answer:
        if order.do == "roster":
            self.index = order.index
            self.listener.admit(order.index, pairs.pair_token(order.token.encode()))
        elif order.do == "dial":
            return Answer(dialled=tuple(await self._dial(order.targets)))
        elif order.do == "verdict":
            return Answer(verdict=await self._verdict(order.limit))
        elif order.do == "settle" and order.needed:
            return Answer(unready=await self.ranks.ready(order.limit))
        elif order.do == "settle":
            await self.ranks.stop()
        elif order.do == "speed" and order.targets and self._allows(order.targets[0]):
            speed = await pairs.dial_speed(order.targets[0], self.listener.token)
            return Answer() if speed is None else Answer(**asdict(speed))
        elif order.do == "folder" and self.facts.folder:
            return await asyncio.to_thread(self._in_folder, Path(self.facts.folder), order)
        elif order.do == "reduce":
            # A rank that waits in vain ends at its own limits and says so; this one is for hung
            # ones.
            orders = [self._of_rank(order, local) for local in range(self.facts.nproc)]
            return Answer(ranks=tuple(await self.ranks.reduce(orders, order.patience)))
        return Answer()

    def _of_rank(self, order: Order, local: int) -> dict[str, Any]:
        return {
            "host": self.seat.host,
            "port": self.seat.port,
            "rank": order.first + local,
            "local_rank": local,
            "world": order.world,
            "limit": order.limit,
            "stage_limit": order.stage_limit,
            "patience": order.patience,
            "stages": "nccl" if order.nccl else "",
            "node_of": order.node_of,
            "soak": order.soak,
        }

    async def _verdict(self, limit: float) -> Verdict:
        """What this machine's own checks found, once they have ended or the time is over."""
        until = time.monotonic() + limit
        while self.verdicts.so_far()[1] and time.monotonic() < until:
            await asyncio.sleep(LOOK_EVERY)
        outcomes, running = self.verdicts.so_far()
        return verdict_of(outcomes, running)

    def _allows(self, target: Target) -> bool:
        """Whether another node may be there: a stranger that plays node 0 names what it likes."""
        return target.port >= 1024 and may_be_node(target.address, self.call.address)

    async def _dial(self, targets: Sequence[Target]) -> list[Dialled]:
        allowed = [each for each in targets if self._allows(each)]
        results = iter(await pairs.dial_all(allowed, self.listener.token))
        not_dialled = Dialled("unreachable", error="no address of another node: not dialled")
        return [next(results) if self._allows(each) else not_dialled for each in targets]

    def _in_folder(self, folder: Path, order: Order) -> Answer:
        """Test whether the checkpoint folder is one on all nodes: one's file is seen by all."""
        if order.action == "write" and not self.written:
            error = write_marker(folder, order.token)
            self.written = "" if error else order.token
            return Answer(error=error)
        if order.action == "remove":
            remove_marker(folder, self.written)
            self.written = ""
            return Answer()
        return Answer(seen=marker_seen(folder, order.token), listing=folder_hash(folder))


def verdict_of(outcomes: Iterable[Outcome], running: Sequence[str]) -> Verdict:
    """The outcomes of one machine's checks, as the others are shown them."""
    said = [(each.check, finding) for each in outcomes for finding in each.findings]
    said = [each for each in said if each[1].severity > Severity.INFO]
    said.sort(key=lambda each: -each[1].severity)
    late = [each.check for each in outcomes if each.status is Status.COULD_NOT_RUN]
    return Verdict(
        tuple(
            Said(check, finding.code, finding.severity.label, finding.message[:MOST_SAID])
            for check, finding in said[:MOST_FINDINGS]
        ),
        (*late, *running),
    )


def _error_words(error: OSError) -> str:
    if error.errno == errno.EMFILE:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{words_of(error)} (limit {files}: raise it with ulimit -n)"
    return words_of(error)


MARKER_PREFIX = ".ddpdoctor-check-"

MARKER_SEEN_WITHIN = 4.0
"""Seconds. NFS clients may answer from their memory for some (``acdirmin`` is 30, but a lookup of a
name that was never asked for goes to the server)."""

SAMPLED_FILES = 200


def write_marker(folder: Path, token: str) -> str:
    """Write the file that the others look for; what went wrong, or empty."""
    try:
        with open(folder / f"{MARKER_PREFIX}{token}", "x") as file:
            file.write(token)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def marker_seen(folder: Path, token: str) -> bool:
    """Whether the file is here, with the right words in it."""
    until = time.monotonic() + MARKER_SEEN_WITHIN
    while True:
        with contextlib.suppress(OSError):
            # Listing the folder makes an NFS client ask the server again.
            os.listdir(folder)
            # The user of another node may have another uid here.
            if (
                opening.contents(folder / f"{MARKER_PREFIX}{token}", 4096, links=True)
                == token.encode()
            ):
                return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.1)


def folder_hash(folder: Path) -> str:
    """A hash of names and sizes of a sample of the folder's files; empty if it cannot be read."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith(MARKER_PREFIX))
    except OSError:
        return ""
    step = max(1, len(names) // SAMPLED_FILES)
    digest = hashlib.sha256(str(len(names)).encode())
    for name in names[::step]:
        digest.update(name.encode(errors="surrogateescape"))
        with contextlib.suppress(OSError):
            digest.update(str((folder / name).stat().st_size).encode())
    return digest.hexdigest()[:16]


def remove_marker(folder: Path, token: str) -> None:
    """Take the file away again."""
    with contextlib.suppress(OSError):
        (folder / f"{MARKER_PREFIX}{token}").unlink()
