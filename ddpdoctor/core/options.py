"""Parse command lines and configuration files by the options that help texts declare.

``torch/distributed/run.py`` declares its options by ``add_argument`` calls with literal arguments.
Parsing these takes milliseconds rather than torch's seconds, and makes ``ddpdoctor run`` accept
exactly what the installed torchrun accepts.

argparse does not fit: options of torchrun are passed on as they were typed, options of ``run``
stand among them in any order, one of them has an optional value, and an error is one line with a
hint.

A configuration file is ``ddpdoctor.toml``, or ``[tool.ddpdoctor]`` in pyproject.toml. The nearest
one counts, from the working directory upwards, and the command line overrides it. An option can
name a command to run (``--notify``), so files that belong to other users are not read.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ddpdoctor.core import opening
from ddpdoctor.core.commands import COMMANDS
from ddpdoctor.core.errors import USAGE, DoctorError, HelpRequest
from ddpdoctor.core.finding import Finding
from ddpdoctor.core.formatting import rank_set, shown
from ddpdoctor.core.opening import whose

# -- the options that torchrun takes, read from torch's source without importing it


_NO_VALUE = frozenset({"store_true", "store_false", "store_const", "count", "help", "check_env"})


@dataclass(frozen=True)
class TorchrunOptions:
    """The options of one torchrun."""

    takes_value: dict[str, bool]  # By name: whether the option takes a value

    def resolve(self, word: str) -> str | None:
        """Return the full name of an option, which may be abbreviated as argparse allows, or None.

        Raises:
            DoctorError: The abbreviation fits several options.
        """
        if word in self.takes_value:
            return word
        if not word.startswith("--"):
            return None
        fits = sorted(name for name in self.takes_value if name.startswith(word))
        # --nproc-per-node and --nproc_per_node are two spellings of one option.
        distinct = {name.replace("_", "-") for name in fits}
        if len(distinct) > 1:
            raise DoctorError(f"torchrun option {word} is ambiguous: {', '.join(sorted(distinct))}")
        return fits[0] if fits else None

    def split(self, word: str) -> Iterator[tuple[str, str, str | None]]:
        """Split short options in one word as argparse does: ``-r3``, ``-mr3``.

        Yield the option, the part of the word, and the value if the word has it.
        """
        for place, letter in enumerate(word[1:], 1):
            option, value = f"-{letter}", word[place + 1 :]
            if self.takes_value.get(option) and value:
                yield option, option + value, value
                return
            yield option, option, None


@lru_cache(maxsize=1)
def read_options() -> TorchrunOptions:
    """Return the options of the installed torchrun.

    Raises:
        DoctorError: This interpreter has no torch.
    """
    source = _source().read_bytes()
    start = source.find(b"\ndef get_args_parser(")
    end = source.find(b"\ndef ", start + 1)
    takes_value: dict[str, bool] = {"-h": False, "--help": False}
    for node in ast.walk(ast.parse(source[start:end] if 0 <= start < end else source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            names = [each.value for each in node.args if isinstance(each, ast.Constant)]
            action = next((word.value for word in node.keywords if word.arg == "action"), None)
            # A string, or the name of torch's own class.
            kind = getattr(action, "value", None) or getattr(action, "id", "store")
            for name in names:
                if isinstance(name, str) and name.startswith("-"):
                    takes_value[name] = kind not in _NO_VALUE
    return TorchrunOptions(takes_value)


def _source() -> Path:
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "distributed" / "run.py"
        if path.is_file():
            return path
    raise DoctorError(
        "torch is not installed for this Python",
        "install it in the environment that ddpdoctor runs in: pip install torch",
    )


_FLAGS = ("--standalone", "--module", "-m", "--no-python", "--run-path", "--virtual-local-rank")
_VALUES = (
    "--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-endpoint", "--rdzv-id", "--rdzv-backend",
    "--rdzv-conf", "--master-addr", "--master-port", "--max-restarts", "--monitor-interval",
    "--start-method", "--role", "--log-dir", "-r", "--redirects", "-t", "--tee",
    "--local-ranks-filter", "--local-addr", "--logs-specs", "--numa-binding", "--signals-to-handle",
    "--event-log-handler", "--duplicate-stdout-filters", "--duplicate-stderr-filters",
    "--shutdown-timeout", "--log-line-prefix-template",
)  # fmt: skip
"""Options of torch 2.4 to 2.15."""


def known_options() -> TorchrunOptions:
    """Return the options of the installed torchrun, or those of all versions without torch."""
    try:
        return read_options()
    except DoctorError:
        known = dict.fromkeys(("-h", "--help", *_FLAGS), False) | dict.fromkeys(_VALUES, True)
        names = [name for name in known if name.startswith("--")]
        underscored = {"--" + name[2:].replace("-", "_"): known[name] for name in names}
        return TorchrunOptions({**underscored, **known})


# -- Configuration files


CONFIG_FILE, PYPROJECT_FILE = "ddpdoctor.toml", "pyproject.toml"
SHARED = ("select", "ignore")
"""Options above the tables of the commands. They apply to each command that has them."""

_MAX_CONFIG = 1 << 20
_TABLE = re.compile(rb"^\s*\[\s*tool\s*\.\s*ddpdoctor\s*[\].]", re.MULTILINE)


def configured(parser: Parser) -> dict[str, Any]:
    """Return the options of a command that a file sets, by name.

    Raises:
        DoctorError: The file is not TOML, or sets an unknown option or an invalid value.
    """
    found = _nearest_table(parser)
    if found is None:
        return {}
    path, table = found
    unknown = [key for key in table if key not in (*SHARED, *COMMANDS)]
    if unknown:
        in_tool = "tool.ddpdoctor." if path.endswith(PYPROJECT_FILE) else ""
        raise parser.wrong(
            f"{path}: there is no {unknown[0]}",
            f"options of a command belong under [{in_tool}{parser.command}]",
        )
    options: dict[str, Any] = {}
    for key in SHARED:
        if key in table and f"--{key}" in parser.options:
            options |= _configured_option(parser, path, key, table[key])
    own = table.get(parser.command, {})
    if not isinstance(own, dict):
        raise parser.wrong(f"{path}: {parser.command} needs options, not {own!r}")
    for key, value in own.items():
        options |= _configured_option(parser, path, key, value)
    return options


def _configured_option(parser: Parser, path: str, key: str, value: Any) -> dict[str, Any]:
    name = f"--{key.replace('_', '-')}"
    if name not in parser.options or name == "--help":
        error = parser.unknown(name, parser.options)
        raise parser.wrong(f"{path}: {error.message}", error.hint)
    takes: Value | None = parser.options[name]
    if isinstance(value, bool) and (takes is None or takes.omitted is not None):
        return {name: True if takes is None else takes.omitted} if value else {}
    if takes is None:
        raise parser.wrong(f"{path}: {key} needs true or false, not {value!r}")
    try:
        if isinstance(value, (bool, dict)):
            raise ValueError(value)
        values = [str(each) for each in (value if isinstance(value, list) else [value])]
        if takes.repeated:
            return {name: [takes.convert(each) for each in values]}
        return {name: takes.convert(",".join(values))}
    except ValueError:
        raise parser.wrong(f"{path}: {key} needs {takes.wanted}, not {value!r}") from None


def _nearest_table(parser: Parser) -> tuple[str, Mapping[str, Any]] | None:
    """Return the relative path of the nearest file with options, and its table."""
    try:
        here = Path.cwd()
        owners = _trusted(here)
    except OSError:
        return None
    for path in (
        folder / name for folder in (here, *here.parents) for name in (CONFIG_FILE, PYPROJECT_FILE)
    ):
        try:
            if not path.is_file():
                continue
            # The owner of the open file: the name may be another file's by now.
            with opening.file(path, links=True) as file:
                owner = os.fstat(file.fileno()).st_uid
                text = file.read(_MAX_CONFIG + 1)
        except OSError:
            continue
        is_pyproject = path.name == PYPROJECT_FILE
        if len(text) > _MAX_CONFIG or (is_pyproject and b"ddpdoctor" not in text):
            continue
        shown_path = os.path.relpath(path)
        if owner not in owners:
            _remark(f"{shown_path} is not read: it belongs to {whose(owner)}")
            continue
        table = _table(parser, shown_path, text, is_pyproject)
        if table is not None:
            return shown_path, table
    return None


def _trusted(folder: Path) -> set[int]:
    """Return this user, root, and the user whose code runs here."""
    return {os.getuid(), 0, folder.stat().st_uid}


def _table(parser: Parser, path: str, text: bytes, is_pyproject: bool) -> Mapping[str, Any] | None:
    has_table = not is_pyproject or _TABLE.search(text)
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        table = toml.loads(text.decode())
    except ValueError as error:
        if not has_table:
            return None
        raise parser.wrong(f"{path} is not valid TOML: {error}") from None
    if is_pyproject:
        tools = table.get("tool")
        table = tools.get("ddpdoctor") if isinstance(tools, dict) else None
    return table if isinstance(table, dict) else None


_remarked: set[str] = set()


def _remark(text: str) -> None:
    """Print a line to stderr, once."""
    if text not in _remarked and sys.stderr is not None:
        _remarked.add(text)
        print(f"ddpdoctor: {shown(text)}", file=sys.stderr)


# -- Command lines


_DECLARED = re.compile(r"^  (?:-\w, )?(--[\w-]+)", re.MULTILINE)
_SHORT = re.compile(r"^  (-\w), (--[\w-]+)", re.MULTILINE)
_METAVAR = re.compile(r" (\S+)")
_NUMBER = re.compile(r"-$|-\d+$|-\d*\.\d+$")


class Value(NamedTuple):
    """The value of an option."""

    convert: Callable[[str], Any]  # Converts the typed text, or raises ValueError
    wanted: str  # What must be typed, for the sentence "option --x needs ..."
    repeated: bool = False
    """The option may be repeated, and each time adds a value. Otherwise the last one counts."""
    omitted: Any = None  # The meaning of the option without a value, if the value is optional
    choices: tuple[str, ...] = ()  # All valid values, if there are only a few


class Passed(NamedTuple):
    """An option to pass on: torchrun's, or that of another command."""

    name: str  # The full name
    words: tuple[str, ...]  # The words that were typed, including the value
    value: str | None = None


class Described(NamedTuple):
    """An option as the help text describes it."""

    name: str
    metavar: str  # Its value, in brackets if optional. Empty for a flag.
    text: str
    choices: tuple[str, ...] = ()


@dataclass
class Given:
    """A parsed command line."""

    options: dict[str, Any] = field(default_factory=dict)
    """Values by option: True for a flag, a list for a repeated option."""
    passed: list[Passed] = field(default_factory=list)  # The options to pass on, in order
    rest: list[str] = field(default_factory=list)  # The other words
    separator: bool = False  # Whether ``--`` stood before or within the rest
    help: bool = False
    configured: set[str] = field(default_factory=set)
    """The options that come from a configuration file."""

    def __contains__(self, name: str) -> bool:
        return name in self.options

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of an option, or the default."""
        return self.options.get(name, default)

    def fields(self) -> dict[str, Any]:
        """Return the options as fields of a dataclass: ``hang_after`` for ``--hang-after``."""
        return {
            name.lstrip("-").replace("-", "_"): tuple(value) if isinstance(value, list) else value
            for name, value in self.options.items()
        }

    def typed(self) -> list[str]:
        """Return the options to pass on as they were typed."""
        return [word for each in self.passed for word in each.words]

    def last_passed(self, *names: str) -> str | None:
        """Return the last value of a passed option with one of these names."""
        found = [each.value for each in self.passed if each.name in names]
        return found[-1] if found else None

    def has_passed(self, *names: str) -> bool:
        """Return whether a passed option has one of these names."""
        return any(each.name in names for each in self.passed)


@dataclass(frozen=True)
class Parser:
    """The command line of one command."""

    command: str  # Its name
    help: str  # Its help text. Each option begins a line that is indented by two spaces.
    values: Mapping[str, Value] = field(default_factory=dict)
    """The values of options by name. Other options are flags."""
    leading: bool = False
    """Options stand before the other words, and the first other word ends them."""
    status: int = USAGE  # Exit status if the command line is wrong

    @cached_property
    def options(self) -> dict[str, Value | None]:
        """All options by name, with their values. None for a flag."""
        return {name: self.values.get(name) for name in _DECLARED.findall(self.help)}

    @cached_property
    def described(self) -> list[Described]:
        """The options in the order of the help text."""
        found = []
        for lead in _DECLARED.finditer(self.help):
            name, line = lead[1], self.help[lead.end() :]
            value = self.values.get(name)
            # Ends before the next option or the next line that is not indented.
            line = re.split(r"\n(?! {6,}\S)", line, maxsplit=1)[0]
            metavar = _METAVAR.match(line) if value is not None else None
            text = " ".join(line[metavar.end() if metavar else 0 :].split())
            choices = value.choices if value is not None else ()
            found.append(Described(name, metavar[1] if metavar else "", text, choices))
        return found

    def read(
        self,
        words: Sequence[str],
        others: Mapping[str, Value | None] | None = None,
        torchrun: Callable[[], TorchrunOptions] = read_options,
    ) -> Given:
        """Parse the words after a command.

        If there are ``others``, the options of another command, these and torchrun's are passed on.

        Raises:
            DoctorError: An option is unknown, or its value is missing or wrong.
            HelpRequest: One of the options is ``--help``.
        """
        given, queue = Given(), list(words)
        while queue:
            word = queue.pop(0)
            if word == "--":
                given.rest, given.separator = given.rest + queue, True
                break
            if not word.startswith("-") or word == "-":
                given.rest.append(word)
                if self.leading:
                    given.rest += queue
                    break
            elif word in ("-h", "--help"):
                given.help = True
            else:
                self._option(given, word, queue, others, torchrun)
        if given.help:
            raise HelpRequest(self.help)
        if self.options:
            for name, value in configured(self).items():
                if name not in given.options:
                    given.options[name] = value
                    given.configured.add(name)
        return given

    def _option(
        self,
        given: Given,
        word: str,
        queue: list[str],
        others: Mapping[str, Value | None] | None,
        torchrun: Callable[[], TorchrunOptions],
    ) -> None:
        """Parse an option and remove its value from the queue."""
        name = word.partition("=")[0]
        # torchrun accepts dashes and underscores alike.
        own = dict(_SHORT.findall(self.help)).get(name, "--" + name[2:].replace("_", "-"))
        if own in self.options:
            self._take(given, own, self.options[own], word, queue)
        elif others is None:
            raise self.unknown(word, self.options)
        elif name in others:
            following = tuple(queue)
            self._take(Given(), name, others[name], word, queue)
            values = following[: len(following) - len(queue)]
            given.passed.append(Passed(name, (word, *values)))
        else:
            # Called only here, since it takes some milliseconds.
            self._pass_on(given, word, queue, torchrun(), {**self.options, **others})

    def one_run(self, given: Given) -> str | None:
        """Return the run that the command line names, if any.

        Raises:
            DoctorError: It names several.
        """
        if len(given.rest) > 1:
            raise self.wrong(f"one run at a time: {', '.join(given.rest)}")
        return given.rest[0] if given.rest else None

    def wrong(self, message: str, hint: str = "") -> DoctorError:
        """Make an error about the command line."""
        return DoctorError(message, hint, self.status)

    def unknown(self, word: str, names: Iterable[str]) -> DoctorError:
        """Make an error about an unknown option that suggests the most similar name."""
        word = word.partition("=")[0]

        def likeness(name: str) -> float:
            # People often type the beginning of a long option.
            return max(
                difflib.SequenceMatcher(None, word, each).ratio()
                for each in (name, name[: len(word) + 1])
            )

        best = max((*names, "--help"), key=likeness)
        hint = f"`ddpdoctor {self.command} --help` lists them"
        if likeness(best) >= 0.7:
            hint = f"did you mean {best}?"
        return self.wrong(f"unknown option {word}", hint)

    def _take(
        self, given: Given, name: str, value: Value | None, word: str, queue: list[str]
    ) -> None:
        """Parse an option of a command and remove its value from the queue."""
        _, equals, text = word.partition("=")
        if value is None:
            if equals:
                raise self.wrong(f"option {name} takes no value")
            given.options[name] = True
            return
        if not equals and value.omitted is not None and not (queue and _fits(value, queue[0])):
            given.options[name] = value.omitted
            return
        if not equals:
            if not queue or queue[0].startswith("--"):
                raise self.wrong(f"option {name} needs {value.wanted}")
            text = queue.pop(0)
        try:
            converted = value.convert(text)
        except ValueError:
            raise self.wrong(f"option {name} needs {value.wanted}, not {text!r}") from None
        if value.repeated:
            given.options.setdefault(name, []).append(converted)
        else:
            given.options[name] = converted

    def _pass_on(
        self,
        given: Given,
        word: str,
        queue: list[str],
        torchrun: TorchrunOptions,
        ours: Mapping[str, Value | None],
    ) -> None:
        """Parse torchrun's options in a word: one, or several short ones such as ``-mr3``."""
        if word.startswith("--") or len(word) == 2:
            name, equals, text = word.partition("=")
            parts = [(name, word, text if equals else None)]
        else:
            parts = list(torchrun.split(word))
        for typed, whole, value in parts:
            option = torchrun.resolve(typed)
            if option is None:
                raise self.unknown(word, [*ours, *torchrun.takes_value])
            if option in ("-h", "--help"):
                given.help = True
            elif not torchrun.takes_value[option]:
                if value is not None:
                    raise self.wrong(f"option {typed} takes no value")
                given.passed.append(Passed(option, (whole,)))
            elif value is not None:
                given.passed.append(Passed(option, (whole,), value))
            elif not queue or (queue[0].startswith("-") and not _NUMBER.match(queue[0])):
                # As in argparse, another option is not a value.
                raise self.wrong(f"option {typed} needs a value")
            else:
                value = queue.pop(0)
                given.passed.append(Passed(option, (whole, value), value))


def _fits(value: Value, word: str) -> bool:
    try:
        value.convert(word)
    except ValueError:
        return False
    return True


# -- Values of options


def _checked(ok: bool, value: Any) -> Any:
    if not ok:
        raise ValueError(value)
    return value


def seconds(least: float = 0, most: float = 1e6) -> Value:
    """Convert a number of seconds."""
    wanted = f"{least:g} or more" if most == 1e6 else f"from {least:g} to {most:g}"
    return Value(
        lambda text: _checked(least <= float(text) <= most, float(text)),
        f"a number of seconds, {wanted}",
    )


def number(least: int = 0, most: int = 10**9 - 1, what: str = "a number") -> Value:
    """Convert a whole number."""
    bounds = f", {least} or more" if most == 10**9 - 1 else f" from {least} to {most}"

    def convert(text: str) -> int:
        value = int(_checked(text.isascii() and text.isdigit() and len(text) < 10, text))
        return int(_checked(least <= value <= most, value))

    return Value(convert, what + bounds)


def percent() -> Value:
    """Convert a percentage of the step time."""

    def convert(text: str) -> float:
        value = float(text.removesuffix("%"))
        return float(_checked(0 <= value <= 100, value))

    return Value(convert, "per cent of the step time, 0 to 100")


def one_of(*words: str) -> Value:
    """Accept one of these words."""
    return Value(lambda text: _checked(text in words, text), " or ".join(words), choices=words)


def text(wanted: str) -> Value:
    """Accept any text except an empty one, which ``"$UNSET"`` gives."""
    return Value(lambda word: _checked(bool(word), word), wanted)


def _mapping(word: str) -> tuple[str, str]:
    local, _, remote = word.partition("=")
    return _checked(bool(local and remote), (local, remote))  # type: ignore[no-any-return]


RANKS = Value(rank_set, "ranks such as 0,2-3")
PATH_MAP = Value(_mapping, "LOCAL=REMOTE, such as .=/workspace", repeated=True)
DIRECTORY = text("a directory")
FILE = text("a file name")
NOTIFY = text("a URL (http:// or https://), or a command")._replace(repeated=True)
OUTPUT = one_of("text", "problems", "github")
TRACKERS = ("tensorboard", "wandb", "mlflow", "otlp")
LOG_TO = Value(
    lambda word: _checked(word.partition(":")[0] in TRACKERS, word),
    f"{', '.join(TRACKERS)}, with :DIR, :PROJECT or :URL if you like",
    repeated=True,
)


# -- Selection of findings by ``--select`` and ``--ignore``


_CODE = re.compile(r"[A-Z]{2,6}\d{0,3}")


def _codes(text: str) -> tuple[str, ...]:
    codes = tuple(code.strip().upper() for code in text.split(",") if code.strip())
    if not codes or not all(map(_CODE.fullmatch, codes)):
        raise ValueError(text)
    return codes


CODES = Value(_codes, "codes, or how they begin, such as DDP309,DDP7", repeated=True)


@dataclass(frozen=True)
class Selection:
    """Codes or their beginnings. If both match a finding, the longer one decides, as in ruff.

    A finding that is not selected still explains others. It is only not shown.
    """

    select: tuple[str, ...] = ()  # Empty selects all
    ignore: tuple[str, ...] = ()

    @classmethod
    def given(cls, given: Given) -> Selection:
        """Return the selection of a command line."""
        words = (given.get(name, ()) for name in ("--select", "--ignore"))
        return cls(*(tuple(code for codes in each for code in codes) for each in words))

    def __contains__(self, code: str) -> bool:
        selected = _longest_prefix(code, self.select) if self.select else 0
        return selected >= 0 and selected > _longest_prefix(code, self.ignore)

    def of(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the selected findings."""
        return [finding for finding in findings if finding.code in self]


ALL = Selection()


def _longest_prefix(code: str, beginnings: Iterable[str]) -> int:
    return max((len(each) for each in beginnings if code.startswith(each)), default=-1)
