"""``run_and_time.sh`` from its first start to the verdict and the report, and the TCP stores through which ranks meet.

Any user of the machine can write to a store, so the program must not unpickle values from it.
"""

import base64
import json
import os
import pickle
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
from torch._C._distributed_c10d import TCPStore

from tests.e2e.test_scripts import begin
from tests.programs import PATIENCE_S, wait_for_text

SETTINGS = ("--evaluation.interval-samples", "320", "--evaluation.target", "0.02", "--log.interval-steps", "1")


@dataclass
class Opens:
    """Object whose pickle creates a symbolic link at ``path`` when it is loaded."""

    path: Path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return os.symlink, ("opened", str(self.path))


def launcher(folder: Path) -> psutil.Process | None:
    """Return the torchrun process whose ranks train in ``folder``, or None."""
    for process in psutil.process_iter(["cmdline", "cwd"]):
        command = process.info["cmdline"] or ()
        if process.info["cwd"] == str(folder) and {"bert.launch.agent", "bert.train"} <= set(command):
            return process
    return None


def stores(process: psutil.Process) -> list[TCPStore]:
    """Return clients of all TCP stores whose servers are in a process."""
    sockets = process.net_connections("tcp")
    ports = {
        each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN and each.laddr.ip in ("0.0.0.0", "::")
    }
    assert ports
    return [TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=PATIENCE_S)) for port in ports]


def test_a_run_ends_with_verdict_and_report_and_loads_no_pickle_of_a_store(real_checkout: Path, tmp_path: Path) -> None:
    changes = {"NPROC": "2", "CLEAR_CACHES": "1", "PET_STANDALONE": "1", "PET_RDZV_BACKEND": "c10d"}
    process = begin(real_checkout / "run_and_time.sh", "--", *SETTINGS, cwd=tmp_path, **changes)
    results = real_checkout / "results/tiny_cpu/bert"
    wait_for_text(results / "metrics_0.jsonl", '"event": "step"', process)
    values: dict[str, bytes] = {}
    hostile = base64.b64encode(pickle.dumps(Opens(tmp_path / "was opened"))).decode()
    agent = launcher(real_checkout)
    assert agent
    ranks = agent.children()
    for rank in ranks:  # otherwise ranks might end before the stores are read
        rank.suspend()
    for store in stores(agent):
        for key in store.list_keys():
            values[key] = store.get(key)
            if is_pickle(values[key]):
                store.set(key, hostile)
        store.set("torch.rendezvous.none", hostile)  # key of an elastic agent without a run id
    for rank in ranks:
        rank.resume()
    shown, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, shown
    assert "installing" not in shown
    assert "PASS results/tiny_cpu/bert/result_0.txt" in shown
    assert "1 of 1 runs valid" in shown
    log = (results / "result_0.txt").read_text()
    assert "# processes: 2 x " in log
    assert f"# config.log.cache_cleared: {os.access('/proc/sys/vm/drop_caches', os.W_OK)}" in log
    assert "</html>" in (results / "report.html").read_text()
    assert json.loads((real_checkout / "results/systems/tiny_cpu.json").read_text())["division"] == "open"
    assert not (tmp_path / "was opened").is_symlink()
    assert values
    assert not [key for key, value in values.items() if is_pickle(value)]


def is_pickle(value: bytes) -> bool:
    """Return whether a value, or its base64 decoding, starts and ends like a pickle."""
    texts = [value]
    with suppress(ValueError):
        texts.append(base64.b64decode(value, validate=True))
    return any(text[:1] == b"\x80" and text[-1:] == b"." for text in texts)
