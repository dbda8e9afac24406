"""Rack and switch of a host, as its environment tells them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from stepscope.measure.ranks import network_place
from stepscope.records.rank_facts import NetworkPlace
from stepscope.trace.run_folder.rank_folder import read_rank_folder

if TYPE_CHECKING:
    from pathlib import Path


def slurm(names: str, kinds: str) -> dict[str, str]:
    return {"SLURM_TOPOLOGY_ADDR": names, "SLURM_TOPOLOGY_ADDR_PATTERN": kinds}


def test_slurm_names_the_switches_from_the_top_down() -> None:
    assert network_place(slurm("s0.s2.node1", "switch.switch.node")) == {
        "rack": None,
        "switch": "s2",
        "switches": ["s0", "s2"],
    }


def test_a_nodes_name_may_contain_dots() -> None:
    place = network_place(slurm("s0.node1.example.org", "switch.node"))
    assert place is not None
    assert place["switches"] == ["s0"]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        slurm("node1", "node"),  # no topology plugin
        slurm("", ""),
        slurm("s0", "switch.node"),  # cut short
        {"SLURM_TOPOLOGY_ADDR": "s0.node1"},
        {"STEPSCOPE_RACK": "  "},
    ],
)
def test_what_nothing_tells_is_unknown(environment: dict[str, str]) -> None:
    assert network_place(environment) is None


def test_the_users_own_words_come_first() -> None:
    own = {"STEPSCOPE_RACK": "B12", "STEPSCOPE_SWITCH": "leaf7"}
    assert network_place({**slurm("s0.s2.node1", "switch.switch.node"), **own}) == {
        "rack": "B12",
        "switch": "leaf7",
        "switches": ["leaf7"],
    }
    assert network_place({"STEPSCOPE_RACK": "B12"}) == {
        "rack": "B12",
        "switch": None,
        "switches": [],
    }


def test_the_same_switch_in_both_keeps_the_way_to_it() -> None:
    place = network_place({**slurm("s0.s2.n", "switch.switch.node"), "STEPSCOPE_SWITCH": "s2"})
    assert place is not None
    assert place["switches"] == ["s0", "s2"]


def test_it_is_read_back_from_rank_json(tmp_path: Path) -> None:
    place = network_place(slurm("s0.s2.node1", "switch.switch.node"))
    rank = {"schema": 1, "rank": 0, "world_size": 1, "host": "node1", "network_place": place}
    (tmp_path / "rank.json").write_text(json.dumps(rank))
    folder = read_rank_folder(tmp_path / "trace.json.gz")
    assert folder is not None
    assert folder.network_place == NetworkPlace(switch="s2", switches=("s0", "s2"))


def test_a_place_that_makes_no_sense_is_left_out(tmp_path: Path) -> None:
    rank = {"schema": 1, "rank": 0, "host": "node1", "network_place": {"switches": 7}}
    (tmp_path / "rank.json").write_text(json.dumps(rank))
    folder = read_rank_folder(tmp_path / "trace.json.gz")
    assert folder is not None
    assert folder.host == "node1"
    assert folder.network_place is None or folder.network_place.switch is None
