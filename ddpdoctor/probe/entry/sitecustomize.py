"""Run the user's own ``sitecustomize``, then start ddpdoctor in this Python.

Python imports this at start-up in every process of a job, because its folder is on PYTHONPATH. Each
Python that a job starts runs this file, even 2.7: use no newer syntax. An interpreter that is too
old for ddpdoctor, or started with ``-I`` or ``-E``, runs without it.
"""

import os
import sys

_supported = sys.version_info >= (3, 10)
if _supported:
    import ddpdoctor_entry  # type: ignore[import-not-found]

    del sys.modules["ddpdoctor_entry"]
_folder = os.path.dirname(__file__)
sys.path[:] = [_each for _each in sys.path if _each != _folder]
del sys.modules["sitecustomize"]
try:
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
finally:
    if _supported:
        ddpdoctor_entry.start()
