"""The keys that ask for something beyond the snapshot, and what comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.core import units
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.top.choosing import RunChoice
from ddpdoctor.top.source import Source
from ddpdoctor.top.view import Panel, chosen

if TYPE_CHECKING:
    from ddpdoctor.top.app import TopApp
    from ddpdoctor.top.ask import Taken
    from ddpdoctor.top.signals import Choice
    from ddpdoctor.top.snapshot import Snapshot

T = TypeVar("T")


class Questions:
    """Finds things in other threads, and shows them in their panels.

    What it finds them with is imported when a key is pressed: a first paint has no use for it.

    Args:
        app: Shows them.
        runs: The live runs to choose from.
        list_runs: Lists them again; called in the reader's thread.
        make_run: Makes the source for a chosen run.
    """

    def __init__(
        self,
        app: TopApp,
        runs: tuple[RunChoice, ...],
        list_runs: Callable[[], Sequence[RunChoice]] | None,
        make_run: Callable[[str], Source] | None,
    ) -> None:
        self._app = app
        self.runs = runs
        self._list_runs = list_runs
        self._make_run = make_run
        self._choices: tuple[Choice, ...] = ()
        self._outlier_due = 0.0

    def actions(self) -> dict[str, Callable[[], None]]:
        """What the keys do now."""
        opens = {"runs": self._choose_run, "signal": self._send}.get(self._app.view.panel)
        return {
            "attach": self._ask_attach,
            "write": self._write,
            "signal": self._ask_signal,
            "choose": self._ask_runs,
            **({"open": opens} if opens is not None else {}),
        }

    def _ask(self, find: Callable[[], T], take: Callable[[T], None]) -> None:
        """Have something found in the reader's thread, and taken in this one."""

        def task() -> None:
            try:
                self._app.call_later(take, find())
            except DoctorError as error:
                self._app.frozen = False
                self._app.call_later(self._app.answer, str(error))

        self._app.reader.ask(task)

    def _show(self, panel: Panel, asked: tuple[str, ...]) -> None:
        """What a key asked for is there: it is shown in its panel."""
        self._app.material = replace(self._app.material, asked=asked)
        if self._app.view.panel != panel:
            self._app.view = self._app.view.shown(panel)
        self._app.say("")
        self._app.redraw()

    def take_stacks(self) -> None:
        """Take the stacks, and for one rank the processes below it; show them when they come."""
        from ddpdoctor.top import ask

        snapshot, replayed = self._app.shown, self._app.replayed
        row = None if self._app.view.everyone else chosen(snapshot, self._app.view)
        ranks = None if row is None else (row.rank,)
        self._app.material = replace(self._app.material, taken=None)

        def take() -> None:
            taken = ask.take(snapshot, replayed, ranks)
            self._app.call_later(self._show_stacks, taken)

        # Not the reader's thread: a rank that does not answer is waited for.
        Thread(target=take, name="stacks", daemon=True).start()
        if row is not None:
            self._app.material = replace(self._app.material, asked=("looking ...",))
            self._ask(
                lambda: ask.processes_below(row),
                lambda found: self._show_stacks(processes=found),
            )

    def _show_stacks(
        self, taken: Taken | None = None, processes: tuple[str, ...] | None = None
    ) -> None:
        """What was asked for of the stacks' panel is there; it may be closed by now."""
        if self._app.view.panel == "stacks":
            before = self._app.material
            asked = before.asked if processes is None else processes
            self._app.material = replace(before, taken=taken or before.taken, asked=asked)
            self._app.redraw()

    def take_outlier(self, snapshot: Snapshot, every: float) -> None:
        """Take the stack of the rank that is blamed, if the last one is ``every`` seconds old."""
        rank, now = snapshot.verdict.rank, time.monotonic()
        row = next((row for row in snapshot.ranks if row.rank == rank), None)
        running = row is not None and row.state in ("running", "stale")
        if not running or rank is None or not snapshot.live or snapshot.kind != "run":
            self._app.material = replace(self._app.material, outlier=None)
            return
        if now < self._outlier_due:
            return
        self._outlier_due = now + every
        from ddpdoctor.top import ask

        def take() -> None:
            self._app.call_later(self._show_outlier, ask.take(snapshot, False, (rank,)))

        Thread(target=take, name="outlier", daemon=True).start()

    def _show_outlier(self, taken: Taken) -> None:
        self._app.material = replace(self._app.material, outlier=taken)
        self._app.redraw()

    def _ask_attach(self) -> None:
        from ddpdoctor.top import ask

        if self._app.view.panel == "attach":
            self._app.view = self._app.view.shown("")
            return
        snapshot = self._app.shown
        self._ask(lambda: ask.attach_lines(snapshot), lambda lines: self._show("attach", lines))

    def _write(self) -> None:
        from ddpdoctor.top import ask

        snapshot = self._app.shown
        if self._app.view.panel == "attach":
            self._ask(lambda: ask.write_launch_json(snapshot), self._app.answer)

    def _ask_signal(self) -> None:
        from ddpdoctor.top import signals

        if self._app.view.readonly:
            self._app.say("signals are off: --readonly")
            return
        if self._app.replayed:
            self._app.say("this is a replay: there is nothing to signal")
            return
        self._app.frozen = True
        snapshot, cursor = self._app.shown, self._app.view.cursor
        row = next((row for row in snapshot.ranks if row.rank == cursor), None)

        def show(found: tuple[Choice, ...]) -> None:
            self._choices = found
            self._show("signal", tuple(choice.words for choice in found))

        self._ask(lambda: signals.choices(snapshot, row), show)

    def _send(self) -> None:
        from ddpdoctor.top import signals

        chosen = self._choices[self._app.view.item :][:1]
        self._app.do("escape")
        for choice in chosen:
            try:
                self._app.say(signals.send(choice))
            except DoctorError as error:
                self._app.say(str(error))

    def _ask_runs(self) -> None:
        list_runs = self._list_runs
        if list_runs is None or self._app.view.panel == "runs":
            self.show_runs()
            return

        def show(runs: Sequence[RunChoice]) -> None:
            self.runs = tuple(runs)
            self._app.say("")
            if self._app.view.panel != "runs":
                self.show_runs()
            self._app.redraw()

        self._ask(list_runs, show)

    def show_runs(self) -> None:
        """The runs, to choose one."""
        if not self.runs:
            self._app.say("there are no live runs to choose from")
            return
        now = time.time()
        asked = tuple(
            f"{units.age(None if run.started is None else now - run.started):>4}  "
            f"{units.count(run.ranks, 'rank')}  {run.command} ({run.id})"
            for run in self.runs
        )
        self._app.material = replace(self._app.material, asked=asked)
        self._app.view = self._app.view.shown("runs")

    def _choose_run(self) -> None:
        run = self.runs[min(self._app.view.item, len(self.runs) - 1)]
        make = self._make_run
        self._app.view = replace(self._app.view, panel="", item=0, cursor=None, expanded=False)
        if make is not None:
            self._app.reader.switch(lambda: make(run.path))
