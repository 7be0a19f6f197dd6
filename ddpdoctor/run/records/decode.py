"""Read records back from lines of a journal; an unknown kind is skipped.

:mod:`~ddpdoctor.run.records.typed_json` judges what a line holds.
"""

from __future__ import annotations

import types
from collections.abc import Mapping

from ddpdoctor.core import opening
from ddpdoctor.run.records import model, process, supervisor, training
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.typed_json import decoder


def _kinds(*families: types.ModuleType) -> dict[str, type[Record]]:
    declared = (each for family in families for each in vars(family).values())
    return {
        each.kind: each
        for each in declared
        if isinstance(each, type) and issubclass(each, Record) and each.kind
    }


RANK_RECORDS = _kinds(process, training, model)
"""The kinds of records that processes of the job write."""

SUPERVISOR_RECORDS = {**_kinds(supervisor), "fault": process.FaultRecord}
"""Those of the supervisor."""


def decode(
    line: Mapping[str, object], kinds: Mapping[str, type[Record]] = RANK_RECORDS
) -> Record | None:
    """The record that a line of JSON holds, None if its kind is not known."""
    kind = line.get("kind")
    declared = kinds.get(kind) if isinstance(kind, str) else None
    try:
        return None if declared is None else decoder(declared)(line)
    except RecursionError:
        # Parts in parts in parts.
        return None


def parse(line: bytes, kinds: Mapping[str, type[Record]] = RANK_RECORDS) -> Record | None:
    """The record of a journal's line; None if it is torn, no record, or of no known kind."""
    try:
        found = opening.loads(line)
    except ValueError:
        return None
    return decode(found, kinds) if isinstance(found, dict) else None
