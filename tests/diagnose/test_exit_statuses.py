"""Exit statuses, as launchers print them."""

from __future__ import annotations

import pytest

from ddpdoctor.diagnose.crashes.rank_endings import printed_statuses, signal_name
from ddpdoctor.run.status import Phase
from tests.support.written import MS, T0, Written


def test_what_torchrun_prints_of_exit_statuses() -> None:
    text = (
        "  exitcode  : -9 (pid: 31)\n  exitcode  : 1 (pid: 32)\n"
        "failed (exitcode: 3) local_rank: 0 (pid: 33) of binary: python\n"
    )
    assert printed_statuses(text) == {31: -9, 32: 1, 33: 3}
    assert printed_statuses("exitcode : x (pid: 4)") == {}


def test_signals_have_names() -> None:
    assert signal_name(9) == "SIGKILL"
    assert signal_name(99) == "signal 99"


def unseen(written: Written, rank: int, time: int) -> None:
    """The end of a rank whose parent took its status."""
    written.exit(rank, 0, time)
    written.supervisor[-1]["status"] = None


def test_a_kill_of_a_rank_whose_parent_took_its_status(written: Written) -> None:
    written.rank(0, [], phase=Phase.WAIT)
    written.rank(1, [], phase=Phase.FORWARD)
    unseen(written, 1, T0)
    written.supervisor[-1]["oom"] = "kernel"
    (finding,) = written.findings(status=1)
    assert (finding.code, finding.ranks) == ("DDP903", (1,))


SPAWNED = "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with "


@pytest.mark.parametrize(("how", "code"), [("exit code 3", "DDP905"), ("signal SIGSEGV", "DDP904")])
def test_the_first_whose_status_is_not_known_is_the_one_that_spawn_names(
    written: Written, how: str, code: str
) -> None:
    for rank in (0, 1):
        written.rank(rank, [], phase=Phase.FORWARD, since=T0 + rank)
        unseen(written, rank, T0 + (1 - rank) * MS)
        with open(written.path / f"rank-000{rank}.r0.status", "r+b") as page:
            page.seek(16)
            page.write((700 + rank).to_bytes(8, "little"))
    (finding,) = written.findings(status=1, stderr=f"{SPAWNED}{how}\n")
    assert (finding.code, finding.ranks) == (code, (1,))


def test_words_of_spawn_without_a_status_say_nothing(written: Written) -> None:
    written.rank(0, [], phase=Phase.WAIT)
    written.rank(1, [], phase=Phase.FORWARD)
    unseen(written, 1, T0)
    found = written.findings(status=1, stderr=f"{SPAWNED}signal SIGNONE\n")
    assert [each.ranks for each in found] == []
