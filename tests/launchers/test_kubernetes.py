"""The manifests of the docs, and their commands with the variables that pods get."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from trainer_jobs import DDP, TORCHRUN, check_ranks, end, free_port, start

from stepscope.ui.jobs.job_key import JobKey, find_job

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
ADDRESS = {"PET_MASTER_ADDR": "bert-master-0", "PET_MASTER_PORT": "23456"}
IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def operators(place: int, **others: str) -> dict[str, str]:
    """What the training operator (v1) sets in the pods of a job with two of them."""
    pet = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(place)}
    plain = {"MASTER_ADDR": "bert-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "2"}
    name = "bert-worker-0" if place else "bert-master-0"
    return IN_A_POD | ADDRESS | pet | plain | {"RANK": str(place), "HOSTNAME": name} | others


def replicas() -> dict[str, Any]:
    job = yaml.safe_load((EXAMPLES / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    content: dict[str, Any] = job["spec"]["pytorchReplicaSpecs"]
    return content


def command_of(container: dict[str, Any], variables: dict[str, str]) -> list[str]:
    """Kubernetes puts variables into the command, where it is written $(NAME)."""
    own = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    known = variables | own
    return [re.sub(r"\$\((\w+)\)", lambda m: known[m[1]], word) for word in container["command"]]


def launcher(command: list[str]) -> list[str]:
    return command[command.index("--") + 1 :]


def test_both_pods_of_the_pytorchjob_are_one_job() -> None:
    pods = [replicas()[role]["template"]["spec"]["containers"][0] for role in ("Master", "Worker")]
    assert [pod["name"] for pod in pods] == ["pytorch", "pytorch"]  # the operator looks for it
    commands = [command_of(pod, {}) for pod in pods]
    assert commands[0] == commands[1]
    assert commands[0][:4] == ["stepscope", "run", "--out", "/shared/runs/bert-1"]
    keys = [find_job(launcher(commands[0]), operators(place)) for place in (0, 1)]
    meeting = "bert-master-0:23456"
    assert keys == [
        JobKey(name="torchrun", meeting=meeting, place=place, places=2) for place in (0, 1)
    ]


def test_both_pods_of_the_indexed_job_are_one_job() -> None:
    service, job = yaml.safe_load_all((EXAMPLES / "indexed-job.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert job["spec"]["completionMode"] == "Indexed"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    for place in range(2):
        variables = IN_A_POD | {"JOB_NAME": "bert", "JOB_COMPLETION_INDEX": str(place)}
        key = find_job(launcher(command_of(container, variables)), variables)
        assert key == JobKey(name="torchrun", meeting="bert-0.bert:29500", place=place, places=2)
        # Without torchrun, Kubernetes' own names tell.
        assert find_job(["python", "train.py"], variables) == JobKey(
            name="Kubernetes bert", place=place
        )


@pytest.mark.launchers
def test_the_manifests_command_trains_on_two_pods(tmp_path: Path) -> None:
    (container,) = replicas()["Master"]["template"]["spec"]["containers"]
    shutil.copy(DDP, tmp_path / "train.py")
    torchrun, stepscope = " ".join(TORCHRUN), f"{sys.executable} -m stepscope"
    line = " ".join(command_of(container, {})).replace("/shared", str(tmp_path))
    line = line.replace("stepscope run", f"{stepscope} run --no-explain")
    line = line.replace("torchrun", torchrun)
    here = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    pods = [start(line.split(), tmp_path, operators(place, **here)) for place in (0, 1)]
    for pod in pods:
        end(pod)
    check_ranks(tmp_path / "runs" / "bert-1", 2)
