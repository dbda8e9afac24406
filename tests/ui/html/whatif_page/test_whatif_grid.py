"""The page "What if": numbers predicted beforehand."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace as changed
from pathlib import Path

from whatif_pages import CPU, HOSTILE, cell, combinations, laid_out, pane_text, settings_of

from stepscope.predict.engine import Bench
from stepscope.records.explanation import Explanation, Remedy
from stepscope.ui.html.panes.findings import saving_words
from stepscope.ui.html.report import write_report
from stepscope.ui.html.whatif_grid import (
    COLUMNS,
    MOST_CELLS,
    Axis,
    Option,
    WhatIfGrid,
    _fitting,
    settings_at,
)


def test_every_cell_is_what_predicting_its_settings_gives(
    explained: tuple[Explanation, Bench, WhatIfGrid],
) -> None:
    _, bench, grid = explained
    every = combinations(grid)
    assert len(every) > 100
    for places in every[::7]:
        expected = bench.predict(settings_of(grid, places))
        found = cell(grid, places)
        numbers = (
            expected.predicted_ms, expected.low_ms, expected.high_ms, expected.stall_ms,
            expected.host_ms, expected.device_ms, expected.throughput_factor, expected.peak_bytes,
            expected.peak_low_bytes, expected.peak_high_bytes,
        )  # fmt: skip
        for name, number in zip(COLUMNS, numbers, strict=True):
            assert found[name] == number, name


def test_the_cell_where_nothing_is_changed_is_the_step_as_it_is(grid: WhatIfGrid) -> None:
    now = cell(grid, tuple(axis.now for axis in grid.axes))
    assert now["step"] == grid.before.baseline_ms
    assert now["factor"] == 1.0
    assert now["peak"] == grid.before.baseline_peak_bytes


def test_only_what_the_step_takes_has_a_control(grid: WhatIfGrid) -> None:
    names = {axis.id for axis in grid.axes}
    assert {"precision", "batch", "cuda-graphs", "compile", "optimizer"} <= names
    assert "no-sync" not in names  # no call of this step waits
    assert any("no-sync" in reason for reason in grid.refused)


def test_the_batch_is_told_in_samples_where_it_is_known(grid: WhatIfGrid) -> None:
    (batch,) = [axis for axis in grid.axes if axis.id == "batch"]
    assert [option.label for option in batch.options] == ["64", "128 (now)", "256", "512", "1,024"]
    assert batch.options[batch.now].setting == ""


def test_a_cpu_trace_offers_what_a_cpu_can_be_told() -> None:
    _, _, grid = laid_out(CPU)
    assert [axis.id for axis in grid.axes] == ["batch", "optimizer"]
    assert grid.on_host


def test_controls_that_would_be_too_many_are_left_out_and_told() -> None:
    def axis(name: str, many: int) -> Axis:
        more = [Option(label=str(i), setting=f"{name}={i}") for i in range(1, many)]
        options = (Option(label="now", setting=""), *more)
        return Axis(id=name, label=name, hint="", kind="choice", options=options)

    axes = [axis("a", 40), axis("b", 10), axis("c", 6)]
    kept, left_out = _fitting(axes, work=100)
    assert [each.id for each in kept] == ["a", "c"]
    assert left_out == ("b",)
    assert math.prod(len(each.options) for each in kept) == MOST_CELLS
    # A step of many tasks takes longer to predict: fewer combinations.
    kept, _ = _fitting(axes, work=30_000)
    assert [each.id for each in kept] == ["b"]


# The page


def test_a_page_is_small_and_its_data_cannot_end_its_element(grid: WhatIfGrid) -> None:
    page = pane_text(changed(grid, paths=(HOSTILE,)))
    assert len(page) < 100_000
    data = page.partition('id="whatif-data">')[2].partition("</script>")[0]
    body = json.loads(data)
    assert HOSTILE in body["path"]
    assert "<" not in data
    assert "<img" not in page


def test_refusals_are_told_with_their_reasons(grid: WhatIfGrid) -> None:
    page = pane_text(grid)
    assert "<code>no-sync</code> No call of this step waits for the GPU" in page


def test_of_several_ranks_the_page_says_which(grid: WhatIfGrid) -> None:
    page = pane_text(changed(grid, rank=3), several=True)
    assert "the step of rank 3, the slowest" in page


def test_workers_links_and_buckets_are_controls_too(grid: WhatIfGrid) -> None:
    workers, share, bandwidth, buckets = grid.scaling_axes
    assert [option.label for option in workers.options] == [
        "1 (now)", "2", "4", "8", "16", "64", "256",
    ]  # fmt: skip
    assert [option.label for option in share.options] == ["each its own", "shared"]
    assert [option.setting for option in bandwidth.options] == [
        "bandwidth=0.25", "bandwidth=0.5", "", "bandwidth=2", "bandwidth=4",
    ]  # fmt: skip
    assert [option.label for option in buckets.options] == [
        "1 MiB", "5 MiB", "25 MiB (now)", "100 MiB",
    ]  # fmt: skip
    assert not any(axis.why for axis in grid.scaling_axes)


def test_too_few_samples_for_the_workers_say_so(grid: WhatIfGrid) -> None:
    """The batch of 128 cannot be shared by 256."""
    axes = (*grid.axes, *grid.scaling_axes)
    asked = [tuple(map(str, settings_at(axes, places))) for places in grid.positions]
    at = asked.index(("workers=256:strong",))
    assert grid.cells["step"][at] is None
    assert grid.assumptions[at] == (
        "workers=256:strong: a batch of 128 is too small for 256 workers",
    )
    assert grid.cells["step"][asked.index(("workers=64:strong",))] is not None


def test_where_links_are_not_known_their_controls_say_what_to_do() -> None:
    _, _, grid = laid_out(CPU)
    assert not grid.has_links
    page = pane_text(grid)
    assert "Run <code>stepscope calibrate --ranks 2</code>" in page
    assert re.search(r'id="wi-workers"[^>]* disabled>', page)


def test_a_remedy_tells_what_it_saves_or_costs() -> None:
    def promised(saved: float, low: float, high: float) -> Remedy:
        return Remedy(
            id="x", summary="", predicted_ms=saved, low_ms=low, high_ms=high, step_ms=40.0
        )

    assert saving_words(promised(12.0, 9.0, 14.0)) == ("saves 12.0 ms", "9.00 to 14.0")
    unsure = ("may change the step by -14.0 to +0.500 ms", "")
    assert saving_words(promised(12.0, -0.5, 14.0)) == unsure
    assert saving_words(promised(-1.3, -1.8, -0.8)) == ("costs 1.30 ms", "0.800 to 1.80")
    assert saving_words(promised(12.0, -158, 14.0)) == ("not known", "-14.0 to +158 ms")
    assert saving_words(Remedy(id="x", summary="")) == ("", "")


def test_a_report_without_predictions_has_no_such_page(
    explained: tuple[Explanation, Bench, WhatIfGrid], tmp_path: Path
) -> None:
    explanation, _, grid = explained
    write_report(explanation, [], tmp_path / "without.html")
    write_report(explanation, [], tmp_path / "with.html", whatif=grid)
    assert 'id="whatif"' not in (tmp_path / "without.html").read_text()
    text = (tmp_path / "with.html").read_text()
    assert '<a href="#whatif">What if</a>' in text
    assert '<section id="whatif"' in text
