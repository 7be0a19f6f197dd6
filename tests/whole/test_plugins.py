"""Rules, checks and known failures of other packages: found, reported when faulty, in no rank."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import ROOT, Doctor
from tests.support.drawn_runs import write_run

GROUPS = ("ddpdoctor.rules", "ddpdoctor.checks", "ddpdoctor.failures")

PAGE = (ROOT / "docs" / "plugins.md").read_text()
RULE, SCRATCH, FAILURE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
"""The examples as they are documented."""

CHECK = """
from ddpdoctor.preflight.check import check, judged, warning

@check("scratch", "ACME001")
def scratch(situation):
    '''The node has its scratch disk.'''
    few = warning("the scratch disk is full", fix="Remove old runs", paste="ls -t /scratch")
    return judged("nothing is free", [few])
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


def install(site: Path, module: str, source: str, group: str, value: str = "") -> None:
    """Lay out a distribution as pip installs it."""
    (site / f"{module}.py").write_text(textwrap.dedent(source))
    info = site / f"{module}-1.2.dist-info"
    info.mkdir()
    name = module.replace("_", "-")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[ddpdoctor.{group}]\nacme = {value or module}\n")


def seen(site: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}


def test_the_finding_of_a_rule_is_reported(doctor: Doctor, site: Path) -> None:
    install(site, "acme_rules", RULE, "rules")
    path = write_run(doctor.directory / "r", 2, 5)
    told = doctor.cli("report", str(path), env=seen(site))
    assert "warning ACME101: 2 of 8 GPUs are used" in told.stdout, told.stderr
    assert (told.status, told.stderr) == (1, "")
    ignored = doctor.cli("report", "--ignore", "acme", "--json", str(path), env=seen(site))
    assert "ACME101" not in ignored.stdout
    page = doctor.cli("explain", "ACME101", env=seen(site)).stdout
    assert page.startswith("ACME101 few-ranks (warning)\n\nThe job has fewer ranks than a node")
    assert "ACME101" not in doctor.cli("report", str(path)).stdout


def test_a_check_runs_among_those_of_the_machine(doctor: Doctor, site: Path) -> None:
    install(site, "acme_checks", CHECK, "checks")
    told = doctor.cli("check", "--only", "scratch", "--json", env=seen(site))
    (check,) = json.loads(told.stdout)["checks"]
    assert (check["code"], check["status"], told.status) == ("ACME001", "warn", 1)
    assert check["findings"][0]["code"] == "ACME001"
    listed, across = doctor.cli("check", "--list", env=seen(site)).stdout.split("Across nodes")
    assert listed.rstrip().splitlines()[-1].startswith("scratch ") and "scratch " not in across


def test_the_documented_check_runs(doctor: Doctor, site: Path) -> None:
    install(site, "acme_checks", SCRATCH, "checks")
    told = doctor.cli("check", "--only", "scratch", "--json", env=seen(site))
    (check,) = json.loads(told.stdout)["checks"]
    assert check["code"] == "ACME001"
    assert check["status"] in ("skipped", "pass", "warn"), check


def test_a_failure_is_known_in_logs(doctor: Doctor, site: Path) -> None:
    install(site, "acme_failures", FAILURE, "failures", "acme_failures:FAILURES")
    log = doctor.directory / "job.log"
    log.write_text("[rank1]: ACMEQuotaError: project vision has no hours left\n")
    told = doctor.cli("report", "--log", str(log), env=seen(site))
    assert "ACME901: rank 1 ran out of the quota of project vision" in told.stdout, told.stderr
    assert told.stderr == ""
    page = doctor.cli("explain", "ACME901", env=seen(site)).stdout
    assert "The project's quota was used up." in page


BROKEN = {
    "import": ("import no_such_module", "No module named 'no_such_module'"),
    "exit": ("raise SystemExit('no licence')", "SystemExit('no licence')"),
    "name": (RULE.replace("ACME101", "DDP101"), "DDP101 is registered twice"),
    "reserved": (RULE.replace("ACME101", "DDP199"), "DDP199 is not a valid code for a plug-in"),
    "half": (f"{RULE}\nraise LookupError('half')", "LookupError('half')"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_one_that_is_faulty_is_left_out_in_one_line(doctor: Doctor, site: Path, fault: str) -> None:
    source, said = BROKEN[fault]
    install(site, "acme_rules", source, "rules")
    install(site, "zeta_rules", RULE.replace("ACME101", "ZETA101"), "rules")
    path = write_run(doctor.directory / "r", 2, 5)
    told = doctor.cli("report", str(path), env=seen(site))
    (line,) = told.stderr.splitlines()
    assert line.startswith("ddpdoctor: warning: the plug-in acme-rules 1.2 is left out: acme_rules")
    assert said in line
    assert "ZETA101" in told.stdout and "ACME101" not in told.stdout
    assert told.status == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (FAILURE.replace("{project}", "{projects}"), "quota: its pattern has no group projects"),
        (FAILURE.replace("ACMEQuotaError: project vision", "Vision"), "does not match"),
        (FAILURE.replace("ACMEQuotaError: project ", ""), "has no literal"),
        ("FAILURES = ['quota']", "'quota' is not a Failure"),
        (FAILURE.replace('"quota"', '"exception"').replace("ACME901", "acme"), "not a valid code"),
        ("FAILURES = 5", "not iterable"),
    ],
)
def test_a_faulty_failure_is_left_out(doctor: Doctor, site: Path, wrong: str, said: str) -> None:
    install(site, "acme_failures", wrong, "failures", "acme_failures:FAILURES")
    log = doctor.directory / "job.log"
    log.write_text("[rank1]: RuntimeError: Address already in use\n")
    told = doctor.cli("report", "--log", str(log), env=seen(site))
    (line,) = told.stderr.splitlines()
    assert "the plug-in acme-failures 1.2 is left out" in line and said in line
    assert told.status in (1, 2)


FAILS = "from ddpdoctor import rule, Severity\n@rule('ACME101', 'x', Severity.INFO)\n"
FAILS += "def x(run):\n    '''X.'''\n    raise LookupError('no record')\n    yield\n"


def test_a_rule_that_raises_is_reported_with_its_package(doctor: Doctor, site: Path) -> None:
    install(site, "acme_rules", FAILS, "rules")
    told = doctor.cli("report", str(write_run(doctor.directory / "r", 2, 5)), env=seen(site))
    (line,) = told.stderr.splitlines()
    assert line.startswith(
        "ddpdoctor: warning: error in ACME101 of the plug-in acme-rules 1.2: "
        f"LookupError('no record') at {site}/acme_rules.py:5 (report it to its authors)"
    )


def test_ranks_load_no_plug_in_and_the_supervisor_does(doctor: Doctor, site: Path) -> None:
    mark = "import os, sys\nopen(f'loaded-{os.getpid()}', 'w').write(sys.argv[0])\n"
    install(site, "acme_rules", mark + RULE, "rules")
    install(site, "acme_broken", "1/0", "rules")
    doctor.write(
        "job.py",
        """
        import sys, torch.distributed as d
        d.init_process_group("gloo")
        d.barrier()
        sys.stdout.write(f"loaded: {[each for each in sys.modules if each.startswith('acme')]}\\n")
        d.destroy_process_group()
        """,
    )
    live = doctor.start("--nproc-per-node", "2", "--no-vscode", "job.py", env=seen(site))
    result = live.finish()
    assert result.stdout.splitlines() == ["loaded: []"] * 2, result.stderr
    assert result.ours.count("the plug-in acme-broken 1.2 is left out") == 1
    assert "ACME101" in result.ours
    assert [each.name for each in doctor.directory.glob("loaded-*")] == [
        f"loaded-{live.process.pid}"
    ]


def test_help_loads_none(site: Path) -> None:
    install(site, "acme_rules", "raise SystemExit(9)", "rules")
    for words in (["--help"], ["run", "--help"], ["--version"]):
        done = subprocess.run(
            [sys.executable, "-m", "ddpdoctor", *words],
            env={**os.environ, **seen(site)},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_the_groups_are_documented() -> None:
    for group in GROUPS:
        assert f"`{group}`" in PAGE
