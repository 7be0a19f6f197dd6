"""Edit files of ``.vscode``, which are JSON with comments, and keep everything else in them.

Comments (``//`` and ``/* */``) and trailing commas are part of the language, as in VS Code. A file
with only comments is a document without a root.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run import rundir

# -- parse JSON with comments, and change one place in its text while the rest stays as it is


BOM = "\ufeff"
INDENT = "    "  # One level of indentation in a file that has none yet

BLANKS = " \t\r\n"
_TOKEN = re.compile(
    # A string ends at the end of its line at the latest.
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
    """The text is not JSON with comments, or lacks the required shape. Lines count from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.message = message
        self.line = line


class Node:
    """A value, and its place in the text.

    Attributes:
        start: Position of its first character.
        end: Position after its last character.
        value: The decoded value. For a repeated key it is the last one. Numbers are floats.
        key: The key of a member. None for an element.
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
        """Return a value as text in the document's style. ``base`` indents all lines but one."""
        text = json.dumps(_with_integers(value), indent=self.unit, ensure_ascii=False)
        # Half a surrogate pair (a file name that is not UTF-8) can only be written as an escape.
        text = _SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)
        return text.replace("\n", self.eol + base)

    def replace(self, node: Node, value: object) -> str:
        """Return the text with another value in place of a node."""
        rendered = self.render(value, self.indent_at(node.start))
        return self.text[: node.start] + rendered + self.text[node.end :]

    def insert(self, array: Node, at: int, elements: Sequence[object]) -> str:
        """Return the text with elements put first into an array, at a position after its ``[``.

        They go on the line of the ``[`` if the next token is on that line (``[]`` and ``[{``), or
        else on separate lines.
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
        """Return the start of the blanks and line ends before a position."""
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
        """Return the text without some items of arrays or objects, and without some comments.

        The blanks before an item and the comma after it are cut, too. If the last items are cut, so
        is the comma after the new last item. All other comments stay.
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


def parse_jsonc(text: str) -> Document:
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


def _with_integers(value: Any) -> Any:
    """Return a decoded value with finite numbers, and integers in place of integral floats."""
    if isinstance(value, dict):
        return {key: _with_integers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_integers(each) for each in value]
    if isinstance(value, float):
        value = max(-sys.float_info.max, min(value, sys.float_info.max))
        return int(value) if value.is_integer() and abs(value) < 1 << 53 else value
    return value


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


# -- edit files of ``.vscode``, and keep everything else in them


PREFIX = "ddpdoctor: "
_OURS = re.compile(rf"{PREFIX}|rank \d+(?: on [\w.-]+)? \(ddpdoctor[,)]")
MADE = "// made by ddpdoctor"
MADE_FILE = "// file made by ddpdoctor"


def any_name(_: str) -> bool:
    """Accept every name, for :attr:`Section.replaced`."""
    return True


def is_ours(name: object) -> bool:
    """Return whether an entry with this name is ddpdoctor's."""
    return isinstance(name, str) and _OURS.match(name) is not None


@dataclass(frozen=True)
class Section:
    """A list in the root object, and ddpdoctor's entries in it."""

    key: str  # The key of the list
    naming: str  # The property of an element that holds its name
    wanted: Sequence[Mapping[str, object]]  # The entries to write, in order
    replaced: Callable[[str], bool]
    """Whether an existing entry of ddpdoctor with this name is removed."""
    merged: Callable[[str, Any, Any], object] = lambda _key, _theirs, ours: ours
    """The value of a key that an entry has, from the key, the value in the file, and the wanted
    one. The user's own keys stay in any case."""

    def with_users_changes(self, document: Document) -> Section:
        """Return the section with the user's changes to the entries of the document."""
        now = {
            item.value[self.naming]: item.value
            for array in self.arrays(document)
            for item in self.ours(array)
        }
        wanted = []
        for entry in self.wanted:
            theirs = now.get(entry[self.naming], {})
            both = {
                key: self.merged(key, theirs[key], value) if key in theirs else value
                for key, value in entry.items()
            }
            wanted.append({**theirs, **both})
        return replace(self, wanted=wanted)

    def arrays(self, document: Document) -> list[Node]:
        """Return all lists of this key. VS Code reads the last one."""
        found = document.root.members(self.key) if document.root is not None else []
        return [node for node in found if isinstance(node.value, list)]

    def ours(self, array: Node, *, replaced: bool = True) -> list[Node]:
        """Return ddpdoctor's entries in a list: those to remove, or all of them."""
        found = []
        for item in array.items:
            name = item.value.get(self.naming) if isinstance(item.value, dict) else None
            if isinstance(name, str) and is_ours(name) and (not replaced or self.replaced(name)):
                found.append(item)
        return found

    def is_present(self, document: Document) -> bool:
        """Return whether any entry of ddpdoctor is in a list of this key."""
        return any(self.ours(array, replaced=False) for array in self.arrays(document))

    def is_done(self, document: Document) -> bool:
        """Return whether the list that VS Code reads has the wanted entries."""
        now = [item for array in self.arrays(document) for item in self.ours(array)]
        if [item.value for item in now] != list(self.wanted):
            return False
        root = document.root
        return not now or root is None or root.members(self.key)[-1].start < now[0].start


def rewrite(
    text: str | None, sections: Sequence[Section], defaults: Mapping[str, object]
) -> str | None:
    """Write the wanted entries, remove the replaced ones, and leave the rest unchanged.

    Args:
        text: The content of the file. None if there is no file.
        sections: Its lists, no two with the same key.
        defaults: Other members of a root object that has to be created.

    Returns:
        The new text, which is the same if nothing has to change. None if the file is not needed.

    Raises:
        JsoncError: The text is damaged, or a member that must be a list is not one.
    """
    document = parse_jsonc(text or "")
    sections = [section.with_users_changes(document) for section in sections]
    pending = [section for section in sections if not section.is_done(document)]
    for section in pending:
        if section.wanted:
            # Check before anything moves, so that the error names a line of the user's file.
            _list(document, section.key)
    for section in pending:
        gone = [(array, section.ours(array)) for array in section.arrays(document)]
        document = parse_jsonc(document.cut(gone))
    if document.root is None:
        if not any(section.wanted for section in pending):
            return text
        document = parse_jsonc(_with_root(document, defaults, MADE_FILE if text is None else MADE))
    # Each is inserted at the top, so insert the first section last.
    for section in reversed(pending):
        if section.wanted:
            document = parse_jsonc(_with_list(document, section.key))
            array = _list(document, section.key)
            assert array is not None
            at = _after_marker(document, array)
            document = parse_jsonc(document.insert(array, at, section.wanted))
    for section in sections:
        if not section.is_present(document):
            document = parse_jsonc(_without_list(document, section.key))
    if any(section.is_present(document) for section in sections):
        return document.text
    return _without_root(document, defaults)


def find(document: Document, key: str, naming: str, name: str) -> Node | None:
    """Return the element with this name in a list of the root object, or None.

    Raises:
        JsoncError: The root is not an object, or its member of this key is not a list.
    """
    array = _list(document, key)
    for item in array.items if array else ():
        if isinstance(item.value, dict) and item.value.get(naming) == name:
            return item
    return None


def _list(document: Document, key: str) -> Node | None:
    """Return the list that VS Code reads, which is the last one with this key."""
    root = document.root
    if root is None:
        return None
    if not isinstance(root.value, dict):
        raise JsoncError("the file must hold an object { }", document.line(root.start))
    found = root.members(key)
    if found and not isinstance(found[-1].value, list):
        raise JsoncError(f'"{key}" must be a list [ ]', document.line(found[-1].start))
    return found[-1] if found else None


def _markers(document: Document, node: Node) -> list[Comment]:
    return [c for c in document.comments_of(node) if c.text in (MADE, MADE_FILE)]


def _after_marker(document: Document, node: Node) -> int:
    """Return the position after the opening bracket, or after our comment that follows it."""
    for marker in _markers(document, node):
        if not document.text[node.start + 1 : marker.start].strip(BLANKS):
            return marker.end
    return node.start + 1


def _with_root(document: Document, defaults: Mapping[str, object], marker: str) -> str:
    """Return the text with an object after the comments, on a new line."""
    text, eol = document.text, document.eol
    members = ",".join(
        f"{eol}{INDENT}{document.render(key, '')}: {document.render(value, INDENT)}"
        for key, value in defaults.items()
    )
    separator = eol if text.removeprefix(BOM) else ""
    return f"{text}{separator}{{ {marker}{members}{eol}}}{eol}"


def _without_root(document: Document, defaults: Mapping[str, object]) -> str | None:
    """Return the text without ddpdoctor's object, or at least without its comment."""
    text, root = document.text, document.root
    markers = _markers(document, root) if root is not None else []
    if root is None or not markers:
        return text
    only_defaults = all((item.key, item.value) in defaults.items() for item in root.items)
    if not only_defaults or len(document.comments_of(root)) > len(markers):
        return document.cut([], markers)
    # Remove only the line end that we wrote: half a line end of the user may come before it.
    eol = line_end(text, markers[0].end)
    left = text[: root.start].removesuffix(eol) + text[root.end :].removeprefix(eol)
    return None if markers[0].text == MADE_FILE and not left.removeprefix(BOM) else left


def _with_list(document: Document, key: str) -> str:
    """Return the text with the list in its root, if necessary an empty one with our comment."""
    root = document.root
    if root is None or _list(document, key) is not None:
        return document.text
    # VS Code begins its files with comments about the file, so insert after those.
    first = root.items[0].first if root.items else root.end
    header = [comment.end for comment in document.comments_of(root) if comment.start < first]
    at = max([_after_marker(document, root), *header])
    text, lead = document.text, document.eol + document.member_indent
    made = f"{lead}{document.render(key, '')}: [ {MADE}{lead}]"
    return text[:at] + made + ("," if root.items else "") + text[at:]


def _without_list(document: Document, key: str) -> str:
    """Return the text without the list if it is ours and empty, or else without our comment."""
    root = document.root
    if root is None:
        return document.text
    left: list[Comment] = []
    gone: list[Node] = []
    for item in root.members(key):
        markers = _markers(document, item)
        if markers and not item.items and document.comments_of(item) == markers:
            gone.append(item)
        else:
            left += markers
    return document.cut([(root, gone)], left)


# -- the files in a workspace's ``.vscode``


FOLDER = ".vscode"
LAUNCH = "launch.json"
LOCK_SECONDS = 10.0  # How long to wait for another process that edits the same workspace

Edit = Callable[["str | None"], "str | None"]
"""From the text of a file to the new text. None means no file.

Raises :class:`~ddpdoctor.debug.vscode_files.JsoncError` if the text cannot be edited.
"""


def current_directory() -> Path:
    """Return the working directory under the shell's name for it, including links.

    VS Code names files by the path that its folder was opened with, which may be a link.
    """
    here, named = Path.cwd(), os.environ.get("PWD", "")
    with contextlib.suppress(OSError):
        if os.path.isabs(named) and os.path.samefile(named, here):
            return Path(named)
    return here


def find_workspace(start: Path, chosen: str | None) -> Path:
    """Return the folder that is open in VS Code: the chosen one, or a guess.

    The guess is the nearest of ``start`` and its parents with a ``.vscode`` or ``.git``, or else
    ``start``. The home directory is excluded: its ``.vscode`` holds VS Code's extensions.

    Raises:
        DoctorError: The chosen folder is not a directory.
    """
    if chosen is not None:
        named = start / chosen
        if not named.is_dir():
            raise DoctorError(
                f"the workspace {chosen} is not a directory", "name the folder that VS Code opens"
            )
        return Path(os.path.normpath(named))
    start = start.absolute()
    home = os.path.realpath(os.path.expanduser("~"))
    for folder in (start, *start.parents):
        marked = (folder / FOLDER).is_dir() or (folder / ".git").exists()
        if marked and os.path.realpath(folder) != home:
            return folder
    return start


def job_workspace(chosen: str | None) -> str | None:
    """Return the workspace of a job that starts here. None if there is none."""
    try:
        return str(find_workspace(current_directory(), chosen))
    except (OSError, DoctorError):
        return None


def state_file(workspace: Path, suffix: str) -> Path:
    """Return the path of ddpdoctor's file for a workspace, outside of it.

    Raises:
        DoctorError: The base directory of runs belongs to another user.
        OSError: The directory cannot be created.
    """
    key = hashlib.sha256(os.fsencode(os.path.realpath(workspace))).hexdigest()[:16]
    return rundir.private_base() / f"vscode-{key}.{suffix}"


@contextlib.contextmanager
def locked(workspace: Path) -> Iterator[None]:
    """Keep other processes of this user from editing the same workspace.

    Raises:
        DoctorError: Another process holds the lock for too long, or no lock can be created.
    """
    try:
        path = state_file(workspace, "lock")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise DoctorError(f"no lock for {workspace / FOLDER}: {error}") from None
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DoctorError(
                        f"another ddpdoctor is changing {workspace / FOLDER}", "try again"
                    ) from None
            time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def edit(workspace: Path, edits: Mapping[str, Edit]) -> list[Path]:
    """Change files in the workspace's ``.vscode``, either all or none of them.

    Nothing is written until all edits are known to work. Unchanged files are not written.

    Returns:
        The files that changed.

    Raises:
        DoctorError: A file cannot be read, parsed or written. All files are as they were, unless
            the disk failed between two of them.
    """
    with locked(workspace):
        files = {name: _File(workspace, name) for name in edits}
        changed: list[tuple[_File, str | None]] = []
        for name, file in files.items():
            before = file.read()
            try:
                after = edits[name](before)
            except JsoncError as error:
                raise DoctorError(
                    f"{file.path}:{error.line}: {error.message}",
                    "the file is unchanged; fix it or move it away, then try again",
                ) from None
            if after != before:
                file.check_writable()
                changed.append((file, after))
        for file, after in changed:
            if after is None:
                file.delete()
            else:
                file.write(after)
        return [file.path for file, _ in changed]


class _File:
    """A file in ``.vscode``, or the target of a link there.

    Raises:
        DoctorError: The link leads out of the workspace.
    """

    def __init__(self, workspace: Path, name: str) -> None:
        self.path = workspace / FOLDER / name
        self.target = Path(os.path.realpath(self.path))
        root = Path(os.path.realpath(workspace))
        if root not in self.target.parents:
            raise DoctorError(
                f"{self.path} links to {self.target}, outside the workspace; it is unchanged",
                "make it a regular file, or name the other workspace with --workspace DIR",
            )

    def read(self) -> str | None:
        """Return the text, with its line ends and its byte order mark."""
        with self._one_line("read"):
            try:
                if not stat.S_ISREG(self.target.stat().st_mode):
                    raise DoctorError(f"{self.path} is not a file; it is unchanged")
                content = self.target.read_bytes()
            except FileNotFoundError:
                return None
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise DoctorError(
                f"{self.path}:{line}: not UTF-8", "the file is unchanged; save it as UTF-8"
            ) from None

    def check_writable(self) -> None:
        with self._one_line("written"):
            try:
                mode = self.target.stat().st_mode
            except FileNotFoundError:
                return
            # Root could still write to it, but the owner protected it.
            if not mode & 0o222 or not os.access(self.target, os.W_OK):
                raise PermissionError(errno.EACCES, "it is read-only")

    def write(self, text: str) -> None:
        """Replace the content atomically, with the owner and mode of the old file."""
        temporary = self.target.with_name(f".{self.target.name}.{secrets.token_hex(4)}.tmp")
        with self._one_line("written"):
            self.target.parent.mkdir(exist_ok=True)
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with open(os.open(temporary, flags, 0o666), "wb") as file:
                    with contextlib.suppress(FileNotFoundError):
                        facts = self.target.stat()
                        # Root in a container edits files of a user outside, who remains their
                        # owner.
                        with contextlib.suppress(PermissionError):
                            os.fchown(file.fileno(), facts.st_uid, facts.st_gid)
                        os.fchmod(file.fileno(), stat.S_IMODE(facts.st_mode))
                    file.write(text.encode())
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.target)
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink()

    def delete(self) -> None:
        """Remove the file, and ``.vscode`` if nothing else is in it."""
        with self._one_line("removed"):
            self.target.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    @contextlib.contextmanager
    def _one_line(self, done: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DoctorError(
                f"{self.path} cannot be {done}: {error.strerror or error}",
                "nothing was changed in it",
            ) from None
