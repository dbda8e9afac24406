"""The comparison's page: its numbers add up, its names are escaped, it fits a telephone."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parents[2] / "verify"))

from folders import noisy, write_run
from traced import write_trace

from stepscope.explain.rank import explain_rank
from stepscope.records.comparison import Comparison
from stepscope.ui.html.comparison import (
    _bars,
    _shares,
    draw_order,
    draw_spread,
    waterfall,
    write_comparison,
)
from stepscope.ui.html.lanes import (
    MOST_ROWS,
    EventBlock,
    StepLane,
    StepLanes,
    draw_pair,
    lanes_of_side,
    step_lanes,
)
from stepscope.verify.compare import compare

HOSTILE = "</script><img src=x onerror=alert(1)>{{ 7 * 7 }}"


@pytest.fixture
def compared(tmp_path: Path) -> Comparison:
    """20 ms with an optimizer's loop, 17 ms with a fused one, both traced."""
    a = write_run(tmp_path / "a", noisy(20, seed=1))
    b = write_run(tmp_path / "b", noisy(17, seed=2), command=["python", HOSTILE])
    write_trace(a / "rank-00000")
    write_trace(b / "rank-00000", optimizer="fused")
    return compare([str(a)], [str(b)], cache=False)


def test_the_waterfall_leads_from_a_to_b_without_a_gap(compared: Comparison) -> None:
    fall = waterfall(compared)
    assert fall is not None
    assert fall["rows"][0]["before"] == fall["a_at"]
    assert fall["rows"][-1]["after"] == pytest.approx(fall["b_at"])
    for row, following in zip(fall["rows"], fall["rows"][1:], strict=False):
        assert row["after"] == pytest.approx(following["before"])
    # a phase's bar is as wide as its change, on a scale where A to B is B - A
    forward = next(row for row in fall["rows"] if row["label"] == "Forward")
    moved = next(row for row in compared.phases if row.id == "forward")
    each_ms = (fall["b_at"] - fall["a_at"]) / (compared.b_ms - compared.a_ms)
    assert forward["after"] - forward["before"] == pytest.approx(moved.change_ms * each_ms)
    assert forward["tone"] == "less"
    assert forward["whisker"] is not None
    assert forward["whisker"][0] < forward["after"] < forward["whisker"][1]


def test_what_is_within_chance_is_pale(compared: Comparison) -> None:
    still = tuple(replace(row, low_ms=-1.0, high_ms=1.0) for row in compared.phases)
    fall = waterfall(replace(compared, phases=still))
    assert fall is not None
    assert {row["tone"] for row in fall["rows"]} == {"still"}


def test_an_interval_that_is_cut_ends_at_the_frame_and_others_within(compared: Comparison) -> None:
    fall = waterfall(compared)
    assert fall is not None
    ends = [end for row in fall["rows"] if row["whisker"] for end in row["whisker"]]
    assert 0 < min(ends) < max(ends) < 100
    far = tuple(replace(row, low_ms=-1e4, high_ms=1e4) for row in compared.phases)
    cut = waterfall(replace(compared, phases=far))
    assert cut is not None
    assert {row["whisker"] for row in cut["rows"] if row["between"].startswith("-10,000")} == {
        (0.0, 100.0)
    }


def test_ticks_are_round_numbers(compared: Comparison) -> None:
    ticks = re.findall(r"([\d.,]+) ms</text>", str(draw_spread(compared.a, compared.b)))
    assert len(ticks) >= 2
    steps = np.diff([float(tick.replace(",", "")) for tick in ticks])
    assert steps == pytest.approx([steps[0]] * len(steps))
    assert f"{steps[0]:.0e}"[0] in "125"


def test_profiled_steps_fall_by_parts_without_intervals(golden: Path) -> None:
    trace = str(golden / "h200-resnet18/rank-00000/trace.json.gz")
    found = compare([trace], [trace], cache=False)
    fall = waterfall(found)
    assert fall is not None
    assert all(row["whisker"] is None and row["between"] == "" for row in fall["rows"])
    assert fall["rows"][-1]["after"] == pytest.approx(fall["b_at"])


def test_every_step_is_in_the_histogram_once(compared: Comparison) -> None:
    side = compared.a
    shares = _shares(side, np.linspace(0.0, 100.0, 41))
    assert shares.sum() == pytest.approx(1)
    below = _shares(side, np.array([0.0, side.quantiles_ms[50], 1e9]))
    assert below.tolist() == pytest.approx([0.5, 0.5])


def test_equal_steps_are_drawn_too(tmp_path: Path) -> None:
    same = tmp_path / "same.txt"
    same.write_text("10\n" * 100)
    found = compare([str(same)], [str(same)])
    assert "nan" not in draw_spread(found.a, found.b) + draw_order(found.a, found.b)


def test_both_bars_are_on_one_scale_and_add_up(compared: Comparison) -> None:
    bars = _bars(compared)
    assert bars is not None
    for side, step in zip(bars["sides"], (compared.a_ms, compared.b_ms), strict=True):
        assert sum(part.ms for part in side["parts"]) == pytest.approx(step)
        assert side["left_over"] + step == pytest.approx(bars["longest"])
    assert bars["longest"] == pytest.approx(compared.a_ms)


def test_one_step_as_lanes_by_hand(compared: Comparison) -> None:
    lanes = lanes_of_side(compared.b, cache=False)
    assert lanes is not None
    assert lanes.span_ns == 9_900_000
    (main,) = lanes.lanes
    assert [block.name for block in main.rows[0]] == ["ProfilerStep#1"]
    inside = main.rows[1]
    assert inside[0].name == "aten::mm"
    assert (inside[0].start_ns, inside[0].dur_ns) == (0, 80_000)
    assert inside[-1].name == "aten::_fused_adam_"


def test_lanes_are_few_and_short_events_are_drawn_as_one(make_trace: Any) -> None:
    trace = make_trace(steps=3, layers=60)
    lanes = step_lanes(trace, explain_rank(trace))
    assert lanes is not None
    assert all(len(lane.rows) <= MOST_ROWS for lane in lanes.lanes)
    for lane in lanes.lanes:
        for row in lane.rows:
            ends = [block.start_ns + block.dur_ns for block in row]
            assert max(ends) <= lanes.span_ns
            assert sorted(block.start_ns for block in row) == [block.start_ns for block in row]


def test_a_shorter_step_ends_where_it_ends_on_the_longer_ones_axis() -> None:
    def lanes(span_ns: int) -> StepLanes:
        block = EventBlock(start_ns=0, dur_ns=span_ns, color="compute", name=HOSTILE, count=1)
        return StepLanes(name="", span_ns=span_ns, lanes=(StepLane(name="x", rows=((block,),)),))

    drawn = draw_pair(lanes(4_000_000), lanes(1_000_000))
    assert 'x="0.000%" y="37" width="100.000%"' in drawn
    assert 'width="25.000%"' in drawn
    assert 'x1="25.000%"' in drawn  # where B's step ends
    assert "<img" not in drawn


def test_the_page_fits_a_telephone_and_turns_dark(
    compared: Comparison, tmp_path: Path, visit: Any
) -> None:
    page = tmp_path / "page.html"
    write_comparison(compared, page, cache=False)
    assert "<img" not in page.read_text()
    opened = visit(page, viewport={"width": 390, "height": 800}, color_scheme="light")
    assert opened.evaluate("document.documentElement.scrollWidth") <= 390
    assert opened.evaluate("document.documentElement.dataset.theme") == "light"
    opened.click("#theme")
    assert opened.evaluate("document.documentElement.dataset.theme") == "dark"
    wide = visit(page)
    assert wide.evaluate("document.documentElement.scrollWidth") <= 1280
    titles = "[...document.querySelectorAll('section')].map((each) => each.id)"
    assert wide.evaluate(titles) == [
        "verdict", "moved", "steps", "parts", "timelines", "tables",
    ]  # fmt: skip
