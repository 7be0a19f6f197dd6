"""Which run the monitor shows, and what makes its frames."""

from __future__ import annotations

from dataclasses import dataclass

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.opening import integer
from ddpdoctor.run import rundir
from ddpdoctor.run.reader import read_manifest
from ddpdoctor.top import events
from ddpdoctor.top.pages import Pages
from ddpdoctor.top.source import Source


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
                command=events.job(manifest),
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
        name: A run's name or directory. None: the newest live
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
    from ddpdoctor.top.following import RunSource

    return RunSource(rundir.find(name), interval)
