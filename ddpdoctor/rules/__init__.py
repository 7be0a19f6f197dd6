"""The rules: importing this package registers them all in `ddpdoctor.core.finding.RULES`."""

import importlib
import pkgutil

from ddpdoctor.rules import failures

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

# Last, since the table also adds to codes that others have.
failures.register()
