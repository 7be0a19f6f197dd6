"""The status page of a rank."""

from __future__ import annotations

import os
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
from ddpdoctor.run.mapped import UnreadableError
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.status import PAGE_SIZE, Phase, page_name, page_text, read_status
from tests.support.journals import new_page

# -- the status page


def test_a_status_page_is_read_back(tmp_path: Path) -> None:
    page = new_page(tmp_path / "page")
    page.show(int(Phase.BACKWARD), 123, 47)
    page.totals(45, 6, 89, 2)
    page.reduced(46)
    page.set_site(page_text("/home/user/train.py:17"))
    page.set_collective(page_name("all_reduce"))
    page.set_stage([0, 2])
    page.set_cost(0.0041)
    status = read_status(str(tmp_path / "page"))
    assert status.pid == os.getpid()
    assert (status.rank, status.world_size, status.local_rank) == (3, 8, 1)
    assert (status.restart, status.started) == (2, 77)
    assert (status.phase, status.since, status.step) == (Phase.BACKWARD, 123, 45)
    assert (status.epoch, status.armed, status.last_total, status.dropped) == (6, 47, 89, 2)
    assert (status.site, status.collective) == ("/home/user/train.py:17", "all_reduce")
    assert (status.reduced, status.stage, status.cost) == (46, "0,2", 0.0041)
    assert not status.unwritten
    page.set_unwritten()
    assert read_status(str(tmp_path / "page")) == status._replace(unwritten=True)


def test_a_fresh_page_says_starting(tmp_path: Path) -> None:
    new_page(tmp_path / "page")
    status = read_status(str(tmp_path / "page"))
    assert (status.phase, status.epoch) == (Phase.STARTING, None)
    assert (status.site, status.collective, status.stage) == ("", "", "")


@given(site=st.text(max_size=900).filter(lambda text: "\0" not in text))
@settings(max_examples=50, deadline=None)
def test_a_site_survives_or_keeps_its_end(site: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "page"
        page = new_page(path)
        page.set_site(page_text("before:1"))
        page.set_site(page_text(site))
        read = read_status(str(path)).site
    whole = site.encode("utf-8", "replace").decode()
    if len(whole.encode()) <= 687:
        assert read == whole
    else:
        # A character may be cut in two where the text begins.
        assert whole.endswith(read.lstrip("\N{REPLACEMENT CHARACTER}"))
        assert len(read.encode()) >= 684


def test_a_page_is_private_and_never_overwritten(tmp_path: Path) -> None:
    new_page(tmp_path / "page")
    assert (tmp_path / "page").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        new_page(tmp_path / "page")


def test_a_page_takes_its_blocks_at_once(tmp_path: Path) -> None:
    """A store into a hole of a sparse file is a SIGBUS once the disk is full."""
    new_page(tmp_path / "page")
    assert (tmp_path / "page").stat().st_size == PAGE_SIZE
    assert (tmp_path / "page").stat().st_blocks > 0


@pytest.mark.parametrize("content", [b"", b"DDPDOCT\0", b"x" * PAGE_SIZE, bytes(PAGE_SIZE)])
def test_what_is_no_page_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "page"
    path.write_bytes(content)
    with pytest.raises(UnreadableError, match="not a status page, or was cut short"):
        read_status(str(path))


def test_a_page_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "page"
    new_page(path)
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", FORMAT + 1))
    with pytest.raises(UnreadableError, match=f"has format {FORMAT + 1}; .* up to format {FORMAT}"):
        read_status(str(path))


def test_a_phase_of_a_later_version_reads_as_other(tmp_path: Path) -> None:
    page = new_page(tmp_path / "page")
    page.show(99, 0, 0)
    assert read_status(str(tmp_path / "page")).phase is Phase.OTHER
