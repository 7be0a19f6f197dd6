"""Import this module to register the rules of all families in `ddpdoctor.core.finding.RULES`."""

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
# Last, because the table also adds to the codes of other rules.
register_table()
