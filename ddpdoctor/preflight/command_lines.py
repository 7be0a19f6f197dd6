"""Read the command line of ``ddpdoctor check``, and write command lines to paste."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.options import (
    ALL,
    CODES,
    Given,
    Parser,
    Selection,
    Value,
    known_options,
    seconds,
    text,
)
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

# -- lines to paste: they start the job and the check, and open a firewall


NO_ID = "none"  # torchrun's rendezvous id if none is given
PLACEHOLDER = "train.py"  # Printed in place of the script if none was given


def run_line(situation: Situation, *words: str) -> str:
    """Return a `ddpdoctor run` line with these options, and with the script of the check."""
    options = situation.options
    line = ["ddpdoctor", "run", *words]
    if options.module:
        line.append("-m")
    if options.program:
        line.append("--no-python")
    return shlex.join([*line, "--", *(options.script or (PLACEHOLDER,))])


def words(place: NodePlace, nproc: int) -> list[str]:
    """Return the options that place a node in a job, for `ddpdoctor check` and `ddpdoctor run`."""
    found = ["--nnodes", str(place.nnodes)]
    if place.rank is not None:
        found += ["--node-rank", str(place.rank)]
    found += ["--nproc-per-node", str(nproc)]
    if place.host:
        found += ["--rdzv-endpoint", place.endpoint]
    if place.rdzv_id != NO_ID:
        found += ["--rdzv-id", place.rdzv_id]
    if place.elastic:
        found += ["--rdzv-backend", "c10d"]
    if place.local_addr:
        found += ["--local-addr", place.local_addr]
    return found


def check_line(place: NodePlace, nproc: int, **changed: Any) -> str:
    """Return the line that starts the check on a node: this node's, with the given changes."""
    given = {name: value for name, value in changed.items() if value is not None}
    return shlex.join(["ddpdoctor", "check", *words(replace(place, **given), nproc)])


def line_on_node_0(place: NodePlace, nproc: int) -> str:
    """Return the line to type on node 0 if this node does not know its name."""
    line = check_line(place, nproc, rank=0, host="")
    return line + typed(' --rdzv-endpoint "$(hostname):{}"', place.port)


def corrected_line(
    situation: Situation, *, nproc: int | None = None, port: int | None = None
) -> str:
    """Return the corrected line: the job's on one machine, the check's with several nodes.

    It changes the number of ranks, or the port of the rendezvous.
    """
    options, endpoint = situation.options, situation.endpoint
    if options.nnodes > 1:
        return check_line(node_place(situation), nproc or situation.nproc, port=port)
    found = [] if nproc is None else ["--nproc-per-node", str(nproc)]
    local = options.endpoint.startswith("127.0.0.1:")
    if port is not None and endpoint and options.endpoint and not local:
        found += ["--rdzv-endpoint", joined_endpoint(endpoint[0], port)]
    elif port is not None:
        found += ["--master-port", str(port)]
    return run_line(situation, *found)


def meeting_point(place: NodePlace, situation: Situation) -> tuple[str, str]:
    """Return the fix for a missing or local rendezvous, and the line to paste."""
    if place.names:
        fix, host = "Name the first node, the same on every node. Here:", place.names[0]
    elif place.rank == 0:
        fix, host = "Name this machine, the same on every node. Here:", own_host(situation)
    elif place.rank is None:
        fix = "Name one of the nodes and a free port on it, the same on every node. To "
        fix, host = fix + "name this one, on all of them:", own_host(situation)
    else:
        fix = "Name node 0 and a free port on it, the same on every node. On node 0 this starts "
        return fix + "the check:", line_on_node_0(place, situation.nproc)
    return fix, check_line(place, situation.nproc, host=host)


def open_port(port: int, address: str) -> str:
    """Return the line that opens a port in a machine's own firewall, for IPv4 or IPv6."""
    return typed("sudo {} -I INPUT -p tcp --dport {} -j ACCEPT", _tables(address), port)


def let_through(chain: str, side: str, addresses: Iterable[str]) -> str:
    """Return the line that lets all of TCP through a machine's own firewall.

    The chain is ``INPUT`` or ``OUTPUT``, the side of the addresses ``-s`` or ``-d``.
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


# -- the command line


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
  --json              Print one JSON object in place of the text.
  -v, --verbose       Print a line for each check.
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
    """The command line."""

    options: Options = field(default_factory=Options)
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    selection: Selection = ALL
    list: bool = False
    json: bool = False
    verbose: bool = False


def parse(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> Arguments:
    """Read the command line, torchrun's ``PET_*`` defaults, and a launcher's variables.

    Raises:
        DoctorError: The command line is wrong.
    """
    given = PARSER.read(words, {}, known_options)
    values = {each.name.replace("_", "-"): each.value or "" for each in given.passed}
    values |= {name: given.options[name] for name in _PLACED if name in given}
    for name in _PLACED:
        if default := environ.get(f"PET_{name[2:].upper().replace('-', '_')}", ""):
            values.setdefault(name, default)
    return Arguments(
        options=_options(values, given, environ),
        only=_names(given.get("--only", "")),
        skip=_names(given.get("--skip", "")),
        selection=Selection.given(given),
        list="--list" in given,
        json="--json" in given,
        verbose="--verbose" in given,
    )


def choose(asked: Arguments, checks: Mapping[str, Check]) -> list[Check]:
    """Return the checks to run, in their order.

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
    # The maximum of an elastic MIN:MAX.
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
            f"{endpoint!r} is not HOST:PORT", "for example: --rdzv-endpoint node0:29500"
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
        elastic=values.get("--rdzv-backend", "static") != "static",
        local_addr=values.get("--local-addr", ""),
        soak=60 * given.get("--soak", 0.0),
        kill_orphans="--kill-orphans" in given,
        yes="--yes" in given,
    )


def _ranks(values: Mapping[str, str]) -> int | None:
    """Return the node's rank count; None for torchrun's ``gpu`` and ``auto``, or if not given."""
    text = values.get("--nproc-per-node", "")
    if text in ("gpu", "auto", "xpu"):
        return None
    if text == "cpu":
        return os.cpu_count()
    return _whole("--nproc-per-node", values, "a number of ranks", 1)


def _whole(
    name: str, values: Mapping[str, str], what: str, least: int, *, last: str = ""
) -> int | None:
    """Return an option's number, or the one after the last ``last`` in it; None if empty."""
    given = values.get(name, "")
    text = given.rpartition(last)[2] if last else given
    if given and (not text.isdigit() or int(text) < least):
        raise DoctorError(f"{name} needs {what}, {least} or more, not {given!r}")
    return int(text) if given else None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
