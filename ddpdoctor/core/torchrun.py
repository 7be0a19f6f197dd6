"""The options that torchrun takes, read from torch's source without importing it.

``torch/distributed/run.py`` declares its options by ``add_argument`` calls with literal arguments.
Parsing these takes milliseconds rather than torch's seconds, and makes ``ddpdoctor run`` accept
exactly what the installed torchrun accepts.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ddpdoctor.core.errors import DoctorError

_NO_VALUE = frozenset({"store_true", "store_false", "store_const", "count", "help", "check_env"})


@dataclass(frozen=True)
class TorchrunOptions:
    """The options of one torchrun."""

    takes_value: dict[str, bool]  # By name: whether the option takes a value

    def resolve(self, word: str) -> str | None:
        """Return the full name of an option, which may be abbreviated as argparse allows.

        Args:
            word: The typed option, without ``=value``.

        Returns:
            The name, or None if torchrun has no such option.

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

        Yields:
            The option, the part of the word, and the value if the word has it.
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
