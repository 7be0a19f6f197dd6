"""``ddpdoctor top``: show a live run."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.options import DIRECTORY, FILE, Given, Parser, seconds, text

if TYPE_CHECKING:
    from ddpdoctor.top.frames import Source
    from ddpdoctor.top.output import Keep
    from ddpdoctor.top.snapshot import Snapshot
    from ddpdoctor.top.view import View

PARSER = Parser(
    "top",
    """\
Usage: ddpdoctor top [OPTIONS] [RUN|DIR]

Show every rank of a live run: where its steps go, which rank holds up the
others, GPU memory, utilization and power, and the findings so far. A finished
run shows its end; `,` and `.` go through its steps.

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
  --record FILE     Write the frames to FILE, which must not exist (gzip).
  --replay FILE     Show the frames of FILE in place of a run; with --once, the
                    last one.
  --demo            Show a made-up job.
  --workspace DIR   Show only runs of this folder, for an editor.
  --ascii           Draw with ASCII alone [default: as the locale says].
  --readonly        No key sends a signal.
  --prometheus [HOST:]PORT
                    Serve the run's numbers to Prometheus as well, and without
                    a terminal nothing else [HOST's default: 127.0.0.1].
  -h, --help        Show this text; ? in the monitor shows the keys.

Leaving the monitor never touches the job. NO_COLOR is respected.

Exit status: 0; 2 if there is no such run or recording, or nothing to draw on.
""",
    {
        "--interval": seconds(0.1, 3600),
        "--workspace": DIRECTORY,
        "--record": FILE,
        "--replay": FILE,
        "--prometheus": text("PORT or HOST:PORT"),
    },
)


def main(words: Sequence[str]) -> int:
    """Watch a run."""
    given = PARSER.read(words)
    run = PARSER.one_run(given)
    _check(given, run)
    if "--json" not in given and "--once" not in given:
        return _monitor(given, run)
    try:
        return _json(given, run) if "--json" in given else _once(given, run)
    except BrokenPipeError:
        raise
    except OSError as error:
        what = error.filename or "cannot write the output"
        raise DoctorError(f"{what}: {error.strerror or error}") from None


def _check(given: Given, run: str | None) -> None:
    sources = [name for name in ("--replay", "--demo") if name in given]
    sources += [run] if run is not None else []
    if sources and "--workspace" in given:
        raise DoctorError(f"--workspace chooses a run, and so does {sources[0]}", "leave one out")
    if len(sources) > 1:
        raise DoctorError(f"one thing at a time: {' and '.join(sources)}")
    if "--once" in given and "--json" in given:
        raise DoctorError("--once prints text and --json JSON: choose one")
    if "--watch" in given and "--json" not in given:
        raise DoctorError("--watch is for --json", "without both, the monitor shows every frame")
    once = "--once" in given or ("--json" in given and "--watch" not in given)
    if once and "--prometheus" in given:
        raise DoctorError(
            "--prometheus is for the monitor and for --json --watch, not for one frame"
        )


def _open(given: Given, run: str | None) -> Source:
    from ddpdoctor.top.frame_sources import open_source

    return open_source(
        run,
        demo="--demo" in given,
        replay=given.get("--replay"),
        interval=given.get("--interval", 1.0),
        folder=given.get("--workspace"),
    )


def _view(given: Given, *, keys: bool = True) -> View:
    from ddpdoctor.render import terminal
    from ddpdoctor.top.view import View

    ascii_only = "--ascii" in given or terminal.only_ascii(sys.stdout, terminal.given_environment())
    readonly = "--readonly" in given
    return View(
        ascii_only=ascii_only, colour=terminal.wants_colour(1), keys=keys, readonly=readonly
    )


def _once(given: Given, run: str | None) -> int:
    from ddpdoctor.top import output

    view = _view(given, keys=False)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(contextlib.closing(_open(given, run)))
        output.picture(source, view, sys.stdout, _kept(given, stack))
    return 0


def _kept(given: Given, stack: contextlib.ExitStack) -> Keep | None:
    """Return the function that adds a snapshot to the file of ``--record``."""
    from ddpdoctor.top.recording import Recording

    if "--record" not in given:
        return None
    return stack.enter_context(contextlib.closing(Recording(given.options["--record"]))).add


def _json(given: Given, run: str | None) -> int:
    from ddpdoctor.top import output

    newest: list[Snapshot] = []

    with contextlib.ExitStack() as stack:
        source = stack.enter_context(contextlib.closing(_open(given, run)))
        record = _kept(given, stack)
        if "--watch" not in given:
            output.once(source, sys.stdout, record)
            return 0

        def keep(snapshot: Snapshot) -> None:
            newest[:] = [snapshot]
            if record is not None:
                record(snapshot)

        _export(given, stack, lambda: newest[0] if newest else None, _print_error)
        output.watch(source, sys.stdout, keep)
    return 0


def _serve(given: Given, run: str | None) -> int:
    """Serve metrics without a display until the run is over, or until Ctrl-C without a run."""
    from ddpdoctor.top.frames import WANT_ALL

    newest: list[Snapshot] = []
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(contextlib.closing(_open(given, run)))
        record = _kept(given, stack)
        _export(given, stack, lambda: newest[0] if newest else None, _print_error)
        while True:
            newest[:] = [source.read(WANT_ALL)]
            if record is not None:
                record(newest[0])
            over = newest[0].kind == "run" and not newest[0].live
            if over and run is not None:
                return 0
            time.sleep(source.interval)


def _export(
    given: Given,
    stack: contextlib.ExitStack,
    latest: Callable[[], Snapshot | None],
    say: Callable[[str], object],
) -> None:
    """Serve the newest snapshot to Prometheus, with ``--prometheus``."""
    if "--prometheus" in given:
        from ddpdoctor.top import prometheus

        exporter = prometheus.Exporter(prometheus.address(given.options["--prometheus"]), latest)
        stack.enter_context(contextlib.closing(exporter))
        say(f"metrics are served at http://{exporter.place}/metrics")


def _print_error(text: str) -> None:
    print(f"ddpdoctor: {text}", file=sys.stderr, flush=True)


def _monitor(given: Given, run: str | None) -> int:
    from ddpdoctor.render import terminal
    from ddpdoctor.run import rundir

    if not terminal.is_interactive():
        if "--prometheus" in given:
            return _serve(given, run)
        raise DoctorError(
            "top needs a terminal" + (" (TERM is dumb)" if terminal.is_dumb() else ""),
            "--once prints one frame, --json --watch is for programs",
        )
    # Report a wrong name before the screen is taken.
    if run is not None:
        rundir.find(run)
    if "--replay" in given:
        _open(given, run).close()
    from ddpdoctor.top.app import TopApp
    from ddpdoctor.top.frame_sources import live_runs, open_source
    from ddpdoctor.top.recording import Recording

    made_up = "--demo" in given or "--replay" in given
    list_runs = partial(live_runs, given.get("--workspace"))

    def new_recording() -> Recording:
        """Start a recording in the working directory, for the key."""
        return Recording(f"ddpdoctor-top-{time.strftime('%Y%m%d-%H%M%S')}.jsonl.gz")

    app = TopApp(
        lambda: _open(given, run),
        _view(given),
        # Without a named run, the user chooses one of these.
        runs=[] if run is not None or made_up else list_runs(),
        list_runs=None if made_up else list_runs,
        make_run=lambda path: open_source(path, interval=given.get("--interval", 1.0)),
        record=None if "--replay" in given else new_recording,
        recording=Recording(given.options["--record"]) if "--record" in given else None,
    )
    with contextlib.ExitStack() as stack:
        _export(given, stack, lambda: app.newest, app.say)
        app.run()
    return app.return_code or 0
