"""Slurm on the hosts of a lab: a controller on the first one, a slurmd on each."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import LIMIT
from tests.lab.checking import Checks
from tests.lab.network import LabError

TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")

CONF = """\
ClusterName=lab
SlurmctldHost={first.name}({first.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=30
OverTimeLimit=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile={directory}/controller.pid
SlurmdPidFile={directory}/%n.pid
PartitionName=all Nodes={names} Default=YES State=UP OverSubscribe=YES PriorityTier=1 GraceTime=15
PartitionName=urgent Nodes={names} State=UP PriorityTier=9
"""


def missing() -> str:
    """The programs of Slurm that are not installed here."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    return ", ".join(each for each in TOOLS if shutil.which(each, path=path) is None)


class Slurm:
    """Starts job steps from the first host."""

    def __init__(self, checks: Checks, conf: Path) -> None:
        self._checks = checks
        self._environment = {"SLURM_CONF": str(conf)}

    def run(self, *words: str) -> tuple[int, str]:
        """Run a step. Return its exit status, and what all of its tasks wrote."""
        first = self._checks.lab.hosts[0]
        process, out, err = self._checks.start(first, ["srun", *words], self._environment)
        status = process.wait(LIMIT)
        return status, out.read_text(errors="replace") + err.read_text(errors="replace")

    def tool(self, *words: str) -> str:
        """Run another command of Slurm. Return what it prints."""
        first = self._checks.lab.hosts[0]
        process, out, err = self._checks.start(first, words, self._environment)
        status = process.wait(LIMIT)
        assert status == 0, err.read_text()
        return out.read_text()


@contextlib.contextmanager
def slurm(checks: Checks) -> Iterator[Slurm]:
    """A cluster of all hosts of a lab. It ends with the lab."""
    directory = checks.directory / "slurm"
    for name in ("state", *(host.name for host in checks.lab.hosts)):
        (directory / name).mkdir(parents=True)
    first, names = checks.lab.hosts[0], ",".join(host.name for host in checks.lab.hosts)
    conf = directory / "slurm.conf"
    nodes = (
        f"NodeName={host.name} NodeAddr={host.address} CPUs=8 State=UNKNOWN\n"
        for host in checks.lab.hosts
    )
    text = CONF.format(first=first, directory=directory, names=names)
    conf.write_text(text.replace("PartitionName", "".join(nodes) + "PartitionName", 1))
    # slurmd ends where it has to look for control groups and finds none.
    (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    key = directory / "key"
    key.write_bytes(os.urandom(256))
    key.chmod(0o400)
    files = [
        f"--{what}-file={directory}/{name}"
        for what, name in (("key", "key"), ("pid", "munge.pid"), ("log", "munge.log"))
    ]
    munge = ["munged", "--foreground", "--force", f"--socket={directory}/munge", *files]
    # All hosts see its socket: it is a file.
    daemons = [(first, [*munge, f"--seed-file={directory}/seed"])]
    daemons.append((first, ["slurmctld", "-D", "-f", str(conf)]))
    daemons += [(host, ["slurmd", "-D", "-f", str(conf)]) for host in checks.lab.hosts]
    path = {"PATH": f"{checks.environment['PATH']}:/usr/sbin", "SLURM_CONF": str(conf)}
    for host, words in daemons:
        checks.start(host, words, path)
        until = time.monotonic() + LIMIT
        while not (directory / "munge").exists() and time.monotonic() < until:
            time.sleep(0.05)
    until = time.monotonic() + LIMIT
    idle = ["env", f"SLURM_CONF={conf}", "sinfo", "--noheader", "--states=idle", "-o", "%D"]
    while time.monotonic() < until:
        with contextlib.suppress(LabError, subprocess.TimeoutExpired):
            if first.run(*idle).split() == [str(len(checks.lab.hosts))]:
                break
        time.sleep(0.2)
    yield Slurm(checks, conf)
