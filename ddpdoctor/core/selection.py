"""Which findings a person wants to see: ``--select`` and ``--ignore``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ddpdoctor.core.finding import Finding
from ddpdoctor.core.options import Given, Value

_CODE = re.compile(r"DDP\d{0,3}")


def _codes(text: str) -> tuple[str, ...]:
    codes = tuple(code.strip().upper() for code in text.split(",") if code.strip())
    if not codes or not all(map(_CODE.fullmatch, codes)):
        raise ValueError(text)
    return codes


CODES = Value(_codes, "codes, or how they begin, such as DDP309,DDP7", repeated=True)


@dataclass(frozen=True)
class Selection:
    """Codes, or how they begin. Where both fit a finding the longer one counts, as in ruff.

    A finding that is not selected still explains others: it was made, and is only not shown.
    """

    select: tuple[str, ...] = ()
    """Empty: all."""
    ignore: tuple[str, ...] = ()

    @classmethod
    def given(cls, given: Given) -> Selection:
        """What a command line selects."""
        words = (given.get(name, ()) for name in ("--select", "--ignore"))
        return cls(*(tuple(code for codes in each for code in codes) for each in words))

    def __contains__(self, code: str) -> bool:
        selected = _fit(code, self.select) if self.select else 0
        return selected >= 0 and selected > _fit(code, self.ignore)

    def of(self, findings: Iterable[Finding]) -> list[Finding]:
        """Those of the findings that are selected."""
        return [finding for finding in findings if finding.code in self]


ALL = Selection()


def _fit(code: str, beginnings: Iterable[str]) -> int:
    return max((len(each) for each in beginnings if code.startswith(each)), default=-1)
