"""The registry of rules on source code, and the problems that they find."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ddpdoctor.core.finding import Severity
from ddpdoctor.lint.code import Code


class Hit(NamedTuple):
    """What a rule finds.

    Attributes:
        node: The expression or statement at fault.
        message: One sentence: what is wrong, and what follows.
        fix: What to change.
        severity: If it is milder than the rule's.
    """

    node: ast.AST
    message: str
    fix: str
    severity: Severity | None = None


Find = Callable[[Code], Iterator[Hit]]


@dataclass(frozen=True)
class LintRule:
    """A rule on source code.

    Attributes:
        code: The code. A fault that a run-time rule finds as well has its code, and its page.
        name: The name. Empty if the run-time rule's holds.
        severity: The usual severity.
        find: Yields the places in a file.
        page: The page. Empty if the run-time rule's holds.
        moot: Frameworks that take care of it: nothing is reported in a program that imports one.
    """

    code: str
    name: str
    severity: Severity
    find: Find
    page: str
    moot: frozenset[str]


LINT_RULES: dict[str, LintRule] = {}
"""All rules by code. Importing ``ddpdoctor.lint.all_rules`` registers them."""

TRAINERS = frozenset((
    "accelerate", "allennlp", "axolotl", "catalyst", "colossalai", "composer", "deepspeed",
    "detectron2", "fairseq", "fastai", "horovod", "ignite", "kornia.x", "lightning", "megatron",
    "mmcls", "mmcv", "mmdet", "mmengine", "mmseg", "nemo", "paddle", "pytorch_lightning",
    "ray.train", "skorch", "speechbrain", "torchtitan", "torchtnt", "trl", "ultralytics",
))  # fmt: skip
"""Frameworks with a loop of their own, in which other rules hold."""

LOADERS = frozenset(
    ("dgl", "torch_geometric", "webdataset", "nvidia.dali", "ffcv", "streaming", "timm.data")
)
"""Libraries with data loaders that may divide the data themselves."""


def rule(
    code: str, severity: Severity, name: str = "", moot: frozenset[str] = TRAINERS
) -> Callable[[Find], Find]:
    """Register a rule. The docstring is its page if it has its own name."""

    def decorate(find: Find) -> Find:
        if code in LINT_RULES:
            raise ValueError(f"{code} is registered twice")
        page = (inspect.getdoc(find) or "") if name else ""
        LINT_RULES[code] = LintRule(code, name, severity, find, page, moot)
        return find

    return decorate
