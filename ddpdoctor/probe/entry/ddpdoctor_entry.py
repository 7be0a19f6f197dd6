"""Load the probe in a process that may become a rank. Load nothing in other processes.

A torchrun worker loads it at once, any other process when it imports torch. An audit hook
(PEP 578) notices that import, and an exception that ends the process. ``sys.excepthook`` and
``sys.meta_path`` stay as they are for code that checks whether they are Python's own.
"""

import os
import sys

TYPE_CHECKING = False
"""As `typing.TYPE_CHECKING`, without the import, which takes milliseconds."""
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_FILES = "ddpdoctor.probe.observers.files"
_AUDITED = frozenset(
    ("import", "sys.excepthook", "open", "os.mkdir", "os.rename", "os.remove", "os.rmdir",
     "shutil.rmtree")
)  # fmt: skip
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")


def start() -> None:
    """Load the probe if this process is a worker. Otherwise wait until it may become a rank."""
    if "DDPDOCTOR_RUN_DIR" not in os.environ:
        return
    _safely(_start)


def _start() -> None:
    if _is_launcher():
        return
    loaded = _is_worker() or "torch" in sys.modules
    if loaded:
        _load()
    sys.addaudithook(_audit_hook(loaded))


def _audit_hook(loaded: bool) -> "Callable[[str, tuple[Any, ...]], None]":
    """Return the audit hook of this process.

    All its names are bound here, because it is still called after the interpreter has cleared its
    modules. An error in it would be raised by the audited operation.
    """
    modules, safely, load, fails = sys.modules, _safely, _load, _fails
    audited, files = _AUDITED, _FILES

    def audit(event: str, args: "tuple[Any, ...]") -> None:
        nonlocal loaded
        if event not in audited:
            return
        if event == "import":
            # `importlib.import_module` is not audited, but the imports within torch are.
            if not loaded and (args[0] == "torch" or "torch" in modules):
                loaded = True
                safely(load)
        elif event == "sys.excepthook":
            fails(args, loaded)
        elif loaded:
            # While torch is being imported, it lacks this attribute.
            touched = getattr(modules.get(files), "touched", None)
            if touched is not None:
                touched(event, args)

    return audit


def _fails(args: "tuple[Any, ...]", loaded: bool) -> None:
    """Record the exception that ends this process, before Python prints it.

    Args:
        args: The hook that is about to be called, and the exception's type, value and traceback.
        loaded: Whether the probe is loaded in this process.

    Raises:
        RuntimeError: The exception was printed already, so Python does not call the hook.
    """
    # Ctrl-C needs no record, and an import now could stop Python from exiting with its signal.
    if not loaded and (args[1] is KeyboardInterrupt or not _safely(_load_failures)):
        return
    sys.modules["ddpdoctor.probe.observers.failures"].uncaught(args[2])
    if loaded:
        sys.modules["ddpdoctor.probe.runtime.debugger"].excepthook_runs(*args)


def _load_failures() -> None:
    """Load the module that describes exceptions."""
    with _FromLibrary():
        _load_package()
        from ddpdoctor.probe.observers import failures  # noqa: F401


def _load() -> None:
    """Load the probe and start it."""
    with _FromLibrary():
        _load_package()
        from ddpdoctor.probe import process
    process.start()


def start_late(directory: str) -> None:
    """Start the probe in a rank that runs already (`ddpdoctor.probe.late`)."""

    def load() -> None:
        with _FromLibrary():
            _load_package()
            from ddpdoctor.probe import late
        late.start(directory)

    _safely(load)


class _FromLibrary:
    """Find modules of Python's library even if the job has files with these names.

    A script's folder comes before the library in ``sys.path``. Other threads import as usual.
    """

    def __init__(self) -> None:
        import _thread
        from importlib.machinery import PathFinder

        self._ident, self._find = _thread.get_ident, PathFinder.find_spec
        self._thread = self._ident()
        library = os.path.dirname(os.__file__)
        self._places = [library, os.path.join(library, "lib-dynload")]

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> "Any":
        """Return the spec of a module that is directly in the library, else None."""
        if path is not None or self._ident() != self._thread:
            return None
        return self._find(name, self._places)


def _load_package() -> None:
    """Make ``ddpdoctor`` importable. It may not be installed for this interpreter."""
    if "ddpdoctor" in sys.modules:
        return
    import importlib.util

    spec = importlib.util.spec_from_file_location(
        "ddpdoctor",
        os.path.join(_PACKAGE, "__init__.py"),
        submodule_search_locations=[_PACKAGE],
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ddpdoctor"] = module
    spec.loader.exec_module(module)


def _is_worker() -> bool:
    """Return whether torchrun has started this process as a rank.

    It makes each rank a session leader. Children of a rank inherit the environment but lead no
    session. With debugger options, a rank started by another launcher counts as well.
    """
    if os.environ.get("DDPDOCTOR_DEBUG", "attach") not in ("", "attach"):
        return True
    names = {"TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK"}
    return names <= os.environ.keys() and os.getsid(0) == os.getpid()


def _is_launcher() -> bool:
    """Return whether this process is torchrun itself, which is never a rank."""
    words = sys.orig_argv[1:8]
    return any(word in _LAUNCHERS for word in words) or any(
        os.path.basename(word) in ("torchrun", "torchrun-script.py") for word in words[:2]
    )


def _safely(step: "Callable[[], None]") -> bool:
    """Call ``step``. If it raises, print the exception and return False."""
    try:
        step()
    except Exception as error:
        sys.stderr.write(f"ddpdoctor: this process is not watched: {error!r}\n")
        return False
    return True
