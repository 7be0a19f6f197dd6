"""The prompt of ``ddpdoctor debug``: pdb's commands, on several ranks at once."""

from __future__ import annotations

import ast
import cmd
import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import grouped_lines, named, rank_set, shown, spans
from ddpdoctor.core.opening import relative_path, relative_place
from ddpdoctor.debug.sessions import Breakpoint, Frame, Session, Sessions
from ddpdoctor.nodes.asking import capture_everywhere
from ddpdoctor.run import rundir
from ddpdoctor.run.records.supervisor import MAIN, RankStacks, Thread
from ddpdoctor.run.records.supervisor import Frame as StackFrame
from ddpdoctor.run.snapshot import Run

POLL_INTERVAL = 0.25  # Seconds between two reads of the run while a command waits
SETTLE_TIME = 1.0  # Seconds after the last stop to wait for more ranks
HELD_TIMEOUT = 5.0  # Seconds for running ranks, which may be waiting for held ones
PAUSE_TIMEOUT = 5.0  # Seconds for ranks to stop at a pause
MOVES = ("n", "next", "s", "step", "u", "up", "d", "down")
CONTEXT = 5  # Number of lines that `list` shows before and after the current one
HELP = """\
bt, w                   Stacks of the chosen ranks as one tree, also of those that run.
up, down [COUNT]        Select the frame that called this one, or the one that it called.
p, pp EXPRESSION        Print its value in the selected frame. Any other line is Python.
args                    The arguments of the function.
l [LINE]                Source around the current line, or around LINE.
b [PLACE [if ...]]      Stop the chosen ranks at FILE:LINE, LINE or FUNCTION. Alone: list all.
tbreak PLACE [if ...]   Stop there once.
cl [FILE:LINE|NUMBER]   Remove breakpoints of the chosen ranks. Alone: all of them.
n, s, r                 Go on to the next line, into a function, or until it returns.
c                       Go on until ranks stop. Ctrl-C pauses them.
pause                   Stop the chosen ranks where they are.
ranks [RANKS|all]       Choose ranks, such as 0,2-3. Alone: what each rank does.
q                       Leave. The ranks go on.
"""

HISTORY = "debug-history"
MAX_HISTORY = 1000

_BREAK = re.compile(r"(?:(?:(?P<file>.+?):)?(?P<line>\d+)|(?P<function>[A-Za-z_]\w*))"
                    r"(?:\s*,\s*(?:if\s+)?|\s+if\s+|$)(?P<condition>.*)$")  # fmt: skip


class Prompt(cmd.Cmd):
    """Read commands, and run them on the chosen ranks. None for ``chosen`` means all ranks.

    ``draw`` yields the lines of a run's stacks.
    """

    def __init__(
        self,
        sessions: Sessions,
        chosen: Collection[int] | None,
        draw: Callable[[Sequence[RankStacks], Run], Iterable[str]],
    ) -> None:
        super().__init__()
        self._draw = draw
        self._sessions = sessions
        self._chosen = None if chosen is None else frozenset(chosen)
        self._is_typed = sys.stdin.isatty() and sys.stdout.isatty()
        self._at_prompt = False
        self._failed = False
        self._busy = threading.RLock()  # Held while a command runs, or the watch reads the ranks

    # -- read commands

    def run(self, commands: Sequence[str] | None) -> int:
        """Run the given commands, or those the user types. Return the exit status."""
        given = commands is not None
        self._is_typed &= not given
        print(f"{shown(self._sessions.run.path.name)}: {self._summary()}")
        self._take_waiting()
        self._show_news()
        if self._is_typed:
            self._read_history()
            threading.Thread(target=self._watch, name="ddpdoctor-debug", daemon=True).start()
        lines = iter(commands) if commands is not None else self._typed()
        for line in lines:
            try:
                if not self._is_typed:
                    self._take_waiting()
                    self._show_news()
                with self._busy:
                    if self.onecmd(line):
                        break
            except KeyboardInterrupt:
                if not self._is_typed:
                    raise
                print()
            except DoctorError as error:
                self._failed = True
                print(f"*** {shown('; '.join(filter(None, (error.message, error.hint))))}")
            if not self._sessions.by_rank and not rundir.is_live(self._sessions.run.path):
                print("the job has ended")
                break
            sys.stdout.flush()
        return 1 if self._failed and not self._is_typed else 0

    def _typed(self) -> Iterator[str]:
        while True:
            self._at_prompt = True
            try:
                line = input(self._prompt if self._is_typed else "")
            except EOFError:
                if self._is_typed:
                    print()
                return
            except KeyboardInterrupt:
                if not self._is_typed:
                    raise
                print()
                line = "" if self._sessions.stopped() & self._ranks else "pause"
            finally:
                self._at_prompt = False
            # An empty line repeats a command that moves, as in gdb.
            if not line and self.lastcmd.partition(" ")[0] in MOVES:
                line = self.lastcmd
            if line:
                yield line

    @property
    def _prompt(self) -> str:
        return "(ddp) " if self._chosen is None else f"(ddp {spans(self._chosen)}) "

    def _read_history(self) -> None:
        with contextlib.suppress(ImportError, OSError, DoctorError):
            import atexit
            import readline

            path = rundir.private_base() / HISTORY
            readline.set_completer(cast("Any", self.complete))
            readline.set_completer_delims(" \t\n`~!@#$%^&*()-=+[{]}\\|;:'\",<>/?")
            readline.parse_and_bind("tab: complete")
            readline.set_history_length(MAX_HISTORY)
            atexit.register(readline.write_history_file, path)
            readline.read_history_file(path)

    def _watch(self) -> None:
        """Show events while the prompt waits for a command."""
        path = self._sessions.run.path
        while rundir.is_live(path):
            time.sleep(2 * POLL_INTERVAL)
            with self._busy, contextlib.suppress(DoctorError, OSError):
                if self._at_prompt:
                    self._take_waiting()
                    self._show_news()
        self._print(["the job has ended"])

    def completedefault(self, *arguments: object) -> list[str]:
        """Complete an expression by names of the first stopped rank."""
        text, line, _, end = arguments
        ranks = sorted(self._sessions.stopped() & self._ranks)
        session = self._sessions.by_rank.get(ranks[0]) if ranks else None
        if session is None or session.frame is None:
            return []
        before = str(line)[: int(str(end))].partition(" ")[2]
        with contextlib.suppress(DoctorError):
            body = session.ask(
                "completions", frameId=session.frame.id, text=before, column=len(before) + 1
            )
            labels = [str(each.get("label")) for each in body.get("targets", ())]
            head, dot, _ = str(text).rpartition(".")
            found = [f"{head}{dot}{each}" for each in labels if each.isidentifier()]
            return [each for each in found if each.startswith(str(text))]
        return []

    def default(self, line: str) -> None:
        """Execute a line that is not a command as Python, as pdb does."""
        self.do_p(line.removeprefix("!").strip())

    # -- the state of the ranks

    @property
    def _ranks(self) -> frozenset[int]:
        """The ranks that commands apply to."""
        every = self._sessions.ranks | frozenset(self._sessions.by_rank)
        return every if self._chosen is None else every & self._chosen

    def _say(self, texts: Mapping[int, str]) -> None:
        self._failed |= any(text.startswith("***") for text in texts.values())
        for line in grouped_lines(texts):
            print(line)

    def _summary(self) -> str:
        ranks = self._ranks
        if not ranks:
            return "no rank has started yet"
        held = "; held before their first line until `c`" if self._sessions.is_held else ""
        return f"{named(ranks)}{held}" + ("; h for help" if self._is_typed else "")

    def _doing(self, rank: int) -> str:
        """Describe a rank's state in a few words."""
        session = self._sessions.by_rank.get(rank)
        if session is not None and session.thread is not None:
            return self._stop(session)
        record = self._sessions.run.debug_states.get(rank)
        if record is None or record.state in ("gone", "lost"):
            return "has ended"
        status = self._sessions.status(rank)
        if session is None and record.state == "waits":
            return f"waits for a debugger at {relative_place(record.at)}"
        if status is None:
            return "starting"
        what = status.collective or status.phase.label
        where = f" ({relative_place(status.site)})" if status.site else ""
        return f"runs: step {status.step}, {what}{where}"

    def _stop(self, session: Session) -> str:
        """Describe the stop of a rank, with its line of code."""
        return f"{session.why} at {_with_code(session.frame)}"

    def _take_waiting(self) -> None:
        """Attach to the chosen ranks that wait for a debugger."""
        self._sessions.look()
        waiting = self._sessions.waiting() & self._ranks
        if waiting:
            troubles = self._sessions.attach(waiting)
            reached = waiting - set(troubles)
            self._sessions.wait(SETTLE_TIME, lambda: reached <= self._sessions.stopped())
            if troubles:
                self._print([*grouped_lines(troubles)])

    def _show_news(self) -> None:
        """Show the stops that have not been shown yet."""
        sessions = self._sessions
        every = list(sessions.by_rank.values())
        fresh = [each for each in every if not each.is_seen]
        outputs = {each.rank: each.output.strip() for each in every if each.output.strip()}
        for rank in outputs:
            sessions.by_rank[rank].output = ""
        stops = sessions.ask([each.rank for each in fresh], self._stop)
        for each in fresh:
            each.is_seen = True
        lines = [*grouped_lines(outputs), *grouped_lines(stops)]
        if lines:
            self._print(lines)
            self._end_temporary(fresh)

    def _print(self, lines: Sequence[str]) -> None:
        """Print lines, above the prompt if it waits for a command."""
        if not self._at_prompt:
            print("\n".join(lines))
            return
        typed = ""
        with contextlib.suppress(ImportError):
            import readline

            typed = readline.get_line_buffer()
        sys.stdout.write("\n".join(["\r\x1b[K" + lines[0], *lines[1:], self._prompt + typed]))
        sys.stdout.flush()

    def _end_temporary(self, stopped: Collection[Session]) -> None:
        """Remove temporary breakpoints at which ranks have stopped."""
        places = {(frame.path, frame.line) for each in stopped if (frame := each.frame)}
        known = self._sessions.breakpoints
        hit = [each for each in known if each.once and (each.path, each.line) in places]
        if hit:
            self._sessions.breakpoints = [each for each in known if each not in hit]
            self._sessions.update_breakpoints({each.path for each in hit})

    def _wait(self, resumed: frozenset[int]) -> None:
        """Wait until the resumed ranks have stopped, and show where.

        Once some have stopped, give the others a little more time: they may be waiting for ranks
        that are held. Time without a core does not count. Ctrl-C pauses the ranks. Without a
        terminal and breakpoints, wait no longer than for held ranks.
        """
        sessions = self._sessions
        before = sessions.stopped()
        bound = any(resumed & set(each.ranks) for each in sessions.breakpoints)
        limited = bool(before - resumed) or not (bound or self._is_typed)
        left = HELD_TIMEOUT
        while running := resumed & set(sessions.by_rank) - before:
            began, turns = time.monotonic(), sessions.turns(running)
            try:
                sessions.wait(POLL_INTERVAL)
                self._take_waiting()
            except KeyboardInterrupt:
                if not self._is_typed:
                    raise
                print()
                self._pause(running)
                break
            seconds = time.monotonic() - began
            left -= seconds - sessions.without_core(turns, seconds)
            if sessions.stopped() != before:
                before, left = sessions.stopped(), SETTLE_TIME
            if (before & resumed or limited) and left < 0:
                break
        self._show_news()
        self._say({rank: self._doing(rank) for rank in resumed - sessions.stopped()})

    # -- commands

    def _stopped(self) -> frozenset[int]:
        """Return the chosen ranks that are stopped, at least one."""
        found = self._sessions.stopped() & self._ranks
        if not found:
            raise DoctorError("no rank is stopped here", "`pause` or Ctrl-C stops them")
        return found

    def _each(self, function: Callable[[Session], str]) -> None:
        """Show the result of a function for each stopped rank."""
        stopped = self._stopped()
        found = self._sessions.ask(stopped, function)
        running = self._ranks - stopped
        # A statement has no value.
        self._say(_only(found) | dict.fromkeys(running, "runs; `pause` stops it"))

    def do_ranks(self, line: str) -> None:
        """Choose the ranks that commands apply to, or show their states."""
        self._sessions.look()
        if line == "all":
            self._chosen = None
        elif line:
            try:
                ranks = rank_set(line)
            except ValueError:
                raise DoctorError(f"{line} is not a set of ranks, such as 0,2-3") from None
            missing = ranks - self._sessions.ranks
            if missing:
                raise DoctorError(f"there is no {named(missing)}")
            self._chosen = ranks
        else:
            every = self._sessions.ranks
            if not every:
                raise DoctorError("no rank has started yet")
            self._say({rank: self._doing(rank) for rank in every})

    def do_bt(self, line: str) -> None:
        """Show the stacks of the chosen ranks as one tree. Ranks that run are included."""
        sessions = self._sessions
        stopped = sessions.stopped() & self._ranks
        sessions.ask(stopped, lambda session: str(session.frames))
        found = [_as_stacks(sessions.by_rank[rank]) for rank in stopped]
        if running := self._ranks - stopped:
            sessions.look()
            found += capture_everywhere(sessions.run, running)
        stacks = sorted(found, key=lambda each: each.rank)
        for each in self._draw(stacks, sessions.run):
            print(each)
        if running:
            self._failed |= any(each.trouble for each in stacks)

    do_w = do_where = do_bt

    def _move(self, by: int, line: str) -> None:
        count = by * (int(line) if line.isdigit() else 1)

        def move(session: Session) -> str:
            last = len(session.frames) - 1
            wanted = session.selected + count
            session.selected = min(max(wanted, 0), last)
            if wanted != session.selected:
                return f"*** {'oldest' if by > 0 else 'newest'} frame"
            return _with_code(session.frame)

        self._each(move)

    def do_up(self, line: str) -> None:
        """Select the frame that called this one."""
        self._move(1, line)

    def do_down(self, line: str) -> None:
        """Select the frame that this one called."""
        self._move(-1, line)

    do_u, do_d = do_up, do_down

    def do_p(self, line: str) -> None:
        """Print the value of an expression on each stopped rank."""
        if not line:
            raise DoctorError("an expression is missing")
        self._each(lambda session: session.evaluate(line))

    def do_pp(self, line: str) -> None:
        """Pretty-print the value of an expression."""

        def pretty(session: Session) -> str:
            text = session.evaluate(f"__import__('pprint').pformat(({line}))")
            return str(ast.literal_eval(text))

        self._each(pretty)

    def do_args(self, line: str) -> None:
        """Print the arguments of the function."""

        def arguments(session: Session) -> str:
            names = _arguments(session.frame)
            found = [f"{name} = {session.evaluate(name)}" for name in names]
            return "\n".join(found) or "no arguments"

        self._each(arguments)

    do_a = do_args

    def do_list(self, line: str) -> None:
        """Show the source around the current line, or around another one."""
        self._each(lambda session: _listing(session.frame, int(line) if line.isdigit() else 0))

    do_l = do_list

    def _break(self, line: str, *, once: bool = False) -> None:
        if not line:
            for number, each in enumerate(self._sessions.breakpoints, 1):
                print(f"{number}  {_words(each)}")
            return
        path, number, condition = self._place_of(line)
        added = Breakpoint(path, number, self._ranks, condition, once)
        same = (path, number)
        known = self._sessions.breakpoints
        before = [e for e in known if (e.path, e.line) == same]
        # A rank has one breakpoint per place: the newest.
        rest = [replace(e, ranks=e.ranks - added.ranks) for e in before]
        others = [e for e in known if e not in before]
        self._sessions.breakpoints = [*others, *(e for e in rest if e.ranks), added]
        if self._sessions.is_held:
            print(f"{_words(added)}; `c` starts the ranks")
            return
        troubles = self._sessions.attach(self._ranks)
        missed = self._sessions.update_breakpoints({path})
        print(_words(added))
        self._say(
            {rank: f"*** {why.removeprefix('*** ')}" for rank, why in (missed | troubles).items()}
        )

    def do_break(self, line: str) -> None:
        """Set a breakpoint on the chosen ranks. List all without an argument."""
        self._break(line)

    def do_tbreak(self, line: str) -> None:
        """Set a breakpoint that is removed once it is hit."""
        self._break(line, once=True)

    do_b = do_break

    def do_clear(self, line: str) -> None:
        """Remove breakpoints from the chosen ranks."""
        known = self._sessions.breakpoints
        numbers = {int(word) for word in line.split() if word.isdigit()}
        if ":" in line:
            place = self._place_of(line)[:2]
            gone = [each for each in known if (each.path, each.line) == place]
        else:
            gone = [each for number, each in enumerate(known, 1) if not line or number in numbers]
        if not gone:
            raise DoctorError(f"there is no breakpoint {line}".rstrip())
        chosen = self._ranks
        left = [replace(e, ranks=e.ranks - chosen) if e in gone else e for e in known]
        self._sessions.breakpoints = [each for each in left if each.ranks]
        self._sessions.update_breakpoints({each.path for each in gone})
        print("\n".join(f"removed: {_words(each)}" for each in gone))

    do_cl = do_clear

    def _resume(self, command: str) -> None:
        ranks = self._stopped()
        self._say(_only(self._sessions.ask(ranks, lambda session: session.resume(command))))
        self._wait(ranks)

    def do_next(self, line: str) -> None:
        """Continue to the next line of the function."""
        self._resume("next")

    def do_step(self, line: str) -> None:
        """Continue to the next line, into functions."""
        self._resume("stepIn")

    def do_return(self, line: str) -> None:
        """Continue until the function returns."""
        self._resume("stepOut")

    do_n, do_s, do_r = do_next, do_step, do_return

    def do_continue(self, line: str) -> None:
        """Continue until ranks stop at a breakpoint."""
        sessions = self._sessions
        if sessions.is_held:
            self._say(sessions.attach(sessions.ranks))
            ranks = self._ranks
        else:
            stopped = sessions.stopped() & self._ranks
            self._say(_only(sessions.ask(stopped, lambda each: each.resume("continue"))))
            ranks = self._ranks & set(sessions.by_rank)
        if not ranks:
            raise DoctorError("no rank is attached", "set a breakpoint, or `pause`")
        self._wait(frozenset(ranks))

    do_c = do_cont = do_continue

    def _pause(self, ranks: frozenset[int]) -> None:
        troubles = self._sessions.attach(ranks)
        running = ranks & set(self._sessions.by_rank) - self._sessions.stopped()
        troubles |= _only(self._sessions.ask(running, lambda session: session.pause()))
        wanted = running - set(troubles)
        self._sessions.wait(PAUSE_TIMEOUT, lambda: wanted <= self._sessions.stopped())
        self._show_news()
        self._say(
            troubles | dict.fromkeys(wanted - self._sessions.stopped(), "*** has not stopped")
        )

    def do_pause(self, line: str) -> None:
        """Stop the chosen ranks where they are."""
        self._pause(self._ranks - self._sessions.stopped())

    def do_quit(self, line: str) -> bool:
        """Leave. The ranks continue."""
        return True

    do_q = do_exit = do_quit

    def do_help(self, arg: str) -> None:
        """Show the commands."""
        print(HELP, end="")

    do_h = do_help

    def _place_of(self, text: str) -> tuple[str, int, str]:
        """Return the file, the line and the condition of a breakpoint."""
        match = _BREAK.match(text.strip())
        if match is None:
            raise DoctorError(f"{text} is not a place", "b FILE:LINE, b LINE or b FUNCTION, if ...")
        path = self._file(match["file"])
        if match["function"]:
            line = _first_line(path, match["function"])
            if not line:
                raise DoctorError(f"{relative_path(path)} has no function {match['function']}")
            return path, line, match["condition"]
        return path, int(match["line"]), match["condition"]

    def _file(self, name: str | None) -> str:
        """Return the path of a file, by default the current one."""
        run = self._sessions.run
        frames = [each.frame for each in self._sessions.by_rank.values() if each.thread is not None]
        known = [frame.path for frame in frames if frame is not None]
        known += [
            each.status.site.rpartition(":")[0] for each in run.last if each.status is not None
        ]
        here = str(run.manifest.get("cwd") or "")
        known += [os.path.join(here, word) for word in run.command if word.endswith(".py")]
        if name is None:
            found = [path for path in known if path]
        else:
            places = [os.path.abspath(name), os.path.join(here, name)]
            places += [path for path in known if path.endswith(f"/{name}")]
            found = [path for path in places if os.path.isfile(path)]
        if not found:
            raise DoctorError(f"there is no file {name}" if name else "name a file: b FILE:LINE")
        return found[0]


def _only(texts: Mapping[int, str]) -> dict[int, str]:
    """Return the texts that are not empty."""
    return {rank: text for rank, text in texts.items() if text}


def _words(stop: Breakpoint) -> str:
    place = f"{relative_path(stop.path)}:{stop.line}"
    condition = f" if {stop.condition}" if stop.condition else ""
    once = "temporary, " if stop.once else ""
    return shown(f"breakpoint at {place}{condition} ({once}{named(stop.ranks)})")


def _as_stacks(session: Session) -> RankStacks:
    frames = tuple(StackFrame(f.path, f.line, f.name) for f in reversed(session.frames))
    main = Thread(session.thread or 0, MAIN, False, frames)
    return RankStacks(session.rank, 0, 0, "", (main,))


def _place(frame: Frame) -> str:
    return relative_place(f"{frame.path}:{frame.line}")


def _with_code(frame: Frame | None) -> str:
    """Return the place of a frame, followed by its line of code."""
    if frame is None:
        return "an unknown place"
    code = _source_lines(frame.path)[frame.line - 1 : frame.line]
    return "\n-> ".join([f"{_place(frame)} in {frame.name}", *(line.strip() for line in code)])


def _source_lines(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace").splitlines()
    return []


def _listing(frame: Frame | None, around: int) -> str:
    """Return the source around a line, by default the current one."""
    if frame is None:
        return "*** no source"
    middle = around or frame.line
    first = max(middle - CONTEXT, 1)
    lines = _source_lines(frame.path)[first - 1 : middle + CONTEXT]
    return "\n".join(
        [_place(frame)]
        + [
            f"{number:>5} {'->' if number == frame.line else '  '} {line}"
            for number, line in enumerate(lines, first)
        ]
    )


def _functions(path: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    with contextlib.suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse("\n".join(_source_lines(path)))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node


def _first_line(path: str, name: str) -> int:
    """Return the first line in the body of a function, or 0."""
    bodies = [each.body for each in _functions(path) if each.name == name]
    if not bodies:
        return 0
    # A docstring is not executed.
    body = bodies[0]
    is_text = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return body[1 if is_text and len(body) > 1 else 0].lineno


def _arguments(frame: Frame | None) -> list[str]:
    """Return the names of the arguments of a frame's function."""
    if frame is None:
        return []
    around = [
        each
        for each in _functions(frame.path)
        if each.name == frame.name and each.lineno <= frame.line <= (each.end_lineno or 0)
    ]
    if not around:
        return []
    given = around[-1].args
    single = [each for each in (given.vararg, given.kwarg) if each is not None]
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, *single)]
