"""Which rank a process is when it has no process group."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from stepscope.errors import UsageError
from stepscope.measure.cluster.parallel_layout import _list_members, brief_layout
from stepscope.measure.ranks import (
    ChosenRanks,
    choose_trace,
    network_place,
    parse_ranks,
    rank_and_world,
    spread_evenly,
)
from stepscope.measure.writer import flush_interval_s
from stepscope.records.processors import local_rank
from stepscope.records.rank_facts import NetworkPlace
from stepscope.trace.run_folder.rank_facts import CapturedGroup
from stepscope.trace.run_folder.rank_folder import read_rank_folder


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


# Which ranks record a trace, and what is said about numbers that fit no rank.


def traced(text: str, world_size: int) -> list[int]:
    wanted = parse_ranks(text)
    ranks = range(world_size)
    return [rank for rank in ranks if choose_trace(wanted, rank, world_size).traced]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_numbers_and_ranges_are_listed() -> None:
    assert parse_ranks("0,7,64-66") == ChosenRanks(rule="listed", ranges=((0, 0), (7, 7), (64, 66)))
    assert traced("0, 7,64-66", 128) == [0, 7, 64, 65, 66]


@pytest.mark.parametrize("text", ["", "x", "1,", "1-", "-1", "3..4", "1 2", "one per host", "0x1"])
def test_what_is_no_rank_is_refused(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"is not a rank: write numbers and ranges as in 0,7,64-71"
    ):
        parse_ranks(text)


def test_a_range_that_runs_down_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--ranks 9-3: a range goes up: write 3-9"):
        parse_ranks("9-3")


def test_by_default_up_to_64_ranks_are_all_traced() -> None:
    assert traced("auto", 64) == list(range(64))
    assert traced("all", 200) == list(range(200))


def test_of_512_ranks_one_on_every_host_is_traced_and_every_device_eight_times() -> None:
    # 64 stretches of 8: the n-th begins at 8n and gives its (n + n // 8 mod 8)-th rank.
    ranks = traced("auto", 512)
    assert ranks[:3] == [0, 9, 18]
    assert ranks[7:9] == [63, 65]
    assert [rank // 8 for rank in ranks] == list(range(64))
    assert set(Counter(rank % 8 for rank in ranks).values()) == {8}


@pytest.mark.parametrize("world_size", [65, 100, 127, 128, 1000, 10_000, 99_999])
def test_64_different_ranks_spread_over_any_job(world_size: int) -> None:
    ranks = spread_evenly(world_size)
    assert len(set(ranks)) == 64
    assert ranks == sorted(ranks)
    assert ranks[0] == 0
    assert ranks[-1] < world_size
    hosts = Counter(rank // 8 for rank in ranks)
    assert max(hosts.values()) <= -(-64 * 8 // world_size) + 1


def test_ranks_dealt_out_to_hosts_in_turn_are_spread_as_well() -> None:
    # 64 hosts, rank n on host n mod 64.
    assert len({rank % 64 for rank in spread_evenly(512)}) == 64


def test_numbers_outside_the_job_are_said() -> None:
    choice = choose_trace(parse_ranks("0,3-9,40"), 0, 4)
    assert choice.traced
    assert choice.problem == "--ranks names 4-9, 40, but the job has 4 ranks"
    assert traced("0,3-9,40", 4) == [0, 3]


def test_a_list_without_any_rank_of_the_job_is_answered_as_auto() -> None:
    choice = choose_trace(parse_ranks("900"), 3, 4)
    assert (choice.traced, choice.rule) == (True, "auto")
    assert choice.problem == "--ranks names 900, but the job has 4 ranks, so --ranks auto is used"


def test_one_per_host_is_the_first_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = parse_ranks("one-per-host")
    for rank, local, is_traced in ((8, 0, True), (9, 1, False)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local))
        assert choose_trace(wanted, rank, 16).traced is is_traced


def test_one_per_host_needs_a_launcher_that_says_so() -> None:
    choice = choose_trace(parse_ranks("one-per-host"), 1, 2)
    assert choice.traced
    assert choice.problem.startswith("the launcher does not say which ranks share a host")
    assert choose_trace(parse_ranks("one-per-host"), 0, 1).problem == ""


def test_a_task_that_spawned_its_own_ranks_does_not_number_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # srun started one task per host; the script started eight ranks in each.
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_LOCALID", "0")
    assert local_rank(1) == 0
    assert local_rank(9) is None


def test_members_of_a_large_group_are_ranges() -> None:
    assert _list_members([0, 1, 5]) == {"ranks": [0, 1, 5]}
    regular = _list_members(list(range(3, 10_000, 8)))
    assert regular == {"ranks": [], "ranges": [[3, 9995, 8]]}
    two = [*range(100), *range(200, 300)]
    assert _list_members(two)["ranges"] == [[0, 99, 1], [200, 299, 1]]
    odd = [n * n for n in range(80)]
    assert _list_members(odd) == {"ranks": odd}


@pytest.mark.parametrize("ranks", [range(3, 10_000, 8), [*range(70), 90, 91, 93], range(2)])
def test_members_are_read_as_they_were(ranks: range) -> None:
    assert CapturedGroup(**_list_members(list(ranks))).members() == list(ranks)


def test_a_rank_without_trace_leaves_out_the_buckets() -> None:
    layout = {"groups": [], "ddp": [{"index": 0, "buckets": [1], "grad_ready_order": [2]}]}
    assert brief_layout(layout) == {"groups": [], "ddp": [{"index": 0}]}


@pytest.mark.parametrize(("world", "seconds"), [(1, 0.5), (64, 0.5), (256, 2.0), (10_000, 10.0)])
def test_ranks_of_a_large_job_write_less_often(world: int, seconds: float) -> None:
    assert flush_interval_s(world) == seconds


# Rack and switch of a host, as its environment tells them.


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
