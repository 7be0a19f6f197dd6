"""Findings that say the same of several GPUs become one: "GPUs 0-7 have ..."."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ddpdoctor.core.finding import Finding
from ddpdoctor.core.ranks import spans

_GPU = re.compile(r"\bGPU (\d+)\b")
_NUMBER = re.compile(r"\d+(\.\d+)?")
_CHOSEN = re.compile(r"(-i) \d+\b")

_PLURAL = {"has": "have", "is": "are", "does": "do", "waits": "wait"}
"""Verbs behind a GPU's number."""


def merged(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings of a check; those that differ in the GPU and in numbers alone are one."""
    groups: dict[object, list[Finding]] = {}
    for each in findings:
        start = _GPU.match(each.message)
        alike = (each.severity, _NUMBER.sub("#", each.message)) if start else id(each)
        groups.setdefault(alike, []).append(each)
    return tuple(each[0] if len(each) == 1 else _one(each) for each in groups.values())


def _one(group: Sequence[Finding]) -> Finding:
    first = group[0]
    numbers = sorted({int(_GPU.findall(each.message)[0]) for each in group})
    rest = _GPU.sub("", first.message, count=1)
    verb = rest.split(maxsplit=1)[0] if rest.startswith(" ") else ""
    if verb in _PLURAL:
        rest = rest.replace(verb, _PLURAL[verb], 1)
    own = _GPU.sub("GPU", first.message)
    same = all(_GPU.sub("GPU", each.message) == own for each in group)
    return replace(
        first,
        message=f"GPUs {spans(numbers)}{rest}",
        evidence=first.evidence if same else tuple(each.message for each in group[:16]),
        paste=_CHOSEN.sub(rf"\1 {','.join(map(str, numbers))}", first.paste),
    )
