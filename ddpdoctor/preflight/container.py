"""Whether this is a container, and whose: some fixes are typed outside of it."""

from __future__ import annotations

from typing import Literal

from ddpdoctor.preflight.situation import Situation

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
