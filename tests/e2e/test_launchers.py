"""Launchers: binding of processes to cores, options for containers, and the Slurm script without Slurm."""

import os
import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from console.files import is_private
from tests.conftest import REPOSITORY
from tests.e2e.test_scripts import start
from tests.programs import write_script

BIND = REPOSITORY / "launch/bind.sh"


class Machine:
    """A folder like /sys that describes NUMA nodes, cores, PCI devices and InfiniBand cards."""

    def __init__(self, folder: Path) -> None:
        self.sys = folder / "sys"
        (self.sys / "bus/pci/devices").mkdir(parents=True)
        (self.sys / "class/infiniband").mkdir(parents=True)

    def write(self, path: str, text: str) -> None:
        (self.sys / path).parent.mkdir(parents=True, exist_ok=True)
        (self.sys / path).write_text(text + "\n")

    def pci(self, path: str, vendor: str, kind: str, numa: int) -> None:
        """Add a PCI device at ``path``, which begins with the host bridge and ends with the device's address."""
        for name, text in (("vendor", vendor), ("class", kind), ("numa_node", str(numa))):
            self.write(f"devices/{path}/{name}", text)
        (self.sys / "bus/pci/devices" / Path(path).name).symlink_to(self.sys / "devices" / path)

    def gpu(self, path: str, numa: int) -> None:
        self.pci(path, "0x10de", "0x030200", numa)

    def hca(self, name: str, path: str, state: str = "4: ACTIVE") -> None:
        self.pci(path, "0x15b3", "0x020700", 0)
        self.write(f"devices/{path}/infiniband/{name}/ports/1/state", state)
        (self.sys / f"devices/{path}/infiniband/{name}/device").symlink_to(self.sys / "devices" / path)
        (self.sys / "class/infiniband" / name).symlink_to(self.sys / f"devices/{path}/infiniband/{name}")

    def binding(self, rank: int, ranks: int, allowed: str, **env: str) -> str:
        """Return the binding that ``bind.sh`` prints for a process that may use the cores ``allowed``."""
        place = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "ALLOWED_CPUS": allowed} | env
        done = start(BIND, "true", cwd=self.sys, SYSFS=str(self.sys), BIND="show", **place)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def cores(self, rank: int, ranks: int, allowed: str, **env: str) -> set[int]:
        found = re.search(r"(?:--physcpubind=|--cpu-list )([\d,]+)", self.binding(rank, ranks, allowed, **env))
        assert found
        return {int(cpu) for cpu in found[1].split(",")}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Make a machine with two NUMA nodes, each with four cores of two hardware threads and two GPUs.

    GPUs 0 and 1 are on node 1, and GPUs 2 and 3 are on node 0.
    """
    machine = Machine(tmp_path)
    machine.write("devices/system/node/node0/cpulist", "0-3,8-11")
    machine.write("devices/system/node/node1/cpulist", "4-7,12-15")
    for cpu in range(16):
        machine.write(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 8},{cpu % 8 + 8}")
    machine.gpu("pci0000:80/0000:80:01.0/0000:01:00.0", numa=1)
    machine.gpu("pci0000:80/0000:80:02.0/0000:02:00.0", numa=1)
    machine.gpu("pci0000:00/0000:00:01.0/0000:81:00.0", numa=0)
    machine.gpu("pci0000:00/0000:00:02.0/0000:82:00.0", numa=0)
    machine.pci("pci0000:00/0000:00:1f.0", "0x1a03", "0x030000", 0)  # a display adapter, not an accelerator
    machine.hca("mlx5_0", "pci0000:80/0000:80:02.0/0000:03:00.0")
    machine.hca("mlx5_1", "pci0000:80/0000:80:01.0/0000:04:00.0")
    return machine


def test_processes_get_the_cores_of_their_gpus_node(machine: Machine) -> None:
    cores = [machine.cores(rank, 4, "0-15") for rank in range(4)]
    assert cores == [{4, 5, 12, 13}, {6, 7, 14, 15}, {0, 1, 8, 9}, {2, 3, 10, 11}]
    assert "NUMA node 1" in machine.binding(0, 4, "0-15")
    assert "OMP_NUM_THREADS=2" in machine.binding(0, 4, "0-15")
    assert "OMP_NUM_THREADS=3" in machine.binding(0, 4, "0-15", OMP_NUM_THREADS="3")


def test_gpus_that_sit_unevenly_share_their_own_nodes_cores(machine: Machine) -> None:
    machine.gpu("pci0000:80/0000:80:03.0/0000:04:01.0", numa=1)
    cores = [machine.cores(rank, 5, "0-15") for rank in range(5)]
    assert cores == [{4, 12}, {5, 13}, {6, 7, 14, 15}, {0, 1, 8, 9}, {2, 3, 10, 11}]


def test_visible_gpus_decide(machine: Machine) -> None:
    def cores(visible: str) -> list[set[int]]:
        return [machine.cores(rank, 2, "0-15", CUDA_VISIBLE_DEVICES=visible) for rank in range(2)]

    first, second = {0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}
    assert cores("3,0") == [first, second]
    assert cores("0,1") == [{4, 5, 12, 13}, {6, 7, 14, 15}]
    evenly = [first, second]  # the GPUs' nodes are not considered
    assert cores("GPU-8f2b3c,GPU-1d2e3f") == cores("a[$(touch opened)]") == cores("7,8") == evenly
    # If GPUs differ, CUDA numbers them by speed and not by address.
    machine.write("devices/pci0000:80/0000:80:01.0/0000:01:00.0/device", "0x1fb0")
    machine.write("devices/pci0000:80/0000:80:02.0/0000:02:00.0/device", "0x2330")
    assert cores("") == evenly
    assert "CUDA_DEVICE_ORDER" not in machine.binding(0, 2, "0-15")


def test_processes_stay_on_the_cores_they_were_given(machine: Machine) -> None:
    assert machine.cores(0, 4, "0-4") == {4}
    assert machine.cores(1, 4, "0-4") == {4}
    # No core of GPUs 0 and 1's node is allowed, so ranks 0 and 1 get a share of all allowed cores.
    assert [machine.cores(rank, 4, "0-3") for rank in range(4)] == [{0}, {1}, {0, 1}, {2, 3}]


@pytest.mark.parametrize("ranks", [1, 2, 4, 10])
def test_without_gpus_the_allowed_cores_are_split(tmp_path: Path, ranks: int) -> None:
    machine = Machine(tmp_path)
    shares = [machine.cores(rank, ranks, "2-9,12") for rank in range(ranks)]
    assert set.union(*shares) == {*range(2, 10), 12}
    if ranks <= 9:
        assert sum(map(len, shares)) == 9
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    "env", [{}, {"LOCAL_RANK": "0"}, {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, {"BIND": "off"}]
)
def test_without_a_place_the_command_runs_as_it_is(env: dict[str, str]) -> None:
    command = (BIND, "bash", "-c", "grep Cpus_allowed_list /proc/self/status; echo $OMP_NUM_THREADS; exit 7")
    done = start(*command, cwd=REPOSITORY, **env)
    assert done.returncode == 7
    allowed = re.search(r"^Cpus_allowed_list:.*\n", Path("/proc/self/status").read_text(), re.M)
    assert allowed
    assert done.stdout == f"{allowed[0]}\n"


PRINTS = '#!/bin/bash\nprintf "%s\\n" "$@"\nexit 9\n'
"""Script in place of a container engine. It prints its arguments and exits with status 9."""


def docker(folder: Path, *arguments: str, engine: str = "docker", **env: str) -> list[str]:
    """Run ``launch/docker.sh``, and return the arguments that it passes to the container engine."""
    write_script(folder / engine, PRINTS)
    env |= {"DATA": f"{folder}/data", "RESULTS": f"{folder}/my results", "CACHE": f"{folder}/kept"}
    done = start(REPOSITORY / "launch/docker.sh", *arguments, cwd=folder, ENGINE=str(folder / engine), **env)
    assert done.returncode == 9, done.stderr
    return done.stdout.splitlines()


def test_docker_gets_folders_user_arguments_and_gpus_where_there_are_some(tmp_path: Path) -> None:
    given = docker(tmp_path, "tiny_cpu", "2", "--", "--log.run", "5")
    assert given[-6:] == ["mlperf-bert", "tiny_cpu", "2", "--", "--log.run", "5"]
    # The home folder is on the host, so that the kernels that Triton compiles are kept.
    assert {f"{tmp_path}/my results:/workspace/bert/results", f"{tmp_path}/kept:/cache", "HOME=/cache"} <= set(given)
    assert given[given.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
    assert given[given.index("--security-opt") + 1] == "no-new-privileges"
    assert not {"--tty", "--gpus"} & set(given)
    assert (tmp_path / "my results").is_dir()
    assert is_private(tmp_path / "kept")
    (tmp_path / "nvidia-smi").symlink_to("/bin/true")
    path = f"{tmp_path}:{os.environ['PATH']}"
    given = docker(tmp_path, PATH=path)
    assert given[given.index("--gpus") + 1] == "all"
    assert "nvidia.com/gpu=all" in docker(tmp_path, engine="podman", PATH=path)


def test_a_slurm_job_mounts_folders_in_its_container(checkout: Path, tmp_path: Path) -> None:
    write_script(tmp_path / "apptainer", PRINTS)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_SUBMIT_DIR": str(checkout)}
    job |= {"CONTAINER": "a.sif", "MOUNTS": "/a:/b --writable", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = start("bash", "launch/slurm.sub", "tiny_cpu", cwd=checkout, **job)
    assert done.returncode == 9
    assert "/workspace/bert/results,/a:/b --writable\n--pwd\n" in done.stdout  # part of an argument, not an option


def test_kubernetes_objects_are_valid_agree_and_pass_the_restricted_profile() -> None:
    service, policy, job = yaml.safe_load_all((REPOSITORY / "launch/kubernetes.yaml").read_text(encoding="utf-8"))
    for thing in (service, policy, job):
        kubernetes_validate.validate(thing, "1.31", strict=True)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert {str(spec["completions"]), str(spec["parallelism"])} == {env["NNODES"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == env["NPROC"]
    assert env["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    dockerfile = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
    assert f"USER {pod['securityContext']['runAsUser']}\n" in dockerfile
    workdir = re.findall(r"^WORKDIR (.+)$", dockerfile, re.M)[-1]
    assert f"{workdir}/data" in {mount["mountPath"] for mount in container["volumeMounts"]}
    ours = {"podSelector": {"matchLabels": {"job-name": job["metadata"]["name"]}}}
    assert policy["spec"] == ours | {"policyTypes": ["Ingress"], "ingress": [{"from": [ours]}]}

    # Check the requirements of Kubernetes' "restricted" Pod Security profile.
    assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC", "initContainers"}
    assert not any("hostPort" in port for port in container.get("ports", []))
    context = pod["securityContext"] | container["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] != 0
    assert context["allowPrivilegeEscalation"] is False
    assert not context.get("privileged")
    assert context["seccompProfile"]["type"] in ("RuntimeDefault", "Localhost")
    assert context["capabilities"]["drop"] == ["ALL"]
    assert set(context["capabilities"].get("add", [])) <= {"NET_BIND_SERVICE"}
    assert not any("hostPath" in volume for volume in pod["volumes"])


def test_the_image_is_built_without_arguments_that_may_hold_a_password() -> None:
    """Anyone with an image can read the values of its build arguments in the image's history."""
    dockerfile = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
    assert set(re.findall(r"^ARG (\w+)", dockerfile, re.M)) == {"BASE", "EXTRAS", "REVISION"}
    assert "RUN --mount=type=secret,id=pip," in dockerfile
