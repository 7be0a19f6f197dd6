"""Draw merged stacks as lines of text for a terminal of any width.

Places are written as a user would type them, relative to the working directory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddpdoctor.core import formatting
from ddpdoctor.core.formatting import bracketed, shown
from ddpdoctor.render.console import shown_path
from ddpdoctor.render.terminal import Line, Span, shortened
from ddpdoctor.run.records.supervisor import MAIN, Frame, RankStacks, Thread, Variable
from ddpdoctor.stacks.frames import CUT, FOLDED, Code, Merged, Node, fold, libraries, merge, tail

_INDENT = "  "
_MAX_PLACE, _MAX_FUNCTION = 34, 24
"""Maximum columns of a place and of a function's name. Longer ones push the rest to the right."""
_MIN_CODE = 12  # Minimum columns to show a line of code
_MAX_NATIVE = 8
_ODD = "!"  # The sign before ranks that are not where most ranks are


@dataclass(frozen=True)
class StackStyle:
    """The style of drawn stacks."""

    width: int = 80
    ascii_only: bool = False
    all_frames: bool = False  # Also show frames of libraries and of the script's start

    @property
    def ellipsis(self) -> str:
        """The sign before folded frames."""
        return "..." if self.ascii_only else "…"


def stacks_summary(merged: Merged) -> str:
    """Return a summary as a sentence without a full stop."""
    seen = sum(len(root.ranks) for root in merged.roots)
    if not seen:
        return "no rank could be asked" if merged.missing else "no rank has started yet"
    ranks = formatting.count(seen + len(merged.missing), "rank")
    if merged.missing:
        ranks = f"{seen} of {ranks}"
    if merged.places == 1:
        return f"{ranks}, all at one place" if seen > 1 else ranks
    if merged.odd:
        few = len(merged.odd)
        who = bracketed(merged.odd)
        return f"{ranks}: {who} {'is' if few == 1 else 'are'} not where the other {seen - few} are"
    return f"{ranks} at {merged.places} different places"


def draw(stacks: Sequence[RankStacks], style: StackStyle, code: Code) -> list[Line]:
    """Draw the main threads of ranks as one tree, after the ranks without a stack."""
    merged = merge(stacks, tuple if style.all_frames else fold)
    by_rank = {each.rank: each for each in stacks}
    troubles: dict[tuple[str, str], list[int]] = defaultdict(list)
    for each in merged.missing:
        troubles[each.trouble or "no main thread", each.note].append(each.rank)
    lines: list[Line] = []
    mark = "x" if style.ascii_only else "✗"
    for (trouble, note), ranks in sorted(troubles.items(), key=lambda each: each[1]):
        lines.append(((f"{mark} {bracketed(ranks)}", "error"), (f"  no stack: {trouble}", "")))
        lines += [((f"{_INDENT}{note}", "dim"),)] if note else []
    for root in merged.roots:
        lines += _Tree(style, code, by_rank, merged).node(root, 0)
    return lines


@dataclass(frozen=True)
class _Tree:
    style: StackStyle
    code: Code
    stacks: Mapping[int, RankStacks]
    merged: Merged

    def node(self, node: Node, depth: int, within_odd: bool = False) -> Iterator[Line]:
        """Draw a node with all below it."""
        indent = _INDENT * depth
        marked = node.odd and not within_odd
        remark = ""
        if marked:
            others = sum(len(root.ranks) for root in self.merged.roots) - len(self.merged.odd)
            remark = f"  not where the other {others} are"
        head = f"{indent}{_ODD if marked else ''}{' ' if marked else ''}{bracketed(node.ranks)}"
        yield (
            (head, "error" if marked else "bold"),
            (f"{remark}{self._states(node)}", "warning" if marked else "dim"),
        )
        yield from self.frames(node.frames, indent + _INDENT)
        here = sorted(set(node.ranks) - {rank for each in node.children for rank in each.ranks})
        if here:
            yield from self._end(here, bool(node.children), indent + _INDENT)
        for child in node.children:
            yield from self.node(child, depth + 1, within_odd or node.odd)

    def _states(self, node: Node) -> str:
        """Describe the processes of ranks whose stack ends here."""
        if node.children:
            return ""
        held = [rank for rank in node.ranks if self.stacks[rank].gil_held]
        waits = [rank for rank in node.ranks if self.stacks[rank].state.letter == "D"]
        words = ""
        for ranks, state in ((held, "in native code that holds the GIL"), (waits, "in disk sleep")):
            if ranks:
                who = "" if len(ranks) == len(node.ranks) else f"{bracketed(ranks)} "
                words += f"  {who}{state}"
        return words

    def frames(self, frames: Sequence[Frame], indent: str) -> Iterator[Line]:
        """Draw frames in columns: place, function, code."""
        style = self.style
        longest = max(style.width // 2 - len(indent), 16)
        places = {}
        for frame in frames:
            place = frame_place(frame)
            if not style.all_frames and len(place) > longest:
                # The end of a path is more informative than its beginning.
                place = style.ellipsis + place[len(place) - longest + len(style.ellipsis) :]
            places[frame] = place
        own = [frame for frame in frames if frame.function != FOLDED and frame != CUT]
        room = min(max((len(places[frame]) for frame in own), default=0), _MAX_PLACE)
        names = min(max((len(frame.function) for frame in own), default=0), _MAX_FUNCTION)
        for frame in frames:
            if frame == CUT:
                yield ((f"{indent}{style.ellipsis} the frames above are not known", "dim"),)
            elif frame.function == FOLDED:
                yield ((f"{indent}{style.ellipsis} in {frame.path}", "dim"),)
            else:
                head = f"{indent}{places[frame]:<{room}}  "
                code = self.code.get(frame, "")
                name = shown(frame.function)
                function = f"{name:<{names}}" if code else name
                line: list[Span] = [(head, ""), (function, "dim")]
                left = style.width - len(head) - len(function) - 2
                if code and left >= min(_MIN_CODE, len(code)):
                    line.append((f"  {shortened(code, left, style.ellipsis)}", ""))
                yield tuple(line)

    def _end(self, ranks: Sequence[int], has_children: bool, indent: str) -> Iterator[Line]:
        """Draw the activity below the innermost frame shown: library code, native code."""
        style = self.style
        ends: dict[str, list[int]] = defaultdict(list)
        natives: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for rank in ranks:
            main = self.stacks[rank].main
            below = () if style.all_frames or main is None else tail(main.frames)
            if below:
                ends[inner_frames(below)].append(rank)
            if self.stacks[rank].native:
                natives[self.stacks[rank].native].append(rank)
        for words, members in sorted(ends.items(), key=lambda each: each[1]):
            whose = f"{bracketed(members)} " if len(members) < len(ranks) or has_children else ""
            yield ((f"{indent}{whose}{style.ellipsis} {words}", "dim"),)
        for frames, members in sorted(natives.items(), key=lambda each: each[1]):
            whose = f"{bracketed(members)} " if len(members) < len(ranks) else ""
            yield ((f"{indent}{whose}native:", "dim"),)
            for frame in frames[-_MAX_NATIVE:]:
                text = shortened(frame, style.width - len(indent) - 2, style.ellipsis)
                yield ((f"{indent}  {text}", "dim"),)
        for note in dict.fromkeys(self.stacks[rank].note for rank in ranks):
            if note:
                yield ((f"{indent}{note}", "warning"),)


def draw_variables(stacks: Sequence[RankStacks], style: StackStyle) -> list[Line]:
    """Draw the variables of the user's innermost frames of each rank, innermost frame first."""
    lines: list[Line] = []
    for each in stacks:
        main = each.main
        by_frame: dict[int, list[Variable]] = defaultdict(list)
        for variable in main.variables if main is not None else ():
            by_frame[variable.frame].append(variable)
        for number in sorted(by_frame, reverse=True):
            frame = main.frames[number] if main is not None else CUT
            head = f"{bracketed([each.rank])}"
            lines.append(((head, "bold"), (f"  {frame_place(frame)}  {frame.function}", "dim")))
            for variable in by_frame[number]:
                text = f"{_INDENT}{shown(variable.name)} = {shown(variable.value)}"
                lines.append(((shortened(text, style.width, style.ellipsis), ""),))
    return lines


def draw_others(stacks: Sequence[RankStacks], style: StackStyle, code: Code) -> list[Line]:
    """Draw the threads other than the main ones. Draw equal stacks once."""
    groups: dict[tuple[str, tuple[Frame, ...]], list[tuple[int, Thread]]] = defaultdict(list)
    keep: Callable[[Sequence[Frame]], tuple[Frame, ...]] = tuple if style.all_frames else fold
    for each in stacks:
        for thread in each.threads:
            if thread.name != MAIN:
                # The numbers in a thread's name differ between ranks.
                name = "".join(letter for letter in thread.name if not letter.isdigit())
                groups[name, keep(thread.frames)].append((each.rank, thread))
    lines: list[Line] = []
    tree = _Tree(style, code, {}, Merged((), frozenset(), 0, ()))
    for (_, frames), members in sorted(
        groups.items(), key=lambda each: (each[0][0], each[1][0][0])
    ):
        ranks = [rank for rank, _ in members]
        name = members[0][1].name
        more = f" and {len(members) - 1} more" if len(members) > len(set(ranks)) else ""
        lines.append(((f"{bracketed(ranks)}", "bold"), (f"  thread {name}{more}", "dim")))
        lines += tree.frames(frames, _INDENT)
        below = () if style.all_frames else tail(members[0][1].frames)
        if below:
            lines.append(((f"{_INDENT}{style.ellipsis} {inner_frames(below)}", "dim"),))
    return lines


def inner_frames(frames: Sequence[Frame]) -> str:
    """Describe the library frames below the user's innermost line in a few words."""
    last = frames[-1]
    count = f"{formatting.count(len(frames), 'frame')} in {libraries(frames)}"
    file = last.path.rpartition("/")[2]
    place = f" ({file}:{last.line})" if last.line else ""
    return f"{count}, in {last.function}{place}"


def frame_place(frame: Frame) -> str:
    """Return a frame's path and line."""
    return f"{shown_path(frame.path)}:{frame.line}" if frame.line else shown_path(frame.path)
