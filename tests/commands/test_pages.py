"""The pages of rules and checks: whole, short, with an example, and printed as they are written."""

from __future__ import annotations

import re

import pytest

from ddpdoctor.commands.explain import _meant, entries, main, reflow
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.failures.table import TABLE

PAGES = {code: entry.page for code, entry in entries().items()}
SECTIONS = [
    "What it finds", "Why it is bad", "How to fix it", "Example", "When it stays silent",
]  # fmt: skip
WIDTH = 100
LONGEST = 30


@pytest.mark.parametrize("code", PAGES)
def test_a_page_is_whole_and_short(code: str) -> None:
    summary, blank, *rest = PAGES[code].splitlines()
    assert summary.endswith(".") and len(summary) < WIDTH and not blank
    assert [line for line in rest if line and not line.startswith(" ")] == SECTIONS
    for section in SECTIONS:
        assert f"\n\n{section}\n    " in PAGES[code]
    assert len("\n".join(reflow(PAGES[code], WIDTH)).strip().splitlines()) <= LONGEST


@pytest.mark.parametrize("code", PAGES)
def test_an_example_is_wrong_first_and_then_right(code: str) -> None:
    example = re.search(r"\nExample\n(.*?)(?:\n\n|\Z)", PAGES[code], re.DOTALL)
    assert example is not None
    heads = [line.split()[0].strip(":,") for line in example[1].splitlines() if line[4] != " "]
    assert [head for head in heads if head in ("Wrong", "Right")] == ["Wrong", "Right"]


@pytest.mark.parametrize("code", PAGES)
def test_codes_that_a_page_refers_to_exist(code: str) -> None:
    named = set(re.findall(r"DDP\d{3}\b", PAGES[code]))
    assert named <= PAGES.keys()


def test_text_is_wrapped_and_code_is_not() -> None:
    page = "One.\n\nExample\n    Wrong:\n        if a:\n            b\n    Right: c\n    d"
    assert list(reflow(page, 12)) == [
        "One.", "", "Example", "    Wrong:", "        if a:", "            b", "    Right: c",
        "    d", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("ddp610", "DDP610"),
        ("straggler", "DDP610"),
        ("Straggl", "DDP610"),
        ("unexpected pos", "DDP935"),
        ("Mismatched NCCL version", "DDP920"),
        ("failed to bind to [::]:29500 (errno: 98 - Address already in use).", "DDP002"),
        ("[rank1]: RuntimeError: CUDA error: invalid device ordinal", "DDP927"),
        (
            "Traceback (most recent call last):\n"
            '  File "train.py", line 7, in <module>\n'
            "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Aborted.",
            "DDP931",
        ),
    ],
)
def test_a_page_by_code_name_part_of_a_name_or_text_of_an_error(
    word: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 0
    assert capsys.readouterr().out.startswith(f"{code} {entries()[code].name} (")


def test_each_known_failure_leads_to_its_page() -> None:
    """By its text as it was printed, whole."""
    for failure in TABLE:
        for example in failure.examples:
            assert failure.code in _meant(example, entries())


def test_a_part_of_several_names_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sampler"]) == 0
    codes = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert codes == [code for code, entry in entries().items() if "sampler" in entry.name]


@pytest.mark.parametrize(
    ("word", "hint"),
    [("stragler", "did you mean straggler?"), ("DDP99", "did you mean"), (" ", "lists all codes")],
)
def test_an_unknown_word_has_a_suggestion(word: str, hint: str) -> None:
    with pytest.raises(DoctorError) as raised:
        main([word])
    assert hint in str(raised.value.hint)


def test_a_text_of_several_errors_lists_their_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["already in use"]) == 0
    codes = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert codes[0] == "DDP002" and len(codes) > 1
