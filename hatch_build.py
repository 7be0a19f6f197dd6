"""Compiles the probe's core for the Python that installs it, if there is a C compiler.

Without one the package is the same, and does in Python what the core does
(`ddpdoctor.probe.runtime.hot`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "ddpdoctor/probe/runtime/_hot.c"


class CompiledCore(BuildHookInterface):  # type: ignore[misc]
    """Makes ``_hot`` beside its source, and the wheel one for this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile it before the wheel is put together; a source distribution has the source."""
        if self.target_name != "wheel":
            return
        try:
            made = compiled(Path(self.root))
        except Exception as error:
            # No compiler, no headers of Python, another system: whatever it is, it is no reason
            # not to install.
            self.app.display_warning(f"ddpdoctor's core is not compiled: {error}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"].append(made)


def compiled(root: Path) -> str:
    """Compile the core; its path below ``root``.

    Raises:
        Exception: It cannot be compiled.
    """
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    extension = Extension(
        "ddpdoctor.probe.runtime._hot", [str(root / SOURCE)], extra_compile_args=["-O2", "-g0"]
    )
    command = build_ext(Distribution({"name": "ddpdoctor", "ext_modules": [extension]}))
    command.build_lib = str(root)
    # Else one that was made before stays where only its parts have changed.
    command.force = True
    with tempfile.TemporaryDirectory() as objects:
        command.build_temp = objects
        command.ensure_finalized()
        command.run()
    path = Path(command.get_ext_fullpath(extension.name))
    return path.relative_to(root).as_posix()
