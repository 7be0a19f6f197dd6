"""Where frames come from, for those that draw them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ddpdoctor.top.snapshot import Snapshot


@dataclass(frozen=True)
class Want:
    """What the viewer looks at: lets the source skip work that nobody sees."""

    ranks: frozenset[int] | None = None
    """Ranks whose owns, totals and output are visible; None: all."""
    history: int = 60
    """How many of the last steps."""


ALL = Want()


class Source(Protocol):
    """Makes one frame after another."""

    @property
    def interval(self) -> float:
        """Seconds between frames that are worth asking for."""

    def read(self, want: Want) -> Snapshot:
        """The present frame; may take a while, so call it in a thread of its own.

        Raises:
            DoctorError: There is nothing to show, and there will not be.
        """

    def close(self) -> None:
        """Let go of files and of the driver."""


@runtime_checkable
class Replay(Source, Protocol):
    """A source whose frames all exist already.

    ``read`` gives the frame at ``position`` and does not move: who plays, seeks.
    """

    @property
    def length(self) -> int:
        """How many frames there are; at least one."""

    @property
    def position(self) -> int:
        """The frame that is read."""

    def seek(self, position: int) -> None:
        """Go to a frame; beyond the ends, to the nearest."""


@dataclass(frozen=True)
class RunChoice:
    """A live run to choose from."""

    id: str
    path: str
    command: str
    """The script and its options."""
    started: float | None
    """Unix seconds."""
    ranks: int


def live_runs() -> list[RunChoice]:
    """The live runs of this user, the newest first.

    Raises:
        DoctorError: They cannot be listed.
    """
    from ddpdoctor.core.errors import DoctorError
    from ddpdoctor.run import rundir
    from ddpdoctor.run.record import integer
    from ddpdoctor.run.snapshot import read_manifest
    from ddpdoctor.top import story
    from ddpdoctor.top.pages import Pages

    try:
        paths = rundir.live()
    except OSError as error:
        raise DoctorError(f"the runs cannot be listed: {error}") from None
    choices = []
    for path in paths:
        try:
            manifest = read_manifest(path)
        except DoctorError:
            # It begins or ends at this moment, or is of a newer version.
            continue
        pages = Pages(path)
        pages.look()
        started = integer(manifest, "started") or None
        choices.append(
            RunChoice(
                id=str(manifest.get("id") or path.name),
                path=str(path),
                command=story.job(manifest),
                started=None if started is None else started / 1e9,
                ranks=len(pages.ranks),
            )
        )
    return choices


def open_source(
    name: str | None, *, demo: bool = False, replay: str | None = None, interval: float = 1.0
) -> Source:
    """The source that a command line asks for.

    Args:
        name: A run's name or directory: live, or a `Replay` if it is over. None: the newest live
            run, or the machine until there is one.
        demo: A made-up job instead.
        replay: A recording instead.
        interval: Seconds between frames.

    Raises:
        DoctorError: There is no such run or recording.
    """
    if demo:
        from ddpdoctor.top.demo import DemoSource

        return DemoSource(interval)
    if replay is not None:
        from ddpdoctor.top.recording import RecordingSource

        return RecordingSource(replay)
    if name is None:
        from ddpdoctor.top.following import FollowingSource

        return FollowingSource(interval)
    from ddpdoctor.run import rundir

    path = rundir.find(name)
    if rundir.is_live(path):
        from ddpdoctor.top.live import LiveSource

        return LiveSource(path, interval)
    from ddpdoctor.top.finished import FinishedSource

    return FinishedSource(path, interval)
