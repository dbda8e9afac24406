"""Cores, quotas and NUMA nodes as Linux reports them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from stepscope.records import processors
from stepscope.records.processors import read_core_list, write_core_list

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("text", ["0-3,8,10-11", "0", "", "5-6"])
def test_lists_of_cores_are_read_and_written(text: str) -> None:
    assert write_core_list(tuple(read_core_list(text))) == text


def test_a_quota_counts_if_it_is_less_than_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "usable_cores", lambda: 16)
    for quota, cores in ((None, 16), (2.5, 2), (0.5, 1), (64.0, 16)):
        monkeypatch.setattr(processors, "quota_cores", lambda quota=quota: quota)
        assert processors.allowed_cores() == cores


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_nodes_hold_the_cores_that_may_be_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 4})
    monkeypatch.setattr(processors, "_NODES", tmp_path)
    assert processors.numa_nodes() == {0: (0, 1, 4)}  # nothing is known
    for node, cores in (("node10", "4-5"), ("node2", "0-3"), ("node3", "6-7")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cores + "\n")
    assert list(processors.numa_nodes().items()) == [(2, (0, 1)), (10, (4,))]


def test_siblings_are_known_by_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processors, "_CPUS", tmp_path)
    assert processors.first_sibling(9) == 9
    (tmp_path / "cpu9/topology").mkdir(parents=True)
    (tmp_path / "cpu9/topology/thread_siblings_list").write_text("1,9\n")
    assert processors.first_sibling(9) == 1


def test_a_local_rank_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    assert processors.local_rank() is None
    monkeypatch.setenv("SLURM_LOCALID", "3")
    assert processors.local_rank() == 3
