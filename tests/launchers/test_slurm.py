"""Jobs of a real Slurm cluster: one run folder, one report, losses and exit codes as without us."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import (
    ENDLESS,
    SCRIPT,
    TRAIN,
    Launched,
    explain,
    free_port,
    hosts_of_ranks,
    notes,
    read_run,
    trained,
    until,
)
from slurm_cluster import KILL_WAIT_S, SlurmCluster

pytestmark = pytest.mark.launchers
Losses = Callable[[int], list[str]]
RUN = ("stepscope", "run", "--out", "D", "--")
ON_BOTH = ("srun", "-N2", "-n2")
CLOSES_WITHIN_S = 10.0  # what the first part waits for others, at most


def submit(slurm: SlurmCluster, folder: Path, script: str, *options: str) -> Launched:
    """sbatch --wait: it ends with the job, and with the job's exit code."""
    file = folder / "job.sh"
    file.write_text(f"#!/bin/sh\n{script}\n")
    log = ("-N2", "--ntasks-per-node=2", "--open-mode=append", "-o", "%a.out", "-e", "%a.err")
    words = ("sbatch", "--wait", *log, *options, str(file))
    return Launched.start(folder, words, slurm.environment)


def job_of(slurm: SlurmCluster, run: Launched) -> str:
    """The number of the job that a command started, by the folder it was started in."""
    for line in slurm.command("squeue", "-h", "-o", "%i %Z").splitlines():
        number, _, folder = line.partition(" ")
        if Path(folder) == run.folder:
            return number
    raise AssertionError(f"no job runs in {run.folder}")


def test_every_task_of_srun_is_a_part_of_one_run(
    slurm: SlurmCluster, tmp_path: Path, bare_losses: Losses
) -> None:
    """Without --out, and with labels that srun puts before each line of the output."""
    tasks = ("srun", "--label", "-N2", "--ntasks-per-node=2", "stepscope", "run", "--")
    run = Launched.start(tmp_path, (*tasks, *TRAIN), slurm.environment)
    assert run.wait() == 0, run.stderr
    assert run.stdout == sorted(f"{line[0]}: {line}" for line in bare_losses(4))
    assert run.reports == 1
    said = [line for line in run.stderr.splitlines() if "stepscope: " in line]
    assert {line.partition(":")[0] for line in said} == {"0"}
    (folder,) = (tmp_path / "stepscope-runs").iterdir()
    assert folder.name.startswith("Slurm-")
    names = [f"rank-{rank:05d}" for rank in range(4)]
    assert hosts_of_ranks(folder) == dict(zip(names, ("ss1", "ss1", "ss2", "ss2"), strict=True))
    closed = read_run(folder)
    assert (closed["status"], len(closed["hosts"])) == ("finished", 4)
    explanation = explain(folder)
    assert len(explanation["ranks"]) == 4
    assert not {"not-closed", "missing-hosts", "missing-ranks"} & notes(explanation).keys()


def test_an_array_of_batch_jobs_makes_a_folder_each(
    slurm: SlurmCluster, tmp_path: Path, bare_losses: Losses
) -> None:
    """stepscope run -- srun python train.py; the elements may run at the same time."""
    script = f"""MASTER_PORT=$((MASTER_PORT + SLURM_ARRAY_TASK_ID))
        export MASTER_PORT
        stepscope run -- srun -n2 {shlex.join(TRAIN)}"""
    run = submit(slurm, tmp_path, script, "--array=1-2")
    assert run.wait() == 0, run.stderr
    folders = sorted((tmp_path / "stepscope-runs").iterdir())
    assert len(folders) == 2
    for element, folder in zip(("1", "2"), folders, strict=True):
        assert sorted((tmp_path / f"{element}.out").read_text().splitlines()) == bare_losses(2)
        assert (tmp_path / f"{element}.err").read_text().count("verdict  ") == 1
        assert list(hosts_of_ranks(folder).values()) == ["ss1", "ss2"]


def test_srun_starts_a_torchrun_on_every_host(
    slurm: SlurmCluster, tmp_path: Path, bare_losses: Losses
) -> None:
    meeting = f"127.0.0.1:{free_port()}"
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint={meeting}", "--rdzv-id=7")
    torchrun = ("torchrun", "--nnodes=2", "--nproc-per-node=1", *rendezvous, SCRIPT)
    local = ("--local-addr=127.0.0.1",)
    command = (*ON_BOTH, *RUN, torchrun[0], *local, *torchrun[1:])
    run = Launched.start(tmp_path, command, slurm.environment)
    assert run.wait() == 0, run.stderr
    assert run.stdout == bare_losses(2)
    assert run.reports == 1
    assert sorted(hosts_of_ranks(tmp_path / "D").values()) == ["ss1", "ss2"]


def bare_and_captured(
    slurm: SlurmCluster, folder: Path, srun: tuple[str, ...], options: tuple[str, ...]
) -> tuple[Launched, Launched]:
    """The same job without and with stepscope, at the same time, each after 20 steps."""
    runs = tuple(
        Launched.start(folder / name, (*srun, *around, *TRAIN, *options), slurm.environment)
        for name, around in (("bare", ()), ("captured", RUN))
    )
    for run in runs:
        until(trained(run, 20), run.stderr)
    bare, captured = runs
    return bare, captured


def test_a_cancelled_job_is_explained_before_slurm_kills_it(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Each task gets a signal once; scancel sends SIGTERM, and KillWait later SIGKILL."""
    runs = bare_and_captured(slurm, tmp_path, ON_BOTH, ENDLESS)
    jobs = [job_of(slurm, run) for run in runs]
    for run, job in zip(runs, jobs, strict=True):
        slurm.command("scancel", "--signal=USR1", f"{job}.0")
        until(lambda run=run: sum("SIGUSR1" in line for line in run.stdout) >= 2, "no SIGUSR1")
    time.sleep(1)
    cancelled = time.monotonic()
    slurm.command("scancel", *jobs)
    bare, captured = runs
    assert captured.wait() == bare.wait() == 128 + signal.SIGTERM
    assert time.monotonic() - cancelled < KILL_WAIT_S
    for run in runs:
        assert [line for line in run.stdout if "SIGUSR1" in line] == [
            "SIGUSR1 in 0",
            "SIGUSR1 in 1",
        ]
    assert captured.reports == 1
    closed = read_run(captured.folder / "D")
    assert (closed["status"], closed["exit_code"]) == ("finished", 128 + signal.SIGTERM)
    assert [heard["signal"] for heard in closed["signals"]] == ["SIGUSR1", "SIGTERM"]
    assert "SIGTERM" in notes(explain(captured.folder / "D"))["not-closed"]


def test_a_step_that_is_killed_at_once_is_explained_afterwards(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """scancel of a step sends SIGKILL to all of it, us included."""
    runs = bare_and_captured(slurm, tmp_path, ON_BOTH, ENDLESS)
    slurm.command("scancel", *(f"{job_of(slurm, run)}.0" for run in runs))
    bare, captured = runs
    assert captured.wait() == bare.wait() == 128 + signal.SIGKILL
    assert read_run(captured.folder / "D")["status"] == "running"
    explanation = explain(captured.folder / "D")
    assert len(explanation["ranks"]) == 2
    assert "the run was not closed" in notes(explanation)["not-closed"]


@pytest.mark.parametrize(
    ("killing", "codes"), [("--kill-on-bad-exit=0", {5}), ("--kill-on-bad-exit=1", {5, 143})]
)
def test_a_task_that_fails_decides_the_exit_code(
    slurm: SlurmCluster, tmp_path: Path, killing: str, codes: set[int]
) -> None:
    """srun's code is the highest of its tasks'; task 0 may end by itself before SIGTERM comes."""
    runs = bare_and_captured(slurm, tmp_path, (*ON_BOTH, killing), ("STEPS=60", "FAILS=1"))
    assert {run.wait() for run in runs} <= codes
    bare, captured = runs
    assert captured.stdout == bare.stdout
    assert "task 1: Exited with exit code 5" in captured.stderr
    assert captured.reports == 1
    assert len(explain(captured.folder / "D")["ranks"]) == 2


def test_a_part_that_was_killed_on_another_host_is_not_waited_for_long(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    run = Launched.start(tmp_path, (*ON_BOTH, *RUN, *TRAIN, *ENDLESS), slurm.environment)
    until(trained(run, 20), run.stderr)
    other = json.loads((tmp_path / "D" / "hosts" / "00001.json").read_text())
    os.kill(other["process"]["pid"], signal.SIGKILL)
    assert run.wait() == 128 + signal.SIGKILL
    assert "not waiting any longer for ss2" in run.stderr
    assert run.reports == 1
    first, second = read_run(tmp_path / "D")["hosts"]
    assert (first["status"], second["status"]) == ("finished", "running")
    waited_s = (tmp_path / "D" / "run.json").stat().st_mtime - first["ended_unix"]
    assert waited_s < CLOSES_WITHIN_S + 5  # of a busy machine


def test_a_requeued_job_adds_a_second_attempt_to_its_folder(
    slurm: SlurmCluster, tmp_path: Path, bare_losses: Losses
) -> None:
    first, second = f"{shlex.join(TRAIN)} {' '.join(ENDLESS)}", shlex.join(TRAIN)
    script = f"""[ -n "$SLURM_RESTART_COUNT" ] || exec {shlex.join(RUN)} srun -n2 {first}
        exec {shlex.join(RUN)} srun -n2 {second}"""
    run = submit(slurm, tmp_path, script, "--requeue", "-o", "stdout", "-e", "stderr")
    until(trained(run, 20), "the first attempt trains")
    job = job_of(slurm, run)
    slurm.command("scontrol", "requeue", job)
    until(lambda: slurm.command("squeue", "-h", "-o", "%T") == "PENDING", "it is queued again")
    before = len(run.stdout)
    slurm.command("scontrol", "update", f"JobId={job}", "StartTime=now")
    assert run.wait() == 0, run.stderr
    assert len(run.stdout) - before == len(bare_losses(2))
    assert [part["attempt"] for part in read_run(tmp_path / "D")["hosts"]] == [0, 1]
    folders = ["rank-00000", "rank-00000.2", "rank-00001", "rank-00001.2"]
    assert sorted(hosts_of_ranks(tmp_path / "D")) == folders
    told = notes(explain(tmp_path / "D"))
    assert "attempt 2 is explained" in told["restarted"]
    assert "not-closed" not in told


def test_slurm_says_where_in_its_network_a_node_is(slurm: SlurmCluster, tmp_path: Path) -> None:
    where = ("sh", "-c", "echo $SLURM_TOPOLOGY_ADDR $SLURM_TOPOLOGY_ADDR_PATTERN")
    run = Launched.start(tmp_path, (*ON_BOTH, *where), slurm.environment)
    assert run.wait() == 0, run.stderr
    places = [f"spine.leaf{node}.ss{node} switch.switch.node" for node in (1, 2)]
    assert run.stdout == places
