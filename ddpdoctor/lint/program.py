"""Divide files into programs, and find the functions that their calls run."""

from __future__ import annotations

import ast
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from functools import cached_property
from typing import Any, TypeVar

from ddpdoctor.core.syntax import Function, last_name
from ddpdoctor.lint.calls import keyword
from ddpdoctor.lint.code import Code, Item
from ddpdoctor.lint.files import SourceFile
from ddpdoctor.lint.names import WRAPPER

T = TypeVar("T")


def programs(files: Iterable[SourceFile]) -> Iterator[Program]:
    """Yield the programs in some files: each script that no other file imports, with its imports.

    A file belongs to each program that imports it. `Code.program` is the one that was yielded last.
    Programs without anything of several ranks are left out.
    """
    codes = [Code(each, each.tree) for each in files if each.tree is not None]
    modules = Modules(codes)
    everything = Program(codes, modules)
    imports = _imports(everything)
    for code, several in imports.items():
        for other in several:
            modules.importers[other].append(code)
    imported = {other for code in codes for other in imports[code] if other is not code}
    met: set[Code] = set()
    # Files that import each other in a circle have no script. The first of them counts as one.
    for code in (*(each for each in codes if each not in imported), *codes):
        if code in met:
            continue
        members = {code: None}
        for each in (queue := [code]):
            queue += [other for other in imports[each] if other not in members]
            members.update(dict.fromkeys(imports[each]))
        met.update(members)
        if any(each.is_parallel for each in members):
            yield everything.part(members)


def _imports(everything: Program) -> dict[Code, list[Code]]:
    """Return the files that each file imports. ``import_module`` may import all that remain."""
    imports = {code: [*everything.imported_by(code)] for code in everything.codes}
    known = {other for several in imports.values() for other in several}
    loose = [each for each in everything.codes if each not in known and each.only_defines]
    for code, several in imports.items():
        if "import_module" in code.loads:
            several += [each for each in loose if each is not code]
    return imports


class Modules:
    """The files by the names under which others may import them."""

    def __init__(self, codes: Iterable[Code]) -> None:
        self.importers: dict[Code, list[Code]] = defaultdict(list)
        self.imported: dict[Code, list[Code]] = {}
        self._named: dict[str, list[Code]] = defaultdict(list)
        self._found: dict[tuple[str, str], Code | None] = {}
        for code in codes:
            parts = _folders(os.path.splitext(code.file.path)[0])
            if parts and parts[-1] == "__init__":
                parts.pop()
            for start in range(len(parts)):
                self._named[".".join(parts[start:])].append(code)

    def find(self, code: Code, name: str) -> Code | None:
        """Return the file of an imported module: the nearest. None if several are equally near."""
        key = code.file.path, name.lstrip(".")
        if key not in self._found:
            others = self._named.get(key[1], [])
            here = _folders(os.path.dirname(code.file.path))
            paths = [_folders(each.file.path) for each in others]
            near = [(_shared(here, each), -len(each)) for each in paths]
            best = [each for each, at in zip(others, near, strict=True) if at == max(near)]
            self._found[key] = best[0] if len(best) == 1 and best[0] is not code else None
        return self._found[key]


def _shared(one: list[str], other: list[str]) -> int:
    """Return how many folders two paths share at their beginning."""
    equal = (a == b for a, b in zip(one, other, strict=False))
    return sum(itertools.takewhile(bool, equal))


def _folders(path: str) -> list[str]:
    return [part for part in path.replace(os.sep, "/").split("/") if part not in ("", ".")]


class Program:
    """A script and the files that it imports."""

    def __init__(self, codes: Iterable[Code], modules: Modules) -> None:
        self.codes = list(codes)
        self._modules = modules
        self._callers: dict[int, list[tuple[Code, ast.Call]]] = {}
        self._instances: dict[ast.AST, list[tuple[Code, ast.ClassDef]]] = {}
        self._searches = 0  # Results within a search may lack what it is about to find.
        self._targets: dict[ast.Call, list[tuple[Code, Function]]] = {}
        self._known: dict[str, Any] = {}
        for code in self.codes:
            code.program = self

    def once(self, name: str, find: Callable[[], T]) -> T:
        """Return what a function finds in the program. It runs once for each name."""
        if name not in self._known:
            self._known[name] = find()
        found: T = self._known[name]
        return found

    def part(self, codes: Iterable[Code]) -> Program:
        """Return a program of some of the files."""
        return Program(codes, self._modules)

    def imported_by(self, code: Code) -> list[Code]:
        """Return the files of the program that a file imports from."""
        known = self._modules.imported.get(code)
        if known is not None:
            return known
        found: dict[Code, None] = {}
        for full in code.imports.values():
            for name in (full, full.rpartition(".")[0]):
                other = self._modules.find(code, name) if name else None
                if other is not None:
                    found[other] = None
        for module in code.stars:
            other = self._modules.find(code, module)
            if other is not None:
                found[other] = None
        return self._modules.imported.setdefault(code, list(found))

    def _named(self, code: Code, name: str, depth: int = 4) -> tuple[Code, str] | None:
        """Return the file that defines what a file imports under a name, and the name there."""
        if name not in code.imports and not code.stars:
            return None
        module, _, attribute = code.imports.get(name, "").rpartition(".")
        sources = [(module, attribute)] if module else [(each, name) for each in code.stars]
        for source, its in sources:
            other = self._modules.find(code, source)
            if other is None:
                continue
            if its in other.functions or its in other.classes or other.binds(other.tree, its):
                return other, its
            further = self._named(other, its, depth - 1) if depth > 0 else None
            if further is not None:
                return further
        return None

    def imported_values(self, code: Code, name: str) -> Iterator[tuple[Code, Item]]:
        """Yield what a name that a file imports is set to at the other module's level."""
        found = self._named(code, name)
        if found is not None:
            other, its = found
            yield from ((other, each) for each in other._set.get((other.tree, its), ()))

    def module_values(self, code: Code, node: ast.Attribute) -> Iterator[tuple[Code, Item]]:
        """Yield what ``module.name`` is set to."""
        assert isinstance(node.value, ast.Name)
        other = self._modules.find(code, code.imports[node.value.id])
        if other is not None:
            yield from ((other, each) for each in other._set.get((other.tree, node.attr), ()))

    def targets(self, code: Code, call: ast.Call) -> list[tuple[Code, Function]]:
        """Return the functions of the program that a call may run."""
        known = self._targets.get(call)
        if known is None:
            known = self._find_targets(code, call)
            if not self._searches:
                self._targets[call] = known
        return known

    def _find_targets(self, code: Code, call: ast.Call) -> list[tuple[Code, Function]]:
        name = last_name(call.func)
        if isinstance(call.func, ast.Name):
            return self.functions(code, name)
        if not isinstance(call.func, ast.Attribute):
            return []
        value = call.func.value
        if isinstance(value, ast.Name) and value.id in code.imports:
            other = self._modules.find(code, code.imports[value.id])
            return [(other, each) for each in other.functions.get(name, ())] if other else []
        is_super = isinstance(value, ast.Call) and last_name(value.func) == "super"
        if last_name(value) == "self" or is_super:
            owner = code.owner(call)
            found = self._methods(self.family(code, owner)[is_super:], name) if owner else []
            return found if found or is_super or owner is None else self._derived(code, owner, name)
        made = self._classes_of(code, value)
        if made:
            return [one for each in made for one in self._methods(self.family(*each), name)]
        return self._only_methods(code, value, name)

    def _only_methods(self, code: Code, value: ast.expr, name: str) -> list[tuple[Code, Function]]:
        """Return the method of a name that only one class of the program has, with its bases."""
        methods = self.once(f"methods {name}", lambda: self._of_one_family(name))
        if not methods or name in _COMMON_METHODS:
            return []
        return methods if name not in WRAPPER or self._is_made(code, value, *methods[0]) else []

    def _of_one_family(self, name: str) -> list[tuple[Code, Function]]:
        """Return the method of the class that all others with one of a name are bases of."""
        methods = [
            (each, one)
            for each in self.codes
            for one in each.functions.get(name, ())
            if each.is_method(one)
        ]
        owners = [(each, each.parents[one]) for each, one in methods]
        for (code, owner), method in zip(owners, methods, strict=True):
            family = self.family(code, owner) if isinstance(owner, ast.ClassDef) else []
            if all(each in family for each in owners):
                return [method]
        return []

    def _is_made(self, code: Code, value: ast.expr, other: Code, method: ast.AST) -> bool:
        """Return whether an object is an instance of a method's class, or has a similar name.

        Modules have methods of the same name.
        """
        owner = other.parents[method]
        assert isinstance(owner, ast.ClassDef)
        items = code.sets(value)
        made = {last_name(each.value.func) for each in items if isinstance(each.value, ast.Call)}
        name = last_name(value).replace("_", "").lower()
        return (bool(name) and not items and name in owner.name.lower()) or any(
            (other, owner) in self.family(each, each.classes[one])
            for each in self.codes
            for one in made & each.classes.keys()
        )

    def _derived(self, code: Code, owner: ast.ClassDef, name: str) -> list[tuple[Code, Function]]:
        """Return the methods of a name in the classes that derive from a class."""
        return [
            (each, one)
            for each in self.codes
            for one in each.functions.get(name, ())
            if isinstance(holder := each.parents[one], ast.ClassDef)
            and (code, owner) in self.family(each, holder)
        ]

    def _classes_of(self, code: Code, value: ast.expr) -> list[tuple[Code, ast.ClassDef]]:
        """Return the classes of the program of which a value is an instance."""
        if not isinstance(value, (ast.Name, ast.Attribute, ast.Call)):
            return []
        known = self._instances.get(value)
        if known is None:
            # What an object is made of may lead to the object itself.
            known = self._instances[value] = []
            self._searches += 1
            for each in code.origins(value):
                if isinstance(each.node, ast.Call) and isinstance(each.node.func, ast.Name):
                    found = self.class_named(each.code, each.node.func.id)
                    known += [found] if found is not None and found not in known else []
            self._searches -= 1
        return known

    def class_named(self, code: Code, name: str) -> tuple[Code, ast.ClassDef] | None:
        """Return the class that a file defines or imports under a name."""
        if name in code.classes:
            return code, code.classes[name]
        found = self._named(code, name)
        return (
            (found[0], found[0].classes[found[1]])
            if found and found[1] in found[0].classes
            else None
        )

    def _methods(
        self, classes: list[tuple[Code, ast.ClassDef]], name: str
    ) -> list[tuple[Code, Function]]:
        """Return the methods of a name in the first of some classes that has any."""
        for other, one in classes:
            found = [each for each in other.functions.get(name, ()) if other.parents[each] is one]
            if found:
                return [(other, each) for each in found]
        return []

    def functions(self, code: Code, name: str) -> list[tuple[Code, Function]]:
        """Return the functions that a file defines or imports under a name."""
        if name in code.functions:
            return [(code, each) for each in code.functions[name] if not code.is_method(each)]
        found = self._named(code, name)
        return [(found[0], each) for each in found[0].functions.get(found[1], ())] if found else []

    def family(self, code: Code, owner: ast.ClassDef) -> list[tuple[Code, ast.ClassDef]]:
        """Return a class and its bases within the program, nearest first."""
        found = [(code, owner)]
        for each, one in found:
            for base in one.bases:
                known = self.class_named(each, last_name(base))
                if known is not None and known not in found:
                    found.append(known)
        return found

    def callers(self, code: Code, function: Function) -> list[tuple[Code, ast.Call]]:
        """Return the calls of a function in the program, also through ``mp.spawn``."""
        known = self._callers.get(id(function))
        if known is None:
            name = function.name
            owner = code.parents.get(function)
            if name == "__init__" and isinstance(owner, ast.ClassDef):
                name = owner.name
            known = [
                (each, call)
                for each in self.codes
                for call in each.calls_by_name.get(name, ())
                if name != function.name
                or any(one is function for _, one in self.targets(each, call))
            ]
            if name != function.name:
                known += [
                    (each, call)
                    for each in self.codes
                    for call in each.calls_by_name.get("__init__", ())
                    if any(one is function for _, one in self.targets(each, call))
                ]
            self._callers[id(function)] = known
        return known

    def spawned_with(
        self, code: Code, function: Function, name: str
    ) -> Iterator[tuple[Code, ast.expr]]:
        """Yield what ``mp.spawn`` and ``Process`` pass as a parameter, except the index."""
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        for other, call, target in self.once("spawns", lambda: list(self._spawns())):
            index = last_name(call.func) != "Process"
            at = names.index(name) - index if name in names else -1
            args = keyword(call, "args", 1 if index else None)
            items = args.elts if isinstance(args, (ast.Tuple, ast.List)) else []
            found = self.functions(other, last_name(target)) if 0 <= at < len(items) else []
            if found == [(code, function)]:
                yield other, items[at]

    def is_spawned(self, code: Code, function: Function) -> bool:
        """Return whether ``mp.spawn`` runs a function."""
        return any(
            (code, function) in self.functions(other, target.id)
            for other, call, target in self.once("spawns", lambda: list(self._spawns()))
            if last_name(call.func) != "Process"
        )

    def _spawns(self) -> Iterator[tuple[Code, ast.Call, ast.Name]]:
        """Yield the calls that start processes, and the functions that these run."""
        for name in ("spawn", "start_processes", "Process"):
            for code in self.codes:
                for call in code.calls_by_name.get(name, ()):
                    target = keyword(call, "fn", 0) if name != "Process" else None
                    target = target or keyword(call, "target")
                    if isinstance(target, ast.Name):
                        yield code, call, target

    def is_passed(self, function: Function | None) -> bool:
        """Return whether a function is passed on, so that others may call it."""
        return function is not None and any(
            isinstance(code.parents[load], (ast.Call, ast.keyword))
            and getattr(code.parents[load], "func", None) is not load
            for code in self.codes
            for load in code.loads.get(function.name, ())
        )

    def option_defaults(self, node: ast.expr) -> list[ast.expr]:
        """Return the defaults of the command-line option that ``args.NAME`` is."""
        if not isinstance(node, ast.Attribute):
            return []
        option = "--" + node.attr.replace("_", "-")
        return [
            default
            for each in self.codes
            for call in each.calls_by_name.get("add_argument", ())
            if any(
                isinstance(one, ast.Constant) and str(one.value).replace("_", "-") == option
                for one in call.args
            )
            and (default := keyword(call, "default")) is not None
        ]

    @cached_property
    def wraps(self) -> bool:
        """Whether the program wraps a model with torch's DDP, or with that of apex."""
        return any(each.wraps or each.apex_wraps for each in self.codes)

    def may_run(self, call: ast.Call, names: Container[str]) -> bool:
        """Return whether a call may be of some functions, or of a function of the program."""
        name = last_name(call.func)
        return name in names or name in self._defined

    def importers(self, code: Code) -> list[Code]:
        """Return the files of other programs that import a file."""
        return [each for each in self._modules.importers.get(code, ()) if each not in self.codes]

    @cached_property
    def _defined(self) -> frozenset[str]:
        """The names of functions, as they are defined and imported."""
        defined = {name for each in self.codes for name in each.functions}
        return frozenset(
            defined
            | {
                name
                for each in self.codes
                for name, full in each.imports.items()
                if full.rpartition(".")[2] in defined
            }
        )

    def uses(self, *words: str) -> bool:
        """Return whether a file of the program has one of these words as a name."""
        return any(not code.names.isdisjoint(words) for code in self.codes)


_COMMON_METHODS = frozenset(("step", "forward", "get", "update", "close", "run", "load", "save"))
