"""What ``ddpdoctor run`` is asked to do: its own options, and the command that is the job."""

from __future__ import annotations

from dataclasses import dataclass

from ddpdoctor.core.options import ALL, Selection

DEFAULT_PORT = 5678
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class OwnOptions:
    """The options of ``ddpdoctor run`` itself."""

    quiet: bool = False
    strict: bool = False
    grace: float = 30.0
    hang_after: float | None = None
    """Seconds; None: as long as seems right for the job's steps."""
    kill_on_hang: bool = False
    run_dir: str | None = None
    json: str | None = None
    output: str = "text"
    selection: Selection = ALL
    notify: tuple[str, ...] = ()
    """Webhooks and commands."""
    journal_mb: int = 64
    overhead_budget: float = 0.5
    no_debug: bool = False
    debug_port: int = DEFAULT_PORT
    debug_host: str = LOOPBACK
    debug_unidentified: bool = False
    debug_on_error: bool = False
    wait_for_attach: frozenset[int] | None = None
    """Ranks to wait for, all of them if empty; None: no rank is held."""
    stop_with_debugger: bool = False
    no_vscode: bool = False
    workspace: str | None = None
    path_map: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Command:
    """The job to start.

    Attributes:
        argv: What is executed.
        own: ddpdoctor's own options.
        note: A line for the person, such as the number of ranks that was chosen; may be empty.
        through_torchrun: Whether the child is torchrun.
        local_ranks: How many ranks this node will have, None if only the job knows.
        one_node: Whether local and global ranks are the same.
        script: What is run, for a person: its file or module.
    """

    argv: tuple[str, ...]
    own: OwnOptions
    note: str
    through_torchrun: bool
    local_ranks: int | None = None
    one_node: bool = False
    script: str = ""
