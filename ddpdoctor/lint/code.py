"""Read a file of a program, and follow its names to find what an expression may be.

Nothing is run, and the order of statements does not matter. `origins` returns where the values of
an expression come from: through names, attributes, parameters, tuples, keyword dictionaries and
returns of functions, within one file and through imports of other files.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ddpdoctor.core.syntax import FUNCTIONS, NESTED, Function, Tree, last_name, walk
from ddpdoctor.diagnose.rank_expressions import (
    ASSIGNING,
    Words,
    discerns,
    runs_on_one_rank,
    says_condition,
    says_rank,
    words_of,
)
from ddpdoctor.lint.branches import is_for_one_process
from ddpdoctor.lint.calls import (
    argument_of,
    default_of,
    is_below_a_number,
    parameters_of,
    returned,
    targets_of,
)
from ddpdoctor.lint.files import SourceFile
from ddpdoctor.lint.flow import lasting, reaching
from ddpdoctor.lint.names import ENVIRONMENT

if TYPE_CHECKING:
    from ddpdoctor.lint.program import Program

_FUNCTIONS = (*FUNCTIONS, ast.Lambda)
_PARALLEL = frozenset(
    ("distributed", "DistributedDataParallel", "DistributedSampler", "init_process_group", "spawn")
)
"""Names that show that a file may belong to a job of several ranks."""

_SETTINGS = (*ENVIRONMENT, "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
"""Environment variables that jobs of several ranks read and set."""

_MODE = ("dist", "ddp", "parallel", "world", "rank", "multi", "single", "gpu", "initialized")
"""Parts of words in conditions on whether a job has several ranks."""

_DEPTH = 14
"""The longest chain of names that is followed."""

_SAME = frozenset(
    (
        *("to", "cuda", "cpu", "float", "half", "bfloat16", "double", "train", "eval", "compile"),
        *("convert_sync_batchnorm", "requires_grad_", "type", "channels_last", "share_memory"),
    )
)
"""Calls that return the module they are given, or a copy of it."""


_OF_TORCH = ("torch", "torchvision", "torch_geometric", "monai", "")
"""Packages whose classes are torch's or derive from them. Empty for relative imports."""

_RENAMED = (".DistributedDataParallel", ".DataLoader", ".DistributedSampler")
"""Classes that are also found under a name that is set to them."""

_COLLECTED = frozenset(
    (
        *(ast.Name, ast.Attribute, ast.Call, ast.Import, ast.ImportFrom, *FUNCTIONS, ast.ClassDef),
        *(ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.AsyncFor, ast.comprehension),
        ast.withitem,
    )
)


def _leave_out(tree: ast.Module) -> None:
    """Make conditions on flags that a module sets once, to False, constant.

    `Tree` leaves out what they hold.
    """
    flags = {
        last_name(each.targets[0])
        for each in tree.body
        if isinstance(each, ast.Assign) and getattr(each.value, "value", None) is False
    }
    nodes = walk(tree) if flags else []
    bound = Counter(
        node.arg if isinstance(node, ast.arg) else node.id
        for node in nodes
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    )
    for node in nodes:
        if isinstance(node, ast.If):
            test = node.test
            is_and = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)
            needed = {
                getattr(each, "id", "")
                for each in (getattr(test, "values", ()) if is_and else (test,))
            }
            if any(bound[each] == 1 for each in needed & flags):
                node.test = ast.copy_location(ast.Constant(False), test)


def _is_scope_of(node: ast.AST, child: ast.AST) -> bool:
    """Return whether the names of a child are those of a function, class or module around it."""
    if isinstance(node, FUNCTIONS):
        return child not in node.decorator_list and child is not node.returns
    return isinstance(node, (ast.Lambda, ast.ClassDef, ast.Module))


class Origin(NamedTuple):
    """An expression that creates a value, and its file."""

    node: ast.expr
    code: Code


class Item(NamedTuple):
    """A value that a name is set to.

    Attributes:
        value: The expression.
        position: The position in the tuple that it makes, if several names are set.
        is_item: The name is set to the items of the value, as in a ``for``.
        node: The statement.
    """

    value: ast.expr
    position: int | None
    is_item: bool
    node: ast.AST


class Code(Tree):
    """One file's names, calls and scopes."""

    program: Program

    def __init__(self, file: SourceFile, tree: ast.Module) -> None:
        _leave_out(tree)
        super().__init__(tree)
        self.file = file
        self.imports: dict[str, str] = {}
        self.stars: list[str] = []
        self.functions: dict[str, list[Function]] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.calls: list[ast.Call] = []
        self.calls_by_name: dict[str, list[ast.Call]] = {}
        self.loads: dict[str, list[ast.Name | ast.Attribute]] = {}
        self.guards: dict[ast.AST, list[tuple[ast.AST, bool]]] = {}
        self.steps: dict[ast.AST, list[tuple[ast.AST, bool]]] = {}
        self._scopes: dict[ast.AST, ast.AST] = {}
        self._function: dict[ast.AST, Function | None] = {}
        self._by_type: dict[type, list[Any]] = defaultdict(list)
        self._mentioned: dict[ast.AST, set[str]] = {}
        self._changed: dict[ast.expr, bool] = {}
        self._used: dict[ast.AST, dict[str, list[int]]] = {}
        self._conditions: dict[ast.expr, ast.expr] = {}
        self._discerned: dict[ast.expr, bool] = {}
        self._calls_of: dict[str, list[ast.Call]] = {}
        self._seen: dict[ast.AST, tuple[list[Item], bool]] = {}
        self._set: dict[tuple[ast.AST, str], list[Item]] = defaultdict(list)
        self._attributes: dict[str, list[Item]] = defaultdict(list)
        self._paths: dict[tuple[ast.AST, str], list[Item]] = defaultdict(list)
        self._lasting: dict[tuple[ast.AST, str], set[int]] = {}
        self._path_of: dict[int, tuple[ast.AST, str]] = {}
        for node, parent in self.parents.items():
            known = self._scopes.get(parent, tree)
            self._scopes[node] = parent if _is_scope_of(parent, node) else known
            function = parent if isinstance(parent, FUNCTIONS) else self._function.get(parent)
            self._function[node] = function
        for node in self.nodes:
            kind = type(node)
            self._by_type[kind].append(node)
            if kind in _COLLECTED:
                self._collect(node)
        self._aliases: dict[str, str] = {}
        self._aliases |= dict(self._find_aliases())

    def _find_aliases(self) -> Iterator[tuple[str, str]]:
        """Yield other names of torch's classes: ``Wrapper = DDP if use_cuda else DataParallel``."""
        for (_, name), items in self._set.items():
            for value in (each.value for each in items if each.position is None):
                branches = (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)
                for full in map(self.dotted, branches):
                    if full.startswith("torch.") and full.endswith(_RENAMED):
                        yield name, full

    def _collect(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Name, ast.Attribute)):
            if isinstance(node.ctx, ast.Load):
                self.loads.setdefault(last_name(node), []).append(node)
        elif isinstance(node, ast.Call):
            self.calls.append(node)
            self.calls_by_name.setdefault(last_name(node.func), []).append(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node)
        elif isinstance(node, FUNCTIONS):
            self.functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ClassDef):
            self.classes[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target in targets_of(node):
                self._bind(target, node.value, node)
        elif isinstance(node, ast.NamedExpr):
            self._bind(node.target, node.value, node)
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            self._bind(node.target, node.iter, node, is_item=True)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._bind(node.optional_vars, node.context_expr, node)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for each in node.names:
            if isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                if each.name == "*":
                    self.stars.append(module)
                self.imports[each.asname or each.name] = f"{module}.{each.name}"
            else:
                local = each.asname or each.name.partition(".")[0]
                self.imports[local] = each.name if each.asname else local

    def _bind(
        self,
        target: ast.expr,
        value: ast.expr,
        node: ast.AST,
        index: int | None = None,
        is_item: bool = False,
    ) -> None:
        if isinstance(target, ast.Name):
            self._set[self.scope(target), target.id].append(Item(value, index, is_item, node))
        elif name := key_of(target):
            item = Item(value, index, is_item, node)
            self._attributes[name].append(item)
            path = self._path_of[id(item)] = self.scope(target), _path(target)
            self._paths[path].append(item)
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) and not is_item else None
            for at, each in enumerate(target.elts):
                if parts is not None and len(parts) == len(target.elts):
                    self._bind(each, parts[at], node)
                else:
                    self._bind(each, value, node, at, is_item)

    def of(self, *types: type[ast.AST]) -> list[Any]:
        """Return the file's nodes of some types."""
        return [each for one in types for each in self._by_type.get(one, ())]

    # -- places

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the innermost function, class or module around a node."""
        return self._scopes.get(node, self.tree)

    def function(self, node: ast.AST) -> Function | None:
        """Return the function around a node. None at module level."""
        return self._function.get(node)

    def owner(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the class whose method a node is in."""
        return next((each for each in self.above(node) if isinstance(each, ast.ClassDef)), None)

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement that a node belongs to."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def called(self, node: ast.AST, *names: str) -> list[ast.Call]:
        """Return the calls of some functions or methods within a block, in order."""
        calls = (call for each in names for call in self.calls_by_name.get(each, ()))
        found = [each for each in calls if self._is_within(node, each)]
        return sorted(found, key=lambda each: (each.lineno, each.col_offset))

    def _is_within(self, block: ast.AST, node: ast.AST) -> bool:
        """Return whether `within` lists a node of a block."""
        for each in self.above(node):
            if each is block:
                return True
            if isinstance(each, NESTED):
                break
        return False

    def mentioned(self, block: ast.AST) -> set[str]:
        """Return the names and texts in a block, as the files of its imports define them."""
        known = self._mentioned.get(block)
        if known is None:
            names = {
                str(each.value) if isinstance(each, ast.Constant) else last_name(each)
                for each in self.below(block)
                if isinstance(each, (ast.Name, ast.Attribute, ast.Constant))
            }
            known = {self.imports.get(name, name).rpartition(".")[2] for name in names}
            self._mentioned[block] = known
        return known

    def binds(self, scope: ast.AST, name: str) -> bool:
        """Return whether a function or module sets a name itself."""
        return (scope, name) in self._set

    def calls_of_dist(self, node: ast.AST, *names: str) -> list[ast.Call]:
        """Return the calls of some functions of torch.distributed within a block."""
        return [each for each in self.called(node, *names) if self.is_dist(each, *names)]

    # -- names

    def dotted(self, node: ast.AST) -> str:
        """Return the full name that an expression refers to: ``torch.distributed.barrier``."""
        if isinstance(node, ast.Name):
            if node.id in self.classes or (
                node.id in self.functions and node.id not in self.imports
            ):
                return f"<{self.file.path}>.{node.id}"
            return self.imports.get(node.id) or self._aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def is_torch(self, call: ast.AST, *names: str) -> bool:
        """Return whether a call is of one of torch's functions or classes, by its last name.

        Names of other packages, such as apex, are not torch's, but the loaders and samplers of
        MONAI and PyG are. A name from a star import or a relative import counts as torch's.
        """
        if not isinstance(call, ast.Call) or (
            last_name(call.func) not in names and not isinstance(call.func, ast.Name)
        ):
            return False
        full = self.dotted(call.func)
        if full.rpartition(".")[2] not in names:
            return False
        first = full.partition(".")[0]
        if isinstance(call.func, ast.Name) and call.func.id not in self.imports:
            return not full.startswith("<")
        return first in _OF_TORCH or full in names

    def is_dist(self, call: ast.AST, *names: str) -> bool:
        """Return whether a call is of one of torch.distributed's functions."""
        if not isinstance(call, ast.Call) or last_name(call.func) not in names:
            return False
        full = self.dotted(call.func)
        return full.startswith(("torch.distributed.", "dist."))

    def calls_of(self, name: str) -> list[ast.Call]:
        """Return the calls of one of torch's functions or classes, under any imported name."""
        known = self._calls_of.get(name)
        if known is None:
            found = [each for each in self.calls_named(name) if self.is_torch(each, name)]
            known = self._calls_of[name] = sorted(found, key=lambda each: each.lineno)
        return known

    def calls_named(self, *names: str) -> Iterator[ast.Call]:
        """Yield the calls of functions or classes of some names, also under an imported name."""
        others = (*self.imports.items(), *self._aliases.items())
        local = (one for one, full in others if full.rpartition(".")[2] in names)
        for each in {*names, *local}:
            yield from self.calls_by_name.get(each, ())

    @cached_property
    def names(self) -> frozenset[str]:
        """All names that the file reads, calls or imports."""
        imported = (each.rpartition(".")[2] for each in self.imports.values())
        return frozenset((*self.loads, *self.calls_by_name, *self.imports, *imported))

    @cached_property
    def only_defines(self) -> bool:
        """Whether the file runs nothing itself when it is imported."""
        return all(
            isinstance(each, (*FUNCTIONS, ast.ClassDef, ast.Import, ast.ImportFrom))
            or (isinstance(each, (ast.Expr, ast.Assign)) and not isinstance(each.value, ast.Call))
            for each in self.tree.body
        )

    @cached_property
    def is_parallel(self) -> bool:
        """Whether the file may belong to a job of several ranks."""
        return (
            not self.loads.keys().isdisjoint(_PARALLEL)
            or any(not _PARALLEL.isdisjoint(each.split(".")) for each in self.imports.values())
            or any(each.value in _SETTINGS for each in self.of(ast.Constant))
        )

    @property
    def wraps(self) -> list[ast.Call]:
        """The calls that wrap a model with torch's DDP."""
        return self.calls_of("DistributedDataParallel")

    @cached_property
    def apex_wraps(self) -> list[ast.Call]:
        """The calls that wrap a model with the DDP of apex."""
        calls = self.calls_named("DistributedDataParallel")
        return [each for each in calls if self.dotted(each.func).startswith("apex.")]

    @cached_property
    def words(self) -> Words:
        """Names for the rank in this file and those that it imports from the program."""
        found = self._own_words
        for other in self.program.imported_by(self):
            found |= other._own_words
        return found

    def discerns(self, test: ast.expr) -> bool:
        """Return whether a condition differs between ranks. False if that is not known."""
        known = self._discerned.get(test)
        if known is None:
            shown = self.condition(test)
            # The result of another function of a rank may be equal on all ranks.
            made = any(
                isinstance(each, ast.Call)
                and each.args
                and isinstance(each.func, ast.Name)
                and each.func.id in self.functions
                and not says_condition(each.func.id)
                for each in ast.walk(shown)
            )
            known = self._discerned[test] = not made and self._differs(shown)
        return known

    def condition(self, test: ast.expr) -> ast.expr:
        """Return a condition with what the program's functions return in place of their calls."""
        known = self._conditions.get(test)
        if known is None:
            known = self._conditions[test] = self._inlined(test, {}, 3)
        return known

    def _inlined(self, node: ast.expr, given: dict[str, ast.expr], depth: int) -> ast.expr:
        """Return an expression with results in place of calls, and values in place of names."""
        if isinstance(node, ast.Name):
            return given.get(node.id) or self._passed_rank(node) or node
        result = self._result(node, given, depth) if isinstance(node, ast.Call) else None
        if result is not None:
            return result
        if not isinstance(node, (ast.Call, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.IfExp)):
            return node
        copied = copy.copy(node)
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                parts = [
                    self._inlined(each, given, depth) if isinstance(each, ast.expr) else each
                    for each in value
                ]
                setattr(copied, name, parts)
            elif isinstance(value, ast.expr):
                setattr(copied, name, self._inlined(value, given, depth))
        return copied

    def _result(self, call: ast.Call, given: dict[str, ast.expr], depth: int) -> ast.expr | None:
        """Return what a call of a function of the program returns. None if that is not known."""
        name = last_name(call.func)
        known = says_condition(name) or (says_rank(name) and not call.args)
        targets = self.program.targets(self, call) if depth > 0 and not known else []
        result = returned(targets[0][1]) if len(targets) == 1 else None
        if result is None:
            return None
        other, function = targets[0]
        method = other.is_method(function)
        values = {
            name: argument_of(call, function, name, method) or default_of(function, name)
            for name in parameters_of(function)
        }
        passed = {
            name: self._inlined(value, given, depth - 1)
            for name, value in values.items()
            if value is not None
        }
        return other._inlined(result, passed, depth - 1)

    def _passed_rank(self, node: ast.Name) -> ast.expr | None:
        """Return a name for the rank if all calls of a function pass it as this parameter."""
        function = self.function(node)
        if function is None or node.id not in parameters_of(function) or self.words.know(node.id):
            return None
        passed = [
            (code, argument_of(call, function, node.id, self.is_method(function)))
            for code, call in self.program.callers(self, function)
        ]
        for code, each in passed:
            named = isinstance(each, (ast.Name, ast.Attribute))
            name = last_name(each) if each is not None else ""
            numbers = name in code.words.numbers or (says_rank(name) and "rank" in name.lower())
            if not (named and numbers) and not code.is_dist(each or node, "get_rank"):
                return None
        return ast.Name("rank", ast.Load()) if passed else None

    def _differs(self, test: ast.expr) -> bool:
        """Return whether a condition differs between ranks by one of its parts."""
        if not isinstance(test, ast.BoolOp):
            return discerns(test, self.words) and not is_below_a_number(test)
        if isinstance(test.op, ast.Or) and not all(map(self._is_of_job, test.values)):
            # The other part may be true on all ranks.
            return False
        return any(map(self._differs, test.values))

    def _is_of_job(self, test: ast.expr) -> bool:
        """Return whether a condition is on the rank, or on whether the job has several ranks."""
        words = {
            str(each.value).lower() if isinstance(each, ast.Constant) else last_name(each).lower()
            for each in ast.walk(test)
        }
        return self._differs(test) or any(part in word for word in words for part in _MODE)

    @cached_property
    def rank_conditions(self) -> bool:
        """Whether the file has conditions that differ between ranks."""
        tests = [each.test for one in (ast.If, ast.IfExp, ast.While) for each in self.of(one)]
        tests += [each.subject for each in self.of(ast.Match)]
        tests += [one for each in self.of(ast.comprehension) for one in each.ifs]
        tests += [one for each in self.of(ast.BoolOp) for one in each.values]
        return any(map(self.discerns, tests)) or any(
            runs_on_one_rank(one) for each in self.of(*FUNCTIONS) for one in each.decorator_list
        )

    @cached_property
    def _own_words(self) -> Words:
        """Names that this file sets to a rank or to a condition on it."""
        found = words_of(each for each in self.of(*ASSIGNING) if not self._is_set_alone(each))
        if not found.numbers and not found.conditions:
            return found
        made: dict[str, list[ast.expr]] = defaultdict(list)
        local = ((name, items) for (_, name), items in self._set.items())
        for name, items in (*local, *self._attributes.items()):
            made[name] += [each.value for each in items]
        # A function with arguments depends on more than the rank.
        returned = {
            name
            for name, functions in self.functions.items()
            if all(parameters_of(each) <= {"self", "cls"} for each in functions)
        }
        numbers = {
            name
            for name in found.numbers
            if name in returned or (made[name] and all(map(_is_number_of_rank, made[name])))
        }
        # A tensor computed from the rank may be reduced before it is tested.
        conditions = {
            name
            for name in found.conditions
            if name in returned or (made[name] and ast.Call not in map(type, made[name]))
        }
        return Words(frozenset(numbers), frozenset(conditions))

    def _is_set_alone(self, node: ast.AST) -> bool:
        """Return whether a branch that only jobs of one process take sets a name."""
        held = isinstance(node, ast.Assign) and isinstance(self.parents[node], ast.If)
        return held and is_for_one_process(self, node)

    # -- values

    def values(self, node: ast.expr) -> Iterator[tuple[Code, Item]]:
        """Yield what a name or an attribute is set to, in the nearest scope that sets it."""
        if isinstance(node, ast.Name):
            for scope in self._visible(node):
                known = self._set.get((scope, node.id), ())
                passed = isinstance(scope, _FUNCTIONS) and node.id in parameters_of(scope)
                seen, always = self._seen_by(node, scope, known)
                yield from ((self, each) for each in (seen if seen or passed else known))
                if passed and not always:
                    yield from self._passed(scope, node.id)
                if known or passed:
                    return
            yield from self.program.imported_values(self, node.id)
        elif key_of(node):
            yield from self._values_of_key(node)

    def _values_of_key(self, node: ast.expr) -> Iterator[tuple[Code, Item]]:
        """Yield what an attribute or an item is set to, as far as a read of it may see that."""
        owner = node.value if isinstance(node, ast.Attribute) else None
        if isinstance(owner, ast.Name) and owner.id in self.imports:
            assert isinstance(node, ast.Attribute)
            yield from self.program.module_values(self, node)
        scope, path = self.scope(node), _path(node)
        seen, always = self._seen_by(node, scope, self._paths.get((scope, path), ()))
        yield from ((self, each) for each in seen)
        if not always or self._may_change(node, scope, seen):
            yield from (
                (code, each)
                for code, each in self._of_attribute(node)
                if each not in seen and code._lasts(each)
            )

    def sets(self, node: ast.expr) -> list[Item]:
        """Return what this file sets a name or an attribute to, without what calls pass."""
        if isinstance(node, ast.Attribute):
            return self._attributes.get(node.attr, [])
        name = last_name(node)
        known = (self._set.get((each, name), []) for each in self._visible(node))
        return next(filter(None, known), [])

    def _lasts(self, item: Item) -> bool:
        """Return whether what an attribute is set to lasts to the end of the function."""
        key = self._path_of[id(item)]
        known = self._lasting.get(key)
        if known is None:
            sets = {self.statement(each.node): each for each in self._paths[key]}
            kept = lasting(key[0], set(sets), leaves=True)
            known = {id(each) for each in self._paths[key] if self.statement(each.node) in kept}
            self._lasting[key] = known
        return id(item) in known

    def _may_change(self, read: ast.expr, scope: ast.AST, seen: Sequence[Item]) -> bool:
        """Return whether a method of an object may set an attribute before it is read."""
        known = self._changed.get(read)
        if known is None:
            owner = _path(getattr(read, "value", read))
            first = min(self.statement(each.node).lineno for each in seen)
            known = self._changed[read] = any(
                first < line < read.lineno for line in self._uses(scope).get(owner, ())
            )
        return known

    def _uses(self, scope: ast.AST) -> dict[str, list[int]]:
        """Return the lines in which a function calls a method of an object, or passes it on."""
        known = self._used.get(scope)
        if known is None:
            known = self._used[scope] = defaultdict(list)
            for each in self.within(scope):
                if isinstance(each, ast.Call):
                    for value in (getattr(each.func, "value", each), *each.args):
                        known[_path(value)].append(each.lineno)
        return known

    def _seen_by(
        self, read: ast.expr, scope: ast.AST, known: Sequence[Item]
    ) -> tuple[Sequence[Item], bool]:
        """Return the values of a name that a read may see, and whether one is always set before."""
        stored = not isinstance(getattr(read, "ctx", None), ast.Load)
        if not known or stored or self.scope(read) is not scope:
            return known, False
        seen = self._seen.get(read)
        if seen is None:
            sets = {self.statement(each.node) for each in known}
            found, always = reaching(self.parents.get, scope, read, sets)
            items = [each for each in known if self.statement(each.node) in found]
            seen = self._seen[read] = items, always
        return seen

    def _of_attribute(self, node: ast.expr) -> Iterator[tuple[Code, Item]]:
        is_key = isinstance(node, ast.Subscript)
        for code in (self,) if is_key else self.program.codes:
            for item in code._attributes.get(key_of(node), ()):
                # An attribute of the same name in another class is a different one.
                owner = getattr(node, "value", node)
                mine = self.owner(node) if not is_key and last_name(owner) == "self" else None
                theirs = code.owner(item.node)
                if mine is None or theirs is None or self._is_family(mine, code, theirs):
                    yield code, item

    def _is_family(self, mine: ast.ClassDef, code: Code, theirs: ast.ClassDef) -> bool:
        """Return whether two classes are the same, or one derives from the other."""
        if mine is theirs:
            return True
        return (code, theirs) in self.program.family(self, mine) or (
            (self, mine) in self.program.family(code, theirs)
        )

    def _visible(self, node: ast.AST) -> Iterator[ast.AST]:
        scope = self.scope(node)
        yield scope
        for each in self.above(scope):
            if isinstance(each, (*_FUNCTIONS, ast.Module)):
                yield each

    def _passed(self, function: ast.AST, name: str) -> Iterator[tuple[Code, Item]]:
        """Yield what calls of the program pass as a parameter, and its default."""
        assert isinstance(function, _FUNCTIONS)
        default = default_of(function, name)
        if default is not None:
            yield self, Item(default, None, False, function)
        if isinstance(function, ast.Lambda):
            return
        for code, call in self.program.callers(self, function):
            value = argument_of(call, function, name, is_method=self.is_method(function))
            if value is not None:
                yield code, Item(value, None, False, call)
        for code, value in self.program.spawned_with(self, function, name):
            yield code, Item(value, None, False, function)

    def is_method(self, function: ast.AST) -> bool:
        """Return whether a function is a method that takes ``self`` or ``cls``."""
        static = (last_name(each) for each in getattr(function, "decorator_list", ()))
        return isinstance(self.parents.get(function), ast.ClassDef) and "staticmethod" not in static

    def origins(self, node: ast.expr) -> list[Origin]:
        """Return the expressions that create the value of an expression."""
        found: dict[tuple[int, int | None], Origin] = {}
        self._follow(node, None, found, set(), _DEPTH)
        return list(found.values())

    def _follow(
        self,
        node: ast.expr,
        index: int | None,
        found: dict[tuple[int, int | None], Origin],
        seen: set[tuple[int, int | None]],
        depth: int,
    ) -> None:
        if (id(node), index) in seen or depth < 0:
            return
        seen.add((id(node), index))
        nexts = list(self._next(node, index))
        if not nexts:
            found.setdefault((id(node), index), Origin(node, self))
        for code, each, at in nexts:
            code._follow(each, at, found, seen, depth - 1)

    def _next(
        self, node: ast.expr, index: int | None
    ) -> Iterator[tuple[Code, ast.expr, int | None]]:
        """Yield the expressions that an expression takes its value from."""
        if isinstance(node, (ast.Tuple, ast.List)) and index is not None:
            if index < len(node.elts):
                yield self, node.elts[index], None
        elif isinstance(node, (ast.Name, ast.Attribute)):
            for code, item in self.values(node):
                if item.is_item:
                    yield from _items_of(code, item)
                else:
                    yield code, item.value, item.position if index is None else index
        elif isinstance(node, ast.IfExp):
            yield self, node.body, index
            yield self, node.orelse, index
        elif isinstance(node, ast.BoolOp):
            yield from ((self, each, index) for each in node.values)
        elif isinstance(node, (ast.NamedExpr, ast.Await)):
            yield self, node.value, index
        elif isinstance(node, ast.Subscript):
            yield from self._next_of_subscript(node, index)
        elif isinstance(node, ast.Call):
            yield from self._next_of_call(node, index)

    def _next_of_subscript(
        self, node: ast.Subscript, index: int | None
    ) -> Iterator[tuple[Code, ast.expr, int | None]]:
        if isinstance(node.slice, ast.Constant) and node.slice.value in ENVIRONMENT:
            return
        for code, item in self.values(node):
            yield code, item.value, item.position if index is None else index
        for made in self._containers(node.value):
            value = made.node
            if isinstance(value, ast.Dict):
                key = ast.dump(node.slice)
                equal = [
                    v
                    for k, v in zip(value.keys, value.values, strict=True)
                    if k and ast.dump(k) == key
                ]
                for each in equal or value.values:
                    yield made.code, each, index
            elif isinstance(value, ast.DictComp):
                yield made.code, value.value, index
            elif isinstance(value, (ast.List, ast.Tuple)):
                at = getattr(node.slice, "value", None)
                known = isinstance(at, int) and -len(value.elts) <= at < len(value.elts)
                for each in [value.elts[at]] if known and at is not None else value.elts:
                    yield made.code, each, index
            elif isinstance(value, (ast.ListComp, ast.GeneratorExp)):
                yield made.code, value.elt, index

    def _containers(self, node: ast.expr) -> list[Origin]:
        made = (ast.Dict, ast.DictComp, ast.List, ast.Tuple, ast.ListComp, ast.GeneratorExp)
        if isinstance(node, made):
            return [Origin(node, self)]
        items = [(code, item) for code, item in self.values(node) if item.position is None]
        return [Origin(item.value, code) for code, item in items if isinstance(item.value, made)]

    def _next_of_call(
        self, node: ast.Call, index: int | None
    ) -> Iterator[tuple[Code, ast.expr, int | None]]:
        name = last_name(node.func)
        if name in _SAME:
            if isinstance(node.func, ast.Attribute) and not self.dotted(node.func).startswith(
                "torch"
            ):
                yield self, node.func.value, index
            elif node.args:
                yield self, node.args[0], index
            return
        if name in ("iter", "enumerate", "cycle", "tqdm", "trange", "zip") and node.args:
            yield self, node.args[0], index
            return
        for code, function in self.program.targets(self, node):
            for each in code.within(function):
                if isinstance(each, ast.Return) and each.value is not None:
                    yield code, each.value, index


def _items_of(code: Code, item: Item) -> Iterator[tuple[Code, ast.expr, int | None]]:
    """Yield the items of a literal, or of the ``values()`` of one."""
    value = item.value
    if isinstance(value, (ast.List, ast.Tuple)):
        for each in value.elts:
            yield code, each, item.position
    elif isinstance(value, ast.Call) and last_name(value.func) in ("values", "items"):
        inner = value.func.value if isinstance(value.func, ast.Attribute) else value
        for made in code._containers(inner):
            if isinstance(made.node, ast.Dict):
                yield from ((made.code, each, None) for each in made.node.values)


def key_of(node: ast.expr) -> str:
    """Return the name of an attribute, or a key of a dictionary in brackets. Empty for others."""
    if isinstance(node, ast.Attribute):
        return node.attr
    key = getattr(node.slice, "value", None) if isinstance(node, ast.Subscript) else None
    return f"[{key}]" if isinstance(key, str) else ""


def _path(node: ast.expr) -> str:
    """Return a chain of names and keys as text: ``self.parts.[model]``. Empty for others."""
    if isinstance(node, ast.Name):
        return node.id
    base = _path(node.value) if isinstance(node, (ast.Attribute, ast.Subscript)) else ""
    return f"{base}.{key}" if base and (key := key_of(node)) else ""


def _is_number_of_rank(value: ast.expr) -> bool:
    """Return whether an expression is a rank or a parameter's default, not computed from one."""
    while isinstance(value, ast.Call) and last_name(value.func) in ("int", "str") and value.args:
        value = value.args[0]
    if isinstance(value, ast.Call):
        return not value.args or last_name(value.func) in ("get", "getenv", "getattr")
    return isinstance(value, (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.IfExp))
