"""Python imports this at start-up in every process of a job, because its folder is on PYTHONPATH.

It gives way to the ``sitecustomize`` that would have run without it, and loads the probe where this
process may become a rank: at once in a worker of torchrun, else when it imports torch, or when an
exception ends it. Any other Python of the job, a helper say, pays for this file and nothing else.
An interpreter started with ``-I`` or ``-E`` ignores PYTHONPATH and runs bare.
"""

import os
import sys

TYPE_CHECKING = False
"""As `typing` has it, which takes milliseconds to import."""
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_HERE = os.path.dirname(os.path.abspath(__file__))
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")


def _load() -> None:
    """Load the probe and start it."""
    package = os.path.dirname(os.path.dirname(_HERE))
    if "ddpdoctor" not in sys.modules:
        import importlib.util

        # By location: this interpreter may be one that has no ddpdoctor installed.
        spec = importlib.util.spec_from_file_location(
            "ddpdoctor",
            os.path.join(package, "__init__.py"),
            submodule_search_locations=[package],
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["ddpdoctor"] = module
        spec.loader.exec_module(module)
    from ddpdoctor.probe import process

    process.start()


def _is_worker() -> bool:
    """Whether torchrun has started this process as a rank.

    It makes each a session leader; what a rank starts in turn inherits the environment, but leads
    no session. A debugger's options may have to hold a rank that was started otherwise.
    """
    if os.environ.get("DDPDOCTOR_DEBUG", "attach") not in ("", "attach"):
        return True
    names = {"TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK"}
    return names <= os.environ.keys() and os.getsid(0) == os.getpid()


def _is_launcher() -> bool:
    """Whether this process is torchrun itself, which is never a rank."""
    words = sys.orig_argv[1:8]
    return any(word in _LAUNCHERS for word in words) or any(
        os.path.basename(word) in ("torchrun", "torchrun-script.py") for word in words[:2]
    )


class _Waiting:
    """A finder that finds nothing, and loads the probe right before torch is imported."""

    def __init__(self) -> None:
        self.excepthook = sys.excepthook

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """What Python asks every finder at every import."""
        if name == "torch":
            self.over()

    def over(self) -> bool:
        """Load the probe, if it was not loaded yet; whether that was now."""
        if self not in sys.meta_path:
            return False
        sys.meta_path.remove(self)
        if sys.excepthook == self.failed:
            sys.excepthook = self.excepthook
        return _safely(_load)

    def failed(
        self, kind: type[BaseException], error: BaseException, trace: "TracebackType | None"
    ) -> None:
        """An exception ends this process, which has not imported torch yet."""
        # Ctrl-C needs no record, and Python dies of it as long as nothing is imported meanwhile.
        if kind is not KeyboardInterrupt and self.over():
            sys.modules["ddpdoctor.probe.observers.failures"].uncaught(error)
        self.excepthook(kind, error, trace)


def _start() -> None:
    if "DDPDOCTOR_RUN_DIR" not in os.environ or _is_launcher():
        return
    if _is_worker():
        _load()
    else:
        waiting = _Waiting()
        sys.meta_path.insert(0, waiting)
        sys.excepthook = waiting.failed


def _safely(step: "Callable[[], None]") -> bool:
    try:
        step()
    except Exception as error:
        sys.stderr.write(f"ddpdoctor: this process is not watched: {error!r}\n")
        return False
    return True


sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
_safely(_start)
# From here on as if this file were not there either.
del sys.modules["sitecustomize"]
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401
