"""Whether this is a container, and whose: some fixes are typed outside of it."""

from __future__ import annotations

from typing import Literal

from ddpdoctor.preflight.situation import Situation

DOCKERS_RESOLVER = "127.0.0.11"
"""The name server of Docker's own networks; a container in the host's has the host's."""

Kind = Literal["", "docker", "podman", "kubernetes"]


def kind(situation: Situation) -> Kind:
    """The kind of container that this process is in; empty if none is known."""
    root = situation.proc.parent
    if "KUBERNETES_SERVICE_HOST" in situation.environ:
        return "kubernetes"
    if (root / "run" / ".containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    return ""


def appears_when_started(situation: Situation) -> bool:
    """Whether another node's name and address may come with its container, and not before."""
    inside = kind(situation)
    if inside != "docker":
        return bool(inside)
    try:
        text = (situation.proc.parent / "etc" / "resolv.conf").read_text(errors="replace")
    except OSError:
        return False
    return any(line.split() == ["nameserver", DOCKERS_RESOLVER] for line in text.splitlines())
