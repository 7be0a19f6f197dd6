"""Use the parts of debugpy and its pydevd that are beyond their documented API.

Checked with debugpy 1.8.1 and 1.8.22. Tracing works by ``sys.settrace`` up to Python 3.11 and by
``sys.monitoring`` from 3.12 on. Each use is guarded by a check for the feature.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

from ddpdoctor.probe.runtime import control, values

_VALIDATION = "PYDEVD_DISABLE_FILE_VALIDATION"

_NOWHERE = ("127.0.0.1", 1)
"""The address that debugpy believes it listens on. Nothing listens there."""

_PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

_THREAD_STARTS = 30.0  # seconds for a thread of pydevd to start on a busy machine

_arrivals: _Arrivals | None = None
_jobs_trace: Any = None  # the job's own trace function for new threads (coverage, say)


class _Arrivals:
    """Replaces the listening socket from which pydevd accepts connections.

    A socket that listens could be reached by every user of the machine; here the sessions are
    handed in by :func:`serve`. It has the methods of a socket that pydevd calls.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()

    def put(self, connection: socket.socket) -> None:
        """Add a session."""
        self._waiting.put(connection)

    def getsockname(self) -> tuple[str, int]:
        """Return an address that nothing can connect to."""
        return _NOWHERE

    def listen(self, backlog: int) -> None:
        """Do nothing. pydevd calls it before each ``accept``."""

    def accept(self) -> tuple[socket.socket, str]:
        """Return the next session.

        Raises:
            OSError: pydevd ends.
        """
        connection = self._waiting.get()
        if connection is None:
            raise OSError("closed")
        return connection, ""

    def close(self) -> None:
        """End the wait."""
        self._waiting.put(None)


def serve(connection: socket.socket) -> None:
    """Let debugpy serve one session. Start it, or wake it after :func:`silence`.

    Raises:
        ImportError: This interpreter has no debugpy.
        RuntimeError: The job has made debugpy listen itself.
    """
    global _arrivals, _jobs_trace
    try:
        if _arrivals is None:
            _jobs_trace = threading.gettrace()
            arrivals = _Arrivals()
            load()
            with _environment(_VALIDATION, "1"):
                import debugpy

                # Otherwise DataLoader workers are debugged, whatever the client says
                # (debugpy#1168).
                debugpy.configure(subProcess=False)
                with _accepting_from(arrivals):
                    # A separate adapter process would hold the rank's stdout open.
                    debugpy.listen(_NOWHERE, in_process_debug_adapter=True)
            for improve in (_count_as_library, _describe_tensors):
                with contextlib.suppress(Exception):
                    improve()
            register = getattr(threading, "_register_atexit", None)
            if register is not None:
                register(_let_go)
            _arrivals = arrivals
        else:
            import pydevd
            import pydevd_tracing

            pydevd_tracing.replace_sys_set_trace_func()
            pydevd.settrace(
                suspend=False, trace_only_current_thread=False, patch_multiprocessing=False
            )
    except BaseException:
        connection.close()
        raise
    _arrivals.put(connection)


def serve_safely(key: str) -> str | None:
    """Let debugpy serve the session that the supervisor knows by ``key``. Return any error."""
    hook = sys.breakpointhook
    try:
        serve(control.session(key))
    except ImportError:
        return f"{sys.executable} has no debugpy; install it there (pip install debugpy)"
    except Exception as error:
        return repr(error)
    finally:
        # pydevd's own hook ignores a breakpoint() while no client is attached.
        sys.breakpointhook = hook
    return None


def load() -> None:
    """Import debugpy.

    Raises:
        ImportError: This interpreter has none.
    """
    # Otherwise it warns about Python's frozen modules on the job's stderr.
    with _environment(_VALIDATION, "1"):
        import debugpy.server  # noqa: F401 (puts pydevd on sys.path)


def _count_as_library() -> None:
    """Show our frames in a stack as those of a library, which a client does not open.

    Files in site-packages count as a library anyway, but not those of an editable installation.
    """
    import pydevd

    filtering = pydevd.get_global_debugger()._files_filtering
    filtering.set_library_roots([*filtering._get_library_roots(), _PACKAGE])


def _describe_tensors() -> None:
    """Show a tensor by its summary, and its parts without the properties that raise.

    The same holds for tensors in collections, whose text would wait for a GPU. In the console and
    on the clipboard they are printed as torch does.
    """
    from _pydevd_bundle import pydevd_extension_api, pydevd_extension_utils

    class TensorText:
        def can_provide(self, type_object: type, type_name: str) -> bool:
            return values.is_tensor_type(type_object) or type_object in (list, tuple, dict)

        def get_str(self, val: Any) -> str | None:
            return values.summary(val) if values.holds_tensor(val) else None

        def get_str_in_context(self, val: Any, context: str) -> str | None:
            return None if context in ("repl", "clipboard") else self.get_str(val)

    class TensorParts:
        def can_provide(self, type_object: type, type_name: str) -> bool:
            return values.is_tensor_type(type_object)

        def get_dictionary(self, var: Any) -> dict[str, Any]:
            return dict(values.children(var))

        def resolve(self, var: Any, attribute: str) -> Any:
            return self.get_dictionary(var)[attribute]

    pydevd_extension_api.StrPresentationProvider.register(TensorText)
    pydevd_extension_api.TypeResolveProvider.register(TensorParts)
    manager = pydevd_extension_utils.EXTENSION_MANAGER_INSTANCE
    manager._ensure_loaded()
    manager.loaded_extensions.append(
        SimpleNamespace(TensorText=TensorText, TensorParts=TensorParts)
    )
    manager.type_to_instance.clear()


@contextlib.contextmanager
def _accepting_from(arrivals: _Arrivals) -> Iterator[None]:
    """Let pydevd's thread that waits for connections use ``arrivals`` as its listening socket.

    Raises:
        RuntimeError: This debugpy makes its socket in another way.
    """
    import debugpy
    import pydevd

    made = threading.Event()

    def create_server_socket(host: str, port: int) -> _Arrivals:
        made.set()
        return arrivals

    before = getattr(pydevd, "create_server_socket", None)
    if before is None:
        raise RuntimeError(f"debugpy {debugpy.__version__} is not known to ddpdoctor")
    pydevd.create_server_socket = create_server_socket
    try:
        yield
        if not made.wait(_THREAD_STARTS):
            raise RuntimeError(f"debugpy {debugpy.__version__} did not start")
    finally:
        pydevd.create_server_socket = before


def _let_go() -> None:
    """End a thread of pydevd that might not end, before the interpreter joins its threads.

    ``CheckAliveThread`` is not a daemon thread, and waits to answer a client that has left.
    Callbacks of ``threading._register_atexit`` (3.9 to 3.14) run before that join, those of
    ``atexit`` after it.
    """
    with contextlib.suppress(Exception):
        import pydevd

        thread = getattr(pydevd.get_global_debugger(), "check_alive_thread", None)
        if thread is not None:
            thread.do_kill_pydev_thread()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def silence() -> None:
    """Stop tracing in all threads, which debugpy leaves on after a disconnect."""
    if _arrivals is None:
        return
    import pydevd
    from _pydev_bundle import pydev_monkey
    from _pydevd_bundle import pydevd_api

    debugger = pydevd.get_global_debugger()
    if debugger is not None:
        # A thread may be about to stop for the client that has left.
        pydevd_api.PyDevdAPI().request_disconnect(debugger, resume_threads=True)
    threading.settrace(_jobs_trace)
    # pydevd turns on tracing in new threads.
    pydev_monkey.undo_patch_thread_modules()
    if _uses_monitoring():
        pydevd.pydevd_sys_monitoring.stop_monitoring(all_threads=True)
        return
    import pydevd_tracing

    settrace = _original_settrace()

    def uninstall(frame: FrameType, event: str, arg: Any) -> None:
        """Remove the trace function of each thread at its next call."""
        settrace(None)
        frame.f_trace = None

    for top in sys._current_frames().values():
        _untrace(top)
    pydevd_tracing.set_trace_to_threads(uninstall)
    pydevd_tracing.restore_sys_set_trace_func()


def _untrace(frame: FrameType | None) -> None:
    while frame is not None:
        frame.f_trace = None
        frame = frame.f_back


def _original_settrace() -> Any:
    import pydevd_tracing

    return pydevd_tracing.TracingFunctionHolder._original_tracing or sys.settrace


def object_id(number: object) -> object:
    """Return the ``id()`` of the frame that a client knows by a number; None if there is none."""
    from _pydevd_bundle._debug_adapter.pydevd_base_schema import BaseSchema

    return BaseSchema._dap_id_to_obj_id.get(number)


def _uses_monitoring() -> bool:
    from _pydevd_bundle import pydevd_constants

    return bool(getattr(pydevd_constants, "PYDEVD_USE_SYS_MONITORING", False))


def stop_at(frame: FrameType) -> None:
    """Stop this thread at the next line of ``frame``, as ``breakpoint()`` there would."""
    import pydevd

    pydevd.settrace(
        suspend=True,
        trace_only_current_thread=True,
        patch_multiprocessing=False,
        stop_at_frame=frame,
    )


def stop_at_exception(error: BaseException) -> None:
    """Stop at the frame that raised, with readable locals, whatever the client asked for.

    ``debugpy.trigger_exception_handler`` does the same, but only 1.8.22 has it.
    """
    import pydevd

    debugger = pydevd.get_global_debugger()
    thread = threading.current_thread()
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    info = debugger.set_additional_thread_info(thread)
    info.is_tracing += 1
    try:
        with _unmonitored():
            debugger.do_stop_on_unhandled_exception(
                thread,
                frames[-1],
                {id(frame): frame for frame in frames},
                (type(error), error, error.__traceback__),
            )
    finally:
        info.is_tracing -= 1


@contextlib.contextmanager
def _unmonitored() -> Iterator[None]:
    """Keep ``sys.monitoring`` out of this thread. ``is_tracing`` does not do that.

    Otherwise pydevd, about to stop at a frame, stops at the first line of the library that it calls
    to do so. Within its callbacks Python itself prevents that.
    """
    if not _uses_monitoring():
        yield
        return
    import pydevd

    monitoring = pydevd.pydevd_sys_monitoring
    # It would begin to monitor a new thread at its first event.
    monitoring.start_monitoring()
    monitoring.stop_monitoring()
    try:
        yield
    finally:
        monitoring.start_monitoring()


def leave_child_alone() -> None:
    """Stop tracing and close connections in a forked child, which could not serve a stop."""
    if _arrivals is None:
        return
    import pydevd
    from _pydev_bundle import pydev_monkey
    from _pydevd_bundle import pydevd_constants

    threading.settrace(None)
    pydev_monkey.undo_patch_thread_modules()
    if _uses_monitoring():
        pydevd.pydevd_sys_monitoring.stop_monitoring(all_threads=True)
    else:
        import pydevd_tracing

        _original_settrace()(None)
        _untrace(sys._getframe())
        pydevd_tracing.restore_sys_set_trace_func()
    debugger = pydevd.get_global_debugger()
    for owner, name in (
        (debugger, "_client_socket"),
        (getattr(debugger, "reader", None), "sock"),
        (getattr(debugger, "writer", None), "sock"),
    ):
        connection = getattr(owner, name, None)
        if isinstance(connection, socket.socket):
            # Close it, but do not shut it down: it is the parent's, too.
            connection.close()
    pydevd_constants.set_global_debugger(None)
