"""Parse JSON with comments, and change one place in its text while the rest stays as it is.

Comments (``//`` and ``/* */``) and trailing commas are part of the language, as in VS Code. A file
of nothing but comments is a document without a root.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

BOM = "\ufeff"
INDENT = "    "  # One level of indentation in a file that has none yet

BLANKS = " \t\r\n"
_TOKEN = re.compile(
    # A string ends with its line at the latest.
    r'"[^"\\\r\n]*(?:\\.[^"\\\r\n]*)*"?|(?P<comment>//[^\r\n]*|/\*(?s:.*?)(?:\*/|\Z))'
    r'|[][{},:/]|[^][{},:/" \t\r\n]+'
)
_SPACE = re.compile(r"[ \t\r\n]*")
_COMMA = re.compile(r"[ \t\r\n]*,")
_INDENT = re.compile("[ \t]*")
_EOL = re.compile(r"\r\n|\n|\r")
_LINE_ENDS = re.compile(r"[ \t]*(?:[\r\n]|\Z)")
_SURROGATE = re.compile("[\ud800-\udfff]")
_DECODER = json.JSONDecoder(parse_int=float)


class JsoncError(Exception):
    """The text is not JSON with comments, or lacks the required shape.

    Args:
        message: What is wrong, without a trailing full stop.
        line: The line number, from 1.
    """

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.message = message
        self.line = line


class Node:
    """A value, and its place in the text.

    Attributes:
        start: Position of its first character.
        end: Position after its last character.
        value: The decoded value. Of a repeated key the last one counts. Numbers are floats.
        key: The key of a member; None for an element.
        first: Position of the first character of a member's key, or of the element.
        comma: Position of the comma that follows, if there is one.
    """

    def __init__(self, plain: str, strict: str, first: int, key: str | None, start: int) -> None:
        self.value, self.end = _DECODER.raw_decode(strict, start)
        self._plain, self._strict = plain, strict
        self.start, self.key, self.first = start, key, first
        comma = _COMMA.match(plain, self.end)
        self.comma = comma.end() - 1 if comma else None

    @cached_property
    def items(self) -> tuple[Node, ...]:
        """The elements of an array, or the members of an object."""
        items: list[Node] = []
        text, at = self._strict, _skip(self._strict, self.start + 1)
        while isinstance(self.value, (list, dict)) and text[at] not in "]}":
            first, key = at, None
            if isinstance(self.value, dict):
                key, at = _DECODER.raw_decode(text, at)
                at = _skip(text, _skip(text, at) + 1)
            items.append(Node(self._plain, text, first, key, at))
            at = _skip(text, items[-1].end)
            at = _skip(text, at + 1) if text[at] == "," else at
        return tuple(items)

    def members(self, key: str) -> list[Node]:
        """Return the values of a key of this object, in the order of the text."""
        return [item for item in self.items if item.key == key]


@dataclass(frozen=True)
class Comment:
    """A comment, and its place in the text. The line end after ``//`` is not part of it."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Document:
    """A parsed text. ``root`` is None if there are only blanks and comments."""

    text: str
    root: Node | None
    comments: tuple[Comment, ...]

    def line(self, at: int) -> int:
        """Return the line number of a position, from 1."""
        return _line(self.text, at)

    @property
    def eol(self) -> str:
        """The line end of the file, which is that of its first line."""
        found = _EOL.search(self.text)
        return found.group() if found else "\n"

    def _line_start(self, at: int) -> int:
        return max(self.text.rfind("\n", 0, at), self.text.rfind("\r", 0, at)) + 1

    def indent_at(self, at: int) -> str:
        """Return the blanks at the start of the line of a position."""
        found = _INDENT.match(self.text, self._line_start(at))
        return found.group() if found else ""

    @property
    def member_indent(self) -> str:
        """The indentation of the members of the root."""
        if self.root is None:
            return INDENT
        for item in self.root.items:
            if not self.text[self._line_start(item.first) : item.first].strip(" \t"):
                return self.indent_at(item.first)
        return self.indent_at(self.root.start) + INDENT

    @property
    def unit(self) -> str:
        """One level of indentation."""
        outer = self.indent_at(self.root.start) if self.root else ""
        return self.member_indent.removeprefix(outer) or INDENT

    def comments_of(self, node: Node) -> list[Comment]:
        """Return the comments in an array or object, without those inside its items' values."""
        return [
            comment
            for comment in self.comments
            if node.start < comment.start < node.end
            and not any(item.start < comment.start < item.end for item in node.items)
        ]

    def render(self, value: object, base: str) -> str:
        """Return a value as text in the style of the document.

        Args:
            value: The value.
            base: The indentation of all lines but the first.
        """
        text = json.dumps(value, indent=self.unit, ensure_ascii=False)
        # Half a surrogate pair (a file name that is not UTF-8) can only be written as an escape.
        text = _SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)
        return text.replace("\n", self.eol + base)

    def replace(self, node: Node, value: object) -> str:
        """Return the text with another value in place of a node."""
        rendered = self.render(value, self.indent_at(node.start))
        return self.text[: node.start] + rendered + self.text[node.end :]

    def insert(self, array: Node, at: int, elements: Sequence[object]) -> str:
        """Return the text with elements put first into an array.

        They are written on the line of the ``[`` if what follows it is on that line (``[]`` and
        ``[{``), else on lines of their own.

        Args:
            array: The array.
            at: The position after the ``[``, or after a comment that belongs to it.
            elements: At least one.
        """
        first = array.items[0].first if array.items else array.end - 1
        if not _EOL.search(self.text, array.start, first):
            base = self.indent_at(array.start)
            leads = ["", *[" "] * (len(elements) - 1)]
        else:
            base = self.indent_at(first if array.items else array.start)
            base += "" if array.items else self.unit
            leads = [self.eol + base] * len(elements)
        pieces = [lead + self.render(e, base) for lead, e in zip(leads, elements, strict=True)]
        end = "," if array.items else ""
        return self.text[:at] + ",".join(pieces) + end + self.text[at:]

    def _with_blanks(self, at: int) -> int:
        """Return where the blanks and line ends before a position begin."""
        # A comment may end in blanks, which belong to it.
        least = max((comment.end for comment in self.comments if comment.end <= at), default=0)
        return least + len(self.text[least:at].rstrip(BLANKS))

    def _item_spans(self, node: Node, gone: Collection[Node]) -> Iterator[tuple[int, int]]:
        for item in gone:
            yield self._with_blanks(item.first), item.end
            if item.comma is not None:
                blank = not self.text[item.end : item.comma].strip(BLANKS)
                yield item.end if blank else item.comma, item.comma + 1
        left = [item for item in node.items if item not in gone]
        if gone and left and node.items[-1] in gone and node.items[-1].comma is None:
            comma = left[-1].comma
            if comma is not None:
                yield comma, comma + 1

    def cut(
        self, items: Iterable[tuple[Node, Collection[Node]]], comments: Iterable[Comment] = ()
    ) -> str:
        """Return the text without some items and comments. All other comments stay.

        The blanks before an item and the comma after it are cut, too. If the last items are cut,
        so is the comma after the one that is now the last.

        Args:
            items: Arrays or objects, each with its items that are cut.
            comments: The comments that are cut, with the blanks before them.
        """
        spans = [(self._with_blanks(comment.start), comment.end) for comment in comments]
        for node, gone in items:
            spans += self._item_spans(node, gone)
        merged: list[tuple[int, int]] = []
        for start, end in sorted(spans):
            if merged and start <= merged[-1][1]:
                start, end = merged[-1][0], max(end, merged.pop()[1])
            merged.append((start, end))
        line_comments = {c.end for c in self.comments if c.text.startswith("//")}
        pieces, done = [], 0
        for start, end in merged:
            pieces.append(self.text[done:start])
            if start in line_comments and not _LINE_ENDS.match(self.text, end):
                # The line end that closed a comment was cut: keep the rest out of the comment.
                pieces.append(self.eol)
            done = end
        return "".join(pieces) + self.text[done:]


def parse(text: str) -> Document:
    """Parse a document.

    Raises:
        JsoncError: The text is not JSON with comments.
    """
    comments: list[Comment] = []
    trailing: list[int] = []
    last, comma = "", -1
    for found in _TOKEN.finditer(text, 1 if text.startswith(BOM) else 0):
        token, at = found.group(), found.start()
        if found.lastgroup == "comment":
            if token.startswith("/*") and (len(token) < 4 or not token.endswith("*/")):
                raise JsoncError("a comment without its end */", _line(text, at))
            comments.append(Comment(at, found.end(), token))
            continue
        if token in ("NaN", "Infinity", "-Infinity"):
            raise JsoncError(f"{token} is not a value of JSON", _line(text, at))
        if token in ("]", "}") and comma >= 0:
            trailing.append(comma)
        comma = at if token == "," and last not in ("", ",", ":", "[", "{") else -1
        last = token
    plain = _blanked(text, [(0, 1 if text.startswith(BOM) else 0)])
    plain = _blanked(plain, [(comment.start, comment.end) for comment in comments])
    strict = _blanked(plain, [(at, at + 1) for at in trailing])
    root = None
    if strict.strip(BLANKS):
        start = _skip(strict, 0)
        try:
            _DECODER.decode(strict)
            root = Node(plain, strict, start, None, start)
        except json.JSONDecodeError as error:
            message = f"{error.msg[:1].lower()}{error.msg[1:]}"
            raise JsoncError(message, _line(text, error.pos)) from None
        except RecursionError:
            raise JsoncError("nested too deep", 1) from None
    return Document(text, root, tuple(comments))


def _blanked(text: str, spans: Iterable[tuple[int, int]]) -> str:
    """Return a text of the same length with blanks in place of some spans."""
    pieces, done = [], 0
    for start, end in spans:
        pieces += [text[done:start], " " * (end - start)]
        done = end
    return "".join([*pieces, text[done:]])


def _skip(text: str, at: int) -> int:
    """Return the position of the next character that is not blank."""
    found = _SPACE.match(text, at)
    return found.end() if found else at


def line_end(text: str, at: int) -> str:
    """Return the line end at a position, or an empty string."""
    found = _EOL.match(text, at)
    return found.group() if found else ""


def _line(text: str, at: int) -> int:
    return len(_EOL.findall(text, 0, at)) + 1
