"""The page "What if": every number was predicted beforehand, and a control only picks one."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stepscope.explain.run import explain_also
from stepscope.predict.whatif import Bench, parse
from stepscope.records.explanation import Explanation, Remedy
from stepscope.records.prediction import Setting
from stepscope.trace.read import read_trace
from stepscope.ui.html.report import format_saving, write_report
from stepscope.ui.html.whatif import whatif_page
from stepscope.ui.html.whatif_charts import Point, draw_band
from stepscope.ui.html.whatif_grid import (
    COLUMNS,
    MOST_CELLS,
    WORKERS,
    Axis,
    Option,
    Series,
    WhatIfGrid,
    _fitting,
    lay_out,
)
from stepscope.ui.whatif import bench_of, figures, try_each, usual

TRACE = Path(__file__).parents[2] / "golden/h200-resnet18/rank-00000/trace.json.gz"
CPU = Path(__file__).parents[2] / "golden/cpu_step.json.gz"
HOSTILE = "</script><img src=x onerror=alert(1)>&{{ 7 * 7 }}"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def laid_out(path: Path) -> tuple[Explanation, Bench, WhatIfGrid]:
    explanation = explain_also([path], cache=False)[0]
    rank = explanation.ranks[0]
    bench = bench_of(read_trace(path, cache=False), rank)
    return explanation, bench, lay_out(bench, try_each(bench, usual(bench)), (), rank)


@pytest.fixture(scope="module")
def explained() -> tuple[Explanation, Bench, WhatIfGrid]:
    return laid_out(TRACE)


@pytest.fixture
def grid(explained: tuple[Explanation, Bench, WhatIfGrid]) -> WhatIfGrid:
    return explained[2]


def combinations(grid: WhatIfGrid) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(axis.options)) for axis in grid.axes)))


def settings_of(grid: WhatIfGrid, places: tuple[int, ...]) -> list[Setting]:
    options = [axis.options[place] for axis, place in zip(grid.axes, places, strict=True)]
    return [parse(option.setting) for option in options if option.setting]


def cell(grid: WhatIfGrid, places: tuple[int, ...]) -> dict[str, float | None]:
    at = combinations(grid).index(places)
    return {name: column[at] for name, column in grid.cells.items()}


# The grid


def test_every_cell_is_what_predicting_its_settings_gives(
    explained: tuple[Explanation, Bench, WhatIfGrid],
) -> None:
    _, bench, grid = explained
    every = combinations(grid)
    assert len(every) == len(grid.cells["step"]) > 100
    for places in every[::7]:
        expected = bench.predict(settings_of(grid, places))
        found = cell(grid, places)
        numbers = (
            expected.predicted_ms, expected.low_ms, expected.high_ms, expected.host_ms,
            expected.device_ms, expected.throughput_factor, expected.peak_bytes,
            expected.peak_low_bytes, expected.peak_high_bytes,
        )  # fmt: skip
        for name, number in zip(COLUMNS, numbers, strict=True):
            assert found[name] == (None if number is None else float(f"{number:.5g}")), name


def test_the_cell_where_nothing_is_changed_is_the_step_as_it_is(grid: WhatIfGrid) -> None:
    now = cell(grid, tuple(axis.now for axis in grid.axes))
    assert now["step"] == float(f"{grid.before.baseline_ms:.5g}")
    assert now["factor"] == 1.0
    assert now["peak"] == float(f"{grid.before.baseline_peak_bytes:.5g}")


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
    assert [axis.id for axis in grid.axes] == ["optimizer"]
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
    page = str(whatif_page(changed(grid, path=HOSTILE)))
    assert len(page) < 50_000
    data = page.partition('id="whatif-data">')[2].partition("</script>")[0]
    body = json.loads(data)
    assert HOSTILE in body["path"]
    assert "<" not in data
    assert "<img" not in page


def test_refusals_are_told_with_their_reasons(grid: WhatIfGrid) -> None:
    page = str(whatif_page(grid))
    assert "<code>no-sync</code> No call of this step waits for the device" in page


def test_of_several_ranks_the_page_says_which(grid: WhatIfGrid) -> None:
    page = str(whatif_page(changed(grid, rank=3), several=True))
    assert "the step of rank 3, which decides the step" in page


def test_a_change_by_degrees_is_a_chart_with_a_band(
    explained: tuple[Explanation, Bench, WhatIfGrid],
) -> None:
    _, bench, grid = explained
    points = tuple(bench.predict([parse(f"batch={each}")]) for each in ("x2", "x4"))
    series = Series(label="Turned up", across="times", points=points)
    page = str(whatif_page(changed(grid, series=(series,), scaling=None)))
    assert "<h3>Turned up</h3>" in page
    assert page.count('class="band" d="M') == 1
    assert f"times 4: {figures(points[1].predicted_ms)} ms" in page


def test_more_workers_are_a_chart_with_their_efficiency(grid: WhatIfGrid) -> None:
    curve = grid.scaling
    assert curve is not None
    assert [each.workers for each in curve.points] == list(WORKERS)
    page = str(whatif_page(changed(grid, series=())))
    assert "<h3>More workers</h3>" in page
    last = curve.points[-1]
    assert f": {figures(last.step_ms)} ms ({figures(last.low_ms)}" in page
    assert f">{last.efficiency:.0%}</text>" in page
    assert ">1 now</text>" in page


def test_a_chart_puts_its_points_where_they_belong() -> None:
    points = [
        Point(label="1", value=100.0, low=80.0, high=120.0),
        Point(label="2", value=50.0, low=40.0, high=60.0),
    ]
    drawn = str(draw_band(points, title="t", across="a", unit="ms", now=100.0))
    heights = [float(each) for each in re.findall(r'class="dot" cx="[\d.]+" cy="([\d.]+)"', drawn)]
    top = 120.0 * 1.05
    assert heights == pytest.approx([188 - 172 * 100 / top, 188 - 172 * 50 / top], abs=0.06)
    assert f'class="now" d="M62 {188 - 172 * 100 / top:.1f}H548"' in drawn
    assert 'class="band" d="M88.0 24.2L' in drawn


def test_a_remedy_tells_what_it_saves_or_costs() -> None:
    gain = Remedy(id="x", summary="", predicted_ms=12.0, low_ms=-0.5, high_ms=14.0)
    assert format_saving(gain) == ("saves 12.0 ms", "-0.500 ms to 14.0 ms")
    loss = Remedy(id="x", summary="", predicted_ms=-1.3, low_ms=-1.8, high_ms=-0.8)
    assert format_saving(loss) == ("1.30 ms longer", "0.800 ms to 1.80 ms")
    assert format_saving(Remedy(id="x", summary="")) == ("", "")


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


# In a browser


@pytest.fixture(scope="module")
def browser() -> Any:
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Any:
    """A report with this grid; at the end nothing was complained about, nothing fetched."""
    seen: list[str] = []
    pages = []

    def show(explanation: Explanation, grid: WhatIfGrid, **options: Any) -> Any:
        path = tmp_path / "report.html"
        write_report(explanation, [], path, whatif=grid)
        page = browser.new_page(viewport={"width": 1280, "height": 900}, **options)
        pages.append(page)
        page.on("pageerror", lambda error: seen.append(f"error: {error}"))
        page.on("console", lambda message: seen.append(f"console: {message.text}"))
        page.on("request", lambda request: seen.append(request.url))
        page.goto(path.as_uri())
        page.evaluate("window.stepscope.ready")
        return page

    yield show
    for page in pages:
        page.close()
    assert [line for line in seen if not line.startswith(("file://", "data:"))] == []


def shown(page: Any) -> str:
    return str(page.locator('[data-out="step"]').inner_text())


def words(number: float | None) -> str:
    assert number is not None
    return f"{figures(number)} ms"


def places_with(grid: WhatIfGrid, *settings: str) -> tuple[int, ...]:
    """The controls' places for these settings."""
    return tuple(
        next((i for i, o in enumerate(axis.options) if o.setting in settings), axis.now)
        if any(o.setting in settings for o in axis.options)
        else axis.now
        for axis in grid.axes
    )


def pick(page: Any, grid: WhatIfGrid, setting: str) -> None:
    """What a user does to get that setting."""
    axis = next(a for a in grid.axes if any(o.setting == setting for o in a.options))
    place = [option.setting for option in axis.options].index(setting)
    control = page.locator(f'[data-axis="{axis.id}"]')
    if axis.kind == "slider":
        control.fill(str(place))
    elif axis.kind == "switch":
        control.check()
    else:
        control.nth(place).check()


@pytest.mark.browser
def test_each_control_moves_the_number_to_exactly_the_predicted_one(
    explained: tuple[Explanation, Bench, WhatIfGrid], open_page: Any
) -> None:
    explanation, _, grid = explained
    page = open_page(explanation, grid)
    assert shown(page) == words(grid.before.baseline_ms)
    made: list[str] = []
    for setting in ("precision=bf16", "batch=x4", "cuda-graphs", "compile", "optimizer=fused"):
        pick(page, grid, setting)
        made.append(setting)
        expected = cell(grid, places_with(grid, *made))
        assert shown(page) == words(expected["step"])
        said = page.locator('[data-out="interval"]').inner_text()
        assert f"between {figures(expected['low'])} and {figures(expected['high'])}" in said
    command = page.locator('[data-out="command"]').inner_text()
    assert all(f"--set {each}" in command for each in made)
    page.get_by_role("button", name="Back to now").click()
    assert shown(page) == words(grid.before.baseline_ms)
    assert page.locator('[data-axis="compile"]').is_checked() is False


@pytest.mark.browser
def test_throughput_memory_and_who_decides_follow(
    explained: tuple[Explanation, Bench, WhatIfGrid], open_page: Any
) -> None:
    explanation, _, grid = explained
    page = open_page(explanation, grid)
    pick(page, grid, "batch=x2")
    expected = cell(grid, places_with(grid, "batch=x2"))
    assert grid.batch is not None
    assert expected["factor"] is not None
    pace = grid.batch * 1000 / grid.before.baseline_ms * expected["factor"]
    assert page.locator('[data-out="pace"]').inner_text() == figures(pace)
    assert page.locator('[data-out="peak"]').inner_text() == "5.94 GB"
    assert page.locator('[data-out="decides"]').inner_text() == "the device"
    chosen = page.locator('[data-out="batches"] .dot.is-chosen title').text_content()
    assert chosen.startswith(f"batch 256: {words(expected['step'])}")
    pick(page, grid, "precision=bf16")
    assert page.locator('[data-out="peak"]').inner_text() == "not known"


@pytest.mark.browser
def test_the_keyboard_reaches_every_control(
    explained: tuple[Explanation, Bench, WhatIfGrid], open_page: Any
) -> None:
    explanation, _, grid = explained
    page = open_page(explanation, grid)
    page.locator('[data-axis="precision"]').first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert shown(page) == words(cell(grid, places_with(grid, "precision=bf16"))["step"])
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    both = places_with(grid, "precision=bf16", "batch=x2")
    assert shown(page) == words(cell(grid, both)["step"])
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    every = places_with(grid, "precision=bf16", "batch=x2", "cuda-graphs")
    assert shown(page) == words(cell(grid, every)["step"])


@pytest.mark.browser
def test_a_row_of_the_table_sets_the_controls(
    explained: tuple[Explanation, Bench, WhatIfGrid], open_page: Any
) -> None:
    explanation, _, grid = explained
    page = open_page(explanation, grid, color_scheme="dark")
    pick(page, grid, "compile")
    page.locator('[data-wi-set="precision=bf16"]').click()
    assert shown(page) == words(cell(grid, places_with(grid, "precision=bf16"))["step"])
    assert page.locator("[data-wi]").get_attribute("data-tone") == "good"


@pytest.mark.browser
def test_combinations_that_cannot_be_predicted_say_so(
    explained: tuple[Explanation, Bench, WhatIfGrid], open_page: Any
) -> None:
    explanation, _, grid = explained
    bad = combinations(grid).index(places_with(grid, "compile"))
    cells = {name: list(column) for name, column in grid.cells.items()}
    for column in cells.values():
        column[bad] = None
    page = open_page(explanation, changed(grid, cells=cells))
    pick(page, grid, "compile")
    assert shown(page) == "Not known"
    page.locator('[data-axis="compile"]').uncheck()
    assert shown(page) == words(grid.before.baseline_ms)


@pytest.mark.browser
def test_a_cpu_traces_page_works_too(open_page: Any) -> None:
    explanation, _, grid = laid_out(CPU)
    page = open_page(explanation, grid)
    pick(page, grid, "optimizer=fused")
    assert shown(page) == words(cell(grid, places_with(grid, "optimizer=fused"))["step"])
    assert page.locator('[data-out="decides"]').inner_text() == "the host"


@pytest.mark.browser
def test_several_ranks_share_one_page(
    explained: tuple[Explanation, Bench, WhatIfGrid], open_page: Any
) -> None:
    explanation, _, grid = explained
    one = explanation.ranks[0]
    both = replace(explanation, ranks=(one, replace(one, rank=1, path="/runs/1.json")))
    page = open_page(both, grid)
    assert page.locator("#whatif").count() == 1
