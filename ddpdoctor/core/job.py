"""The options of ``ddpdoctor run`` and the command of its job."""

from __future__ import annotations

from dataclasses import dataclass

from ddpdoctor.core.options import ALL, Selection

DEFAULT_PORT = 5678
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class OwnOptions:
    """The options of ``ddpdoctor run``, without those of torchrun."""

    quiet: bool = False
    strict: bool = False
    grace: float = 30.0
    hang_after: float | None = None
    """Seconds. None chooses them by the duration of the job's steps."""
    kill_on_hang: bool = False
    run_dir: str | None = None
    json: str | None = None
    output: str = "text"
    selection: Selection = ALL
    notify: tuple[str, ...] = ()  # URLs of webhooks, and commands
    log_to: tuple[str, ...] = ()  # Experiment trackers, with a directory, project or URL
    journal_mb: int = 64
    overhead_budget: float = 0.5
    no_nodes: bool = False
    no_lint: bool = False
    capsule: bool = False
    no_debug: bool = False
    debug_port: int = DEFAULT_PORT
    debug_host: str = LOOPBACK
    debug_unidentified: bool = False
    debug_nodes: bool = False
    debug_on_error: bool = False
    wait_in_terminal: bool = False
    wait_for_attach: frozenset[int] | None = None
    """Ranks that wait for a debugger, all of them if empty. None holds no rank."""
    stop_with_debugger: bool = False
    no_vscode: bool = False
    workspace: str | None = None
    path_map: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Command:
    """The job to start."""

    argv: tuple[str, ...]  # The command line to execute
    own: OwnOptions  # ddpdoctor's own options
    note: str  # A line for the user, such as the chosen number of ranks. May be empty.
    through_torchrun: bool  # Whether torchrun starts the ranks
    local_ranks: int | None = None  # Number of ranks on this node. None if only the job knows.
    one_node: bool = False  # Whether local and global ranks are equal
    script: str = ""  # The file or module to show to the user
    attached: tuple[str, ...] = ()
    """The command line of a job that runs already, if ``argv`` watches that."""

    @property
    def launcher(self) -> str:
        """What starts the ranks, as in run.json."""
        return "attach" if self.attached else "torchrun" if self.through_torchrun else "command"
