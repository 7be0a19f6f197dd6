"""Failures caused by the script: its start, its use of torch, its checkpoints."""

from __future__ import annotations

from ddpdoctor.core.finding import Severity
from ddpdoctor.failures.entry import Failure, Known, Page, Weight

# -- Start and use of torch


_WITHOUT = (
    r"(?:[\s\S]{0,2000}?Parameters which did not receive grad for rank (?P<rank>\d+): (?P<names>[^\n]{1,80})"
    r"|[\s\S]{0,2000}?Parameter indices which did not receive grad for rank (?P<of>\d+): (?P<indices>[\d ]{1,80}))?"
)

SCRIPT = (
    Failure(
        Known("DDP305", "outputs-without-loss", Weight.CAUSE, "1.7 to 2.13"),
        r"Expected to have finished reduction in the prior iteration[\s\S]{0,600}Since `find_unused_parameters=True` is"
        + _WITHOUT,
        says="has outputs of forward that take no part in the loss, although "
        "find_unused_parameters=True is set[: parameters {indices}][: {names}]",
        fix="Every tensor that forward returns has to reach the loss (add 0 * output.sum()), or is not "
        "returned; returned objects have to be tuples, lists or dicts, in which DDP finds tensors.",
        examples=(
            "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has parameters that were not used in producing loss. Since `find_unused_parameters=True` is enabled, this likely  means that not all `forward` outputs participate in computing loss.",
        ),
    ),
    Failure(
        Known("DDP329", "backward-through-collective", Weight.NOTE, "2.1 to 2.13"),
        r"\bc10d::(?P<call>\w+?)_?: an autograd kernel was not registered to the Autograd key\(s\)",
        says="calls backward through {call}, which has no gradient",
        severity=Severity.INFO,
        fix="Call backward on the local loss and reduce a detached copy for the log, or use "
        "torch.distributed.nn.functional.",
        examples=(
            "UserWarning: c10d::allreduce_: an autograd kernel was not registered to the Autograd key(s) but we are trying to backprop through it.",
        ),
    ),
    Failure(
        Known("DDP808", "pdb-quit", Weight.CAUSE, "any"),
        r"^(?:bdb\.)?BdbQuit\b",
        says="stopped at a breakpoint of pdb, which was quit or had no terminal",
        fix="Remove the call. `breakpoint()` under `ddpdoctor run` waits for a debugger to attach.",
        examples=(
            'Traceback (most recent call last):\n  File "/job/train.py", line 3, in <module>\n    loss.backward()\n  File "/usr/lib/python3.11/bdb.py", line 115, in dispatch_line\n    if self.quitting: raise BdbQuit\nbdb.BdbQuit',
        ),
    ),
    Failure(
        Known("DDP905", "options-refused", Weight.CAUSE, "argparse, click, hydra, absl, tyro"),
        r"^\S+\.py: error: (?P<what>(?!unrecognized arguments: [^\n]{0,999}--local)[^\n]{1,120})"
        r"|^[\w./-]+(?: <command> \[<args>\])?: error: (?P<argparse>(?:the following arguments are required"
        r"|unrecognized arguments(?!: [^\n]{0,999}--[\w-]*(?:local|nproc|nnodes|rdzv|node|master))|one of the arguments"
        r"|ambiguous option|argument [^\n:]{1,60}: (?:invalid|expected|not allowed)|too few arguments)[^\n]{0,120})"
        r"|^Error: (?P<click>(?:No such option|Missing (?:option|argument|parameter)|Invalid value for"
        r"|Got unexpected extra argument|Option [^\n]{1,60} requires)[^\n]{0,120})"
        r"|^(?:Could not override|Cannot find primary config) '(?P<hydra>[^'\n]{1,80})'"
        r"|^FATAL Flags parsing error:(?P<absl>[^\n]{0,120})|(?P<tyro>Unrecognized options?: --[^\n]{1,80}?)(?: *[\u2502|])?$",
        says="refused its options[: {what}][: {argparse}][: {click}][: the configuration has no {hydra}][{absl}][: {tyro}]",
        fix="Give the script the options that it takes, after its name; torchrun's stand before it.",
        yields_to=("shell-error",),
        examples=(
            "train.py: error: the following arguments are required: --data",
            "torchrun: error: the following arguments are required: training_script, training_script_args",
            "train: error: argument --lr: invalid float value: 'auto'",
            "Error: No such option: --batchsize Did you mean --batch-size?",
            "Could not override 'trainer.devcies'.",
            "Cannot find primary config 'trian'. Check that it's in your config search path.",
            "FATAL Flags parsing error:",
        ),
    ),
    Failure(
        Known("DDP905", "hydra-target", Weight.CAUSE, "hydra"),
        r"^Error (?:in call to|instantiating/calling|locating) (?:target )?'(?P<target>[^'\n]{1,120})'",
        says="could not build {target} from its Hydra configuration",
        fix="The next line of the log names the exception; HYDRA_FULL_ERROR=1 shows where it was raised.",
        yields_to=("exception",),
        examples=("Error in call to target 'models.encoder.Encoder':",),
    ),
    Failure(
        Known("DDP305", "unused-parameters", Weight.CAUSE, "1.13, 2.6, 2.13; pytorch#83074"),
        r"Expected to have finished reduction in the prior iteration"
        r"(?![^\n]{0,160}training graph has changed)"
        + _WITHOUT
        + r"|LightningModule has parameters that were not used in producing the loss",
        says="has parameters that got no gradient in the last backward[: {names}][: number {indices}]",
        examples=(
            "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has parameters that were not used in producing loss.",
            "RuntimeError: It looks like your LightningModule has parameters that were not used in producing the loss returned by training_step.",
        ),
        fix="Use them in the loss, freeze them before DDP(...), or set "
        "find_unused_parameters=True; `ddpdoctor run` names them.",
    ),
    Failure(
        Known("DDP306", "static-graph", Weight.CAUSE, "1.13, 2.6, 2.13"),
        r"training graph has changed in this iteration",
        examples=(
            "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your training graph has changed in this iteration, e.g., one parameter is used in first iteration, but then got unused in the second i",
        ),
        says="used other parameters than in the first step, under static_graph=True",
        fix="Drop static_graph=True, or use the same parameters in every step.",
        page=Page(
            "The graph changed although `static_graph=True` is set.",
            "DDP's exception that the set of parameters with a gradient differs from that of the "
            "first iteration.",
            "With `static_graph=True`, DDP relies on the same parameters being used in every "
            "iteration.",
            "Remove `static_graph=True`. If a part is used only in some iterations, set "
            "`find_unused_parameters=True`.",
            "Wrong: `DDP(model, static_graph=True)` with a head that is used from epoch 2 on.\n"
            "Right: `DDP(model, find_unused_parameters=True)`, or use all heads from the first "
            "step on.",
            "While the graph stays the same.",
        ),
    ),
    Failure(
        Known("DDP323", "ready-twice", Weight.CAUSE, "1.13, 2.6, 2.13; pytorch#46166"),
        r"Expected to mark a variable ready only once",
        examples=(
            "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of a module parameter outside the `forward` function. Please make sure model parameters are not shared across multiple concurrent forward-ba",
        ),
        says="had a parameter's gradient ready twice in one backward",
        fix="Use checkpoint(..., use_reentrant=False); else a module that is used outside of "
        "forward(), or twice: then static_graph=True.",
        likely=True,
    ),
    Failure(
        Known("DDP304", "find-unused-in-vain", Weight.NOTE, "1.13, 2.6, 2.13"),
        r"find_unused_parameters=True was specified in DDP constructor, but did not find",
        says="looks for unused parameters in every step, and there are none",
        examples=(
            "[W reducer.cpp:1298] Warning: find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters in the forward pass.",
        ),
        fix="Drop find_unused_parameters=True: it walks the graph in every step.",
        severity=Severity.INFO,
    ),
    Failure(
        Known("DDP332", "gradient-strides", Weight.NOTE, "1.7 to 2.13"),
        r"Grad strides do not match bucket view strides",
        says="has gradients of another memory layout than DDP's buckets, and copies them in every step",
        severity=Severity.INFO,
        fix="Nothing is wrong. To save the copies: model.to(memory_format=torch.channels_last) before DDP, "
        "not after; a .contiguous() behind a transpose or a slice of a 1x1 convolution's input.",
        examples=(
            "[W reducer.cpp:320] Warning: Grad strides do not match bucket view strides. This is not an error, but may impair performance.",
        ),
        page=Page(
            "Gradients have another memory layout than DDP's buckets.",
            'torch\'s warning "Grad strides do not match bucket view strides".',
            "DDP copies each such gradient into its bucket and back. Results do not change.",
            "Choose the memory format before DDP is built, and keep it in forward.",
            "Wrong: `DDP(model)` and then `model.to(memory_format=torch.channels_last)`\n"
            "Right: `DDP(model.to(memory_format=torch.channels_last))`",
            "Where the layouts are equal.",
        ),
    ),
    Failure(
        Known("DDP707", "models-differ", Weight.CAUSE, "1.13, 2.6, 2.13"),
        r"DDP expects same model across all ranks(?:[^\n]{0,999}?Rank (?P<peer>\d+) has"
        r" (?P<many>\d+) params, while rank (?P<other>\d+) has inconsistent (?P<fewer>\d+))?"
        r"|appears not to match sizes of the same param in process",
        examples=(
            "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 4 params, while rank 1 has inconsistent 6 params.",
            "RuntimeError: [1]: params[0] in this process with sizes [5, 4] appears not to match sizes of the same param in process 0.",
        ),
        says="gave DDP another model than the other ranks[: rank {peer} has {many} parameters, "
        "rank {other} has {fewer}]",
        fix="Build the model from the same configuration on every rank; count classes and "
        "vocabularies in all of the data, or broadcast them.",
    ),
    Failure(
        Known("DDP803", "collectives-differ", Weight.SYMPTOM, "1.13, 2.6, 2.13; nccl#1417"),
        r"Detected mismatch between collectives|op\.preamble\.length <= op\.nbytes"
        r"|Received data size doesn't match expected size|Mismatched collective",
        examples=(
            "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=0, OpType=BROADCAST, TensorShape=[4], TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cpu, layout",
        ),
        says="was in another collective than its peers, or in one of another shape or dtype",
        fix="Find where the ranks part: an if on the rank, batches of unequal number or shape. "
        "`ddpdoctor run` names the lines.",
        page=Page(
            "Ranks call different collectives where they should call the same one.",
            "The n-th collective of a process group differs between ranks: in operation, tensor "
            "size, dtype, reduce operation (SUM or MAX) or root. The finding names the ranks that "
            "skipped a call, made an extra one, or differ from most; otherwise all ranks.",
            "Some of these hang, some fail with a message about sizes, and some go unnoticed: "
            "ranks that reduce with different operations all get wrong numbers, and nothing else "
            "checks that.",
            "Make the call the same on all ranks. If the operations differ, one rank usually made "
            "one call more or less, a few lines earlier.",
            "Wrong:\n"
            "    op = dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM\n"
            "    dist.all_reduce(x, op)\n"
            "Right:\n"
            "    dist.all_reduce(x, dist.ReduceOp.SUM)  # on every rank",
            "For the same call at different lines. For tensors of the same size and different "
            "shape. For `all_to_all`, and with NCCL `all_gather` and `reduce_scatter`, whose "
            "sizes may differ. If some calls are compiled and cannot be seen, and for collectives "
            "in other threads. If DDP401 or DDP109 is the cause.",
        ),
    ),
    Failure(
        Known("DDP206", "local-rank-option", Weight.CAUSE, "1.13, 2.6, 2.13; timm#1724"),
        r"(?<!torchrun: )error: unrecognized arguments: [^\n]{0,999}--local[-_]rank",
        examples=("train.py: error: unrecognized arguments: --local-rank=1",),
        says="does not know the option --local-rank that its launcher passes",
        fix="Start with torchrun, which sets LOCAL_RANK instead; or add_argument("
        '"--local-rank", "--local_rank", type=int).',
    ),
    Failure(
        Known("DDP943", "torchrun-too-old", Weight.CAUSE, "1.13"),
        r"torchrun: error: unrecognized arguments: [^\n]{0,999}--(?P<option>[\w]+-[\w-]+)",
        examples=("torchrun: error: unrecognized arguments: --nproc-per-node=8",),
        says="is a torchrun that does not know the option --{option}",
        fix="An older torch is first on this node's PATH: use the same environment on every node "
        "(`which torchrun`). torch before 2.0 spells options with underscores.",
        page=Page(
            "The torchrun on this node is too old.",
            "A torchrun that rejects one of its newer options.",
            "The node has another torch version than the others. Before 2.0, `--nproc-per-node` "
            "was `--nproc_per_node`.",
            "Use the same environment or image on every node. `python -m torch.distributed.run` "
            "uses the torch of that Python.",
            "Wrong: `/usr/bin/torchrun --nproc-per-node 8 train.py`, the system's torchrun.\n"
            "Right: `python -m torch.distributed.run --nproc-per-node 8 train.py`",
            "For options of the script.",
        ),
    ),
    Failure(
        Known("DDP208", "deprecated-launcher", Weight.NOTE, "1.13, 2.6, 2.13"),
        r"torch\.distributed\.launch is deprecated",
        says="is started by torch.distributed.launch, which is deprecated",
        examples=("FutureWarning: The module torch.distributed.launch is deprecated",),
        fix="Use torchrun; read LOCAL_RANK from the environment.",
        page=Page(
            "The job is started with a deprecated launcher.",
            "The deprecation warning of `torch.distributed.launch`.",
            "It passes `--local-rank` to the script (`--local_rank` before torch 2), which "
            "torchrun does not, and it will be removed.",
            "Use `torchrun`, and read LOCAL_RANK from the environment.",
            "Wrong: `python -m torch.distributed.launch --nproc_per_node 8 train.py`\n"
            "Right: `torchrun --nproc-per-node 8 train.py`",
            "With torchrun.",
        ),
        severity=Severity.INFO,
    ),
    Failure(
        Known("DDP001", "environment-missing", Weight.CAUSE, "1.13, 2.6, 2.13"),
        r"rendezvous: environment variable (?P<name>\w+) expected, but not set"
        r"|(?m:^KeyError: '?(?P<key>(?:LOCAL_|GROUP_|NODE_|ROLE_)?RANK|(?:LOCAL_)?WORLD_SIZE|MASTER_(?:ADDR|PORT)"
        r"|(?:SLURM|OMPI_COMM_WORLD|PMIX?|MV2_COMM_WORLD)_\w+)(?!\w))",
        examples=(
            "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set",
            "KeyError: 'LOCAL_RANK'",
        ),
        says="was not started by a launcher that sets [{name}][{key}]",
        fix="Start it with torchrun (or ddpdoctor run), or let the script do without a process "
        "group when it runs alone.",
        page=Page(
            "The variables that place a process in the job are incomplete or contradict each "
            "other.",
            "RANK, WORLD_SIZE, LOCAL_RANK or MASTER_PORT that is not a number or is out of range. "
            "RANK without WORLD_SIZE, or without MASTER_ADDR and MASTER_PORT. A RANK that differs "
            "from the one set by Slurm or MPI. Several Slurm tasks on a node that would each "
            "start torchrun. A job of several nodes whose rendezvous is on localhost or is not "
            "set.",
            "`init_process_group` raises, or waits for ranks that never come. In a batch script, "
            "`export RANK=$SLURM_PROCID` gives every task rank 0, and all of them wait until the "
            "timeout. With a rendezvous on localhost, each node waits for itself.",
            "Let the launcher set the variables, or read all of them from the launcher inside the "
            "task.",
            "Wrong:\n"
            "    export RANK=$SLURM_PROCID; srun python train.py\n"
            "Right:\n"
            "    srun bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS python train.py'",
            "If none of these variables is set, if torchrun set them, or if only MASTER_ADDR and "
            "MASTER_PORT are set, as batch scripts do. If several nodes are checked, DDP050 tests "
            "the rendezvous.",
        ),
    ),
    Failure(
        Known("DDP001", "ranks-alike", Weight.GENERIC, "NCCL bootstrap.cc"),
        r"rank (?P<rank>\d+) of (?P<all>\d+) ranks has already checked in|mismatch in rank count from procs",
        says="came to NCCL twice: two processes have the same rank",
        fix="Each node needs its own --node-rank, and each task of srun its own RANK (SLURM_PROCID inside "
        "of the task); see for a second copy of the job that uses the same MASTER_ADDR and MASTER_PORT.",
        examples=(
            "node1:41:88 [0] bootstrap.cc:140 NCCL WARN Bootstrap Root : rank 1 of 8 ranks has already checked in",
        ),
    ),
    Failure(
        Known("DDP213", "used-before-init", Weight.CAUSE, "1.13, 2.6, 2.13"),
        r"Default process group has not been initialized",
        examples=(
            "ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
        ),
        says="used torch.distributed before init_process_group",
        yields_to=("port-in-use-logged", "port-in-use"),
        fix="Call init_process_group() first; DDP, DistributedSampler and get_rank() need it.",
        page=Page(
            "torch.distributed is used before it is initialized.",
            'The exception "Default process group has not been initialized".',
            "DDP, DistributedSampler and every collective need the process group.",
            "Call `dist.init_process_group()` at the beginning of the script.",
            "Wrong:\n"
            "    sampler = DistributedSampler(data)\n"
            '    dist.init_process_group("nccl")\n'
            "Right:\n"
            '    dist.init_process_group("nccl")\n'
            "    sampler = DistributedSampler(data)",
            "If the script checks `dist.is_initialized()` first.",
        ),
    ),
    Failure(
        Known("DDP942", "initialized-twice", Weight.CAUSE, "2.13"),
        r"trying to initialize the default process group twice",
        examples=("ValueError: trying to initialize the default process group twice!",),
        says="called init_process_group a second time",
        fix="A framework has done it already: `if not dist.is_initialized():` around the call.",
        page=Page(
            "The process group is initialized twice.",
            "torch's exception at the second `init_process_group`.",
            "Lightning, Accelerate and other frameworks call it themselves.",
            "Leave it to the framework, or check `dist.is_initialized()` first.",
            "Wrong:\n"
            '    trainer = Trainer(strategy="ddp")  # calls it as well\n'
            '    dist.init_process_group("nccl")\n'
            "Right:\n"
            "    if not dist.is_initialized():\n"
            '        dist.init_process_group("nccl")',
            "After `destroy_process_group()`.",
        ),
    ),
    Failure(
        Known("DDP211", "no-main-guard", Weight.CAUSE, "any"),
        r"start a new process before the",
        examples=(
            "RuntimeError:\n        An attempt has been made to start a new process before the\n        current process has finished its bootstrapping phase.\n        This probably means that you are not using fork to start your\n        child processes and you have forgotten ",
        ),
        says="starts processes when it is imported: the main guard is missing",
        fix='Put the start into `if __name__ == "__main__":`.',
        page=Page(
            "Processes are started without a main guard.",
            "multiprocessing's exception that a process was started before the current one "
            "finished its bootstrapping phase.",
            "A spawned process imports the script again, and would start more processes.",
            'Put everything that starts processes under `if __name__ == "__main__":`.',
            "Wrong:\n"
            "    mp.spawn(main, nprocs=8)\n"
            "Right:\n"
            '    if __name__ == "__main__":\n'
            "        mp.spawn(main, nprocs=8)",
            "With the fork start method.",
        ),
    ),
    Failure(
        Known("DDP212", "unpicklable", Weight.CAUSE, "any"),
        r"(?:AttributeError|TypeError|PicklingError): (?:[^\n]{0,999}: )?"
        r"(?:Can't (?:pickle|get) local object|[Cc]an(?:no|')t pickle) ?(?P<what>[^\n]{0,60})",
        # Copied or saved objects stay in their process.
        unless=r"[/\\]copy\.py\"|torch[/\\]serialization\.py|pickle\.dumps?\(",
        examples=("AttributeError: Can't pickle local object 'main.<locals>.<lambda>'",),
        says="could not send[ {what}] to another process: it cannot be pickled",
        fix="Use functions and classes of the module's top level; no lambdas, open files, locks or "
        "generators in a dataset or in the arguments of spawn.",
        page=Page(
            "An object that is sent to another process cannot be pickled.",
            "The exceptions of pickle when processes are started with spawn, or when an object is "
            "sent in a collective.",
            "Lambdas, nested functions, locks, open files and generators cannot be pickled.",
            "Use functions at the top level of a module, or `functools.partial`. Open files in "
            "the worker.",
            "Wrong: `DataLoader(data, num_workers=4, collate_fn=lambda batch: batch)`\n"
            "Right: `DataLoader(data, num_workers=4, collate_fn=keep)`, where `def keep(batch): "
            "return batch` is at the top level of a module.",
            "With forked workers, which inherit all objects.",
        ),
    ),
)


# -- Checkpoints


CHECKPOINTS = (
    Failure(
        Known("DDP901", "checkpoint-elsewhere", Weight.CONSEQUENCE, "2.13"),
        r"CheckpointException: CheckpointException ranks:dict_keys\(\[\d",
        examples=(
            "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([0, 1, 6])",
        ),
        says="was stopped by a distributed checkpoint that another rank could not save or load",
        fix="Look for what that rank raised: torch prints it behind this line, as (RANK n).",
    ),
    Failure(
        Known("DDP502", "wrapper-prefix", Weight.CAUSE, "any"),
        r'(?:Missing|Unexpected) key\(s\) in state_dict: "module\.',
        examples=(
            'RuntimeError: Error(s) in loading state_dict for Two:\n\tMissing key(s) in state_dict: "a.weight", "a.bias", "b.weight", "b.bias".\n\tUnexpected key(s) in state_dict: "module.a.weight", "module.a.bias", "module.b.weight", "module.b.bias".',
        ),
        says='could not load a checkpoint: the names differ by the wrapper\'s prefix "module."',
        fix="Save model.module.state_dict(), and load it before the wrap or into model.module.",
    ),
    Failure(
        Known("DDP503", "no-map-location", Weight.CAUSE, "1.13, 2.6, 2.13; pytorch#23138"),
        r"Attempting to deserialize object on (?:a )?CUDA device"
        r"(?: (?P<device>\d+))?(?: but torch\.cuda\.(?:is_available\(\) is False"
        r"|device_count\(\) is (?P<count>\d+)))?",
        examples=(
            "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False. If you are running on a CPU-only machine, please use torch.load with map_location=torch.device('cpu') to map your storages to the CPU.",
        ),
        says="loads a checkpoint onto the GPU that it was saved from[ ({device})], which is not "
        "here",
        fix='torch.load(path, map_location="cpu"), then move the model.',
    ),
    Failure(
        Known("DDP945", "checkpoint-damaged", Weight.CAUSE, "1.13, 2.6, 2.13"),
        r"PytorchStreamReader failed (?:reading|locating)|in the legacy \.tar format"
        r"|not a ZIP archive|unexpected EOF, expected \d+ more bytes"
        r"|Weights only load failed[\s\S]{0,9999}?(?:Unsupported operand \d|invalid load key"
        r"|Ran out of input|persistent_load)",
        examples=(
            "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        ),
        says="could not read a checkpoint: the file is damaged",
        fix="It was cut short, or several ranks wrote it at once. Do not set weights_only=False; "
        "save on rank 0 alone to a temporary name, os.replace, then a barrier.",
        page=Page(
            "A checkpoint file is damaged.",
            'torch\'s errors about an incomplete archive: "failed reading zip archive", "legacy '
            '.tar format", "not a ZIP archive".',
            "A job was stopped while it wrote the file, the disk was full, or all ranks wrote to "
            "one path. torch's advice (`weights_only=False`) is wrong here, and unsafe.",
            "Load an older checkpoint. Save on rank 0 only, to a temporary name, then rename it "
            "and call a barrier.",
            "Wrong:\n"
            '    torch.save(state, "last.pt")  # on every rank\n'
            "Right:\n"
            "    if dist.get_rank() == 0:\n"
            '        torch.save(state, "last.tmp")\n'
            '        os.replace("last.tmp", "last.pt")\n'
            "    dist.barrier()",
            "If the file really has an old format and is complete.",
        ),
    ),
    Failure(
        Known("DDP945", "checkpoint-cut", Weight.CAUSE, "2.13"),
        r"OSError: \[Errno 22\] Invalid argument|EOFError(?:: Ran out of input|\Z)"
        r"|UnpicklingError: (?:invalid load key|pickle data was truncated)",
        within=r"torch[/\\]serialization\.py",
        examples=(
            'Traceback (most recent call last):\n  File "/opt/lib/python3.11/site-packages/torch/serialization.py", line 7, in call\n    call()\nOSError: [Errno 22] Invalid argument',
            'Traceback (most recent call last):\n  File "/opt/lib/python3.11/site-packages/torch/serialization.py", line 7, in call\n    call()\nEOFError: Ran out of input',
            'Traceback (most recent call last):\n  File "/opt/lib/python3.11/site-packages/torch/serialization.py", line 7, in call\n    call()\nEOFError',
        ),
        says="could not read a checkpoint: the file is cut short, or is none",
        fix="A job was stopped while it wrote, the disk was full, or several ranks wrote it at "
        "once: load an older one. Save on rank 0 alone to a temporary name, then os.replace.",
    ),
    Failure(
        Known("DDP944", "weights-only", Weight.CAUSE, "2.6, 2.13"),
        r"Weights only load failed"
        r"(?:[^\n]{0,999}?Unsupported (?:global|class):? (?P<what>\S+))?",
        examples=(
            "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded.\n\tWeightsUnpickler error: Unsupported global: GLOBAL argparse.Namespace was not an allowed global by default.",
        ),
        says="may not unpickle[ {what} from] a checkpoint: torch.load reads weights only since 2.6",
        fix="For a file that you trust: torch.serialization.add_safe_globals([...]) or "
        "weights_only=False; better, save plain state_dicts.",
        page=Page(
            "A checkpoint contains more than weights.",
            '"Weights only load failed".',
            "Since torch 2.6, `torch.load` refuses arbitrary pickled objects, which can run code.",
            "Save state dicts and plain data. For files that you trust, use `add_safe_globals`, "
            "or `weights_only=False`.",
            'Wrong: `torch.save({"args": args}, path)` with an `argparse.Namespace`.\n'
            'Right: `torch.save({"args": vars(args)}, path)`',
            "If the file is damaged, or several ranks wrote it at once (DDP945, DDP501): then "
            "torch's advice to load it unsafely is wrong.",
        ),
    ),
)
