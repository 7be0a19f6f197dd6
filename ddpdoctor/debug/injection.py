"""Open a debug port for a Python process that runs without ddpdoctor; gdb injects debugpy.

The gateway of a run serves the port. debugpy's own port would be open to every user of the machine,
and another process could take a free port before debugpy does.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.job import LOOPBACK
from ddpdoctor.debug import gateway as gateway_module
from ddpdoctor.debug.gateway import Gateway

CONNECT_TIMEOUT = 60.0  # Seconds for the process to connect to the gateway once gdb has detached

_SLEEPER = "import time\nprint(flush=True)\nwhile True: time.sleep(0.02)"
_BREAK_TIMEOUT = 0.5  # Seconds in which a process that gdb has broken ends

_ROOT = str(Path(__file__).parents[2])

_INJECT = """
import os, sys
import debugpy.server
import pydevd
sys.path.append(os.path.join(os.path.dirname(pydevd.__file__), "pydevd_attach_to_process"))
from add_code_to_python_process import run_python_code
run_python_code(int(sys.argv[1]), sys.argv[2], connect_debugger_tracing=False)
"""

_JOIN = """
import sys
before = list(sys.path)
sys.path[:0] = {paths!r}
try:
    from ddpdoctor.probe.runtime import injected
    injected.join({directory!r})
finally:
    sys.path[:] = before
"""


def serve(pid: int, first_port: int, say: Callable[[str], None]) -> None:
    """Open a debug port for a process and serve it until the process ends, or Ctrl-C.

    Args:
        pid: A Python process of this user.
        first_port: The port, or the first after it that is free.
        say: Takes lines for the user.

    Raises:
        DoctorError: debugpy cannot be injected, or no port is free.
    """
    ports = gateway_module.bind_block(LOOPBACK, first_port, 1)
    news = threading.Event()

    def wait_for(state: str, timeout: float | None) -> bool:
        """Print what happens until a state is reached. Returns whether it was in time."""
        while news.wait(timeout):
            news.clear()
            for record in gateway.take():
                if record.state == "refused":
                    client = f"uid {record.uid}" if record.uid is not None else "a client"
                    say(f"refused: {client}" + (f" ({record.why})" if record.uid is None else ""))
                elif record.state == "flooded":
                    say(gateway_module.flooded(record))
                elif record.state == state:
                    return True
        return False

    with tempfile.TemporaryDirectory(prefix="ddpdoctor-attach-") as directory:
        gateway = Gateway(
            ports,
            gateway_module.RunSockets(Path(directory), 1),
            unidentified=False,
            gate=None,
            ends_job=False,
            hold_errors=False,
            expected=1,
        )
        try:
            gateway.start(news.set)
            _inject(pid, directory)
            if not wait_for("ready", CONNECT_TIMEOUT):
                raise DoctorError(f"process {pid} did not load debugpy", "its stderr says why")
            say(
                f"process {pid}: attach to {ports.host}:{ports.numbers[0]}; "
                "the port is open until Ctrl-C here"
            )
            wait_for("gone", None)
            say(f"process {pid} has ended")
        except KeyboardInterrupt:
            say(f"the port is closed; process {pid} goes on")
        finally:
            gateway.stop()


def _inject(pid: int, directory: str) -> None:
    """Make the process connect to the control socket in a directory."""
    import debugpy

    debugpys = os.path.dirname(os.path.dirname(debugpy.__file__))
    source = _JOIN.format(paths=[_ROOT, debugpys], directory=directory)
    # gdb's command line cannot carry quotes and line ends.
    code = f"exec(bytes({list(source.encode())}).decode(),{{}})".replace(" ", "")
    if breaks_sleepers():
        raise DoctorError(
            f"gdb would break process {pid}: on this machine a process it has called into fails",
            "look at it from outside (py-spy dump --pid), or start the job with ddpdoctor run",
        )
    done = subprocess.run(
        [sys.executable, "-c", _INJECT, str(pid), code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"},
    )
    refused = [line for line in done.stdout.splitlines() if "ptrace" in line or "No symbol" in line]
    if done.returncode != 0 or refused:
        reason = refused[0].strip() if refused else "gdb could not attach"
        raise DoctorError(
            f"debugpy could not be injected into {pid}: {reason}",
            "ptrace must be allowed: run as the same user, see /proc/sys/kernel/yama/ptrace_scope",
        )


def breaks_sleepers() -> bool:
    """Return whether a call by gdb ends a sleeping process. Tries it on a child process.

    Where gdb cannot write the registers back ("Couldn't write extended state status": gdb 13 on
    some virtual machines), the system call that it interrupted fails with an invalid error number
    (512 to 516), and Python raises.
    """
    command = [sys.executable, "-I", "-S", "-c", _SLEEPER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            subprocess.run(
                ["gdb", "-nx", "-p", str(child.pid), "-batch", "-ex", "call (int)getpid()"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_BREAK_TIMEOUT)
            return child.poll() is not None
        finally:
            child.kill()
