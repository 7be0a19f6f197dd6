"""Failures of saving and loading checkpoints."""

from __future__ import annotations

from ddpdoctor.failures.model import Failure, Known, Page, Weight

FAILURES = (
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
