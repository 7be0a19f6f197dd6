"""Read records back from lines of a journal. Lines of an unknown kind are skipped.

:mod:`~ddpdoctor.run.records.typed_json` checks the values.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ddpdoctor.core import opening
from ddpdoctor.run.records import memory, model, process, supervisor, training
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.typed_json import decoder


def kinds_of(*modules: str) -> dict[str, type[Record]]:
    """Return the records that some loaded modules declare, by kind."""
    declared = (each for module in modules for each in vars(sys.modules[module]).values())
    return {
        each.kind: each
        for each in declared
        if isinstance(each, type) and issubclass(each, Record) and each.kind
    }


RANK_RECORDS = kinds_of(process.__name__, training.__name__, model.__name__, memory.__name__)
"""The records that processes of the job write, by kind."""

SUPERVISOR_RECORDS = {**kinds_of(supervisor.__name__), "fault": process.FaultRecord}
"""The records that the supervisor writes, by kind."""


def decode(
    line: Mapping[str, object], kinds: Mapping[str, type[Record]] = RANK_RECORDS
) -> Record | None:
    """Return the record of a JSON object, or None if its kind is not known."""
    kind = line.get("kind")
    declared = kinds.get(kind) if isinstance(kind, str) else None
    try:
        return None if declared is None else decoder(declared)(line)
    except RecursionError:
        # Parts in parts in parts.
        return None


def parse(line: bytes, kinds: Mapping[str, type[Record]] = RANK_RECORDS) -> Record | None:
    """Return the record of a journal line. None if it is torn, no record, or of no known kind."""
    try:
        found = opening.loads(line)
    except ValueError:
        return None
    return decode(found, kinds) if isinstance(found, dict) else None
