"""launch.json: odd shapes, refusals, entries."""

from __future__ import annotations

import json
import re

import pytest

from ddpdoctor.debug import vscode_configurations, vscode_files
from ddpdoctor.debug.vscode_configurations import PathMapping
from ddpdoctor.debug.vscode_files import JsoncError
from tests.support.jsonc_words import MAPPINGS, MORE, POINTS, add, independent

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


def names(text: str | None, key: str = "configurations") -> list[str]:
    return [element["name"] for element in independent(text or "{}").get(key, [])]


def test_a_messy_file() -> None:
    added = add(MESSY)
    value = independent(added)

    def block(elements: list[object]) -> str:
        text = ",".join("\n" + json.dumps(element, indent="\t") for element in elements)
        return text.replace("\n", "\r\n\t\t")

    ours = block(value["configurations"][:4])
    assert added == MESSY.replace("[ // first", f"[{ours}, // first")
    assert names(added)[4:] == ["Python: C:\\xampp", "é 漢 😀"]
    assert add(added) == added
    assert vscode_configurations.without_launch_entries(added) == MESSY


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
    assert vscode_files.rewrite(before, put, {"v": 2}) == after
    assert vscode_files.rewrite(after, put, {"v": 2}) == after
    assert vscode_files.rewrite(after, take, {"v": 2}) == before
    assert vscode_files.rewrite(before, take, {"v": 2}) == before


def sections(*wanted: str) -> list[vscode_files.Section]:
    return [
        vscode_files.Section(
            "l", "name", [{"name": name} for name in wanted], vscode_files.any_name
        )
    ]


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
    text = vscode_files.rewrite(f'{{"l": {before}}}', sections(), {})
    assert text == (f'{{"l": {expected}}}' if expected else "{}")
    independent(text)


def test_a_made_file_with_something_of_the_person_stays() -> None:
    made = add(None)
    assert vscode_configurations.without_launch_entries(made) is None
    with_input = made.replace('"version"', '"inputs": [], // mine\n    "version"')
    left = vscode_configurations.without_launch_entries(with_input)
    assert left == '{\n    "inputs": [], // mine\n    "version": "0.2.0"\n}\n'
    assert vscode_configurations.without_launch_entries("// mine\n" + made) == "// mine"
    assert vscode_configurations.without_launch_entries(made + "// mine\n") == "// mine\n"


def test_of_two_lists_with_one_name_the_last_is_the_one() -> None:
    text = '{"configurations": [1], "compounds": [], "configurations": [2]}'
    added = add(text)
    assert added.startswith('{"configurations": [1], ')
    assert len(independent(added)["configurations"]) == 5
    assert vscode_configurations.without_launch_entries(added) == text
    # One was put behind ours later: VS Code reads that one now.
    behind = add('{"configurations": []}')[:-1] + ', "configurations": [2]}'
    again = add(behind)
    assert len(independent(again)["configurations"]) == 5
    assert again.count('"rank 0 (ddpdoctor)"') == 1


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ('{\n"configurations": null}', 2, "list"),
        ('{\r\n\r\n"configurations": {}}', 3, "list"),
        ('{"configurations":\r"x"}', 2, "list"),
        ("\n[]", 2, "object"),
        ("3", 1, "object"),
        ("{", 1, "property name"),
        ('{"a": [1, 2}', 1, "delimiter"),
        ('{"a": 1 "b": 2}', 1, "delimiter"),
        ("{'a': 1}", 1, "property name"),
        ('{"a" 1}', 1, "delimiter"),
        ('{"a": }', 1, "value"),
        ('{"a": tru}', 1, "value"),
        ('{"a": 01}', 1, "delimiter"),
        ('{"a": NaN}', 1, "value"),
        ('{"a": "\\x"}', 1, "escape"),
        ('{"a": "b\n"}', 1, "control character"),
        ("{,}", 1, "property name"),
        ('{"a": [,]}', 1, "value"),
        ("{}\n{}", 2, "extra data"),
        ("{}\n/* ", 2, "*/"),
        ("[" * 100_000, 1, "deep"),
        ('{"a":', 1, "value"),
    ],
)
def test_what_is_refused(text: str, line: int, word: str) -> None:
    with pytest.raises(JsoncError) as caught:
        add(text)
    assert caught.value.line == line
    assert word in caught.value.message


def test_removal_has_no_quarrel_with_what_it_need_not_touch() -> None:
    for text in ("[]", "null", '{"configurations": null}', "", "// nothing", '{"compounds": 1}'):
        assert vscode_configurations.without_launch_entries(text) == text
    assert vscode_configurations.without_launch_entries(None) is None
    assert vscode_configurations.without_tasks(None) is None


def test_long_strings_and_numbers_take_no_time() -> None:
    text = json.dumps({"a": "x\\" * 200_000, "b": int("9" * 4000)})
    assert vscode_configurations.without_launch_entries(add(text)) == text
    with pytest.raises(JsoncError):
        vscode_files.parse_jsonc('{"a": "' + "x" * 400_000)


def test_half_a_surrogate_pair_is_written_as_an_escape() -> None:
    added = vscode_configurations.with_tasks(None, ["caf\udce9.py"])
    assert added is not None
    assert "caf\\udce9.py" in added
    added.encode()


def test_a_run_with_other_ranks() -> None:
    two = vscode_configurations.with_run("{}", POINTS, MAPPINGS)
    three = vscode_configurations.with_run(two, MORE, MAPPINGS)
    assert names(three) == [
        "ddpdoctor: attach all ranks",
        *(f"rank {rank} (ddpdoctor)" for rank in range(3)),
    ]
    assert vscode_configurations.with_run(three, POINTS, MAPPINGS) == two


def test_labels() -> None:
    first = vscode_configurations.with_run(None, POINTS, MAPPINGS)
    both = vscode_configurations.with_run(first, POINTS, MAPPINGS, "a", [""])
    ranks = ["ddpdoctor: attach all ranks", "rank 0 (ddpdoctor)", "rank 1 (ddpdoctor)"]
    assert names(both) == [*labelled("a"), *ranks]
    # The run of "a" is over: its entries are stale for all others.
    assert names(vscode_configurations.with_run(both, POINTS, MAPPINGS, "b", [""])) == [
        *labelled("b"),
        *ranks,
    ]
    assert names(vscode_configurations.with_run(both, POINTS, MAPPINGS)) == ranks
    assert vscode_configurations.with_run(both, POINTS, MAPPINGS, "", ["a"]) == both
    assert names(vscode_configurations.with_run(both, POINTS, MAPPINGS, "a")) == labelled("a")


def labelled(label: str) -> list[str]:
    ranks = (f"rank {rank} (ddpdoctor, {label})" for rank in range(2))
    return [f"ddpdoctor: attach all ranks ({label})", *ranks]


def test_what_the_user_wrote_into_our_entries_stays() -> None:
    changes = {
        '"justMyCode": true': '"justMyCode": false, "subProcess": false, "timeout": 7',
        '"order": 4': '"order": 4, "hidden": true',
    }
    text = json.dumps(independent(add(None)), indent=2)
    text = re.sub(r"\n +", "\n    ", text)
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    mine = '{"localRoot": "${workspaceFolder}", "remoteRoot": "/app"}'
    identity = re.compile(r'\{\s*"localRoot": "[^"]*",\s*"remoteRoot": "[^"]*"\s*\}')
    text = identity.sub(lambda _: mine, text)
    for again in (vscode_configurations.with_run(text, MORE, MAPPINGS), add(text)):
        now = independent(again or "")
        by_name = {each["name"]: each for each in now["configurations"]}
        first, second = (by_name[f"rank {rank} (ddpdoctor)"] for rank in (0, 1))
        assert (first["justMyCode"], first["subProcess"], first["timeout"]) == (False, False, 7)
        assert ": 7.0" not in (again or "")
        assert first["pathMappings"] == [json.loads(mine)]
        assert second["presentation"] == {"group": "ddpdoctor", "order": 4, "hidden": True}
    moved = independent(vscode_configurations.with_run(text, MORE, MAPPINGS) or "")
    assert [each["connect"]["port"] for each in moved["configurations"][:3]] == [6999, 6999, 7000]
    # A new --path-map counts more than what is there.
    other = [PathMapping("/here", "/there")]
    mapped = independent(vscode_configurations.with_run(text, POINTS, other) or "")
    assert mapped["configurations"][0]["pathMappings"] == [
        {"localRoot": "/here", "remoteRoot": "/there"}
    ]


def test_what_the_user_wrote_into_our_tasks_stays() -> None:
    text = vscode_configurations.with_tasks(None, ["train.py"], cwd="src") or ""
    text = text.replace('"cwd": "src"', '"cwd": "src", "env": {"A": "b"}')
    text = text.replace("${command:python.interpreterPath}", "/venv/bin/python")
    now = independent(vscode_configurations.with_tasks(text, ["other.py"]) or "")["tasks"][0]
    assert now["args"][-1] == "other.py" and now["command"] == "/venv/bin/python"
    assert now["options"] == {"cwd": "${workspaceFolder}", "env": {"A": "b"}}


def test_run_and_attach_has_the_port_of_the_run() -> None:
    text = add(None).replace('"preLaunchTask": "ddpdoctor: run"', '"preLaunchTask": "my own"')
    text = vscode_configurations.with_run(text, MORE, MAPPINGS) or ""
    run = independent(text)["configurations"][0]
    assert run["name"] == vscode_configurations.RUN_CONFIGURATION
    assert (run["connect"]["port"], run["preLaunchTask"]) == (6999, "my own")
    # Another run does not change it.
    other = vscode_configurations.with_run(text, POINTS, MAPPINGS, "a", [""]) or ""
    assert run in independent(other)["configurations"]
    assert vscode_configurations.without_launch_entries(other) is None


def test_compounds_of_earlier_versions_are_replaced() -> None:
    old: list[dict[str, object]] = [
        {"name": name, "configurations": []} for name in ("ddpdoctor: run + attach", "mine")
    ]
    text = vscode_configurations.with_run(json.dumps({"compounds": old}), POINTS, MAPPINGS)
    assert names(text, "compounds") == ["mine"]
    assert names(text)[:2] == ["ddpdoctor: run + attach", "ddpdoctor: attach all ranks"]
