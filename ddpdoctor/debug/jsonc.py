"""Parse JSON with comments as text with spans, to change one place and keep the rest as it is.

Comments (``//`` and ``/* */``) and trailing commas are part of the language, as in VS Code; a file
of nothing but comments is a document without a root. All functions take text and return text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

MAX_DEPTH = 100
"""Deepest nesting that is read; VS Code's own files have about six levels."""

BOM = "\ufeff"
INDENT = "    "
"""One level of indentation in a file that has none yet."""

_TRIVIA = re.compile(r"[ \t\r\n]+|(?P<comment>//[^\r\n]*|/\*(?s:.*?)\*/)")
_CHARACTERS = r'[^"\\\x00-\x1f]*'
_STRING = re.compile(
    rf'"{_CHARACTERS}(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{{4}}){_CHARACTERS})*"', re.ASCII
)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORD = re.compile(r"(?:true|false|null)\b", re.ASCII)
_WORDS = {"true": True, "false": False, "null": None}
_EOL = re.compile(r"\r\n|\n|\r")
_LINE_ENDS = re.compile(r"[ \t]*(?:[\r\n]|\Z)")
_SURROGATE = re.compile("[\ud800-\udfff]")


class JsoncError(Exception):
    """The text is not JSON with comments, or not of the shape that is needed.

    Args:
        message: What is wrong, without a trailing full stop.
        line: The line it is on, counted from 1.
    """

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.message = message
        self.line = line


@dataclass(frozen=True)
class Node:
    """A value and where it stands.

    Attributes:
        start: Its first character.
        end: Behind its last character.
        value: What it means; of a key that is there twice the last one counts. Numbers are floats.
        items: The elements of an array, the members of an object.
    """

    start: int
    end: int
    value: object
    items: tuple[Item, ...] = ()

    def members(self, key: str) -> list[Node]:
        """The values of a key of this object, in the order of the text."""
        return [item.node for item in self.items if item.key == key]


@dataclass(frozen=True)
class Item:
    """An element of an array, or a member of an object.

    Attributes:
        start: Its first character; of a member, that of its key.
        key: The key of a member; None for an element.
        node: The value.
        comma: Where the comma behind it is, if there is one.
    """

    start: int
    key: str | None
    node: Node
    comma: int | None


@dataclass(frozen=True)
class Comment:
    """A comment and where it stands; the line end behind ``//`` is not part of it."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Document:
    """A parsed text; ``root`` is None if there is nothing but blanks and comments."""

    text: str
    root: Node | None
    comments: tuple[Comment, ...]

    def line(self, at: int) -> int:
        """The line of a position, counted from 1."""
        return _line(self.text, at)

    @property
    def eol(self) -> str:
        """The line end of the file: that of its first line."""
        found = _EOL.search(self.text)
        return found.group() if found else "\n"

    def indent_at(self, at: int) -> str:
        """The blanks at the start of the line of a position."""
        start = self._line_start(at)
        return self.text[start : _skip_blanks(self.text, start)]

    def starts_line(self, at: int) -> bool:
        """Whether nothing but blanks stands before a position on its line."""
        return self.text[self._line_start(at) : at].strip(" \t") == ""

    def _line_start(self, at: int) -> int:
        return max(self.text.rfind("\n", 0, at), self.text.rfind("\r", 0, at)) + 1

    @property
    def member_indent(self) -> str:
        """The indentation of the members of the root."""
        if self.root is None:
            return INDENT
        for item in self.root.items:
            if self.starts_line(item.start):
                return self.indent_at(item.start)
        return self.indent_at(self.root.start) + INDENT

    @property
    def unit(self) -> str:
        """One level of indentation."""
        outer = self.indent_at(self.root.start) if self.root else ""
        return self.member_indent.removeprefix(outer) or INDENT

    def blanks_before(self, at: int) -> int:
        """Where the blanks and line ends before a position begin."""
        # A comment may end in blanks, which are its own.
        least = max((comment.end for comment in self.comments if comment.end <= at), default=0)
        while at > least and self.text[at - 1] in " \t\r\n":
            at -= 1
        return at

    def comments_of(self, node: Node) -> list[Comment]:
        """The comments in an array or object, without those inside its elements' values."""
        return [
            comment
            for comment in self.comments
            if node.start < comment.start < node.end
            and not any(item.node.start < comment.start < item.node.end for item in node.items)
        ]


def parse(text: str) -> Document:
    """Read a document.

    Raises:
        JsoncError: The text is not JSON with comments.
    """
    parser = _Parser(text)
    root = parser.document()
    return Document(text, root, tuple(parser.comments))


def render(document: Document, value: object, base: str) -> str:
    """A value as text in the style of the document, its further lines indented by ``base``."""
    text = json.dumps(value, indent=document.unit, ensure_ascii=False)
    # Half a surrogate pair (a file name that is not UTF-8) cannot be written but as an escape.
    text = _SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)
    return text.replace("\n", document.eol + base)


def replace(document: Document, node: Node, value: object) -> str:
    """The text with another value in the place of one."""
    rendered = render(document, value, document.indent_at(node.start))
    return document.text[: node.start] + rendered + document.text[node.end :]


def insert(document: Document, array: Node, at: int, elements: Sequence[object]) -> str:
    """The text with elements put first into an array.

    They stand one behind the other on the line of the ``[`` if what follows it does (``[]`` and
    ``[{``), and on their own lines if that does.

    Args:
        document: The document.
        array: The array.
        at: Behind the ``[``, or behind a comment that belongs to it.
        elements: At least one.
    """
    text, first = document.text, array.items[0].start if array.items else array.end - 1
    if not _EOL.search(text, array.start, first):
        base = document.indent_at(array.start)
        leads = ["", *[" "] * (len(elements) - 1)]
    else:
        own = document.indent_at(array.start) + document.unit
        base = document.indent_at(first) if array.items else own
        leads = [document.eol + base] * len(elements)
    pieces = [lead + render(document, e, base) for lead, e in zip(leads, elements, strict=True)]
    return text[:at] + ",".join(pieces) + ("," if array.items else "") + text[at:]


def item_spans(document: Document, node: Node, gone: Collection[Item]) -> list[tuple[int, int]]:
    """What to cut so that these items are gone from their array or object, and nothing else.

    The blanks before an item and the comma behind it go with it, comments stay. If the last ones
    go, so does the comma behind the one that is now the last.
    """
    text = document.text
    spans: list[tuple[int, int]] = []
    for item in gone:
        start, end = document.blanks_before(item.start), item.node.end
        if item.comma is None:
            spans.append((start, end))
        elif text[end : item.comma].strip(" \t\r\n") == "":
            spans.append((start, item.comma + 1))
        else:
            spans += [(start, end), (item.comma, item.comma + 1)]
    if gone and node.items[-1] in gone and node.items[-1].comma is None:
        left = [item for item in node.items if item not in gone]
        if left and left[-1].comma is not None:
            spans.append((left[-1].comma, left[-1].comma + 1))
    return spans


def comment_span(document: Document, comment: Comment) -> tuple[int, int]:
    """What to cut so that a comment is gone: itself and the blanks before it."""
    return document.blanks_before(comment.start), comment.end


def cut(document: Document, spans: Iterable[tuple[int, int]]) -> str:
    """The text without these spans."""
    text = document.text
    line_comments = {c.end for c in document.comments if c.text.startswith("//")}
    pieces: list[str] = []
    done = 0
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    for start, end in merged:
        pieces.append(text[done:start])
        if start in line_comments and not _LINE_ENDS.match(text, end):
            # The line end that closed the comment was cut; what follows must not become part of it.
            pieces.append(document.eol)
        done = end
    return "".join(pieces) + text[done:]


def line_end(text: str, at: int) -> str:
    """The line end at a position; empty if there is none."""
    found = _EOL.match(text, at)
    return found.group() if found else ""


def _line(text: str, at: int) -> int:
    return len(_EOL.findall(text, 0, at)) + 1


def _skip_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t":
        at += 1
    return at


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.comments: list[Comment] = []

    def document(self) -> Node | None:
        self.at = 1 if self.text.startswith(BOM) else 0
        self._trivia()
        if self.at == len(self.text):
            return None
        root = self._value(0)
        self._trivia()
        if self.at < len(self.text):
            raise self._error("nothing but comments may follow the end of the document")
        return root

    def _error(self, message: str, at: int | None = None) -> JsoncError:
        return JsoncError(message, _line(self.text, self.at if at is None else at))

    def _trivia(self) -> None:
        while found := _TRIVIA.match(self.text, self.at):
            if comment := found.group("comment"):
                self.comments.append(Comment(found.start(), found.end(), comment))
            self.at = found.end()
        if self.text.startswith("/*", self.at):
            raise self._error("a comment without its end */")

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _value(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise self._error(f"nested more than {MAX_DEPTH} levels deep")
        start, sign = self.at, self._peek()
        if sign == "{":
            items = self._items("}", depth)
            return Node(start, self.at, {item.key: item.node.value for item in items}, items)
        if sign == "[":
            items = self._items("]", depth)
            return Node(start, self.at, [item.node.value for item in items], items)
        if sign == '"':
            word = self._string()
            return Node(start, self.at, json.loads(word))
        for pattern in (_NUMBER, _WORD):
            if found := pattern.match(self.text, start):
                self.at = found.end()
                word = found.group()
                value = _WORDS[word] if word in _WORDS else float(word)
                return Node(start, self.at, value)
        raise self._error("a value was expected" if sign else "the end is missing")

    def _string(self) -> str:
        found = _STRING.match(self.text, self.at)
        if found is None:
            raise self._error("a string that does not end, or has a wrong escape in it")
        self.at = found.end()
        return found.group()

    def _items(self, close: str, depth: int) -> tuple[Item, ...]:
        """The items up to and with the closing bracket."""
        opened = self.at
        self.at += 1
        items: list[Item] = []
        while True:
            self._trivia()
            if self._peek() == close:
                self.at += 1
                return tuple(items)
            if not self._peek():
                raise self._error(f"this bracket has no {close} to it", opened)
            start = self.at
            key = self._key() if close == "}" else None
            node = self._value(depth + 1)
            self._trivia()
            comma = self.at if self._peek() == "," else None
            items.append(Item(start, key, node, comma))
            if comma is not None:
                self.at += 1
            elif self._peek() not in ("", close):
                raise self._error(f"a comma or {close} was expected")

    def _key(self) -> str:
        if self._peek() != '"':
            raise self._error("a key in double quotes was expected")
        key = str(json.loads(self._string()))
        self._trivia()
        if self._peek() != ":":
            raise self._error("a colon was expected")
        self.at += 1
        self._trivia()
        return key
