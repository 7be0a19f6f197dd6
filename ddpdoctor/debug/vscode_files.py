"""Edit files of ``.vscode`` and keep what others wrote there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.debug import jsonc
from ddpdoctor.debug.jsonc import Comment, Document, Item, JsoncError, Node
from ddpdoctor.run import rundir

# -- ddpdoctor's own elements in files that belong to a person: put in, and taken out again


PREFIX = "ddpdoctor: "
MADE = "// made by ddpdoctor"
MADE_FILE = "// file made by ddpdoctor"


def any_name(_: str) -> bool:
    """For :attr:`Section.replaced`: all that is ours makes way."""
    return True


@dataclass(frozen=True)
class Section:
    """A list in the root object, and what is wanted in it.

    Attributes:
        key: The name of the list.
        naming: The property of an element that holds its name.
        wanted: Our elements, in order.
        replaced: Whether one of ours with this name makes way; the others stay as they are.
    """

    key: str
    naming: str
    wanted: Sequence[Mapping[str, object]]
    replaced: Callable[[str], bool]

    def ours(self, item: Item) -> str | None:
        """The name of an element if it is ours, else None."""
        value = item.node.value
        name = value.get(self.naming) if isinstance(value, dict) else None
        return name if isinstance(name, str) and name.startswith(PREFIX) else None

    def replaces(self, item: Item) -> bool:
        """Whether an element is ours and makes way."""
        name = self.ours(item)
        return name is not None and self.replaced(name)


def rewrite(
    text: str | None, sections: Sequence[Section], defaults: Mapping[str, object]
) -> str | None:
    """Put the wanted elements in, take those out that make way, and leave the rest as it is.

    Args:
        text: The file; None if there is none.
        sections: Its lists; no two of one key.
        defaults: What else a root object must have if we make it.

    Returns:
        The new text, the same one if all is as wanted; None if there shall be no file.

    Raises:
        JsoncError: The text is damaged, or has something else where a list must be.
    """
    document = jsonc.parse(text or "")
    pending = [section for section in sections if not _as_wanted(document, section)]
    for section in pending:
        if section.wanted:
            # Said before anything moves, so that the line is one of the person's file.
            _list(document, section.key)
    for section in pending:
        document = jsonc.parse(_without(document, section))
    if document.root is None:
        if not any(section.wanted for section in pending):
            return text
        marker = MADE_FILE if text is None else MADE
        document = jsonc.parse(_with_root(document, defaults, marker))
    # Each goes to the front, so the first section comes last.
    for section in reversed(pending):
        if section.wanted:
            document = jsonc.parse(_with_list(document, section.key))
            array = _list(document, section.key)
            assert array is not None
            at = _behind_marker(document, array)
            document = jsonc.parse(jsonc.insert(document, array, at, section.wanted))
    for section in sections:
        if not _present(document, section):
            document = jsonc.parse(_without_list(document, section.key))
    if any(_present(document, section) for section in sections):
        return document.text
    return _without_root(document, defaults)


def find(document: Document, key: str, naming: str, name: str) -> Node | None:
    """The element of this name in a list of the root object, or None.

    Raises:
        JsoncError: The root is no object, or has no list of this key but something else.
    """
    array = _list(document, key)
    for item in array.items if array else ():
        if isinstance(item.node.value, dict) and item.node.value.get(naming) == name:
            return item.node
    return None


def _arrays(document: Document, key: str) -> list[Node]:
    if document.root is None:
        return []
    return [node for node in document.root.members(key) if isinstance(node.value, list)]


def _present(document: Document, section: Section) -> list[Item]:
    """All elements of ours, also those in a list that VS Code does not read."""
    return [
        item
        for array in _arrays(document, section.key)
        for item in array.items
        if section.ours(item) is not None
    ]


def _as_wanted(document: Document, section: Section) -> bool:
    now = [item for item in _present(document, section) if section.replaces(item)]
    if [item.node.value for item in now] != list(section.wanted):
        return False
    if not now or document.root is None:
        return True
    # VS Code reads the last one of two values of a key.
    return document.root.members(section.key)[-1].start < now[0].start


def _without(document: Document, section: Section) -> str:
    spans: list[tuple[int, int]] = []
    for array in _arrays(document, section.key):
        gone = [item for item in array.items if section.replaces(item)]
        spans += jsonc.item_spans(document, array, gone)
    return jsonc.cut(document, spans)


def _list(document: Document, key: str) -> Node | None:
    """The list that VS Code reads: the last one of this key."""
    if document.root is None:
        return None
    if not isinstance(document.root.value, dict):
        raise JsoncError("the file must hold an object { }", document.line(document.root.start))
    found = document.root.members(key)
    if not found:
        return None
    if not isinstance(found[-1].value, list):
        raise JsoncError(f'"{key}" must be a list [ ]', document.line(found[-1].start))
    return found[-1]


def _markers(document: Document, node: Node) -> list[Comment]:
    return [c for c in document.comments_of(node) if c.text in (MADE, MADE_FILE)]


def _behind_marker(document: Document, node: Node) -> int:
    """Where to insert: behind the opening bracket, or behind our comment that follows it."""
    for marker in _markers(document, node):
        if document.text[node.start + 1 : marker.start].strip(" \t\r\n") == "":
            return marker.end
    return node.start + 1


def _behind_header(document: Document, root: Node) -> int:
    """Where to insert in the root: behind the comments before its first member.

    VS Code makes files that begin with some, which are about the file.
    """
    first = root.items[0].start if root.items else root.end
    header = [comment.end for comment in document.comments_of(root) if comment.start < first]
    return max([_behind_marker(document, root), *header])


def _with_root(document: Document, defaults: Mapping[str, object], marker: str) -> str:
    """The text with an object behind its comments, on its own line."""
    text, eol = document.text, document.eol
    members = ",".join(
        f"{eol}{jsonc.INDENT}{jsonc.render(document, key, '')}: "
        f"{jsonc.render(document, value, jsonc.INDENT)}"
        for key, value in defaults.items()
    )
    separator = eol if text.removeprefix(jsonc.BOM) else ""
    return f"{text}{separator}{{ {marker}{members}{eol}}}{eol}"


def _without_root(document: Document, defaults: Mapping[str, object]) -> str | None:
    """The text without the object that we made, or at least without the comment in it."""
    text, root = document.text, document.root
    markers = _markers(document, root) if root is not None else []
    if root is None or not markers:
        return text
    ours = [(item.key, item.node.value) in defaults.items() for item in root.items]
    if not all(ours) or len(document.comments_of(root)) > len(markers):
        return jsonc.cut(document, [jsonc.comment_span(document, marker) for marker in markers])
    # The line end that we used, not any: before it may stand half a line end of the person's.
    eol = jsonc.line_end(text, markers[0].end)
    before = text[: root.start].removesuffix(eol)
    left = before + text[root.end :].removeprefix(eol)
    return None if markers[0].text == MADE_FILE and not left.removeprefix(jsonc.BOM) else left


def _with_list(document: Document, key: str) -> str:
    """The text with the list in its root, empty and marked if it had none."""
    if _list(document, key) is not None:
        return document.text
    root = document.root
    assert root is not None
    text, lead = document.text, document.eol + document.member_indent
    at = _behind_header(document, root)
    made = f"{lead}{jsonc.render(document, key, '')}: [ {MADE}{lead}]"
    return text[:at] + made + ("," if root.items else "") + text[at:]


def _without_list(document: Document, key: str) -> str:
    """The text without the list if we made it and it is empty, or at least without the comment."""
    root = document.root
    if root is None:
        return document.text
    spans: list[tuple[int, int]] = []
    gone: list[Item] = []
    for item in root.items:
        markers = _markers(document, item.node) if item.key == key else []
        if markers and not item.node.items and document.comments_of(item.node) == markers:
            gone.append(item)
        else:
            spans += [jsonc.comment_span(document, marker) for marker in markers]
    return jsonc.cut(document, [*spans, *jsonc.item_spans(document, root, gone)])


# -- the files in a workspace's ``.vscode``: which workspace, and changing them without damage


FOLDER = ".vscode"
LAUNCH = "launch.json"
LOCK_SECONDS = 10.0
"""How long to wait for another process that edits the same workspace."""

Edit = Callable[["str | None"], "str | None"]
"""From the text of a file to the new one; None is for a file that is not, or shall not be, there.

Raises :class:`~ddpdoctor.debug.jsonc.JsoncError` if the text cannot be edited.
"""


def current_directory() -> Path:
    """The working directory under the name that the shell has for it, links included.

    VS Code names files as its folder was opened, which may be through a link.
    """
    here, named = Path.cwd(), os.environ.get("PWD", "")
    with contextlib.suppress(OSError):
        if os.path.isabs(named) and os.path.samefile(named, here):
            return Path(named)
    return here


def find_workspace(start: Path, chosen: str | None) -> Path:
    """The folder that VS Code has open: the one a person named, or a guess.

    The guess is the nearest of ``start`` and its parents with a ``.vscode`` or ``.git``, else
    ``start``. The home directory is passed over: its ``.vscode`` holds VS Code's extensions.

    Raises:
        DoctorError: The named one is no directory.
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
        has_one = (folder / FOLDER).is_dir() or (folder / ".git").exists()
        if has_one and os.path.realpath(folder) != home:
            return folder
    return start


@contextlib.contextmanager
def locked(workspace: Path) -> Iterator[None]:
    """Keep other processes of this user from editing the same workspace.

    Raises:
        DoctorError: Another one holds it for too long, or there is no place for the lock.
    """
    key = hashlib.sha256(os.fsencode(os.path.realpath(workspace))).hexdigest()[:16]
    try:
        descriptor = os.open(
            rundir.private_base() / f"vscode-{key}.lock",
            os.O_RDWR | os.O_CREAT,
            0o600,
        )
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
    """Change files in the workspace's ``.vscode``, all or none of them.

    None is written before all edits are known to work, and none whose content stays the same.

    Returns:
        Those that changed.

    Raises:
        DoctorError: A file cannot be read, understood or written, said in one line; then all are
            as they were, unless the disk gave up between two of them.
    """
    from ddpdoctor.debug.jsonc import JsoncError

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
    """A file in ``.vscode``; if it is a link, what the link leads to.

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
        """The text, with the line ends and the byte order mark that it has."""
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
            # The superuser may write to it all the same, but somebody wanted it to stay.
            if not mode & 0o222 or not os.access(self.target, os.W_OK):
                raise PermissionError(errno.EACCES, "it is read-only")

    def write(self, text: str) -> None:
        """Replace the content at once, so that no reader sees half of it."""
        temporary = self.target.with_name(f".{self.target.name}.{secrets.token_hex(4)}.tmp")
        with self._one_line("written"):
            self.target.parent.mkdir(exist_ok=True)
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with open(os.open(temporary, flags, 0o666), "wb") as file:
                    with contextlib.suppress(FileNotFoundError):
                        self._like_before(file.fileno())
                    file.write(text.encode())
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.target)
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink()

    def _like_before(self, descriptor: int) -> None:
        facts = self.target.stat()
        # Root in a container edits files of the person outside, whose they must stay.
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, facts.st_uid, facts.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(facts.st_mode))

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
