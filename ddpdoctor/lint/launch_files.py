"""Find launches that cannot work in batch scripts, manifests and configurations.

Numbers that the file does not state, such as ``$GPUS``, are ignored.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ddpdoctor.core.finding import Severity

SHELL = (".sh", ".bash", ".sbatch", ".slurm")
YAML = (".yaml", ".yml")
SUFFIXES = (*SHELL, *YAML, ".json")

NAMES = {
    "DDP001": "launch-environment",
    "DDP002": "port",
    "DDP005": "shared-memory",
    "DDP007": "variables",
    "DDP021": "gpu-count",
}
"""The codes, shared with ``ddpdoctor check``, and their names."""


class Fault(NamedTuple):
    """A fault in a line. Line numbers start at 1."""

    line: int
    code: str
    severity: Severity
    message: str
    fix: str


_HURTFUL = {
    "NCCL_P2P_DISABLE": ("1", "GPUs of a node exchange data through host memory"),
    "NCCL_SHM_DISABLE": ("1", "ranks of a node exchange data through the network stack"),
    "NCCL_IB_DISABLE": ("1", "nodes exchange data over Ethernet, even if there is InfiniBand"),
    "CUDA_LAUNCH_BLOCKING": ("1", "each kernel is waited for"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "each allocation calls the driver"),
    "NCCL_ASYNC_ERROR_HANDLING": ("0", "a failed collective hangs forever"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "a failed collective hangs forever"),
}
"""Debugging variables, each with the harmful value and its effect."""


def is_launch_file(path: str, text: str) -> bool:
    """Return whether a file starts jobs, judged by its name and content."""
    if path.endswith(SHELL):
        return True
    marks = ("PyTorchJob", "distributed_type", "zero_optimization", "train_micro_batch_size")
    return path.endswith(SUFFIXES) and any(each in text for each in marks)


def faults(path: str, text: str) -> Iterator[Fault]:
    """Yield the faults of a launch file. Yield nothing if it does not parse."""
    if path.endswith(SHELL):
        yield from _of_shell(text)
    elif path.endswith(".json"):
        yield from _of_deepspeed(text)
    else:
        yield from _of_yaml(text)


# -- shell scripts


@dataclass
class _Command:
    """A command of a shell script, before variables are expanded.

    Attributes:
        line: Its first line.
        words: Its words, as the shell splits them.
    """

    line: int
    words: list[str]

    def options(self, start: int = 0) -> dict[str, str]:
        """Return the options after a word, with ``-`` in their names."""
        found: dict[str, str] = {}
        for at, word in enumerate(self.words[start:], start):
            name, equals, value = word.partition("=")
            if name.startswith("-"):
                follows = self.words[at + 1] if at + 1 < len(self.words) else ""
                key = name.lstrip("-").replace("_", "-")
                found[key] = value if equals else "" if follows.startswith("-") else follows
        return found


@dataclass
class _Script:
    """A shell script: its commands, its options for Slurm, and variables with one value."""

    commands: list[_Command] = field(default_factory=list)
    slurm: dict[str, tuple[str, int]] = field(default_factory=dict)
    variables: dict[str, tuple[str, int]] = field(default_factory=dict)

    def number(self, text: str | None) -> int | None:
        """Return a literal number, or a variable's only value. None if unknown."""
        found = re.fullmatch(r"\$\{?(\w+)\}?", text or "")
        if found is not None:
            slurm = {"SLURM_NNODES": "nodes", "SLURM_JOB_NUM_NODES": "nodes"}
            slurm |= {"SLURM_NTASKS_PER_NODE": "ntasks-per-node"}
            slurm |= {"SLURM_GPUS_ON_NODE": "gpus-per-node"}
            name = slurm.get(found[1])
            text = self.option(name) if name else self.variables.get(found[1], ("", 0))[0]
        return int(text) if text and text.isdigit() else None

    def option(self, name: str) -> str:
        """Return the value of one of Slurm's options. Empty if it is not given."""
        return self.slurm.get(name, ("", 0))[0]


_SHORT = {"-N": "nodes", "-n": "ntasks", "-G": "gpus"}
_ASSIGNED = re.compile(r"(?:export\s+|declare\s+-x\s+)?([A-Za-z_]\w*)=(\S*)$")
_HERE = re.compile(r"<<-?\s*['\"]?(\w+)")


def _script(text: str) -> _Script:
    """Read a shell script. Skip lines that cannot be split into words."""
    script = _Script()
    several: set[str] = set()
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        number, row = at + 1, lines[at].strip()
        at += 1
        if row.startswith("#SBATCH"):
            _slurm_option(script, row.partition("SBATCH")[2].split(" #")[0], number)
            continue
        here = _HERE.search(row)
        words = _split(row)
        # A quote or a backslash continues on the next lines.
        while (words is None or row.endswith("\\")) and at < len(lines) and at - number < 60:
            row = (
                f"{row.removesuffix(chr(92))}\n{lines[at].strip()}"
                if words is None
                else (f"{row.removesuffix(chr(92))} {lines[at].strip()}")
            )
            at += 1
            words = _split(row)
        if here is not None:
            while at < len(lines) and lines[at].strip() != here[1]:
                at += 1
        for command in _commands(words or []):
            script.commands.append(_Command(number, command))
            for word in command:
                assigned = _ASSIGNED.match(word)
                if assigned is None:
                    if word not in ("export", "env"):
                        break
                    continue
                name, value = assigned.groups()
                if script.variables.get(name, (value, 0))[0] != value:
                    several.add(name)
                script.variables[name] = value, number
    for name in several:
        del script.variables[name]
    return script


def _split(row: str) -> list[str] | None:
    lexer = shlex.shlex(row, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        return None


def _commands(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield the commands of a line: ``a && b`` are two."""
    command: list[str] = []
    for word in (*words, ";"):
        if word and set(word) <= set(";&|"):
            if command:
                yield command
            command = []
        else:
            command.append(word)


def _slurm_option(script: _Script, text: str, line: int) -> None:
    words = text.split()
    for at, word in enumerate(words[:2]):
        name, equals, value = word.partition("=")
        follows = words[at + 1] if at + 1 < len(words) else ""
        if name in _SHORT:
            script.slurm[_SHORT[name]] = value or follows, line
        elif name.startswith("--"):
            script.slurm[name[2:]] = value if equals else follows, line


def _gpus_per_node(script: _Script) -> int | None:
    """Return the number of GPUs that Slurm allocates per node. None if it is not stated."""
    text = script.option("gpus-per-node")
    if not text and script.option("gres").startswith("gpu"):
        text = script.option("gres")
    last = text.rpartition(":")[2]
    return int(last) if last.isdigit() else None


_TORCHRUN = re.compile(r"(?:^|/)torchrun$")
_MODULES = ("torch.distributed.run", "torch.distributed.launch")


def _torchrun(command: _Command) -> int | None:
    """Return the index of torchrun in a command. None if it is absent."""
    for at, word in enumerate(command.words):
        if _TORCHRUN.search(word) or (at and word in _MODULES and command.words[at - 1] == "-m"):
            return at
    return None


def _of_shell(text: str) -> Iterator[Fault]:
    script = _script(text)
    launches = False
    for command in script.commands:
        if command.words[0] in ("echo", "printf"):
            continue
        at = _torchrun(command)
        if at is None:
            # In the quotes of `srun bash -c "torchrun ..."`.
            for word in command.words:
                inner = _split(word) if "torchrun" in word and " " in word else None
                if inner:
                    inside = _Command(command.line, [*command.words, *inner])
                    at, command = _torchrun(inside), inside
        if at is not None:
            launches = True
            yield from _of_torchrun(script, command, at)
        launches = launches or command.words[0] in ("srun", "deepspeed", "accelerate", "mpirun")
    if launches:
        yield from _hurtful(script.variables, text.splitlines())


def _of_torchrun(script: _Script, command: _Command, at: int) -> Iterator[Fault]:
    options = command.options(at + 1)
    before = command.words[:at]
    nodes = script.number(options.get("nnodes", "1"))
    ranks = script.number(options.get("nproc-per-node"))
    given = script.number(script.option("nodes") or None)
    remote = {"srun", "ssh", "pdsh", "mpirun", "clush", "parallel"} & set(before)
    line = command.line
    alone = script.slurm and not remote and "node-rank" not in options
    if alone and given is not None and given > 1 and (nodes or 2) > 1:
        yield Fault(
            line, "DDP001", Severity.ERROR,
            f"a batch script runs on the first of its {given} nodes alone, so the others never "
            "start torchrun",
            "Start it with srun: srun --ntasks-per-node=1 torchrun ...",
        )  # fmt: skip
    if given is not None and nodes is not None and nodes > given:
        yield Fault(
            line, "DDP001", Severity.ERROR,
            f"torchrun waits for {nodes} nodes, and the job has {given}",
            "Pass --nnodes $SLURM_NNODES.",
        )  # fmt: skip
    yield from _tasks(script, command, before, ranks)
    gpus = _gpus_per_node(script)
    if gpus is not None and ranks is not None and ranks > gpus:
        yield Fault(
            line, "DDP021", Severity.ERROR,
            f"torchrun starts {ranks} ranks on a node, which has {gpus} GPUs for the job",
            f"Pass --nproc-per-node {gpus}, or ask for {ranks} GPUs.",
        )  # fmt: skip
    yield from _rendezvous(script, options, nodes, line)


def _tasks(
    script: _Script, command: _Command, before: Sequence[str], ranks: int | None
) -> Iterator[Fault]:
    """Yield a fault if several tasks on a node each start torchrun."""
    if "srun" not in before:
        return
    own = _Command(command.line, list(before)).options()
    if {"n", "ntasks", "ntasks-per-node"} & set(own):
        tasks = script.number(own.get("ntasks-per-node"))
    else:
        tasks = script.number(script.option("ntasks-per-node") or None)
    several = ranks is not None and ranks > 1
    if tasks is not None and tasks > 1 and several:
        yield Fault(
            command.line, "DDP001", Severity.ERROR,
            f"{tasks} tasks on each node start torchrun, each with {ranks} ranks",
            "Start one torchrun on each node: --ntasks-per-node=1.",
        )  # fmt: skip


_HOME = ("localhost", "127.0.0.1", "::1")


def _rendezvous(
    script: _Script, options: Mapping[str, str], nodes: int | None, line: int
) -> Iterator[Fault]:
    """Yield rendezvous addresses and ports that cannot work."""
    endpoint = options.get("rdzv-endpoint", "")
    host, _, end = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", "")
    address = options.get("master-addr", "")
    for name, value in (("--rdzv-endpoint", end), ("--master-port", options.get("master-port"))):
        port = script.number(value)
        if port is not None and port > 65535:
            yield Fault(
                line, "DDP002", Severity.ERROR, f"{name} has port {port}: the greatest is 65535",
                "Use a port below 65536.",
            )  # fmt: skip
    if nodes is None or nodes < 2:
        return
    if host in _HOME or address in _HOME:
        yield Fault(
            line, "DDP001", Severity.ERROR,
            f"{host or address} is another machine on each of the {nodes} nodes, so each waits for "
            "itself",
            "Name the first node's host.",
        )  # fmt: skip
    elif not endpoint and not address and "standalone" not in options:
        yield Fault(
            line, "DDP001", Severity.ERROR,
            f"{nodes} nodes have no address at which they meet, so each waits for itself",
            "Pass --rdzv-backend c10d --rdzv-endpoint HOST:29500 with the first node's host.",
        )  # fmt: skip


def _hurtful(
    variables: Mapping[str, tuple[str, int]], lines: Sequence[str] = ()
) -> Iterator[Fault]:
    """Yield faults for debugging variables: infos if a comment is next to them."""
    for name, (value, line) in variables.items():
        wrong, effect = _HURTFUL.get(name, ("", ""))
        meant = any("#" in each for each in lines[max(line - 2, 0) : line])
        if wrong and value.strip("'\"") == wrong:
            yield Fault(
                line, "DDP007", Severity.INFO if meant else Severity.WARNING,
                f"{name}={value}: {effect}", "Set it for the run in which it is needed.",
            )  # fmt: skip


# -- manifests and configurations


def _of_yaml(text: str) -> Iterator[Fault]:
    try:
        import yaml
    except ImportError:
        return  # `ddpdoctor lint` reports that PyYAML is missing
    try:
        documents = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError, ValueError):
        return
    for document in documents:
        known = _Tree(document)
        if known["kind"].text == "PyTorchJob":
            yield from _of_pytorch_job(known)
        elif known["distributed_type"].text and known["num_processes"].text:
            yield from _of_accelerate(known)


class _Tree:
    """A node of a YAML document, with its line. A missing node is empty."""

    def __init__(self, node: Any, line: int = 1) -> None:
        self._node = node
        self.line = node.start_mark.line + 1 if node is not None else line

    def __getitem__(self, name: str) -> _Tree:
        value = getattr(self._node, "value", None)
        for pair in value if isinstance(value, list) else ():
            if isinstance(pair, tuple) and pair[0].value == name:
                found = _Tree(pair[1])
                found.line = pair[0].start_mark.line + 1
                return found
        return _Tree(None, self.line)

    def __bool__(self) -> bool:
        return self._node is not None

    def items(self) -> list[_Tree]:
        """Return the items of a list."""
        value = getattr(self._node, "value", None)
        items = value if isinstance(value, list) else []
        return [_Tree(each) for each in items if not isinstance(each, tuple)]

    @property
    def text(self) -> str:
        """The text of a scalar. Empty for other nodes."""
        value = getattr(self._node, "value", None)
        return value if isinstance(value, str) else ""

    @property
    def number(self) -> int | None:
        """A whole number. None for other nodes."""
        return int(self.text) if self.text.isdigit() else None


def _of_pytorch_job(job: _Tree) -> Iterator[Fault]:
    replicas = job["spec"]["pytorchReplicaSpecs"]
    pods = 0
    for role in ("Master", "Worker"):
        count = replicas[role]["replicas"]
        pods += (count.number or 1) if replicas[role] else 0
        if role == "Master" and count.number is not None and count.number != 1:
            yield Fault(
                count.line, "DDP001", Severity.ERROR,
                f"a PyTorchJob has one master, not {count.number}: each would be rank 0",
                "Set replicas of Master to 1, and add workers.",
            )  # fmt: skip
    for role in ("Master", "Worker"):
        spec = replicas[role]["template"]["spec"]
        for container in spec["containers"].items():
            if container["name"].text == "pytorch" or len(spec["containers"].items()) == 1:
                yield from _of_container(job, spec, container, pods)


def _of_container(job: _Tree, spec: _Tree, container: _Tree, pods: int) -> Iterator[Fault]:
    words = [each.text for part in ("command", "args") for each in container[part].items()]
    command = _Command(container.line, [inner for each in words for inner in _split(each) or ()])
    at = _torchrun(command)
    options = command.options(at + 1) if at is not None else {}
    script = _Script()
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    ranks = script.number(options.get("nproc-per-node")) or job["spec"]["nprocPerNode"].number
    if gpus.number is not None and ranks is not None and ranks > gpus.number:
        yield Fault(
            gpus.line, "DDP021", Severity.ERROR,
            f"torchrun starts {ranks} ranks in a pod with {gpus.number} GPUs",
            f"Set nvidia.com/gpu to {ranks}, or start {gpus.number} ranks.",
        )  # fmt: skip
    nodes = script.number(options.get("nnodes"))
    if nodes is not None and pods and nodes != pods:
        yield Fault(
            container["command"].line if container["command"] else container.line,
            "DDP001", Severity.ERROR,
            f"torchrun waits for {nodes} nodes, and the job has {pods} pods",
            f"Pass --nnodes {pods}, or leave it out: the operator sets PET_NNODES.",
        )  # fmt: skip
    if gpus.number and not _has_shared_memory(spec, container):
        yield Fault(
            container.line, "DDP005", Severity.WARNING if gpus.number > 1 else Severity.INFO,
            "/dev/shm of a container has 64 MiB: loader workers and NCCL run out of it",
            "Mount an emptyDir with medium: Memory at /dev/shm.",
        )  # fmt: skip
    yield from _hurtful(
        {each["name"].text: (each["value"].text, each.line) for each in container["env"].items()}
    )


def _has_shared_memory(spec: _Tree, container: _Tree) -> bool:
    mounts = [each["mountPath"].text for each in container["volumeMounts"].items()]
    return "/dev/shm" in mounts or spec["hostIPC"].text == "true"


def _of_accelerate(config: _Tree) -> Iterator[Fault]:
    ranks, machines = config["num_processes"], config["num_machines"]
    rank, port = config["machine_rank"], config["main_process_port"]
    count = machines.number or 1
    if ranks.number is not None and ranks.number % count:
        yield Fault(
            ranks.line, "DDP001", Severity.ERROR,
            f"num_processes counts the ranks of all machines, and {ranks.number} do not divide "
            f"among {count}",
            "Set it to num_machines times the GPUs of one.",
        )  # fmt: skip
    if rank.number is not None and rank.number >= count:
        yield Fault(
            rank.line, "DDP001", Severity.ERROR,
            f"machine_rank is {rank.number}, and the last of {count} machines is {count - 1}",
            "Count machine_rank from 0.",
        )  # fmt: skip
    address = config["main_process_ip"].text
    if count > 1 and not config["mpirun_config"] and address in ("", "null", "~", *_HOME):
        at = config["main_process_ip"] or machines
        yield Fault(
            at.line, "DDP001", Severity.ERROR,
            f"{count} machines have no address at which they meet, so each waits for itself",
            "Set main_process_ip to the first machine's address.",
        )  # fmt: skip
    if port.number is not None and port.number > 65535:
        yield Fault(
            port.line, "DDP002", Severity.ERROR,
            f"main_process_port is {port.number}: the greatest is 65535",
            "Use a port below 65536.",
        )  # fmt: skip
    chosen = [each for each in config["gpu_ids"].text.split(",") if each.strip().isdigit()]
    if count == 1 and chosen and ranks.number is not None and ranks.number > len(chosen):
        yield Fault(
            ranks.line, "DDP021", Severity.ERROR,
            f"{ranks.number} ranks share the {len(chosen)} GPUs of gpu_ids",
            f"Set num_processes to {len(chosen)}, or name more GPUs.",
        )  # fmt: skip


def _of_deepspeed(text: str) -> Iterator[Fault]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return
    if not isinstance(config, dict):
        return

    def line(name: str) -> int:
        return text[: max(text.find(f'"{name}"'), 0)].count("\n") + 1

    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, steps = (config.get(name, 1) for name in names)
    known = all(type(each) is int and each > 0 for each in (whole, micro, steps))
    if known and "train_batch_size" in config and whole % (micro * steps):
        yield Fault(
            line(names[0]), "DDP001", Severity.ERROR,
            f"train_batch_size {whole} is not a multiple of {micro} samples a GPU times {steps} "
            "accumulation steps, so no number of ranks fits",
            "Leave out train_batch_size: DeepSpeed computes it.",
        )  # fmt: skip
    halves = [name for name in ("fp16", "bf16") if _is_enabled(config.get(name))]
    if len(halves) == 2:
        yield Fault(
            line("bf16"), "DDP001", Severity.ERROR,
            "fp16 and bf16 are both enabled, which DeepSpeed refuses",
            "Enable one of them.",
        )  # fmt: skip


def _is_enabled(part: object) -> bool:
    return isinstance(part, dict) and part.get("enabled") is True
