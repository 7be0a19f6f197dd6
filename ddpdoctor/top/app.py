"""Run the monitor on a terminal: keys and frames in, one drawing per change out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

from rich.segment import Segment
from textual import events
from textual.app import App, ComposeResult
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from ddpdoctor.core import formatting
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.render.terminal import Line, Span, clean, fitted, merged, style_of, text_width
from ddpdoctor.top.draw import screen
from ddpdoctor.top.draw.drawing import Material
from ddpdoctor.top.frame_sources import RunChoice
from ddpdoctor.top.frames import Past, Point, Position, Reader, Source, Want
from ddpdoctor.top.snapshot import Snapshot, Verdict
from ddpdoctor.top.view import (
    ACTIONS,
    MOVES,
    VIEW_ACTIONS,
    Panel,
    View,
    apply_action,
    chosen_rank,
    type_into_filter,
)

if TYPE_CHECKING:
    from ddpdoctor.top.actions import SignalChoice, TakenStacks
    from ddpdoctor.top.recording import Recording


# -- the one widget: lines of text, of which only the changed stretches are written again


_NEAR_COLUMNS = 6
"""Columns between two stretches that are written as one."""


class Canvas(Widget, can_focus=True):
    """Shows lines that are as wide as it is."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: tuple[Line, ...] = ()
        self._strips: list[Strip] = []

    def show(self, lines: Sequence[Line]) -> None:
        """Show these lines in place of the last ones."""
        before, self._lines = self._lines, tuple(lines)
        regions: list[Region] = []
        strips: list[Strip] = []
        for y, line in enumerate(lines):
            if y < len(before) and before[y] == line:
                strips.append(self._strips[y])
                continue
            strips.append(_strip(line))
            stretches = changed_stretches(before[y] if y < len(before) else (), line)
            regions += [Region(first, y, last - first, 1) for first, last in stretches]
        self._strips = strips
        if len(before) != len(lines):
            self.refresh()
        elif regions:
            self.refresh(*regions)

    def render_line(self, y: int) -> Strip:
        """A line, as textual wants it."""
        width = self.size.width
        if y >= len(self._strips):
            return Strip.blank(width)
        strip = self._strips[y]
        return strip if strip.cell_length == width else strip.adjust_cell_length(width)


def _strip(line: Line) -> Strip:
    return Strip([Segment(text, style_of(style)) for text, style in merged(line)])


def changed_stretches(before: Line, after: Line) -> list[tuple[int, int]]:
    """The stretches of columns that differ, each with the column behind its last."""
    old, new = _cells(before), _cells(after)
    if old is None or new is None or len(old) != len(new):
        return [(0, max(1, sum(text_width(text) for text, _ in after)))]
    found: list[tuple[int, int]] = []
    for column, (one, other) in enumerate(zip(old, new, strict=True)):
        if one == other:
            continue
        if found and column - found[-1][1] <= _NEAR_COLUMNS:
            # To go on for a few columns costs less than to move the cursor.
            found[-1] = (found[-1][0], column + 1)
        else:
            found.append((column, column + 1))
    return found


def _cells(line: Line) -> list[Span] | None:
    """Each column of a line with its style; None if a character takes two of them, or none."""
    cells = [(each, style) for text, style in line for each in text]
    return cells if len(cells) == sum(text_width(text) for text, _ in line) else None


# -- the keys that ask for something beyond the snapshot, and what comes of it


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
        self._choices: tuple[SignalChoice, ...] = ()
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
        from ddpdoctor.top import actions

        snapshot, replayed = self._app.shown, self._app.replayed
        row = None if self._app.view.everyone else chosen_rank(snapshot, self._app.view)
        ranks = None if row is None else (row.rank,)
        self._app.material = replace(self._app.material, taken=None)

        def take() -> None:
            taken = actions.take_stacks(snapshot, replayed, ranks)
            self._app.call_later(self._show_stacks, taken)

        # Not the reader's thread: a rank that does not answer is waited for.
        Thread(target=take, name="stacks", daemon=True).start()
        if row is not None:
            self._app.material = replace(self._app.material, asked=("looking ...",))
            self._ask(
                lambda: actions.processes_below(row),
                lambda found: self._show_stacks(processes=found),
            )

    def _show_stacks(
        self, taken: TakenStacks | None = None, processes: tuple[str, ...] | None = None
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
        from ddpdoctor.top import actions

        def take() -> None:
            self._app.call_later(self._show_outlier, actions.take_stacks(snapshot, False, (rank,)))

        Thread(target=take, name="outlier", daemon=True).start()

    def _show_outlier(self, taken: TakenStacks) -> None:
        self._app.material = replace(self._app.material, outlier=taken)
        self._app.redraw()

    def _ask_attach(self) -> None:
        from ddpdoctor.top import actions

        if self._app.view.panel == "attach":
            self._app.view = self._app.view.shown("")
            return
        snapshot = self._app.shown
        self._ask(lambda: actions.attach_lines(snapshot), lambda lines: self._show("attach", lines))

    def _write(self) -> None:
        from ddpdoctor.top import actions

        snapshot = self._app.shown
        if self._app.view.panel == "attach":
            self._ask(lambda: actions.write_launch_json(snapshot), self._app.answer)

    def _ask_signal(self) -> None:
        from ddpdoctor.top import actions

        if self._app.view.readonly:
            self._app.say("signals are off: --readonly")
            return
        if self._app.replayed:
            self._app.say("this is a replay: there is nothing to signal")
            return
        self._app.frozen = True
        snapshot, cursor = self._app.shown, self._app.view.cursor
        row = next((row for row in snapshot.ranks if row.rank == cursor), None)

        def show(found: tuple[SignalChoice, ...]) -> None:
            self._choices = found
            self._show("signal", tuple(choice.words for choice in found))

        self._ask(lambda: actions.signal_choices(snapshot, row), show)

    def _send(self) -> None:
        from ddpdoctor.top import actions

        chosen = self._choices[self._app.view.item :][:1]
        self._app.do("escape")
        for choice in chosen:
            try:
                self._app.say(actions.send_signal(choice))
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
            f"{formatting.age(None if run.started is None else now - run.started):>4}  "
            f"{formatting.count(run.ranks, 'rank')}  {run.command} ({run.id})"
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


# -- the monitor on a terminal: keys and frames in, one drawing per change out


WIDE = 160
"""Columns from which there is room for the stack of the rank that is blamed."""

STACK_EVERY = 10.0
"""Seconds between two stacks of it."""

MESSAGE = 10.0
"""Seconds for which a line stays that a key had to say."""

_SCROLLED = ("help", "environment", "stacks", "attach")
_IN_QUESTION = ("down", "up", "first", "last", "open", "escape", "quit")
_LOOKS_ELSEWHERE = (*MOVES, "sort", "turn", "nodes")


class TopApp(App[None]):
    """The monitor.

    Args:
        make: Makes the source of frames; called in the reader's thread.
        view: How to begin.
        runs: The live runs to choose from at first, if there are several.
        list_runs: Lists them again, whenever a person asks; called in the reader's thread.
        make_run: Makes the source for a chosen run.
        record: Starts a recording; None where there is nothing to record.
        recording: One that has started.
    """

    CSS_PATH = "app.tcss"
    TITLE = "ddpdoctor top"
    ENABLE_COMMAND_PALETTE = False
    ALLOW_SELECT = False

    def __init__(
        self,
        make: Callable[[], Source],
        view: View,
        *,
        runs: Sequence[RunChoice] = (),
        list_runs: Callable[[], Sequence[RunChoice]] | None = None,
        make_run: Callable[[str], Source] | None = None,
        record: Callable[[], Recording] | None = None,
        recording: Recording | None = None,
    ) -> None:
        super().__init__(ansi_color=True)
        self.animation_level = "none"
        self.view = replace(view, recording="" if recording is None else recording.path)
        self.shown = Snapshot(0.0, "run", Verdict("reading ...", "info"), live=True)
        self.drawn = screen.Frame(())
        self._record = record
        self._recording = recording
        self._past = Past()
        self._back = 0
        """Frames that the picture is behind the newest one."""
        self._slot: tuple[Snapshot, Position] | None = None
        """The newest frame, until it is shown."""
        self._newest = self.shown
        self.material = Material()
        self.frozen = False
        """What a person aims at must not move while they aim."""
        self.replayed = False
        self._message = ("", 0.0)
        """What is said, and since when."""
        self._canvas = Canvas()
        self.reader = Reader(make, self._deliver, self._trouble, self._before)
        self._questions = Questions(self, tuple(runs), list_runs, make_run)

    @property
    def newest(self) -> Snapshot | None:
        """The last frame that came, whatever is shown."""
        return self._newest if self._newest.time else None

    # -- textual

    def compose(self) -> ComposeResult:
        """The one widget."""
        yield self._canvas

    def on_mount(self) -> None:
        """Paint before the first reading, then read."""
        self._canvas.focus()
        # The shell had the screen in between: nothing of the picture is left on it.
        self.app_resume_signal.subscribe(self, lambda _: self._refresh_all())
        if len(self._questions.runs) > 1:
            self._questions.show_runs()
        self.redraw()
        self.reader.start()

    def on_unmount(self) -> None:
        """Stop reading; the job does not notice."""
        self._stop_recording()
        self.reader.stop()

    def on_resize(self, event: events.Resize) -> None:
        """Draw for the new size."""
        self.redraw()

    async def on_event(self, event: events.Event) -> None:
        """All keys are ours, before textual's own bindings see them."""
        if isinstance(event, events.Key) and self.is_running and len(self.screen_stack) == 1:
            event.stop()
            self._key(event.key, event.character)
            return
        await super().on_event(event)

    # -- frames (called in the reader's thread; call_later leads back to the app's)

    def _deliver(self, snapshot: Snapshot, position: Position) -> None:
        waiting, self._slot = self._slot is not None, (snapshot, position)
        if self._recording is not None:
            try:
                self._recording.add(snapshot)
            except DoctorError as error:
                self._recording = None
                self.call_later(self.answer, f"recording stopped: {error}")
        if not waiting:
            self.call_later(self._arrived)

    def _trouble(self, text: str) -> None:
        self.call_later(self._failed, text)

    def _before(self, points: list[Point]) -> None:
        self.call_later(self._past.before, points)

    # -- frames

    def _arrived(self) -> None:
        """A frame has come; it is shown unless the picture is held."""
        taken, self._slot = self._slot, None
        if taken is None:
            return
        self._newest, position = taken
        self.replayed = position is not None
        self.view = replace(self.view, trouble="")
        if not self.replayed or not self._past.points:
            self._past.add(self._newest)
        if not self.replayed and self.view.paused:
            self._back = min(self._back + 1, len(self._past.frames) - 1)
        if self.size.width >= WIDE and not self.replayed:
            self._questions.take_outlier(self._newest, STACK_EVERY)
        outdated = self._outdated()
        held = self.frozen or (self.view.paused and not self.replayed)
        if not held:
            self.shown = self._newest
            self.view = replace(self.view, position=position)
        if outdated or not held:
            self.redraw()

    def _outdated(self) -> bool:
        """Take back a message that has stood for long; whether there was one."""
        text, since = self._message
        if self.view.message != text:
            self._message = (self.view.message, time.monotonic())
            return False
        if not text or time.monotonic() - since < MESSAGE:
            return False
        self.say("")
        return True

    def _failed(self, text: str) -> None:
        """The source has failed."""
        self.frozen = self.frozen and self.view.panel == "signal"
        self.view = replace(self.view, trouble=text, message="")
        self.redraw()

    # -- drawing

    def redraw(self) -> None:
        """Draw what is to be seen now."""
        width, height = self.size
        try:
            material = replace(self.material, points=tuple(self._past.points))
            self.drawn = screen.draw_screen(self.shown, self.view, width, height, material)
        except Exception as error:
            # A fault in a panel is a line on the screen, and the other panels still work.
            text = f"x {type(error).__name__} in the monitor: {error} (esc: back)"
            line = ((clean(text, self.view.ascii_only), "error"),)
            blank = fitted((), width)
            self.drawn = screen.Frame((fitted(line, width), *[blank] * (height - 1)))
        if self.drawn.lines:
            self.view = replace(self.view, top=self.drawn.top)
            if self.view.panel in _SCROLLED or (self.view.expanded and not self.view.panel):
                self.view = replace(self.view, item=self.drawn.item)
            self._canvas.show(self.drawn.lines)
        self._want()

    def _want(self) -> None:
        """Have those ranks read that are in sight; of a recording, all of them."""
        before = self.reader.want
        # Behind a panel the board stays what it was.
        seen = before.ranks if self.drawn.visible is None else self.drawn.visible
        want = Want(seen if self._recording is None else None)
        if want != before:
            self.reader.want = want
            if want.ranks and not before.ranks:
                # Which ranks are in sight is known only now: their trends need not wait.
                self.reader.wake()

    def _refresh_all(self) -> None:
        self.redraw()
        self._canvas.refresh()

    # -- keys

    def _key(self, key: str, character: str | None) -> None:
        if self.view.typing:
            self.view = type_into_filter(self.view, key, character)
            self.redraw()
            return
        name = ACTIONS.get(key) or ACTIONS.get(character or "")
        if name is not None:
            self.do(name)

    def on_paste(self, event: events.Paste) -> None:
        """Text into the filter; anywhere else it is not taken for keys."""
        if self.view.typing:
            for character in event.text.partition("\n")[0]:
                self.view = type_into_filter(self.view, character, character)
            self.redraw()

    def do(self, name: str) -> None:
        """What a key does."""
        if self.view.panel == "signal" and name not in _IN_QUESTION:
            return
        own = self._own().get(name)
        if own is not None:
            own()
            if name in ("quit", "suspend"):
                return
        elif name in VIEW_ACTIONS:
            self._change_view(name)
        self.redraw()
        if name in _LOOKS_ELSEWHERE:
            # Ranks that have come into sight get their trend now rather than with the next frame.
            self.reader.wake()

    def _change_view(self, name: str) -> None:
        before = self.view.panel
        view = apply_action(self.view, self.shown, name)
        if view.panel in ("runs", "signal"):
            # The selection of a list stays on it.
            view = replace(view, item=max(0, min(view.item, len(self.material.asked) - 1)))
        self.view = view
        if name == "stacks" and view.panel == "stacks":
            self._questions.take_stacks()
        if before == "signal" and view.panel != "signal":
            self.frozen = False
            self.shown = self.shown if view.paused else self._newest

    def _own(self) -> dict[str, Callable[[], None]]:
        """The actions that do more than to change the view."""
        own: dict[str, Callable[[], None]] = {
            "quit": self._quit,
            "pause": self._pause,
            "back": lambda: self._scrub(-1),
            "forth": lambda: self._scrub(1),
            "far back": lambda: self._scrub(-1, tenths=True),
            "far forth": lambda: self._scrub(1, tenths=True),
            "record": self._toggle_recording,
            "suspend": self.action_suspend_process,
            "redraw": self._refresh_all,
            **self._questions.actions(),
        }
        if self.view.panel == "signal":
            own["quit"] = lambda: self.do("escape")
        return own

    def _quit(self) -> None:
        self.reader.stop()
        self.exit()

    def say(self, text: str) -> None:
        """Have a line said below the board."""
        self.view = replace(self.view, message=text)

    def _pause(self) -> None:
        paused = not self.view.paused
        self.reader.playing = not paused
        self._back = 0
        self.view = replace(self.view, paused=paused, message="")
        if not paused:
            if not self.replayed:
                self.shown = self._newest
                self.view = replace(self.view, position=None)
            self.reader.wake()

    def _scrub(self, by: int, *, tenths: bool = False) -> None:
        if self.replayed:
            count = self.view.position[1] if self.view.position is not None else 1
            self.view = replace(self.view, paused=True)
            self.reader.step(by * max(1, count // 10) if tenths else by)
            return
        frames = self._past.frames
        if not frames:
            self.say("there is no frame to go to yet")
            return
        if not self.view.paused:
            self._pause()
        by *= max(1, len(frames) // 10) if tenths else 1
        self._back = max(0, min(self._back - by, len(frames) - 1))
        at = len(frames) - 1 - self._back
        self.shown = frames[at]
        self.view = replace(self.view, position=(at, len(frames)), message="")

    def answer(self, text: str) -> None:
        """Have a line said that comes later than the key that asked for it."""
        self.say(text)
        self.redraw()

    # -- recording

    def _toggle_recording(self) -> None:
        if self._recording is not None:
            name = self._recording.path
            self._stop_recording()
            self.say(f"recorded to {name}")
        elif self._record is None:
            self.say("a recording cannot be recorded")
        else:
            try:
                self._recording = self._record()
            except DoctorError as error:
                self.say(str(error))
                return
            name = self._recording.path
            self.view = replace(
                self.view, recording=name, message=f"recording to {name}; r ends it"
            )

    def _stop_recording(self) -> None:
        recording, self._recording = self._recording, None
        self.view = replace(self.view, recording="")
        if recording is not None:
            recording.close()

    # -- the mouse

    def on_click(self, event: events.Click) -> None:
        """A line is selected; the selected one opens. Nothing is sent by a click alone."""
        if event.y in self.drawn.entries:
            item = self.drawn.entries[event.y]
            if item == self.view.item and self.view.panel == "findings":
                self.do("open")
                return
            self.view = replace(self.view, item=item, opened=False)
        elif event.y in self.drawn.ranks and not self.view.panel:
            rank = self.drawn.ranks[event.y]
            if rank == self.view.cursor:
                self.do("open")
                return
            self.view = replace(self.view, cursor=rank)
        self.redraw()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Down."""
        self.do("down")

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Up."""
        self.do("up")
