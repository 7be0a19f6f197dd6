"""The monitor on a terminal: keys and frames in, one drawing per change out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Thread
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.app import App, ComposeResult
from textual.message import Message

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.top import actions, frame, units
from ddpdoctor.top.canvas import Canvas
from ddpdoctor.top.choosing import RunChoice
from ddpdoctor.top.frame import Frame, Material
from ddpdoctor.top.keys import KEYS
from ddpdoctor.top.line import clean, fitted
from ddpdoctor.top.past import Past
from ddpdoctor.top.reader import Position, Reader, Recording
from ddpdoctor.top.snapshot import Snapshot, Verdict
from ddpdoctor.top.source import Source, Want
from ddpdoctor.top.view import Panel, View

_ACTIONS = {name: key.action for key in KEYS for name in key.keys} | {
    "escape": "escape",
    "pagedown": "page down",
    "pageup": "page up",
    "home": "first",
    "end": "last",
    "w": "write",
    "c": "choose",
    "ctrl+z": "suspend",
    "ctrl+l": "redraw",
}

MESSAGE = 10.0
"""Seconds for which a line stays that a key had to say."""


if TYPE_CHECKING:
    from ddpdoctor.top.signals import Choice
    from ddpdoctor.top.taken import Taken


class _Arrived(Message):
    """There is a frame in the slot."""


class _Answer(Message):
    """What a question found."""

    def __init__(
        self, panel: Panel, lines: tuple[str, ...], choices: tuple[Choice, ...] = ()
    ) -> None:
        super().__init__()
        self.panel = panel
        self.lines = lines
        self.choices = choices


class _Stacks(Message):
    """Stacks were taken."""

    def __init__(self, taken: Taken) -> None:
        super().__init__()
        self.taken = taken


class _Runs(Message):
    """The live runs there are."""

    def __init__(self, runs: tuple[RunChoice, ...]) -> None:
        super().__init__()
        self.runs = runs


class _Said(Message):
    """Something to say below the board; ``wrong``: as a failure of the source."""

    def __init__(self, text: str, *, wrong: bool = False) -> None:
        super().__init__()
        self.text = text
        self.wrong = wrong


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
    NOTIFICATION_TIMEOUT: ClassVar[float] = 1.0

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
        self.shown = _waiting()
        self.drawn = Frame(())
        self._runs = tuple(runs)
        self._list_runs = list_runs
        self._make_run = make_run
        self._record = record
        self._recording = recording
        self._past = Past()
        self._back = 0
        """Frames that the picture is behind the newest one."""
        self._slot: tuple[Snapshot, Position] | None = None
        self._newest = self.shown
        self._asked: tuple[str, ...] = ()
        self._taken: Taken | None = None
        self._choices: tuple[Choice, ...] = ()
        self._frozen = False
        self._replayed = False
        self._message = ("", 0.0)
        """What is said, and since when."""
        self._canvas = Canvas()
        self._reader = Reader(make, self._deliver, self._trouble)

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
        self.app_resume_signal.subscribe(self, lambda _: self._redraw())
        if len(self._runs) > 1:
            self._show_runs()
        self._draw()
        self._reader.start()

    def on_unmount(self) -> None:
        """Stop reading; the job does not notice."""
        self._stop_recording()
        self._reader.stop()

    def on_resize(self, event: events.Resize) -> None:
        """Draw for the new size."""
        self._draw()

    async def on_event(self, event: events.Event) -> None:
        """All keys are ours, before textual's own bindings see them."""
        if isinstance(event, events.Key) and self._screen_is_ours():
            event.stop()
            self._key(event.key, event.character)
            return
        await super().on_event(event)

    def _screen_is_ours(self) -> bool:
        return self.is_running and len(self.screen_stack) == 1

    # -- frames (called in the reader's thread)

    def _deliver(self, snapshot: Snapshot, position: Position) -> None:
        waiting, self._slot = self._slot is not None, (snapshot, position)
        if self._recording is not None:
            try:
                self._recording.add(snapshot)
            except DoctorError as error:
                self._recording = None
                self.post_message(_Said(f"recording stopped: {error}"))
        if not waiting:
            self.post_message(_Arrived())

    def _trouble(self, text: str) -> None:
        self.post_message(_Said(text, wrong=True))

    def on__arrived(self) -> None:
        """A frame has come; it is shown unless the picture is held."""
        taken, self._slot = self._slot, None
        if taken is None:
            return
        self._newest, position = taken
        self._replayed = position is not None
        self.view = replace(self.view, trouble="")
        if not self._replayed:
            self._past.add(self._newest)
            if self.view.paused:
                self._back = min(self._back + 1, len(self._past.frames) - 1)
        outdated = self._outdated()
        held = self._frozen or (self.view.paused and not self._replayed)
        if not held:
            self.shown = self._newest
            self.view = replace(self.view, position=position)
        if outdated or not held:
            self._draw()

    def _outdated(self) -> bool:
        """Take back a message that has stood for long; whether there was one."""
        text, since = self._message
        if self.view.message != text:
            self._message = (self.view.message, time.monotonic())
            return False
        if not text or time.monotonic() - since < MESSAGE:
            return False
        self.view = replace(self.view, message="")
        return True

    def on__said(self, message: _Said) -> None:
        """A line to show."""
        if message.wrong:
            self._frozen = self._frozen and self.view.panel == "signal"
            self.view = replace(self.view, trouble=message.text, message="")
        else:
            self.view = replace(self.view, message=message.text)
        self._draw()

    def on__answer(self, message: _Answer) -> None:
        """What a key asked for."""
        if message.panel == "stacks" and self.view.panel != "stacks":
            return
        self._asked, self._choices = message.lines, message.choices
        if self.view.panel != message.panel:
            self.view = self.view.shown(message.panel)
        self.view = replace(self.view, message="")
        self._draw()

    # -- drawing

    def _draw(self) -> None:
        width, height = self.size
        row = frame.chosen(self.shown, self.view)
        rank = None if row is None else row.rank
        material = Material(self._past.series(rank), self._asked, self._taken)
        try:
            self.drawn = frame.draw(self.shown, self.view, width, height, material)
        except Exception as error:
            # A fault in a panel is a line on the screen, and the other panels still work.
            words = f"{type(error).__name__} in the monitor: {error}"
            text = clean(f"x {words} (esc: back)", self.view.ascii_only)
            blank = fitted((), width)
            self.drawn = Frame((fitted(((text, "error"),), width), *[blank] * (height - 1)))
        if self.drawn.lines:
            self.view = replace(self.view, top=self.drawn.top)
            if self.view.panel in _SCROLLED or (self.view.expanded and not self.view.panel):
                self.view = replace(self.view, item=self.drawn.item)
            self._canvas.show(self.drawn.lines)
        seen = self.drawn.visible
        if seen is None:
            # Behind a panel the board stays what it was.
            seen = self._reader.want.ranks
        if self._recording is not None:
            # A recording holds what is not looked at now, too.
            seen = None
        want = Want(seen)
        if want != self._reader.want:
            first = not self._reader.want.ranks and bool(want.ranks)
            self._reader.want = want
            if first:
                # Which ranks are in sight is known only now: their trends need not wait.
                self._reader.ask(lambda: None)

    # -- keys

    def _key(self, key: str, character: str | None) -> None:
        if self.view.typing:
            self.view = actions.typed(self.view, key, character)
            self._draw()
            return
        name = _ACTIONS.get(key) or _ACTIONS.get(character or "")
        if name is not None:
            self.do(name)

    def on_paste(self, event: events.Paste) -> None:
        """Text into the filter; anywhere else it is not taken for keys."""
        if self.view.typing:
            for character in event.text.partition("\n")[0]:
                self.view = actions.typed(self.view, character, character)
            self._draw()

    def do(self, name: str) -> None:
        """What a key does."""
        if self.view.panel == "signal" and name not in _IN_QUESTION:
            return
        own = self._own().get(name)
        if own is not None:
            own()
            if name in ("quit", "suspend"):
                return
        elif name in actions.PURE:
            before = self.view
            self.view = self._within(actions.act(before, self.shown, name))
            if name == "stacks" and self.view.panel == "stacks":
                self._take_stacks()
            if before.panel == "signal" and self.view.panel != "signal":
                self._frozen = False
                self.shown = self.shown if self.view.paused else self._newest
        self._draw()
        if name in _LOOKS_ELSEWHERE:
            # Ranks that have come into sight get their trend now rather than with the next frame.
            self._reader.ask(lambda: None)

    def _within(self, view: View) -> View:
        """The selection of a list stays on it."""
        if view.panel in ("runs", "signal"):
            return replace(view, item=max(0, min(view.item, len(self._asked) - 1)))
        return view

    def _own(self) -> dict[str, Callable[[], None]]:
        own: dict[str, Callable[[], None]] = {
            "quit": self._quit,
            "pause": self._pause,
            "back": lambda: self._scrub(-1),
            "forth": lambda: self._scrub(1),
            "attach": self._ask_attach,
            "write": self._write,
            "record": self._toggle_recording,
            "signal": self._ask_signal,
            "choose": self._ask_runs,
            "suspend": self.action_suspend_process,
            "redraw": self._redraw,
        }
        if self.view.panel == "runs":
            own["open"] = self._choose_run
        if self.view.panel == "signal":
            own["open"] = self._send
            own["quit"] = lambda: self.do("escape")
        return own

    def _redraw(self) -> None:
        self._draw()
        self._canvas.refresh()

    def _quit(self) -> None:
        self._reader.stop()
        self.exit()

    def say(self, text: str) -> None:
        """Have a line said below the board."""
        self.view = replace(self.view, message=text)

    def _pause(self) -> None:
        paused = not self.view.paused
        self._reader.playing = not paused
        self._back = 0
        self.view = replace(self.view, paused=paused, message="")
        if not paused:
            if not self._replayed:
                self.shown = self._newest
                self.view = replace(self.view, position=None)
            self._reader.ask(lambda: None)

    def _scrub(self, by: int) -> None:
        if self._replayed:
            self.view = replace(self.view, paused=True)
            self._reader.step(by)
            return
        frames = self._past.frames
        if not frames:
            self.say("there is no frame to go to yet")
            return
        if not self.view.paused:
            self._pause()
        self._back = max(0, min(self._back - by, len(frames) - 1))
        at = len(frames) - 1 - self._back
        self.shown = frames[at]
        self.view = replace(self.view, position=(at, len(frames)), message="")

    # -- what is asked beyond the snapshot

    def _ask(self, panel: Panel, find: Callable[[], tuple[str, ...]]) -> None:
        def task() -> None:
            try:
                self.post_message(_Answer(panel, find()))
            except DoctorError as error:
                self.post_message(_Said(str(error)))

        self._reader.ask(task)

    def _take_stacks(self) -> None:
        # Here, and not at the top: a first paint has no use for it.
        from ddpdoctor.top import questions, taken

        snapshot, replayed = self.shown, self._replayed
        row = None if self.view.everyone else frame.chosen(snapshot, self.view)
        ranks = None if row is None else (row.rank,)
        self._taken = None
        # Not the reader's thread: a rank that does not answer is waited for.
        Thread(
            target=lambda: self.post_message(_Stacks(taken.take(snapshot, replayed, ranks))),
            name="stacks",
            daemon=True,
        ).start()
        if row is not None:
            self._asked = ("looking ...",)
            self._ask("stacks", lambda: questions.below(row))

    def on__stacks(self, message: _Stacks) -> None:
        """The stacks are there."""
        self._taken = message.taken
        if self.view.panel == "stacks":
            self._draw()

    def _ask_attach(self) -> None:
        if self.view.panel == "attach":
            self.view = self.view.shown("")
            return
        from ddpdoctor.top import questions

        snapshot = self.shown
        self._ask("attach", lambda: questions.attach_lines(snapshot))

    def _write(self) -> None:
        if self.view.panel != "attach":
            return
        from ddpdoctor.top import questions

        snapshot = self.shown

        def task() -> None:
            try:
                self.post_message(_Said(questions.write_launch_json(snapshot)))
            except DoctorError as error:
                self.post_message(_Said(str(error)))

        self._reader.ask(task)

    def _ask_signal(self) -> None:
        if self.view.readonly:
            self.say("signals are off: --readonly")
            return
        if self._replayed:
            self.say("this is a replay: there is nothing to signal")
            return
        from ddpdoctor.top import signals

        # What a person aims at must not move while they aim.
        self._frozen = True
        snapshot, cursor = self.shown, self.view.cursor
        row = next((row for row in snapshot.ranks if row.rank == cursor), None)

        def task() -> None:
            try:
                found = signals.choices(snapshot, row)
            except DoctorError as error:
                self._frozen = False
                self.post_message(_Said(str(error)))
                return
            words = tuple(choice.words for choice in found)
            self.post_message(_Answer("signal", words, found))

        self._reader.ask(task)

    def _send(self) -> None:
        choice = self._choices[self.view.item] if self.view.item < len(self._choices) else None
        self.do("escape")
        if choice is None:
            return
        from ddpdoctor.top import signals

        try:
            self.say(signals.send(choice))
        except DoctorError as error:
            self.say(str(error))

    def _ask_runs(self) -> None:
        list_runs = self._list_runs
        if list_runs is None or self.view.panel == "runs":
            self._show_runs()
            return

        def task() -> None:
            try:
                self.post_message(_Runs(tuple(list_runs())))
            except DoctorError as error:
                self.post_message(_Said(str(error)))

        self._reader.ask(task)

    def on__runs(self, message: _Runs) -> None:
        """The live runs of this moment."""
        self._runs = message.runs
        self.view = replace(self.view, message="")
        if self.view.panel != "runs":
            self._show_runs()
        self._draw()

    def _show_runs(self) -> None:
        if not self._runs:
            self.say("there are no live runs to choose from")
            return
        self._asked = tuple(
            f"{units.age(None if run.started is None else time.time() - run.started):>4}  "
            f"{run.ranks} rank{'s' if run.ranks != 1 else ''}  {run.command} ({run.id})"
            for run in self._runs
        )
        self.view = self.view.shown("runs")

    def _choose_run(self) -> None:
        run = self._runs[min(self.view.item, len(self._runs) - 1)]
        make = self._make_run
        self.view = replace(self.view, panel="", item=0, cursor=None, expanded=False)
        if make is not None:
            self._reader.switch(lambda: make(run.path))

    # -- recording

    def _toggle_recording(self) -> None:
        if self._recording is not None:
            name = self._recording.path
            self._stop_recording()
            self.say(f"recorded to {name}")
            return
        if self._record is None:
            self.say("a recording cannot be recorded")
            return
        try:
            self._recording = self._record()
        except DoctorError as error:
            self.say(str(error))
            return
        name = self._recording.path
        self.view = replace(self.view, recording=name, message=f"recording to {name}; r ends it")

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
        self._draw()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Down."""
        self.do("down")

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Up."""
        self.do("up")


_SCROLLED = ("help", "environment", "stacks", "attach")
_IN_QUESTION = ("down", "up", "first", "last", "open", "escape", "quit")
_LOOKS_ELSEWHERE = ("down", "up", "page down", "page up", "first", "last", "sort", "turn", "nodes")


def _waiting() -> Snapshot:
    return Snapshot(time=0.0, kind="run", verdict=Verdict("reading ...", "info"), live=True)
