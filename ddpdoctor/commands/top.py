"""``ddpdoctor top``: the live monitor."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpdoctor.core.errors import DoctorError

if TYPE_CHECKING:
    from ddpdoctor.top.choosing import RunChoice
    from ddpdoctor.top.output import Keep
    from ddpdoctor.top.prometheus import Exporter
    from ddpdoctor.top.recording import Recording
    from ddpdoctor.top.snapshot import Snapshot
    from ddpdoctor.top.source import Source

HELP = """\
Usage: ddpdoctor top [OPTIONS] [RUN|DIR]

Show every rank of a live run: where its steps go, who holds the others up, GPU
memory, utilization and power, and the findings so far. A run that has ended
is played back.

RUN is a run's name, DIR its directory [default: your newest live run; without
one the machine, until a run starts].

Options:
  --once            Print one frame and exit.
  --json            Print one snapshot as JSON and exit: numbers in seconds,
                    bytes, watts and ratios; what is not known is absent.
  --watch           With --json: one snapshot per interval, a line each, until
                    the run ends.
  --interval SECONDS
                    Time between two frames [default: 1].
  --record FILE     Write the frames to FILE, which must not exist.
  --replay FILE     Show the frames of FILE in place of a run.
  --demo            Show a made-up job.
  --ascii           Draw with ASCII alone [default: as the locale says].
  --readonly        No key sends a signal.
  --prometheus [HOST:]PORT
                    Serve the run's numbers to Prometheus as well [HOST's
                    default: 127.0.0.1].
  -h, --help        Show this text; ? in the monitor shows the keys.

Leaving the monitor never touches the job. NO_COLOR is respected.

Exit status: 0; 2 if there is no such run or recording, or nothing to draw on.
"""

_FLAGS = ("--once", "--json", "--watch", "--demo", "--ascii", "--readonly", "--help", "-h")
_VALUES = ("--interval", "--record", "--replay", "--prometheus")
LEAST_INTERVAL = 0.1
MOST_INTERVAL = 3600.0


@dataclass
class _Options:
    flags: set[str] = field(default_factory=set)
    values: dict[str, str] = field(default_factory=dict)
    run: str | None = None

    @property
    def interval(self) -> float:
        text = self.values.get("--interval", "1")
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if not LEAST_INTERVAL <= seconds <= MOST_INTERVAL:
            raise DoctorError(
                f"option --interval needs seconds from {LEAST_INTERVAL} to {MOST_INTERVAL:.0f}, "
                f"not {text!r}"
            )
        return seconds


def main(words: Sequence[str]) -> int:
    """Watch a run.

    Raises:
        DoctorError: There is no such run, or no terminal.
    """
    options = _parse(words)
    if options.flags & {"-h", "--help"}:
        sys.stdout.write(HELP)
        return 0
    _check(options)
    if options.flags & {"--json", "--once"}:
        try:
            return _json(options) if "--json" in options.flags else _once(options)
        except BrokenPipeError:
            raise
        except OSError as error:
            what = error.filename or "cannot write the output"
            raise DoctorError(f"{what}: {error.strerror or error}") from None
    return _monitor(options)


def _parse(words: Sequence[str]) -> _Options:
    options, queue = _Options(), list(words)
    while queue:
        word = queue.pop(0)
        name, equals, given = word.partition("=")
        if name in _VALUES:
            if not equals and (not queue or queue[0].startswith("--")):
                raise DoctorError(f"option {name} needs a value", "`--help` says more")
            options.values[name] = given if equals else queue.pop(0)
        elif word in _FLAGS:
            options.flags.add(word)
        elif name in _FLAGS:
            raise DoctorError(f"option {name} takes no value")
        elif word.startswith("-") and word != "-":
            import difflib

            close = difflib.get_close_matches(name, [*_VALUES, *_FLAGS], n=1)
            hint = f"did you mean {close[0]}?" if close else "`ddpdoctor top --help` lists them"
            raise DoctorError(f"unknown option {name}", hint)
        elif options.run is None:
            options.run = word
        else:
            raise DoctorError(f"one run at a time: {options.run}, {word}")
    return options


def _check(options: _Options) -> None:
    sources = [name for name in ("--replay",) if name in options.values]
    sources += [name for name in ("--demo",) if name in options.flags]
    sources += [options.run] if options.run is not None else []
    if len(sources) > 1:
        raise DoctorError(f"one thing at a time: {' and '.join(sources)}")
    if {"--once", "--json"} <= options.flags:
        raise DoctorError("--once prints text and --json JSON: choose one")
    if "--watch" in options.flags and "--json" not in options.flags:
        raise DoctorError("--watch is for --json", "without both, the monitor shows every frame")
    once = "--once" in options.flags or options.flags & {"--json", "--watch"} == {"--json"}
    if once and "--prometheus" in options.values:
        raise DoctorError("--prometheus serves as long as the monitor runs, and one frame is short")


def _open(options: _Options) -> Source:
    from ddpdoctor.top.choosing import open_source

    return open_source(
        options.run,
        demo="--demo" in options.flags,
        replay=options.values.get("--replay"),
        interval=options.interval,
    )


def _ascii(options: _Options) -> bool:
    from ddpdoctor.render import terminal

    return "--ascii" in options.flags or terminal.only_ascii(
        sys.stdout, terminal.given_environment()
    )


def _once(options: _Options) -> int:
    from ddpdoctor.top import output
    from ddpdoctor.top.view import View

    view = View(ascii_only=_ascii(options), keys=False)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(contextlib.closing(_open(options)))
        output.picture(source, view, sys.stdout, _kept(options, stack))
    return 0


def _kept(options: _Options, stack: contextlib.ExitStack) -> Keep | None:
    """Where ``--record`` puts snapshots."""
    recording = _recording(options)
    if recording is None:
        return None
    return stack.enter_context(contextlib.closing(recording)).add


def _json(options: _Options) -> int:
    from ddpdoctor.top import output

    newest: list[Snapshot] = []

    with contextlib.ExitStack() as stack:
        source = stack.enter_context(contextlib.closing(_open(options)))
        record = _kept(options, stack)
        if "--watch" not in options.flags:
            output.once(source, sys.stdout, record)
            return 0

        def keep(snapshot: Snapshot) -> None:
            newest[:] = [snapshot]
            if record is not None:
                record(snapshot)

        exporter = _exporter(options, lambda: newest[0] if newest else None)
        if exporter is not None:
            stack.enter_context(contextlib.closing(exporter))
            print(f"ddpdoctor: {_served(exporter)}", file=sys.stderr)
        output.watch(source, sys.stdout, keep)
    return 0


def _exporter(options: _Options, latest: Callable[[], Snapshot | None]) -> Exporter | None:
    text = options.values.get("--prometheus")
    if text is None:
        return None
    from ddpdoctor.top import prometheus

    return prometheus.Exporter(prometheus.address(text), latest)


def _served(exporter: Exporter) -> str:
    return f"metrics are served at http://{exporter.place}/metrics"


def _monitor(options: _Options) -> int:
    from ddpdoctor.render import terminal
    from ddpdoctor.run import rundir

    if not terminal.is_interactive():
        raise DoctorError(
            "top needs a terminal" + (" (TERM is dumb)" if terminal.is_dumb() else ""),
            "--once prints one frame, --json --watch is for machines",
        )
    _ = options.interval
    # What a person named wrong is said before the screen is taken.
    if options.run is not None:
        rundir.find(options.run)
    if "--replay" in options.values:
        _open(options).close()
    runs = _runs(options)
    from ddpdoctor.top.app import TopApp
    from ddpdoctor.top.choosing import live_runs, open_source
    from ddpdoctor.top.view import View

    app = TopApp(
        lambda: _open(options),
        View(ascii_only=_ascii(options), readonly="--readonly" in options.flags),
        runs=runs,
        list_runs=None if _made_up(options) else live_runs,
        make_run=lambda path: open_source(path, interval=options.interval),
        record=None if "--replay" in options.values else _fresh_recording,
        recording=_recording(options),
    )
    with contextlib.ExitStack() as stack:
        exporter = _exporter(options, lambda: app.newest)
        if exporter is not None:
            stack.enter_context(contextlib.closing(exporter))
            app.say(_served(exporter))
        app.run()
    return app.return_code or 0


def _recording(options: _Options) -> Recording | None:
    name = options.values.get("--record")
    return None if name is None else _record_to(name)


def _fresh_recording() -> Recording:
    """A recording in the working directory, for the key."""
    return _record_to(f"ddpdoctor-top-{time.strftime('%Y%m%d-%H%M%S')}.jsonl")


def _record_to(name: str) -> Recording:
    from ddpdoctor.top.recording import Recording

    return Recording(name)


def _made_up(options: _Options) -> bool:
    return "--demo" in options.flags or "--replay" in options.values


def _runs(options: _Options) -> list[RunChoice]:
    """The live runs to choose from, if nothing was named."""
    if options.run is not None or _made_up(options):
        return []
    from ddpdoctor.top.choosing import live_runs

    return live_runs()
