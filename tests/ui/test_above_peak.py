"""Nothing exceeds its peak: where a number does, the peak is wrong, and every surface says so."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from benches import bench_for
from explain.build import write
from explain.cpu_steps import LARGE, counters, load_of, steps
from stepscope import explain_rank, read_trace
from stepscope.explain.efficiency import above_peak
from stepscope.explain.verdict import judge
from stepscope.predict.whatifs import parse_setting
from stepscope.records.hardware import Profile, Spot
from stepscope.records.job import RankFolder
from stepscope.ui.html.panes.efficiency import efficiency_view
from stepscope.ui.terminal.explanation import print_explanation
from stepscope.ui.topics.device_use import (
    efficiency_headline,
    peak_losses,
    share_of_peak,
    share_of_roof,
)
from stepscope.ui.topics.explanation_json import explanation_json

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.explanation import RankExplanation
    from stepscope.records.hardware import Efficiency
    from stepscope.records.trace import Trace


def profile(**changes: Any) -> Profile:
    told: dict[str, Any] = {
        "host": "here", "device": "a CPU", "kind": "cpu", "torch": "2.11", "when_unix": 0.0,
        "world_size": 1, "backend": None, "threads": 2, "matmul_flops": {"fp32": 120e9},
        "copy_bytes_s": 20e9, "cores": 2, "other_cores": 0.1,
    }  # fmt: skip
    return Profile(**(told | changes))


RIGHT, WRONG = profile(), profile(matmul_flops={"fp32": 50e9})
BUSY = profile(other_cores=1.6, rounds=3)


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """Products at 107 GFLOP/s."""
    return read_trace(write(tmp_path / "t.json", steps([LARGE]), device=None), cache=False)


def efficiency_of(rank: RankExplanation) -> Efficiency:
    assert rank.efficiency is not None
    return rank.efficiency


def test_what_is_below_its_peak_is_a_share_of_it(trace: Trace) -> None:
    rank = explain_rank(trace, profile=RIGHT)
    assert above_peak(efficiency_of(rank)) == ""
    assert efficiency_headline(efficiency_of(rank)).startswith("MFU 89")
    assert {note.id for note in rank.quality}.isdisjoint({"above-peak", "busy-calibration"})


def test_what_is_above_it_is_an_error_in_the_numbers(trace: Trace) -> None:
    rank = explain_rank(trace, profile=WRONG)
    said = above_peak(efficiency_of(rank))
    assert said == (
        "fp32 matmuls reach 107 GFLOP/s, above the peak of 50.0 GFLOP/s (measured by calibrate). "
        "The peak must be wrong: run stepscope calibrate again on an idle machine"
    )
    assert efficiency_headline(efficiency_of(rank)) == f"MFU is not known: {said}"
    assert peak_losses(rank) == []
    assert [note.detail for note in rank.quality if note.id == "above-peak"] == [said]


def test_json_keeps_the_number_and_quality_the_error(trace: Trace) -> None:
    rank = explain_rank(trace, profile=WRONG)
    told = explanation_json(judge((rank,), ()))["ranks"][0]
    assert told["efficiency"]["mfu"] > 2
    assert any(note["id"] == "above-peak" for note in told["quality"])


def test_no_surface_prints_more_than_all_of_a_peak(
    trace: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = explain_rank(trace, profile=WRONG)
    print_explanation(judge((rank,), ()), width=160)
    shown = capsys.readouterr().out
    view = efficiency_view(rank, drawn=True)
    assert view is not None
    assert view["mfu"] == ""
    texts = [shown, view["sentence"], *(" ".join(fact) for fact in view["facts"])]
    texts += [row["near"] for row in view["rows"]]
    for text in texts:
        assert not re.search(r"\b(?:1[0-9][1-9]|[2-9][0-9][0-9])(?:\.\d)?%", text), text
    assert "above the peak" in shown
    assert "MFU 2" not in shown


def test_only_hardware_flops_above_the_peak_are_an_error_too(trace: Trace) -> None:
    """Recomputation counts for HFU alone."""
    fine = efficiency_of(explain_rank(trace, profile=RIGHT))
    assert above_peak(replace(fine, hfu=1.2, by_dtype=()))
    assert not above_peak(replace(fine, hfu=1.004, by_dtype=()))


def test_a_data_sheet_is_to_be_replaced_by_a_calibration(trace: Trace) -> None:
    found = efficiency_of(explain_rank(trace, profile=WRONG))
    assert found.ceilings is not None
    sheet = replace(found, ceilings=replace(found.ceilings, flops_source={"fp32": "table"}))
    assert "(data sheet)" in above_peak(sheet)


def test_a_busy_calibration_is_noted_by_explain_and_whatif(trace: Trace) -> None:
    said = BUSY.doubt
    assert "other processes kept 1.60 of 2 cores busy" in said
    rank = explain_rank(trace, profile=BUSY)
    assert [note.detail for note in rank.quality if note.id == "busy-calibration"] == [said]
    assert "busy machine" in efficiency_headline(efficiency_of(rank))
    bench = bench_for(trace, calibrations=(BUSY,), folder=RankFolder(load=load_of(counters())))
    assert said in bench.predict([parse_setting("threads=4")]).assumptions
    assert said not in bench.predict([parse_setting("scale=mm:0.5")]).assumptions


@pytest.mark.parametrize(
    "quiet",
    [RIGHT, profile(other_cores=None), profile(cores=None), profile(kind="cuda", other_cores=9.0)],
)
def test_a_quiet_or_untold_calibration_is_not_doubted(quiet: Profile) -> None:
    assert quiet.doubt == ""


def test_an_operator_bound_by_memory_may_stand_above_its_roof() -> None:
    spot = Spot(
        operator="aten::add", shapes="", dtype="fp32", calls=1.0, device_ns=100.0, flops=0.0,
        bytes_moved=100.0, intensity=None, achieved_flops=None, ceiling_flops=None, roof_ns=150.0,
        gap_ns=-50.0, bound="memory", phase="forward",
    )  # fmt: skip
    assert share_of_roof(spot) == "above (its data stays in a cache)"
    assert share_of_roof(replace(spot, bound="compute")) == "above it: wrong"
    assert share_of_roof(replace(spot, roof_ns=50.0)) == "50%"
    assert share_of_roof(replace(spot, roof_ns=None)) == "-"
    assert (share_of_peak(0.421), share_of_peak(1.0), share_of_peak(2.1)) == (
        "42%", "100%", "above it: wrong",
    )  # fmt: skip
