"""Whose a run directory or a port is, and what is said of other users."""

from __future__ import annotations

import os

_UNKNOWN = 65534
"""In the place of users that NFS or a user namespace does not map."""


def stranger(path: os.PathLike[str]) -> int | None:
    """The other user whose directory it is; None if it is this user's, or gone."""
    try:
        uid = os.stat(path).st_uid
    except OSError:
        return None
    return None if uid == os.getuid() else uid


def whose(uid: int) -> str:
    """Name a user who is not this one."""
    if uid == 0:
        return "root"
    if uid == _UNKNOWN:
        return f"an unknown user (uid {uid}: NFS with root_squash, or another user's container)"
    return f"another user (uid {uid})"


def ask_as(uid: int) -> str:
    """Say how a job of that user is reached."""
    return f"run this command {'with sudo' if uid == 0 else 'as the user whose job it is'}"


def as_copy(path: os.PathLike[str]) -> str:
    """Say that a run of another user is read as a copy; empty for one of this user."""
    uid = stranger(path)
    if uid is None:
        return ""
    copy = f"{os.fspath(path)} belongs to {whose(uid)} and is read as a copy"
    return f"{copy}; to see it live, {ask_as(uid)}"
