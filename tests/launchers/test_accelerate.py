"""accelerate launch on two machines, described by configuration files; the Trainer's torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from trainer_jobs import (
    TORCHRUN,
    TRAINERS,
    captured,
    check_ranks,
    end,
    free_port,
    losses,
    needs,
    start,
)

pytestmark = pytest.mark.launchers
CONFIGURATION = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
machine_rank: {place}
main_process_ip: 127.0.0.1
main_process_port: {port}
mixed_precision: 'no'
num_machines: 2
num_processes: 2
"""


def _machines(folder: Path, out: Path | None) -> list[str]:
    port, machines = free_port(), []
    for place in range(2):
        file = folder / f"machine{place}-{port}.yaml"
        file.write_text(CONFIGURATION.format(place=place, port=port))
        command = (
            *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)),
            str(TRAINERS / "with_accelerate.py"),
        )
        machines.append(start(captured(out, *command) if out else command, folder))
    return [end(machine)[0] for machine in machines]


@needs("accelerate")
def test_two_machines_of_configuration_files_are_one_run(tmp_path: Path) -> None:
    bare = _machines(tmp_path, None)
    outputs = _machines(tmp_path, tmp_path / "run")
    assert losses(*outputs) == losses(*bare)
    assert len(losses(*bare)) == 36
    check_ranks(tmp_path / "run", 2)
    assert sorted(path.name for path in (tmp_path / "run" / "hosts").glob("0*.json")) == [
        "00000.json",
        "00001.json",
    ]


@needs("transformers")
@needs("accelerate")
def test_the_hugging_face_trainer_under_torchrun(tmp_path: Path) -> None:
    script = str(TRAINERS / "with_transformers.py")
    command = (*TORCHRUN, "--standalone", "--nproc-per-node=2", script)
    end(start(captured(tmp_path / "run", *command), tmp_path))
    check_ranks(tmp_path / "run", 2)
