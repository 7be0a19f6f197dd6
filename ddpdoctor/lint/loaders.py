"""Recognize data loaders and their samplers."""

from __future__ import annotations

import ast

from ddpdoctor.core.syntax import last_name
from ddpdoctor.lint.calls import keyword
from ddpdoctor.lint.code import Code, Origin


def is_sampler(origin: Origin) -> bool:
    """Return whether a value is torch's DistributedSampler."""
    return origin.code.is_torch(origin.node, "DistributedSampler")


def is_loader(origin: Origin) -> bool:
    """Return whether a value is torch's DataLoader."""
    return origin.code.is_torch(origin.node, "DataLoader")


def made_loader(origin: Origin) -> Origin:
    """Return the call of ``super().__init__`` that makes a loader of a derived class, if it is."""
    name = last_name(getattr(origin.node, "func", origin.node))
    found = origin.code.program.class_named(origin.code, name)
    if found is None or not isinstance(origin.node, ast.Call):
        return origin
    code, owner = found
    if not any(code.dotted(each).endswith(".DataLoader") for each in owner.bases):
        return origin
    calls = [each for each in code.calls_by_name.get("__init__", ()) if code.owner(each) is owner]
    return Origin(calls[0], code) if len(calls) == 1 else origin


def is_none(origin: Origin) -> bool:
    """Return whether a value is None."""
    return isinstance(origin.node, ast.Constant) and origin.node.value is None


def sampler_of(loader: ast.Call) -> ast.expr | None:
    """Return the sampler or batch sampler that a loader gets. None without one."""
    return keyword(loader, "sampler", 3) or keyword(loader, "batch_sampler", 4)


def samplers_of(code: Code, loader: ast.Call) -> list[Origin]:
    """Return what the sampler of a loader may be, also inside of a batch sampler."""
    given = sampler_of(loader)
    if given is None:
        return []
    found: list[Origin] = []
    for each in code.origins(given):
        node = each.node
        if isinstance(node, ast.Call) and last_name(node.func) == "BatchSampler" and node.args:
            found += each.code.origins(keyword(node, "sampler", 0) or node.args[0])
        else:
            found.append(each)
    return found
