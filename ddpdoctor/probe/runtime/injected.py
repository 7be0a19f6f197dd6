"""In a process that was started without ddpdoctor, and into which gdb has brought the debugger.

It has no probe. What the gateway asks of a rank is answered here as far as a debugger needs it.
"""

from __future__ import annotations

import os
import sys

from ddpdoctor.probe.runtime import control, debugpy_private, timeouts
from ddpdoctor.probe.runtime.control import Message
from ddpdoctor.run.names import CONTROL

_forks = False


def join(directory: str) -> None:
    """Connect to the gateway that has its sockets in ``directory``; it may start debugpy then.

    Called on the thread that gdb has stopped, with debugpy on the path.

    Raises:
        ImportError: This interpreter cannot load debugpy.
        OSError: The gateway cannot be reached.
    """
    global _forks
    debugpy_private.load()
    control.actions.update(
        answer=_nothing,
        debug=_debug,
        attached=_nothing,
        detached=_detached,
        release=_nothing,
        go=_nothing,
        lift=_lift,
        restore=_restore,
        workers=_nothing,
    )
    control.leave()
    control.join_at(os.path.join(directory, CONTROL), {})
    if not _forks:
        _forks = True
        os.register_at_fork(after_in_child=_forget)


def _nothing(message: Message) -> None:
    """Nothing in this process waits for it."""


def _debug(message: Message) -> Message:
    hook = sys.breakpointhook
    try:
        debugpy_private.serve(control.session(str(message["key"])))
        return {}
    except Exception as error:
        return {"error": repr(error)}
    finally:
        sys.breakpointhook = hook


def _detached(message: Message) -> None:
    debugpy_private.silence()


def _lift(message: Message) -> None:
    timeouts.lift()


def _restore(message: Message) -> None:
    timeouts.restore()


def _forget() -> None:
    if control.is_joined():
        control.forget()
        debugpy_private.leave_child_alone()
