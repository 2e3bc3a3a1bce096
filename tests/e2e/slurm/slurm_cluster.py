"""A Slurm cluster on this machine only: the real controller and one daemon per node, on the loopback interface.

It uses no systemd, no cgroups and no accounting, so that it runs in a container. The daemons need root. They run in the
background and would outlive tests that are killed. Therefore a process of this file watches its standard input and
stops the daemons when the tests close their end or die.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged")
SLURM_CONF = """\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
AccountingStorageType=accounting_storage/none
SchedulerParameters=batch_sched_delay=0,sched_interval=1
KillWait=30
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] CPUs=8 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Return the reason why no cluster can start here, for ``pytest.mark.skipif``, or None."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    absent = [program for program in PROGRAMS if not shutil.which(program)]
    return f"no {', '.join(absent)} here: apt-get install slurm-wlm munge" if absent else None


@dataclass
class Cluster:
    """A running cluster. Commands use it through the variables in ``environment``."""

    folder: Path
    nodes: int
    _watch: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Start all daemons and wait until every node is idle."""
        watch = [sys.executable, __file__, str(self.folder), str(self.nodes)]
        self._watch = subprocess.Popen(watch, stdin=subprocess.PIPE, start_new_session=True)
        host = socket.gethostname().split(".")[0]
        controller = _free_ports(1 + self.nodes)
        first = controller + 1
        for name in ("state", "munge", *(f"spool-n{node}" for node in range(1, self.nodes + 1))):
            (self.folder / name).mkdir(mode=0o700)
        (self.folder / "slurm.conf").write_text(
            SLURM_CONF.format(
                host=host,
                folder=self.folder,
                nodes=self.nodes,
                controller_port=controller,
                first_port=first,
                last_port=first + self.nodes - 1,
            )
        )
        key = self.folder / "munge" / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.run(
            *("munged", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.sock"),
            *(f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munge/munged.log"),
            f"--seed-file={self.folder}/munge/seed",
        )
        self.run("slurmctld", "-f", str(self.folder / "slurm.conf"))
        for node in range(1, self.nodes + 1):
            self.run("slurmd", "-f", str(self.folder / "slurm.conf"), "-N", f"n{node}")
        self.wait_for(lambda: self.run("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * self.nodes)

    def stop(self) -> None:
        """Stop all jobs and daemons, and wait for their end."""
        if self._watch:
            self._watch.communicate(timeout=600)

    def end(self) -> None:
        """Stop all jobs and daemons. munged stops last, because the other daemons use it while they stop."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):  # the controller itself may have failed
            self.run("scancel", "--full", "--signal=KILL", "--user=root")
            self.run("scancel", "--user=root")
            self.wait_for(lambda: not self.run("squeue", "-h"), 20)
        for pattern in ("slurmd-*.pid", "slurmctld.pid", "munged.pid"):
            pids = [int(path.read_text()) for path in self.folder.glob(pattern)]
            for pid in pids:
                _kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + 20
            while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
                time.sleep(0.1)
            for pid in filter(_alive, pids):
                _kill(pid, signal.SIGKILL)

    def run(self, *command: str, cwd: Path | None = None, **env: str) -> str:
        """Run a command on the cluster and return its output. A dead controller would make it hang without the timeout."""
        done = subprocess.run(
            command,
            cwd=cwd,
            env=os.environ | self.environment | env,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return the controller's record of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", number)))

    def wait_for(self, condition: Callable[[], bool], seconds: float = 600) -> None:
        """Wait until ``condition()`` holds. ``sbatch --wait`` would poll at growing intervals."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s; {self.run('squeue')}"
            time.sleep(0.2)

    def finish(self, number: str) -> dict[str, str]:
        """Wait for the end of a job and return its record."""
        self.wait_for(lambda: not self.run("squeue", "-h", "-j", number, "-t", "PD,R,CG,RQ", "-o", "%T").strip())
        return self.job(number)


def _free_ports(count: int) -> int:
    """Return the first of ``count`` consecutive free ports, below those that the system assigns to connections."""
    for _ in range(1000):
        first = random.SystemRandom().randrange(20_000, 32_000 - count)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise OSError("no free ports between 21000 and 32000")


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


if __name__ == "__main__":
    sys.stdin.read()
    Cluster(Path(sys.argv[1]), int(sys.argv[2])).end()
