"""Why a job makes no progress: one judgement of an examination, shared by all rules for hangs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import count, named
from ddpdoctor.core.opening import integer, whole
from ddpdoctor.core.relations import STANDSTILL
from ddpdoctor.diagnose.collectives import collective_mismatch
from ddpdoctor.diagnose.collectives.recorded_calls import (
    NO_COUNTS,
    ranks_behind,
    unanswered_ranks,
    unequal_sizes,
)
from ddpdoctor.diagnose.collectives.rules_out_of_step import (
    different_calls_finding,
    guarded_call,
    order_finding,
    same_number,
    waiting_line,
)
from ddpdoctor.diagnose.hangs.hang_snapshot import (
    Blocked,
    HangSnapshot,
    RankState,
    find_blocked,
    hang_snapshot,
)
from ddpdoctor.diagnose.hangs.process_activity import (
    STUCK_GPU,
    gpu_arrival,
    gpu_work,
    lacks_cpu,
    lasts,
    starves,
)
from ddpdoctor.diagnose.hangs.rank_activity import (
    Activity,
    activity_of,
    exit_wait,
    last_call,
    state_of,
)
from ddpdoctor.diagnose.launch.rules import CHECK_NETWORK, before_joining
from ddpdoctor.diagnose.source_files import brief, only_sleeps, quoted
from ddpdoctor.run.records.supervisor import Ras, RasDifference, RasGroup, RasProcess
from ddpdoctor.run.snapshot import Run

# -- what findings about a job that makes no progress have in common, in words


NATIVE = 4
"""Native frames that are shown."""


def lasting_severity(severity: Severity, ranks: Sequence[RankState]) -> Severity:
    """How bad it is what some ranks do: a warning that lasts is an error."""
    if severity is Severity.WARNING and ranks and all(map(lasts, ranks)):
        return Severity.ERROR
    return severity


def standstill_identity(ranks: Sequence[RankState], severity: Severity) -> str:
    """One standstill of the same ranks, wherever they are seen meanwhile."""
    since = max(integer(rank.record, "since") for rank in ranks)
    return f"{severity.label} {[rank.rank for rank in ranks]} {since}"


def without_stacks(still: HangSnapshot) -> tuple[str, ...]:
    """Ranks whose evidence could not be had."""
    found = [
        f"no stack of rank {rank.rank}: {rank.stacks.trouble}"
        + (f"; {rank.stacks.note}" if rank.stacks.note else "")
        for rank in still.ranks
        if rank.stacks is not None and rank.stacks.trouble and rank.dead_for is None
    ]
    return tuple(found[:3])


def native_frames(rank: RankState) -> tuple[str, ...]:
    """What a rank does below Python, the innermost frames."""
    frames = rank.stacks.native[-NATIVE:] if rank.stacks is not None else ()
    return (f"native frames of rank {rank.rank}: {' > '.join(frames)}",) if frames else ()


# -- what NCCL's RAS said of a job that makes no progress, as evidence


_LINES = 6


def ras_lines(ras: Ras | None, world: int) -> tuple[str, ...]:
    """What RAS said, in lines of evidence."""
    if ras is None:
        return ()
    if ras.trouble:
        return (f"NCCL's RAS gave no answer: {ras.trouble}",)
    found = tuple(islice(_lines(ras, world), _LINES))
    if not found and ras.total:
        return ("by NCCL's RAS all ranks answer and have launched as many collectives",)
    return tuple(f"by NCCL's RAS {each}" for each in found)


def _lines(ras: Ras, world: int) -> Iterator[str]:
    dead = {(each.pid, each.host) for each in ras.silent if each.dead}
    known = set()
    for communicator in ras.communicators:
        of = "" if communicator.size == world else f" of a communicator of {communicator.size}"
        for each in communicator.missing:
            known.add((each.pid, each.host))
            is_dead = each.dead or (each.pid, each.host) in dead
            yield f"{named([each.rank])}{of} {_silence(each, is_dead)}"
        for difference in communicator.differences:
            yield f"{_differ(difference)}{of.replace(' of', ', in', 1)}"
    for each in ras.silent:
        if (each.pid, each.host) not in known:
            yield f"a process {_silence(each, each.dead)}"


def _silence(process: RasProcess, dead: bool) -> str:
    where = f" (process {process.pid} on {process.host})" if process.pid > 0 else ""
    return f"{'is dead or cut off' if dead else 'does not answer'}{where}"


def _differ(difference: RasDifference) -> str:
    groups = difference.groups
    if difference.what in NO_COUNTS:
        verb = "reported" if difference.what == "error" else "in state"
        return ", ".join(f"{_who(each)} {verb} {each.value}" for each in groups[:4])
    ordered = sorted(groups, key=lambda each: whole(each.value, -1))
    listed = ", ".join(f"{_who(each)} {each.value}" for each in ordered[:4])
    return f"{difference.what} operations launched: {listed}"


def _who(group: RasGroup) -> str:
    return named(group.ranks) if group.ranks else count(group.many, "rank")


# -- collectives that the hosts of all ranks have queued: whether their GPUs have come to them


def gpu_findings(still: HangSnapshot, one: Blocked) -> Iterator[Finding]:
    """All ranks are in a collective: whether their GPUs are, too."""
    waiting = one.waiting
    arrivals = {rank.rank: gpu_arrival(rank) for rank in waiting}
    late = [rank for rank in waiting if arrivals[rank.rank] == "behind"]
    if late:
        yield from _late_gpus(still, one, late)
        return
    called = waiting[0].waits_at
    alone = len(waiting) == 1
    several = "all ranks that left a dump have" if waiting[0].dump else "all ranks have"
    who = f"{named([waiting[0].rank])} has" if alone else several
    message = f"{who} been in {one.what} for {waiting[0].seconds} s and it does not end: "
    fix = CHECK_NETWORK
    if alone:
        message += "the backend, or the device"
        fix = "See its native frames: `ddpdoctor stacks`."
    elif "unknown" in arrivals.values():
        message += "the network does not carry it, or a GPU has not come to it"
        fix = (
            "Set TORCH_NCCL_ENABLE_TIMING=1: then torch records which GPU has come to a "
            f"collective. {fix}"
        )
    elif "close" in arrivals.values() and waiting[0].under_way is None:
        message += "the network between them, the backend, or the work of that backward on a GPU"
    else:
        message += "the network between them, or the backend"
    yield Finding(
        code="DDP814",
        about="all there",
        severity=lasting_severity(Severity.WARNING, waiting),
        message=message,
        ranks=tuple(rank.rank for rank in waiting),
        location=called,
        evidence=(*(waiting_line(rank) for rank in waiting[:4]), *without_stacks(still)),
        fix=fix,
    )


def _late_gpus(still: HangSnapshot, one: Blocked, late: Sequence[RankState]) -> Iterator[Finding]:
    """GPUs that are still at work which was queued before the collective."""
    ranks = [rank.rank for rank in late]
    others = [rank for rank in one.waiting if rank not in late]
    waits = f"{named([rank.rank for rank in others])} wait{'s' if len(others) == 1 else ''}"
    text, place = gpu_work(late[0])
    called = late[0].waits_at
    severity = lasting_severity(Severity.WARNING, one.waiting)
    yield Finding(
        code="DDP802",
        about=standstill_identity(late, severity),
        severity=severity,
        message=f"the GPU{'s' if len(late) > 1 else ''} of {named(ranks)} never came to {one.what} "
        f"of {quoted(called)}{f', where {waits}' if others else ''}: still at work that was "
        f"queued before it, for {late[0].seconds} s: {text}",
        ranks=tuple(ranks),
        location=place or called,
        evidence=(*(waiting_line(rank) for rank in others[:3]), *without_stacks(still)),
        fix=STUCK_GPU,
        traceback=late[0].traceback,
        moment=still.record.time,
    )


# -- why a job makes no progress: what was seen of its ranks, judged once for all the rules


_PLURAL = {"is": "are", "has": "have", "does": "do"}

_TOGETHER = (
    "Let every rank call the same collectives in the same order; work that one rank does alone has "
    "to be shorter than the collectives' timeout."
)
_OUTSIDE = "Look at what is waited for outside of the job: a file, a server, a queue."

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
    lines = ras_lines(still.record.ras, still.world_size)
    found = list(_explained(run, still))
    yield from (replace(each, evidence=(*each.evidence, *lines)) for each in found)
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
        yield from before_joining(run, still)
        return
    waits = find_blocked(still)
    states = [(rank, seen) for rank in still.ranks if (seen := state_of(rank)) is not None]
    if states:
        # What such a rank was in before says nothing any more.
        yield from _activities(still, states, waits[0] if waits else None)
    elif waits:
        yield from _of_waits(run, still, waits)
    elif still.record.everybody:
        yield from _none_waits(still)


def _unexplained(run: Run, still: HangSnapshot) -> Iterator[Finding]:
    """The facts, where no rank is to blame for sure."""
    if collective_mismatch.first_mismatch(collective_mismatch.rings(run), _gloo(run)) is not None:
        return
    ranks = [rank for rank in still.ranks if rank.joined and not rank.ended]
    yield Finding(
        code="DDP814",
        about="unexplained",
        severity=lasting_severity(Severity.WARNING, ranks),
        message=f"the job has made no progress for {still.seconds:.0f} s: "
        + "; ".join(
            f"rank {rank.rank} {_doing(rank)} at {quoted(rank.waits_at)}" for rank in ranks[:3]
        ),
        ranks=tuple(rank.rank for rank in ranks),
        location=ranks[0].waits_at if ranks else None,
        evidence=(
            *(f"rank {rank.rank} {_doing(rank)} at {brief(rank.waits_at)}" for rank in ranks[3:8]),
            *without_stacks(still),
        ),
        fix="Compare the lines that the ranks are at: `ddpdoctor stacks` shows them in full."
        if len(ranks) > 1
        else _OUTSIDE,
    )


def _doing(rank: RankState) -> str:
    return (
        f"waits in {rank.waits_in}" if rank.in_collective else f"is in {rank.phase or 'start-up'}"
    )


# -- some wait in a collective


def _of_waits(run: Run, still: HangSnapshot, waits: Sequence[Blocked]) -> Iterator[Finding]:
    first = waits[0]
    alone = guarded_call(waits)
    if alone is not None:
        yield _with_nccl(run, alone)
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
        yield order_finding(waits)
    else:
        yield from _all_there(run, still, first)


def _with_nccl(run: Run, found: Finding) -> Finding:
    """A finding about collectives that differ, with what NCCL says of that."""
    return replace(found, evidence=(*found.evidence, *unequal_sizes(run.stderr)))


def _missing(rank: RankState, starting: bool) -> Activity:
    """What a rank does that others wait for."""
    if rank.dump:
        return last_call(rank)
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
            # It has not had the time that every rank is given.
            continue
        kinds[each.code, each.location, each.severity].append((rank, each))
    culprits = {rank.rank for rank, _ in seen}
    for found in kinds.values():
        ranks = [rank for rank, _ in found]
        each = found[0][1]
        severity = each.severity
        if not still.record.everybody and each.code in ("DDP802", "DDP807", "DDP811"):
            severity = min(severity, Severity.WARNING)
        elif each.code in ("DDP802", "DDP809"):
            severity = lasting_severity(severity, ranks)
        waiting = [r for r in (wait.waiting if wait is not None else ()) if r.rank not in culprits]
        yield Finding(
            code=each.code,
            about=standstill_identity(ranks, severity),
            severity=severity,
            message=_sentence(ranks, each, wait if waiting else None, waiting),
            ranks=tuple(rank.rank for rank in ranks),
            location=each.location,
            evidence=(
                *each.evidence,
                *native_frames(ranks[0]),
                *(waiting_line(rank) for rank in waiting[:3]),
                *without_stacks(still),
            ),
            fix=each.fix or (_TOGETHER if still.world_size != 1 else _OUTSIDE),
            traceback=ranks[0].traceback,
            moment=still.record.time,
        )


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
    at = quoted(waiting[0].waits_at)
    if each.code == "DDP802":
        again = "they" if plural else who
        return f"{who} never joined {wait.what}, where {others} {verb} in {at}; {again} {text}"
    return f"{who} {text}; {others} {verb} for {'them' if plural else 'it'} in {wait.what} at {at}"


def _all_there(run: Run, still: HangSnapshot, one: Blocked) -> Iterator[Finding]:
    """No rank is missing that could be seen."""
    same = same_number([one])
    if same is not None:
        yield _with_nccl(run, different_calls_finding(same))
        return
    waiting = one.waiting
    if one.unseen and waiting[0].dump:
        yield Finding(
            code="DDP802",
            about="no dump",
            severity=Severity.WARNING,
            message=f"{named([each.rank for each in waiting])} wait in {one.what}; "
            f"{named(one.unseen)} left no dump that says whether "
            f"{'they' if len(one.unseen) > 1 else 'it'} called it",
            ranks=one.unseen,
            location=waiting[0].site,
            evidence=tuple(waiting_line(rank) for rank in waiting[:4]),
            fix="Look for its file on its node, and for how it ended in its log: "
            "`ddpdoctor report --log FILE`.",
        )
        return
    if one.unseen:
        absent, why = _by_ras(still, one)
        yield Finding(
            code="DDP802",
            about="other nodes",
            severity=Severity.WARNING,
            message=f"all ranks of this node wait in {one.what}; {named(absent)} of other nodes "
            f"{why}",
            ranks=absent,
            location=waiting[0].waits_at,
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
    yield from gpu_findings(still, one)


def _by_ras(still: HangSnapshot, one: Blocked) -> tuple[tuple[int, ...], str]:
    """Which ranks of other nodes did not join a collective, and how that is known."""
    ras, world = still.record.ras, still.world_size
    silent = unanswered_ranks(ras, world) & set(one.unseen)
    if silent:
        many = len(silent) > 1
        return tuple(sorted(silent)), f"{'do' if many else 'does'} not answer NCCL's RAS"
    late = ranks_behind(ras, world, one.unseen, one.launched_behind)
    if late:
        return tuple(sorted(late)), "did not join it: NCCL's RAS counts fewer collectives there"
    return one.unseen, "did not join it, or cannot be reached"


# -- none waits in a collective


def _none_waits(still: HangSnapshot) -> Iterator[Finding]:
    starting = all(not rank.step for rank in still.ranks)
    seen = [
        (rank, exit_wait(rank) or activity_of(rank, starting))
        for rank in still.ranks
        if rank.looked_at
    ]
    explained = [(rank, each) for rank, each in seen if each.code not in ("DDP802", "DDP811")]
    if explained:
        yield from _activities(still, explained, None)
        return
    idle = [(rank, each) for rank, each in seen if _is_idle(rank, each)]
    # Ranks that only sleep do nothing for a while together: a pause between epochs, say.
    if not idle or len(idle) < len(seen) or all(_only_sleeps(rank) for rank, _ in idle):
        return
    rank, each = idle[0]
    yield Finding(
        code="DDP814",
        about="none waits",
        severity=lasting_severity(Severity.WARNING, [each for each, _ in idle]),
        message=f"no rank has moved for {min(r.seconds for r, _ in idle)} s and none waits in a "
        f"collective: {named([rank.rank])} {each.text}"
        if len(idle) > 1
        else f"{named([rank.rank])} {each.text}",
        ranks=tuple(rank.rank for rank, _ in idle),
        location=each.location,
        evidence=tuple(f"rank {r.rank} {e.text}" for r, e in idle[1:5]),
        fix=_OUTSIDE,
        traceback=rank.traceback,
    )


def _is_idle(rank: RankState, each: Activity) -> bool:
    working = each.severity < Severity.ERROR
    return rank.joined and not rank.ended and not working and rank.frame is not None


def _only_sleeps(rank: RankState) -> bool:
    return rank.site is not None and only_sleeps(rank.site.path, rank.site.line)


def _gloo(run: Run) -> bool:
    return all("nccl" not in rank.opened.backend for rank in run.last)
