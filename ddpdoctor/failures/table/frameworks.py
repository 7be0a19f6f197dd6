"""Failures of FSDP, DeepSpeed, Lightning, Accelerate, the Hugging Face Trainer, and autograd."""

from __future__ import annotations

from ddpdoctor.failures.entry import Failure, Known, Page, Weight

FRAMEWORKS = (
    Failure(
        Known("DDP938", "changed-in-place", Weight.CAUSE, "1.7 to 2.13; pytorch#22095"),
        r"modified by an inplace operation",
        says="changed a tensor in place that the backward pass still needs",
        fix="Under DDP with several forwards before a backward, in which BatchNorm's buffers are "
        "overwritten: one forward, or forward_sync_buffers=False (before torch 2.13 "
        "broadcast_buffers=False). Else torch.autograd.set_detect_anomaly(True).",
        examples=(
            "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation: [torch.cuda.FloatTensor [64]] is at version 4; expected version 3 instead.",
        ),
        page=Page(
            "A tensor that the backward pass needs was changed in place.",
            "autograd's exception about an in-place operation.",
            "DDP writes rank 0's buffers into the model at each forward. With two forwards before a "
            "backward (a GAN, a siamese net), BatchNorm's saved statistics are overwritten.",
            "`DDP(model, forward_sync_buffers=False)` (before torch 2.13 `broadcast_buffers=False`), "
            "SyncBatchNorm, or one forward on the concatenated batch. Without DDP in the traceback: replace `x += y` by `x = x + y`.",
            "Wrong: `loss(ddp(a), ddp(b)).backward()` with BatchNorm.\n"
            "Right: `DDP(model, forward_sync_buffers=False)`",
            "While nothing is changed in place.",
        ),
    ),
    Failure(
        Known("DDP940", "graph-twice", Weight.CAUSE, "1.7 to 2.13"),
        r"Trying to backward through the graph a second time|element 0 of tensors does not require grad",
        says="called backward() on a graph that is gone, or that needs no gradient",
        fix="One backward per forward: detach what is kept between steps (hidden states, losses); "
        "with activation checkpointing use_reentrant=False, or inputs that require gradients.",
        examples=(
            "RuntimeError: Trying to backward through the graph a second time (or directly access saved tensors after they have already been freed).",
            "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
        ),
        page=Page(
            "backward() has no graph to go through.",
            "autograd's exceptions about a second backward and about a loss without a graph.",
            "A tensor kept from the last step drags its graph along; or all parameters are frozen, "
            "as with reentrant checkpointing and adapters.",
            "Detach what is kept; `model.enable_input_require_grads()`, or "
            '`gradient_checkpointing_kwargs={"use_reentrant": False}`.',
            "Wrong: `hidden = model(x, hidden)` over several steps.\n"
            "Right: `hidden = model(x, hidden.detach())`",
            "With `retain_graph=True` where it is meant.",
        ),
    ),
    Failure(
        Known("DDP941", "devices-differ", Weight.CAUSE, "1.7 to 2.13"),
        r"Expected all tensors to be on the same device|device_ids and output_device arguments only work"
        r"|Input type \(torch\.cuda\.\w+\) and weight type \(torch\.\w+\)|module must have its parameters and "
        r"buffers on device|No backend type associated with device type (?P<type>\w+)|Tensors must be CUDA and dense"
        r"|found at least two devices, (?P<one>[\w:]+) and (?P<two>[\w:]+)",
        says="mixed devices: tensors or parameters are not where they should be",
        fix="torch.cuda.set_device(local_rank), model.to(local_rank) before the wrap, "
        "device_ids=[local_rank], batch.to(local_rank); no 'cuda:0' anywhere. NCCL needs GPU tensors.",
        examples=(
            "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cuda:1!",
            "RuntimeError: Tensors must be CUDA and dense",
        ),
        page=Page(
            "Tensors are on different devices.",
            "torch's exceptions about tensors or parameters on another device than expected.",
            'A rank uses `cuda:0`, or `device_map="auto"` spread the model over all GPUs.',
            "Each rank uses its own GPU: `local_rank`. No `device_map` under DDP and FSDP.",
            'Wrong: `x.to("cuda:0")` on every rank.\nRight: `x.to(local_rank)`',
            "With model parallelism inside a rank, as long as it works.",
        ),
    ),
    Failure(
        Known("DDP957", "dtypes-differ", Weight.CAUSE, "1.7 to 2.13"),
        r"[Ee]xpected (?:scalar type|m1 and m2 to have the same dtype|[^\n]{0,60}same dtype)|mat1 and mat2 must have the "
        r"same dtype|Attempting to unscale FP16 gradients|Found dtype (?P<one>\w+) but expected (?P<two>\w+)"
        r"|Input type \([\w.]+\) and bias type|not implemented for 'Half'",
        says="mixed dtypes: half and full precision meet in one operation",
        fix="Keep the weights in float32 and run the forward under torch.autocast, or cast the model "
        "and its inputs to one dtype; with fp16 and a GradScaler the parameters stay float32.",
        examples=(
            "RuntimeError: expected scalar type Half but found Float",
            "ValueError: Attempting to unscale FP16 gradients.",
        ),
        page=Page(
            "Tensors of different dtypes meet in one operation.",
            'torch\'s "expected scalar type", "must have the same dtype", and the GradScaler\'s '
            '"Attempting to unscale FP16 gradients".',
            "Parts of the model were loaded or cast in half precision, others not.",
            "Load in float32 and use autocast, or cast everything to bfloat16.",
            "Wrong: `model.half()` and `GradScaler`.\nRight: `torch.autocast` and float32 weights.",
            "Inside autocast, which casts by itself.",
        ),
    ),
    Failure(
        Known("DDP939", "fsdp", Weight.CAUSE, "1.12 to 2.13"),
        r"Must flatten tensors with (?:uniform|the same) (?P<what>\w+)|Cannot writeback when the parameter shape"
        r"|FlatParameter|_flat_param|but its data is not allocated yet|Expects? (?:the )?storage to be allocated"
        r"|Could not find the transformer (?:layer )?class|`?FSDP`? requires (?!PyTorch)|FSDP expects|FullyShardedDataParallel[^\n]{0,200}(?:must|require|support)"
        r"|mixed torch\.Tensor and DTensor|ShardedTensor[^\n]{0,99}(?:mismatch|not)|Manual wrapping|_is_root should not",
        says="uses FSDP in a way that it refuses[: {what} differs within one unit]",
        fix="One dtype and one requires_grad in each unit (cast before the wrap; use_orig_params=True "
        "for frozen parts); outside of forward: summon_full_params; state dicts on all ranks, in the "
        "form in which they were saved.",
        examples=(
            "ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32",
        ),
        page=Page(
            "FSDP refuses the model or the call.",
            "Exceptions about uniform dtype or requires_grad, flat parameters, storage that is not "
            "allocated, state dicts, and the wrap policy.",
            "FSDP flattens the parameters of a unit into one tensor, of which each rank holds a part. "
            "Outside of forward and backward the rest is not there.",
            "Cast before the wrap. Freeze whole units, or `use_orig_params=True`. Save and load "
            "by `torch.distributed.checkpoint.state_dict`, on all ranks.",
            "Wrong: a LoRA adapter in float32 within a bfloat16 unit.\n"
            "Right: all of the unit in one dtype.",
            "For out of memory (DDP928) and lost peers (DDP907).",
        ),
    ),
    Failure(
        Known("DDP939", "sharded-weight-used", Weight.CAUSE, "ZeRO-3, FSDP"),
        r"'weight' must be 2-D|size mismatch for [^\n]{0,200}torch\.Size\(\[0\]\)|shape torch\.Size\(\[0\]\)",
        says="uses a sharded parameter as if it were whole",
        fix="ZeRO-3: deepspeed.zero.GatheredParameters around it, and save by save_16bit_model; FSDP: "
        "call forward of the wrapped module, or summon_full_params.",
        examples=("RuntimeError: 'weight' must be 2-D",),
    ),
    Failure(
        Known("DDP962", "wrapper-has-no-attribute", Weight.CAUSE, "1.7 to 2.13"),
        r"'(?:DistributedDataParallel|FullyShardedDataParallel|DataParallel|DeepSpeedEngine)' object has no attribute '(?P<name>\w+)'",
        says="asks the wrapper for {name}, which its module has",
        fix="Use model.module.{name}; in code that also runs without DDP: getattr(model, 'module', "
        "model).",
        examples=("AttributeError: 'DistributedDataParallel' object has no attribute 'generate'",),
        page=Page(
            "The wrapper is asked for an attribute of its module.",
            "AttributeErrors of DistributedDataParallel, FSDP and DeepSpeed's engine.",
            "The wrapper passes on `forward` alone; methods and attributes are the module's.",
            "`model.module.name`, or keep the module beside the wrapper.",
            "Wrong: `ddp.generate(ids)`\nRight: `ddp.module.generate(ids)`",
            "For attributes that the module does not have either.",
        ),
    ),
    Failure(
        Known("DDP963", "nothing-to-train", Weight.CAUSE, "1.7 to 2.13"),
        r"DistributedDataParallel is not needed when a module|Modules with uninitialized parameters can't be used",
        says="wraps a model in DDP that has no parameters to train yet",
        fix="Do not wrap modules whose parameters are all frozen; run lazy modules once before the "
        "wrap.",
        examples=(
            "RuntimeError: DistributedDataParallel is not needed when a module doesn't have any parameters that require a gradient.",
        ),
        page=Page(
            "DDP wraps a model without parameters to train.",
            "DDP's exceptions about modules without gradients, or with lazy parameters.",
            "There is nothing to reduce, or not yet.",
            "Do not wrap frozen modules; run a lazy module once before the wrap.",
            "Wrong: `DDP(frozen_teacher)`\nRight: `teacher = frozen_teacher.to(device).eval()`",
            "If any parameter requires a gradient.",
        ),
    ),
    Failure(
        Known("DDP953", "loss-scale", Weight.CAUSE, "DeepSpeed, fairseq, apex"),
        r"loss scale already at minimum|Minimum loss scale reached|Loss scale is 0",
        says="lowered the loss scale to its minimum: gradients overflow in every step",
        fix="Use bf16 if the GPU can; else a lower learning rate, gradient clipping, and see from which "
        "step on the loss is NaN.",
        examples=(
            "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
        ),
        page=Page(
            "The loss scale reached its minimum.",
            "DeepSpeed's and fairseq's exception about it.",
            "Every step overflows: the model has diverged, or fp16 cannot hold its numbers.",
            "bf16, a lower learning rate, warm-up, clipping. Check the data of the first bad step.",
            'Wrong: `"fp16": {"enabled": true}` for a model trained in bf16.\n'
            'Right: `"bf16": {"enabled": true}`',
            "For single steps that are skipped.",
        ),
    ),
    Failure(
        Known("DDP954", "extension-build", Weight.CAUSE, "DeepSpeed, apex, torch"),
        r"Error building extension '(?P<name>\w+)'|CUDA_HOME environment variable is not set|CUDA_HOME does not exist"
        r"|Ninja is required to load|Installed CUDA version [\d.]+ does not match|MissingCUDAException|CUDAMismatchException"
        r"|detected CUDA version \([\d.]+\) mismatches|OpBuilderError|Unable to JIT load",
        says="could not build an extension[ ({name})]",
        # DeepSpeed says that it continues.
        unless="accepting this combination",
        fix="Install a CUDA toolkit of torch's CUDA version (CUDA_HOME, nvcc, ninja, gcc) in the "
        "environment of the job, or build it before (DS_BUILD_OPS=1).",
        examples=(
            "deepspeed.ops.op_builder.builder.MissingCUDAException: CUDA_HOME does not exist, unable to compile CUDA op(s)",
            "RuntimeError: Error building extension 'cpu_adam'",
        ),
        page=Page(
            "A CUDA or C++ extension could not be built when the job started.",
            "torch's and DeepSpeed's exceptions about CUDA_HOME, ninja, nvcc, and the versions.",
            "Extensions are compiled at first use, by every rank, with what the node has.",
            "Install the toolkit of the CUDA version that torch has, or build the wheel before the job.",
            "Wrong: nvcc 11.8 with a torch for CUDA 12.4.\n"
            "Right: `conda install cuda-nvcc=12.4`, or `DS_BUILD_CPU_ADAM=1 pip install deepspeed`",
            "If the extension was built before.",
        ),
    ),
    Failure(
        Known("DDP955", "batch-arithmetic", Weight.CAUSE, "DeepSpeed, Megatron"),
        r"Check batch related parameters|train_batch_size is not equal to|(?:global )?batch size \(?\d+\)? (?:is )?not divisible"
        r"|world_size is not divisible|is not divisible by (?:tensor|data|pipeline|world)",
        says="has batch or group sizes that do not fit the number of ranks",
        fix="train_batch_size = micro batch per GPU x gradient accumulation x ranks; leave one of them "
        'to the framework ("auto").',
        examples=(
            "AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 256 != 4 * 8 * 1",
        ),
        page=Page(
            "Batch sizes or group sizes do not fit the world size.",
            "DeepSpeed's and Megatron's assertions about batch sizes and parallel sizes.",
            "The configuration was written for another number of GPUs, or the world size is 1 since "
            "the launcher was not used.",
            "Compute the one from the others. A world size of 1 in the message: start it with the "
            "launcher.",
            'Wrong: `"train_batch_size": 256` on any number of GPUs.\n'
            'Right: `"train_batch_size": "auto"`',
            "If the sizes fit.",
        ),
    ),
    Failure(
        Known("DDP902", "ray-worker-died", Weight.GENERIC, "Ray 2"),
        r"ray\.exceptions\.(?:RayActorError|ActorDiedError|ActorUnavailableError|WorkerCrashedError|NodeDiedError)"
        r"|worker died or was killed (?:while executing a task )?by an unexpected system error",
        yields_to=("raylet-out-of-memory",),
        says="lost a Ray worker, which died without an exception",
        fix="Mostly the out-of-memory killer: see `dmesg`, /tmp/ray/session_latest/logs (the worker's "
        ".err file, raylet.out), and `ray status` for a node that went away.",
        examples=(
            "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        ),
    ),
    Failure(
        Known("DDP902", "ray-task-failed", Weight.WRAPPER, "Ray 2"),
        r"^ray\.exceptions\.RayTaskError(?:\((?P<what>\w+)\))?: ray::",
        says="failed in a Ray task[ with {what}]",
        fix="The exception of the task stands below it, or in the worker's own log under "
        "/tmp/ray/session_latest/logs.",
        examples=("ray.exceptions.RayTaskError(ValueError): ray::train() (pid=4711, ip=10.0.0.4)",),
    ),
    Failure(
        Known("DDP901", "ray-import", Weight.GENERIC, "Ray 2"),
        r"The actor with name \S+ failed to import on the worker",
        says="could not import its code in a Ray worker",
        fix="See the exception in it: give the worker the same environment (runtime_env).",
        examples=(
            "RuntimeError: The actor with name Trainer failed to import on the worker. This may be because needed library dependencies are not installed in the worker environment:",
        ),
    ),
    Failure(
        Known("DDP958", "consumer-gpu-links", Weight.CAUSE, "Accelerate"),
        r"RTX 4000 series doesn't support faster communication",
        says="has GPUs without P2P, which Accelerate does not start on by itself",
        fix="export NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1, or start with accelerate launch.",
        examples=(
            'NotImplementedError: Using RTX 4000 series doesn\'t support faster communication broadband via P2P or IB. Please set `NCCL_P2P_DISABLE="1"` and `NCCL_IB_DISABLE="1"`',
        ),
        page=Page(
            "The GPUs cannot talk to each other directly.",
            "Accelerate's refusal to start on consumer GPUs without P2P.",
            "NCCL may hang when it tries P2P on them.",
            "Set NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1.",
            "Wrong: `python train.py` on two RTX 4090.\nRight: `accelerate launch train.py`",
            "On GPUs with P2P.",
        ),
    ),
    Failure(
        Known("DDP959", "data-of-unequal-shape", Weight.CAUSE, "1.7 to 2.13"),
        r"stack expects each tensor to be equal size|Sizes of tensors must match except in dimension"
        r"|mat1 and mat2 shapes cannot be multiplied \((?P<shapes>[^)\n]{1,40})\)|Expected more than 1 value per channel when training"
        r"|Expected input batch_size \(\d+\) to match target|The size of tensor a \(\d+\) must match the size of tensor b"
        r"|size mismatch for (?P<name>[\w.]{1,80})",
        says="got data or weights whose shapes do not fit[: {shapes}][: {name}]",
        fix="If it is the last batch: drop_last=True. If a checkpoint: the configuration it was saved "
        "with. Else print the shapes on the rank and line that are named.",
        examples=(
            "RuntimeError: stack expects each tensor to be equal size, but got [3, 224, 224] at entry 0 and [1, 224, 224] at entry 3",
            "ValueError: Expected more than 1 value per channel when training, got input size torch.Size([1, 256, 1, 1])",
        ),
        page=Page(
            "Shapes do not fit.",
            "torch's exceptions about tensors, batches and weights of other shapes than expected.",
            "Often one odd sample or the last, shorter batch, so that a single rank fails and all "
            "end.",
            "`drop_last=True`, a collate function that pads, a check where the data is loaded.",
            "Wrong: BatchNorm with a last batch of one sample.\n"
            "Right: `DataLoader(data, batch_size=64, drop_last=True)`",
            "For shapes that differ between ranks in a collective (DDP803).",
        ),
    ),
)
