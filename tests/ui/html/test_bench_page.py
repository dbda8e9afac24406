"""The page of a bench: bars to scale, nothing left out, names escaped, all charts in one order."""

from __future__ import annotations

import itertools
import re
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stepscope.bench.against import compare_results
from stepscope.bench.results import BenchResults, StudyPoint, WorkloadResult
from stepscope.ui.html.bench_charts import draw_bench_roofline, scaling_figures
from stepscope.ui.html.bench_page import budget_chart, loss_rows, memory_chart, write_bench_page
from stepscope.ui.html.bench_rows import (
    METRICS,
    bench_rows,
    compared_columns,
    distinctions,
    earlier_rows,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from made_results import H200, made_results, made_study, made_workload
from test_narrow import faults

HOSTILE = "</script><img src=x onerror=alert(1)>{{ 7 * 7 }}"
NAMES = [metric.id for metric in METRICS]


def by_key(*workloads: WorkloadResult) -> dict[str, WorkloadResult]:
    return {str(place): workload for place, workload in enumerate(workloads)}


def rows_of(*workloads: WorkloadResult) -> list[Any]:
    return bench_rows(by_key(*workloads), {}, [])


def cell(row: Any, name: str) -> Any:
    return row.cells[NAMES.index(name)]


def written(results: BenchResults, folder: Path, **more: Any) -> str:
    path = folder / "bench.html"
    write_bench_page(results, path, **more)
    return path.read_text()


def test_shares_are_bars_of_the_whole_and_amounts_dots_between_smallest_and_largest() -> None:
    first, middle, last = rows_of(
        *(
            made_workload(place, samples_per_s=rate, low=None, high=None, busy=busy, mfu=0.5)
            for place, (rate, busy) in enumerate([(10.0, 0.2), (100.0, 0.4), (1000.0, 0.9)])
        )
    )
    ends = [cell(row, "throughput").at for row in (first, middle, last)]
    assert ends[1] == pytest.approx((ends[0] + ends[2]) / 2)
    assert 0 < ends[0] < ends[2] < 100
    assert [cell(row, "busy").at for row in (first, middle, last)] == pytest.approx([20, 40, 90])


def test_nearly_equal_values_do_not_lie_at_opposite_ends() -> None:
    rows = rows_of(made_workload(0, step_ms=100.0), made_workload(1, step_ms=101.0))
    near = [cell(row, "step").at for row in rows]
    assert near[0] < near[1] < near[0] + 1
    assert near[0] == pytest.approx(50, abs=1)


def test_throughput_has_its_interval_and_large_numbers_are_short() -> None:
    (row,) = rows_of(made_workload(samples_per_s=200.0, low=190.0, high=210.0, samples="images"))
    throughput = cell(row, "throughput")
    assert (throughput.words, throughput.aside) == ("200 images/s", "±5.0%")
    assert "200 images/s (190 to 210)" in row.tip
    (row,) = rows_of(made_workload(samples_per_s=19_558_094.0, samples="ratings"))
    assert cell(row, "throughput").words == "19.6 M ratings/s"


def test_what_is_not_known_is_a_dash_and_a_missed_target_is_said() -> None:
    known = made_workload(0)
    missed = made_workload(1, mfu=None, time_to_target_s=None, target_reached=False)
    unknown = made_workload(2, time_to_target_s=None, target_reached=None)
    rows = rows_of(known, missed, unknown)
    assert (cell(rows[1], "mfu").words, cell(rows[1], "mfu").at) == ("–", None)
    assert [cell(row, "target").tone for row in rows[1:]] == ["missed", "nothing"]
    assert cell(rows[1], "target").words == "not reached"


def test_a_metric_that_no_workload_has_is_no_column() -> None:
    (row,) = rows_of(made_workload(mfu=None, busy=None))
    assert len(row.cells) == len(METRICS) - 2


def test_rows_say_only_what_tells_them_apart() -> None:
    plain, fast = made_workload(0), made_workload(0, remedies=("bf16", "fused-optimizer"))
    assert distinctions([plain, made_workload(1)]) == ["", ""]
    assert distinctions([plain, fast]) == ["unchanged", "bf16 + fused-optimizer"]
    assert distinctions([plain, replace(plain, ranks=2)]) == ["1 rank", "2 ranks"]
    assert distinctions([plain, replace(plain, size="tiny")]) == ["small", "tiny"]
    batches = [replace(plain, settings={"lr": 1, "batch": batch}) for batch in (8, 16)]
    assert distinctions([*batches, made_workload(1)]) == ["batch 8", "batch 16", ""]
    other_size = replace(plain, size="tiny", settings={"batch": 2})
    assert distinctions([plain, other_size]) == ["small", "tiny"]


def test_against_saved_results_uses_the_terminal_s_statistics() -> None:
    runs = (100.0, 100.1, 99.9, 100.05, 99.95)
    base = made_results(3)
    base = replace(base, workloads=tuple(replace(row, runs_ms=runs) for row in base.workloads))
    factors = (1.1, 1.0, 0.8)
    now = replace(
        base,
        workloads=tuple(
            replace(row, runs_ms=tuple(factor * ms for ms in runs))
            for row, factor in zip(base.workloads, factors, strict=True)
        ),
    )
    comparison = compare_results(base, now, "base.json")
    measured = by_key(*now.workloads)
    (column,) = compared_columns(measured, comparison)
    cells = [column.cells[key] for key in measured]
    assert [cell.tone for cell in cells] == ["bad", "still", "good"]
    assert [cell.words for cell in cells] == ["+10.0%", "0%", "-20.0%"]
    places = [cell.at for cell in cells]
    assert places[0] > 50 > places[2]
    assert places[1] == pytest.approx(50, abs=0.5)
    assert "base.json" in column.hint
    assert set(earlier_rows(measured, base)) == set(measured)


def test_what_cannot_be_compared_says_why() -> None:
    base = made_results(2)
    now = replace(base, workloads=(replace(base.workloads[0], settings={"batch": 1}),))
    comparison = compare_results(base, now, "base.json")
    (column,) = compared_columns(by_key(*now.workloads), comparison)
    assert column.cells["0"].words == "–"
    assert "batch 1, the base 64" in column.cells["0"].tip


def test_a_machine_that_changed_its_pace_is_said_on_the_page_too(tmp_path: Path) -> None:
    base = made_results(1)
    (row,) = base.workloads
    calm = replace(row, calibration_ms=(5.0, 5.01, 5.02, 4.99, 5.0))
    slow = replace(row, calibration_ms=tuple(1.1 * ms for ms in calm.calibration_ms))
    before, now = replace(base, workloads=(calm,)), replace(base, workloads=(slow,))
    text = unescape(written(now, tmp_path, against=before))
    assert "takes 10.0% longer for fixed arithmetic" in text
    assert "Measure the base again: the machine's own speed has changed" in text
    assert "fixed arithmetic" not in written(before, tmp_path, against=before)


def test_remedies_are_shown_beside_the_row_without_them() -> None:
    plain = made_workload(0)
    twice = replace(plain, remedies=("bf16",), speedup=2.0, speedup_low=1.9, speedup_high=2.1)
    unsure = replace(twice, remedies=("tf32",), speedup=1.02, speedup_low=0.9, speedup_high=1.1)
    measured = by_key(plain, twice, unsure)
    (column,) = compared_columns(measured, None)
    assert set(column.cells) == {"1", "2"}
    assert [column.cells[key].tone for key in "12"] == ["good", "still"]
    assert column.cells["1"].words == "2.00×"
    assert earlier_rows(measured, None) == {"1": plain, "2": plain}


def test_stacks_add_up_and_keep_their_amounts() -> None:
    small = made_workload(0, memory={"parameters": 1_000, "activations": 3_000})
    large = made_workload(1, memory={"parameters": 8_000})
    chart = memory_chart(by_key(small, large))
    assert chart is not None
    assert [[piece.share for piece in stack.pieces] for stack in chart.stacks] == [
        [0.25, 0.75],
        [1.0],
    ]
    assert [stack.share for stack in chart.stacks] == [0.5, 1.0]
    assert [stack.total for stack in chart.stacks] == ["4.00 kB", "8.00 kB"]
    assert [label for _, label, _ in chart.key] == ["parameters", "activations"]


def test_every_part_of_the_budget_has_its_colour_and_a_new_one_is_not_lost() -> None:
    measured = by_key(made_workload(0), made_workload(1, budget_ms={"compute": 3.0, "new": 1.0}))
    chart = budget_chart(measured)
    assert chart is not None
    for stack in chart.stacks:
        assert sum(piece.share for piece in stack.pieces) == pytest.approx(1, abs=1e-3)
    assert chart.stacks[1].pieces[-1].share == 0.25
    assert "new" in [label for _, label, _ in chart.key]
    looks = {label: look for look, label, _ in chart.key}
    assert looks["Compute"] == "bg-compute"
    assert looks["Data loading"] == "bg-data_loading is-idle"


def test_nothing_captured_is_no_chart() -> None:
    bare = made_workload(memory={}, budget_ms={}, flops=None, loss_first=None)
    measured = by_key(bare)
    assert memory_chart(measured) is None
    assert budget_chart(measured) is None
    assert draw_bench_roofline(measured, H200) is None
    assert loss_rows(measured) == []


def test_losses_run_from_the_first_to_the_last_past_the_target() -> None:
    falls = made_workload(0, loss_first=4.0, loss_last=1.0, target_loss=2.0)
    misses = replace(falls, loss_last=3.0, target_reached=False)
    below_zero = replace(falls, loss_first=1.0, loss_last=-3.0, target_loss=-1.0)
    lost = replace(falls, loss_last=float("nan"), target_reached=False)
    rows = loss_rows(by_key(falls, misses, below_zero, lost))
    assert [row.tone for row in rows] == ["reached", "missed", "reached", "missed"]
    for row in (rows[0], rows[2]):
        assert row.last_at < row.target_at < row.first_at
    assert rows[1].target_at < rows[1].last_at
    assert rows[0].last_at - 2 == pytest.approx((rows[0].first_at - 2) / 4)
    assert 0 <= rows[3].last_at <= 100
    assert rows[0].words == "4.00 → 1.00"


def test_dots_lie_on_the_roofline_s_axes_and_names_do_not_cover_each_other() -> None:
    roofline = draw_bench_roofline(by_key(*(made_workload(place) for place in range(24))), H200)
    assert roofline is not None
    for picture in (roofline.wide, roofline.narrow):
        assert picture.count('class="spot"') == 24
        names = re.findall(r'class="spot-name" x="([\d.]+)" y="([\d.]+)">([^<]+)<', picture)
        boxes = [(float(x), float(y), float(x) + 6.5 * len(name)) for x, y, name in names]
        for a, b in itertools.combinations(boxes, 2):
            assert abs(a[1] - b[1]) >= 13 or a[2] <= b[0] or b[2] <= a[0]
    assert "fp32  66.9 TFLOP/s" in roofline.wide
    assert "memory, 4.80 TB/s" in roofline.wide
    assert len(re.findall(r'class="spot-name"', roofline.wide)) > 18


def test_a_step_reaches_its_flops_over_its_time() -> None:
    one = made_workload(flops=2e12, bytes_moved=1e11, step_ms=100.0, compute_share={"fp32": 0.3})
    roofline = draw_bench_roofline(by_key(one), H200)
    assert roofline is not None
    tip = unescape(roofline.wide)
    assert "20.0 TFLOP/s at 20.0 FLOPs per byte" in tip
    assert "30% of its roof, 66.9 TFLOP/s" in tip


def test_peaks_come_from_the_data_sheet_where_none_were_saved() -> None:
    bare = replace(H200, peak_flops={}, peak_bytes_s=None, peak_source="")
    measured = by_key(made_workload(0))
    known = draw_bench_roofline(measured, bare)
    assert known is not None
    assert known.roofs
    assert "4.80 TB/s" in known.wide
    nowhere = draw_bench_roofline(measured, replace(bare, device="Nobody's GPU"))
    assert nowhere is not None
    assert not nowhere.roofs


def test_a_study_has_a_line_for_each_number_of_ranks_and_of_samples() -> None:
    (figure,) = scaling_figures([made_study(batches=3, ranks=(1, 2))])
    batches, ranks = figure.charts
    assert batches.lines == ("1 rank", "2 ranks")
    assert ranks.lines == ("batch 4", "batch 8", "batch 16")
    assert batches.picture.count('class="spot"') == 6
    assert batches.picture.count('class="promised"') == 2
    assert any(line.startswith("5 predictions: off by") for line in figure.summary)
    assert figure.not_measured == ("batch 32, 1 rank: needs 161 GB, 141 GB are free",)


def test_each_batch_on_its_own_number_of_ranks_is_one_chart() -> None:
    points = [StudyPoint(batch=4 * ranks, ranks=ranks, samples_per_s=10.0) for ranks in (1, 2)]
    (figure,) = scaling_figures([replace(made_study(), points=tuple(points))])
    assert [chart.title for chart in figure.charts] == ["By batch"]


def test_a_study_of_one_place_is_no_curve() -> None:
    one = replace(made_study(), points=(StudyPoint(batch=4, samples_per_s=10.0),))
    assert scaling_figures([one]) == []


def test_names_and_reasons_are_escaped(tmp_path: Path) -> None:
    results = made_results(12)
    rows = [
        replace(row, name=HOSTILE, verdict=HOSTILE, why=HOSTILE, samples=HOSTILE, notes=(HOSTILE,))
        for row in results.workloads
    ]
    rows[0] = replace(
        rows[0], memory={HOSTILE: 5}, budget_ms={HOSTILE: 1.0}, counters={HOSTILE: 0.1},
        compute_share={HOSTILE: 0.1}, remedies=(HOSTILE,), settings={HOSTILE: HOSTILE},
    )  # fmt: skip
    study = replace(made_study(HOSTILE), samples=HOSTILE)
    hostile = replace(
        results,
        workloads=tuple(rows),
        scaling=(study,),
        broken_rules=(HOSTILE,),
        rules={HOSTILE: HOSTILE},
        command=(HOSTILE,),
        machine=replace(
            H200, host=HOSTILE, device=HOSTILE, peak_source=HOSTILE, clocks={HOSTILE: 1}
        ),
    )
    text = written(hostile, tmp_path, against=hostile)
    assert "<img" not in text
    assert "49" not in re.findall(r"onerror=alert\(1\)&gt;(\d+)", text)


def test_the_page_names_what_failed_which_rules_broke_and_how_to_run_it_again(
    tmp_path: Path,
) -> None:
    text = unescape(written(replace(made_results(12), broken_rules=("only 1 run",)), tmp_path))
    assert "CUDA out of memory" in text
    assert "batch 12 would fit" in text
    assert "Only 1 run" in text
    assert 'data-copy="stepscope bench --size small --save base.json"' in text
    assert "NVIDIA H200" in text
    assert "sm 1,980 -> 1,965 MHz" in text


def test_a_bench_in_which_nothing_was_measured_is_still_a_page(tmp_path: Path) -> None:
    rows = tuple(row for row in made_results(12).workloads if row.status != "measured")
    text = written(replace(made_results(2), workloads=rows, machine=None), tmp_path)
    assert "CUDA out of memory" in text
    assert 'id="workloads"' not in text
    assert written(replace(made_results(2), workloads=(), machine=None), tmp_path)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large.html"
    results = replace(made_results(60), scaling=(made_study(),), broken_rules=("only 1 run",))
    write_bench_page(results, path, against=made_results(60, seed=1))
    return path


@pytest.mark.browser
@pytest.mark.parametrize("width", [380, 1600])
def test_sixty_workloads_fit_and_no_text_covers_other_text(
    large: Path, visit: Any, width: int
) -> None:
    page = visit(large, viewport={"width": width, "height": 900})
    slope = "memory, 4.80 TB/s"  # tilted: the browser reports a box far larger than its letters
    assert [line for line in faults(page) if slope not in line] == []


@pytest.mark.browser
def test_order_filter_and_pointer_reach_every_chart(large: Path, visit: Any) -> None:
    page = visit(large)
    keys = "Array.from(document.querySelectorAll('{} [data-key]'), each => each.dataset.key)"
    lists = (".b-table tbody", "#budget .b-list", "#memory .b-list", "#losses .b-list")
    before = [page.evaluate(keys.format(where)) for where in lists]
    assert all(order == before[0] for order in before)
    page.locator(".b-table").get_by_role("button", name="MFU").click()
    after = [page.evaluate(keys.format(where)) for where in lists]
    assert all(order == after[0] for order in after)
    assert after[0] != before[0]
    shares = page.locator(".b-table tbody .b-mfu .b-words").all_inner_texts()
    known = [float(text.rstrip("%")) for text in shares if text != "–"]
    assert known == sorted(known, reverse=True)
    assert shares[-1] == "–"
    page.get_by_label("Order").select_option("as they ran")
    assert page.evaluate(keys.format(lists[0])) == before[0]

    page.get_by_placeholder("Filter all charts").fill("vgg")
    assert page.locator(".b-table tbody tr:visible").count() == 3
    assert page.locator("#memory .b-line:visible").count() == 3
    assert page.locator(".b-roofline .is-wide g[data-key]:visible").count() == 3
    assert page.locator(".b-count").inner_text() == "3 of 58"

    page.locator(".b-table tbody tr:visible th").first.hover()
    assert "vgg16" in page.locator("main > .tip").inner_text()
    assert page.locator(".b-roofline .is-wide g.is-hot").count() == 1


@pytest.mark.browser
def test_bars_show_shares_or_amounts(large: Path, visit: Any) -> None:
    page = visit(large)
    bars = page.locator("#memory .b-stack > .bar")

    def widths() -> list[float]:
        return [round(bars.nth(at).bounding_box()["width"]) for at in range(5)]

    assert len(set(widths())) == 1
    page.add_style_tag(content=".b-stack > .bar { transition: none !important; }")
    page.get_by_role("button", name="bytes", exact=True).click()
    assert len(set(widths())) == 5
    page.locator("#memory .seg").first.hover()
    assert "parameters" in page.locator("main > .tip").inner_text()
