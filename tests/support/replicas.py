"""Written runs of ranks that train copies of one model."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.core.finding import Finding
from ddpdoctor.probe.observers.fingerprints import packed
from ddpdoctor.run.records.base import JsonObject
from tests.support.written import Written

FAMILY = (
    "DDP319", "DDP402", "DDP403", "DDP701", "DDP702", "DDP703", "DDP704", "DDP705", "DDP706",
    "DDP707",
)  # fmt: skip


# -- rules


def tensors(group: list[int], **more: object) -> JsonObject:
    names = ["first.weight", "second.weight"]
    return {"kind": "tensors", "module": 0, "type": "Net", "group": group, "names": names, **more}


def prints(
    hashes: str, lr: float = 0.1, start: int = 0, armed: int = 1, **more: object
) -> Iterator[JsonObject]:
    """One fingerprint a step; equal letters are equal parameters."""
    for step, letter in enumerate(hashes, start):
        yield {
            "kind": "fingerprint", "step": step, "module": 0, "armed": step + armed,
            "hyper": [[[lr, 0.9, None, 0]]], "parameters": f"{letter}{step}",
            "detail": packed([5 << 32, ord(letter) << 32], [1.0, float(ord(letter))]), **more,
        }  # fmt: skip


SITE = {"kind": "site", "phase": "optimizer", "path": "/job/train.py", "line": 9}


def found(written: Written, *, over: bool = True) -> list[Finding]:
    findings = written.findings(status=0 if over else None)
    return [each for each in findings if each.code in FAMILY]


def ranks(written: Written, *each: list[JsonObject]) -> None:
    for number, records in enumerate(each):
        group = list(range(len(each)))
        written.rank(number, [SITE, tensors(group), *records])


def model(parameters: list[list[object]], group: list[int] | None = None) -> JsonObject:
    return {
        "kind": "model", "number": 0, "type": "Net", "group": group or [0, 1],
        "parameters": parameters, "count": len(parameters), "path": "/job/train.py", "line": 3,
    }  # fmt: skip
