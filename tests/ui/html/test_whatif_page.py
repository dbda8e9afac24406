"""The page "What if": numbers predicted beforehand, and what workers and links make of them."""

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
from msgspec import to_builtins
from msgspec.structs import replace

from stepscope.explain.run import explain_also
from stepscope.predict.crew_step import Local, Plan, predict_together
from stepscope.predict.whatif import Bench, parse
from stepscope.records.explanation import Explanation, Remedy
from stepscope.records.prediction import Setting
from stepscope.records.promise import Delivery, Kept
from stepscope.trace.read import read_trace
from stepscope.ui.html.report import format_saving, write_report
from stepscope.ui.html.whatif import whatif_page
from stepscope.ui.html.whatif_axes import Axis, Option
from stepscope.ui.html.whatif_crew import lay_out_crew
from stepscope.ui.html.whatif_grid import COLUMNS, MOST_CELLS, WhatIfGrid, _fitting, lay_out
from stepscope.ui.whatif import adjusted, bench_of, figures, try_each, usual
from stepscope.verify.track_record import make_promise

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
    assert len(page) < 100_000
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


def test_workers_links_and_buckets_are_controls_too(grid: WhatIfGrid) -> None:
    assert grid.crew is not None
    workers, bandwidth, buckets = grid.crew.axes
    assert [option.label for option in workers.options] == [
        "1 (now)", "2", "4", "8", "16", "32", "64", "128", "256",
    ]  # fmt: skip
    assert [option.setting for option in bandwidth.options] == [
        "bandwidth=0.25", "bandwidth=0.5", "", "bandwidth=2", "bandwidth=4", "bandwidth=8",
    ]  # fmt: skip
    assert [option.label for option in buckets.options][:4] == [
        "1 MiB",
        "5 MiB",
        "10 MiB",
        "25 MiB (now)",
    ]
    assert not any(axis.why for axis in grid.crew.axes)


def test_where_links_are_not_known_their_controls_say_what_to_do() -> None:
    _, _, grid = laid_out(CPU)
    assert grid.crew is not None
    assert grid.crew.crew is None
    page = str(whatif_page(grid))
    assert "run <code>stepscope calibrate --ranks 2</code>" in page
    assert re.search(r'id="wi-workers"[^>]* disabled>', page)
    assert 'id="whatif-crew"' not in page


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


# Workers and links, in a browser

CREW = (
    ("workers=8",),
    ("workers=2", "bandwidth=0.25"),
    ("precision=bf16", "workers=64", "bucket-mb=1"),
    ("cuda-graphs", "compile", "workers=256", "bandwidth=0.5", "bucket-mb=50"),
    ("batch=x2", "optimizer=fused", "workers=16", "bandwidth=8"),
)


def number(text: str) -> float:
    found = re.search(r"[\d,]+(\.\d+)?", text)
    assert found, text
    return float(found[0].replace(",", ""))


@pytest.mark.browser
def test_workers_links_and_buckets_move_all_numbers_beside_the_other_controls(
    explained: tuple[Explanation, Bench, WhatIfGrid], open_page: Any
) -> None:
    explanation, bench, grid = explained
    page = open_page(explanation, grid)
    for settings in CREW:
        told = bench.predict([parse(each) for each in settings])
        assert not told.refused
        page.evaluate("wanted => window.stepscope.whatif.set(wanted)", list(settings))
        assert number(shown(page)) == pytest.approx(told.predicted_ms, rel=0.01)
        low, high = re.findall(r"[\d.,]+\d", page.locator('[data-out="interval"]').inner_text())[:2]
        assert number(low) == pytest.approx(told.low_ms, rel=0.03)
        assert number(high) == pytest.approx(told.high_ms, rel=0.03)
        assert grid.batch is not None
        pace = grid.batch * 1000 / grid.before.baseline_ms * told.throughput_factor
        assert number(page.locator('[data-out="pace"]').inner_text()) == pytest.approx(
            pace, rel=0.01
        )
        bars = page.locator('[data-out="bars"] svg').get_attribute("aria-label")
        host, device = (number(bars.partition(f"{who} then ")[2]) for who in ("Host", "Device"))
        assert host == pytest.approx(told.host_ms, rel=0.01, abs=0.006)
        assert device == pytest.approx(told.device_ms, rel=0.01)
        command = page.locator('[data-out="command"]').inner_text()
        assert all(f"--set {each}" in command for each in settings)
        memory = page.locator('[data-out="peak"]').inner_text()
        assert (memory == "not known") == (told.peak_bytes is None)


@pytest.mark.browser
def test_the_page_computes_what_python_does_to_the_last_shown_figure(
    explained: tuple[Explanation, Bench, WhatIfGrid], open_page: Any
) -> None:
    """Workers, links and bucket sizes of one cell, and of the same as a CUDA graph."""
    explanation, _, grid = explained
    page = open_page(explanation, grid)
    assert grid.crew is not None
    crew, doubts = grid.crew.crew, grid.crew.doubts
    assert crew is not None
    assert doubts is not None
    places = places_with(grid, "precision=bf16")
    bare = combinations(grid).index(places)
    graphed = combinations(grid).index(places_with(grid, "precision=bf16", "cuda-graphs"))
    plain, made = grid.crew_cells[bare], grid.crew_cells[graphed]
    assert plain is not None
    assert made is not None
    every = itertools.product(range(1, 9, 2), range(len(crew.ways)), (0.25, 1.0))
    plans = [Plan(link=link, way=way, bandwidth=pace) for link, way, pace in every]
    for at, step in ((bare, None), (graphed, made.sketch)):
        known = Local(
            sketch=plain.sketch, step_ns=plain.step_ns, variance=plain.variance,
            graphed=step, spread=made.spread,
        )  # fmt: skip
        computed = page.evaluate(
            """([at, bare, plans]) =>
                plans.map((plan) => window.stepscope.whatif.crew.predict(at, bare, plan))""",
            [at, bare, [to_builtins(plan) for plan in plans]],
        )
        for plan, found in zip(plans, computed, strict=True):
            told = predict_together(crew, doubts, known, plan)
            expected = (told.done.step_ns, told.low_ns, told.high_ns, told.done.comm_ns)
            numbers = (found["step"], found["low"], found["high"], found["comm"])
            assert numbers == pytest.approx(expected, rel=5e-4)
            assert found["exposed"] == pytest.approx(told.exposed_ns, abs=1e-3 * told.done.step_ns)


@pytest.mark.browser
def test_one_worker_exchanges_nothing_and_its_links_cannot_be_moved(
    explained: tuple[Explanation, Bench, WhatIfGrid], open_page: Any
) -> None:
    explanation, _, grid = explained
    page = open_page(explanation, grid)
    link = page.locator("#wi-bandwidth")
    assert link.is_disabled()
    assert page.locator('[data-out="exposed"]').inner_text() == "none"
    page.locator("#wi-workers").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.locator('[data-output="workers"]').inner_text() == "8"
    assert link.is_enabled()
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowLeft")
    command = page.locator('[data-out="command"]')
    assert "--set workers=8 --set bandwidth=0.5" in command.inner_text()
    # Back to one: what is set for the link no longer counts, and comes back with the workers.
    page.locator("#wi-workers").fill("0")
    assert "bandwidth" not in command.inner_text()
    assert shown(page) == words(grid.before.baseline_ms)
    page.get_by_role("button", name="Back to now").click()
    assert page.locator("#wi-bandwidth").input_value() == "2"


@pytest.mark.browser
def test_the_scaling_chart_is_that_of_the_other_controls(
    explained: tuple[Explanation, Bench, WhatIfGrid], open_page: Any
) -> None:
    explanation, bench, grid = explained
    page = open_page(explanation, grid)
    page.evaluate("window.stepscope.whatif.set(['precision=bf16', 'workers=4', 'bandwidth=0.25'])")
    dots = page.locator('[data-out="workers"] .dot title').all_text_contents()
    assert len(dots) == 9
    same = [parse("precision=bf16"), parse("bandwidth=0.25")]
    told = bench.predict([*same, parse("workers=256")])
    assert number(dots[-1].partition("a step of ")[2]) == pytest.approx(told.predicted_ms, rel=0.01)
    alone = bench.predict([parse("precision=bf16")])
    efficiency = told.throughput_factor / alone.throughput_factor / 256
    assert number(dots[-1].partition("efficiency ")[2]) == pytest.approx(100 * efficiency, abs=0.6)
    chosen = page.locator('[data-out="workers"] .dot.is-chosen title').text_content()
    assert chosen.startswith("4 workers")


@pytest.mark.browser
def test_moving_a_control_moves_no_other(
    explained: tuple[Explanation, Bench, WhatIfGrid], open_page: Any
) -> None:
    """Numbers change, what stands where does not."""
    explanation, _, grid = explained
    page = open_page(explanation, grid)
    where = """() => [...document.querySelectorAll('[data-wi] form *:not(output), [data-wi] h3')]
        .filter((part) => part.offsetParent)
        .map((part) => part.getBoundingClientRect())
        .map((box) => [box.x, box.y + scrollY])"""
    before = page.evaluate(where)
    for place in (1, 5, 8):
        page.locator("#wi-workers").fill(str(place))
        assert page.evaluate(where) == before


@pytest.mark.browser
def test_several_ranks_share_one_page(
    explained: tuple[Explanation, Bench, WhatIfGrid], open_page: Any
) -> None:
    explanation, _, grid = explained
    one = explanation.ranks[0]
    both = replace(explanation, ranks=(one, replace(one, rank=1, path="/runs/1.json")))
    page = open_page(both, grid)
    assert page.locator("#whatif").count() == 1


@pytest.mark.browser
def test_earlier_predictions_of_the_same_changes_move_those_with_workers_too(
    explained: tuple[Explanation, Bench, WhatIfGrid], open_page: Any
) -> None:
    """Twice a step with workers and bf16 took 10% longer than promised."""
    explanation, bench, grid = explained
    settings = (parse("precision=bf16"), parse("workers=8"))
    told = bench.predict(settings)
    promise = make_promise(told)
    ms = 1.1 * told.predicted_ms
    delivery = Delivery(
        promise=promise.id, when_unix=0.0, a_ms=told.baseline_ms, b_ms=ms,
        change=ms / told.baseline_ms - 1, low=0.0, high=0.0, confidence=0.95, verdict="faster",
        named=False,
    )  # fmt: skip
    history = (Kept(promise=promise, delivery=delivery),) * 2
    expected = adjusted(told, history)
    assert expected.predicted_ms > 1.02 * told.predicted_ms
    page = open_page(explanation, changed(grid, crew=lay_out_crew(bench, history)))
    page.evaluate("window.stepscope.whatif.set(['precision=bf16', 'workers=8'])")
    found = page.evaluate("window.stepscope.whatif.state(window.stepscope.whatif.places)")
    assert found["step"] == pytest.approx(expected.predicted_ms, rel=1e-3)
    assert found["low"] == pytest.approx(expected.low_ms, rel=1e-3)
    assert found["high"] == pytest.approx(expected.high_ms, rel=1e-3)
    assert found["factor"] == pytest.approx(expected.throughput_factor, rel=1e-3)
