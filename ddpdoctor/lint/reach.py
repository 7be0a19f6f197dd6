"""Find what the scripts of a program run in ranks, by the names that functions mention.

A function that mentions another one may run it, and whoever mentions a class may run its methods.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

from ddpdoctor.core.syntax import FUNCTIONS, last_name
from ddpdoctor.lint.calls import keyword, targets_of
from ddpdoctor.lint.code import Code, Origin
from ddpdoctor.lint.program import Program

Place = tuple[Code, ast.AST]

_JOINS = re.compile(
    r"init_process_group$|DistributedDataParallel$|init_dist|launch$|local_?rank$|world_?size$",
    re.I,
)
"""Names that only a process of several ranks mentions."""

_STARTS = ("spawn", "start_processes", "Process")
_DYNAMIC = ("import_module", "entry_points", "__import__")
_BY_NAME = ("Fire", "getattr", "globals", "locals")
"""Functions that find others by names that may be computed."""

_SCRIPTS = 8
"""Maximum number of files to examine that are both a script and imported by another one."""

_BLOCKS = (*FUNCTIONS, ast.ClassDef)


class Reach:
    """What the scripts of a program that join a group of ranks run."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._defined: dict[str, list[Place]] = defaultdict(list)
        self._known: dict[tuple[Code, str], list[Place]] = {}
        for code in program.codes:
            for node in code.of(*_BLOCKS):
                self._defined[node.name].append((code, node))
            for node in code.of(ast.Assign, ast.AnnAssign):
                # A table of classes, from which a function takes one.
                for target in targets_of(node) if code.parents[node] is code.tree else ():
                    self._defined[last_name(target)].append((code, node))
        scripts = [each for each in program.codes[1:] if "__name__" in each.loads]
        known = any(map(_joins, program.codes)) and not program.uses(*_DYNAMIC)
        tops = [list(_top(code)) for code in (program.codes[0], *scripts[:_SCRIPTS]) if known]
        reached = [(top, *self._from(top, ())) for top in tops]
        joined = [(top, found) for top, found, joins in reached if joins]
        self.ranks = {node for _, found in joined for node in found}
        self.others = {node for _, found, _ in reached for node in found} - self.ranks
        self.starters = self._starters([top for top, _ in joined])

    def _starters(self, tops: list[list[Place]]) -> set[ast.AST]:
        """Return the code that runs only in processes that start the ranks without being ranks."""
        given = [
            origin
            for code in self._program.codes
            for name in _STARTS
            for call in code.calls_by_name.get(name, ())
            if (target := keyword(call, "fn", 0) or keyword(call, "target")) is not None
            for origin in code.origins(target)
        ]
        workers = [place for each in given for place in _functions(each)]
        if not given or not all(map(_functions, given)):
            return set()
        # A direct call of a worker, besides the one that spawns it, is for a job of one process.
        aside = {last_name(each.node) for each in given}
        outside = {node for top in tops for node in self._from(top, aside)[0]}
        return outside - self._from(workers, ())[0]

    def _from(self, places: Iterable[Place], aside: Collection[str]) -> tuple[set[ast.AST], bool]:
        """Return the blocks that some blocks run, and whether any of them joins a group.

        Args:
            places: The blocks.
            aside: Names that are not followed.
        """
        queue = list(places)
        found = {node for _, node in queue}
        joins = False
        for code, block in queue:
            for name in code.mentioned(block):
                joins = joins or _JOINS.match(name) is not None
                for place in self._meant(code, name) if name not in aside else ():
                    if place[1] not in found:
                        found.add(place[1])
                        queue.append(place)
        return found, joins

    def _meant(self, code: Code, name: str) -> list[Place]:
        """Return what a name of a file may mean: its own function, if it is read as a plain name.

        Each script of a program has a function ``main``.
        """
        found = self._defined.get(name, [])
        if len(found) < 2:
            return found
        if (code, name) not in self._known:
            own = [each for each in found if each[0] is code and code.parents[each[1]] is code.tree]
            plain = all(isinstance(each, ast.Name) for each in code.loads.get(name, ()))
            imported = any(each.endswith(f".{name}") for each in code.imports.values())
            self._known[code, name] = own if own and plain and not imported else found
        return self._known[code, name]

    def runs(self, code: Code, node: ast.AST) -> bool:
        """Return whether a rank may run a node.

        Not if only a script that never joins a group runs it, or only other programs do.
        """
        around = list(_holders(code, node))
        if any(_is_replaced(code, each) or self._is_unused(code, each) for each in around):
            return False
        if any(each in self.ranks for each in around):
            return True
        names = [each.name for each in around if isinstance(each, _BLOCKS)]
        return not (
            (self.ranks and any(each in self.others for each in around))
            or any(
                _is_named(each, name) for each in self._program.importers(code) for name in names
            )
        )

    def _is_unused(self, code: Code, node: ast.AST) -> bool:
        """Return whether no file of a script mentions a function of a module's level."""
        return (
            isinstance(node, FUNCTIONS)
            and not node.decorator_list
            and code.parents.get(node) is code.tree
            and node not in self.ranks
            and not self._program.codes[0].only_defines
            and not self._program.uses(*_DYNAMIC, *_BY_NAME)
            and not any(
                node.name in each.mentioned(block)
                for each in self._program.codes
                for block in each.tree.body
                if block is not node
            )
        )

    def only_starts(self, code: Code, node: ast.AST) -> bool:
        """Return whether only the process that starts the ranks runs a node."""
        return any(each in self.starters for each in _holders(code, node))


def _is_replaced(code: Code, node: ast.AST) -> bool:
    """Return whether another function of the same name is defined below, in the same block."""
    block = getattr(code.parents.get(node), "body", ())
    return isinstance(node, FUNCTIONS) and any(
        isinstance(each, FUNCTIONS) and each.name == node.name and not each.decorator_list
        for each in block[block.index(node) + 1 :]
    )


def _joins(code: Code) -> bool:
    """Return whether a file mentions a group of ranks."""
    return any(map(_JOINS.match, code.names))


def _is_named(code: Code, name: str) -> bool:
    """Return whether a file mentions a function of an import: ``name`` or ``module.name``."""
    return name not in code.functions and any(
        isinstance(each, ast.Name)
        or (isinstance(each.value, ast.Name) and each.value.id in code.imports)
        for each in code.loads.get(name, ())
    )


def _functions(origin: Origin) -> list[Place]:
    """Return the functions that an expression names."""
    found = origin.code.program.functions(origin.code, last_name(origin.node))
    return list(found)


def _top(code: Code) -> Iterator[Place]:
    """Yield what a script runs itself, and what its imports run when they are imported."""
    seen = {code: None}
    for each in (queue := [code]):
        for statement in each.tree.body:
            is_main = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
            marked = getattr(statement, "decorator_list", ())
            if (each is code or not is_main) and (marked or not isinstance(statement, _BLOCKS)):
                yield each, statement
        new = [one for one in each.program.imported_by(each) if one not in seen]
        seen.update(dict.fromkeys(new))
        queue += new


def _holders(code: Code, node: ast.AST) -> Iterator[ast.AST]:
    """Yield the functions and classes around a node, or its statement at module level."""
    held = False
    inner = node
    for each in (node, *code.above(node)):
        if isinstance(each, _BLOCKS):
            held = True
            yield each
        elif isinstance(each, ast.Module) and not held:
            yield inner
        inner = each
