"""Python imports this at start-up in every process of a job, because its folder is on PYTHONPATH.

It starts the probe, then gives way to the ``sitecustomize`` that would have run without it.
An interpreter started with ``-I`` or ``-E`` ignores PYTHONPATH and runs bare.
"""

import os
import sys


def _start() -> None:
    import importlib.util

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    if "DDPDOCTOR_RUN_DIR" not in os.environ:
        return
    package = os.path.dirname(os.path.dirname(here))
    if "ddpdoctor" not in sys.modules:
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


def _chain() -> None:
    import importlib.util
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        # As if this file were not there either; the interpreter expects exactly this.
        raise ImportError("No module named 'sitecustomize'", name="sitecustomize")
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


try:
    _start()
except Exception as error:
    sys.stderr.write(f"ddpdoctor: this process is not watched: {error!r}\n")
_chain()
