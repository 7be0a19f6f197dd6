"""A rank without a job: what the probe's observers write is kept in a list."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace
from typing import Any

from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.run.records.base import JsonObject, Record, encode
from ddpdoctor.run.records.training import PassRecord
from ddpdoctor.run.records.typed_json import decode
from ddpdoctor.run.status import PAGE_SIZE


class Purse:
    """A budget that keeps what it was told."""

    enabled = True

    def __init__(self, left: int) -> None:
        self.held = left
        self.granted = 0

    def left(self, samples: bool = False) -> int:
        return self.held

    def earned(self) -> int:
        return 0

    def spend(self, nanoseconds: int, samples: bool = False) -> None:
        self.held -= nanoseconds

    spend_behind = spend

    def spending(self, samples: bool = False) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def grant(self, nanoseconds: int) -> None:
        self.held += nanoseconds
        self.granted += nanoseconds


def as_line(written: Any) -> JsonObject:
    """A record, or what makes one, as its line in the journal has it."""
    record = written(True) if callable(written) else written
    assert isinstance(record, Record)
    line: JsonObject = json.loads(encode(record))
    return line


def a_rank(records: list[JsonObject], budget: Any = None, **tracker: Any) -> RankState:
    """A rank that appends what is written to ``records``.

    Args:
        records: What it has written.
        budget: Its budget; the default one without.
        tracker: What its step tracker has beside the steps.
    """
    recorder: Any = SimpleNamespace(
        add=lambda written: records.append(as_line(written)),
        add_now=lambda written, flush=True: records.append(as_line(written)),
    )
    steps: Any = SimpleNamespace(
        **{
            "steps": 0,
            "armed": 0,
            "epoch": -1,
            "watch": lambda *_: None,
            "clocked": False,
            "spent": 0,
            "looped": 0,
            "loop_batches": 0,
            "detail": SimpleNamespace(charge=lambda began: None),
            **tracker,
        }
    )
    state = RankState(recorder, steps)
    if budget is not None:
        state.budget = budget
    return state


def pass_record(line: JsonObject) -> PassRecord:
    """The record of a pass that is known by its line."""
    record = decode({"state": "", **line})
    assert isinstance(record, PassRecord)
    return record


def page_of_memory() -> Any:
    """A status page that is no file, for compiled code to store into."""
    return SimpleNamespace(memory=bytearray(PAGE_SIZE))
