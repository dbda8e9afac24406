"""rank.json's host_load: read where it is whole, left out with a word where it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepscope.trace.run_folder.rank_folder import read_rank_folder

LOAD = {
    "threads": 4,
    "cores": 8,
    "quota_cores": 2.5,
    "local_ranks": 2,
    "a_field_of_tomorrow": 1,
    "plain": {"steps": 5, "wall_ns": 1000, "user_ns": 1500, "system_ns": 500, "busy_ns": 6000,
              "job_ns": 2000, "stolen_ns": 1000, "training_waiting_ns": 250,
              "others": [{"name": "make", "cores": 3.0}]},
}  # fmt: skip


def folder_of(tmp_path: Path, **facts: Any) -> Any:
    (tmp_path / "rank.json").write_text(json.dumps({"host": "here", **facts}))
    found = read_rank_folder(tmp_path / "trace.json.gz")
    assert found is not None
    return found


def test_cores_and_shares_are_over_the_steps_wall_time(tmp_path: Path) -> None:
    load = folder_of(tmp_path, host_load=LOAD).load
    assert (load.room, load.job_threads) == (2.5, 8)
    plain = load.plain
    assert plain.used_cores == pytest.approx(2.0)
    assert plain.other_cores == pytest.approx(4.0)
    assert plain.stolen_cores == pytest.approx(1.0)
    assert plain.waiting_share == pytest.approx(0.25)
    assert plain.others[0].name == "make"


def test_values_that_the_system_does_not_report_are_none(tmp_path: Path) -> None:
    load = folder_of(tmp_path, host_load={"threads": 1, "plain": {"steps": 1, "wall_ns": 9}}).load
    assert load.room is None
    assert (load.plain.used_cores, load.plain.other_cores, load.plain.waiting_share) == (None,) * 3


@pytest.mark.parametrize("told", [None, {}])
def test_an_older_run_has_no_load(tmp_path: Path, told: dict[str, Any] | None) -> None:
    assert folder_of(tmp_path, host_load=told).load is None
    assert folder_of(tmp_path).load is None


def test_a_damaged_host_load_leaves_the_other_facts(tmp_path: Path) -> None:
    found = folder_of(tmp_path, host_load={"threads": "many"})
    assert found.load is None
    assert found.host == "here"
    (note,) = found.notes
    assert note.id == "side-file-values"
    assert "host_load.threads: 'many'" in note.detail
