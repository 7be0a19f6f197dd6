"""What a node reports of itself to the others."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from ddpdoctor import __version__
from ddpdoctor.core.control_characters import shown
from ddpdoctor.preflight.machine.interfaces import interfaces
from ddpdoctor.preflight.machine.link_capacity import inside, outside
from ddpdoctor.preflight.machine.nccl import why_no_nccl
from ddpdoctor.preflight.machine.versions import versions
from ddpdoctor.preflight.place import Seat
from ddpdoctor.preflight.protocol.addresses import advertised, is_loopback, nccl_address
from ddpdoctor.preflight.protocol.report import (
    Facts,
)
from ddpdoctor.preflight.protocol.validation import (
    LONGEST,
    is_host,
    is_interface,
    is_variable,
    is_version,
)
from ddpdoctor.preflight.situation import Situation, text, visible_gpus

NO_LINK = ("no GPU", 0.0)
"""Of a node without GPUs: the links are those of NCCL."""

_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "TORCH_CPP_LOG_LEVEL")


def gather(situation: Situation, seat: Seat, pair_port: int, *, reduces: bool) -> Facts:
    """This node's facts: names are looked up and git is asked, which takes a moment."""
    gloo_address, gloo_why = advertised(situation)
    script, script_hash, commit, changes = code(situation)
    installed = situation.shared(versions)
    folder = situation.options.checkpoint_dir
    gpus = situation.shared(visible_gpus)
    return Facts(
        host=host_of(situation),
        rank=seat.rank,
        nnodes=seat.nnodes,
        nproc=situation.nproc,
        machine=_machine(situation),
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
        inside=inside(situation) if gpus else NO_LINK,
        outside=outside(situation) if gpus else NO_LINK,
        torch=_version(installed.torch),
        nccl=_version(installed.nccl),
        driver=_version(installed.driver),
        python=_version(installed.python),
        ddpdoctor=__version__,
        variables={
            name: shown(value)[:LONGEST]
            for name, value in sorted(situation.environ.items())
            if name.startswith(_PREFIXES) and is_variable(name)
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


def _version(text: str) -> str:
    return text if is_version(text) else ""


def _machine(situation: Situation) -> str:
    """The boot of the machine and its network namespace: containers have their own."""
    boot = text(situation.proc / "sys/kernel/random/boot_id")
    try:
        network = os.stat(situation.proc / "self/ns/net")
    except OSError:
        return situation.hostname
    return f"{boot}/{network.st_dev}/{network.st_ino}" if boot else situation.hostname


GIT_LIMIT = 5.0
"""Seconds for git; a large repository on a slow file system is then left out."""


def code(situation: Situation) -> tuple[str, str, str, str]:
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
