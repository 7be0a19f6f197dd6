"""Register every rule of every family in `ddpdoctor.core.finding.RULES` by being imported."""

import importlib
import pkgutil

from ddpdoctor import diagnose
from ddpdoctor.core import plugins
from ddpdoctor.core.finding import RULES
from ddpdoctor.diagnose.crashes.rules import register_table

for _found in pkgutil.walk_packages(diagnose.__path__, f"{diagnose.__name__}."):
    if _found.name.rpartition(".")[2].startswith("rules"):
        importlib.import_module(_found.name)

plugins.load(plugins.RULES, RULES)
# Last, since the table also adds to codes that others have.
register_table()
