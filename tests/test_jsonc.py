"""Editing JSON with comments: whatever the document, what is not ours stays byte for byte."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddpdoctor.debug.vscode import jsonc, launch_json, owned, tasks_json
from ddpdoctor.debug.vscode.jsonc import JsoncError
from ddpdoctor.debug.vscode.launch_json import AttachPoint, PathMapping

POINTS = [AttachPoint(rank, "127.0.0.1", 5678 + rank) for rank in range(2)]
MORE = [AttachPoint(rank, "127.0.0.1", 7000 + rank) for rank in range(3)]
MAPPINGS = [PathMapping("${workspaceFolder}", "${workspaceFolder}")]
KEYS = ("configurations", "compounds")
PREFIX = "ddpdoctor: "

MESSY = (
    '\ufeff// Settings of "the" team: don\'t touch { [ , \r\n'
    "{\r\n"
    '\t"version" : "0.2.0", /* "configurations": [] */\r\n'
    '\t// "configurations": [ old ]\r\n'
    '\t"configurations": [ // first, the trainer\r\n'
    "\t\t/* a, b ] */\r\n"
    '\t\t{\t"name": "Python: C:\\\\xampp",   "type":"debugpy","request" :"launch",\r\n'
    '\t\t\t"program": "C:\\\\xampp\\\\", "url": "http://host//x", // tail "," }\r\n'
    '\t\t\t"args": ["\\"/*\\u0041*/",],\r\n'
    "\t\t}\t,\r\n\r\n"
    '\t\t{"name":"é 漢 \\ud83d\\ude00", "port": 1e3}, // last,\r\n'
    "\t],\r\n"
    '\t"inputs": [ ],,\r\n'.replace(",,", ",")
    + "}\r\n"
    "// the end"
)


def add(text: str | None) -> str:
    done = launch_json.installed(text, POINTS, MAPPINGS)
    assert done is not None
    return done


def independent(text: str) -> Any:
    """The value of a document by other means: comments and trailing commas off, then json."""
    tokens = re.findall(
        r'"(?:\\.|[^"\\])*"|//[^\r\n]*|/\*.*?\*/|[ \t\r\n]+|[\w.+-]+|.',
        text.removeprefix("\ufeff"),
        re.DOTALL,
    )
    kept = [
        token for token in tokens if token.strip(" \t\r\n") and not token.startswith(("//", "/*"))
    ]
    plain = [
        token
        for token, following in zip(kept, [*kept[1:], ""], strict=False)
        if not (token == "," and following in ("]", "}"))
    ]
    return json.loads(" ".join(plain)) if plain else None


def comments(text: str) -> list[str]:
    return [
        comment.text
        for comment in jsonc.parse(text).comments
        if comment.text not in (owned.MADE, owned.MADE_FILE)
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
    return isinstance(name, str) and name.startswith(PREFIX)


def names(text: str | None, key: str = "configurations") -> list[str]:
    return [element["name"] for element in independent(text or "{}").get(key, [])]


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
    assert jsonc.parse(added).root is not None
    assert value == jsonc.parse(added).root.value  # type: ignore[union-attr]
    before = independent(text)
    expected = {"version": "0.2.0"} if before is None else before
    assert foreign(value) == {"configurations": [], "compounds": [], **expected}
    assert [e["name"] for e in value["configurations"] if is_ours(e)] == [
        "ddpdoctor: rank 0",
        "ddpdoctor: rank 1",
    ]
    assert sum(map(is_ours, value["compounds"])) == 2
    assert comments(added) == comments(text)
    assert add(added) == added
    assert launch_json.removed(added) == text
    assert launch_json.removed(text) == text


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
        now = launch_json.updated(now, points, MAPPINGS, label, others)
        assert launch_json.updated(now, points, MAPPINGS, label, others) == now
        assert now is not None
        value = independent(now) or {}
        present = [e["name"] for e in value.get("configurations", []) if is_ours(e)]
        assert len(present) == len(set(present))
        for compound in filter(is_ours, value.get("compounds", [])):
            assert set(compound["configurations"]) <= set(present)
    assert launch_json.removed(now) == text


@SETTINGS
@given(choices)
def test_tasks_too(choose: random.Random) -> None:
    text = Writer(choose).document(("tasks",))
    added = tasks_json.installed(text, ["train.py"])
    assert added is not None
    tasks = independent(added)["tasks"]
    ours = ["run", "report", "check", "top"]
    assert [task["label"].removeprefix(PREFIX) for task in tasks[:4]] == ours
    assert tasks[4:] == (independent(text) or {}).get("tasks", [])
    assert tasks_json.installed(added, ["train.py"]) == added
    assert tasks_json.removed(added) == text


@SETTINGS
@given(choices)
def test_what_a_person_did_to_our_entries_does_no_harm(choose: random.Random) -> None:
    """Moved about, on other lines, with comments around: gone they are, and nothing else."""
    writer = Writer(choose)
    value = independent(add(writer.document(KEYS)))
    for key in KEYS:
        choose.shuffle(value[key])
    shaped = {
        key: writer.items("[]", [json.dumps(e, indent=choose.choice([None, 1])) for e in item], 1)
        if key in KEYS
        else json.dumps(item)
        for key, item in value.items()
    }
    text = writer.items("{}", [f'"{key}":{item}' for key, item in shaped.items()], 0)
    removed = launch_json.removed(text)
    assert removed is not None
    assert independent(removed) == foreign(value)
    assert jsonc.parse(removed).root.value == foreign(value)  # type: ignore[union-attr]
    # A comment may end up behind another one on the line, but not a word of it is lost.
    assert "".join(comments(removed)).replace(" ", "") == "".join(comments(text)).replace(" ", "")
    again = launch_json.updated(text, MORE, MAPPINGS)
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
    error, root = outcome(lambda: jsonc.parse(text).root)
    if error is None:
        assert (root.value if root else None) == independent(text)
        error, added = outcome(lambda: add(text))
        if added is not None:
            assert launch_json.removed(added) == text
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


def test_a_messy_file() -> None:
    added = add(MESSY)
    value = independent(added)

    def block(elements: list[object]) -> str:
        text = ",".join("\n" + json.dumps(element, indent="\t") for element in elements)
        return text.replace("\n", "\r\n\t\t")

    compounds = f'\r\n\t"compounds": [ // made by ddpdoctor{block(value["compounds"])}\r\n\t],'
    expected = MESSY.replace("\r\n{", "\r\n{" + compounds)
    ranks = block(value["configurations"][:2])
    assert added == expected.replace("[ // first", f"[{ranks}, // first")
    assert names(added)[2:] == ["Python: C:\\xampp", "é 漢 😀"]
    assert add(added) == added
    assert launch_json.removed(added) == MESSY


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"l": []}', '{"l": [{\n    "name": "ddpdoctor: x"\n}]}'),
        ('{"l": [ ]}', '{"l": [{\n    "name": "ddpdoctor: x"\n} ]}'),
        ('{"l": [1]}', '{"l": [{\n    "name": "ddpdoctor: x"\n},1]}'),
        (
            '{\n  "l": [\n  ]\n}',
            '{\n  "l": [\n    {\n      "name": "ddpdoctor: x"\n    }\n  ]\n}',
        ),
        (
            '{\r\n\t"l": [\r\n\t\t1\r\n\t]\r\n}',
            '{\r\n\t"l": [\r\n\t\t{\r\n\t\t\t"name": "ddpdoctor: x"\r\n\t\t},\r\n\t\t1\r\n\t]\r\n}',
        ),
        (
            "{}",
            '{\n    "l": [ // made by ddpdoctor\n        {\n            '
            '"name": "ddpdoctor: x"\n        }\n    ]}',
        ),
        (
            '{\n  "a": 1\n}',
            '{\n  "l": [ // made by ddpdoctor\n    {\n      "name": "ddpdoctor: x"\n    }\n  ],\n'
            '  "a": 1\n}',
        ),
        (
            '{\n  // about the file\n  // and more\n  "a": 1\n}',
            '{\n  // about the file\n  // and more\n  "l": [ // made by ddpdoctor\n    {\n'
            '      "name": "ddpdoctor: x"\n    }\n  ],\n  "a": 1\n}',
        ),
        (
            "// c",
            '// c\n{ // made by ddpdoctor\n    "l": [ // made by ddpdoctor\n        {\n'
            '            "name": "ddpdoctor: x"\n        }\n    ],\n    "v": 2\n}\n',
        ),
        (
            None,
            '{ // file made by ddpdoctor\n    "l": [ // made by ddpdoctor\n        {\n'
            '            "name": "ddpdoctor: x"\n        }\n    ],\n    "v": 2\n}\n',
        ),
    ],
)
def test_shapes(before: str | None, after: str) -> None:
    put, take = sections("ddpdoctor: x"), sections()
    assert owned.rewrite(before, put, {"v": 2}) == after
    assert owned.rewrite(after, put, {"v": 2}) == after
    assert owned.rewrite(after, take, {"v": 2}) == before
    assert owned.rewrite(before, take, {"v": 2}) == before


def sections(*wanted: str) -> list[owned.Section]:
    return [owned.Section("l", "name", [{"name": name} for name in wanted], owned.any_name)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # Moved behind the person's own: its comma goes, theirs stays where they had one.
        ('[1, {"name": "ddpdoctor: x"}]', "[1]"),
        ('[1, {"name": "ddpdoctor: x"},]', "[1,]"),
        ('[1, // one\n {"name": "ddpdoctor: x"} // two\n]', "[1 // one\n // two\n]"),
        ('[1, {"name": "ddpdoctor: x"}, 2]', "[1, 2]"),
        # A line comment must not swallow what follows.
        ('[// c\n{"name": "ddpdoctor: x"}, 2]', "[// c\n 2]"),
        ('[// c\n{"name": "ddpdoctor: x"}\n]', "[// c\n]"),
        ('[// c\n{"name": "ddpdoctor: x"}]', "[// c\n]"),
        ('[// blanks at its end \n{"name": "ddpdoctor: x"}]', "[// blanks at its end \n]"),
        ('[{"name": "ddpdoctor: x"} /* c */ , 2]', "[ /* c */  2]"),
        ('[{"x": 1, "name": "ddpdoctor: \\u0078" /* in it */}]', "[]"),
        ('[{"name": "ddpdoctor: x"}, {"name": "ddpdoctor: y"}, {"name": "mine"}]', None),
        ('[{"name": "ddpdoctor:x"}, {"name": 1}, {"label": "ddpdoctor: x"}, "ddpdoctor: x"]', "="),
        ('[{"name": "ddpdoctor: x", "name": "mine"}]', "="),
        # The list was ours, and has become theirs.
        ('[ // made by ddpdoctor\n 1, {"name": "ddpdoctor: x"}\n]', "[\n 1\n]"),
        ('[ // made by ddpdoctor\n // mine\n {"name": "ddpdoctor: x"}\n]', "[\n // mine\n]"),
        ("[ // made by ddpdoctor\n]", ""),
    ],
)
def test_removal_of_what_was_moved(before: str, after: str | None) -> None:
    expected = {"=": before, None: '[ {"name": "mine"}]'}.get(after, after)
    text = owned.rewrite(f'{{"l": {before}}}', sections(), {})
    assert text == (f'{{"l": {expected}}}' if expected else "{}")
    independent(text)


def test_a_made_file_with_something_of_the_person_stays() -> None:
    made = add(None)
    assert launch_json.removed(made) is None
    with_input = made.replace('"version"', '"inputs": [], // mine\n    "version"')
    left = launch_json.removed(with_input)
    assert left == '{\n    "inputs": [], // mine\n    "version": "0.2.0"\n}\n'
    assert launch_json.removed("// mine\n" + made) == "// mine"
    assert launch_json.removed(made + "// mine\n") == "// mine\n"


def test_of_two_lists_with_one_name_the_last_is_the_one() -> None:
    text = '{"configurations": [1], "compounds": [], "configurations": [2]}'
    added = add(text)
    assert added.startswith('{"configurations": [1], ')
    assert len(independent(added)["configurations"]) == 3
    assert launch_json.removed(added) == text
    # One was put behind ours later: VS Code reads that one now.
    behind = add('{"configurations": []}')[:-1] + ', "configurations": [2]}'
    again = add(behind)
    assert len(independent(again)["configurations"]) == 3
    assert again.count('"ddpdoctor: rank 0",\n        "type"') == 1


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ('{\n"configurations": null}', 2, "list"),
        ('{\r\n\r\n"configurations": {}}', 3, "list"),
        ('{"compounds":\r"x"}', 2, "list"),
        ("\n[]", 2, "object"),
        ("3", 1, "object"),
        ("{", 1, "bracket"),
        ('{"a": [1, 2}', 1, "comma"),
        ('{"a": 1 "b": 2}', 1, "comma"),
        ("{'a': 1}", 1, "key"),
        ('{"a" 1}', 1, "colon"),
        ('{"a": }', 1, "value"),
        ('{"a": tru}', 1, "value"),
        ('{"a": 01}', 1, "comma"),
        ('{"a": NaN}', 1, "value"),
        ('{"a": "\\x"}', 1, "string"),
        ('{"a": "b\n"}', 1, "string"),
        ("{,}", 1, "key"),
        ('{"a": [,]}', 1, "value"),
        ("{}\n{}", 2, "end"),
        ("{}\n/* ", 2, "*/"),
        ('{"a": ' + "[" * 200 + "]" * 200 + "}", 1, "deep"),
        ("[" * 100_000, 1, "deep"),
        ('{"a":', 1, "end"),
    ],
)
def test_what_is_refused(text: str, line: int, word: str) -> None:
    with pytest.raises(JsoncError) as caught:
        add(text)
    assert caught.value.line == line
    assert word in caught.value.message


def test_removal_has_no_quarrel_with_what_it_need_not_touch() -> None:
    for text in ("[]", "null", '{"configurations": null}', "", "// nothing", '{"compounds": 1}'):
        assert launch_json.removed(text) == text
    assert launch_json.removed(None) is None
    assert tasks_json.removed(None) is None


def test_long_strings_and_numbers_take_no_time() -> None:
    text = json.dumps({"a": "x\\" * 200_000, "b": int("9" * 4000)})
    assert launch_json.removed(add(text)) == text
    with pytest.raises(JsoncError):
        jsonc.parse('{"a": "' + "x" * 400_000)


def test_half_a_surrogate_pair_is_written_as_an_escape() -> None:
    added = tasks_json.installed(None, ["caf\udce9.py"])
    assert added is not None
    assert "caf\\udce9.py" in added
    added.encode()


def test_a_run_with_other_ranks() -> None:
    two = launch_json.updated("{}", POINTS, MAPPINGS)
    three = launch_json.updated(two, MORE, MAPPINGS)
    assert names(three) == [f"ddpdoctor: rank {rank}" for rank in range(3)]
    assert names(three, "compounds") == ["ddpdoctor: attach all ranks"]
    assert launch_json.updated(three, POINTS, MAPPINGS) == two


def test_labels() -> None:
    first = launch_json.updated(None, POINTS, MAPPINGS)
    both = launch_json.updated(first, POINTS, MAPPINGS, "a", [""])
    ranks = ["ddpdoctor: rank 0", "ddpdoctor: rank 1"]
    assert names(both) == [*(f"{name} (a)" for name in ranks), *ranks]
    assert names(both, "compounds") == [f"ddpdoctor: attach all ranks{s}" for s in (" (a)", "")]
    # The run of "a" is over: its entries are stale for all others.
    assert names(launch_json.updated(both, POINTS, MAPPINGS, "b", [""])) == [
        *(f"{name} (b)" for name in ranks),
        *ranks,
    ]
    assert names(launch_json.updated(both, POINTS, MAPPINGS)) == ranks
    assert launch_json.updated(both, POINTS, MAPPINGS, "", ["a"]) == both
    assert names(launch_json.updated(both, POINTS, MAPPINGS, "a")) == [f"{n} (a)" for n in ranks]


def test_run_and_attach_names_the_ranks_that_are_there() -> None:
    text = add(None).replace('"ddpdoctor: run",', '"my own task", // mine')
    text = launch_json.updated(text, MORE, MAPPINGS) or ""
    run = independent(text)["compounds"][-1]
    assert run["name"] == launch_json.RUN
    assert run["configurations"] == names(text)
    assert run["preLaunchTask"] == "my own task"
    assert "// mine" in text
    # Another run neither changes it nor takes away what it names.
    other = launch_json.updated(text, POINTS, MAPPINGS, "a") or ""
    assert independent(other)["compounds"][-1] == run
    assert set(run["configurations"]) < set(names(other))
    assert launch_json.removed(other) is None
