"""Why a job makes no progress: what was seen of its ranks, judged once for all the rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ddpdoctor.analysis import collective_mismatch, ports
from ddpdoctor.analysis.exit_waits import exit_wait
from ddpdoctor.analysis.guards import only_sleeps
from ddpdoctor.analysis.hang_snapshot import HangSnapshot, RankState, brief, hang_snapshot, quoted
from ddpdoctor.analysis.rank_activity import (
    Activity,
    activity_of,
    came_since,
    lacks_cpu,
    starves,
    state_of,
    works,
)
from ddpdoctor.analysis.waits import Blocked, blocked
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.opening import integer
from ddpdoctor.core.ranks import named
from ddpdoctor.core.relations import STANDSTILL
from ddpdoctor.rules.out_of_step import guarded, mismatch, order, same_number, waiting_line
from ddpdoctor.run.snapshot import Run
from ddpdoctor.stacks.user_frames import user_frames

_PLURAL = {"is": "are", "has": "have", "does": "do"}

_START = (
    "Start the missing ranks, or correct the world size; all need the same address and port, and a "
    "network that lets them through."
)

NATIVE = 4
"""Native frames that are shown."""

_memo: tuple[Run, list[Finding]] | None = None


def guilty(run: Run) -> frozenset[int]:
    """The ranks that are to blame for sure."""
    errors = [finding for finding in _all(run) if finding.severity is Severity.ERROR]
    return frozenset(rank for finding in errors for rank in finding.ranks)


def diagnosed(run: Run, code: str) -> Iterator[Finding]:
    """The findings with a code about a job that makes no progress."""
    for finding in _all(run):
        if finding.code == code:
            yield replace(finding, subjects=finding.subjects | {STANDSTILL})


def _all(run: Run) -> list[Finding]:
    global _memo
    if _memo is None or _memo[0] is not run:
        _memo = run, list(_diagnose(run))
    return _memo[1]


def _diagnose(run: Run) -> Iterator[Finding]:
    still = hang_snapshot(run)
    if still is None:
        return
    found = list(_explained(run, still))
    yield from found
    if _short_of_cpu(still):
        # Whoever is late is late for want of a core, or may be.
        return
    if not found and still.record.everybody and any(rank.in_collective for rank in still.ranks):
        yield from _unexplained(run, still)


def _short_of_cpu(still: HangSnapshot) -> bool:
    return any(
        lacks_cpu(rank, still.record.limit) or starves(rank)
        for rank in still.ranks
        if not rank.ended
    )


def _explained(run: Run, still: HangSnapshot) -> Iterator[Finding]:
    if not any(rank.joined for rank in still.ranks):
        yield from _before_joining(run, still)
        return
    waits = blocked(still)
    states = [(rank, seen) for rank in still.ranks if (seen := state_of(rank)) is not None]
    if states:
        # What such a rank was in before says nothing any more.
        yield from _activities(still, states, waits[0] if waits else None)
    elif waits:
        yield from _of_waits(run, still, waits)
    elif still.record.everybody:
        yield from _nobody_waits(still)


def _unexplained(run: Run, still: HangSnapshot) -> Iterator[Finding]:
    """The facts, where no rank is to blame for sure."""
    if collective_mismatch.first_mismatch(collective_mismatch.rings(run), _gloo(run)) is not None:
        return
    ranks = [rank for rank in still.ranks if rank.joined and not rank.ended]
    yield Finding(
        code="DDP814",
        about="unexplained",
        severity=Severity.WARNING,
        message=f"the job has made no progress for {still.seconds:.0f} s: "
        + "; ".join(
            f"rank {rank.rank} {_doing(rank)} at {quoted(rank.site)}" for rank in ranks[:3]
        ),
        ranks=tuple(rank.rank for rank in ranks),
        location=ranks[0].site if ranks else None,
        evidence=(
            *(f"rank {rank.rank} {_doing(rank)} at {brief(rank.site)}" for rank in ranks[3:8]),
            *_without_stacks(still),
        ),
        fix="Compare the lines that the ranks are at: `ddpdoctor stacks` shows them in full.",
    )


def _doing(rank: RankState) -> str:
    return (
        f"waits in {rank.waits_in}" if rank.in_collective else f"is in {rank.phase or 'start-up'}"
    )


# -- some wait in a collective


def _of_waits(run: Run, still: HangSnapshot, waits: Sequence[Blocked]) -> Iterator[Finding]:
    first = waits[0]
    alone = guarded(waits)
    if alone is not None:
        yield alone
        return
    if collective_mismatch.first_mismatch(collective_mismatch.rings(run), _gloo(run)) is not None:
        # Said by itself, from the rings, whether or not the job makes progress.
        return
    elsewhere = [rank for rank in first.absent if rank.in_collective]
    gone = [rank for rank in first.absent if not rank.in_collective]
    if gone:
        starting = all(not rank.step for rank in still.ranks)
        yield from _activities(still, [(rank, _missing(rank, starting)) for rank in gone], first)
    elif elsewhere:
        yield order(waits)
    else:
        yield from _all_there(still, first)


def _missing(rank: RankState, starting: bool) -> Activity:
    """What a rank does that others wait for."""
    end = exit_wait(rank)
    # Whoever is at the end of the script will not come any more.
    return replace(end, severity=Severity.ERROR) if end else activity_of(rank, starting)


def _activities(
    still: HangSnapshot, seen: Sequence[tuple[RankState, Activity]], wait: Blocked | None
) -> Iterator[Finding]:
    """A finding for each thing that ranks do instead of joining the others."""
    kinds: dict[object, list[tuple[RankState, Activity]]] = defaultdict(list)
    for rank, each in seen:
        if each.severity < Severity.ERROR and lacks_cpu(rank, still.record.limit):
            # It has not had the time that everybody is given.
            continue
        kinds[each.code, each.location, each.severity].append((rank, each))
    culprits = {rank.rank for rank, _ in seen}
    for found in kinds.values():
        ranks = [rank for rank, _ in found]
        each = found[0][1]
        severity = each.severity
        if not still.record.everybody and each.code in ("DDP802", "DDP807", "DDP811"):
            severity = min(severity, Severity.WARNING)
        waiting = [r for r in (wait.waiting if wait is not None else ()) if r.rank not in culprits]
        yield Finding(
            code=each.code,
            about=_about(ranks, severity),
            severity=severity,
            message=_sentence(ranks, each, wait if waiting else None, waiting),
            ranks=tuple(rank.rank for rank in ranks),
            location=each.location,
            evidence=(
                *each.evidence,
                *_native(ranks[0]),
                *(waiting_line(rank) for rank in waiting[:3]),
                *_without_stacks(still),
            ),
            fix=each.fix
            or "Let every rank call the same collectives in the same order; work that "
            "one rank does alone has to be shorter than the collectives' timeout.",
            traceback=_traceback(ranks[0]),
            moment=still.record.time,
        )


def _about(ranks: list[RankState], severity: Severity) -> str:
    """One standstill of the same ranks, wherever they are seen meanwhile."""
    since = max(integer(rank.record, "since") for rank in ranks)
    return f"{severity.label} {[rank.rank for rank in ranks]} {since}"


def _sentence(
    ranks: list[RankState], each: Activity, wait: Blocked | None, waiting: list[RankState]
) -> str:
    who = named([rank.rank for rank in ranks])
    plural = len(ranks) > 1
    text = each.text
    if plural:
        verb, _, rest = text.partition(" ")
        verb = _PLURAL.get(verb, verb.removesuffix("s"))
        text = f"{verb} {rest}".replace("of its DataLoader", "of their DataLoaders")
    if wait is None:
        return f"{who} {text}"
    others = named([rank.rank for rank in waiting])
    verb = "wait" if len(waiting) > 1 else "waits"
    if each.code == "DDP802":
        again = "they" if plural else who
        return (
            f"{who} never joined {wait.what}, where {others} {verb} in {quoted(waiting[0].site)}; "
            f"{again} {text}"
        )
    return (
        f"{who} {text}; {others} {verb} for {'them' if plural else 'it'} in {wait.what} at "
        f"{quoted(waiting[0].site)}"
    )


def _all_there(still: HangSnapshot, one: Blocked) -> Iterator[Finding]:
    """Nobody is missing who could be seen."""
    same = same_number([one])
    if same is not None:
        yield mismatch(same)
        return
    waiting = one.waiting
    if one.unseen:
        yield Finding(
            code="DDP802",
            about="other nodes",
            severity=Severity.WARNING,
            message=f"all ranks of this node wait in {one.what}; {named(one.unseen)} of other "
            "nodes did not join it, or cannot be reached",
            ranks=one.unseen,
            location=waiting[0].site,
            evidence=tuple(waiting_line(rank) for rank in waiting[:4]),
            fix="Look at what ddpdoctor says on the other nodes.",
        )
        return
    if len(waiting) < len(still.ranks) or not still.record.everybody:
        # The others are in a later one, which these may yet come to.
        return
    if any(starves(rank) for rank in waiting):
        # The threads that carry it out have no core.
        return
    yield Finding(
        code="DDP814",
        about="all there",
        severity=Severity.WARNING,
        message=f"all ranks have been in {one.what} for {waiting[0].seconds} s and it does not "
        "end: the network between them, or the backend",
        ranks=tuple(rank.rank for rank in waiting),
        location=waiting[0].site,
        evidence=(*(waiting_line(rank) for rank in waiting[:4]), *_without_stacks(still)),
        fix="Check the network and the interface that the backend took "
        "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO says).",
    )


# -- nobody waits in a collective


def _nobody_waits(still: HangSnapshot) -> Iterator[Finding]:
    starting = all(not rank.step for rank in still.ranks)
    seen = [
        (rank, exit_wait(rank) or activity_of(rank, starting))
        for rank in still.ranks
        if rank.looked_at
    ]
    named_ = [(rank, each) for rank, each in seen if each.code not in ("DDP802", "DDP811")]
    if named_:
        yield from _activities(still, named_, None)
        return
    idle = [
        (rank, each)
        for rank, each in seen
        if each.severity >= Severity.ERROR
        and rank.joined
        and not rank.ended
        and rank.frame is not None
    ]
    if not idle or len(idle) < len(seen):
        return
    if all(r.site is not None and only_sleeps(r.site.path, r.site.line) for r, _ in idle):
        # Together they do nothing for a while: a pause between epochs, say.
        return
    rank, each = idle[0]
    yield Finding(
        code="DDP814",
        about="nobody waits",
        severity=Severity.WARNING,
        message=f"no rank has moved for {min(r.seconds for r, _ in idle)} s and none waits in a "
        f"collective: {named([rank.rank])} {each.text}",
        ranks=tuple(rank.rank for rank, _ in idle),
        location=each.location,
        evidence=tuple(f"rank {r.rank} {e.text}" for r, e in idle[1:5]),
        fix="If they wait for something outside (a file, a server, a queue), look there.",
        traceback=_traceback(rank),
    )


def _before_joining(run: Run, still: HangSnapshot) -> Iterator[Finding]:
    """No rank has come out of ``init_process_group``."""
    seen = [(rank, activity_of(rank, True)) for rank in still.ranks]
    joining = [(rank, each) for rank, each in seen if each.code == "DDP813"]
    others = [(rank, each) for rank, each in seen if each.code != "DDP813"]
    late = [
        (rank, each)
        for rank, each in others
        if rank.frame is not None
        and not lacks_cpu(rank, still.record.limit)
        and not came_since(rank)
    ]
    if joining and late:
        yield from _late(late, [rank for rank, _ in joining], still)
    elif any(rank.dead_for is None for rank, _ in others):
        # They are on their way, or do not say where they are.
        return
    elif joining and (still.record.launcher_works or any(works(rank) for rank, _ in joining)):
        # They import what they need, say; or the store of the launcher has no core to answer on.
        return
    elif joining and _all_come(still):
        rank, each = joining[0]
        yield Finding(
            code="DDP814",
            about="all there",
            severity=Severity.WARNING,
            message=f"all ranks have been in init_process_group for {still.seconds:.0f} s and "
            "it does not end: the network between them, or the backend",
            ranks=tuple(rank.rank for rank, _ in joining),
            location=each.location,
            fix="Check the network and the interface that the backend took "
            "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO says).",
            traceback=_traceback(rank),
        )
    elif joining:
        rank, each = joining[0]
        who = named([rank.rank for rank, _ in joining])
        verb = "wait" if len(joining) > 1 else "waits"
        missing, fix, evidence = "ranks that never came", _START, _launched(run)
        store = ports.unopened(run)
        if store is not None:
            missing = f"a store at {ports.address(store)} that no rank opens"
            fix, evidence = ports.advice(store)
        yield Finding(
            code="DDP813",
            about="rendezvous",
            severity=Severity.ERROR,
            message=f"{who} {verb} in init_process_group at {quoted(each.location)} for "
            f"{missing}, for {still.seconds:.0f} s",
            ranks=tuple(rank.rank for rank, _ in joining),
            location=each.location,
            evidence=evidence,
            fix=fix,
            traceback=_traceback(rank),
        )
    elif (
        not still.ranks
        and run.manifest.get("launcher") == "torchrun"
        and _option(run, "--nnodes") not in (None, "1")
    ):
        nodes = _option(run, "--nnodes")
        yield Finding(
            code="DDP813",
            about="rendezvous",
            severity=Severity.ERROR,
            message=f"torchrun has waited in rendezvous for {still.seconds:.0f} s: of "
            f"{nodes} nodes, not all have come",
            evidence=_launched(run),
            fix="Start the command on every node, with the same --nnodes, --rdzv-id and "
            "--rdzv-endpoint (or --master-addr), each with its own --node-rank; check that the "
            "endpoint can be reached from there.",
        )


def _all_come(still: HangSnapshot) -> bool:
    """Whether as many ranks are in ``init_process_group`` as it was called for."""
    asked = {rank.stacks.world_size for rank in still.ranks if rank.stacks is not None}
    return 0 not in asked and max(asked, default=0) in range(1, len(still.ranks) + 1)


def _late(
    late: Sequence[tuple[RankState, Activity]], joining: Sequence[RankState], still: HangSnapshot
) -> Iterator[Finding]:
    """Ranks that have not come to ``init_process_group`` yet, where others wait for them."""
    waits = f"{named([r.rank for r in joining])} {'wait' if len(joining) > 1 else 'waits'}"
    for rank, each in late[:3]:
        unknown = each.code == "DDP802"
        text = f"has not come to init_process_group: it {each.text}" if unknown else each.text
        yield Finding(
            code=each.code,
            about=f"late {rank.rank}",
            # It may wait for a lock or a file that will come; nothing was ever done together.
            severity=min(each.severity, Severity.WARNING) if unknown else each.severity,
            message=f"rank {rank.rank} {text}; {waits} for it in init_process_group for "
            f"{still.seconds:.0f} s, at {quoted(joining[0].site)}",
            ranks=(rank.rank,),
            location=each.location,
            evidence=each.evidence,
            fix=each.fix
            or "Let all ranks join first, or prepare the data before the job starts; the others' "
            "timeout runs.",
            traceback=_traceback(rank),
        )


def _launched(run: Run) -> tuple[str, ...]:
    words = ("--nnodes", "--nproc-per-node", "--node-rank", "--rdzv-endpoint", "--master-addr")
    seen = [f"{word} {value}" for word in words if (value := _option(run, word)) is not None]
    return (f"started with {' '.join(seen)}",) if seen else ()


def _option(run: Run, name: str) -> str | None:
    """The value of torchrun's option, in either spelling."""
    words = [str(word) for word in run.manifest.get("command") or ()]
    for spelling in (name, name[:2] + name[2:].replace("-", "_")):
        for at, word in enumerate(words):
            if word == spelling and at + 1 < len(words):
                return words[at + 1]
            if word.startswith(f"{spelling}="):
                return word.partition("=")[2]
    return None


# -- in words


def _without_stacks(still: HangSnapshot) -> tuple[str, ...]:
    """Ranks whose evidence could not be had."""
    found = [
        f"no stack of rank {rank.rank}: {rank.stacks.trouble}"
        + (f"; {rank.stacks.note}" if rank.stacks.note else "")
        for rank in still.ranks
        if rank.stacks is not None and rank.stacks.trouble and rank.dead_for is None
    ]
    return tuple(found[:3])


def _native(rank: RankState) -> tuple[str, ...]:
    """What a rank does below Python, the innermost frames."""
    frames = rank.stacks.native[-NATIVE:] if rank.stacks is not None else ()
    return (f"native frames of rank {rank.rank}: {' > '.join(frames)}",) if frames else ()


def _traceback(rank: RankState) -> str:
    """The user's part of a rank's stack, as a traceback is written."""
    frames = user_frames(rank.frames)
    return "".join(f'  File "{f.path}", line {f.line}, in {f.function}\n' for f in frames)


def _gloo(run: Run) -> bool:
    return all("nccl" not in rank.opened.backend for rank in run.last)
