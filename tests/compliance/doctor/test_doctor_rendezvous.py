"""The doctor on torchrun's agents: those of made-up machines, and real ones of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compliance.doctor.host import ExaminedHost
from compliance.doctor.rendezvous import elastic_option, ports_open_to_all, rendezvous
from tests.compliance.doctor.fake_host import fake_host
from tests.programs import PATIENCE_S

pytestmark = pytest.mark.slow

RUN = "python -m torch.distributed.run"
TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1
   1: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4712 1
   2: 00000000:1F91 0100007F:0016 01 00000000:00000000 00:00000000 00000000     0        0 4713 1
   3: 00000000:1F92 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 9999 1
"""


def machine(root: Path, command: str, environ: str = "", **environment: str) -> ExaminedHost:
    """Machine with a process 77 that listens on all addresses at port 29400 and on its own at 8080, beside others."""
    (root / "proc/77/fd").mkdir(parents=True)
    for inode in (4711, 4712, 4713):
        (root / f"proc/77/fd/{inode - 4700}").symlink_to(f"socket:[{inode}]")
    texts = {"/proc/77/cmdline": command, "/proc/77/environ": environ, "/proc/78/cmdline": "bash"}
    files = {name: text.replace(" ", "\0") + "\0" for name, text in texts.items()}
    files |= {"/proc/77/net/tcp": TCP.format(port=29400)}
    return fake_host(root, files | {"/proc/uptime": "1"}, environment=environment)


@pytest.mark.parametrize(
    ("command", "environ", "option"),
    [
        (RUN + " --standalone --nproc-per-node 8 -m bert.train", "", "--standalone"),
        ("/usr/bin/python /opt/bin/torchrun --rdzv_backend=c10d train.py", "", "--rdzv-backend c10d"),
        (RUN + " --rdzv-backend etcd-v2 --nnodes 2:4 train.py", "", "--rdzv-backend etcd-v2"),
        (RUN + " --nproc-per-node=2 train.py", "", "without --master-port"),
        (RUN + " --master-port=1 train.py", "A=b PET_RDZV_BACKEND=c10d", "PET_RDZV_BACKEND=c10d"),
        (RUN + " --master-port=1 train.py", "PET_STANDALONE=1", "PET_STANDALONE"),
        (RUN + " --nproc-per-node=2 --master-port=29500 train.py", "", ""),
        (RUN + " --nnodes=2 --node-rank=0 --master-addr=a train.py", "", ""),
        (RUN + " --master-port=1 -m train --standalone", "", ""),
        (RUN + " --nproc-per-node=2 train.py", "PET_MASTER_PORT=1", ""),
        ("vim torchrun.md --standalone", "", ""),
        ("", "", ""),
    ],
)
def test_elastic_agents_are_named_with_their_port(tmp_path: Path, command: str, environ: str, option: str) -> None:
    (one,) = rendezvous(machine(tmp_path, command, environ))
    assert one.state == ("warn" if option else "ok")
    if option:
        assert f"pid 77 ({option}; on all addresses, port 29400)" in one.found
        assert "--master-port" in one.remedy


def test_variables_that_would_make_agents_elastic(tmp_path: Path) -> None:
    (one,) = rendezvous(machine(tmp_path, "", PET_RDZV_BACKEND="c10d"))
    assert (one.state, one.found.partition(":")[0]) == ("warn", "PET_RDZV_BACKEND=c10d is set")
    assert elastic_option([], {"PET_RDZV_BACKEND": "static", "PET_STANDALONE": "0"}) == ""


def test_many_agents_and_hidden_ones(tmp_path: Path) -> None:
    files = {f"/proc/{pid}/cmdline": f"{RUN} --standalone train.py".replace(" ", "\0") for pid in range(10, 16)}
    (one,) = rendezvous(fake_host(tmp_path, files))
    assert one.found.count("its ports cannot be seen from here") == 3
    assert one.found.endswith(" and 3 more")


def test_a_real_agent(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text(f"import time\nopen({str(tmp_path / 'there')!r}, 'w')\ntime.sleep(600)\n")
    place = ("--standalone", "--local-addr=127.0.0.1", str(tmp_path / "wait.py"))
    agent = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *place],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (tmp_path / "there").exists():
            assert agent.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        (tmp_path / "proc").mkdir()  # a machine that runs nothing else
        (tmp_path / f"proc/{agent.pid}").symlink_to(f"/proc/{agent.pid}")
        (one,) = rendezvous(ExaminedHost(tmp_path, {}))
        ports = ports_open_to_all(ExaminedHost(), agent.pid)
    finally:
        agent.terminate()
        agent.wait(PATIENCE_S)
    assert one.state == "warn"
    assert f"pid {agent.pid} (--standalone; on all addresses, port {' and '.join(map(str, ports))})" in one.found
    assert ports
