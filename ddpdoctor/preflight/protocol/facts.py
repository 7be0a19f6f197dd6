"""What a node tells the others of itself."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ddpdoctor import __version__
from ddpdoctor.preflight.machine.interfaces import interfaces
from ddpdoctor.preflight.machine.link_capacity import Capacity, inside, outside
from ddpdoctor.preflight.machine.lookups import endpoint_name
from ddpdoctor.preflight.machine.nccl import why_no_nccl
from ddpdoctor.preflight.machine.versions import versions
from ddpdoctor.preflight.place import Seat
from ddpdoctor.preflight.protocol.addresses import advertised, is_loopback
from ddpdoctor.preflight.situation import Situation, visible_gpus

NO_LINK = ("no GPU", 0.0)
"""Of a node without GPUs: the links are those of NCCL."""

_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "TORCH_CPP_LOG_LEVEL")


@dataclass(frozen=True)
class Facts:
    """One node, in its own words; all of it goes over the wire.

    Attributes:
        host: Its host name.
        rank: Its ``--node-rank``; None if torchrun is to choose.
        nnodes: Nodes of the job, as it was told.
        nproc: Its ranks.
        endpoint: The rendezvous endpoint, as it was typed.
        endpoint_addresses: What the endpoint's host resolves to there.
        machine: Equal for nodes that share a machine and a network.
        gloo_address: What gloo will give to the other nodes; empty if gloo would not start.
        gloo_why: How gloo comes to it, or why it would not start.
        interfaces: Its interfaces without loopback: name, MTU, addresses.
        pair_port: Where its listener of this check is.
        reduces: Whether it takes part in the collective test.
        gpus: Visible GPUs.
        no_nccl: Why NCCL cannot be tested on it; empty if it can.
        inside: What connects them, and its bytes per second one way; 0 if that is not known.
        outside: The same of the network that NCCL will use.
        torch: Version; likewise the next four. Empty where there is none.
        variables: Of NCCL, gloo and torch's distributed part.
        script: Name of the script, if one was given, and what its code is.
        folder: The checkpoint folder, if one was given.
    """

    host: str
    rank: int | None
    nnodes: int
    nproc: int
    endpoint: str
    endpoint_addresses: tuple[str, ...]
    machine: str
    gloo_address: str
    gloo_why: str
    interfaces: tuple[tuple[str, int, tuple[str, ...]], ...]
    pair_port: int
    reduces: bool
    gpus: int
    no_nccl: str
    inside: tuple[str, float]
    outside: tuple[str, float]
    torch: str
    nccl: str
    driver: str
    python: str
    ddpdoctor: str
    variables: Mapping[str, str]
    script: str
    script_hash: str
    commit: str
    changes: str
    folder: str

    def packed(self) -> dict[str, Any]:
        """For a message."""
        return asdict(self)


def unpack(told: Mapping[str, Any]) -> Facts:
    """The facts in a message of another node, which may have another ddpdoctor.

    Raises:
        ValueError: They are damaged.
    """
    try:
        known = {each.name: told[each.name] for each in fields(Facts)}
        known["endpoint_addresses"] = tuple(str(each) for each in known["endpoint_addresses"])
        known["interfaces"] = tuple(
            (str(name), int(mtu), tuple(str(address) for address in addresses))
            for name, mtu, addresses in known["interfaces"]
        )
        known["variables"] = {str(k): str(v) for k, v in dict(known["variables"]).items()}
        for name in ("inside", "outside"):
            link, speed = known[name]
            known[name] = (str(link), float(speed))
        for name in ("nnodes", "nproc", "pair_port", "gpus"):
            known[name] = int(known[name])
        for each in fields(Facts):
            if each.type == "str" and not isinstance(known[each.name], str):
                raise TypeError(f"{each.name} is no text")
        if not isinstance(known["rank"], (int, type(None))):
            raise TypeError("rank is no number")
        return Facts(**known)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"damaged facts: {error}") from error


def gather(situation: Situation, seat: Seat, pair_port: int, *, reduces: bool) -> Facts:
    """This node's facts: names are looked up and git is asked, which takes a moment."""
    gloo = advertised(situation)
    resolved = situation.shared(endpoint_name)
    own_code = code(situation)
    installed = situation.shared(versions)
    folder = situation.options.checkpoint_dir
    gpus = situation.shared(visible_gpus)
    return Facts(
        host=situation.hostname,
        rank=seat.rank,
        nnodes=seat.nnodes,
        nproc=situation.nproc,
        endpoint=f"{seat.host}:{seat.port}",
        endpoint_addresses=resolved.addresses if resolved else (),
        machine=_machine(situation),
        gloo_address=gloo.address,
        gloo_why=gloo.why,
        interfaces=tuple(
            (each.name, each.mtu, each.addresses)
            for each in situation.shared(interfaces)
            if each.running and any(not is_loopback(address) for address in each.addresses)
        ),
        pair_port=pair_port,
        reduces=reduces,
        gpus=gpus,
        no_nccl=why_no_nccl(situation, situation.nproc, nodes=seat.nnodes),
        inside=_link(inside, situation) if gpus else NO_LINK,
        outside=_link(outside, situation) if gpus else NO_LINK,
        torch=installed.torch,
        nccl=installed.nccl,
        driver=installed.driver,
        python=installed.python,
        ddpdoctor=__version__,
        variables={
            name: value
            for name, value in sorted(situation.environ.items())
            if name.startswith(_PREFIXES)
        },
        script=own_code.script,
        script_hash=own_code.script_hash,
        commit=own_code.commit,
        changes=own_code.changes,
        folder=str(folder) if folder else "",
    )


def _link(of: Callable[[Situation], Capacity], situation: Situation) -> tuple[str, float]:
    """A link for a message."""
    capacity = of(situation)
    return capacity.link, capacity.speed


def _machine(situation: Situation) -> str:
    """The boot of the machine and its network namespace: containers have one of their own."""
    try:
        boot = (situation.proc / "sys/kernel/random/boot_id").read_text().strip()
        network = os.stat(situation.proc / "self/ns/net")
    except OSError:
        return situation.hostname
    return f"{boot}/{network.st_dev}/{network.st_ino}"


GIT_LIMIT = 5.0
"""Seconds for git; a large repository on a slow file system is then left out."""


@dataclass(frozen=True)
class Code:
    """What the script is made of; empty where it is not known.

    Attributes:
        script: The script's name.
        script_hash: Of its bytes.
        commit: The checked-out commit of its repository.
        changes: A hash of what was changed in tracked files since; empty when nothing was.
    """

    script: str = ""
    script_hash: str = ""
    commit: str = ""
    changes: str = ""


def code(situation: Situation) -> Code:
    """The code of the script that was named; without one nothing is known."""
    options = situation.options
    if not options.script or options.module:
        return Code()
    script = Path(options.script[0])
    try:
        script_hash = _hash(script.read_bytes())
    except OSError:
        return Code(script=str(script))
    folder = script.resolve().parent
    commit = _git(folder, "rev-parse", "HEAD").decode().strip()
    changed = _git(folder, "diff", "HEAD", "--no-ext-diff", "--no-textconv") if commit else b""
    return Code(str(script), script_hash, commit, _hash(changed) if changed else "")


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
