"""A loss of one rank that depends on no parameter: DDP reduces nothing there."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.core.user_code import Location
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.status import Phase
from tests.support.written import Written

SCRIPT = """\
def box_loss(boxes):
    if not boxes:
        return torch.tensor(0.0, requires_grad=True)
    return error(boxes)
for x, boxes in loader:
    box_loss(boxes).backward()
"""


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


def constant(path: Path, backward: int) -> JsonObject:
    return {"kind": "constant_loss", "path": str(path), "line": 6, "step": backward - 1,
            "backward": backward}  # fmt: skip


def ran(written: Written, rank: int, path: Path, reduced: int, *constants: int) -> None:
    site: JsonObject = {"kind": "site", "path": str(path), "line": 6, "phase": "backward"}
    records = [site, *(constant(path, each) for each in constants)]
    written.rank(rank, records, phase=Phase.BACKWARD, reduced=reduced, armed=reduced)


@pytest.mark.parametrize("places", [1, 2])
def test_the_step_and_the_line_are_named(written: Written, tmp_path: Path, places: int) -> None:
    script = tmp_path / "train.py"
    more = "def other_loss(x):\n    return x.new_zeros(1).requires_grad_()\n"
    script.write_text(SCRIPT + more * (places - 1))
    ran(written, 0, script, 9)
    ran(written, 1, script, 9, 5, 6)
    (finding,) = written.findings()
    assert (finding.code, finding.ranks) == ("DDP305", (1,))
    line = 3 if places == 1 else 6
    assert finding.location == Location(str(script), line)
    assert "touched no parameter in step 4: its loss is a constant" in finding.message
    assert len(finding.evidence) == (0 if places == 1 else 2)


@pytest.mark.parametrize("why", ["on all ranks", "not there yet", "lost"])
def test_it_is_no_fault_or_not_known(written: Written, tmp_path: Path, why: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ran(written, 1, script, 9, 5)
    if why == "lost":
        fault = {"kind": "fault", "hook": "backward", "error": "X"}
        written.rank(0, [fault], phase=Phase.BACKWARD, reduced=9, armed=9)
    else:
        ran(written, 0, script, 4 if why == "not there yet" else 9, *(5,) * (why == "on all ranks"))
    assert not written.findings()


@pytest.mark.parametrize(("last", "expected"), [(7, 1), (3, 0)])
def test_ranks_have_more_of_them_than_are_recorded(
    written: Written, tmp_path: Path, last: int, expected: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    limit: JsonObject = {"kind": "limit", "of": "constant_loss", "time": 7}
    records = [constant(script, last), limit]
    written.rank(0, records, phase=Phase.BACKWARD, reduced=9, armed=9)
    ran(written, 1, script, 9, 5)
    # Rank 0 is known to have reduced the fifth backward if it recorded a later constant loss.
    found = [each for each in written.findings() if each.ranks == (1,)]
    assert len(found) == expected
