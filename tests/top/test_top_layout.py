"""What ``top`` draws, for any size of terminal: the goldens, and what holds for all of them."""

from __future__ import annotations

import dataclasses
import math
import unicodedata
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpdoctor.core import formatting
from ddpdoctor.render.terminal import plain, style_of, text_width
from ddpdoctor.top.app import changed_stretches
from ddpdoctor.top.draw import drawing, screen
from ddpdoctor.top.draw.board import full_rank
from ddpdoctor.top.draw.drawing import ASCII, UNICODE, ScreenData
from ddpdoctor.top.frames import History, Point
from ddpdoctor.top.snapshot import FindingRow, Gpu, RankRow, Snapshot, Times, Verdict
from ddpdoctor.top.view import KEYS, SORTS, Panel, View, apply_action, board_order, selected_rows
from tests.support import top_snapshots as made


def text(snapshot: Snapshot, view: View = View(), size: tuple[int, int] = (80, 24)) -> list[str]:  # noqa: B008
    return [plain(line) for line in screen.draw_screen(snapshot, view, *size).lines]


@pytest.mark.parametrize("name", made.CASES)
def test_the_picture_is_the_golden_one(name: str) -> None:
    golden = made.GOLDENS / f"{name}.txt"
    assert made.picture(name) == golden.read_text("utf-8"), (
        "if the change is meant: python -m tests.support.top_snapshots"
    )


def test_a_rank_that_gains_memory_shows_its_slope() -> None:
    snapshot = made.run(2, gpus=False)
    grows, still = (
        ScreenData(tuple(Point(100.0 + 2 * n, memory={0: (1 << 30) + n * each}) for n in range(30)))
        for each in (4 << 20, 0)
    )
    shown = [
        "".join(
            plain(line) for line in full_rank(row, drawing.scene_of(snapshot, View(), 200, each))
        )
        for row in snapshot.ranks
        if row.rank == 0
        for each in (grows, still)
    ]
    assert "grows 120M a minute" in shown[0]
    assert "a minute" not in shown[1]


def test_there_is_no_golden_without_a_case() -> None:
    assert {path.stem for path in made.GOLDENS.iterdir()} == set(made.CASES)


words = st.text(max_size=30)
amounts = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))
times = st.builds(Times, *[st.floats(min_value=0, max_value=1e6)] * 7, st.booleans())
sizes = st.one_of(st.none(), st.integers(0, 1 << 62))
gpus = st.builds(
    Gpu, words, st.integers(0, 99), words, words, amounts, sizes, sizes, amounts, amounts,
    amounts, amounts, amounts, st.lists(words, max_size=2).map(tuple), sizes, amounts, amounts,
    st.lists(st.tuples(st.integers(0, 9999), sizes), max_size=2).map(tuple), st.booleans(), words,
)  # fmt: skip
states = st.sampled_from(["running", "starting", "stale", "debugger", "ended", "dead", "new one"])
ranks = st.builds(
    RankRow,
    rank=st.integers(0, 99_999),
    node=words,
    pid=sizes,
    state=states,
    said=words,
    phase=words,
    since=amounts,
    site=words,
    collective=words,
    step=sizes,
    times=st.one_of(st.none(), times),
    heartbeat=amounts,
    dropped=st.integers(0, 1 << 40),
    rss=sizes,
    cost=amounts,
    gpu=st.one_of(st.none(), gpus),
    output=st.lists(words, max_size=2).map(tuple),
)
snapshots = st.builds(
    Snapshot,
    time=st.floats(0, 4e9),
    kind=st.sampled_from(["run", "machine", "demo"]),
    verdict=st.builds(
        Verdict, words, st.sampled_from(["ok", "info", "warning", "error"]), st.integers(0, 3)
    ),
    run=words,
    command=words,
    live=st.booleans(),
    exit_status=st.one_of(st.none(), st.integers(-64, 255)),
    ranks=st.lists(ranks, max_size=6).map(tuple),
    median=st.one_of(st.none(), times),
    skew=st.one_of(st.none(), st.floats(0, 1e9)),
    gpus=st.lists(gpus, max_size=3).map(tuple),
    findings=st.lists(
        st.builds(FindingRow, st.just(made.FINDING), st.floats(0, 4e9)), max_size=3
    ).map(tuple),
    notes=st.lists(words, max_size=2).map(tuple),
    nvml=words,
    environment=st.dictionaries(words, words, max_size=3),
)
views = st.builds(
    View,
    ascii_only=st.booleans(),
    sort=st.sampled_from(SORTS),
    reverse=st.booleans(),
    filter=st.text("0123456789,- node", max_size=6),
    typing=st.booleans(),
    cursor=st.one_of(st.none(), st.integers(0, 3)),
    top=st.integers(0, 99),
    expanded=st.booleans(),
    grouped=st.booleans(),
    paused=st.booleans(),
    panel=st.sampled_from(get_args(Panel)),
    item=st.integers(0, 99),
    opened=st.booleans(),
    everyone=st.booleans(),
    message=words,
    trouble=words,
)


@settings(max_examples=300, deadline=None)
@given(snapshots, views, st.integers(1, 320), st.integers(1, 110))
def test_every_line_is_as_wide_as_the_screen_and_harmless(
    snapshot: Snapshot, view: View, room: int, height: int
) -> None:
    drawn = screen.draw_screen(
        snapshot, view, room, height, ScreenData(asked=("one", "\x1b[2J two"))
    )
    assert len(drawn.lines) == height
    for line in drawn.lines:
        assert text_width(plain(line)) == room
        for part, style in line:
            style_of(style)
            assert not any(unicodedata.category(each) in ("Cc", "Cf", "Cs") for each in part)
            assert part.isascii() or not view.ascii_only
    assert set(drawn.ranks) | set(drawn.entries) <= set(range(height))


@pytest.mark.parametrize("room", range(20, 301, 7))
@pytest.mark.parametrize("case", ["2-ranks", "1024-ranks", "dead", "no-gpu", "machine"])
def test_numbers_are_never_cut(case: str, room: int) -> None:
    """Columns go as a whole: what is shown of a rank is what a wide screen shows, too."""
    snapshot, view = made.CASES[case]()
    whole = set(" ".join(text(snapshot, view, (300, 100))).split())
    for line in text(snapshot, view, (room, 100))[1:]:
        if line.split()[:1] == ["!"]:
            numbers = [word for word in line.split()[2:] if word.replace(".", "").isdigit()]
            assert set(numbers) <= whole


def test_columns_only_ever_go_as_the_screen_shrinks() -> None:
    before: set[str] = set()
    for room in range(40, 200):
        lines = text(made.run(8), View(), (room, 40))
        header = set(next(line for line in lines if line.split()[:1] == ["rank"]).split())
        assert before <= header, room
        before = header


def test_the_blamed_rank_comes_first_and_is_marked_without_colour() -> None:
    lines = text(made.run(64))
    assert "rank 1" in lines[1]
    assert lines[4].split()[:2] == ["!", "1"]


def test_a_dead_rank_among_thousands_is_in_sight() -> None:
    whole = made.changed(made.run(1024), 700, state="dead", said="killed by SIGKILL")
    assert any("dead: killed by SIGKILL" in line for line in text(whole, View(), (80, 10)))


def test_what_is_not_known_is_a_dash_and_never_a_zero() -> None:
    bare = made.changed(
        made.run(2), 0, step=None, times=None, gpu=None, rss=None, reserved=None,
        heartbeat=None,
    )  # fmt: skip
    line = next(each for each in text(bare, View(), (160, 24)) if each.split()[:1] == ["0"])
    assert set(line.split()[3:]) == {"-", "backward"}


def test_an_unmeasured_split_is_marked() -> None:
    line = next(each for each in text(made.run(4, split=False)) if each.split()[:1] == ["0"])
    assert sum(word.startswith("~") for word in line.split()) == 2


def bar(line: str) -> str:
    return line.split()[-1]


def test_all_steps_have_one_axis_and_the_slow_phase_is_longer() -> None:
    slow, quick = (bar(line) for line in text(made.run(2), View(colour=False))[4:6])
    assert abs(len(slow) - len(quick)) <= 1, "who is quick waits for the slow one"
    assert slow.count("b") >= 2 * quick.count("b")
    assert quick.count("w") > slow.count("w")
    assert abs(slow.count("f") - quick.count("f")) <= 1


def test_the_phase_that_is_to_blame_is_marked() -> None:
    drawn = screen.draw_screen(made.run(4), View(), 100, 24)
    marked = [part.strip() for line in drawn.lines for part, style in line if style == "guilty"]
    assert marked == ["120"]


def test_the_headline_is_whole() -> None:
    hung = made.hung()
    for size in ((60, 15), (80, 24), (200, 60)):
        lines = text(hung, View(), size)
        end = next(n for n, line in enumerate(lines) if line.split()[:1] == ["rank"])
        said = " ".join(" ".join(lines[1:end]).split())
        assert said == f"✗ {hung.verdict.text}"
        assert sum(line.split()[0] in "0123!" for line in lines[end + 1 :] if line.split()) >= 3


@pytest.mark.parametrize("case", ["no-gpu", "ended"])
def test_what_is_not_there_takes_no_column(case: str) -> None:
    snapshot, view = made.CASES[case]()
    head = text(snapshot, view, (200, 60))[2].split()
    assert not {"util", "watt", "temp"} & set(head)
    assert ("beat" in head) is snapshot.live


def test_a_pipeline_has_a_column_of_stages() -> None:
    run = made.run(4)
    ranks = tuple(replace(row, stage=str(row.rank % 2)) for row in run.ranks)
    lines = text(replace(run, ranks=ranks), size=(120, 30))
    assert lines[2].split()[:2] == ["rank", "stage"]
    cells = [line.lstrip(" !").split()[:2] for line in lines[4:8]]
    assert sorted(cells) == [["0", "0"], ["1", "1"], ["2", "0"], ["3", "1"]]
    assert "stage" not in text(run, size=(120, 30))[2].split()


@pytest.mark.parametrize(
    ("state", "shown"),
    [("running", " LIVE"), ("hung", " HUNG"), ("failing", " FAILING"), ("starting", " STARTING"),
     ("restarting", " RESTARTING, attempt 1")],
)  # fmt: skip
def test_the_bar_says_the_state(state: str, shown: str) -> None:
    lines = text(replace(made.run(2), state=state))
    assert lines[-2].startswith(shown)


def test_an_ended_run_keeps_its_numbers() -> None:
    lines = text(made.over(), View(colour=False))
    row = next(line for line in lines if line.split()[1:2] == ["1"])
    assert "169" in row and "bbb" in row
    assert lines[-2].startswith(" ENDED, status 0")


@pytest.mark.parametrize("sort", SORTS)
def test_sorting_puts_what_is_unknown_last_either_way(sort: str) -> None:
    whole = made.changed(made.run(8), 3, times=None, step=None, gpu=None, rss=None, reserved=None)
    for reverse in (False, True):
        order = [row.rank for row in selected_rows(whole, View(sort=sort, reverse=reverse))]
        assert sorted(order) == list(range(8))
        if sort not in ("own", "rank"):
            assert order[-1] == 3
    first = selected_rows(made.run(8), View(sort="wait"))[0].rank
    assert first != made.SLOW


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("", [0, 1, 2, 3]),
        ("0,2-3", [0, 2, 3]),
        ("rank 2", []),
        ("rank2", [2]),
        ("node0 1", [1]),
        ("NODE1", []),
        ("model.py", [1]),
        ("all_reduce", [0, 2, 3]),
        ("9-1", []),
    ],
)
def test_filter(words: str, found: list[int]) -> None:
    shown = selected_rows(made.run(4), View(filter=words))
    assert sorted(row.rank for row in shown) == found


def test_groups_of_ranks_that_do_the_same() -> None:
    lines = [line.strip() for line in text(made.run(4), View(panel="stacks"))]
    assert "[1] backward /data/model.py:17 for 12.0 ms" in lines
    assert "[0,2-3] backward (all_reduce) /data/train.py:61 for 12.0 ms" in lines


def test_the_cursor_stays_in_sight_and_on_its_rank() -> None:
    snapshot, view = made.run(1024), View()
    for _ in range(200):
        view = apply_action(view, snapshot, "down")
        drawn = screen.draw_screen(snapshot, view, 80, 24)
        assert view.cursor in drawn.ranks.values()
        view = replace(view, top=drawn.top)
    assert view.cursor == board_order(snapshot, View())[199]
    view = replace(view, grouped=True)
    assert view.cursor in screen.draw_screen(snapshot, view, 80, 24).ranks.values()


def test_ten_thousand_findings() -> None:
    many = replace(
        made.run(2),
        findings=tuple(FindingRow(made.FINDING, made.NOW - n) for n in range(10_000)),
    )
    lines = text(many, View(panel="findings", item=9_999))
    assert any(line.startswith("▸ ! DDP610") for line in lines)
    assert "10000 findings (f)" in lines[-2]


def test_the_keys_that_are_shown_are_those_of_the_table() -> None:
    line = text(made.run(2), View(), (300, 24))[-1]
    assert [f"{key.shown} {key.short}" for key in KEYS] == [
        " ".join(part.split()) for part in line.split("  ") if part.strip()
    ]
    assert "x signal" not in text(made.run(2), View(readonly=True), (300, 24))[-1]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"), (math.nan, "-"), (math.inf, "-"), (0.0, "0"), (0.5, "0.50"), (9.999, "10.0"),
        (31.04, "31.0"), (99.97, "100"), (1234.4, "1234"), (12345.0, "12k"), (999_999.0, "1.0M"),
    ],
)  # fmt: skip
def test_figures(value: float | None, shown: str) -> None:
    assert formatting.figures(value) == shown


@given(st.floats(min_value=0, max_value=1e17))
def test_figures_fit_their_columns(value: float) -> None:
    for shown in (
        formatting.figures(value),
        formatting.size(int(value)),
        formatting.age(min(value, 8e7)),
    ):
        assert 1 <= len(shown) <= 4


def test_sizes_and_durations() -> None:
    assert formatting.size(71 << 30) == "71G"
    assert formatting.size(0) == "0B"
    assert formatting.size(None) == "-"
    assert formatting.duration(0.031) == "31.0 ms"
    assert formatting.duration(200) == "3 min"
    assert formatting.percent(0.0) == "0%"


@given(
    times, st.integers(0, 200), st.floats(min_value=0, max_value=1e7), st.sampled_from([0.0, 1.0])
)
def test_a_stacked_bar_never_leaves_its_room(
    step: Times, room: int, longest: float, scale: float
) -> None:
    assert text_width(plain(drawing.step_bar(step, room, longest * scale, ASCII))) <= room


def test_bars() -> None:
    step = Times(0.2, 0.2, 0.2, 0.2, 0.0, 0.2, 1.0, True)
    assert plain(drawing.step_bar(step, 10, 1.0, ASCII)) == "ddffbboow" + "w"
    assert [plain(line) for line in drawing.step_chart([step, step], 2.0, (5, 4), ASCII)] == [
        "  ", "  ", "oo", "ff",
    ]  # fmt: skip
    assert [plain(line) for line in drawing.bar_chart((1.0, None, 2.0), 2.0, (3, 2), UNICODE)] == [
        "  █", "█ █",
    ]  # fmt: skip
    assert drawing.evenly_spread(range(10), 4) == [2, 5, 8, 9]
    assert drawing.evenly_spread(range(3), 4) == range(3)
    assert drawing.axis_end_without_outlier((1.0, 1.0, 1.0, 100.0)) == 4.0
    assert [drawing.axis_end(value) for value in (0.222, 0.0, 181.0)] == [0.24, 0.0, 200.0]


@given(st.floats(min_value=1e-9, max_value=1e9))
def test_an_axis_ends_little_above_the_longest(value: float) -> None:
    assert value * 0.999 <= drawing.axis_end(value) <= value * 1.21


@pytest.mark.parametrize("marks", [UNICODE, ASCII])
def test_signs_are_one_column_wide(marks: object) -> None:
    assert dataclasses.is_dataclass(marks)
    for field in dataclasses.fields(marks):
        sign = getattr(marks, field.name)
        if field.name not in ("ascii_only", "letters", "ellipsis"):
            assert all(text_width(each) == 1 for each in sign), field.name
            assert sign.isascii() or marks is UNICODE


def test_only_what_has_changed_is_written() -> None:
    before = (("rank 1 ", ""), ("bbbb", "backward"), ("ww", "wait"), ("  12 ms  ", ""))
    assert changed_stretches(before, before) == []
    longer = (("rank 1 ", ""), ("bbbbb", "backward"), ("w", "wait"), ("  12 ms  ", ""))
    assert changed_stretches(before, longer) == [(11, 12)]
    red = (("rank 1 ", "error"), *before[1:])
    assert changed_stretches(before, red) == [(0, 7)]
    both = (("rank 2 ", ""), *before[1:3], ("  13 ms  ", ""))
    assert changed_stretches(before, both) == [(5, 6), (16, 17)]
    assert changed_stretches(before, (("日本", ""),)) == [(0, 4)]
    assert changed_stretches((), (("ab", ""),)) == [(0, 2)]


def test_the_charts_go_back_to_the_beginning() -> None:
    past = History()
    newest = made.run(2)
    past.add(newest)
    past.add_earlier([replace(each, time=each.time - 60) for each in made.history(newest)])
    assert len(past.points) == 31 and past.points[-1].time == newest.time
    for second in range(1, 10_000):
        job = replace(newest.job, step=1234 + second)
        past.add(replace(newest, time=newest.time + second, job=job))
    assert 100 < len(past.points) <= 240
    assert past.points[0].time < newest.time - 600
    gaps = [b.time - a.time for a, b in zip(past.points, past.points[1:], strict=False)]
    assert max(gaps) < 4 * min(gaps)
    still = len(past.points)
    past.add(replace(newest, time=newest.time + 20_000, job=job))
    assert len(past.points) == still, "no step has ended"
