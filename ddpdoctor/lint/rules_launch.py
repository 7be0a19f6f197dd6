"""Rules on the start of a job: process groups, devices, arguments and spawned processes."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator

from ddpdoctor.core.finding import Severity
from ddpdoctor.core.syntax import last_name
from ddpdoctor.lint.calls import has_unpacked, keyword
from ddpdoctor.lint.code import Code
from ddpdoctor.lint.conditions import exclusive, under
from ddpdoctor.lint.names import DISTRIBUTED, ENVIRONMENT
from ddpdoctor.lint.program import Program
from ddpdoctor.lint.ranks import counts_gpus, is_local_rank, is_rank, is_world_size, variable
from ddpdoctor.lint.reach import Reach
from ddpdoctor.lint.rules import Hit, rule


@rule("DDP201", Severity.WARNING, "hardcoded-topology")
def hardcoded_topology(code: Code) -> Iterator[Hit]:
    """``init_process_group`` gets a number of ranks, or a rank, that is written in the code.

    What it finds
        ``world_size=`` with a number of at least 2, or with ``rank=`` as a number.

    Why it is bad
        With a different number of processes the job waits for ranks that never come.

    How to fix it
        Leave both out. torchrun sets them in the environment.

    Example
        Wrong:
            dist.init_process_group("nccl", world_size=4, rank=rank)
        Right:
            dist.init_process_group("nccl")

    When it stays silent
        One process (``world_size=1``), and the number that ``mp.spawn`` starts.
    """
    if code.program.uses("spawn", "Process"):
        return
    for call in code.calls_by_name.get("init_process_group", ()):
        size, rank = keyword(call, "world_size", 3), keyword(call, "rank", 4)
        if rank is not None and size is not None and is_local_rank(code, rank):
            counts = [last_name(each) for each in ast.walk(size)]
            if (
                is_world_size(code, size)
                and not counts_gpus(code, size)
                and not any("local" in each.lower() for each in counts)
                and not code.program.is_passed(code.function(call))
            ):
                yield Hit(
                    rank,
                    "the local rank is used as the rank among all: on several nodes ranks appear "
                    "twice, and the job waits forever",
                    "Leave out world_size and rank: torchrun sets them.",
                )
                continue
        number = size.value if isinstance(size, ast.Constant) else None
        if isinstance(number, int) and number > 1:
            yield Hit(
                size or call,
                f"the number of ranks is fixed at {number}: with another number of processes the "
                "job waits forever",
                "Leave out world_size and rank: torchrun sets them.",
            )


@rule("DDP202", Severity.INFO, "hardcoded-rendezvous", moot=frozenset())
def hardcoded_rendezvous(code: Code) -> Iterator[Hit]:
    """The address or the port at which ranks meet is written in the code.

    What it finds
        ``os.environ["MASTER_PORT"] = "12355"``, ``MASTER_ADDR`` likewise, or an
        ``init_method`` with a port.

    Why it is bad
        It overrides what torchrun sets, and a second job on the machine finds the port
        taken. A port above 65535 fails at once (error).

    How to fix it
        Start the script with torchrun, which sets both.

    Example
        Wrong:
            os.environ["MASTER_PORT"] = "12355"
        Right:
            torchrun --nproc-per-node 4 train.py

    When it stays silent
        Defaults (``setdefault``, ``os.environ.get``).
    """
    seen: set[ast.AST | None] = set()
    for node, value in _addresses(code):
        if value.isdigit() and int(value) > 65535:
            yield Hit(
                node, f"there is no port {value}: the greatest is 65535",
                "Use a port below 65536, or let torchrun choose.", Severity.ERROR,
            )  # fmt: skip
        elif code.function(node) not in seen:
            seen.add(code.function(node))
            yield _fixed(node)
    for address in _methods(code):
        yield _fixed(address)


def _addresses(code: Code) -> Iterator[tuple[ast.Assign, str]]:
    """Yield the addresses and ports that a file writes over those of the launcher."""
    for node in code.of(ast.Assign):
        if (
            isinstance(node.value, ast.Constant)
            and variable(code, node.targets[0]) in ("MASTER_PORT", "MASTER_ADDR")
            and not under(code, node, "master_", "environ")
        ):
            yield node, str(node.value.value)


def _methods(code: Code) -> Iterator[ast.Constant]:
    """Yield the addresses that ``init_process_group`` gets as texts."""
    for call in code.calls_by_name.get("init_process_group", ()):
        address = keyword(call, "init_method", 1)
        if isinstance(address, ast.Constant) and re.match(r"tcp://.+:\d+$", str(address.value)):
            yield address


def _fixed(node: ast.AST) -> Hit:
    return Hit(
        node,
        "the rendezvous is fixed: it overrides torchrun's, and a second job on this machine fails",
        'Use os.environ.setdefault("MASTER_PORT", ...), or start with torchrun.',
    )


@rule("DDP204", Severity.WARNING, "global-rank-as-device", moot=frozenset())
def rank_as_device(code: Code) -> Iterator[Hit]:
    """The rank among all ranks is used as the number of a GPU.

    What it finds
        ``dist.get_rank()`` or ``RANK`` in ``set_device``, ``.to()``, ``.cuda()``,
        ``torch.device`` or ``device_ids``, without ``% device_count()``.

    Why it is bad
        On the second node the numbers exceed the number of GPUs ("invalid device ordinal").

    How to fix it
        Use ``LOCAL_RANK``.

    Example
        Wrong:
            torch.cuda.set_device(dist.get_rank())
        Right:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    When it stays silent
        The index that ``mp.spawn`` passes, which counts the processes of one node, and programs
        whose ranks meet on the machine itself.
    """
    spawns = code.program.uses("spawn", "start_processes")
    if _meets_itself(code) or (spawns and _is_on_one_node(code)):
        return
    for call in code.calls:
        name = last_name(call.func)
        if name in ("set_device", "set_device_index") or (
            name in ("to", "cuda") and isinstance(call.func, ast.Attribute)
        ):
            value = keyword(call, "device", 0)
        elif name == "device" and code.dotted(call.func) == "torch.device":
            value = keyword(call, "index", 1) or keyword(call, "type", 0)
        elif name == "DistributedDataParallel" or code.is_torch(call, "DistributedDataParallel"):
            value = _first_of(code, keyword(call, "device_ids", 1))
        else:
            continue
        if isinstance(value, ast.JoinedStr):
            parts = [each.value for each in value.values if isinstance(each, ast.FormattedValue)]
            value = parts[0] if len(parts) == 1 else None
        if value is not None and is_rank(code, value):
            yield Hit(
                value,
                "the global rank is used as the number of a GPU, which fails on the second node",
                'Use int(os.environ["LOCAL_RANK"]).',
            )
            return


def _first_of(code: Code, devices: ast.expr | None) -> ast.expr | None:
    """Return the first item of a list that this file writes out. None if that is not known."""
    made = code.origins(devices) if devices is not None else []
    lists = [each for each in made if isinstance(each.node, (ast.List, ast.Tuple))]
    known = lists[0].node if len(lists) == 1 and lists[0].code is code else None
    return known.elts[0] if isinstance(known, (ast.List, ast.Tuple)) and known.elts else None


def _meets_itself(code: Code) -> bool:
    """Return whether a program sets the rendezvous to its own machine, under no condition."""
    return any(
        _LOCAL.match(value) is not None
        and not any(isinstance(one, ast.If) for one in each.above(node))
        for each in code.program.codes
        for node, value in (*_addresses(each), *((one, str(one.value)) for one in _methods(each)))
    )


def _is_on_one_node(code: Code) -> bool:
    """Return whether a program fixes the rendezvous at its own machine."""
    return code.program.once(
        "one node",
        lambda: any(
            isinstance(node.value, str) and _LOCAL.match(node.value) is not None
            for each in code.program.codes
            for node in each.of(ast.Constant)
        ),
    )


_LOCAL = re.compile(r"(tcp://)?(localhost|127\.0\.0\.1)(:|$)")


@rule("DDP203", Severity.WARNING)
def barrier_without_device(code: Code) -> Iterator[Hit]:
    """Find NCCL barriers before the process has chosen its GPU, and ``.cuda()`` if none does."""
    yield from _all_on_one_gpu(code)
    for init in code.calls_by_name.get("init_process_group", ()):
        if not _is_nccl(code, keyword(init, "backend", 0)) or keyword(init, "device_id"):
            continue
        function = code.function(init)
        inside = code.within(function or code.tree)
        for call in _barriers(code, inside):
            before = any(
                isinstance(each, ast.Call)
                and each.lineno < call.lineno
                and (_chooses_device(code, each) or keyword(each, "device_ids"))
                for each in inside
            )
            if before or call.lineno < init.lineno or call.keywords or exclusive(code, init, call):
                continue
            if function is None or not _device_is_set_outside(code, function):
                yield Hit(
                    call,
                    "no GPU is set before this barrier: NCCL guesses one, and ranks may share it",
                    "Call torch.cuda.set_device(local_rank) first, or pass device_id to "
                    "init_process_group.",
                )


def _barriers(code: Code, nodes: list[ast.AST]) -> Iterator[ast.Call]:
    """Yield the calls that wait in a barrier, themselves or in a function of the program."""
    for each in nodes:
        if isinstance(each, ast.Call) and (
            last_name(each.func) == "barrier"
            or any(
                other.calls_of_dist(function, "barrier")
                and not other.called(function, "init_process_group")
                for other, function in code.program.targets(code, each)
            )
        ):
            yield each


_CHOOSES = re.compile(r"(set|init|select|choose|pick)[a-z]*_?.*(device|gpu|cuda|dist)", re.I)
"""Names of functions that may choose the GPU of a process."""


def _all_on_one_gpu(code: Code) -> Iterator[Hit]:
    """Yield the first ``.cuda()`` of a program whose ranks have a GPU each and never set it."""
    program = code.program
    calls = (
        (each, call)
        for each in program.codes
        for call in each.calls_by_name.get("cuda", ())
        if isinstance(call.func, ast.Attribute) and not call.args and not call.keywords
    )
    never: bool = program.once("no rank sets its GPU", lambda: _never_sets_gpu(program))
    first = next(calls, None) if never else None
    if first is not None and first[0] is code:
        yield Hit(
            first[1], "no rank sets its GPU, so .cuda() means GPU 0 on all of them",
            "Call torch.cuda.set_device(local_rank) first.",
        )  # fmt: skip


def _never_sets_gpu(program: Program) -> bool:
    """Return whether the ranks use one GPU each and nothing makes it their current one."""
    several = any(
        isinstance(given := keyword(wrap, "device_ids", 1), (ast.List, ast.Tuple))
        and not any(isinstance(each, ast.Constant) for each in given.elts)
        for code in program.codes
        for wrap in code.wraps
    )
    if not several or any(_CHOOSES.match(name) for code in program.codes for name in code.names):
        return False
    inits = [
        (code, call)
        for code in program.codes
        for call in code.calls_by_name.get("init_process_group", ())
    ]
    return (
        bool(inits)
        and all(_is_nccl(code, keyword(call, "backend", 0)) for code, call in inits)
        and not any(keyword(call, "device_id") for _, call in inits)
        and not any(
            _hides_gpus(code, node)
            for code in program.codes
            for node in code.of(ast.Constant, ast.Call)
        )
    )


def _hides_gpus(code: Code, node: ast.Constant | ast.Call) -> bool:
    """Return whether a node may set the GPU: a context, or CUDA_VISIBLE_DEVICES with one GPU."""
    if isinstance(node, ast.Call):
        return code.dotted(node.func) == "torch.cuda.device"
    if node.value != "CUDA_VISIBLE_DEVICES":
        return False
    value = getattr(code.statement(node), "value", None)
    return not isinstance(value, ast.expr) or not any(
        isinstance(each, ast.Constant) and "," in str(each.value) for each in ast.walk(value)
    )


def _is_nccl(code: Code, backend: ast.expr | None) -> bool:
    """Return whether a backend is NCCL, or an option with that default."""
    if backend is None:
        return False
    made = [each.node for each in code.origins(backend)]
    return any(
        isinstance(each, ast.Constant) and each.value == "nccl"
        for each in (*made, *code.program.option_defaults(backend))
    )


_DEVICES = ("set_device", "set_device_index", "cuda", "to", "device")


def _chooses_device(code: Code, call: ast.Call) -> bool:
    """Return whether a call chooses a GPU, itself or in a function of the program."""
    if last_name(call.func) in _DEVICES:
        return True
    return any(
        isinstance(each, ast.Call) and last_name(each.func) in _DEVICES
        for other, function in code.program.targets(code, call)
        for each in other.within(function)
    )


def _device_is_set_outside(code: Code, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether code outside of a function may choose the GPU before it runs."""
    inside = {id(each) for each in code.within(function)}
    callers = code.program.callers(code, function)
    for each in code.program.codes:
        for node in each.of(ast.Subscript, ast.Call):
            sets = variable(each, node) == "CUDA_VISIBLE_DEVICES" or (
                isinstance(node, ast.Call)
                and last_name(node.func) in ("set_device", "set_device_index")
            )
            if not sets or id(node) in inside:
                continue
            place = each.scope(node), getattr(node, "lineno", 0)
            if not callers or any(
                other.scope(call) is not place[0] or call.lineno > place[1]
                for other, call in callers
            ):
                return True
    return False


@rule("DDP205", Severity.ERROR, "wrong-device-ids")
def wrong_device_ids(code: Code) -> Iterator[Hit]:
    """DDP gets several ``device_ids``, or a list as ``output_device``.

    What it finds
        ``device_ids`` with more than one entry.

    Why it is bad
        DDP raises ValueError. One process drives one GPU.

    How to fix it
        Pass the one device of this rank, or leave it out.

    Example
        Wrong:
            DDP(model, device_ids=[0, 1, 2, 3])
        Right:
            DDP(model, device_ids=[local_rank])

    When it stays silent
        A list that is built elsewhere in the program.
    """
    for call in code.wraps:
        ids, output = keyword(call, "device_ids", 1), keyword(call, "output_device", 2)
        several = isinstance(ids, (ast.List, ast.Tuple)) and len(ids.elts) > 1
        if isinstance(ids, ast.Call) and last_name(ids.func) == "list":
            several = bool(code.called(ids, "device_count"))
        if several or isinstance(output, (ast.List, ast.Tuple)):
            yield Hit(
                (ids if several else output) or call,
                "DDP takes the one GPU of its rank, and raises ValueError for a list of several",
                "Pass device_ids=[local_rank].",
            )


@rule("DDP206", Severity.WARNING, moot=frozenset())
def local_rank_option(code: Code) -> Iterator[Hit]:
    """Find options for the local rank that current launchers do not pass."""
    program = code.program
    if not _joins(program) or program.uses("spawn", "deepspeed"):
        return
    for call in _options(code):
        names = [each.value for each in call.args if isinstance(each, ast.Constant)]
        if "--local_rank" not in names or "--local-rank" in names:
            continue
        must = _is_true(keyword(call, "required"))
        if not must and (_is_filled(code) or program.uses("parse_known_args")):
            continue
        if _has_default(code, call) or _is_spare(code, call) or under(code, call, "version"):
            continue
        used = [
            load
            for each in program.codes
            for load in each.loads.get("local_rank", ())
            if isinstance(load, ast.Attribute) and "env" not in last_name(load.value)
        ]
        if used or must:
            yield Hit(
                call,
                "torchrun never passes --local_rank, and torch.distributed.launch passes "
                "--local-rank, which argparse refuses",
                'Use parser.add_argument("--local-rank", "--local_rank", type=int, '
                'default=int(os.environ.get("LOCAL_RANK", 0))).',
            )


def _joins(program: Program) -> bool:
    """Return whether a program wraps a model, or runs ``init_process_group``."""
    reach = program.once("reach", lambda: Reach(program))
    return program.wraps or any(
        reach.runs(each, call)
        for each in program.codes
        for call in each.calls_by_name.get("init_process_group", ())
    )


def _options(code: Code) -> Iterator[ast.Call]:
    """Yield the calls of ``add_argument``, also under a short name: ``arg("--local_rank")``."""
    yield from code.calls_by_name.get("add_argument", ())
    short = {
        name
        for load in code.loads.get("add_argument", ())
        if isinstance(made := code.parents[load], ast.Assign)
        for name in map(last_name, made.targets)
    }
    for name in short:
        yield from code.calls_by_name.get(name, ())


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _has_default(code: Code, option: ast.Call) -> bool:
    """Return whether an option takes its default from the environment."""
    default = keyword(option, "default")
    return default is not None and any(variable(code, one) for one in ast.walk(default))


def _is_spare(code: Code, option: ast.Call) -> bool:
    """Return whether nothing calls the function of an option that another one adds as well."""
    function = code.function(option)
    if function is None or code.program.callers(code, function):
        return False
    return any(
        each is not option and "--local_rank" in ast.unparse(each)
        for other in code.program.codes
        for each in other.calls_by_name.get("add_argument", ())
        if (outer := other.function(each)) is None or other.program.callers(other, outer)
    )


def _is_filled(code: Code) -> bool:
    """Return whether the program reads the local rank from the environment."""
    return any(
        variable(each, node) in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
        for each in code.program.codes
        for node in each.of(ast.Call, ast.Subscript)
        if isinstance(node, ast.Call) or isinstance(node.ctx, ast.Load)
    )


@rule("DDP207", Severity.ERROR, "rank-not-int", moot=frozenset())
def rank_not_int(code: Code) -> Iterator[Hit]:
    """A rank from the environment is used as a number, although it is a string.

    What it finds
        ``os.environ["RANK"]`` without ``int()`` that is compared with a number or used as a
        device.

    Why it is bad
        ``"0" == 0`` is False, so no rank saves or logs. ``set_device("0")`` raises.

    How to fix it
        Convert it with ``int()``.

    Example
        Wrong:
            rank = os.environ["RANK"]
            if rank == 0: save()
        Right:
            rank = int(os.environ["RANK"])

    When it stays silent
        Where the variable is only printed.
    """
    read = any(
        each.value in ENVIRONMENT for other in code.program.codes for each in other.of(ast.Constant)
    )
    for node in code.of(ast.Compare, ast.Call, ast.BinOp) if read else ():
        tested = _used_as_number(node)
        made = [each.node for each in code.origins(tested)] if tested is not None else []
        names = {variable(code, each) for each in made}
        if made and names <= {*ENVIRONMENT} and not any(_asks(node, each) for each in made):
            name = variable(code, made[0])
            yield Hit(
                tested or node,
                f"{name} from the environment is a string, and no number equals it",
                f'Use int(os.environ["{name}"]).',
            )


def _used_as_number(node: ast.AST) -> ast.expr | None:
    """Return the expressions compared with a number, used in arithmetic, or used as a device."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        sides = (node.left, node.comparators[0])
        numbers = [s for s in sides if isinstance(s, ast.Constant) and type(s.value) is int]
        others = [s for s in sides if not isinstance(s, ast.Constant)]
        return others[0] if numbers and others else None
    if isinstance(node, ast.Call) and last_name(node.func) == "set_device" and node.args:
        return node.args[0]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mod, ast.FloorDiv, ast.Sub)):
        return node.left if not isinstance(node.left, ast.Constant) else None
    return None


def _asks(use: ast.AST, read: ast.expr) -> bool:
    """Return whether a comparison with the default only tests whether a variable is set."""
    if not isinstance(use, ast.Compare) or not isinstance(read, ast.Call) or len(read.args) < 2:
        return False
    default = ast.dump(read.args[1])
    return default in [ast.dump(each) for each in (use.left, *use.comparators)]


@rule("DDP209", Severity.INFO)
def nccl_without_cuda(code: Code) -> Iterator[Hit]:
    """Find NCCL in programs that fall back to the CPU."""
    fallback = any(
        isinstance(node.test, ast.Call)
        and last_name(node.test.func) == "is_available"
        and any(
            isinstance(one, ast.Constant) and one.value == "cpu" for one in ast.walk(node.orelse)
        )
        for node in code.of(ast.IfExp)
    )
    for call in code.calls_by_name.get("init_process_group", ()) if fallback else ():
        backend = keyword(call, "backend", 0)
        made = [each.node for each in code.origins(backend)] if backend is not None else []
        fixed = bool(made) and all(
            isinstance(each, ast.Constant) and each.value == "nccl" for each in made
        )
        held = any(isinstance(each, ast.If) for each in code.above(call))
        if fixed and not held and code.is_dist(call, "init_process_group"):
            yield Hit(
                call, "NCCL needs a GPU, and this file falls back to the CPU without one",
                'Use "nccl" if torch.cuda.is_available() else "gloo".',
            )  # fmt: skip


@rule("DDP210", Severity.INFO, "missing-destroy")
def missing_destroy(code: Code) -> Iterator[Hit]:
    """The process group is never destroyed.

    What it finds
        ``init_process_group`` in a program without ``destroy_process_group``.

    Why it is bad
        Torch warns at exit, and NCCL may hang or leak.

    How to fix it
        Call ``dist.destroy_process_group()`` at the end.

    Example
        Wrong:
            main()
        Right:
            main()
            dist.destroy_process_group()

    When it stays silent
        Programs of frameworks that destroy it.
    """
    if any(
        not call.args
        for each in code.program.codes
        for call in each.calls_by_name.get("destroy_process_group", ())
    ):
        return
    for call in code.calls_by_name.get("init_process_group", ())[:1]:
        if code.is_dist(call, "init_process_group"):
            yield Hit(
                call, "the process group is never destroyed, which torch warns of at the exit",
                "Call dist.destroy_process_group() at the end.",
            )  # fmt: skip


@rule("DDP211", Severity.ERROR, moot=frozenset())
def spawn_without_guard(code: Code) -> Iterator[Hit]:
    """Find processes that are spawned at a module's level without a main guard."""
    for call in code.calls_by_name.get("spawn", ()):
        if "multiprocessing" not in code.dotted(call.func) and not code.dotted(
            call.func
        ).startswith("mp."):
            continue
        if (
            code.function(call) is None
            and code.owner(call) is None
            and not under(code, call, "__name__")
        ):
            yield Hit(
                call,
                "spawned processes import this file and spawn again: Python raises RuntimeError",
                'Put it below if __name__ == "__main__":.',
            )


@rule("DDP212", Severity.ERROR, moot=frozenset())
def spawn_unpicklable(code: Code) -> Iterator[Hit]:
    """Find lambdas and nested functions that are sent to spawned processes."""
    for call in _spawns(code):
        target = keyword(call, "fn", 0)
        nested = False
        if isinstance(target, ast.Name):
            functions = code.functions.get(target.id, ())
            nested = bool(functions) and all(code.function(each) is not None for each in functions)
        if isinstance(target, ast.Lambda) or nested:
            yield Hit(
                target or call,
                "a lambda or a nested function cannot be pickled, so mp.spawn raises",
                "Pass a function of the module's level.",
            )


def _spawns(code: Code) -> list[ast.Call]:
    return [
        each
        for each in code.calls_by_name.get("spawn", ())
        if "multiprocessing" in code.dotted(each.func) or code.dotted(each.func).startswith("mp.")
    ]


@rule("DDP216", Severity.ERROR, "spawn-arity", moot=frozenset())
def spawn_arity(code: Code) -> Iterator[Hit]:
    """``mp.spawn`` passes a number of arguments that its function does not take.

    What it finds
        The function has more or fewer positional parameters than the process's index and
        ``args`` fill.

    Why it is bad
        Each process raises TypeError at its start.

    How to fix it
        The index comes first, then the items of ``args``.

    Example
        Wrong:
            def main(args): ...
            mp.spawn(main, args=(args,), nprocs=4)
        Right:
            def main(index, args): ...
            mp.spawn(main, args=(args,), nprocs=4)

    When it stays silent
        Functions with ``*args``, and partial functions.
    """
    for call in _spawns(code):
        target, args = keyword(call, "fn", 0), keyword(call, "args", 1)
        if args is not None and _is_number(code, args):
            yield Hit(
                args,
                "args is a number, and mp.spawn wants a tuple",
                f"Put a comma behind it: args=({ast.unparse(args)},).",
            )
            continue
        if not isinstance(target, ast.Name) or has_unpacked(call):
            continue
        functions = [each for _, each in code.program.functions(code, target.id)]
        if len(functions) != 1 or functions[0].decorator_list:
            continue
        if not isinstance(args, (ast.Tuple, type(None))):
            continue
        items = args.elts if args is not None else []
        arguments = functions[0].args
        if arguments.vararg is not None or any(isinstance(each, ast.Starred) for each in items):
            continue
        takes = len(arguments.posonlyargs) + len(arguments.args)
        given = 1 + len(items)
        if not takes - len(arguments.defaults) <= given <= takes:
            yield Hit(
                call,
                f"{target.id}() takes {takes} positional arguments, and mp.spawn passes {given}: "
                "the process's index and args",
                "The index is the first parameter, then come the items of args.",
            )


def _is_number(code: Code, node: ast.expr) -> bool:
    """Return whether an expression is certainly a number."""
    made = [each.node for each in code.origins(node)]
    return bool(made) and all(
        (isinstance(each, ast.Constant) and isinstance(each.value, (int, float)))
        or (isinstance(each, ast.Call) and last_name(each.func) in ("device_count", "int"))
        for each in made
    )


@rule("DDP213", Severity.ERROR)
def used_before_init(code: Code) -> Iterator[Hit]:
    """Find uses of the process group above its start in the same block."""
    for init in code.calls_by_name.get("init_process_group", ()):
        if not code.is_dist(init, "init_process_group") or code.loops(init):
            continue
        function = code.function(init)
        statement = code.statement(init)
        parent = code.parents[statement]
        block = getattr(parent, "body", [])
        if statement not in block or isinstance(parent, (ast.If, ast.Try)):
            continue
        for call in (each for each in code.calls if code.function(each) is function):
            if call.lineno >= statement.lineno or code.statement(call) not in block:
                continue
            sampler = code.is_torch(call, "DistributedSampler") and keyword(call, "rank", 2) is None
            if (
                sampler
                or code.is_torch(call, "DistributedDataParallel")
                or code.is_dist(
                    call,
                    "get_rank",
                    "get_world_size",
                    "barrier",
                    "all_reduce",
                    "broadcast",
                    "new_group",
                )
            ):
                yield Hit(
                    call,
                    "this needs the process group, which is initialized below",
                    "Call init_process_group() first.",
                )


@rule("DDP214", Severity.WARNING)
def data_parallel(code: Code) -> Iterator[Hit]:
    """Find DataParallel inside of DistributedDataParallel."""
    for call in code.wraps:
        for each in code.origins(call.args[0]) if call.args else ():
            if each.code.is_torch(each.node, "DataParallel") and (
                each.code is not code
                or (each.node.lineno <= call.lineno and not exclusive(code, each.node, call))
            ):
                held = {one for one in each.code.above(each.node) if isinstance(one, ast.If)}
                if held - set(code.above(call)):
                    # A job of several ranks may not take this branch: `if n_gpu > 1`.
                    continue
                yield Hit(
                    call,
                    "DDP wraps a DataParallel model, so each rank uses the GPUs of all others",
                    "Wrap the model with DistributedDataParallel alone.",
                )


@rule("DDP217", Severity.ERROR, "unknown-distributed-function", moot=frozenset())
def unknown_function(code: Code) -> Iterator[Hit]:
    """A function of torch.distributed does not exist.

    What it finds
        ``dist.NAME`` if no release of torch has that name, but one has a similar name.

    Why it is bad
        It raises AttributeError, often late: at the first evaluation or at the end.

    How to fix it
        Use the intended name.

    Example
        Wrong:
            dist.allreduce(loss)
        Right:
            dist.all_reduce(loss)

    When it stays silent
        Names that resemble no known name.
    """
    local = {one for one, full in code.imports.items() if full == "torch.distributed"}
    for node in code.of(ast.Attribute):
        if last_name(node.value) not in (*local, "distributed") or node.attr in DISTRIBUTED:
            continue
        if code.dotted(node.value) != "torch.distributed" or not isinstance(node.ctx, ast.Load):
            continue
        close = difflib.get_close_matches(node.attr, DISTRIBUTED, n=1, cutoff=0.85)
        if close and not node.attr.startswith("_") and not _is_tested(code, node):
            yield Hit(node, f"torch.distributed has no {node.attr}", f"Did you mean {close[0]}?")


def _is_tested(code: Code, node: ast.AST) -> bool:
    return any(isinstance(each, ast.Try) for each in code.above(node)) or under(
        code, node, "hasattr", "version"
    )


@rule("DDP219", Severity.WARNING, "late-visible-devices", moot=frozenset())
def late_visible_devices(code: Code) -> Iterator[Hit]:
    """``CUDA_VISIBLE_DEVICES`` is set after CUDA was used.

    What it finds
        The variable is assigned below a call that initializes CUDA, at the same level.

    Why it is bad
        It has no effect. The process still sees all GPUs.

    How to fix it
        Set it before the job starts, or before the first use of CUDA.

    Example
        Wrong:
            model.cuda()
            os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        Right:
            CUDA_VISIBLE_DEVICES=1 python train.py

    When it stays silent
        Assignments above the first use.
    """
    for node in code.of(ast.Assign):
        if variable(code, node.targets[0]) != "CUDA_VISIBLE_DEVICES":
            continue
        function = code.function(node)
        if code.loops(node):
            continue
        earlier = [
            call
            for call in code.calls
            if code.function(call) is function
            and call.lineno < node.lineno
            and not exclusive(code, call, node)
            and (
                (last_name(call.func) == "cuda" and isinstance(call.func, ast.Attribute))
                or code.dotted(call.func)
                in ("torch.cuda.set_device", "torch.cuda.init", "torch.cuda.current_device")
            )
        ]
        if earlier:
            yield Hit(
                node,
                f"CUDA is in use since line {earlier[0].lineno}, so this has no effect",
                "Set CUDA_VISIBLE_DEVICES before the process starts.",
            )


_LAUNCH = re.compile(r"python\d? -m torch\.distributed\.launch\b|torch/distributed/launch\.py")


@rule("DDP208", Severity.INFO, moot=frozenset())
def deprecated_launcher(code: Code) -> Iterator[Hit]:
    """Find the deprecated launcher in commands that the program runs."""
    for node in code.of(ast.Constant):
        if not isinstance(node.value, str):
            continue
        documents = isinstance(code.parents.get(node), ast.Expr)
        if not documents and _LAUNCH.search(node.value):
            yield Hit(
                node, "torch.distributed.launch is deprecated", "Start the job with torchrun."
            )
