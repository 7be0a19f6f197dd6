"""Diagnose why a job makes no progress, from one examination, in findings of several codes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import count, named
from ddpdoctor.core.opening import whole
from ddpdoctor.core.relations import STANDSTILL
from ddpdoctor.diagnose.collectives.collective_mismatch import ring_mismatch
from ddpdoctor.diagnose.collectives.mismatch_findings import (
    different_calls_finding,
    guarded_call,
    order_finding,
    point_to_point_finding,
    same_number,
    waiting_line,
)
from ddpdoctor.diagnose.collectives.recorded_calls import (
    NO_COUNTS,
    ranks_behind,
    unanswered_ranks,
    unequal_sizes,
)
from ddpdoctor.diagnose.crashes.resource_errors import store_address, store_advice
from ddpdoctor.diagnose.hangs.hang_snapshot import (
    Blocked,
    HangSnapshot,
    RankState,
    find_blocked,
    hang_snapshot,
)
from ddpdoctor.diagnose.hangs.job_nodes import option
from ddpdoctor.diagnose.hangs.process_activity import (
    STUCK_GPU,
    computes,
    gpu_arrival,
    gpu_work,
    lacks_cpu,
    lasts,
    moves_data,
    starves,
)
from ddpdoctor.diagnose.hangs.rank_activity import (
    Activity,
    activity_of,
    came_since,
    exit_wait,
    last_call,
    state_of,
)
from ddpdoctor.diagnose.source_files import brief, only_sleeps, quoted
from ddpdoctor.run.names import MAX_WORLD_SIZE
from ddpdoctor.run.records.supervisor import Ras, RasDifference, RasGroup, RasProcess
from ddpdoctor.run.snapshot import Run

_MAX_NATIVE_FRAMES = 4
_MAX_RAS_LINES = 6
_MAX_CPU_FACTOR = 1.5
"""Maximum CPU time that a rank may need before it joins, as a factor of the other ranks'."""

_PLURAL = {"is": "are", "has": "have", "does": "do"}

_TOGETHER = (
    "Let every rank call the same collectives in the same order; work of a single rank has to be "
    "shorter than the collectives' timeout."
)
_OUTSIDE = "Look at what is waited for outside of the job: a file, a server, a queue."
_CHECK_NETWORK = (
    "Check the network and the interface that the backend took "
    "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO says)."
)
_START = (
    "Start the missing ranks, or correct the world size; all need the same address and port, and a "
    "network that lets them through."
)

_Seen = Sequence[tuple[RankState, Activity]]


def guilty(run: Run) -> frozenset[int]:
    """Return the ranks that are certainly to blame, by the newest examination."""
    hang = hang_snapshot(run)
    found = diagnose(hang, ring_mismatch(run) is not None) if hang is not None else []
    errors = (each for each in found if each.severity is Severity.ERROR)
    return frozenset(rank for finding in errors for rank in finding.ranks)


def diagnose(hang: HangSnapshot, mismatched: bool) -> list[Finding]:
    """Diagnose an examination. If the rings are ``mismatched``, another finding names the cause."""
    lines = ras_evidence(hang.record.ras, hang.world_size)
    found = [
        replace(each, evidence=(*each.evidence, *lines)) for each in _explained(hang, mismatched)
    ]
    # A rank may be late because it has no core.
    short_of_cpu = any(
        lacks_cpu(rank, hang.record.limit) or starves(rank)
        for rank in hang.ranks
        if not rank.evidence.ended
    )
    unexplained = not found and hang.record.everybody and not mismatched and not short_of_cpu
    if unexplained and any(rank.in_collective for rank in hang.ranks):
        found.append(_unexplained(hang))
    return [replace(each, subjects=each.subjects | {STANDSTILL}) for each in found]


def _explained(hang: HangSnapshot, mismatched: bool) -> Iterator[Finding]:
    if not any(rank.joined for rank in hang.ranks):
        yield from _before_joining(hang)
        return
    waits = find_blocked(hang)
    states = [(rank, seen) for rank in hang.ranks if (seen := state_of(rank)) is not None]
    if states:
        # What such a rank did earlier proves nothing.
        yield from _activities(hang, states, waits[0] if waits else None)
    elif waits:
        yield from _of_waits(hang, mismatched, waits)
    elif hang.record.everybody:
        yield from _none_waits(hang)


def _unexplained(hang: HangSnapshot) -> Finding:
    """Report the facts if no rank is certainly to blame."""

    def doing(rank: RankState) -> str:
        if rank.in_collective:
            return f"rank {rank.rank} waits in {rank.waits_in}"
        return f"rank {rank.rank} is in {rank.phase or 'start-up'}"

    ranks = [rank for rank in hang.ranks if rank.joined and not rank.evidence.ended]
    return Finding(
        code="DDP814",
        about="unexplained",
        severity=_lasting_severity(Severity.WARNING, ranks),
        message=f"the job has made no progress for {hang.record.seconds:.0f} s: "
        + "; ".join(f"{doing(rank)} at {quoted(rank.waits_at)}" for rank in ranks[:3]),
        ranks=tuple(rank.rank for rank in ranks),
        location=ranks[0].waits_at if ranks else None,
        evidence=(
            *(f"{doing(rank)} at {brief(rank.waits_at)}" for rank in ranks[3:8]),
            *_without_stacks(hang),
        ),
        fix="Compare the lines that the ranks are at: `ddpdoctor stacks` shows them in full."
        if len(ranks) > 1
        else _OUTSIDE,
    )


def _lasting_severity(severity: Severity, ranks: Sequence[RankState]) -> Severity:
    """Raise a warning to an error if the activity of all ranks lasts."""
    if severity is Severity.WARNING and ranks and all(map(lasts, ranks)):
        return Severity.ERROR
    return severity


def _identity(ranks: Sequence[RankState], severity: Severity) -> str:
    """Return a text that identifies a standstill of some ranks, whatever their lines are."""
    since = max(rank.evidence.since for rank in ranks)
    return f"{severity.label} {[rank.rank for rank in ranks]} {since}"


def _without_stacks(hang: HangSnapshot) -> tuple[str, ...]:
    """Name the ranks without stacks, at most three."""
    found = [
        f"no stack of rank {rank.rank}: {rank.stacks.trouble}"
        + (f"; {rank.stacks.note}" if rank.stacks.note else "")
        for rank in hang.ranks
        if rank.stacks is not None and rank.stacks.trouble and rank.dead_for is None
    ]
    return tuple(found[:3])


# -- some ranks wait in a collective


def _of_waits(hang: HangSnapshot, mismatched: bool, waits: Sequence[Blocked]) -> Iterator[Finding]:
    first = waits[0]
    pair = point_to_point_finding(hang.ranks)
    if pair is not None:
        yield pair
        return
    alone = guarded_call(waits)
    if alone is not None:
        yield _with_nccl(hang, alone)
        return
    if mismatched:
        return
    elsewhere = [rank for rank in first.absent if rank.in_collective]
    gone = [rank for rank in first.absent if not rank.in_collective]
    if gone:
        starting = all(not rank.step for rank in hang.ranks)
        yield from _activities(hang, [(rank, _missing(rank, starting)) for rank in gone], first)
    elif elsewhere:
        yield order_finding(waits)
    else:
        yield from _all_there(hang, first)


def _with_nccl(hang: HangSnapshot, found: Finding) -> Finding:
    """Add NCCL's report of differing collectives."""
    return replace(found, evidence=(*found.evidence, *unequal_sizes(hang.stderr)))


def _missing(rank: RankState, starting: bool) -> Activity:
    """Return the activity of a rank that others wait for."""
    if rank.evidence.dump:
        return last_call(rank)
    end = exit_wait(rank)
    # A rank at the end of its script will not join anymore.
    return replace(end, severity=Severity.ERROR) if end else activity_of(rank, starting)


def _activities(hang: HangSnapshot, seen: _Seen, wait: Blocked | None) -> Iterator[Finding]:
    """Yield a finding for each activity of ranks that do not join the others."""
    kinds: dict[object, list[tuple[RankState, Activity]]] = defaultdict(list)
    for rank, each in seen:
        # A rank without a core has not had as much time as the limit allows.
        if each.severity >= Severity.ERROR or not lacks_cpu(rank, hang.record.limit):
            kinds[each.code, each.location, each.severity].append((rank, each))
    culprits = {rank.rank for rank, _ in seen}
    waiting = [r for r in (wait.waiting if wait is not None else ()) if r.rank not in culprits]
    for found in kinds.values():
        ranks = [rank for rank, _ in found]
        each = found[0][1]
        severity = each.severity
        if not hang.record.everybody and each.code in ("DDP802", "DDP807", "DDP811"):
            severity = min(severity, Severity.WARNING)
        elif each.code in ("DDP802", "DDP809"):
            severity = _lasting_severity(severity, ranks)
        stacks = ranks[0].stacks
        native = stacks.native[-_MAX_NATIVE_FRAMES:] if stacks is not None else ()
        frames = f"native frames of rank {ranks[0].rank}: {' > '.join(native)}"
        yield Finding(
            code=each.code,
            about=_identity(ranks, severity),
            severity=severity,
            message=_sentence(ranks, each, wait if waiting else None, waiting),
            ranks=tuple(rank.rank for rank in ranks),
            location=each.location,
            evidence=(
                *each.evidence,
                *((frames,) if native else ()),
                *(waiting_line(rank) for rank in waiting[:3]),
                *hang.by_node(ranks),
                *_without_stacks(hang),
            ),
            fix=each.fix or (_TOGETHER if hang.world_size != 1 else _OUTSIDE),
            traceback=ranks[0].traceback,
            moment=hang.record.time,
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


def _all_there(hang: HangSnapshot, one: Blocked) -> Iterator[Finding]:
    """Diagnose a collective in which no observable rank is missing."""
    waiting = one.waiting
    same = same_number([one])
    if same is not None:
        yield _with_nccl(hang, different_calls_finding(same))
    elif one.unseen and waiting[0].evidence.dump:
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
            fix="Look for its file on its node, and in its log for the way it ended: "
            "`ddpdoctor report --log FILE`.",
        )
    elif one.unseen:
        absent, why = _absent_by_ras(hang, one)
        yield Finding(
            code="DDP802",
            about="other nodes",
            severity=Severity.WARNING,
            message=f"all ranks of this node wait in {one.what}; {hang.nodes.places(absent)} {why}",
            ranks=absent,
            location=waiting[0].waits_at,
            evidence=(*(waiting_line(rank) for rank in waiting[:4]), *hang.dead_links),
            fix=hang.nodes.and_check("Look at what ddpdoctor says on the other nodes."),
            paste=hang.nodes.check_line,
        )
    elif len(waiting) < len(hang.ranks) or not hang.record.everybody:
        # The others are in a later collective, which these ranks may still reach.
        return
    elif not waiting[0].probed and len({rank.waits_at for rank in waiting}) > 1:
        # The ranks may be in different collectives.
        return
    elif not any(starves(rank) for rank in waiting):
        # Otherwise the threads that run the collective have no core.
        yield _by_gpus(hang, one)


def _by_gpus(hang: HangSnapshot, one: Blocked) -> Finding:
    """Diagnose a collective that all ranks have called, by the progress of their GPUs."""
    waiting = one.waiting
    arrivals = {rank.rank: gpu_arrival(rank) for rank in waiting}
    late = [rank for rank in waiting if arrivals[rank.rank] == "behind"]
    if late:
        return _late_gpus(hang, one, late)
    alone = len(waiting) == 1
    several = "all ranks that left a dump have" if waiting[0].evidence.dump else "all ranks have"
    who = f"{named([waiting[0].rank])} has" if alone else several
    fix = _CHECK_NETWORK
    if alone:
        cause = "the backend, or the device"
        fix = "See its native frames: `ddpdoctor stacks`."
    elif all(rank.evidence.collective == "Work.wait" and not rank.under_way for rank in waiting):
        # Only isend and irecv are not recorded.
        cause = "they may wait for each other's isend or irecv"
        fix = (
            "Start all sends and receives (isend, irecv) before any wait, or exchange with "
            "dist.batch_isend_irecv."
        )
    elif not waiting[0].probed:
        cause = "the network between them, the backend, or a different call on each rank"
    elif "unknown" in arrivals.values():
        cause = "the network does not carry it, or a GPU has not come to it"
        fix = (
            "Set TORCH_NCCL_ENABLE_TIMING=1: then torch records which GPU has reached a "
            f"collective. {fix}"
        )
    elif "close" in arrivals.values() and waiting[0].under_way is None:
        cause = "the network between them, the backend, or the work of that backward on a GPU"
    else:
        cause = "the network between them, or the backend"
    network = "network" in cause
    links = hang.dead_links if network else ()
    return Finding(
        code="DDP814",
        about="all there",
        severity=_lasting_severity(Severity.WARNING, waiting),
        message=f"{who} been in {one.what} for {waiting[0].seconds} s and it does not end: {cause}",
        ranks=tuple(rank.rank for rank in waiting),
        location=waiting[0].waits_at,
        evidence=(*(waiting_line(rank) for rank in waiting[:4]), *links, *_without_stacks(hang)),
        fix=hang.nodes.and_check(fix) if network else fix,
        paste=hang.nodes.check_line if network else "",
    )


def _late_gpus(hang: HangSnapshot, one: Blocked, late: Sequence[RankState]) -> Finding:
    """Report GPUs that still run work queued before the collective."""
    ranks = [rank.rank for rank in late]
    others = [rank for rank in one.waiting if rank not in late]
    waits = f"{named([rank.rank for rank in others])} wait{'s' if len(others) == 1 else ''}"
    text, place = gpu_work(late[0])
    called = late[0].waits_at
    severity = _lasting_severity(Severity.WARNING, one.waiting)
    return Finding(
        code="DDP802",
        about=_identity(late, severity),
        severity=severity,
        message=f"the GPU{'s' if len(late) > 1 else ''} of {named(ranks)} never came to {one.what} "
        f"of {quoted(called)}{f', where {waits}' if others else ''}: still at work that was "
        f"queued before it, for {late[0].seconds} s: {text}",
        ranks=tuple(ranks),
        location=place or called,
        evidence=(*(waiting_line(rank) for rank in others[:3]), *_without_stacks(hang)),
        fix=STUCK_GPU,
        traceback=late[0].traceback,
        moment=hang.record.time,
    )


# -- no rank waits in a collective


def _none_waits(hang: HangSnapshot) -> Iterator[Finding]:
    starting = all(not rank.step for rank in hang.ranks)
    seen = [
        (rank, exit_wait(rank) or activity_of(rank, starting))
        for rank in hang.ranks
        if rank.watched
    ]
    explained = [(rank, each) for rank, each in seen if each.code not in ("DDP802", "DDP811")]
    if explained:
        yield from _activities(hang, explained, None)
        return
    if not seen or not all(_is_idle(rank, each) for rank, each in seen):
        return
    # Ranks that only sleep are in a common pause, for example between epochs.
    sites = [rank.site for rank, _ in seen]
    if all(site is not None and only_sleeps(site.path, site.line) for site in sites):
        return
    rank, each = seen[0]
    message = f"{named([rank.rank])} {each.text}"
    if len(seen) > 1:
        message = (
            f"no rank has moved for {min(r.seconds for r, _ in seen)} s and none waits in a "
            f"collective: {message}"
        )
    yield Finding(
        code="DDP814",
        about="none waits",
        severity=_lasting_severity(Severity.WARNING, [each for each, _ in seen]),
        message=message,
        ranks=tuple(rank.rank for rank, _ in seen),
        location=each.location,
        evidence=tuple(f"rank {r.rank} {e.text}" for r, e in seen[1:5]),
        fix=_OUTSIDE,
        traceback=rank.traceback,
    )


def _is_idle(rank: RankState, each: Activity) -> bool:
    working = each.severity < Severity.ERROR
    return rank.joined and not rank.evidence.ended and not working and rank.frame is not None


# -- no rank returns from ``init_process_group``


def _before_joining(hang: HangSnapshot) -> Iterator[Finding]:
    seen = [(rank, activity_of(rank, True)) for rank in hang.ranks]
    joining = [(rank, each) for rank, each in seen if each.code == "DDP813"]
    others = [(rank, each) for rank, each in seen if each.code != "DDP813"]
    late = list(_late(others, joining, hang)) if joining else []
    if late:
        yield from late[:3]
    elif any(rank.dead_for is None for rank, _ in others):
        # These ranks will join, or their position is unknown.
        return
    elif joining:
        # Ranks may still be importing modules, or the launcher's store may have no core to answer.
        # A rank's writes prove nothing: the rank with the store polls it for others a hundred times
        # a second.
        at_work = any(computes(rank) or moves_data(rank) for rank, _ in joining)
        busy = hang.record.launcher_works or at_work
        report = _all_joining if _all_came(hang) else _not_all_joining
        yield from () if busy else (report(joining, hang),)
    elif not hang.ranks and hang.manifest.get("launcher") == "torchrun":
        yield from _torchrun_alone(hang)


def _all_came(hang: HangSnapshot) -> bool:
    """Return whether all expected ranks are in ``init_process_group``."""
    asked = {rank.stacks.world_size for rank in hang.ranks if rank.stacks is not None}
    return 0 not in asked and 0 < max(asked, default=0) <= len(hang.ranks)


def _torchrun_alone(hang: HangSnapshot) -> Iterator[Finding]:
    """Report that torchrun has not started any rank because it waits for other nodes."""
    if hang.nodes.several:
        yield Finding(
            code="DDP813",
            about="rendezvous",
            severity=Severity.ERROR,
            message=f"torchrun has waited in rendezvous for {hang.record.seconds:.0f} s: of "
            f"{hang.nodes.number} nodes, not all have come",
            evidence=(*_launch_options(hang), *hang.dead_links),
            fix=hang.nodes.and_check(
                "Start the command on every node, with the same --nnodes, --rdzv-id and "
                "--rdzv-endpoint (or --master-addr), each with its own --node-rank."
            ),
            paste=hang.nodes.check_line,
        )


def _is_late(rank: RankState, joining: _Seen, hang: HangSnapshot) -> bool:
    """Return whether a rank does something else although it had enough CPU time to join."""
    limit = hang.record.limit
    if rank.frame is None or came_since(rank) or lacks_cpu(rank, limit):
        return False
    # We do not know how long a process waited for a core before it became a rank. Compare its CPU
    # time with that of the others.
    needed = max((peer.activity.ran for peer, _ in joining), default=0.0)
    return not starves(rank) or rank.activity.ran >= _MAX_CPU_FACTOR * max(needed, limit)


def _late(others: _Seen, joining: _Seen, hang: HangSnapshot) -> Iterator[Finding]:
    """Report ranks that have not reached ``init_process_group`` while others wait in it."""
    waits = f"{named([r.rank for r, _ in joining])} {'wait' if len(joining) > 1 else 'waits'}"
    for rank, each in others:
        if not _is_late(rank, joining, hang):
            continue
        unknown = each.code == "DDP802"
        text = f"has not come to init_process_group: it {each.text}" if unknown else each.text
        yield Finding(
            code=each.code,
            about=f"late {rank.rank}",
            # It may be waiting for a lock or a file.
            severity=min(each.severity, Severity.WARNING) if unknown else each.severity,
            message=f"rank {rank.rank} {text}; {waits} for it in init_process_group for "
            f"{hang.record.seconds:.0f} s, at {quoted(joining[0][0].site)}",
            ranks=(rank.rank,),
            location=each.location,
            evidence=each.evidence,
            fix=each.fix
            or "Let all ranks join first, or prepare the data before the job starts; the others' "
            "timeout runs.",
            traceback=rank.traceback,
        )


def _all_joining(joining: _Seen, hang: HangSnapshot) -> Finding:
    rank, each = joining[0]
    seconds = f"{hang.record.seconds:.0f} s"
    return Finding(
        code="DDP814",
        about="all there",
        severity=Severity.WARNING,
        message=f"all ranks have been in init_process_group for {seconds} and it does not end: the "
        "network between them, or the backend"
        if len(joining) > 1
        else f"rank {rank.rank} has been in init_process_group for {seconds}, alone as its world "
        "size says, and it does not end: the store, or the backend",
        ranks=tuple(rank.rank for rank, _ in joining),
        location=each.location,
        evidence=hang.dead_links,
        fix=hang.nodes.and_check(_CHECK_NETWORK),
        paste=hang.nodes.check_line,
        traceback=rank.traceback,
    )


def _not_all_joining(joining: _Seen, hang: HangSnapshot) -> Finding:
    """Report that fewer ranks joined than the world size says, or that no rank opens a store."""
    rank, each = joining[0]
    verb = "wait" if len(joining) > 1 else "waits"
    missing, fix, paste = "ranks that never came", _START, ""
    evidence = (*_launch_options(hang), *hang.dead_links)
    if hang.nodes.several:
        worlds = (one.stacks.world_size for one in hang.ranks if one.stacks is not None)
        world = min(max(worlds, default=0), MAX_WORLD_SIZE)
        absent = sorted(set(range(world)) - {one.rank for one in hang.ranks})
        missing = f"{hang.nodes.places(absent)}, not seen from this node" if absent else missing
        fix, paste = hang.nodes.and_check(_START), hang.nodes.check_line
    if hang.store is not None:
        paste = ""
        missing = f"a store at {store_address(hang.store)} that no rank opens"
        fix, evidence = store_advice(hang.store)
    return Finding(
        code="DDP813",
        about="rendezvous",
        severity=Severity.ERROR,
        message=f"{named([rank.rank for rank, _ in joining])} {verb} in init_process_group at "
        f"{quoted(each.location)} for {missing}, for {hang.record.seconds:.0f} s",
        ranks=tuple(rank.rank for rank, _ in joining),
        location=each.location,
        evidence=evidence,
        fix=fix,
        paste=paste,
        traceback=rank.traceback,
    )


def _launch_options(hang: HangSnapshot) -> tuple[str, ...]:
    names = ("--nnodes", "--nproc-per-node", "--node-rank", "--rdzv-endpoint", "--master-addr")
    seen = [f"{name} {value}" for name in names if (value := option(hang.manifest, name))]
    return (f"started with {' '.join(seen)}",) if seen else ()


# -- NCCL's RAS, which covers the ranks of all nodes


def _absent_by_ras(hang: HangSnapshot, one: Blocked) -> tuple[tuple[int, ...], str]:
    """Return the ranks of other nodes that did not join a collective, with the evidence."""
    ras, world = hang.record.ras, hang.world_size
    silent = unanswered_ranks(ras, world) & set(one.unseen)
    if silent:
        verb = "do" if len(silent) > 1 else "does"
        return tuple(sorted(silent)), f"{verb} not answer NCCL's RAS"
    late = ranks_behind(ras, world, one.unseen, one.launched_after)
    if late:
        return tuple(sorted(late)), "did not join it: NCCL's RAS counts fewer collectives there"
    if not one.waiting[0].probed:
        return one.unseen, "on other nodes: not examined"
    return one.unseen, "did not join it, or cannot be reached"


def ras_evidence(ras: Ras | None, world: int) -> tuple[str, ...]:
    """Convert a response of RAS to lines of evidence."""
    if ras is None:
        return ()
    if ras.trouble:
        return (f"NCCL's RAS gave no answer: {ras.trouble}",)
    found = tuple(islice(_ras_lines(ras, world), _MAX_RAS_LINES))
    if not found and ras.total:
        return ("by NCCL's RAS all ranks answer and have launched as many collectives",)
    return tuple(f"by NCCL's RAS {each}" for each in found)


def _ras_lines(ras: Ras, world: int) -> Iterator[str]:
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
    def who(group: RasGroup) -> str:
        return named(group.ranks) if group.ranks else count(group.many, "rank")

    if difference.what in NO_COUNTS:
        verb = "reported" if difference.what == "error" else "in state"
        return ", ".join(f"{who(each)} {verb} {each.value}" for each in difference.groups[:4])
    ordered = sorted(difference.groups, key=lambda each: whole(each.value, -1))
    listed = ", ".join(f"{who(each)} {each.value}" for each in ordered[:4])
    return f"{difference.what} operations launched: {listed}"
