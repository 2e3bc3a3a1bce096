"""The options that scripts pass to containers, the Kubernetes objects, and the Slurm script without Slurm."""

import os
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from console.files import is_private
from tests.conftest import REPOSITORY
from tests.e2e.test_scripts import start
from tests.programs import write_script

PRINTS = '#!/bin/bash\nprintf "%s\\n" "$@"\nexit 9\n'
"""Script in place of a container engine. It prints its arguments and exits with status 9."""
NAME_OF_JOBSET = "jobset.sigs.k8s.io/jobset-name"
"""Label of the pods of a JobSet."""


def docker(folder: Path, *arguments: str, engine: str = "docker", **env: str) -> list[str]:
    """Run ``launch/docker.sh``, and return the arguments that it passes to the container engine."""
    write_script(folder / engine, PRINTS)
    env |= {"DATA": f"{folder}/data", "RESULTS": f"{folder}/my results", "CACHE": f"{folder}/kept"}
    done = start(REPOSITORY / "launch/docker.sh", *arguments, cwd=folder, ENGINE=str(folder / engine), **env)
    assert done.returncode == 9, done.stderr
    return done.stdout.splitlines()


def test_docker_sh_passes_folders_the_user_arguments_and_gpus_to_the_engine(tmp_path: Path) -> None:
    given = docker(tmp_path, "tiny_cpu", "2", "--", "--log.run", "5")
    assert given[-6:] == ["mlperf-bert", "tiny_cpu", "2", "--", "--log.run", "5"]
    # The home folder lies on the host, so that the kernels that Triton compiles outlive the container.
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
    assert "/workspace/bert/results,/a:/b --writable\n--pwd\n" in done.stdout  # --writable is no separate option


def objects(file: str) -> list[dict[str, Any]]:
    """Return the objects of a file in ``launch/``. All but a JobSet must be valid in the newest Kubernetes."""
    found = list(yaml.safe_load_all((REPOSITORY / "launch" / file).read_text(encoding="utf-8")))
    for thing in found:
        if thing["kind"] != "JobSet":
            kubernetes_validate.validate(thing, kubernetes_validate.latest_version(), strict=True)
    return found


def jobset() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the network policy, the JobSet, and the Job that JobSet's controller makes from it."""
    policy, whole = objects("jobset.yaml")
    (replicated,) = whole["spec"]["replicatedJobs"]
    name = f"{whole['metadata']['name']}-{replicated['name']}-0"
    return policy, whole, {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}} | replicated["template"]


def the_container(job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a job's pod, its container and the container's environment."""
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container, {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def test_the_service_and_the_policy_select_the_pods_of_the_job() -> None:
    service, policy, job = objects("kubernetes.yaml")
    pod, _, env = the_container(job)
    assert env["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    ours = {"podSelector": {"matchLabels": service["spec"]["selector"]}}
    assert policy["spec"] == ours | {"policyTypes": ["Ingress"], "ingress": [{"from": [ours]}]}


def test_the_jobset_has_the_same_pods_as_the_job() -> None:
    """Only the pods' names, services and anti-affinity rules may differ."""
    policy, whole, job = jobset()
    kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
    ours = {"podSelector": {"matchLabels": {NAME_OF_JOBSET: whole["metadata"]["name"]}}}
    assert policy["spec"] == ours | {"policyTypes": ["Ingress"], "ingress": [{"from": [ours]}]}
    service, _, plain = objects("kubernetes.yaml")
    assert whole["metadata"]["name"] != service["metadata"]["name"]  # JobSet makes a service with the JobSet's name
    pod, container, env = the_container(job)
    # JobSet names its pods <jobset>-<replicated job>-<index of job>-<index of pod>.<jobset>.
    address = env["MASTER_ADDR"].replace("$(JOBSET)", whole["metadata"]["name"])
    assert address == f"{job['metadata']['name']}-0.{whole['metadata']['name']}"
    assert env.pop("JOBSET") == {"fieldRef": {"fieldPath": f"metadata.labels['{NAME_OF_JOBSET}']"}}
    plain_pod, plain_container, plain_env = the_container(plain)
    assert env | {"MASTER_ADDR": ""} == plain_env | {"MASTER_ADDR": ""}
    assert container | {"env": []} == plain_container | {"env": []}
    others = {"containers": [], "affinity": {}}
    assert pod | others | {"subdomain": "bert"} == plain_pod | others
    assert job["spec"] | {"template": {}} == plain["spec"] | {"template": {}}
    assert whole["spec"]["failurePolicy"] == {"maxRestarts": 0}


@pytest.mark.slow
def test_the_jobset_has_only_fields_that_jobset_knows() -> None:
    """Kubeflow publishes Python models of JobSet's types, which drop unknown fields."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    _, whole, _ = jobset()
    assert models.JobsetV1alpha2JobSet.from_dict(whole).to_dict() == whole


@pytest.mark.parametrize("file", ["kubernetes.yaml", "jobset.yaml"])
def test_pods_match_the_image_and_pass_the_restricted_security_profile(file: str) -> None:
    job = jobset()[2] if file == "jobset.yaml" else objects(file)[2]
    spec, (pod, container, env) = job["spec"], the_container(job)
    assert spec["completionMode"] == "Indexed"
    assert {str(spec["completions"]), str(spec["parallelism"])} == {env["NNODES"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == env["NPROC"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    dockerfile = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
    assert f"USER {pod['securityContext']['runAsUser']}\n" in dockerfile
    workdir = re.findall(r"^WORKDIR (.+)$", dockerfile, re.M)[-1]
    assert f"{workdir}/data" in {mount["mountPath"] for mount in container["volumeMounts"]}

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
