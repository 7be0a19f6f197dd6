"""launch.json and tasks.json of any shape come back byte for byte."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddpdoctor.debug import vscode_configurations, vscode_files
from ddpdoctor.debug.vscode_files import JsoncError
from tests.support.jsonc_words import MAPPINGS, MORE, POINTS, add, independent

KEYS = ("configurations", "compounds")
PREFIX = "ddpdoctor: "


def comments(text: str) -> list[str]:
    return [
        comment.text
        for comment in vscode_files.parse_jsonc(text).comments
        if comment.text not in (vscode_files.MADE, vscode_files.MADE_FILE)
    ]


def foreign(value: Any) -> Any:
    """A launch.json's value without what is ours."""
    if not isinstance(value, dict):
        return value
    return {
        key: [e for e in item if not is_ours(e)] if key in KEYS and isinstance(item, list) else item
        for key, item in value.items()
    }


def is_ours(element: object) -> bool:
    name = element.get("name") if isinstance(element, dict) else None
    return isinstance(name, str) and (name.startswith(PREFIX) or " (ddpdoctor" in name)


class Writer:
    """Writes a random value as a random text."""

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.eol = choose.choice(["\n", "\r\n", "\n", "\r"])
        self.flat = choose.random() < 0.3
        self.indent = choose.choice(["  ", "\t", "    "])

    def gap(self, depth: int) -> str:
        eol = self.eol + self.indent * depth
        dice = self.choose.random()
        if dice < 0.6:
            return "" if self.flat else eol
        if dice < 0.75:
            return self.choose.choice([" ", "\t", "", "\n", self.eol + self.eol])
        return self.choose.choice(
            [
                f" // it's a comment, ]}} {eol}",
                f'// "configurations": [{eol}',
                '/* "compounds": [], */',
                f"/* one{self.eol} two **/ ",
                f"//{self.eol}",
            ]
        )

    def scalar(self) -> str:
        strings = [r'"C:\\xampp\\"', '"a // b"', r'"\"/* no */"', '"é\\u2028"', '",]"', '""']
        return self.choose.choice(["true", "null", "-0.5e+3", "12", *strings])

    def value(self, depth: int) -> str:
        dice = self.choose.random()
        if depth > 4 or dice < 0.5:
            return self.scalar()
        return self.array(depth) if dice < 0.7 else self.object(depth, {})

    def array(self, depth: int) -> str:
        count = self.choose.choice([0, 0, 1, 2, 3])
        return self.items("[]", [self.value(depth + 1) for _ in range(count)], depth)

    def object(self, depth: int, members: dict[str, str]) -> str:
        for key in self.choose.sample(["name", "label", "a//b", "version", "x"], k=2):
            if self.choose.random() < 0.6:
                members.setdefault(key, self.value(depth + 1))
        order = list(members)
        self.choose.shuffle(order)
        pairs = [
            f'"{key}"{self.blank()}:{self.choose.choice(["", " ", self.gap(depth)])}{members[key]}'
            for key in order
        ]
        return self.items("{}", pairs, depth)

    def blank(self) -> str:
        return self.choose.choice(["", "", " ", "/**/"])

    def items(self, brackets: str, items: list[str], depth: int) -> str:
        text = brackets[0]
        for place, item in enumerate(items):
            last = place == len(items) - 1
            comma = self.choose.choice(["", ","]) if last else ","
            text += self.gap(depth + 1) + item + (self.blank() + comma if comma else "")
        return text + self.gap(depth) + brackets[1]

    def document(self, keys: tuple[str, ...]) -> str:
        text = self.choose.choice(["", "", "\ufeff"]) + self.gap(0)
        if self.choose.random() < 0.9:
            members = {key: self.array(1) for key in keys if self.choose.random() < 0.7}
            text += self.object(0, members)
        return text + self.choose.choice(["", self.eol, self.gap(0), "// no line end"])


SETTINGS = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
choices = st.randoms(use_true_random=False)


@SETTINGS
@given(choices)
def test_add_and_remove_restores_every_byte(choose: random.Random) -> None:
    text = Writer(choose).document(KEYS)
    added = add(text)
    value = independent(added)
    assert vscode_files.parse_jsonc(added).root is not None
    assert value == vscode_files.parse_jsonc(added).root.value  # type: ignore[union-attr]
    before = independent(text)
    expected = {"version": "0.2.0"} if before is None else before
    assert foreign(value) == {"configurations": [], **expected}
    assert [e["name"] for e in value["configurations"] if is_ours(e)] == [
        "ddpdoctor: run + attach",
        "ddpdoctor: attach all ranks",
        "rank 0 (ddpdoctor)",
        "rank 1 (ddpdoctor)",
    ]
    assert comments(added) == comments(text)
    assert add(added) == added
    assert vscode_configurations.without_launch_entries(added) == text
    assert vscode_configurations.without_launch_entries(text) == text


@SETTINGS
@given(choices)
def test_any_order_of_updates_ends_where_it_began(choose: random.Random) -> None:
    text = Writer(choose).document(KEYS)
    now: str | None = text
    for _ in range(choose.randrange(1, 5)):
        points = choose.choice([POINTS, MORE, []])
        label = choose.choice(["", "a", "b (c)"])
        others = choose.sample(["", "a", "b (c)"], k=choose.randrange(3))
        if choose.random() < 0.2:
            now = add(now)
        now = vscode_configurations.with_run(now, points, MAPPINGS, label, others)
        assert vscode_configurations.with_run(now, points, MAPPINGS, label, others) == now
        assert now is not None
        value = independent(now) or {}
        present = [e["name"] for e in value.get("configurations", []) if is_ours(e)]
        assert len(present) == len(set(present))
    assert vscode_configurations.without_launch_entries(now) == text


@SETTINGS
@given(choices)
def test_tasks_too(choose: random.Random) -> None:
    text = Writer(choose).document(("tasks",))
    added = vscode_configurations.with_tasks(text, ["train.py"])
    assert added is not None
    tasks = independent(added)["tasks"]
    ours = ["run", "report", "check", "lint", "top"]
    assert [task["label"].removeprefix(PREFIX) for task in tasks[:5]] == ours
    assert tasks[5:] == (independent(text) or {}).get("tasks", [])
    assert vscode_configurations.with_tasks(added, ["train.py"]) == added
    assert vscode_configurations.without_tasks(added) == text


@SETTINGS
@given(choices)
def test_what_a_person_did_to_our_entries_does_no_harm(choose: random.Random) -> None:
    """Moved about, on other lines, with comments around: gone they are, and nothing else."""
    writer = Writer(choose)
    value = independent(add(writer.document(KEYS)))
    for key in KEYS:
        choose.shuffle(value.get(key, []))
    shaped = {
        key: writer.items("[]", [json.dumps(e, indent=choose.choice([None, 1])) for e in item], 1)
        if key in KEYS
        else json.dumps(item)
        for key, item in value.items()
    }
    text = writer.items("{}", [f'"{key}":{item}' for key, item in shaped.items()], 0)
    removed = vscode_configurations.without_launch_entries(text)
    assert removed is not None
    assert independent(removed) == foreign(value)
    assert vscode_files.parse_jsonc(removed).root.value == foreign(value)  # type: ignore[union-attr]
    # A comment may end up behind another one on the line, but not a word of it is lost.
    assert "".join(comments(removed)).replace(" ", "") == "".join(comments(text)).replace(" ", "")
    again = vscode_configurations.with_run(text, MORE, MAPPINGS)
    assert foreign(independent(again or "")) == foreign(value)


@settings(SETTINGS, max_examples=120)
@given(choices)
def test_damage_is_named_or_harmless(choose: random.Random) -> None:
    text = Writer(choose).document(KEYS)
    at = choose.randrange(len(text) + 1)
    if choose.random() < 0.5:
        text = text[:at]
    else:
        text = text[:at] + choose.choice('{}[],:"/*\\\n\x00\ufeffx0-') + text[at + 1 :]
    error, root = outcome(lambda: vscode_files.parse_jsonc(text).root)
    if error is None:
        assert (root.value if root else None) == independent(text)
        error, added = outcome(lambda: add(text))
        if added is not None:
            assert vscode_configurations.without_launch_entries(added) == text
            return
    assert error is not None
    assert error.message
    assert 1 <= error.line <= text.count("\n") + text.count("\r") + 1


T = TypeVar("T")


def outcome(action: Callable[[], T]) -> tuple[JsoncError | None, T | None]:
    try:
        return None, action()
    except JsoncError as error:
        return error, None
