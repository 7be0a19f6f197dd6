"""Run the monitor on a terminal: read keys and frames, and draw once per change."""

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
from ddpdoctor.top.draw.drawing import Frame, ScreenData
from ddpdoctor.top.frame_sources import RunChoice
from ddpdoctor.top.frames import History, Position, Reader, Source, Visible
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

T = TypeVar("T")

_MAX_GAP = 6  # Maximum number of columns between two ranges that are merged


class Canvas(Widget, can_focus=True):
    """Shows lines of its width, and redraws only changed ranges."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: tuple[Line, ...] = ()
        self._strips: list[Strip] = []

    def show(self, lines: Sequence[Line]) -> None:
        """Replace the lines."""
        before, self._lines = self._lines, tuple(lines)
        regions: list[Region] = []
        strips: list[Strip] = []
        for y, line in enumerate(lines):
            if y < len(before) and before[y] == line:
                strips.append(self._strips[y])
                continue
            strips.append(Strip([Segment(text, style_of(style)) for text, style in merged(line)]))
            stretches = changed_stretches(before[y] if y < len(before) else (), line)
            regions += [Region(first, y, last - first, 1) for first, last in stretches]
        self._strips = strips
        if len(before) != len(lines):
            self.refresh()
        elif regions:
            self.refresh(*regions)

    def render_line(self, y: int) -> Strip:
        """Return a line, as textual asks for it."""
        width = self.size.width
        if y >= len(self._strips):
            return Strip.blank(width)
        strip = self._strips[y]
        return strip if strip.cell_length == width else strip.adjust_cell_length(width)


def changed_stretches(before: Line, after: Line) -> list[tuple[int, int]]:
    """Return the ranges of differing columns, as the first one and the one after the last."""

    def cells(line: Line) -> list[Span] | None:
        # None if a character is two columns wide, or zero.
        found = [(each, style) for text, style in line for each in text]
        return found if len(found) == sum(text_width(text) for text, _ in line) else None

    old, new = cells(before), cells(after)
    if old is None or new is None or len(old) != len(new):
        return [(0, max(1, sum(text_width(text) for text, _ in after)))]
    found: list[tuple[int, int]] = []
    for column, (one, other) in enumerate(zip(old, new, strict=True)):
        if one == other:
            continue
        if found and column - found[-1][1] <= _MAX_GAP:
            # Writing a few more columns costs less than moving the cursor.
            found[-1] = (found[-1][0], column + 1)
        else:
            found.append((column, column + 1))
    return found


class Questions:
    """The keys that need data beyond the snapshot, which other threads gather.

    Modules for them are imported when a key is pressed, to speed up the first screen.
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
        """Return the current actions of the keys."""
        opens = {"runs": self._choose_run, "signal": self._send}.get(self._app.view.panel)
        return {
            "attach": self._ask_attach,
            "write": self._write,
            "signal": self._ask_signal,
            "choose": self._ask_runs,
            **({"open": opens} if opens is not None else {}),
        }

    def _ask(self, find: Callable[[], T], take: Callable[[T], None]) -> None:
        """Call ``find`` in the reader's thread, and ``take`` with its result in this one."""

        def task() -> None:
            try:
                self._app.call_later(take, find())
            except DoctorError as error:
                self._app.frozen = False
                self._app.call_later(self._app.answer, str(error))

        self._app.reader.ask(task)

    def _show(self, panel: Panel, asked: tuple[str, ...]) -> None:
        """Show the answer to a key in its panel."""
        self._app.material = replace(self._app.material, asked=asked)
        if self._app.view.panel != panel:
            self._app.view = self._app.view.toggled(panel)
        self._app.answer("")

    def take_stacks(self) -> None:
        """Take the stacks, and for one rank list the processes below it."""
        from ddpdoctor.top import actions

        app = self._app
        snapshot, replayed = app.shown, app.replayed
        row = None if app.view.everyone else chosen_rank(snapshot, app.view)
        ranks = None if row is None else (row.rank,)
        app.material = replace(app.material, taken=None)

        def show(**found: TakenStacks | tuple[str, ...]) -> None:
            # The panel may be closed by now.
            if app.view.panel == "stacks":
                app.material = replace(app.material, **found)  # type: ignore[arg-type]
                app.redraw()

        def take() -> None:
            taken = actions.take_stacks(snapshot, replayed, ranks)
            app.call_later(lambda: show(taken=taken))

        # Use a separate thread, because a rank may not respond for a while.
        Thread(target=take, name="stacks", daemon=True).start()
        if row is not None:
            app.material = replace(app.material, asked=("looking ...",))
            self._ask(lambda: actions.processes_below(row), lambda found: show(asked=found))

    def take_outlier(self, snapshot: Snapshot, interval: float) -> None:
        """Take the stack of the blamed rank if the last one is older than ``interval`` seconds."""
        app, rank, now = self._app, snapshot.verdict.rank, time.monotonic()
        row = next((row for row in snapshot.ranks if row.rank == rank), None)
        running = row is not None and row.state in ("running", "stale")
        if not running or rank is None or not snapshot.live or snapshot.kind != "run":
            app.material = replace(app.material, outlier=None)
            return
        if now < self._outlier_due:
            return
        self._outlier_due = now + interval
        from ddpdoctor.top import actions

        def show(taken: TakenStacks) -> None:
            app.material = replace(app.material, outlier=taken)
            app.redraw()

        def take() -> None:
            app.call_later(show, actions.take_stacks(snapshot, False, (rank,)))

        Thread(target=take, name="outlier", daemon=True).start()

    def _ask_attach(self) -> None:
        from ddpdoctor.top import actions

        if self._app.view.panel == "attach":
            self._app.view = self._app.view.toggled("attach")
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
        if self._list_runs is None or self._app.view.panel == "runs":
            self.show_runs()
            return

        def show(runs: Sequence[RunChoice]) -> None:
            self.runs = tuple(runs)
            self._app.say("")
            if self._app.view.panel != "runs":
                self.show_runs()
            self._app.redraw()

        self._ask(self._list_runs, show)

    def show_runs(self) -> None:
        """List the runs, to choose one."""
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
        self._app.view = self._app.view.toggled("runs")

    def _choose_run(self) -> None:
        run = self.runs[min(self._app.view.item, len(self.runs) - 1)]
        make = self._make_run
        self._app.view = replace(self._app.view, panel="", item=0, cursor=None, expanded=False)
        if make is not None:
            self._app.reader.switch(lambda: make(run.path))


WIDE = 160  # Minimum number of columns to show the stack of the blamed rank
STACK_INTERVAL = 10.0  # Seconds between two stacks of that rank
MESSAGE_TIMEOUT = 10.0  # Seconds for which the message of a key stays

_SCROLLED = ("help", "environment", "stacks", "attach")
_IN_QUESTION = ("down", "up", "first", "last", "open", "escape", "quit")
_CHANGES_VISIBLE = (*MOVES, "sort", "turn", "nodes")


class TopApp(App[None]):
    """The monitor.

    Args:
        make: Makes the source of frames; called in the reader's thread.
        view: The initial view.
        runs: The live runs to choose from at first, if there are several.
        list_runs: Lists them again; called in the reader's thread.
        make_run: Makes the source for a chosen run.
        record: Starts a recording. None if there is nothing to record.
        recording: A recording that has already started.
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
        self.drawn = Frame(())
        self._record = record
        self._recording = recording
        self._past = History()
        self._back = 0  # Number of frames between the picture and the newest one
        self._slot: tuple[Snapshot, Position] | None = None  # The newest frame, until it is shown
        self._newest = self.shown
        self.material = ScreenData()
        self.frozen = False  # Freeze the picture while a question is open
        self.replayed = False
        self._message = ("", 0.0)  # The message, and the time at which it appeared
        self._canvas = Canvas()
        self.reader = Reader(
            make,
            self._deliver,
            lambda text: self.call_later(self._failed, text),
            lambda points: self.call_later(self._past.add_earlier, points),
        )
        self._questions = Questions(self, tuple(runs), list_runs, make_run)

    @property
    def newest(self) -> Snapshot | None:
        """The last frame received, even if another one is shown."""
        return self._newest if self._newest.time else None

    # -- textual

    def compose(self) -> ComposeResult:
        """Yield the only widget."""
        yield self._canvas

    def on_mount(self) -> None:
        """Draw before the first frame is read, then start reading."""
        self._canvas.focus()
        # The shell has overwritten the screen, so draw everything.
        self.app_resume_signal.subscribe(self, lambda _: self._refresh_all())
        if len(self._questions.runs) > 1:
            self._questions.show_runs()
        self.redraw()
        self.reader.start()

    def on_unmount(self) -> None:
        """Stop reading."""
        self._stop_recording()
        self.reader.stop()

    def on_resize(self, event: events.Resize) -> None:
        """Draw for the new size."""
        self.redraw()

    async def on_event(self, event: events.Event) -> None:
        """Handle all keys before textual's own bindings."""
        if isinstance(event, events.Key) and self.is_running and len(self.screen_stack) == 1:
            event.stop()
            if self.view.typing:
                self.view = type_into_filter(self.view, event.key, event.character)
                self.redraw()
                return
            name = ACTIONS.get(event.key) or ACTIONS.get(event.character or "")
            if name is not None:
                self.do(name)
            return
        await super().on_event(event)

    def on_paste(self, event: events.Paste) -> None:
        """Paste text into the filter. Ignore it elsewhere."""
        if self.view.typing:
            for character in event.text.partition("\n")[0]:
                self.view = type_into_filter(self.view, character, character)
            self.redraw()

    def on_click(self, event: events.Click) -> None:
        """Select a line, or open the selected one. A click never sends a signal."""
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
        """Go down."""
        self.do("down")

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Go up."""
        self.do("up")

    # -- frames

    def _deliver(self, snapshot: Snapshot, position: Position) -> None:
        """Accept a frame, in the reader's thread."""
        waiting, self._slot = self._slot is not None, (snapshot, position)
        if self._recording is not None:
            try:
                self._recording.add(snapshot)
            except DoctorError as error:
                self._recording = None
                self.call_later(self.answer, f"recording stopped: {error}")
        if not waiting:
            self.call_later(self._arrived)

    def _arrived(self) -> None:
        """Show a received frame, unless the picture is frozen."""
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
            self._questions.take_outlier(self._newest, STACK_INTERVAL)
        outdated = False
        text, since = self._message
        if self.view.message != text:
            self._message = (self.view.message, time.monotonic())
        elif text and time.monotonic() - since >= MESSAGE_TIMEOUT:
            self.say("")
            outdated = True
        held = self.frozen or (self.view.paused and not self.replayed)
        if not held:
            self.shown = self._newest
            self.view = replace(self.view, position=position)
        if outdated or not held:
            self.redraw()

    def _failed(self, text: str) -> None:
        """Show why the source failed."""
        self.frozen = self.frozen and self.view.panel == "signal"
        self.view = replace(self.view, trouble=text, message="")
        self.redraw()

    # -- drawing

    def redraw(self) -> None:
        """Draw the visible part, and request its ranks."""
        width, height = self.size
        try:
            material = replace(self.material, points=tuple(self._past.points))
            self.drawn = screen.draw_screen(self.shown, self.view, width, height, material)
        except Exception as error:
            # An error in a panel becomes a line on the screen. The other panels still work.
            text = f"x {type(error).__name__} in the monitor: {error} (esc: back)"
            line = ((clean(text, self.view.ascii_only), "error"),)
            blank = fitted((), width)
            self.drawn = Frame((fitted(line, width), *[blank] * (height - 1)))
        if self.drawn.lines:
            self.view = replace(self.view, top=self.drawn.top)
            if self.view.panel in _SCROLLED or (self.view.expanded and not self.view.panel):
                self.view = replace(self.view, item=self.drawn.item)
            self._canvas.show(self.drawn.lines)
        before = self.reader.want
        # Behind a panel the board does not change. A recording needs all ranks.
        visible = before.ranks if self.drawn.visible is None else self.drawn.visible
        want = Visible(visible if self._recording is None else None)
        if want != before:
            self.reader.want = want
            if want.ranks and not before.ranks:
                # The visible ranks are known only now. Request their details at once.
                self.reader.wake()

    def _refresh_all(self) -> None:
        self.redraw()
        self._canvas.refresh()

    def say(self, text: str) -> None:
        """Set the message below the board."""
        self.view = replace(self.view, message=text)

    def answer(self, text: str) -> None:
        """Show a message that arrives after its key."""
        self.say(text)
        self.redraw()

    # -- keys

    def do(self, name: str) -> None:
        """Run the action of a key."""
        if self.view.panel == "signal" and name not in _IN_QUESTION:
            return
        own = self._own_actions().get(name)
        if own is not None:
            own()
            if name in ("quit", "suspend"):
                return
        elif name in VIEW_ACTIONS:
            self._change_view(name)
        self.redraw()
        if name in _CHANGES_VISIBLE:
            # Request details of newly visible ranks now, not with the next frame.
            self.reader.wake()

    def _change_view(self, name: str) -> None:
        before = self.view.panel
        view = apply_action(self.view, self.shown, name)
        if view.panel in ("runs", "signal"):
            # The selection stays within the list.
            view = replace(view, item=max(0, min(view.item, len(self.material.asked) - 1)))
        self.view = view
        if name == "stacks" and view.panel == "stacks":
            self._questions.take_stacks()
        if before == "signal" and view.panel != "signal":
            self.frozen = False
            self.shown = self.shown if view.paused else self._newest

    def _own_actions(self) -> dict[str, Callable[[], None]]:
        """Return the actions beyond the view."""
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
