"""What schedulers, containers and people do to a job."""

from __future__ import annotations

from ddpdoctor.failures.model import Failure, Known, Page, Weight

_LOOK = (
    "See the job's record (sacct, kubectl describe pod, the queue's log) for who asked for it. Save "
    "checkpoints often enough, and start from the last one."
)

FAILURES = (
    Failure(
        Known("DDP908", "time-limit", Weight.DECISIVE, "Slurm, LSF, PBS"),
        r"CANCELLED AT \S+ DUE TO TIME LIMIT|TERM_RUNLIMIT|walltime \d+ exceeded limit"
        r"|DeadlineExceeded|job killed: walltime|exceeded hard (?:wallclock )?time",
        says="was ended by the scheduler: the job's time limit is reached",
        fix="Ask for more time (--time), or save checkpoints and requeue (--signal=B:USR1@300).",
        examples=(
            "slurmstepd: error: *** JOB 4711 ON node3 CANCELLED AT 2024-05-01T12:00:00 DUE TO TIME LIMIT ***",
        ),
        page=Page(
            "The job was ended from outside.",
            "A time limit, a preemption, a node that failed or was drained, an eviction, `scancel`, "
            "Ctrl-C, or SIGTERM to the launcher.",
            "Nothing is wrong with the script: exceptions like SignalException and "
            "KeyboardInterrupt, and lost connections, follow from the end.",
            "Look at the scheduler's record of the job. Save checkpoints, and start from the last "
            "one. If a person ended it because it made no progress, look for the hang.",
            "Wrong: fixing the line in which the KeyboardInterrupt happened to arrive.\n"
            "Right: `sacct -j ID --format=State,ExitCode,Reason`",
            "If a rank failed by itself before: then the scheduler only cleaned up.",
        ),
    ),
    Failure(
        Known("DDP908", "requeued", Weight.DECISIVE, "Slurm"),
        r"CANCELLED AT \S+ DUE TO JOB REQUEUE",
        says="was put back into the queue",
        fix="By its owner, an administrator, or a preemption (sacct --duplicates). It starts again: load "
        "the last checkpoint.",
        examples=(
            "slurmstepd: error: *** JOB 4711 ON node3 CANCELLED AT 2024-05-01T12:00:00 DUE TO JOB REQUEUE ***",
        ),
    ),
    Failure(
        Known("DDP908", "preempted", Weight.DECISIVE, "Slurm, Kubernetes, clouds"),
        r"CANCELLED AT \S+ DUE TO PREEMPTION|[Rr]eason: *Preempt|[Pp]reempted (?:by|in order to)"
        r"|Preempting job|instance (?:is|was) preempted|Spot (?:instance )?interruption"
        r"|DisruptionTarget|TaintManagerEviction",
        says="was preempted: another job took its place",
        fix="Save checkpoints and requeue (--requeue), or use a queue that is not preempted.",
        examples=(
            "slurmstepd: error: *** JOB 4711 ON node3 CANCELLED AT 2024-05-01T12:00:00 DUE TO PREEMPTION ***",
        ),
    ),
    Failure(
        Known("DDP908", "node-failed", Weight.DECISIVE, "Slurm, Kubernetes"),
        r"CANCELLED AT \S+ DUE TO NODE FAILURE|srun: error: Node failure on (?P<node>\S+)"
        r"|NodeNotReady|NodeLost|Node is not ready|srun: error: (?P<down>\S+): [^\n]{0,99}Node failure",
        says="lost a node[ ({node})][ ({down})]: it failed, or stopped answering",
        fix="Exclude that node and start from the last checkpoint; its console or `scontrol show "
        "node` may say why.",
        examples=(
            "srun: error: Node failure on node7",
            "slurmstepd: error: *** JOB 4711 ON node3 CANCELLED AT 2024-05-01T12:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
        ),
    ),
    Failure(
        Known("DDP908", "evicted", Weight.DECISIVE, "Kubernetes"),
        r"[Rr]eason: *Evicted|\bEvicted\b[^\n]{0,99}(?:pod|node|low)|The node was low on resource: (?P<what>[\w-]+)"
        r"|\bJob was evicted\b|Usage of EmptyDir volume \S+ exceeds the limit",
        says="was evicted from its node[, which was low on {what}]",
        fix="Request what the pod uses (memory, ephemeral-storage), or raise the volume's limit.",
        examples=(
            "The node was low on resource: ephemeral-storage. Container trainer was using 92Gi.",
        ),
    ),
    Failure(
        Known("DDP903", "container-out-of-memory", Weight.DECISIVE, "Kubernetes, docker, Slurm"),
        r"OOMKilled|oom-kill:|Out of memory: Kill(?:ed)? process|srun: error: \S+: task \d+: Out Of Memory"
        r"|Memory cgroup out of memory|Some of your processes may have been killed by the cgroup out-of"
        r"|TERM_MEMLIMIT|Exceeded (?:job|step) memory limit|PBS: job killed: v?mem \S+ exceeded|Job \d+\S* has exceeded memory allocation|oom_kill event|OUT_OF_MEMORY|ray\.exceptions\.OutOfMemory",
        says="was killed by the out-of-memory killer: its container or job was out of host memory",
        fix="Raise the limit (resources.limits.memory, --mem), or use fewer DataLoader workers and "
        "load less in each rank.",
        examples=(
            "Last State: Terminated  Reason: OOMKilled  Exit Code: 137",
            "srun: error: node3: task 5: Out Of Memory",
        ),
    ),
    Failure(
        Known("DDP960", "command-not-found", Weight.CAUSE, "Slurm, shells, containers"),
        r"execve\(\): (?P<command>\S+): (?P<why>[^\n]{1,60})|executable file not found in \$PATH|can't open file '(?P<file>[^'\n]{1,120})': \[Errno 2\]"
        r"|env: (?P<env>\S+): No such file or directory"
        r"|Error while finding module specification for '(?P<module>[^'\n]{1,120})'",
        says="could not start: there is no such program or script[ ({command})][ ({file})][ ({module})]",
        fix="Activate the environment inside the task on every node (module load, conda, the "
        "container), and give the script's full path.",
        examples=(
            "slurmstepd: error: execve(): python: No such file or directory",
            "python: can't open file '/home/me/trian.py': [Errno 2] No such file or directory",
            "/opt/venv/bin/python: Error while finding module specification for 'bench.run' (ModuleNotFoundError: No module named 'bench')",
        ),
        page=Page(
            "The program of the job does not exist on a node.",
            '"execve(): ... No such file or directory", "command not found", "can\'t open file".',
            "The environment of the batch script is not that of the task, or the directory is not "
            "shared with that node.",
            "Activate the environment inside the task; use full paths on a shared file system.",
            "Wrong: `srun torchrun ...` with conda activated on the login node only.\n"
            "Right: `srun bash -c 'source env.sh; torchrun ...'`",
            "For files that the script itself opens.",
        ),
    ),
    Failure(
        # A shell goes on after it: what the job says later is nearer.
        Known("DDP960", "shell-command-not-found", Weight.GENERIC, "bash"),
        r"(?:(?<!-)\bbash|: line \d+): (?:line \d+: )?(?P<shell>\S+): command not found|\bzsh: command not found: (?P<zsh>\S+)"
        r"|\bsh: (?:\d+|line \d+): (?P<sh>\S+): not found|(?:^(?:\S*/)?(?:ba|z)?sh: |: line \d+: )(?P<what>(?:\S*/\S+|\S+\.(?:sh|py))): "
        r"(?:No such file or directory|Permission denied|cannot execute)",
        says="could not start[: there is no such program ({shell})][: there is no such program ({zsh})]"
        "[: there is no such program ({sh})][: {what} cannot be run]",
        fix="Activate the environment inside the task on every node (module load, conda, the "
        "container), and give the program's full path.",
        examples=(
            "/var/spool/slurmd/job7/slurm_script: line 12: torchrun: command not found",
            "run.sh: line 3: ./train.sh: Permission denied",
        ),
        yields_to=("cancelled",),
    ),
    Failure(
        Known("DDP960", "container-not-started", Weight.GENERIC, "docker, enroot, Apptainer"),
        r"docker: Error response from daemon: (?P<docker>[^\n]{1,160})|nvidia-container-cli: (?P<nvidia>[^\n]{1,160})"
        r"|pyxis: (?P<pyxis>container start failed[^\n]{0,80})",
        says="could not start its container[: {docker}][: {nvidia}][: {pyxis}]",
        fix="Start it by hand on that node: the image, the driver and the container toolkit "
        "(`nvidia-smi`, `docker run --gpus all IMAGE nvidia-smi`), and the mounts.",
        examples=(
            "nvidia-container-cli: initialization error: nvml error: driver not loaded",
            "slurmstepd: error: pyxis: container start failed with error code: 1",
        ),
    ),
    Failure(
        Known("DDP960", "shell-error", Weight.CAUSE, "bash"),
        r"^[^\n\[{]{0,200}: line \d+: (?P<what>[^\n]{0,200}: (?:bad substitution|unbound variable)|syntax error[^\n]{0,99})",
        says="was started by a shell script that has an error[: {what}]",
        fix="Correct that line of the script: what stands after it ran with other words, or not at all.",
        examples=(
            "/var/spool/slurm/slurm_script: line 32: ${NODES*GPUS}: bad substitution",
            "run.sh: line 3: MASTER_PORT: unbound variable",
        ),
    ),
    Failure(
        Known("DDP908", "cancelled", Weight.STOPPED, "Slurm"),
        r"\*\*\* JOB (?P<job>\S+) ON \S+ CANCELLED AT|TERM_OWNER|TERM_ADMIN|Job cancelled by user|job was cancelled"
        r"|srun: (?:Force Terminated job|forcing job termination)|Job allocation \d+ has been revoked",
        says="was cancelled by its owner or an administrator",
        fix=_LOOK,
        examples=("slurmstepd: error: *** JOB 4711 ON node3 CANCELLED AT 2024-05-01T12:00:00 ***",),
    ),
    Failure(
        Known("DDP908", "asked-to-stop", Weight.STOPPED, "1.9 to 2.13"),
        r"SignalException: Process \d+ got signal: (?P<signal>(?!2\b)\d+)|Received (?:Signals\.)?(?P<name>SIG(?:TERM|HUP|INT))"
        r"(?: death signal|: \d+|\b)|Received (?P<number>(?!2 )\d+) death signal, shutting down|got SIGTERM, exiting"
        r"|ExitedException: process \d+ terminated with signal (?P<spawned>SIG(?:TERM|HUP|INT))"
        r"|: line \d+: +\d+ Terminated\b|^(?:Terminated|Hangup|User defined signal [12])$|KILLED BY SIGNAL: 15\b|Launcher caught signal (?P<caught>\d+)|Main process received (?P<main>SIG(?!INT)\w+)"
        r"|\*\*\* (?P<caught_by>SIG(?:TERM|HUP)) received at time="
        r"|DataLoader worker \(pid[^)\n]{0,40}\) is killed by signal: Terminated|exits with return code = -15",
        says="was asked to stop from outside[ by {name}][ by signal {signal}][ by signal {number}][ by {main}]"
        "[ by {caught_by}][ by {spawned}]",
        fix="SIGHUP: the terminal closed (use nohup or tmux). SIGTERM: a scheduler, a container's "
        "stop, or a person. " + _LOOK,
        examples=(
            "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 15",
            "WARNING:torch.distributed.elastic.agent.server.api:Received 15 death signal, shutting down workers",
            "W0312 10:00:00.123000 4711 torch/distributed/elastic/agent/server/api.py:704] Received Signals.SIGHUP death signal, shutting down workers",
            "*** SIGTERM received at time=1755448771 on cpu 72 ***",
            "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGTERM",
        ),
        yields_to=("cancelled", "step-cancelled", "time-limit"),
    ),
    Failure(
        Known("DDP908", "interrupted", Weight.STOPPED, "any"),
        r"^KeyboardInterrupt\b|^Aborted[.!]$|\bKeyboard [Ii]nterrupt(?:ion|ed)?\b|\^CTraceback|Detected KeyboardInterrupt|Main process received SIGINT|Received 2 death signal|SignalException: Process \d+ got signal: 2\b",
        says="was interrupted (Ctrl-C)",
        fix="If it was interrupted because it made no progress, the line is where it waited: run it "
        "again with ddpdoctor run, which names the rank that the others wait for.",
        examples=(
            "KeyboardInterrupt",
            "Keyboard interruption. Exiting from training",
            "[2025-02-20 20:27:14,902] [INFO] [launch.py:328:sigkill_handler] Main process received SIGINT, exiting",
        ),
        yields_to=("cancelled",),
    ),
    Failure(
        Known("DDP908", "step-cancelled", Weight.STOPPED, "Slurm"),
        r"\*\*\* STEP (?P<job>\d+)\S* ON \S+ CANCELLED AT",
        says="had its step cancelled in Slurm",
        fix=_LOOK,
        examples=(
            "slurmstepd: error: *** STEP 4711.0 ON node3 CANCELLED AT 2024-05-01T12:00:00 ***",
        ),
        yields_to=("process-failed", "killed-status", "crash-status", "abort-status", "exception"),
    ),
    Failure(
        Known("DDP907", "task-terminated", Weight.CONSEQUENCE, "Slurm"),
        r"srun: Job step aborted|srun: error: \S+: tasks? \S+: Terminated"
        r"|Terminating StepId|srun: Terminating Job",
        says="was ended by Slurm after another task had failed",
        fix="The cause is the task that ended first: its exit code stands before, its output in its "
        "own file (srun --output=%x-%t.log).",
        examples=("srun: error: node3: task 5: Terminated",),
        yields_to=("exit-status-1",),
    ),
)
