"""Choices of a calibration that need no other rank: sizes, repeats, groups, shares of a buffer."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from stepscope.measure.calibrate import ceilings
from stepscope.measure.calibrate.ceilings import best_of, measure_ceilings, spread
from stepscope.measure.calibrate.collectives import (
    Buffers,
    SweepLimits,
    actual_bytes,
    choose_repeats,
    elements,
    partitions,
)
from stepscope.measure.calibrate.settings import CalibrationSettings


def test_sizes_are_powers_of_two_up_to_the_largest_asked_for() -> None:
    assert CalibrationSettings().sizes() == [1 << power for power in range(10, 29)]
    assert CalibrationSettings(max_bytes=5000).sizes() == [1024, 2048, 4096]
    assert CalibrationSettings(quick=True, max_bytes=64 << 10).sizes() == [
        1 << 10,
        1 << 12,
        1 << 14,
        1 << 16,
    ]


def test_settings_travel_as_arguments() -> None:
    settings = CalibrationSettings(
        backend="gloo", max_bytes=4096, seconds=2.5, quick=True, kinds=("all_reduce",)
    )
    assert settings.arguments() == [
        "--seed", "0", "--kind", "all_reduce", "--quick", "--backend", "gloo",
        "--max-bytes", "4096", "--seconds", "2.5",
    ]  # fmt: skip


def test_every_rank_gets_the_same_share() -> None:
    assert elements(1024, 2) == 256
    assert (elements(1024, 3), actual_bytes(1024, 3)) == (255, 1020)
    assert elements(1024, 1000) == 1000
    buffers = Buffers.allocate(255, torch.device("cpu"))
    assert len(buffers.first) == len(buffers.second) == 255


def test_small_sizes_are_repeated_more_and_large_ones_go_where_time_is_short() -> None:
    sizes = [1 << 10, 1 << 20, 1 << 26, 1 << 28]
    pilot = [100_000, 1_000_000, 100_000_000, 1_000_000_000]
    assert repeats(sizes, pilot, 60_000_000_000) == [25, 25, 3, 3]
    assert repeats(sizes, pilot, 2_000_000_000) == [25, 25, 3]
    assert repeats(sizes, pilot, 1) == [25, 25]
    small = [1 << 10, 1 << 12, 1 << 14]
    assert repeats(small, [10**9] * 3, 1) == [3, 3, 3]
    limits = SweepLimits(visit_ns=15_000_000, repeats=(2, 15), passes=(3, 12), always_bytes=0)
    two = choose_repeats(small, [[10**6, 10**8]] * 3, 3 * 400_000_000, limits)
    assert two == [[15, 2]] * 2  # contenders share the time


def repeats(sizes: list[int], pilot_ns: list[int], budget_ns: int) -> list[int]:
    chosen = choose_repeats(sizes, [[ns] for ns in pilot_ns], budget_ns, SweepLimits())
    return [count for (count,) in chosen]


def test_two_ranks_have_no_groups_inside() -> None:
    assert partitions(["a", "a"]) == {}


def test_four_ranks_of_one_host_have_pairs() -> None:
    assert partitions(["a"] * 4) == {"pairs": [(0, 1), (2, 3)]}
    assert partitions(["a"] * 5) == {"pairs": [(0, 1), (2, 3)]}


def test_several_hosts_have_groups_inside_and_between() -> None:
    assert partitions(["a", "a", "a", "b", "b", "b"]) == {
        "intra-host": [(0, 1, 2), (3, 4, 5)],
        "inter-host": [(0, 3), (1, 4), (2, 5)],
        "pairs": [(0, 1), (2, 3), (4, 5)],
    }


def test_the_same_grouping_has_one_name() -> None:
    found = partitions(["a", "a", "b", "b"])
    assert found == {"intra-host": [(0, 1), (2, 3)], "inter-host": [(0, 2), (1, 3)]}
    assert partitions(["a", "b"]) == {}


def test_spread_is_that_of_the_middle_half() -> None:
    assert spread([100.0, 100.0, 100.0, 100.0, 900.0]) == 0
    assert spread([80.0, 90.0, 100.0, 110.0, 120.0]) == pytest.approx(0.2)


def test_ceilings_of_a_cpu() -> None:
    before = torch.get_num_threads()
    found = measure_ceilings(torch.device("cpu"), quick=True)
    assert torch.get_num_threads() == before
    assert found["matmul_flops"]["fp32"]["flops"] > 0
    assert found["copy_bytes_s"]["value"] > 0
    assert found["tiny_op_ns"]["value"] > 0
    assert "launch_ns" not in found


def round_of(fp32: float, copy: float, tiny: float, others: float | None) -> dict[str, Any]:
    return {
        "threads": 2,
        "matmul_flops": {"fp32": {"flops": fp32, "spread": 0.1, "side": 512}},
        "not_offered": {},
        "copy_bytes_s": {"value": copy, "spread": 0.1},
        "tiny_op_ns": {"value": tiny, "spread": 0.1},
        "other_cores": others,
        "cores": 2,
    }


def test_of_several_rounds_the_best_of_each_ceiling_counts() -> None:
    best = best_of(round_of(50e9, 20e9, 900.0, 1.5), round_of(90e9, 10e9, 700.0, 0.4))
    assert best["matmul_flops"]["fp32"]["flops"] == 90e9
    assert best["copy_bytes_s"]["value"] == 20e9
    assert best["tiny_op_ns"]["value"] == 700.0
    assert best["other_cores"] == 0.4


@pytest.mark.parametrize(
    ("loads", "rounds"), [([0.1], 1), ([1.5, 0.1], 2), ([1.5, 1.4, 1.3], 3), ([None], 1)]
)
def test_a_busy_machine_is_measured_again_until_it_is_quiet_or_thrice(
    monkeypatch: pytest.MonkeyPatch, loads: list[float | None], rounds: int
) -> None:
    left = list(loads)
    monkeypatch.setattr(
        ceilings, "_measure_once", lambda *_: round_of(50e9, 20e9, 900.0, left.pop(0))
    )
    monkeypatch.setattr(ceilings, "_PAUSE_S", {False: 0.0})
    found = measure_ceilings(torch.device("cpu"))
    assert found["rounds"] == rounds
    assert left == []
    assert found["other_cores"] == (min(filter(None, loads)) if any(loads) else None)


def test_other_processes_are_what_is_busy_beside_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"wall_ns": 0, "busy_ns": 0, "job_ns": 0, "stolen_ns": 0}
    after = {"wall_ns": 1000, "busy_ns": 1800, "job_ns": 700, "stolen_ns": 100}
    monkeypatch.setattr(ceilings, "counters", lambda: after)
    assert ceilings._load_since(before)["other_cores"] == pytest.approx(1.2)
    monkeypatch.setattr(ceilings, "counters", lambda: {**after, "busy_ns": None})
    assert ceilings._load_since(before)["other_cores"] is None
