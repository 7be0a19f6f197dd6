"""Pages of the rules for collectives that do not match (DDP401, DDP803, DDP804).

Their findings come from the diagnosis of a hang, or without a hang from the ranks' calls
(:func:`ddpdoctor.diagnose.hangs.standstill.stands_still`).
"""

from ddpdoctor.core.finding import Severity, rule
from ddpdoctor.core.relations import brings_about, came_first, ended_by
from ddpdoctor.diagnose.hangs.standstill import stands_still
from ddpdoctor.run.reported import event


@rule(
    "DDP401",
    "collective-under-rank-guard",
    Severity.ERROR,
    detect=stands_still,
    supersedes={"DDP803": came_first, "DDP804": brings_about},
    lapses=event,
    late=True,
)
class CollectiveUnderRankGuard:
    """A collective is called by some ranks only, under a condition on the rank.

    What it finds
        A barrier, all-reduce or broadcast under `if rank == 0:` (or after `if rank != 0: return`,
        or under `@rank_zero_only`), directly or in a function that calls it, while the other ranks,
        which skipped it, wait in another collective or failed because theirs paired with this one.

    Why it is bad
        A collective ends when all ranks of its group have called it. The job hangs until the
        timeout, or the call pairs with a different collective and mixes up their data.

    How to fix it
        Move the call out of the branch, so that every rank makes it.

    Example
        Wrong:
            if rank == 0:
                save(model)
                dist.barrier()  # ranks 1, 2, ... never call it
        Right:
            if rank == 0:
                save(model)
            dist.barrier()

    When it stays silent
        If every branch calls the same collective. For `if rank != 0: barrier()` before and
        `if rank == 0: barrier()` after the work of rank 0, which match. For conditions that hold on
        every rank (`local_rank != -1`), in groups whose ranks all call it, and while the missing
        ranks are busy (DDP802).
    """


@rule(
    "DDP803", "different-collectives", Severity.ERROR, detect=stands_still, lapses=event, late=True
)
class DifferentCollectives:
    """Ranks call different collectives where they should call the same one.

    What it finds
        The n-th collective of a process group differs between ranks: in operation, tensor size,
        dtype, reduce operation (SUM or MAX) or root. The finding names the ranks that skipped a
        call, made an extra one, or differ from most; otherwise all ranks.

    Why it is bad
        Some of these hang, some fail with a message about sizes, and some go unnoticed: ranks that
        reduce with different operations all get wrong numbers, and nothing else detects that.

    How to fix it
        Make the call the same on all ranks. If the operations differ, one rank usually made an
        extra call or skipped one, a few lines earlier.

    Example
        Wrong:
            op = dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM
            dist.all_reduce(x, op)
        Right:
            dist.all_reduce(x, dist.ReduceOp.SUM)  # on every rank

    When it stays silent
        For the same call at different lines. For tensors of the same size and different shape. For
        `all_to_all`, and with NCCL `all_gather` and `reduce_scatter`, whose sizes may differ. If
        some calls are compiled and cannot be seen, and for collectives in other threads. If DDP401
        or DDP109 is the cause.
    """


@rule(
    "DDP804",
    "groups-in-different-order",
    Severity.ERROR,
    detect=stands_still,
    supersedes={"DDP803": ended_by},
    lapses=event,
    late=True,
)
class GroupsInDifferentOrder:
    """Ranks use two process groups in different order and wait for each other.

    What it finds
        A rank that waits in a collective of one group for a second rank, which waits for the first
        one in a collective of another group.

    Why it is bad
        Neither call can end: the job hangs until the timeout.

    How to fix it
        Call the collectives of all groups in the same order on every rank.

    Example
        Wrong:
            groups = [a, b] if rank == 0 else [b, a]
            for group in groups:
                dist.all_reduce(x, group=group)
        Right:
            for group in [a, b]:
                dist.all_reduce(x, group=group)

    When it stays silent
        While one of the two ranks is busy and may still arrive.
    """
