"""Failures of GPUs and of the CUDA libraries."""

from __future__ import annotations

from ddpdoctor.failures.model import Failure, Known, Page, Weight

_BLOCKING = (
    "CUDA reports it late: run again with CUDA_LAUNCH_BLOCKING=1 to get the line that brought it "
    "about. Then compute-sanitizer, or the same step on the CPU."
)

FAILURES = (
    Failure(
        Known("DDP929", "device-side-assert", Weight.CAUSE, "1.7 to 2.13"),
        r"device-side assert triggered",
        says="failed an assertion on its GPU: mostly an index out of range",
        fix="Look above for `Assertion ... failed`; labels have to be in 0..classes-1, token ids "
        "below the embedding's size. CUDA_LAUNCH_BLOCKING=1 names the line, the CPU the index.",
        examples=("RuntimeError: CUDA error: device-side assert triggered",),
        page=Page(
            "An assertion failed in a CUDA kernel.",
            "CUDA's \"device-side assert triggered\", also where NCCL's watchdog reports it.",
            "Usually an index is out of range: a label, a token id, a position. The error shows at "
            "a later call, often in NCCL, and no CUDA call works in that process any more.",
            "Run with `CUDA_LAUNCH_BLOCKING=1`, or the failing batch on the CPU, whose exception "
            "names the index.",
            "Wrong: `CrossEntropyLoss` with label 10 and 10 classes.\n"
            "Right: labels from 0 to 9, checked where the data is loaded.",
            "For other CUDA errors (DDP930).",
        ),
    ),
    Failure(
        Known(
            "DDP929",
            "index-out-of-bounds",
            Weight.CAUSE,
            "1.7 to 2.13",
        ),
        r"\.cuh?:\d+: [^\n]{0,400}Assertion [`'](?P<what>[^\n]{0,200}?)['`]? failed",
        says="failed an assertion on its GPU: {what}",
        fix="Mostly an index out of range: labels have to be in 0..classes-1, token ids below the "
        "embedding's size.",
        examples=(
            "../aten/src/ATen/native/cuda/Indexing.cu:1146: indexSelectLargeIndex: block: [56,0,0], thread: [64,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
        ),
    ),
    Failure(
        Known("DDP930", "illegal-memory-access", Weight.CAUSE, "1.7 to 2.13; nccl#1012"),
        r"an illegal memory access was encountered|CUDA error: (?:misaligned address"
        r"|unspecified launch failure|an illegal instruction was encountered|invalid address space)"
        r"|Cuda failure '?(?:unspecified launch failure|an illegal)",
        says="had a CUDA kernel access memory that is not its own",
        fix=_BLOCKING + " Suspect custom and fused kernels, and versions that do not fit; if the "
        "same GPU fails each time, the GPU.",
        examples=(
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            "[E ProcessGroupNCCL.cpp:915] [Rank 3] NCCL watchdog thread terminated with exception: CUDA error: unspecified launch failure",
        ),
        page=Page(
            "A CUDA kernel crashed.",
            'CUDA\'s "an illegal memory access was encountered", "misaligned address", '
            '"unspecified launch failure", also where NCCL\'s watchdog reports it.',
            "A kernel read or wrote outside of its memory. The error shows at a later call, often "
            "in NCCL, which has no part in it.",
            "Run with `CUDA_LAUNCH_BLOCKING=1`. Switch off custom or fused kernels one by one. "
            "Check `dmesg | grep -i xid`: a GPU that fails alone may be broken.",
            "Wrong: searching the fault in NCCL because its watchdog prints it.\n"
            "Right: `CUDA_LAUNCH_BLOCKING=1 torchrun train.py`",
            "For assertions (DDP929) and memory that has errors (DDP933).",
        ),
    ),
    Failure(
        Known("DDP933", "gpu-broken", Weight.CAUSE, "any; NVIDIA's Xid list"),
        r"uncorrectable (?:ECC|NVLink) error|GPU has fallen off the bus|NVRM: Xid[^\n:]*: (?P<xid>\d+)"
        r"|[Nn]vlink error|hardware error|CUDA_ERROR_(?:ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE)"
        r"|\bXid (?:\([^)]*\): )?(?P<number>\d+)|Unable to determine the device handle for GPU"
        r"|row remapp(?:ing|er) failure",
        says="has a GPU that reports a fault of the hardware[: Xid {xid}][: Xid {number}]",
        fix="`nvidia-smi -q -d ECC,ROW_REMAPPER` and `dmesg | grep -i xid` on that node: drain it, "
        "reset the GPU, and have it replaced if it happens again.",
        examples=(
            "RuntimeError: CUDA error: uncorrectable ECC error encountered",
            "[E ProcessGroupNCCL.cpp:1182] [Rank 5] NCCL watchdog thread terminated with exception: CUDA error: uncorrectable NVLink error detected during the execution",
            "NVRM: Xid (PCI:0000:8b:00): 79, pid=1, GPU has fallen off the bus.",
        ),
        page=Page(
            "A GPU or its link is broken.",
            "An uncorrectable error of memory (ECC) or NVLink, an Xid, a GPU that fell off the bus.",
            "It is the machine's fault, not the script's; the other ranks only lose a peer.",
            "Take the node out of the job. Look at `dmesg | grep -i xid` and `nvidia-smi -q`, reset "
            "the GPU, and report it if it comes back.",
            "Wrong: starting again on the same node.\nRight: `--exclude=NODE`, or a drained node.",
            "For Xid 13, 31 and 43, which are usually the script's kernels (DDP930).",
        ),
    ),
    Failure(
        Known("DDP928", "gpu-memory-elsewhere", Weight.CAUSE, "1.7 to 2.13"),
        r"CUBLAS_STATUS_ALLOC_FAILED|Cuda failure (?:2 )?'out of memory'|Triton Error \[CUDA\]: out of"
        r"|Unable to find a valid cuDNN algorithm|Failed to CUDA calloc"
        r"|CUDA_ERROR_OUT_OF_MEMORY|CUDA driver error: out of memory",
        says="ran out of GPU memory, in a library that takes its own",
        fix="Leave room beside torch's own memory: a smaller batch, expandable segments "
        "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True), and see who else uses the GPU.",
        examples=(
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "node1:77:77 [0] include/alloc.h:48 NCCL WARN Cuda failure 'out of memory'",
        ),
    ),
    Failure(
        Known("DDP947", "cuda-library", Weight.GENERIC, "1.7 to 2.13"),
        r"CUBLAS_STATUS_(?!ALLOC_FAILED)(?P<cublas>\w+)|CUDNN_STATUS_(?P<cudnn>\w+)"
        r"|cuDNN error: (?P<error>\S[^\n]{0,60})|cusolver error: (?P<solver>\w+)",
        says="had a call of a CUDA library fail[: cuBLAS {cublas}][: cuDNN {cudnn}]",
        fix="Most often GPU memory is full (watch nvidia-smi, try half the batch); then an earlier "
        "kernel's error (CUDA_LAUNCH_BLOCKING=1), or libraries of another version "
        "(LD_LIBRARY_PATH).",
        likely=True,
        examples=(
            "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
            "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        ),
        page=Page(
            "A call of cuBLAS, cuDNN or cuSOLVER failed.",
            "Their status codes, such as CUBLAS_STATUS_NOT_INITIALIZED or "
            "CUDNN_STATUS_EXECUTION_FAILED.",
            "The code rarely says why. Without memory for its workspace a library cannot start; "
            "after a kernel crashed every call fails; a library of another version does not fit.",
            "Try half the batch. Then `CUDA_LAUNCH_BLOCKING=1`. Then an environment without "
            "LD_LIBRARY_PATH.",
            "Wrong: LD_LIBRARY_PATH with a system's cuDNN before torch's own.\n"
            "Right: `unset LD_LIBRARY_PATH`",
            "If another line names the cause (DDP928, DDP929).",
        ),
    ),
    Failure(
        Known("DDP930", "cuda-error", Weight.GENERIC, "1.7 to 2.13"),
        r"CUDA error: (?!out of memory|device-side|uncorrectable|no kernel|CUBLAS|CUDNN|invalid device"
        r"|all CUDA|initialization|system not|an illegal|misaligned|unspecified)(?P<what>[a-zA-Z][^\n]{1,80})"
        r"|CUDA unknown error",
        says="had a CUDA call fail[: {what}]",
        fix=_BLOCKING + " `dmesg | grep -i xid` shows whether the GPU reported a fault.",
        examples=("RuntimeError: CUDA error: unknown error",),
        yields_to=("exception",),
    ),
    Failure(
        Known("DDP948", "driver-too-old-for-ptx", Weight.CAUSE, "CUDA 11 and later"),
        r"CUDA error: the provided PTX was compiled with an unsupported toolchain",
        says="runs code of a newer CUDA than the NVIDIA driver knows",
        fix="Update the driver (`nvidia-smi` shows the newest CUDA that it knows), or install "
        "torch, and build extensions, for that CUDA or an older one.",
        examples=(
            "RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain.",
        ),
    ),
    Failure(
        Known("DDP948", "no-kernel-image", Weight.CAUSE, "1.7 to 2.13"),
        r"no kernel image is available for execution|is not compatible with the current PyTorch inst"
        r"|CUDA error: invalid device function|nvrtc: error: invalid value for --gpu-architecture",
        says="runs code that was not built for its GPU",
        fix="Install a torch build for this GPU (`torch.cuda.get_arch_list()`), and build "
        "extensions with TORCH_CUDA_ARCH_LIST for it.",
        examples=(
            "RuntimeError: CUDA error: no kernel image is available for execution on the device",
            "nvrtc: error: invalid value for --gpu-architecture (-arch)",
        ),
        page=Page(
            "torch or an extension was not built for this GPU.",
            '"no kernel image is available for execution on the device".',
            "A wheel holds code for some architectures only; a new GPU needs a newer one, an old GPU "
            "an older one.",
            "Compare `torch.cuda.get_device_capability()` with `torch.cuda.get_arch_list()`. Build "
            "extensions on the machine, or with TORCH_CUDA_ARCH_LIST.",
            "Wrong: a wheel for CUDA 11.3 on an H100.\nRight: a wheel for CUDA 12 or later.",
            "For torch's warning about it, as long as the job runs.",
        ),
    ),
    Failure(
        Known("DDP209", "driver-too-old", Weight.CAUSE, "1.7 to 2.13"),
        r"NVIDIA driver on your system is too old|driver version is insufficient for CUDA runtime"
        r"|API call is not supported in the installed CUDA driver|forward compatibility was attempted",
        says="has a driver that is older than torch's CUDA",
        fix="Update the driver, or install a torch built for an older CUDA (`nvidia-smi` names the "
        "newest that the driver can).",
        examples=(
            "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
        ),
    ),
    Failure(
        Known("DDP209", "no-gpu-visible", Weight.CAUSE, "1.7 to 2.13"),
        r"No CUDA GPUs are available|CUDA-capable devices? (?:is|are) (?:detected|busy)|no CUDA-capable "
        r"device is detected|all CUDA-capable devices are busy|CUDA (?:driver )?initialization"
        r"(?: failed|: Unexpected error)|CUDA error: system not yet initialized"
        r"|No HIP GPUs are available|CUDA error: initialization error"
        r"|cannot find any torch accelerator",
        says="sees no GPU that it can use",
        fix="`nvidia-smi` on that node, CUDA_VISIBLE_DEVICES, docker --gpus all, exclusive mode; on "
        "NVSwitch machines the fabric manager has to run.",
        examples=(
            "RuntimeError: No CUDA GPUs are available",
            "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable",
        ),
    ),
    Failure(
        Known("DDP937", "cuda-before-fork", Weight.CAUSE, "1.7 to 2.13; lightning"),
        r"Cannot re-initialize CUDA in forked subprocess|create new processes if CUDA is already init"
        r"|launch multi-GPU training from your notebook, the `?Accelerator`?[^\n]{0,99}CUDA",
        says="started processes by fork after it had used CUDA",
        fix="Use no CUDA before the start (also no torch.cuda.is_available(), no .to('cuda') at "
        "import), or mp.set_start_method('spawn').",
        examples=(
            "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method",
        ),
        page=Page(
            "A forked process uses CUDA that its parent has initialized.",
            'torch\'s "Cannot re-initialize CUDA in forked subprocess", and the same of Lightning and '
            "Accelerate in notebooks.",
            "CUDA does not survive fork. DataLoader workers and `mp.spawn` with fork inherit it.",
            "Touch CUDA only in the child: no tensors on the GPU in a dataset or a collate "
            "function, none before a notebook's launcher. Or use the spawn start method.",
            "Wrong: a dataset whose `__getitem__` returns `x.cuda()`.\n"
            "Right: `batch.cuda(non_blocking=True)` in the training loop.",
            "With the spawn start method.",
        ),
    ),
    Failure(
        Known("DDP961", "library-mismatch", Weight.CAUSE, "any"),
        r"undefined symbol: (?P<symbol>\w{1,60})|version [`'](?P<version>\w+_[\d.]+)' not found"
        r"|(?:cannot open shared object file|libcud\w+\.so[^\n]{0,40}: cannot open)"
        r"|operator torchvision::nms does not exist|symbol lookup error"
        r"|requires (?:PyTorch|torch) ?(?P<needed>[<>=]=? ?[\d.]+)",
        # What libibverbs tries of all the network cards that there are.
        unless=r"libibverbs: Warning",
        says="loads libraries that do not fit each other[ (no {symbol})][ (no {version})][ (torch {needed})]",
        fix="Install torch, torchvision and extensions for the same torch and CUDA, rebuild the "
        "extension, and look for other copies in LD_LIBRARY_PATH.",
        examples=(
            "ImportError: /opt/flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi",
            "ValueError: FSDP requires PyTorch >= 2.1.0",
            "ImportError: libcudart.so.11.0: cannot open shared object file: No such file or directory",
        ),
        page=Page(
            "Binary libraries do not fit each other.",
            '"undefined symbol", "version GLIBCXX_... not found", a shared library that is missing.',
            "An extension was built for another torch, or LD_LIBRARY_PATH brings another copy of a "
            "library.",
            "Reinstall the extension for the torch that is installed; `unset LD_LIBRARY_PATH`.",
            "Wrong: torch 2.6 with a flash-attn wheel for torch 2.4.\n"
            "Right: `pip install flash-attn --no-build-isolation --no-cache-dir`",
            "If the exception is caught, and the job goes on without the library.",
        ),
    ),
)
