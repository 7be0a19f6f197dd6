"""The options that torchrun takes, read from torch's source without importing it.

``torch/distributed/run.py`` declares its options by ``add_argument`` calls with literal arguments.
Reading them there keeps ``ddpdoctor run`` exactly as lenient and as strict as the torchrun that it
starts, whatever its version, at a few milliseconds instead of torch's seconds.
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
    """The options of one torchrun: name to whether it takes a value."""

    takes_value: dict[str, bool]

    def resolve(self, word: str) -> str | None:
        """The option that ``word`` (without ``=value``) names, abbreviations as argparse has them.

        Returns:
            The full name, or None if torchrun has no such option.

        Raises:
            DoctorError: The abbreviation fits several options.
        """
        if word in self.takes_value:
            return word
        if not word.startswith("--"):
            return None
        fits = sorted(name for name in self.takes_value if name.startswith(word))
        # --nproc-per-node and --nproc_per_node are one option under two spellings.
        distinct = {name.replace("_", "-") for name in fits}
        if len(distinct) > 1:
            raise DoctorError(f"torchrun option {word} is ambiguous: {', '.join(sorted(distinct))}")
        return fits[0] if fits else None

    def split(self, word: str) -> Iterator[tuple[str, str, str | None]]:
        """Short options in one word, as argparse has them: ``-r3``, ``-mr3``.

        Each as the option, what is typed of it, and its value if that is in the word.
        """
        for place, letter in enumerate(word[1:], 1):
            option, value = f"-{letter}", word[place + 1 :]
            if self.takes_value.get(option) and value:
                yield option, option + value, value
                return
            yield option, option, None


def _source() -> Path:
    """The file of ``torch.distributed.run``."""
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


def _declaring(source: bytes) -> bytes:
    """The function that declares the options; all of the source where there is none."""
    start = source.find(b"\ndef get_args_parser(")
    end = source.find(b"\ndef ", start + 1)
    return source[start:end] if 0 <= start < end else source


@lru_cache(maxsize=1)
def read_options() -> TorchrunOptions:
    """The options of the torchrun that is installed.

    Raises:
        DoctorError: There is no torch in this interpreter.
    """
    takes_value: dict[str, bool] = {"-h": False, "--help": False}
    for node in ast.walk(ast.parse(_declaring(_source().read_bytes()))):
        if not (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "add_argument"
        ):
            continue
        names = [
            argument.value
            for argument in node.args
            if isinstance(argument, ast.Constant)
            and isinstance(argument.value, str)
            and argument.value.startswith("-")
        ]
        action = next((word.value for word in node.keywords if word.arg == "action"), None)
        kind = (
            action.value
            if isinstance(action, ast.Constant)
            else action.id
            if isinstance(action, ast.Name)
            else "store"
        )
        for name in names:
            takes_value[name] = kind not in _NO_VALUE
    return TorchrunOptions(takes_value)


_FLAGS = ("--standalone", "--module", "-m", "--no-python", "--run-path", "--virtual-local-rank")
_VALUES = (
    "--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-endpoint", "--rdzv-id", "--rdzv-backend",
    "--rdzv-conf", "--master-addr", "--master-port", "--max-restarts", "--monitor-interval",
    "--start-method", "--role", "--log-dir", "-r", "--redirects", "-t", "--tee",
    "--local-ranks-filter", "--local-addr", "--logs-specs", "--numa-binding", "--signals-to-handle",
    "--event-log-handler", "--duplicate-stdout-filters", "--duplicate-stderr-filters",
    "--shutdown-timeout", "--log-line-prefix-template",
)  # fmt: skip
"""Those of torch 2.4 to 2.15."""


def known_options() -> TorchrunOptions:
    """The options of the torchrun that is installed; without one, those that torchruns have."""
    try:
        return read_options()
    except DoctorError:
        known = dict.fromkeys(("-h", "--help", *_FLAGS), False) | dict.fromkeys(_VALUES, True)
        names = [name for name in known if name.startswith("--")]
        spelled = {"--" + name[2:].replace("-", "_"): known[name] for name in names}
        return TorchrunOptions({**spelled, **known})
