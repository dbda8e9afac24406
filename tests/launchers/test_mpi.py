"""Jobs of a real mpirun: one run folder, one report, losses and exit codes as without us."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from launched import TRAIN, Launched, explain, hosts_of_ranks, read_run
from mpi_hosts import HOSTS, mpirun, mpirun_on_hosts, why_no_hosts, why_no_mpirun

pytestmark = [
    pytest.mark.launchers,
    pytest.mark.skipif(why_no_mpirun() is not None, reason=str(why_no_mpirun())),
]
on_hosts = pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
Losses = Callable[[int], list[str]]
RUN = ("stepscope", "run", "--out", "D", "--")
CARRIED = ("-x", "STEPSCOPE_CAPTURE", "-x", "PYTHONPATH")


def finished(folder: Path, command: tuple[str, ...]) -> Launched:
    run = Launched.start(folder, command, {})
    assert run.wait() == 0, run.stderr
    return run


@on_hosts
def test_every_process_of_mpirun_is_a_part_of_one_run(tmp_path: Path, bare_losses: Losses) -> None:
    """Started on each host, stepscope needs nothing from the shell of the user."""
    run = finished(tmp_path, (*mpirun_on_hosts(tmp_path), *RUN, *TRAIN))
    assert run.stdout == bare_losses(2)
    assert run.reports == 1
    assert list(hosts_of_ranks(tmp_path / "D").values()) == list(HOSTS)
    closed = read_run(tmp_path / "D")
    assert [(part["host"], part["status"]) for part in closed["hosts"]] == [
        (host, "finished") for host in HOSTS
    ]


@on_hosts
def test_mpirun_carries_capture_to_other_hosts_if_told_to(
    tmp_path: Path, bare_losses: Losses
) -> None:
    command = (*RUN, *mpirun_on_hosts(tmp_path), *CARRIED, *TRAIN)
    run = finished(tmp_path, command)
    assert run.stdout == bare_losses(2)
    assert run.reports == 1
    assert list(hosts_of_ranks(tmp_path / "D").values()) == list(HOSTS)


@on_hosts
def test_mpirun_that_carries_nothing_trains_all_the_same(
    tmp_path: Path, bare_losses: Losses
) -> None:
    run = finished(tmp_path, (*RUN, *mpirun_on_hosts(tmp_path), *TRAIN))
    assert run.stdout == bare_losses(2)
    assert "mpirun -x STEPSCOPE_CAPTURE -x PYTHONPATH" in run.stderr


def test_on_one_host_mpirun_needs_no_options(tmp_path: Path, bare_losses: Losses) -> None:
    run = finished(tmp_path, (*RUN, *mpirun(2), *TRAIN))
    assert run.stdout == bare_losses(2)
    assert run.reports == 1
    assert sorted(hosts_of_ranks(tmp_path / "D")) == ["rank-00000", "rank-00001"]


def test_a_process_that_fails_decides_the_exit_code(tmp_path: Path) -> None:
    """mpirun ends the others: what they left is explained afterwards."""
    options = ("STEPS=60", "FAILS=1")
    runs = [
        Launched.start(tmp_path / name, (*mpirun(2), *around, *TRAIN, *options), {})
        for name, around in (("bare", ()), ("captured", RUN))
    ]
    assert [run.wait() for run in runs] == [5, 5]
    bare, captured = (set(run.stdout) for run in runs)
    assert captured == bare
    assert len(explain(tmp_path / "captured" / "D")["ranks"]) == 2
