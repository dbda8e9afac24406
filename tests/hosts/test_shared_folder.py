"""Two hosts write one run folder, or a folder each: the same job, the same answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from jobs_on_hosts import capture, codes, explain, losses, run
from lab import HostOutcome, Lab, why_no_shifted_clock, why_not

STEPS = {"STEPS": "20"}
SHIFT_NS = 0 if why_no_shifted_clock() else 3_000_000_000


class Captured(NamedTuple):
    folder: Path
    outcomes: Mapping[str, HostOutcome]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    """Captured by both hosts into one folder. Where it can be done, node1's clock is 3 s ahead."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("shared") / "run"
    with Lab(hosts=2) as lab:
        if SHIFT_NS:
            lab.shift_clock("node1", SHIFT_NS / 1e6)
        outcomes = run(lab, capture(folder), STEPS)
    return Captured(folder, outcomes)


def test_losses_and_exit_codes_are_those_of_the_bare_job(
    job: Captured, bare: Mapping[str, HostOutcome]
) -> None:
    assert codes(job.outcomes) == codes(bare) == {"node0": 0, "node1": 0}
    assert losses(job.outcomes, 20) == losses(bare, 20)
    assert len(losses(bare, 20)) == 40


def test_one_run_folder_holds_both_hosts(job: Captured) -> None:
    hosts = [json.loads((job.folder / f"hosts/0000{place}.json").read_text()) for place in (0, 1)]
    assert [host["host"] for host in hosts] == ["node0", "node1"]
    assert {host["status"] for host in hosts} == {"finished"}
    whole = json.loads((job.folder / "run.json").read_text())
    assert (whole["status"], whole["exit_code"], whole["world_size"]) == ("finished", 0, 2)
    assert sorted(path.name for path in job.folder.glob("rank-*")) == ["rank-00000", "rank-00001"]


def test_the_first_host_speaks_and_the_second_says_where_its_part_is(job: Captured) -> None:
    assert f"run folder {job.folder}" in job.outcomes["node0"].stderr
    assert "the first host explains it" in job.outcomes["node1"].stderr


def test_both_ranks_are_explained_on_one_clock(job: Captured) -> None:
    answer = explain(job.folder)
    assert [rank["rank"] for rank in answer["ranks"]] == [0, 1]
    clock = answer["clock"]
    assert clock["aligned"]
    assert abs(clock["offset_ns"]["1"] - SHIFT_NS) <= clock["error_ns"]["1"] + 20_000
    assert clock["error_ns"]["1"] < 1_000_000
    assert {note["id"] for note in answer["quality"]} <= {"clocks-apart", "clock-not-kept"}


def test_folders_of_the_hosts_give_the_same_answer(job: Captured, tmp_path: Path) -> None:
    """The folder as it would be without a shared disk: each host has its own half."""
    halves = [tmp_path / name for name in ("node0", "node1")]
    for place, half in enumerate(halves):
        (half / "hosts").mkdir(parents=True)
        shutil.copytree(job.folder / f"rank-0000{place}", half / f"rank-0000{place}")
        shutil.copy(job.folder / f"hosts/0000{place}.json", half / "hosts")
        shutil.copy(job.folder / "run.json", half)
    assert without_places(explain(*halves)) == without_places(explain(job.folder))


def without_places(answer: dict[str, Any]) -> dict[str, Any]:
    """All but the paths of the files."""
    return {name: _plain(value) for name, value in answer.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if name not in ("path", "file")}
    return [_plain(each) for each in value] if isinstance(value, list) else value


@pytest.mark.slow
def test_four_hosts_with_folders_of_their_own(tmp_path: Path) -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Lab(hosts=4) as lab:
        folders = {name: tmp_path / name for name in lab.hosts}
        around = {name: capture(folder) for name, folder in folders.items()}
        captured = run(lab, around, STEPS)
    assert set(codes(captured).values()) == {0}
    answer = explain(*folders.values())
    assert [rank["rank"] for rank in answer["ranks"]] == [0, 1, 2, 3]
    assert answer["clock"]["aligned"]
    for name in ("node1", "node2", "node3"):
        assert "without the first host's" in captured[name].stderr
