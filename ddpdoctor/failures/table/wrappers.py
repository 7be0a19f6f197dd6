"""What launchers say when a process failed, and lines that only call themselves errors."""

from __future__ import annotations

from ddpdoctor.failures.model import Failure, Known, Page, Weight

_OWN_LOG = (
    "Get the output of the process that ended first: torchrun --log-dir DIR --redirects 3 --tee 3, "
    "srun --output=%x-%t.log, deepspeed --enable_each_rank_log DIR; or start with ddpdoctor run."
)

FAILURES = (
    Failure(
        Known("DDP902", "killed-status", Weight.GENERIC, "any"),
        r"died with <Signals\.SIGKILL|return(?:ed)? (?:non-zero )?(?:exit )?(?:code|status)(?: =)? (?:-9|137)\b"
        r"|[Ee]xit(?:ed with)? (?:exit )?[Cc]ode:? (?:-9|137)\b|\bexited on signal 9\b|^(?:\S+: line \d+: +\d+ )?Killed\b"
        r"|terminated with exit code (?:-9|137)\b|[Ee]xit(?: |_)status[:=]? ?(?:137|-9)\b|(?<!: )\b[Tt]ask \d+: Killed"
        r"|(?:rank (?P<rank>\d+) died from|KILLED BY|terminated (?:with|by)|termination \() ?[Ss](?:ignal|IGNAL):? (?:9|SIGKILL)\b"
        r"|EXIT STRING: Killed|^\w*sh: killed\b|^\[\d+\][+-]? +(?:\d+ )?[Kk]illed\b",
        says="was killed by SIGKILL",
        fix="The out-of-memory killer most often (`dmesg`, oom_kill in the cgroup's memory.events), "
        "else a scheduler's limit, or a person.",
        examples=(
            "subprocess.CalledProcessError: Command '['/usr/bin/python', 'train.py']' died with <Signals.SIGKILL: 9>.",
            "[2023-05-01 12:00:00,123] [ERROR] [launch.py:321:sigkill_handler] ['/usr/bin/python', 'train.py'] exits with return code = -9",
            "./run.sh: line 12:  4711 Killed                  python train.py",
            "command terminated with exit code 137",
            "node3.cluster: rank 3 died from signal 9",
            "=   KILLED BY SIGNAL: 9 (Killed)",
        ),
    ),
    Failure(
        Known("DDP904", "crash-status", Weight.GENERIC, "any"),
        r"died with <Signals\.(?P<name>SIG(?:SEGV|BUS|FPE|ILL))|return code = -(?:11|7|8|4)\b"
        r"|Fatal Python error: (?P<fatal>Segmentation fault|Bus error|Floating point exception|Illegal instruction)"
        r"|\b(?P<shell>[Ss]egmentation fault|[Bb]us error|Illegal instruction|Floating point exception|Trace/breakpoint trap)"
        r"\b[^\n]{0,40}(?:core dumped|$)|^\w*sh: (?P<zsh>segmentation fault|bus error)\b|SIGSEGV, segmentation fault occurred"
        r"|(?:rank (?P<rank>\d+) died from|KILLED BY|terminated (?:with|by)|termination \() ?[Ss](?:ignal|IGNAL):? (?:11|7|8|4|SIG(?:SEGV|BUS|FPE|ILL))\b"
        r"|[Ee]xit(?:ed with)? (?:exit )?[Cc]ode:? (?:139|135|-11)\b|exited on signal (?:11|7|8|4)\b"
        r"|\*\*\* Process received signal|Caught signal 11|Segfault encountered",
        says="crashed in native code[ with {name}][: {fatal}][: {shell}][: {zsh}]",
        fix="Run with PYTHONFAULTHANDLER=1 to see the Python line; suspect extensions, and libraries "
        "that do not fit torch. A bus error: see whether /dev/shm is full.",
        examples=(
            "subprocess.CalledProcessError: Command '['/usr/bin/python', 'train.py']' died with <Signals.SIGSEGV: 11>.",
            "Fatal Python error: Segmentation fault",
            "Segmentation fault (core dumped)",
        ),
    ),
    Failure(
        Known("DDP904", "heap-damaged", Weight.GENERIC, "glibc"),
        r"double free or corruption|^(?:free|realloc|malloc|munmap_chunk)\(\): (?P<what>in\w+ [\w ]+)|corrupted (?:size vs|double-linked)"
        r"|malloc_consolidate\(\)|stack smashing detected",
        says="aborted in native code: its memory is damaged[ ({what})]",
        fix="A native library wrote where it should not, or two do not fit each other: suspect extensions "
        "(run without them, one at a time), and reinstall those built for another torch.",
        examples=("*** Error in `python': double free or corruption (!prev): 0x00007f3a ***",),
    ),
    Failure(
        Known("DDP904", "abort-status", Weight.CONSEQUENCE, "any"),
        r"died with <Signals\.SIGABRT|return code = -6\b|[Ee]xit(?:ed with)? (?:exit )?[Cc]ode:? (?:134|-6)\b"
        r"|^(?:\S+: line \d+: +\d+ )?Aborted\b(?![.!]$)|^Abort trap\b|KILLED BY SIGNAL: 6\b|\bAborted \(core dumped\)|exited on signal 6\b|Fatal Python error: Aborted"
        r"|task \d+: Aborted",
        says="aborted in native code (SIGABRT)",
        fix="Look above for lines of NCCL, gloo or glibc (`what():`) that say why.",
        examples=("Aborted (core dumped)",),
    ),
    Failure(
        Known("DDP907", "stopped-status", Weight.WRAPPER, "any"),
        r"Sending process \d+ closing signal SIG|[Ee]xit(?:ed with)? (?:exit )?[Cc]ode:? (?:143|-15)\b"
        r"|died with <Signals\.SIGTERM|Killing subprocess \d+|Unable to shutdown process \d+|terminated by signal SIGTERM",
        says="was stopped by its launcher after another rank had failed",
        fix=_OWN_LOG,
        examples=(
            "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 4711 closing signal SIGTERM",
            "[2023-05-01 12:00:00,123] [INFO] [launch.py:315:sigkill_handler] Killing subprocess 4711",
        ),
    ),
    Failure(
        Known("DDP907", "process-failed", Weight.WRAPPER, "1.7 to 2.13, Slurm, MPI, Kubernetes"),
        r"srun: error: (?P<node>\S+): tasks? (?P<task>\d+)[^\n]{0,99}: Exited with exit code \d+"
        r"|returned non-zero exit status (?!137)\d+|exits with return code = (?!-9)\d+|[Ee]xit(?:ed with)? (?:exit )?[Cc]ode:? (?:[1-9]\d?|1[0-2]\d|2\d\d)\b"
        r"|mpirun (?:noticed|detected) that|returned a non-zero exit code|MPI_ABORT was invoked"
        r"|(?:-- Process|\brank) (?P<rank>\d+) (?:terminated with the following error|exited with code [1-9])|BAD TERMINATION OF ONE OF YOUR"
        r"|[Pp]rocess \d+ exit with status code [1-9]|exited with (?:non-zero )?status [1-9]|^make(?:\[\d+\])?: \*\*\* [^\n]{0,200}Error [1-9]"
        r"|Child process \S+ (?:exited|failed)"
        r"|^papermill\.exceptions\.|CrashLoopBackOff|BackOff|process \d+ terminated with exit code [1-9]|failed \(exitcode: 1\)|Worker group failed"
        r"|exit status [1-9]\d*\b|The main process exited with|\bFAILED(?: \(exitcode:? ?[1-9]\d*\)| *$)"
        r"|CHILD PROCESS FAILED WITH NO ERROR_FILE|^\[\d+\][+-]? +Exit [1-9]",
        says="failed, as its launcher noticed",
        fix=_OWN_LOG,
        # Triton's and torch.compile's compilers, and a script's own tools, which are not launchers.
        unless=r"Command '(?:\['|\(')?(?:[^' ]*/)?(?:gcc|g\+\+|cc|c\+\+|clang[^']*|nvcc|ninja|ptxas|git|wget|curl|tar|unzip|ffmpeg"
        r"|nvidia-smi|which|rsync|gsutil|aws|hdfs|make|cmake|pip)[' ]",
        examples=(
            "srun: error: node3: task 5: Exited with exit code 1",
            "subprocess.CalledProcessError: Command '['/usr/bin/python', '-u', 'train.py']' returned non-zero exit status 1.",
            "[2023-05-01 12:00:00,123] [ERROR] [launch.py:321:sigkill_handler] ['/usr/bin/python'] exits with return code = 1",
            "Primary job  terminated normally, but 1 process returned a non-zero exit code. Per user-direction, the job has been aborted.",
        ),
    ),
    Failure(
        Known("DDP905", "exit-called", Weight.WRAPPER, "any"),
        r"^SystemExit\b(?:: (?P<said>(?!-?\d+$|None$|True$)[^\n]{1,160}))?",
        says="ended itself[: {said}]",
        fix="See what it printed before: nothing else is known of it.",
        examples=(
            'Traceback (most recent call last):\n  File "/job/train.py", line 3, in <module>\n    sys.exit(1)\nSystemExit: 1',
        ),
    ),
    Failure(
        Known("DDP900", "launch", Weight.FACT, "any"),
        r"Setting OMP_NUM_THREADS environment variable for each process to be|nohup: ignoring input"
        r"|The following values were not passed to `accelerate launch`|\[runner\.py:\d+:main\] cmd = ",
        says="was started",
        fix="",
        examples=(
            "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being overloaded",
            "nohup: ignoring input",
            "The following values were not passed to `accelerate launch` and had defaults used instead:",
            "[2023-05-01 12:00:00,123] [INFO] [runner.py:571:main] cmd = /usr/bin/python -u -m deepspeed.launcher.launch",
        ),
    ),
    Failure(
        Known("DDP900", "error-line", Weight.REMARK, "any"),
        r"(?<![\w/.=-])(?:ERROR|FATAL|CRITICAL\b(?=[^\n]{0,200}(?:rror|ail|annot|nable|not |bort|xception))|Fatal error|fatal error|PANIC|panic)\b(?!\s*[=:]?\s*[\d.]+\b)"
        r"|(?:^|\s)(?:\w+\.)*[A-Z]\w+(?:Error|Exception): \S|^[Ee]rror: \S|(?:srun|slurmstepd|sbatch): error: (?![^\n]{0,200}cgroup)|core dumped"
        r"|INTERNAL ASSERT FAILED at|terminate called after throwing|^\s*what\(\):|Fatal Python error"
        r"|^(?:\w+\.)*[A-Z]\w*(?:Error|Exception)\(['\"]|^Error executing job|^Error in sys\.excepthook|Lmod has detected the foll"
        r"|^(?:\w+ )?(?:[Tt]raining|[Jj]ob|[Rr]un|[Ee]xperiment)(?: job)?(?: \S+)? (?:has )?(?:failed|aborted|crashed)\b"
        r"|\b(?:[Ll]oss|LOSS) is (?:nan|NaN|NAN|[Ii]nf\w*)\b|^libc\+\+abi: terminating|process exited unexpectedly|panicked at |PBS: job killed: "
        r"|\[E[^\]\n]{0,60}\.cpp:\d+\] (?![^\n]{0,200}enqueued)|^Traceback \(most[^)\n]{0,20}$|^bind: Address already in use",
        says="failed",
        fix="Collect the whole output of every rank, " + _OWN_LOG[0].lower() + _OWN_LOG[1:],
        # What TensorFlow, pip, NCCL's plugins and others print in healthy jobs, too.
        unless=r"Unable to register cu|computation placer already registered|dependency resolver|TF-TRT|sharp_|^wandb: |_ARRAY_API not found|inotify_add_watch",
        examples=("FATAL: the data service went away",),
        page=Page(
            "The job failed, and why is not understood.",
            "Error lines, exit statuses, signals and tracebacks that are cut, in a log in which "
            "nothing is recognized.",
            "The cause may stand in the lines that are quoted, or in the output of another rank.",
            "Read the lines that are quoted, from the first one on. Collect the output of every rank "
            "and node: `torchrun --log-dir DIR --redirects 3 --tee 3`, NCCL_DEBUG=WARN, "
            "TORCH_DISTRIBUTED_DEBUG=DETAIL. Or run the job with `ddpdoctor run`.",
            "Wrong: the last lines of rank 0 only.\n"
            "Right: `ddpdoctor report --log DIR` with the logs of all ranks.",
            "If anything in the log explains the failure, and if the job went on.",
        ),
    ),
)
