"""Records as types: what is written is read back, and nothing else gets in."""

from __future__ import annotations

import json
import types
from dataclasses import fields
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpdoctor.core.user_code import Location
from ddpdoctor.run.journal import Journal
from ddpdoctor.run.records.base import Part, Record, encode, key_of
from ddpdoctor.run.records.model import NonfiniteRecord, Origin, UnreducedRecord
from ddpdoctor.run.records.process import ErrorRecord, OpenRecord
from ddpdoctor.run.records.supervisor import ProfileRequestRecord
from ddpdoctor.run.records.training import (
    IdleBatch,
    LoopRecord,
    PassRecord,
    SamplerFacts,
    SiteRecord,
    StepRecord,
)
from ddpdoctor.run.records.typed_json import RANK_RECORDS, SUPERVISOR_RECORDS, decode, parse

KINDS = [*RANK_RECORDS.items(), *SUPERVISOR_RECORDS.items()]


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type, judged without the decoder."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in arguments)
    if origin is tuple:
        if type(value) is not tuple:
            return False
        if arguments[-1] is ...:
            return all(fits(each, arguments[0]) for each in value)
        return len(value) == len(arguments) and all(map(fits, value, arguments))
    if origin is dict:
        return type(value) is dict and all(
            type(key) is str and fits(each, arguments[1]) for key, each in value.items()
        )
    if type(value) is not hint:
        return False
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 63
    if isinstance(value, Part):
        return holds_what_it_declares(value)
    if isinstance(value, tuple):
        return all(fits(getattr(value, name), each) for name, each in get_type_hints(hint).items())
    return True


def holds_what_it_declares(part: Part) -> bool:
    hints = get_type_hints(type(part))
    return all(fits(getattr(part, each.name), hints[each.name]) for each in fields(part))


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["ended", "nan", "/a.py", 1 << 70, -(1 << 63), 1 << 62]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["path", "line", "what", "rank", "name"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


def plausible(hint: Any) -> st.SearchStrategy[Any]:
    """JSON that is of a type, or nearly."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return st.one_of([plausible(each) for each in arguments])
    if origin is tuple and arguments[-1] is ...:
        return st.lists(plausible(arguments[0]) | anything, max_size=3)
    if origin is tuple:
        return st.tuples(*map(plausible, arguments)).map(list)
    if isinstance(hint, type) and issubclass(hint, tuple):
        inner = get_type_hints(hint)
        return st.tuples(*(plausible(inner[each]) for each in hint._fields)).map(list)  # type: ignore[attr-defined]
    plain = {int: st.integers(), float: st.floats() | st.integers(), bool: st.booleans()}
    return plain.get(hint, st.text(max_size=5) if hint is str else anything)


@st.composite
def lines(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, type[Record]]]:
    kinds = draw(st.sampled_from([RANK_RECORDS, SUPERVISOR_RECORDS]))
    kind = draw(st.sampled_from([*kinds, "no such kind"]) | anything)
    declared = kinds.get(kind) if isinstance(kind, str) else None
    hints = get_type_hints(declared) if declared is not None else {}
    optional = {
        key_of(each.name): plausible(hints[each.name]) | anything
        for each in (fields(declared) if declared is not None else ())
    }
    line = draw(st.fixed_dictionaries({}, optional=optional | {"other": anything}))
    return {**line, "kind": kind}, kinds


@settings(max_examples=400, deadline=None)
@given(lines())
def test_any_object_gives_a_record_of_the_declared_types_or_none(
    given_line: tuple[dict[str, Any], dict[str, type[Record]]],
) -> None:
    line, kinds = given_line

    found = decode(line, kinds)

    kind = line["kind"]
    declared = kinds.get(kind) if isinstance(kind, str) else None
    if declared is None:
        assert found is None
    else:
        assert type(found) is declared
        assert holds_what_it_declares(found)


@settings(max_examples=200, deadline=None)
@given(lines())
def test_what_was_read_is_written_and_read_alike(
    given_line: tuple[dict[str, Any], dict[str, type[Record]]],
) -> None:
    line, kinds = given_line
    found = parse(json.dumps(line).encode(), kinds)
    if found is not None:
        # NaN is not equal to itself; its text is.
        assert repr(parse(encode(found), kinds)) == repr(found)


@pytest.mark.parametrize(("kind", "declared"), KINDS, ids=lambda each: str(each)[:20])
def test_each_kind_is_documented_and_reads_an_empty_line(kind: str, declared: type[Record]) -> None:
    assert declared.kind == kind
    # A dataclass without a docstring gets one with its signature.
    assert declared.__doc__ and not declared.__doc__.startswith(f"{declared.__name__}(")
    found = decode({"kind": kind}, {kind: declared})
    assert found is not None
    assert holds_what_it_declares(found)


def test_a_record_that_was_written_is_read() -> None:
    records = [
        SiteRecord(phase="forward", path="/job/train.py", line=7),
        UnreducedRecord(step=3, ddp=0, cause="around", gradients={"w": 1.5}),
        NonfiniteRecord(
            step=1, loss="nan", origin=Origin(what="input", infinite=Origin(what="parameter"))
        ),
        LoopRecord(
            time=5,
            loop=0,
            state="ended",
            frames=(Location("/a.py", 1), Location("/b.py", 2)),
            before=0,
            idle=(IdleBatch(4, 5, True),),
        ),
        PassRecord(pass_=2, number=0, state="left", sampler=SamplerFacts(name="S", rank=1)),
    ]
    assert [parse(encode(each)) for each in records] == records


def test_on_the_disk_a_field_has_its_name_and_a_default_is_left_out() -> None:
    record = PassRecord(pass_=2, number=0, state="left", made=Location("/a.py", 3))
    assert json.loads(encode(record)) == {
        "kind": "pass",
        "pass": 2,
        "number": 0,
        "state": "left",
        "made": ["/a.py", 3],
    }


def test_the_kind_profile_is_another_record_in_the_supervisors_journal() -> None:
    line = {"kind": "profile", "time": 1, "restart": 0, "asked": 1, "busy": [[7, 0.5, 3, "x"]]}
    found = decode(line, SUPERVISOR_RECORDS)
    assert isinstance(found, ProfileRequestRecord)
    assert found.busy[0].command == "x"


def test_a_value_that_json_does_not_know_becomes_its_types_name() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise AssertionError("the job's code runs")

        __hash__ = None  # type: ignore[assignment]

    record = ErrorRecord(time=1, exception="E", message=Odd())  # type: ignore[arg-type]
    assert json.loads(encode(record))["message"] == "<Odd>"


def test_a_record_that_cannot_be_encoded_says_so() -> None:
    record = OpenRecord(format=1, rank=0, versions={("a",): "b"})  # type: ignore[dict-item]
    assert json.loads(encode(record)) == {"kind": "open", "unsayable": "TypeError"}


def test_parts_nested_without_end_are_no_record() -> None:
    line: dict[str, Any] = {"what": "operation"}
    for _ in range(5000):
        line = {"what": "operation", "infinite": line}
    assert decode({"kind": "nonfinite", "step": 1, "origin": line}) is None


def test_a_journal_keeps_as_many_of_a_kind_as_it_declares(tmp_path: Any) -> None:
    path = tmp_path / "rank.jsonl"
    journal = Journal(str(path), 1 << 15)
    journal.write([SiteRecord(phase="data", path="/a.py", line=1)])
    journal.write([StepRecord(step=number) for number in range(1200)])
    journal.close()
    kept = path.read_bytes().splitlines()[1:3]
    assert kept[0].startswith(b'{"kind":"site"')
    assert kept[1].startswith(b'{"kind":"step"')


def test_a_frame_without_its_function_has_the_default() -> None:
    line = {"kind": "error", "time": 1, "pid": 2, "user_frames": [["train.py", 7]]}
    found = decode(line)
    assert isinstance(found, ErrorRecord)
    assert [(each.path, each.line, each.function) for each in found.user_frames] == [
        ("train.py", 7, "")
    ]
