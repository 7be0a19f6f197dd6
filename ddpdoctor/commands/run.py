"""``ddpdoctor run``: start a job, and watch it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.job import Command
from ddpdoctor.debug.debugging import Debugging
from ddpdoctor.lint.job import SourceCheck
from ddpdoctor.render.reporter import Reporter
from ddpdoctor.run import reported, rundir
from ddpdoctor.supervise import command as job_command
from ddpdoctor.supervise import job_signals
from ddpdoctor.supervise.job_signals import Passthrough
from ddpdoctor.supervise.supervisor import Supervisor, end_like
from ddpdoctor.system import proc

PARSER = job_command.PARSER


def main(words: Sequence[str]) -> int:
    """Run a job."""
    # List them before a library opens a descriptor that programs inherit.
    inherited = proc.inheritable()
    return start(job_command.build(words, os.environ), inherited)


def start(command: Command, inherited: Sequence[int] = ()) -> int:
    """Run a command as a job, whose processes inherit some descriptors. Return its exit status."""
    source = None if command.own.no_lint else SourceCheck(command.argv)
    passthrough = Passthrough(direct=job_signals.is_interactive_shell(command.argv))
    reporter = Reporter(passthrough.say, command.own, reported.keep_traceback, source)
    if opening.working_directory_is_gone():
        reporter.warn(f'{opening.DIRECTORY_GONE}, and torch hardly starts there: type `cd "$PWD"`')
    debugging = None
    try:
        if not command.own.no_debug:
            debugging = Debugging(command, reporter)
    except DoctorError:
        raise
    except Exception as error:
        # Start the job without the debugger.
        reporter.faults.failed([("the debugger", error)])
    try:
        directory = rundir.create(command.own.run_dir)
        if directory.stat().st_mode & 0o022:
            reporter.note(f"others may write to {directory}: they can remove records")
        reporter.begin()
    except OSError as error:
        directory = None
        reporter.warn(f"no run directory ({error}); the job runs unwatched")
    supervisor = Supervisor(command, directory, passthrough, reporter, debugging, inherited)
    return end_like(supervisor.run())
