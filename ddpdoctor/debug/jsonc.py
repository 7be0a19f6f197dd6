"""Parse JSON with comments, and change one place in its text while the rest stays as it is.

Comments (``//`` and ``/* */``) and trailing commas are part of the language, as in VS Code. A file
of nothing but comments is a document without a root.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

MAX_DEPTH = 100
"""Deepest nesting that is parsed. VS Code's own files have about six levels."""

BOM = "\ufeff"
INDENT = "    "
"""One level of indentation in a file that has none yet."""

BLANKS = " \t\r\n"
_CHARACTERS = r'[^"\\\x00-\x1f]*'
_TOKEN = re.compile(
    r"(?P<blanks>[ \t\r\n]+)|(?P<comment>//[^\r\n]*|/\*(?s:.*?)\*/)"
    rf'|(?P<string>"{_CHARACTERS}(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{{4}}){_CHARACTERS})*")'
    r"|(?P<number>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<word>(?:true|false|null)\b)|(?P<mark>[][{}:,])",
    re.ASCII,
)
_WORDS = {"true": True, "false": False, "null": None}
_INDENT = re.compile("[ \t]*")
_EOL = re.compile(r"\r\n|\n|\r")
_LINE_ENDS = re.compile(r"[ \t]*(?:[\r\n]|\Z)")
_SURROGATE = re.compile("[\ud800-\udfff]")


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


@dataclass(eq=False)
class Node:
    """A value, and its place in the text.

    Attributes:
        start: Position of its first character.
        end: Position after its last character.
        value: The decoded value. Of a repeated key the last one counts. Numbers are floats.
        items: The elements of an array, or the members of an object.
        key: The key of a member; None for an element.
        first: Position of the first character of a member's key, or of the element.
        comma: Position of the comma that follows, if there is one.
    """

    start: int
    end: int
    value: object
    items: tuple[Node, ...] = ()
    key: str | None = None
    first: int = 0
    comma: int | None = None

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
    parser = _Parser(text)
    root = None if parser.at_end else parser.value(0)
    if not parser.at_end:
        raise parser.error("nothing but comments may follow the end of the document")
    return Document(text, root, tuple(parser.comments))


def line_end(text: str, at: int) -> str:
    """Return the line end at a position, or an empty string."""
    found = _EOL.match(text, at)
    return found.group() if found else ""


def _line(text: str, at: int) -> int:
    return len(_EOL.findall(text, 0, at)) + 1


class _Parser:
    """A recursive parser that holds the current token."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.comments: list[Comment] = []
        self.start = 0
        self.end = 1 if text.startswith(BOM) else 0
        self.kind = ""
        """``string``, ``number``, ``word``, or a mark. Empty at the end, and for an unknown one."""
        self.advance()

    @property
    def at_end(self) -> bool:
        return self.start == len(self.text)

    def error(self, message: str, at: int | None = None) -> JsoncError:
        return JsoncError(message, _line(self.text, self.start if at is None else at))

    def advance(self) -> None:
        """Move to the next token, and collect the comments before it."""
        while True:
            self.start = self.end
            found = _TOKEN.match(self.text, self.start)
            if found is None:
                break
            self.end = found.end()
            if found.lastgroup == "comment":
                self.comments.append(Comment(self.start, self.end, found.group()))
            elif found.lastgroup != "blanks":
                self.kind = found.group() if found.lastgroup == "mark" else str(found.lastgroup)
                return
        self.kind = ""
        if self.text.startswith("/*", self.start):
            raise self.error("a comment without its end */")
        if self.text.startswith('"', self.start):
            raise self.error("a string that does not end, or has a wrong escape in it")

    def value(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise self.error(f"nested more than {MAX_DEPTH} levels deep")
        node = Node(self.start, self.end, None, first=self.start)
        if self.kind in ("{", "["):
            close = "}" if self.kind == "{" else "]"
            node.items = self._items(close, depth)
            node.end = self.end
            node.value = [item.value for item in node.items]
            if close == "}":
                node.value = {item.key: item.value for item in node.items}
        elif self.kind in ("string", "number", "word"):
            token = self.text[self.start : self.end]
            if self.kind == "string":
                node.value = json.loads(token)
            else:
                node.value = float(token) if self.kind == "number" else _WORDS[token]
        else:
            raise self.error("the end is missing" if self.at_end else "a value was expected")
        self.advance()
        return node

    def _items(self, close: str, depth: int) -> tuple[Node, ...]:
        """Parse the items of an array or object up to its closing bracket."""
        opened, items = self.start, []
        self.advance()
        while self.kind != close:
            if self.at_end:
                raise self.error(f"this bracket has no {close} to it", opened)
            first, key = self.start, None
            if close == "}":
                if self.kind != "string":
                    raise self.error("a key in double quotes was expected")
                key = str(json.loads(self.text[self.start : self.end]))
                self.advance()
                if self.kind != ":":
                    raise self.error("a colon was expected")
                self.advance()
            item = self.value(depth + 1)
            item.first, item.key = first, key
            items.append(item)
            if self.kind == ",":
                item.comma = self.start
                self.advance()
            elif self.kind != close and not self.at_end:
                raise self.error(f"a comma or {close} was expected")
        return tuple(items)
