"""Fix problems that have one safe answer. Comments and layout stay as they are.

A file whose edited text does not parse is not changed.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from ddpdoctor.core import opening
from ddpdoctor.core.syntax import last_name
from ddpdoctor.lint.calls import keyword
from ddpdoctor.lint.code import Code
from ddpdoctor.lint.conditions import guards
from ddpdoctor.lint.files import MAX_SIZE
from ddpdoctor.lint.rules import Hit


class Edit(NamedTuple):
    """A replacement. A position is a line, from 1, and an offset in bytes, as in syntax trees."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


# -- edits of single nodes


def _start(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.end_lineno or node.lineno, node.end_col_offset or 0


def _arguments(call: ast.Call) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the begin and end of each argument of a call, in order."""
    spans = [(_start(each), _end(each)) for each in call.args]
    spans += [((each.lineno, each.col_offset), _end(each.value)) for each in call.keywords]
    return sorted(spans)


def _with_argument(call: ast.Call, text: str) -> Edit | None:
    """Return the edit that adds an argument to a call. None if the call has no arguments."""
    spans = _arguments(call)
    return Edit(spans[-1][1], spans[-1][1], f", {text}") if spans else None


def _without_argument(call: ast.Call, value: ast.expr) -> Edit | None:
    """Return the edit that drops an argument that is passed by its keyword."""
    spans = _arguments(call)
    at = next((n for n, span in enumerate(spans) if span[1] == _end(value)), None)
    if at is None or not any(each.value is value for each in call.keywords):
        return None
    if at:
        return Edit(spans[at - 1][1], spans[at][1], "")
    return Edit(spans[0][0], spans[1][0], "") if len(spans) > 1 else None


def _before(code: Code, statement: ast.stmt, text: str) -> Edit | None:
    """Return the edit that puts a line before a statement that begins its own line."""
    line = code.file.lines[statement.lineno - 1]
    indent = line[: len(line) - len(line.lstrip())]
    if statement.col_offset != len(indent.encode()):
        return None
    return Edit((statement.lineno, 0), (statement.lineno, 0), f"{indent}{text}\n")


# -- the safe fixes, by rule


def _set_epoch(code: Code, hit: Hit) -> list[Edit]:
    """Insert ``set_epoch`` at the top of the epoch loop, if the sampler has a name there."""
    statement = code.statement(hit.node)
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        return []
    target, value = statement.targets[0], statement.value
    if value is not hit.node and not code.is_torch(value, "DataLoader"):
        return []
    sampler = target.id if value is hit.node else f"{target.id}.sampler"
    loop = next((each for each in code.of(ast.For) if _is_over_epochs(code, each, target)), None)
    if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name):
        return []
    number = loop.target.id if loop.target.id != "_" else "epoch"
    call = _before(code, loop.body[0], f"{sampler}.set_epoch({number})")
    if call is None or (number != loop.target.id and number in code.loads):
        return []
    return [Edit(_start(loop.target), _end(loop.target), number), call]


def _is_over_epochs(code: Code, node: ast.AST, target: ast.Name) -> bool:
    """Return whether a loop counts epochs, in the function and below the line of a name."""
    return (
        isinstance(node, ast.For)
        and node.lineno > target.lineno
        and code.scope(node) is code.scope(target)
        and not code.loops(node)
        and isinstance(node.iter, ast.Call)
        and last_name(node.iter.func) == "range"
        and any(isinstance(each, ast.For) for each in code.within(node))
    )


def _passed(code: Code, hit: Hit) -> list[Edit]:
    """Pass a sampler to the only loader of its data set, instead of ``shuffle=True``."""
    statement = code.statement(hit.node)
    sampler = hit.node
    if not isinstance(statement, ast.Assign) or statement.value is not sampler:
        return []
    target = statement.targets[0]
    assert isinstance(sampler, ast.Call)
    data = keyword(sampler, "dataset", 0)
    if not isinstance(target, ast.Name) or data is None:
        return []
    loaders = [
        each
        for each in code.calls_by_name.get("DataLoader", ())
        if each.lineno > statement.lineno
        and code.scope(each) is code.scope(target)
        and (given := keyword(each, "dataset", 0)) is not None
        and ast.dump(given) == ast.dump(data)
        and keyword(each, "sampler", 3) is None
        and keyword(each, "batch_sampler", 4) is None
    ]
    if len(loaders) != 1:
        return []
    shuffle = keyword(loaders[0], "shuffle")
    added = _with_argument(loaders[0], f"sampler={target.id}")
    if shuffle is None:
        return [added] if added is not None and len(loaders[0].args) < 3 else []
    return [
        Edit(
            (shuffle.lineno, _keyword_at(loaders[0], shuffle)),
            _end(shuffle),
            f"sampler={target.id}",
        )
    ]


def _keyword_at(call: ast.Call, value: ast.expr) -> int:
    return next(each.col_offset for each in call.keywords if each.value is value)


def _unshuffled(code: Code, hit: Hit) -> list[Edit]:
    """Drop ``shuffle=True`` where a sampler is passed."""
    call = code.parents[code.parents[hit.node]]
    if not isinstance(call, ast.Call) or not isinstance(hit.node, ast.expr):
        return []
    edit = _without_argument(call, hit.node)
    return [edit] if edit is not None else []


def _spelled(code: Code, hit: Hit) -> list[Edit]:
    """Accept both spellings of the option for the local rank, as an integer."""
    call = hit.node
    if not isinstance(call, ast.Call) or "os" not in code.imports:
        return []
    word = next(
        each
        for each in call.args
        if isinstance(each, ast.Constant) and each.value == "--local_rank"
    )
    edits = [Edit(_start(word), _end(word), '"--local-rank", "--local_rank"')]
    if keyword(call, "type") is None:
        edits += [edit for edit in [_with_argument(call, "type=int")] if edit is not None]
    default = keyword(call, "default")
    value = 'int(os.environ.get("LOCAL_RANK", 0))'
    if default is not None:
        edits.append(Edit(_start(default), _end(default), value))
    elif edits[-1].text.startswith(","):
        edits[-1] = edits[-1]._replace(text=f", type=int, default={value}")
    else:
        edits += [edit for edit in [_with_argument(call, f"default={value}")] if edit is not None]
    return edits


def _converted(code: Code, hit: Hit) -> list[Edit]:
    """Convert a rank from the environment to an integer where it is read."""
    if not isinstance(hit.node, ast.expr):
        return []
    made = code.origins(hit.node)
    if len(made) != 1 or made[0].code is not code:
        return []
    node = made[0].node
    return [Edit(_start(node), _start(node), "int("), Edit(_end(node), _end(node), ")")]


def _mapped(code: Code, hit: Hit) -> list[Edit]:
    """Load a checkpoint to the CPU."""
    edit = (
        _with_argument(hit.node, 'map_location="cpu"') if isinstance(hit.node, ast.Call) else None
    )
    return [edit] if edit is not None else []


def _made_once(code: Code, hit: Hit) -> list[Edit]:
    """Accept a folder that exists."""
    call = hit.node
    if not isinstance(call, ast.Call) or code.dotted(call.func) == "os.mkdir":
        return []
    edit = _with_argument(call, "exist_ok=True")
    return [edit] if edit is not None else []


def _guarded(code: Code, hit: Hit) -> list[Edit]:
    """Save on rank 0 alone."""
    statement = code.statement(hit.node)
    dist = next((name for name, full in code.imports.items() if full == "torch.distributed"), "")
    first, last = statement.lineno, statement.end_lineno or statement.lineno
    if not dist or not isinstance(statement, ast.Expr) or guards(code, statement):
        return []
    if any(
        isinstance(each, (ast.Constant, ast.JoinedStr)) and each.lineno != each.end_lineno
        for each in ast.walk(statement)
    ):
        # Do not indent the lines of a multi-line string.
        return []
    edit = _before(code, statement, f"if {dist}.get_rank() == 0:")
    inner = [Edit((line, 0), (line, 0), "    ") for line in range(first, last + 1)]
    return [edit, *inner] if edit is not None else []


FIXES: Mapping[str, Callable[[Code, Hit], list[Edit]]] = {
    "DDP101": _passed,
    "DDP103": _set_epoch,
    "DDP108": _unshuffled,
    "DDP206": _spelled,
    "DDP207": _converted,
    "DDP501": _guarded,
    "DDP503": _mapped,
    "DDP507": _made_once,
}
"""The functions that fix problems, by code. They return no edits if a fix is not safe."""


# -- files


def edited(text: str, edits: Iterable[Edit]) -> str:
    """Apply edits to a text. Skip an edit that overlaps an earlier one."""
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    data = b"".join(lines)
    newline = "\r\n" if "\r\n" in text else "\n"
    spans: list[tuple[int, int, int, str]] = []
    for order, each in enumerate(dict.fromkeys(edits)):
        begin = starts[each.start[0] - 1] + each.start[1]
        end = starts[each.end[0] - 1] + each.end[1]
        if not any(begin < other[1] and other[0] < end for other in spans):
            spans.append((begin, end, order, each.text.replace("\n", newline)))
    for begin, end, _, new in sorted(spans, key=lambda each: (each[0], each[2]), reverse=True):
        data = data[:begin] + new.encode() + data[end:]
    return data.decode()


def texts(path: str, lines: list[str], edits: Iterable[Edit]) -> tuple[str, str] | None:
    """Return a file's text before and after some edits; None if it cannot be edited safely."""
    try:
        text = opening.contents(path, MAX_SIZE, links=True).decode()
    except (OSError, ValueError):
        return None
    if text.splitlines() != lines:
        # The text differs from the file: other encodings, spaces of web pages, notebooks.
        return None
    after = edited(text, edits)
    try:
        ast.parse(after)
    except (SyntaxError, ValueError, RecursionError):
        return None
    return text, after


def diff(path: str, before: str, after: str) -> Iterator[str]:
    """Yield the lines of a unified diff."""
    lines = (before.splitlines(keepends=True), after.splitlines(keepends=True))
    for line in difflib.unified_diff(*lines, path, path):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def write(path: str, text: str) -> None:
    """Replace a file's content atomically. Keep links and permissions."""
    real = os.path.realpath(path)
    handle, name = tempfile.mkstemp(dir=os.path.dirname(real), prefix=".ddpdoctor-")
    try:
        with os.fdopen(handle, "w", newline="") as file:
            file.write(text)
        os.chmod(name, os.stat(real).st_mode & 0o7777)
        os.replace(name, real)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
