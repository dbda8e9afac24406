"""What capture reads of the DataLoader that feeds the training, and what it counts."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from stepscope.measure.steps.loaders import (
    Loaders,
    MakeBoard,
    count_parts,
    describe_loader,
    passing_costs,
)
from stepscope.trace.run_folder.rank_facts import read_facts

WORKERS = Path(__file__).parent / "scripts" / "workers.py"


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        raise AssertionError("the script's own code must not run")

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(4)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(8))


def join(rows: Any, width: int) -> Any:
    return rows


def first_line(function: Any) -> int:
    line: int = function.__code__.co_firstlineno
    return line


def test_settings_and_places_are_read_without_running_the_scripts_code() -> None:
    collate = functools.partial(join, width=2)
    facts = describe_loader(DataLoader(Rows(), 4, collate_fn=collate, num_workers=0))
    assert (facts["workers"], facts["batch_size"], facts["iterable"]) == (0, 4, False)
    assert (facts["dataset"], facts["persistent"]) == ("Rows", False)
    assert facts["made_at"]["line"] == first_line(Rows.__getitem__)
    assert facts["collated_at"]["line"] == first_line(join)
    assert facts["made_at"]["file"] == facts["collated_at"]["file"] == __file__


def test_torchs_own_wrappers_and_functions_have_no_place() -> None:
    inner = Rows()
    inside = describe_loader(DataLoader(Subset(Subset(inner, range(4)), range(2)), 2))
    assert (inside["dataset"], inside["collated_at"]) == ("Rows", None)
    plain = describe_loader(DataLoader(TensorDataset(torch.zeros(4)), 2))
    assert (plain["dataset"], plain["made_at"]) == ("TensorDataset", None)
    yields = describe_loader(DataLoader(Stream(), 2))
    assert yields["iterable"]
    assert yields["made_at"]["line"] == first_line(Stream.__iter__)


def test_tensors_of_a_batch_are_counted_wherever_they_are() -> None:
    batch = {"ids": torch.zeros(2, 3), "more": [torch.zeros(4, dtype=torch.int8), "name"], "n": 1}
    assert count_parts(batch) == (2, 28, 2)
    assert count_parts(torch.zeros(5)) == (1, 20, 0)
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    assert count_parts(cyclic)[0] == 0


def test_forked_workers_write_what_a_batch_took() -> None:
    board = MakeBoard(2)
    for worker in range(2):
        child = os.fork()
        if not child:  # the first batch of a process only warms it up
            for number in range(4):
                board.made(worker, 100 + number, 50)
            os._exit(0)
        os.waitpid(child, 0)
    content = board.content()
    assert (content["count"], content["wall_ns"], content["cpu_ns"]) == (6, 2 * 306, 300)
    assert (content["first"], content["first_wall_ns"]) == (2, 200)
    assert content["process_ns"] > 0
    board.made(7, 1, 1)  # more workers than rows
    assert board.content()["count"] == 6


def test_loaders_of_equal_settings_add_up() -> None:
    """A script may build its loader anew for each epoch."""
    loaders = Loaders()
    samplers = []
    for _ in range(2):
        loader = DataLoader(TensorDataset(torch.zeros(40)), 2)
        loaders.begins(loader)
        assert loaders.begun is not None
        loaders.created(10)
        assert loaders.begun is None
        samplers.append((loader, id(loader._index_sampler)))
        use = loaders.of_sampler(samplers[-1][1])
        assert use is not None
        for _ in range(20):
            use.fetched(7, 5, [torch.zeros(2)], plain=True)
        use.ended(3)
    (row,) = loaders.content({samplers[0][1]}, last=False)["loaders"]
    assert (row["epochs"], row["batches"], row["trains"]) == (2, 40, True)
    assert (row["tensors"], row["batch_bytes"]) == (1, 8)
    fetch = row["fetch"]
    assert 20 < fetch["count"] < 40  # not those that an epoch begins with
    assert fetch["wall_ns"] == 7 * fetch["count"]
    assert row["end"] == {"count": 2, "wall_ns": 6}


def test_a_strange_loader_is_left_alone() -> None:
    loaders = Loaders()
    loaders.begins(SimpleNamespace(dataset=None))
    assert loaders.begun is None
    assert loaders.content(set(), last=True) == {"loaders": [], "passing": None}


@pytest.mark.skipif(sys.platform != "linux", reason="needs memfd_create")
def test_passing_is_tried_without_leaving_anything_open() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    tried = passing_costs()
    assert tried is not None
    assert all(ns > 0 for ns in tried.values())
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_run_with_workers_says_what_they_did(tmp_path: Path) -> None:
    ours = ("-m", "stepscope", "run", "--no-explain", "--wait", "100", "--out", str(tmp_path / "r"))
    done = subprocess.run(
        [sys.executable, *ours, "--", sys.executable, str(WORKERS)],
        capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = read_facts(tmp_path / "r" / "rank-00000")["data"]
    (row,) = data["loaders"]
    assert (row["workers"], row["batch_size"], row["trains"]) == (2, 8, True)
    assert (row["batches"], row["tensors"], row["epochs"]) == (20, 2, 1)
    assert row["make"]["count"] + row["make"]["first"] == 20
    assert row["make"]["process_ns"] >= row["make"]["cpu_ns"] > 0
    assert data["passing"]["hand_over_ns"] > 0
