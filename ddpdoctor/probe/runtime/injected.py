"""Serve the debugger in a process that was started without ddpdoctor. gdb loads this module.

The process has no probe. The gateway's requests are answered as far as a debugger needs that.
"""

from __future__ import annotations

import os

from ddpdoctor.probe.runtime import control, debugpy_private, frame_values, torch_groups
from ddpdoctor.probe.runtime.control import Message
from ddpdoctor.run.names import CONTROL

_forks = False


def join(directory: str) -> None:
    """Connect to the gateway with its sockets in ``directory``. It may then start debugpy.

    Called on the thread that gdb has stopped, with debugpy on the path.

    Raises:
        ImportError: This interpreter cannot load debugpy.
        OSError: The gateway cannot be reached.
    """
    global _forks
    debugpy_private.load()
    control.actions.update(
        debug=_debug,
        detached=lambda _: debugpy_private.silence(),
        variables=frame_values.variables,
        evaluate=frame_values.evaluate,
        lift=lambda _: torch_groups.lift_timeouts(),
        restore=lambda _: torch_groups.lift_timeouts(False),
        # Nothing in this process waits for them.
        **dict.fromkeys(("answer", "attached", "release", "go", "workers"), lambda _: None),
    )
    control.leave()
    control.join_at(os.path.join(directory, CONTROL), {})
    if not _forks:
        _forks = True
        os.register_at_fork(after_in_child=_forget)


def _debug(message: Message) -> Message:
    error = debugpy_private.serve_safely(str(message["key"]))
    return {} if error is None else {"error": error}


def _forget() -> None:
    if control.is_joined():
        control.forget()
        debugpy_private.leave_child_alone()
