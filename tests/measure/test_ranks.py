"""Which rank a process is when it has no process group."""

from __future__ import annotations

import os

import pytest

from stepscope.measure.ranks import rank_and_world


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", (0, 1)),
        ("RANK=3 WORLD_SIZE=4", (3, 4)),
        ("RANK=3 WORLD_SIZE=4 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2", (3, 4)),  # srun torchrun
        ("SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=2", (1, 1)),
        ("SLURM_PROCID=0 SLURM_NTASKS=4", (0, 1)),  # a batch script, not srun
        ("OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8", (5, 1)),
        (  # mpirun's daemons are started by srun, one per host
            "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1",
            (5, 1),
        ),
        ("PMI_RANK=1 PMI_SIZE=2", (1, 1)),
        ("RANK=one WORLD_SIZE=4 PMI_RANK=1 PMI_SIZE=2", (1, 1)),
        ("RANK=4 WORLD_SIZE=4", (0, 1)),
        ("RANK=-1 WORLD_SIZE=4", (0, 1)),
    ],
)
def test_the_launchers_variables_name_the_rank(
    monkeypatch: pytest.MonkeyPatch, variables: str, expected: tuple[int, int]
) -> None:
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE") or name.startswith(("SLURM_", "OMPI_", "PMI_")):
            monkeypatch.delenv(name)
    for assignment in variables.split():
        monkeypatch.setenv(*assignment.split("=", 1))
    assert rank_and_world() == expected
