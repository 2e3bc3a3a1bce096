"""A Slurm cluster on this machine: the real controller and one daemon per node, on the loopback interface.

The cluster uses no systemd, no cgroups and no accounting, so that it runs in a container. The daemons need root. They
run in the background and would outlive tests that are killed. Therefore a helper process, which runs this file, stops
the daemons when its standard input is closed, at the end of the tests or when they are killed.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from bert.parallel.master_port import free_port

REPOSITORY = Path(__file__).resolve().parents[3]

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
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1_port} CPUs=8 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2_port} CPUs=8 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Return the reason why no cluster can start here, or None."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    absent = [program for program in ("slurmctld", "slurmd", "sbatch", "srun", "munged") if not shutil.which(program)]
    return f"no {', '.join(absent)} here: apt-get install slurm-wlm munge" if absent else None


class Cluster:
    """A running cluster of the nodes n1 and n2. Commands use it through the variables in ``environment``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start all daemons and wait until every node is idle."""
        for name in ("state", "munge", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir(mode=0o700)
        ports = {name: free_port() for name in ("controller_port", "n1_port", "n2_port")}
        host = socket.gethostname().split(".")[0]
        (self.folder / "slurm.conf").write_text(SLURM_CONF.format(host=host, folder=self.folder, **ports))
        key = self.folder / "munge/munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.run(
            *("munged", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.sock"),
            *(f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munge/munged.log"),
            f"--seed-file={self.folder}/munge/seed",
        )
        self.run("slurmctld")
        for node in ("n1", "n2"):
            self.run("slurmd", "-N", node)
        self.wait_for(lambda: self.run("sinfo", "-h", "-N", "-o", "%T").split() == ["idle", "idle"])

    def stop(self) -> None:
        """Stop all jobs and daemons. munged stops last, because the other daemons use it while they stop."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):  # fails if the controller is dead
            self.run("scancel", "--full", "--signal=KILL", "--user=root")
            self.run("scancel", "--user=root")
            self.wait_for(lambda: not self.run("squeue", "-h"), 20)
        for pattern in ("slurmd-*.pid", "slurmctld.pid", "munged.pid"):
            pids = [int(path.read_text()) for path in self.folder.glob(pattern)]
            daemons = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
            for daemon in daemons:
                daemon.terminate()
            for daemon in psutil.wait_procs(daemons, timeout=20)[1]:
                daemon.kill()

    def run(self, *command: str, cwd: Path | None = None, **env: str) -> str:
        """Run a command and return its output. Slurm's commands hang if the controller is dead, hence the timeout."""
        variables = os.environ | self.environment | env
        done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return the controller's record of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", number)))

    def wait_for(self, condition: Callable[[], bool], seconds: float = 600) -> None:
        """Wait until ``condition()`` holds, with less delay than ``sbatch --wait``, whose polling interval grows."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s; {self.run('squeue')}"
            time.sleep(0.2)

    def finish(self, number: str) -> dict[str, str]:
        """Wait for the end of a job, or of all tasks of an array, and return its record."""

        def has_ended() -> bool:
            states = re.findall(r"JobState=(\S*)", self.run("scontrol", "show", "job", number))
            return {*states} <= {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}

        self.wait_for(has_ended)
        return self.job(number)


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Start a cluster, and a helper process that stops it at the end of the block or if the tests are killed."""
    watch = [sys.executable, "-m", "tests.e2e.slurm.slurm_cluster", str(folder)]
    with subprocess.Popen(watch, cwd=REPOSITORY, stdin=subprocess.PIPE, start_new_session=True):
        cluster = Cluster(folder)
        cluster.start()
        yield cluster


if __name__ == "__main__":
    sys.stdin.read()
    Cluster(Path(sys.argv[1])).stop()
