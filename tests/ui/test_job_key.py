"""Which job a `stepscope run` belongs to, by its launcher and its environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from stepscope.ui.jobs.job_key import JobKey, find_job, folder_name

TORCHRUN = ("torchrun", "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "train.py")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            TORCHRUN,
            JobKey(name="torchrun", meeting="10.0.0.1:29500", place=1, places=2),
        ),
        (
            (*["python", "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", "0"],
             *["--rdzv_endpoint", "a:1", "train.py", "--nnodes", "9"]),
            JobKey(name="torchrun", meeting="a:1", place=0, places=2),
        ),
        (
            "torchrun --nnodes=1:4 --rdzv-backend=c10d --rdzv-id=exp7 --rdzv-endpoint=a:1 t.py",
            JobKey(name="torchrun exp7"),
        ),
        (
            "accelerate launch --num_machines 4 --machine_rank 3 --main_process_ip a "
            "--main_process_port 7 train.py",
            JobKey(name="accelerate", meeting="a:7", place=3, places=4),
        ),
        ("torchrun --nproc-per-node=2 train.py", None),
        ("torchrun --nnodes=1 train.py", None),
        ("torchrun --standalone --nnodes=2 train.py", None),
        ("python train.py --nnodes 2", None),
        ("python torchrun_like.py --nnodes=2", None),
    ],
)  # fmt: skip
def test_the_launchers_options_name_the_job(
    command: str | tuple[str, ...], expected: JobKey | None
) -> None:
    words = command.split() if isinstance(command, str) else command
    assert find_job(words, {}) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            "SLURM_JOB_ID=47 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=4",
            JobKey(name="Slurm 47.0", place=3, places=4, one_terminal=True, allocation="Slurm 47"),
        ),
        (
            "SLURM_JOB_ID=47 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_RESTART_COUNT=1",
            JobKey(name="Slurm 47", place=0, places=1, attempt=1, allocation="Slurm 47"),
        ),
        (
            "PMIX_NAMESPACE=9001 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2",
            JobKey(name="MPI 9001", place=1, places=2, one_terminal=True),
        ),
        ("PMI_RANK=1 PMI_SIZE=2", JobKey(name="MPI", place=1, places=2, one_terminal=True)),
        (  # mpirun starts its daemons with srun, one per host
            "SLURM_JOB_ID=47 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=3 "
            "PMIX_NAMESPACE=9001 OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8",
            JobKey(name="MPI 9001", place=5, places=8, one_terminal=True, allocation="Slurm 47"),
        ),
        (  # srun --mpi=pmi2
            "SLURM_JOB_ID=47 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 "
            "PMI_RANK=1 PMI_SIZE=2 PMI_JOBID=47.0",
            JobKey(name="Slurm 47.0", place=1, places=2, one_terminal=True, allocation="Slurm 47"),
        ),
        (  # srun -n1 ... & srun -n1 ... &
            "SLURM_JOB_ID=47 SLURM_STEP_ID=3 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=4",
            JobKey(name="Slurm 47.3", place=0, places=1, allocation="Slurm 47"),
        ),
        (  # one torchrun per host, started again by Slurm
            "SLURM_JOB_ID=47 SLURM_STEP_ID=3 SLURM_STEP_NUM_TASKS=1 SLURM_RESTART_COUNT=2 "
            "MASTER_ADDR=a NODE_RANK=1",
            JobKey(name="hosts", meeting="a:29500", place=1, attempt=2, allocation="Slurm 47"),
        ),
        (
            "SLURM_JOB_ID=47 SLURM_RESTART_COUNT=1 TORCHELASTIC_RUN_ID=x RANK=1 WORLD_SIZE=2 "
            "TORCHELASTIC_RESTART_COUNT=2",
            JobKey(name="torchrun x", place=1, places=2, attempt=1002, allocation="Slurm 47"),
        ),
        (  # a shell that salloc started
            "SLURM_JOB_ID=47 SLURM_STEP_ID=4294967290 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1",
            JobKey(name="Slurm 47", place=0, places=1, allocation="Slurm 47"),
        ),
        (
            "TORCHELASTIC_RUN_ID=none RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=7 "
            "TORCHELASTIC_RESTART_COUNT=2",
            JobKey(name="torchrun none", meeting="a:7", place=1, places=2, attempt=2),
        ),
        (
            "KUBERNETES_SERVICE_HOST=x HOSTNAME=bert-worker-0 RANK=1 WORLD_SIZE=3 MASTER_ADDR=b",
            JobKey(name="Kubernetes bert", place=1, places=3),
        ),
        (
            "KUBERNETES_SERVICE_HOST=x HOSTNAME=bert-worker-2-abcde",
            JobKey(name="Kubernetes bert", place=2),
        ),
        (
            "MASTER_ADDR=a MASTER_PORT=7 RANK=1 WORLD_SIZE=2",
            JobKey(name="ranks", meeting="a:7", place=1, places=2),
        ),
        ("MASTER_ADDR=a NODE_RANK=1", JobKey(name="hosts", meeting="a:29500", place=1)),
        ("MASTER_ADDR=localhost", None),
        ("MASTER_ADDR=localhost RANK=0 WORLD_SIZE=1", None),
        ("PMI_RANK=0 PMI_SIZE=1", None),
        ("", None),
    ],
)
def test_the_environment_names_the_job(environment: str, expected: JobKey | None) -> None:
    variables = dict(pair.split("=") for pair in environment.split())
    assert find_job(["python", "train.py"], variables) == expected


def test_torchruns_options_may_be_variables() -> None:
    variables = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a"}
    found = find_job(["torchrun", "train.py"], variables)
    assert found == JobKey(name="torchrun", meeting="a:29500", place=1, places=2)


def test_accelerates_file_is_read_and_options_come_first(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(
        "distributed_type: MULTI_GPU\nmachine_rank: 1  # this one\nmain_process_ip: '10.0.0.1'\n"
        "main_process_port: null\nnum_machines: 2\nfsdp_config:\n  num_machines: 7\n"
    )
    command = ["accelerate", "launch", "--config_file", str(file), "train.py"]
    expected = JobKey(name="accelerate", meeting="10.0.0.1:29500", place=1, places=2)
    assert find_job(command, {}) == expected
    command[2:2] = ["--machine_rank", "0"]
    assert find_job(command, {}) == replace(expected, place=0)
    usual = tmp_path / "huggingface" / "accelerate" / "default_config.yaml"
    usual.parent.mkdir(parents=True)
    file.rename(usual)
    assert find_job(command, {}) is None
    assert find_job(["accelerate-launch", "t.py"], {"XDG_CACHE_HOME": str(tmp_path)}) == expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("deepspeed --hostfile hosts train.py", None),
        (
            "deepspeed --no_ssh --node_rank 1 --master_addr a --hostfile hosts train.py",
            JobKey(name="deepspeed", meeting="a:29500", place=1),
        ),
        (
            "deepspeed --no_ssh --node_rank=0 --num_nodes 2 --master_addr=a --master_port=7 t.py",
            JobKey(name="deepspeed", meeting="a:7", place=0, places=2),
        ),
    ],
)
def test_deepspeed_runs_on_every_host_without_ssh_only(
    command: str, expected: JobKey | None
) -> None:
    assert find_job(command.split(), {}) == expected


def test_the_users_name_comes_first_and_the_place_from_the_launcher() -> None:
    assert find_job(TORCHRUN, {}, "bert") == JobKey(name="bert", place=1, places=2)
    assert find_job(["python", "train.py"], {}, "bert") == JobKey(name="bert")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("a:7", "a:7", True),
        ("a:7", "a:8", False),
        ("a:7", "b:7", False),
        ("localhost:7", "a:7", True),
        ("127.0.0.1:7", "a:8", False),
        (None, "a:7", False),
        (None, None, True),
    ],
)
def test_one_job_has_one_meeting_place(one: str | None, other: str | None, same: bool) -> None:
    key = JobKey(name="torchrun", meeting=one, place=0)
    assert key.is_job_of(JobKey(name="torchrun", meeting=other, place=1)) is same
    assert not key.is_job_of(JobKey(name="ranks", meeting=one))


def test_every_part_gives_the_folder_the_same_name() -> None:
    keys = [JobKey(name="Slurm 47.0", place=place, places=2) for place in range(2)]
    assert {folder_name(key, "train.py") for key in keys} == {"Slurm-47.0-train"}
