"""The command line of ``ddpdoctor check``, and the options of torchrun that it understands."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.preflight.check import Check
from ddpdoctor.preflight.place import places
from ddpdoctor.preflight.situation import DEFAULT_PORT, Options, split_endpoint

_OWN_FLAGS = ("--list", "--json", "--kill-orphans", "--help", "-h")
_OWN_VALUES = ("--checkpoint-dir", "--only", "--skip", "--timeout")

_TORCHRUN_FLAGS = (
    "--standalone", "--module", "-m", "--no-python", "--run-path", "--virtual-local-rank",
)  # fmt: skip
_TORCHRUN_VALUES = (
    "--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-endpoint", "--rdzv-id", "--rdzv-backend",
    "--rdzv-conf", "--master-addr", "--master-port", "--max-restarts", "--monitor-interval",
    "--start-method", "--role", "--log-dir", "-r", "--redirects", "-t", "--tee",
    "--local-ranks-filter", "--local-addr", "--logs-specs", "--numa-binding", "--signals-to-handle",
    "--event-log-handler", "--duplicate-stdout-filters", "--duplicate-stderr-filters",
    "--shutdown-timeout", "--log-line-prefix-template",
)  # fmt: skip
"""Those of ``torch/distributed/run.py`` in torch 2.4 to 2.15, so that torch need not be there."""


@dataclass
class Arguments:
    """What was typed."""

    options: Options = field(default_factory=Options)
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    list: bool = False
    json: bool = False
    help: bool = False


def parse(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> Arguments:
    """Understand the command line.

    Args:
        words: The words after ``ddpdoctor check``.
        environ: For torchrun's ``PET_*`` defaults and for what a launcher says about the nodes.

    Raises:
        DoctorError: It cannot work.
    """
    values: dict[str, str] = {}
    flags: set[str] = set()
    queue = list(words)
    script: list[str] = []
    while queue:
        word = queue.pop(0)
        if word == "--":
            script = queue
            break
        if not word.startswith("-"):
            script = [word, *queue]
            break
        typed, equals, given = word.partition("=")
        name = typed.replace("_", "-") if typed.startswith("--") else typed
        if name in (*_OWN_FLAGS, *_TORCHRUN_FLAGS):
            if equals:
                raise DoctorError(f"option {typed} takes no value")
            flags.add(name)
        elif name in (*_OWN_VALUES, *_TORCHRUN_VALUES):
            if not equals:
                if not queue or queue[0].startswith("--"):
                    raise DoctorError(f"option {typed} needs a value")
                given = queue.pop(0)
            if not given and name == "--only":
                raise DoctorError(
                    "option --only needs the name of a check", "`ddpdoctor check --list` lists them"
                )
            values[name] = given
        else:
            close = _close(name, (*_OWN_FLAGS, *_OWN_VALUES, *_TORCHRUN_FLAGS, *_TORCHRUN_VALUES))
            hint = f"did you mean {close}?" if close else "`ddpdoctor check --help` lists them"
            raise DoctorError(f"unknown option {typed}", hint)
    for name in ("nproc-per-node", "nnodes", "node-rank", "rdzv-endpoint", "rdzv-id"):
        default = environ.get(f"PET_{name.upper().replace('-', '_')}", "")
        if default:
            values.setdefault(f"--{name}", default)
    return Arguments(
        options=_options(values, flags, script, environ),
        only=_names(values.get("--only", "")),
        skip=_names(values.get("--skip", "")),
        list="--list" in flags,
        json="--json" in flags,
        help=bool(flags & {"--help", "-h"}),
    )


def choose(asked: Arguments, checks: Mapping[str, Check]) -> list[Check]:
    """The checks to run, in their order.

    Raises:
        DoctorError: There is no such check, or none is left.
    """
    by_code = {check.code: name for name, check in checks.items()}

    def known(name: str) -> str:
        name = by_code.get(name.upper(), name)
        if name not in checks:
            close = _close(name, checks)
            hint = f"did you mean {close}? " if close else ""
            raise DoctorError(
                f"there is no check {name!r}", f"{hint}`ddpdoctor check --list` lists them"
            )
        return name

    only, skip = {known(name) for name in asked.only}, {known(name) for name in asked.skip}
    several = asked.list or asked.options.nnodes > 1
    chosen = [
        check
        for name, check in checks.items()
        if (name in only if only else several or check.scope == "machine") and name not in skip
    ]
    if not chosen:
        raise DoctorError("no check is left to run", "name fewer with --skip")
    return chosen


def _options(
    values: Mapping[str, str], flags: set[str], script: list[str], environ: Mapping[str, str]
) -> Options:
    launched = next(iter(places(environ)), None)
    # Of an elastic MIN:MAX all of them.
    nnodes = _whole("--nnodes", values, "a number of nodes", 1, last=":")
    nnodes = nnodes or (launched.nnodes if launched else None) or 1
    node_rank = _whole("--node-rank", values, "a number", 0)
    if node_rank is None and launched is not None:
        node_rank = launched.node_rank
    if node_rank is not None and node_rank >= nnodes:
        raise DoctorError(f"there is no node {node_rank} among {nnodes}", "node ranks count from 0")
    endpoint = values.get("--rdzv-endpoint", "")
    if not endpoint and "--master-addr" in values:
        endpoint = f"{values['--master-addr']}:{values.get('--master-port', '') or DEFAULT_PORT}"
    try:
        _ = endpoint and split_endpoint(endpoint)
    except ValueError:
        raise DoctorError(
            f"{endpoint!r} is no HOST:PORT", "for example: --rdzv-endpoint node0:29500"
        ) from None
    folder = values.get("--checkpoint-dir")
    return Options(
        nproc=_ranks(values),
        nnodes=nnodes,
        node_rank=node_rank,
        endpoint=endpoint,
        rdzv_id=values.get("--rdzv-id", ""),
        script=tuple(script),
        module=bool(flags & {"-m", "--module"}),
        program="--no-python" in flags,
        checkpoint_dir=Path(folder) if folder else None,
        timeout=_seconds(values.get("--timeout", "60")),
        kill_orphans="--kill-orphans" in flags,
    )


def _ranks(values: Mapping[str, str]) -> int | None:
    """Ranks of the node; None for torchrun's ``gpu`` and ``auto``, and without the option."""
    text = values.get("--nproc-per-node", "")
    if text in ("gpu", "auto", "xpu"):
        return None
    if text == "cpu":
        return os.cpu_count()
    return _whole("--nproc-per-node", values, "a number of ranks", 1)


def _whole(
    name: str, values: Mapping[str, str], what: str, least: int, *, last: str = ""
) -> int | None:
    """An option's number, or what is behind the last ``last`` in it; None if it is empty."""
    given = values.get(name, "")
    text = given.rpartition(last)[2] if last else given
    if given and (not text.isdigit() or int(text) < least):
        raise DoctorError(f"{name} needs {what}, {least} or more, not {given!r}")
    return int(text) if given else None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 3600:
        raise DoctorError(f"option --timeout needs seconds from 1 to 3600, not {text!r}")
    return seconds


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _close(name: str, known: Iterable[str]) -> str:
    """What somebody most likely meant; empty if that is not clear."""
    import difflib

    return next(iter(difflib.get_close_matches(name, list(known), n=1)), "")
