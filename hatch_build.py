"""Compiles the probe's core and the log's search, if there is a C compiler where it is installed.

Without one the package is the same, and does in Python what they do
(`ddpdoctor.probe.runtime.hot`, `ddpdoctor.failures.scan`).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = ("ddpdoctor/probe/runtime/_hot.c", "ddpdoctor/failures/_present.c")


class CompiledCore(BuildHookInterface):  # type: ignore[misc]
    """Makes each module beside its source, and the wheel one for this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile it before the wheel is put together; a source distribution has the source.

        With ``DDPDOCTOR_PURE_PYTHON=1`` nothing is compiled, and the wheel is one for all Pythons.
        """
        if self.target_name != "wheel" or os.environ.get("DDPDOCTOR_PURE_PYTHON"):
            return
        try:
            made = compiled(Path(self.root))
        except Exception as error:
            # No compiler, no headers of Python, another system: whatever it is, it is no reason
            # not to install.
            self.app.display_warning(f"ddpdoctor's C modules are not compiled: {error}")
            return
        if not made:
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"].extend(made)


def compiled(root: Path) -> list[str]:
    """Compile the modules; the paths below ``root`` of those that could be.

    Raises:
        Exception: There is no compiler.
    """
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    modules = [
        Extension(
            source.removesuffix(".c").replace("/", "."),
            [str(root / source)],
            extra_compile_args=["-O2", "-g0"],
            optional=True,
        )
        for source in SOURCES
    ]
    command = build_ext(Distribution({"name": "ddpdoctor", "ext_modules": modules}))
    command.build_lib = str(root)
    # Else one that was made before stays where only its parts have changed.
    command.force = True
    with tempfile.TemporaryDirectory() as objects:
        command.build_temp = objects
        command.ensure_finalized()
        command.run()
    paths = [Path(command.get_ext_fullpath(each.name)) for each in modules]
    return [path.relative_to(root).as_posix() for path in paths if path.exists()]
