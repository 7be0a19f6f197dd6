"""Ends of a job, as schedulers, containers, launchers and peers report them."""

from __future__ import annotations

from ddpdoctor.core.finding import Severity
from ddpdoctor.failures.entry import Failure, Known, Page, Weight

# -- Schedulers, containers and people


_LOOK_AT_SCHEDULER = (
    "See the job's record (sacct, kubectl describe pod, the queue's log) for who asked for it. Save "
    "checkpoints often enough, and start from the last one."
)

SCHEDULING = (
    Failure(
        Known("DDP908", "time-limit", Weight.DECISIVE, "Slurm, LSF, PBS"),
        r"CANCELLED AT \S+ DUE TO TIME LIMIT|TERM_RUNLIMIT|walltime \d+ exceeded limit"
        r"|JobState=(?:TIMEOUT|DEADLINE)\b|DeadlineExceeded|job killed: walltime|exceeded hard (?:wallclock )?time",
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
        r"CANCELLED AT \S+ DUE TO JOB REQUEUE|JobState=REQUEUED",
        says="was put back into the queue",
        fix="By its owner, an administrator, or a preemption (sacct --duplicates). It starts again: load "
        "the last checkpoint.",
        examples=(
            "slurmstepd: error: *** JOB 4711 ON node3 CANCELLED AT 2024-05-01T12:00:00 DUE TO JOB REQUEUE ***",
        ),
    ),
    Failure(
        Known("DDP908", "preempted", Weight.DECISIVE, "Slurm, Kubernetes, clouds"),
        r"CANCELLED AT \S+ DUE TO PREEMPTION|JobState=PREEMPTED|[Rr]eason: *Preempt|[Pp]reempted (?:by|in order to)"
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
        r"CANCELLED AT \S+ DUE TO NODE FAILURE|JobState=(?:NODE|BOOT)_FAIL|srun: error: Node failure on (?P<node>\S+)"
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
        r"OOMKilled|slurmstepd: error: Detected \d+ oom[-_ ]?kill event|oom-kill:|Out of memory: Kill(?:ed)? process|srun: error: \S+: task \d+: Out Of Memory"
        r"|Memory cgroup out of memory|Some of your processes may have been killed by the cgroup out-of"
        r"|TERM_MEMLIMIT|Exceeded (?:job|step) memory limit|PBS: job killed: v?mem \S+ exceeded|Job \d+\S* has exceeded memory allocation|oom_kill event|OUT_OF_MEMORY|ray\.exceptions\.OutOfMemory",
        says="was killed by the out-of-memory killer: its container or job was out of host memory",
        fix="Raise the limit (resources.limits.memory, --mem), or use fewer DataLoader workers and "
        "load less in each rank.",
        examples=(
            "Last State: Terminated  Reason: OOMKilled  Exit Code: 137",
            "srun: error: node3: task 5: Out Of Memory",
            "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=4711.0. Some of the step tasks have been OOM Killed.",
        ),
    ),
    Failure(
        # Ray starts the work again, perhaps.
        Known("DDP903", "raylet-out-of-memory", Weight.GENERIC, "Ray 2"),
        r"\(tasks / actors\) killed due to memory pressure|due to the node running low on memory",
        says="had workers killed by Ray, since its node ran out of host memory",
        fix="Fewer or smaller workers on a node (num_cpus, resources_per_worker, DataLoader workers), or "
        "larger nodes. RAY_memory_usage_threshold is the limit; `ray memory` shows what fills the object "
        "store.",
        examples=(
            "(raylet) node_manager.cc:3069: 1 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed, an error",
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
        Known("DDP960", "output-not-opened", Weight.CAUSE, "Slurm"),
        r"ExitCode=0:53\b",
        says="could not start: Slurm could not open its output file, or enter its directory",
        fix="Create the directories of --output, --error and --chdir, on a file system that the node has "
        "mounted and this user may write to.",
        examples=("JobId=4711 JobState=FAILED Reason=RaisedSignal:53 ExitCode=0:53",),
    ),
    Failure(
        # A shell continues after it, so later failures are nearer to the cause.
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
        Known("DDP960", "pod-not-started", Weight.SYMPTOM, "Kubernetes"),
        r"FailedScheduling\b[^\n]{0,120}?(?P<nodes>\d+/\d+ nodes are available[^\n]{0,120})"
        r"|Failed to pull image \"?(?P<image>[^\s\"]{1,120})|(?:Err)?ImagePull(?:BackOff)?\b|FailedMount\b[^\n]{0,120}?(?P<mount>MountVolume[^\n]{0,90})"
        r"|FailedCreatePodSandBox",
        says="has a pod that could not start[: {nodes}][: no image {image}][: {mount}]",
        fix="`kubectl describe pod` and `kubectl get nodes -o wide`: free GPUs (nvidia.com/gpu), taints and "
        "affinity, the image's name and pull secret, the volumes. The other ranks wait for it.",
        severity=Severity.WARNING,
        likely=True,
        yields_to=("launch",),
        examples=(
            "  Warning  FailedScheduling  35s  default-scheduler  0/12 nodes are available: 4 Insufficient nvidia.com/gpu.",
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
        r"\*\*\* JOB (?P<job>\S+) ON \S+ CANCELLED AT|JobState=CANCELLED|TERM_OWNER|TERM_ADMIN|Job cancelled by user|job was cancelled"
        r"|srun: (?:Force Terminated job|forcing job termination)|Job allocation \d+ has been revoked",
        says="was cancelled by its owner or an administrator",
        fix=_LOOK_AT_SCHEDULER,
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
        "stop, or a person. " + _LOOK_AT_SCHEDULER,
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
        fix=_LOOK_AT_SCHEDULER,
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
        yields_to=("exit-status-1", "process-failed"),
    ),
)


# -- Ends of ranks, as launchers and peers report them


_LOOK_AT_LOG = (
    "The cause is on the rank that did not come, or ended first: look at its output, and at its "
    "node. `ddpdoctor run` sees all ranks."
)

_LOG_DIR = (
    "Get the output of that rank: torchrun --log-dir DIR --redirects 3 keeps each rank's, or start "
    "with ddpdoctor run."
)

ENDINGS = (
    Failure(
        Known("DDP907", "absent-from-barrier", Weight.SYMPTOM, "1.13, 2.13"),
        r"Rank (?P<rank>\d+) failed to pass monitoredBarrier",
        examples=(
            "[E1122 03:10:10.529107999 ProcessGroupGloo.cpp:67] [Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms",
        ),
        says="never came to monitored_barrier",
        fix="See what that rank does instead: a branch on the rank, a slow save, or it ended.",
    ),
    Failure(
        Known("DDP907", "nccl-timeout", Weight.SYMPTOM, "2.x; pytorch#118369"),
        # Terminals break the line before it.
        r"\btimeout: WorkNCCL\("
        r"(?:SeqNum=(?P<seq>\d+),? ?)?(?:OpType=(?P<op>\w+))?(?:[^\n]{0,999}?ran for (?P<ms>\d+) milliseconds)?",
        examples=(
            "[E1122 10:30:21.207 ProcessGroupNCCL.cpp:616] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=64, NumelOut=64, Timeout(ms)=600000) ran for 600028 milliseconds before timing out.",
        ),
        says="waited[ {ms} ms] in[ {op}][ #{seq}], which did not complete",
        yields_to=("collectives-differ", "absent-from-barrier", "did-not-join"),
        fix="Compare the numbers of all ranks: the rank with a smaller one, or none, did not come; see "
        "its output. If all have the same one, a link or a GPU failed: see `dmesg` for Xid, set "
        "NCCL_DEBUG=INFO, and run `ddpdoctor check`.",
    ),
    Failure(
        Known("DDP907", "did-not-join", Weight.SYMPTOM, "1.13 to 2.13, TORCH_NCCL_DESYNC_DEBUG=1"),
        r"\[(?P<rank>\d+)\] (?:finished|joined but didn't finish) collective #(?P<last>\d+)"
        r"(?:, but didn't join collective #(?P<next>\d+))?",
        says="was the one that the others waited for: it had come to collective #{last}[ and not to #{next}]",
        fix="See what that rank did instead: a branch on the rank, batches of unequal number, a slow save, "
        "or it ended.",
        examples=(
            "[E P.cpp:9]   [1] finished collective #2, but didn't join collective #3 (count from 1)",
        ),
    ),
    Failure(
        Known("DDP907", "nccl-timeout-unnumbered", Weight.SYMPTOM, "2.15"),
        r"Aborting process on rank \d+ due to timeout|NCCL operation timed out",
        examples=(
            "torch.distributed.DistBackendError: Watchdog caught collective operation timeout: NCCL operation timed out",
            "[E1122 10:30:21.201 ProcessGroupNCCL.cpp:871] [TC][rank=0][name=0] Aborting process on rank 0 due to timeout - timeout watchdog detected operation timeout",
        ),
        says="waited in a collective of NCCL until its timeout, and some other rank did not come",
        fix="It does not say in which collective: `ddpdoctor run` names it, and its line. "
        + _LOOK_AT_LOG,
    ),
    Failure(
        Known("DDP907", "gloo-timeout", Weight.SYMPTOM, "1.13, 2.6, 2.13; pytorch#38174"),
        r"Timed out waiting (?P<ms>\d+)ms for (?:recv|send) operation",
        examples=(
            "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete",
        ),
        says="waited {ms} ms in a collective that some other rank did not join",
        fix="Batches of unequal number, a branch on the rank, or a slow save on one of them. "
        + _LOOK_AT_LOG,
    ),
    Failure(
        Known("DDP907", "peer-closed", Weight.CONSEQUENCE, "1.13, 2.6, 2.13"),
        r"Connection closed by peer \[|Read error \[[^\]]+\]:\d+: |writev \[[^\]]+\]:\d+: "
        r"|Application timeout caused pair closure",
        examples=(
            "RuntimeError: [/pytorch/gloo/pair.cc:553] Connection closed by peer [10.0.0.4]:6294",
            "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:6862: Connection reset by peer. This is typically caused by a remote worker hanging or bugs in the application. Check the logs of the remote worker befo",
        ),
        says="lost its connection to a peer",
        fix=_LOOK_AT_LOG,
    ),
    Failure(
        Known("DDP907", "nccl-aborted", Weight.CONSEQUENCE, "2.x"),
        r"NCCL communicator (?:was|is) aborted|ncclRemoteError"
        r"|due to [^\n]{0,999}remote process exited"
        r"|remote process exited or there was a network error",
        examples=(
            "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0. Original reason for failure was: remote process exited or there was a network error",
        ),
        says="lost its peers in NCCL",
        fix=_LOOK_AT_LOG,
    ),
    Failure(
        Known("DDP907", "store-gone", Weight.CONSEQUENCE, "2.6, 2.13; pytorch#128970"),
        r"TCPStore[^\n]{0,999}(?:Broken pipe|Connection reset|got 0 bytes)"
        r"|[Ff]ailed to recv, got 0 bytes|[Ff]ailed to check the \"should dump\" flag",
        examples=(
            "[W1122 03:09:04.111 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=3): Broken pipe",
            '[rank1]:[W1122 03:09:04.111 ProcessGroupNCCL.cpp:1783] [PG ID 0 PG GUID 0 Rank 1] Failed to check the "should dump" flag on TCPStore, (maybe TCPStore server has shut down too early)',
        ),
        says="lost the job's store, which ends with rank 0 or its torchrun",
        fix=_LOOK_AT_LOG,
    ),
    Failure(
        Known("DDP905", "exit-status", Weight.GENERIC, "1.13, 2.6, 2.13"),
        r"exitcode\s*: ?(?P<status>(?!1\b)[1-9]\d*)",
        examples=("exitcode  : 7 (pid: 13803)",),
        says="ended itself with exit status {status}",
        yields_to=("exception",),
        fix="Nothing else is known of it: raise an exception that says why, or see what the script "
        "prints before.",
    ),
    Failure(
        Known("DDP906", "abort-at-exit", Weight.SYMPTOM, "2.13"),
        r"terminate called without an active exception",
        examples=("terminate called without an active exception",),
        says="aborted at its very end, in a race of gloo's threads with the end of the process",
        fix="If the training was complete, its results are right. Let go of the DDP module and the "
        "optimizer, gc.collect(), and only then destroy_process_group().",
        likely=True,
        severity=Severity.INFO,
    ),
    Failure(
        Known("DDP907", "mpi-failed", Weight.GENERIC, "Open MPI, MPICH, Intel MPI"),
        r"\*\*\* An error occurred in (?P<call>\w+)|Fatal error in P?(?P<raised>MPI_\w+): "
        r"|MPI_ERRORS_ARE_FATAL",
        examples=(
            "[node3:4711] *** An error occurred in MPI_Allreduce",
            "[node3:4711] *** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,",
            "Fatal error in PMPI_Init_thread: Other MPI error, error stack:",
        ),
        says="had MPI fail[ in {call}][ in {raised}], which ends the whole job",
        fix="The lines around it say why: of UCX or the fabric, that a peer or a link is gone; of "
        "PMI, that the launcher and the MPI library do not fit (srun --mpi=list).",
    ),
    Failure(
        Known("DDP902", "left-behind", Weight.NOTE, "Python 3.8 to 3.13"),
        r"resource_tracker: There appear to be \d+ leaked (?P<what>\w+) objects",
        examples=(
            "/usr/lib/python3.10/multiprocessing/resource_tracker.py:224: UserWarning: resource_tracker: There appear to be 6 leaked semaphore objects to clean up at shutdown",
        ),
        says="ended without cleaning up ({what} objects), as a process that is killed does",
        fix="If the job was not done: see `dmesg`, the scheduler's record, and who stopped it.",
        severity=Severity.INFO,
    ),
    Failure(
        Known("DDP907", "stopped-by-torchrun", Weight.WRAPPER, "1.13, 2.6, 2.13"),
        r"exitcode\s*: ?-(?:15|2)\b",
        examples=("exitcode  : -15 (pid: 13314)",),
        says="was stopped by its launcher after another rank had failed",
        fix=_LOOK_AT_LOG,
    ),
    Failure(
        Known("DDP907", "exit-status-1", Weight.WRAPPER, "1.13, 2.6, 2.13"),
        r"exitcode\s*: ?1\b",
        examples=("exitcode  : 1 (pid: 13434)",),
        says="failed first, with exit status 1; why is not in this log",
        fix=_LOG_DIR,
    ),
    Failure(
        Known("DDP907", "spawned-failed", Weight.WRAPPER, "1.5 to 1.7"),
        r"^Exception:?\s*$",
        # The parent raises its process's exception again, whose traceback follows.
        within=r"multiprocessing/spawn\.py\", line \d+, in join",
        says="failed, as the process that spawned it noticed; why is not in this log",
        fix=_LOG_DIR,
        examples=(
            'Traceback (most recent call last):\n  File "/lib/torch/multiprocessing/spawn.py", line 119, in join\n    raise Exception(msg)\nException:',
        ),
    ),
    Failure(
        Known("DDP907", "child-failed", Weight.WRAPPER, "1.13, 2.6, 2.13"),
        r"ChildFailedError|Process(?:Exited|Raised)Exception",
        examples=(
            "torch.multiprocessing.spawn.ProcessRaisedException:",
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        ),
        says="failed, as its launcher noticed; why is not in this log",
        fix=_LOG_DIR,
    ),
)


# -- Reports of launchers, and lines that only contain the word error


_OWN_LOG = (
    "Get the output of the process that ended first: torchrun --log-dir DIR --redirects 3 --tee 3, "
    "srun --output=%x-%t.log, deepspeed --enable_each_rank_log DIR; or start with ddpdoctor run."
)

WRAPPERS = (
    Failure(
        Known("DDP902", "killed-status", Weight.GENERIC, "any"),
        r"exitcode\s*: ?-9\b|srun: error: (?P<node>\S+): (?:task (?P<task>\d+)|tasks [\d,-]+): Killed"
        r"|died with <Signals\.SIGKILL|ExitCode=(?:137:\d|\d+:9\b)|return(?:ed)? (?:non-zero )?(?:exit )?(?:code|status)(?: =)? (?:-9|137)\b"
        r"|[Ee]xit(?:ed with)? (?:exit )?[Cc]ode:? (?:-9|137)\b|\bexited on signal 9\b|^(?:\S+: line \d+: +\d+ )?Killed\b"
        r"|terminated with exit code (?:-9|137)\b|[Ee]xit(?: |_)status[:=]? ?(?:137|-9)\b|(?<!: )\b[Tt]ask \d+: Killed"
        r"|(?:(?:rank|process) (?P<rank>\d+) (?:died from|terminated with)|KILLED BY|terminated (?:with|by)|termination \() ?[Ss](?:ignal|IGNAL):? (?:9|SIGKILL)\b"
        r"|EXIT STRING: Killed|^\w*sh: killed\b|^\[\d+\][+-]? +(?:\d+ )?[Kk]illed\b",
        says="was killed by SIGKILL",
        fix="The out-of-memory killer most often (`dmesg`, oom_kill in the cgroup's memory.events), "
        "else a scheduler's limit, or a person.",
        # Slurm kills tasks that do not end by themselves.
        follows=("cancelled",),
        examples=(
            "exitcode  : -9 (pid: 13764)  (SIGKILL)",
            "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL",
            "srun: error: node3: tasks 0-3: Killed",
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
        r"exitcode\s*: ?-(?:11|7|8|4)\b(?: \(pid: \d+\)\s+\((?P<status>SIG\w+)\))?|ExitCode=(?:13[2569]:\d|\d+:(?:11|7|8|4)\b)|died with <Signals\.(?P<name>SIG(?:SEGV|BUS|FPE|ILL))|return code = -(?:11|7|8|4)\b"
        r"|Fatal Python error: (?P<fatal>Segmentation fault|Bus error|Floating point exception|Illegal instruction)"
        r"|\b(?P<shell>[Ss]egmentation fault|[Bb]us error|Illegal instruction|Floating point exception|Trace/breakpoint trap)"
        r"\b[^\n]{0,40}(?:core dumped|$)|^\w*sh: (?P<zsh>segmentation fault|bus error)\b|SIGSEGV, segmentation fault occurred"
        r"|(?:(?:rank|process) (?P<rank>\d+) (?:died from|terminated with)|KILLED BY|terminated (?:with|by)|termination \() ?[Ss](?:ignal|IGNAL):? (?:11|7|8|4|SIG(?:SEGV|BUS|FPE|ILL))\b"
        r"|(?:\b[Rr]ank (?P<task>\d+) crashed with )?[Ee]xit(?:ed with)? (?:exit )?[Cc]ode:? (?:13[2569]|-(?:11|7|8|4))\b|exited on signal (?:11|7|8|4)\b"
        r"|srun: error: (?P<node>\S+): task (?P<failed>\d+): (?:Segmentation fault|Bus error)|\*\*\* Process received signal|Caught signal 11|Segfault encountered",
        says="crashed in native code[ with {name}][ with {status}][: {fatal}][: {shell}][: {zsh}]",
        fix="Run with PYTHONFAULTHANDLER=1 to see the Python line; suspect extensions, and libraries "
        "that do not fit torch. A bus error: see whether /dev/shm is full.",
        examples=(
            "exitcode  : -11 (pid: 13790)  (SIGSEGV)",
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
        r"exitcode\s*: ?-6\b|process (?P<rank>\d+) terminated with signal SIGABRT|died with <Signals\.SIGABRT|ExitCode=(?:134:\d|\d+:6\b)|return code = -6\b|[Ee]xit(?:ed with)? (?:exit )?[Cc]ode:? (?:134|-6)\b"
        r"|^(?:\S+: line \d+: +\d+ )?Aborted\b(?![.!]$)|^Abort trap\b|KILLED BY SIGNAL: 6\b|\bAborted \(core dumped\)|exited on signal 6\b|Fatal Python error: Aborted"
        r"|task \d+: Aborted",
        says="aborted in native code (SIGABRT)",
        fix="Look above for lines of NCCL, gloo or glibc (`what():`) that say why.",
        examples=("Aborted (core dumped)", "exitcode  : -6 (pid: 77)"),
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
        r"|Error for Training job [^\n]{0,200}Failed|AlgorithmError: |ExecuteUserScriptError"
        r"|ExitCode=[1-9]\d*:\d|JobState=FAILED|CHILD PROCESS FAILED WITH NO ERROR_FILE|^\[\d+\][+-]? +Exit [1-9]",
        says="failed, as its launcher noticed",
        fix=_OWN_LOG,
        # Not the compilers of Triton and torch.compile, and tools of the script.
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
        r"|The following values were not passed to `accelerate launch`|\[runner\.py:\d+:main\] cmd = "
        r"|Successfully assigned \S+ to |kubelet +Started container",
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
        r"|\bNaN (?:detected|found|encountered)[^\n]{0,60}(?:abort|stop|exit|terminat)|^Exception has occurred: |\b(?:[Ll]oss|LOSS) is (?:nan|NaN|NAN|[Ii]nf\w*)\b|^libc\+\+abi: terminating|process exited unexpectedly|panicked at |PBS: job killed: "
        r"|\[E[^\]\n]{0,60}\.cpp:\d+\] (?![^\n]{0,200}enqueued)|^Traceback \(most[^)\n]{0,20}$|^bind: Address already in use",
        says="failed",
        fix="Collect the whole output of every rank, " + _OWN_LOG[0].lower() + _OWN_LOG[1:],
        # TensorFlow, pip, NCCL's plugins and others print it in healthy jobs, too.
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
