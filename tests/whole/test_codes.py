"""A code stands for one fault, whatever finds it: a rule, a check, the text of a log, or lint.

Whoever gives a code to a second finder describes here what both find. A new entry of the table of
known failures, a new check or a new rule that takes a code by mistake fails one of these tests.
"""

from __future__ import annotations

import ddpdoctor.diagnose.all_rules
import ddpdoctor.preflight  # noqa: F401 (registers the checks)
from ddpdoctor.commands.explain import entries
from ddpdoctor.core.finding import RULES
from ddpdoctor.failures import TABLE
from ddpdoctor.lint.rules import LINT_RULES
from ddpdoctor.preflight.check import CHECKS

RULES_AND_LOGS = {
    "DDP206": (
        "the script reads a local rank that the launcher does not pass",
        {"local-rank-option"},
    ),
    "DDP304": ("find_unused_parameters=True finds none", {"find-unused-in-vain"}),
    "DDP305": (
        "parameters get no gradient, and DDP waits for them",
        {"outputs-without-loss", "unused-listed", "unused-parameters"},
    ),
    "DDP323": ("a parameter is marked ready twice in a backward", {"ready-twice"}),
    "DDP329": (
        "backward begins with a loss that a collective has reduced",
        {"backward-through-collective"},
    ),
    "DDP502": ("a checkpoint has the keys of DDP's wrapper", {"wrapper-prefix"}),
    "DDP503": ("a checkpoint is loaded onto the GPU that saved it", {"no-map-location"}),
    "DDP707": ("the ranks have different models", {"models-differ"}),
    "DDP803": (
        "the ranks call different collectives",
        {"collectives-differ", "object-of-another-collective", "unpickled-from-peers"},
    ),
    "DDP808": ("a rank waits for input", {"pdb-quit"}),
    "DDP813": (
        "ranks or nodes never came to the rendezvous",
        {
            "lightning-member",
            "peers-missing",
            "rendezvous-timeout",
            "store-barrier",
            "store-barrier-waits",
        },
    ),
}
"""The codes of rules that run on records and of messages in logs, with the fault that both mean."""

ENDINGS = {f"DDP90{number}" for number in range(1, 8)}
"""How a rank ended: `ddpdoctor.diagnose.crashes.rules` has the pages for records and logs alike."""

CHECKS_AND_RULES = {
    "DDP001": ("launch-environment", "environment-missing"),
    "DDP002": ("port", "port-in-use"),
    "DDP003": ("host-name", "loopback-address"),
    "DDP004": ("network-interface", "docker-address"),
    "DDP005": ("shared-memory", "shared-memory-full"),
    "DDP006": ("limits", "too-many-open-files"),
    "DDP052": ("clocks", "clocks"),
    "DDP056": ("link-speed", "link-speed"),
    "DDP057": ("node-versions", "node-versions"),
    "DDP058": ("same-code", "same-code"),
}
"""What `ddpdoctor check` finds before a job starts, and a rule or a log afterwards."""


def test_a_message_with_the_code_of_a_rule_is_of_the_same_fault() -> None:
    with_page = {each.code for each in TABLE if each.page}
    shared: dict[str, set[str]] = {}
    for each in TABLE:
        if each.code not in with_page | ENDINGS and RULES[each.code].beside is not None:
            shared.setdefault(each.code, set()).add(each.known.name)
    assert shared == {code: names for code, (_, names) in RULES_AND_LOGS.items()}


def test_a_code_has_one_page() -> None:
    """That of the rule, if there is one: a second page would never be shown."""
    assert [each.known.name for each in TABLE if each.page and RULES[each.code].beside] == []
    assert [each.known.name for each in TABLE if each.page and each.code in ENDINGS] == []
    assert [code for code in entries() if not entries()[code].page] == []


def test_a_check_with_the_code_of_a_rule_is_of_the_same_fault() -> None:
    shared = {
        check.code: (name, RULES[check.code].name)
        for name, check in CHECKS.items()
        if check.code in RULES
    }
    assert shared == CHECKS_AND_RULES
    assert len({check.code for check in CHECKS.values()}) == len(CHECKS)


def test_lint_takes_the_codes_of_rules_or_has_its_own() -> None:
    known = RULES.keys() | {check.code for check in CHECKS.values()}
    of_rules = {each.code for each in LINT_RULES.values() if not each.name}
    assert of_rules <= RULES.keys()
    assert {each.code for each in LINT_RULES.values() if each.name} & known == set()
