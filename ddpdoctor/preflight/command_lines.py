"""Read the command line of ``ddpdoctor check``, and write command lines to type."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.options import ALL, CODES, Given, Parser, Selection, Value, seconds, text
from ddpdoctor.core.torchrun import known_options
from ddpdoctor.preflight.check import Check, typed
from ddpdoctor.preflight.machine.network import own_host
from ddpdoctor.preflight.situation import (
    DEFAULT_PORT,
    DEFAULT_TIMEOUT,
    NodePlace,
    Options,
    Situation,
    joined_endpoint,
    node_place,
    places,
    split_endpoint,
)

# -- the lines to type: those that start the job and the check, and those that open a firewall


NO_ID = "none"
"""The rendezvous id where none was given, as torchrun has it."""

PLACEHOLDER = "train.py"
"""Stands for the script where none was named."""


def run_line(situation: Situation, *words: str) -> str:
    """`ddpdoctor run` with these options, and with the script that the check was given."""
    options = situation.options
    line = ["ddpdoctor", "run", *words]
    if options.module:
        line.append("-m")
    if options.program:
        line.append("--no-python")
    return shlex.join([*line, "--", *(options.script or (PLACEHOLDER,))])


def words(place: NodePlace, nproc: int) -> list[str]:
    """The options that place a node in a job, for `ddpdoctor check` and `ddpdoctor run` alike."""
    found = ["--nnodes", str(place.nnodes)]
    if place.rank is not None:
        found += ["--node-rank", str(place.rank)]
    found += ["--nproc-per-node", str(nproc)]
    if place.host:
        found += ["--rdzv-endpoint", place.endpoint]
    if place.rdzv_id != NO_ID:
        found += ["--rdzv-id", place.rdzv_id]
    return found


def check_line(
    place: NodePlace,
    nproc: int,
    *,
    nnodes: int | None = None,
    rank: int | None = None,
    host: str | None = None,
    rdzv_id: str | None = None,
) -> str:
    """The line that starts the check on a node: this one's, with what is changed."""
    changed = replace(
        place,
        nnodes=place.nnodes if nnodes is None else nnodes,
        rank=place.rank if rank is None else rank,
        host=place.host if host is None else host,
        rdzv_id=place.rdzv_id if rdzv_id is None else rdzv_id,
    )
    return shlex.join(["ddpdoctor", "check", *words(changed, nproc)])


def line_on_node_0(place: NodePlace, nproc: int) -> str:
    """The line that starts the check on node 0, typed there, where this node does not know it."""
    line = check_line(place, nproc, rank=0, host="")
    return line + typed(' --rdzv-endpoint "$(hostname):{}"', place.port)


def corrected_line(
    situation: Situation, *, nproc: int | None = None, port: int | None = None
) -> str:
    """The line to go on with: the job's on one machine, and of several nodes the check's.

    Args:
        situation: What was asked for.
        nproc: Another number of ranks.
        port: Another port for the rendezvous.
    """
    if situation.options.nnodes > 1:
        place = node_place(situation)
        place = place if port is None else replace(place, port=port)
        return check_line(place, situation.nproc if nproc is None else nproc)
    found = [] if nproc is None else ["--nproc-per-node", str(nproc)]
    local = situation.options.endpoint.startswith("127.0.0.1:")
    if port is not None and situation.endpoint and situation.options.endpoint and not local:
        found += ["--rdzv-endpoint", joined_endpoint(situation.endpoint[0], port)]
    elif port is not None:
        found += ["--master-port", str(port)]
    return run_line(situation, *found)


def meeting_point(place: NodePlace, situation: Situation) -> tuple[str, str]:
    """What to do about it, and the line to type."""
    nproc = situation.nproc
    if place.names:
        return (
            "Name the first node, the same on every node. Here:",
            check_line(place, nproc, host=place.names[0]),
        )
    if place.rank == 0:
        return (
            "Name this machine, the same on every node. Here:",
            check_line(place, nproc, host=own_host(situation)),
        )
    if place.rank is None:
        return (
            "Name one of the nodes and a free port of it, the same on every node. If it is to be "
            "this one, on all of them:",
            check_line(place, nproc, host=own_host(situation)),
        )
    return (
        "Name node 0 and a free port of it, the same on every node. On node 0 this starts the "
        "check:",
        line_on_node_0(place, nproc),
    )


def open_port(port: int, address: str) -> str:
    """The line that opens a port in a machine's own firewall.

    Args:
        port: Which.
        address: One of the machine, or of one that is to reach it: IPv6 has its own rules.
    """
    return typed("sudo {} -I INPUT -p tcp --dport {} -j ACCEPT", _tables(address), port)


def let_through(chain: str, side: str, addresses: Iterable[str]) -> str:
    """The line that lets all of TCP through a machine's own firewall.

    Args:
        chain: ``INPUT`` or ``OUTPUT``.
        side: ``-s`` or ``-d``: which end of the way the addresses are.
        addresses: Of the other nodes.
    """
    by_family: dict[str, list[str]] = {}
    for address in addresses:
        by_family.setdefault(_tables(address), []).append(address)
    return " && ".join(
        typed("sudo {} -I {} -p tcp {} {} -j ACCEPT", tables, chain, side, ",".join(listed))
        for tables, listed in by_family.items()
    )


def _tables(address: str) -> str:
    return "ip6tables" if ":" in address else "iptables"


# -- the command line of ``ddpdoctor check``, and the options of torchrun that it understands


_ANY = Value(str, "a value")
_PLACED = ("--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-endpoint", "--rdzv-id")

PARSER = Parser(
    "check",
    """\
Usage: ddpdoctor check [OPTIONS] [TORCHRUN OPTIONS] [[--] SCRIPT [ARGS...]]

Find out before a job starts whether it can start, talk and run on this machine,
and, when the same command runs on every node, between the nodes. Nothing is
changed, and nothing stays behind.

Options:
  --nproc-per-node N  Ranks of this node [default: one per visible GPU, or 2].
  --nnodes N          Nodes of the job.
  --node-rank R       This node's number; 0 is the one that all others reach.
  --rdzv-endpoint HOST[:PORT]
                      Where node 0 listens [default: MASTER_ADDR, MASTER_PORT].
  --rdzv-id ID        The job's id, the same on every node.
  --checkpoint-dir D  Where the job writes its checkpoints.
  --only A,B          These checks alone.
  --skip A,B          All but these.
  --select CODES      As --only, by codes or how they begin, such as DDP05.
  --ignore CODES      As --skip, by codes or how they begin.
  --list              List the checks.
  --json              Print one JSON object in place of the table.
  --timeout SECONDS   Most seconds for everything; more of it gives every stage
                      more [default: 60].
  --soak MINUTES      Repeat the collectives for so long: a burn-in.
  --kill-orphans      Offer to end the ranks that a dead job left behind.
  --yes               End them without a question.
  -h, --help          Show this text.

Other options of torchrun are accepted, so that its line can be tried with
`ddpdoctor check` in its place. SCRIPT is read and its imports are looked up; it
is not run. Under srun or mpirun, nodes and ranks come from their variables.

Exit status: 0 healthy; 1 warnings; 2 failures; 4 more where something could not
be tested (4, 5, 6); 3 the command line is wrong.
""",
    {
        **dict.fromkeys((*_PLACED, "--checkpoint-dir", "--skip"), _ANY),
        "--only": text("the name of a check"),
        "--select": CODES,
        "--ignore": CODES,
        "--timeout": seconds(1, 3600),
        "--soak": seconds(0.01, 1440),
    },
    leading=True,
)


@dataclass
class Arguments:
    """What was typed."""

    options: Options = field(default_factory=Options)
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    selection: Selection = ALL
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
    given = PARSER.read(words, {}, known_options)
    values = {each.name.replace("_", "-"): each.value or "" for each in given.passed}
    values |= {name: given.options[name] for name in _PLACED if name in given}
    for name in _PLACED:
        default = environ.get(f"PET_{name[2:].upper().replace('-', '_')}", "")
        if default:
            values.setdefault(name, default)
    return Arguments(
        options=_options(values, given, environ),
        only=_names(given.get("--only", "")),
        skip=_names(given.get("--skip", "")),
        selection=Selection.given(given),
        list="--list" in given,
        json="--json" in given,
        help=given.help,
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
            close = difflib.get_close_matches(name, checks, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise DoctorError(
                f"there is no check {name!r}", f"{hint}`ddpdoctor check --list` lists them"
            )
        return name

    only, skip = {known(name) for name in asked.only}, {known(name) for name in asked.skip}
    several = asked.list or asked.options.nnodes > 1
    chosen = [
        check
        for name, check in checks.items()
        if (name in only if only else several or check.scope == "machine")
        and name not in skip
        and check.code in asked.selection
    ]
    if not chosen:
        raise DoctorError("no check is left to run", "name fewer with --skip or --ignore")
    return chosen


def _options(values: Mapping[str, str], given: Given, environ: Mapping[str, str]) -> Options:
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
    elif nnodes == 1 and not endpoint and "--master-port" in values:
        # torchrun's own address.
        endpoint = f"127.0.0.1:{values['--master-port'] or DEFAULT_PORT}"
    try:
        _ = endpoint and split_endpoint(endpoint)
    except ValueError:
        raise DoctorError(
            f"{endpoint!r} is no HOST:PORT", "for example: --rdzv-endpoint node0:29500"
        ) from None
    folder = given.get("--checkpoint-dir")
    return Options(
        nproc=_ranks(values),
        nnodes=nnodes,
        node_rank=node_rank,
        endpoint=endpoint,
        rdzv_id=values.get("--rdzv-id", ""),
        script=tuple(given.rest),
        module="-m" in values or "--module" in values,
        program="--no-python" in values,
        checkpoint_dir=Path(folder) if folder else None,
        timeout=given.get("--timeout", DEFAULT_TIMEOUT),
        soak=60 * given.get("--soak", 0.0),
        kill_orphans="--kill-orphans" in given,
        yes="--yes" in given,
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


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
