"""``ddpdoctor report --html`` in a real browser: what it shows, and what it never does."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.commands import report
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.render.html.page import measurement_gaps
from ddpdoctor.run.records.base import CodeFrame, Record
from ddpdoctor.run.records.process import ErrorRecord
from ddpdoctor.run.records.supervisor import HangRecord
from ddpdoctor.run.step_series import Series
from tests.support.browser import PROGRAM, Browser
from tests.support.drawn_runs import MS, T0, write_run
from tests.support.hanging_ranks import hung, waiting

HOSTILE = (
    "</script><script>document.title='taken'</script>"
    "<img src=x onerror=\"document.title='taken'\"> %%data%% \u202egnp"
)
"""What would be markup, a part of the template, or would turn letters round."""


@pytest.fixture
def browser(tmp_path: Path, token: str) -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("no chromium is installed (Debian: apt-get install chromium)")
    made = Browser(tmp_path / "profile", token)
    yield made
    made.close()


def raised(message: str, script: str) -> dict[int, list[Record]]:
    """The records of rank 2 that raised a ValueError in line 4."""
    frame = CodeFrame(script, 4, "<module>")
    error = ErrorRecord(
        time=T0 + 9000 * MS, pid=4102, step=60, exception="ValueError", message=message,
        path=script, line=4, user_frames=(frame,),
    )  # fmt: skip
    return {2: [error]}


def written(run: Path, *words: str) -> Path:
    """The HTML file of a run."""
    report.main([str(run), "--html", str(run.parent / "report.html"), *words])
    return run.parent / "report.html"


def content(path: Path) -> dict[str, Any]:
    """What the file says, as its script reads it."""
    found = re.search(r'id="content">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def text(browser: Browser, selector: str) -> list[str]:
    """The text of all elements that a selector finds, spaces as one."""
    script = (
        f"Array.from(document.querySelectorAll({json.dumps(selector)}), each => each.innerText)"
    )
    return [" ".join(each.split()) for each in browser.evaluate(script)]


def test_one_line_in_place_of_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", records=raised("the wrong batch", "train.py"))
    file, trace = written(run), tmp_path / "trace.json"
    seen = capsys.readouterr()
    line = rf"wrote {re.escape(str(file))}, \d+\.\d MB; findings: 1 error.*\n"
    assert re.fullmatch(line, seen.out)
    assert not seen.err
    written(run, "--trace", str(trace))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"wrote {file}, ") and second.startswith(f"wrote {trace}, ")
    written(run, "--json")
    seen = capsys.readouterr()
    assert json.loads(seen.out.splitlines()[0])["severity"] == "error"
    assert seen.err.startswith(f"ddpdoctor: wrote {file}, ")
    report.main([str(run)])
    assert "the wrong batch" in capsys.readouterr().out


def test_everything_is_on_the_page(tmp_path: Path, browser: Browser) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n\nfor batch in loader:\n    raise ValueError(batch)\n")
    run = write_run(
        tmp_path / "run",
        records=raised("the wrong batch", str(script)),
        manifest={"started": 2 * T0, "host": socket.gethostname()},
        status=1,
    )
    frame = {"path": str(script), "line": 4, "function": "<module>"}
    main = {"ident": 1, "name": "MainThread", "current": False, "frames": [frame]}
    stacks = [{"rank": rank, "threads": [main]} for rank in range(3)]
    left = {"rank": 3, "trouble": "stopped (SIGSTOP)"}
    saved = {"format": 1, "time": T0, "ranks": [*stacks, left]}
    (run / "stacks.json").write_text(json.dumps(saved))
    browser.open(written(run))
    (verdict,) = text(browser, "h1")
    assert "rank 2 raised ValueError: the wrong batch" in verdict
    titles = [
        "Findings", "Ranks", "Steps over time", "Loss and gradients", "Memory and GPUs", "Stacks",
        "Environment and command", "What was not measured",
    ]  # fmt: skip
    assert text(browser, "h2") == titles
    assert text(browser, ".finding .fix")
    assert "> 4 raise ValueError(batch)" in text(browser, ".frame .row.guilty")
    first = text(browser, ".ranks tbody tr")[0]
    assert first.startswith("1 ◂ DDP610") and "217 ms" in first, "the slow rank is on top"
    assert len(text(browser, ".ranks tbody tr")) == 4
    assert "[0-2]" in text(browser, ".tree summary")[0]
    assert "[3] no stack: stopped (SIGSTOP)" in text(browser, ".tree .line")
    assert "python -m torch.distributed.run train.py --lr 0.1" in text(browser, ".facts dd")
    assert browser.complaints() == []
    assert [url[:5] for url in browser.requests()] == ["file:"]


def test_charts_are_drawn_zoomed_and_follow_the_chosen_rank(
    tmp_path: Path, browser: Browser
) -> None:
    browser.open(written(write_run(tmp_path / "run")))
    browser.evaluate("redraw(true)")
    assert browser.evaluate("charts.every(each => each.plot !== null)")
    assert browser.evaluate("charts.length") >= 7
    assert browser.evaluate("view.rank") == 1, "the rank that is to blame is chosen"
    assert browser.evaluate("charts.find(each => each.shared).plot.data[0].length") == 60
    browser.evaluate("charts.find(each => each.shared).plot.setScale('x', {min: 10, max: 20})")
    browser.evaluate("new Promise(done => setTimeout(done, 100))")
    shared = "charts.filter(each => each.shared)"
    assert browser.evaluate(f"{shared}.every(each => each.plot.scales.x.min === 10)")
    browser.evaluate("document.querySelector('.ranks tbody tr:last-child').click()")
    assert browser.evaluate("view.rank") != 1
    drawn = "document.querySelector('.heat canvas').getContext('2d').getImageData"
    heat = browser.evaluate(f"Array.from({drawn}(200, 4, 1, 60).data)")
    assert len({tuple(heat[at : at + 3]) for at in range(0, len(heat), 4)}) > 2
    assert browser.complaints() == []


def test_dark_light_and_paper(tmp_path: Path, browser: Browser) -> None:
    path = written(write_run(tmp_path / "run"))
    background = "getComputedStyle(document.body).backgroundColor"
    browser.media(dark=True)
    browser.open(path)
    assert browser.evaluate(background) == "rgb(11, 17, 32)"
    browser.evaluate("document.querySelector('.bar button').click()")
    assert browser.evaluate(background) == "rgb(255, 255, 255)"
    browser.evaluate("document.querySelector('.bar button').click()")
    assert browser.evaluate(background) == "rgb(11, 17, 32)"
    browser.media(dark=True, printed=True)
    assert browser.evaluate(background) == "rgb(255, 255, 255)", "paper is white"
    browser.media(dark=True)
    assert browser.pdf().startswith(b"%PDF")
    assert browser.evaluate("charts.every(each => each.plot !== null)"), "all of it is printed"
    assert browser.complaints() == []


def test_hostile_text_is_shown_and_never_markup(tmp_path: Path, browser: Browser) -> None:
    run = write_run(
        tmp_path / "run",
        records=raised(HOSTILE, f"/{HOSTILE}.py"),
        manifest={"id": HOSTILE, "command": [HOSTILE], "cwd": HOSTILE, "versions": {HOSTILE: "1"}},
        status=1,
    )
    frame = {"path": f"/job/{HOSTILE}.py", "line": 4, "function": HOSTILE}
    main = {"ident": 1, "name": "MainThread", "frames": [frame]}
    saved = {"format": 1, "time": T0, "ranks": [{"rank": 0, "threads": [main]}]}
    (run / "stacks.json").write_text(json.dumps(saved))
    browser.open(written(run))
    assert browser.evaluate("document.title").startswith("</script><script>")
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.evaluate("document.querySelectorAll('script').length") == 2
    assert "ValueError: </script><script>" in text(browser, "h1")[0]
    assert "\u202e" not in browser.evaluate("document.body.innerText")
    assert "\\u202egnp" in browser.evaluate("document.body.innerText")
    assert browser.complaints() == []


def test_the_policy_of_the_file_lets_nothing_else_run(tmp_path: Path, browser: Browser) -> None:
    path = written(write_run(tmp_path / "run"))
    page = path.read_text().replace("<main", "<script>document.title='taken'</script><main")
    path.write_text(page)
    browser.open(path)
    assert browser.evaluate("document.title") != "taken"
    assert any("Content Security Policy" in each for each in browser.complaints())


@pytest.mark.slow
def test_a_thousand_ranks_and_long_runs_are_thinned_out(tmp_path: Path, browser: Browser) -> None:
    path = written(write_run(tmp_path / "run", 1024, 200, distinct=4))
    assert path.stat().st_size < 5_000_000
    browser.open(path)
    assert len(text(browser, ".ranks tbody tr")) == 24
    assert text(browser, ".more") == ["Show all 1024 ranks"]
    browser.evaluate("document.querySelector('.more').click()")
    assert browser.evaluate("document.querySelectorAll('.ranks tbody tr').length") == 1024
    assert browser.complaints() == []


def test_what_was_not_measured_is_listed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 2, 0)
    (run / "vitals.jsonl").unlink()
    found = content(written(run))
    assert "steps: no rank closed one" in found["gaps"]
    assert "memory and GPUs over time: not recorded in this run" in found["gaps"]


def test_a_flight_recorder_that_did_not_answer_is_listed(tmp_path: Path) -> None:
    silent = {**waiting(1), "flight": None, "flight_trouble": "did not answer"}
    gaps = list(measurement_gaps(hung(tmp_path, waiting(0), silent), Series()))
    assert "the Flight Recorder of rank 1: did not answer" in gaps
    assert not any("Flight Recorder of rank 0" in each for each in gaps)


def test_a_damaged_directory_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    manifest = {"command": 5, "versions": "new", "cwd": [], "id": {}, "started": "soon"}
    run = write_run(tmp_path / "run", 2, 20, manifest=manifest)
    vitals = (run / "vitals.jsonl").read_bytes()
    odd = b'{"kind":"vitals","time":1,"restart":0,"gpus":[["a",0,NaN,1e999,null,1,1]]}'
    crowd = json.dumps([[rank, rank, None, None] for rank in range(200)]).encode()
    many = b'{"kind":"vitals","time":2,"restart":0,"ranks":%b}' % crowd
    (run / "vitals.jsonl").write_bytes(vitals + b"\n".join((odd, many, b"[" * 999, b"")))
    with (run / "rank-0000.r0.jsonl").open("ab") as journal:
        journal.write(b'{"kind":"step","step":999999999999999,"start":1}\n' + b"x" * 5000)
    found = content(written(run))
    assert found["series"]["edges"][0] == 0
    assert found["vitals"]["ranks"] == ["least", "median", "most"]
    assert len(found["vitals"]["curves"]["rss"]) == 3


def test_a_hang_is_marked_with_its_time(tmp_path: Path) -> None:
    hang = HangRecord(time=T0 + 60_000 * MS, number=1, restart=0, seconds=31.0)
    run = write_run(tmp_path / "run", 2, 20, supervisor=[hang], status=None)
    assert content(written(run))["hangs"] == [[29.0, 60.0]]


@pytest.mark.parametrize("status", [0, 1, None])
def test_the_verdict_without_findings_is_how_it_ended(tmp_path: Path, status: int | None) -> None:
    run = write_run(tmp_path / "run", 1, 5, status=status)
    verdict = content(written(run))["verdict"]
    levels = {0: ("good", "The job succeeded"), 1: ("error", ""), None: ("warning", "No cause")}
    level, beginning = levels[status]
    assert verdict["level"] == level and verdict["text"].startswith(beginning)


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1, 1)
    with pytest.raises(DoctorError, match=r"cannot write /nowhere/report\.html"):
        report.main([str(run), "--html", "/nowhere/report.html"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--log", "x", "--html", "y"], "--html needs a run directory"),
        (["a", "b", "--trace", "y"], "--trace takes one run"),
        (["a", "--with", "y"], "--with needs --trace"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], said: str) -> None:
    with pytest.raises(DoctorError, match=said):
        report.main(words)
