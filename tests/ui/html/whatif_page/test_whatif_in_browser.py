"""The page "What if" in a browser: its controls, and what workers and links make of the numbers."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from whatif_pages import (
    CPU,
    GOLDEN,
    TRACE,
    cell,
    combinations,
    laid_out,
    lay_out_slowest,
    pick,
    places_with,
    shown,
    words,
)

from stepscope.predict.engine import Bench
from stepscope.predict.whatifs import parse_setting
from stepscope.records.explanation import Explanation
from stepscope.records.prediction import Delivery, TrackedPromise
from stepscope.text.figures import percent, significant, size
from stepscope.ui.html.whatif_grid import WhatIfGrid, lay_out
from stepscope.ui.topics.whatif import adjusted, try_each, usual
from stepscope.verify.track_record import make_promise

pytestmark = pytest.mark.browser


def test_each_control_moves_the_number_to_exactly_the_predicted_one(
    page: Any, grid: WhatIfGrid
) -> None:
    assert shown(page) == words(grid.before.baseline_ms)
    made: list[str] = []
    for setting in ("precision=bf16", "batch=x4", "cuda-graphs", "compile", "optimizer=fused"):
        pick(page, grid, setting)
        made.append(setting)
        expected = cell(grid, places_with(grid, *made))
        assert shown(page) == words(expected["step"])
        said = page.locator('[data-out="interval"]').inner_text()
        assert f"between {significant(expected['low'])} and {significant(expected['high'])}" in said
    command = page.locator('[data-out="command"]').inner_text()
    assert all(f"--set {each}" in command for each in made)
    page.get_by_role("button", name="Back to now").click()
    assert shown(page) == words(grid.before.baseline_ms)
    assert page.locator('[data-axis="compile"]').is_checked() is False


def test_throughput_memory_and_who_decides_follow(page: Any, grid: WhatIfGrid) -> None:
    pick(page, grid, "batch=x2")
    expected = cell(grid, places_with(grid, "batch=x2"))
    assert grid.samples is not None
    assert expected["factor"] is not None
    pace = grid.samples * 1000 / grid.before.baseline_ms * expected["factor"]
    assert page.locator('[data-out="pace"]').inner_text() == significant(pace)
    assert page.locator('[data-out="peak"]').inner_text() == "5.94 GB"
    assert page.locator('[data-out="decides"]').inner_text() == "the GPU"
    chosen = page.locator('[data-out="batches"] .dot.is-chosen title').text_content()
    assert chosen.startswith(f"batch 256: {words(expected['step'])}")
    pick(page, grid, "precision=bf16")
    assert page.locator('[data-out="peak"]').inner_text() == "not known"


def test_the_keyboard_reaches_every_control(page: Any, grid: WhatIfGrid) -> None:
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


def test_a_row_of_the_table_sets_the_controls(
    explained: tuple[Explanation, Bench, WhatIfGrid], open_page: Any
) -> None:
    explanation, _, grid = explained
    page = open_page(explanation, grid, color_scheme="dark")
    pick(page, grid, "compile")
    page.locator('[data-wi-set="precision=bf16"]').click()
    assert shown(page) == words(cell(grid, places_with(grid, "precision=bf16"))["step"])
    assert page.locator("[data-wi]").get_attribute("data-tone") == "good"


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


def test_a_cpu_traces_page_works_too(open_page: Any) -> None:
    explanation, _, grid = laid_out(CPU)
    page = open_page(explanation, grid)
    pick(page, grid, "optimizer=fused")
    assert shown(page) == words(cell(grid, places_with(grid, "optimizer=fused"))["step"])
    assert page.locator('[data-out="decides"]').inner_text() == "the CPU"


# Workers and links, in a browser

SCALED = (
    ("workers=8",),
    ("workers=2", "bandwidth=0.25"),
    ("workers=64", "bucket-mb=1"),
    ("precision=bf16", "workers=64"),
    ("batch=x2", "workers=16"),
    ("cuda-graphs", "workers=256"),
    ("workers=8:strong",),
)


def number(text: str) -> float:
    found = re.search(r"[\d,]+(\.\d+)?", text)
    assert found, text
    return float(found[0].replace(",", ""))


def test_workers_links_and_buckets_move_all_numbers_beside_the_other_controls(
    page: Any, bench: Bench, grid: WhatIfGrid
) -> None:
    for settings in SCALED:
        told = bench.predict([parse_setting(each) for each in settings])
        assert not told.refused
        page.evaluate("wanted => window.stepscope.whatif.set(wanted)", list(settings))
        assert shown(page) == words(told.predicted_ms)
        said = page.locator('[data-out="interval"]').inner_text()
        assert f"between {significant(told.low_ms)} and {significant(told.high_ms)}" in said
        assert grid.samples is not None
        pace = grid.samples * 1000 / grid.before.baseline_ms * told.throughput_factor
        assert page.locator('[data-out="pace"]').inner_text() == significant(pace)
        bars = page.locator('[data-out="bars"] svg').get_attribute("aria-label")
        host, device = (number(bars.partition(f"{who} then ")[2]) for who in ("CPU", "GPU"))
        assert host == pytest.approx(told.host_ms, rel=0.005)
        assert device == pytest.approx(told.device_ms, rel=0.005)
        command = page.locator('[data-out="command"]').inner_text()
        assert all(f"--set {each}" in command for each in settings)
        memory = page.locator('[data-out="peak"]').inner_text()
        expected = "not known" if told.peak_bytes is None else size(told.peak_bytes)
        assert memory == expected


def test_stalls_are_part_of_every_number(open_page: Any, tmp_path: Path) -> None:
    """Every fourth step of the recorded run waits 70 ms more for data, and one in 25 once more."""
    run = tmp_path / "run"
    shutil.copytree(TRACE.parent.parent, run)
    steps = run / "rank-00000/steps.jsonl"
    rows = [json.loads(line) for line in steps.read_text().splitlines()]
    for row in rows:
        longer = 70_000_000 * ((row["step"] % 4 == 0) + (row["step"] % 25 == 3))
        for name in ("wall_ns", "data_ns", "device_ns"):
            if row.get(name) is not None:
                row[name] += longer
    steps.write_text("".join(json.dumps(row) + "\n" for row in rows))
    explanation, bench, grid = laid_out(run / "rank-00000" / TRACE.name)
    page = open_page(explanation, grid)
    now = bench.predict([])
    assert now.stall_ms > 15
    assert shown(page) == words(now.baseline_ms)
    assert page.locator('[data-out="decides"]').inner_text() == "the GPU"
    page.locator('[data-axis="workers"]').fill("3")  # 1, 2, 4, 8
    expected = bench.predict([parse_setting("workers=8")])
    assert shown(page) == words(expected.predicted_ms)
    page.get_by_role("button", name="Back to now").click()
    pick(page, grid, "no-stalls")
    expected = bench.predict([parse_setting("no-stalls")])
    assert shown(page) == words(expected.predicted_ms)
    assert expected.stall_ms == 0.0


def test_one_worker_exchanges_nothing_and_its_links_cannot_be_moved(
    page: Any, grid: WhatIfGrid
) -> None:
    link = page.locator("#wi-bandwidth")
    assert link.is_disabled()
    assert page.locator('[data-out="exposed"]').inner_text() == "nothing"
    page.locator("#wi-workers").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.locator('[data-output="workers"]').inner_text() == "8"
    assert link.is_enabled()
    page.keyboard.press("Tab")  # whose batch
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


@pytest.mark.parametrize(("name", "how", "most"), [("weak", "", 256), ("strong", ":strong", 64)])
def test_both_scaling_charts_are_relative_to_one_worker(
    page: Any, bench: Bench, name: str, how: str, most: int
) -> None:
    """The batch of 128 cannot be shared by more."""
    page.evaluate("wanted => window.stepscope.whatif.set(wanted)", [f"workers=4{how}"])
    dots = page.locator(f'[data-out="{name}"] .dot title').all_text_contents()
    assert dots[0].endswith("efficiency 100%")
    told = bench.predict([parse_setting(f"workers={most}{how}")])
    assert dots[-1].startswith(f"{most} workers")
    assert f"a step of {words(told.predicted_ms)}" in dots[-1]
    efficiency = told.throughput_factor / most
    assert dots[-1].endswith(f"efficiency {percent(efficiency)}")
    chosen = page.locator(".wi-charts .dot.is-chosen title").all_text_contents()
    (point,) = [each for each in chosen if "workers" in each]  # the other chart has none
    assert point.startswith("4 workers")


def test_efficiency_is_never_that_of_more_than_one_worker(open_page: Any) -> None:
    """Also where workers are taken away, and the present ones wait for a slow rank."""
    explanation, grid = lay_out_slowest(GOLDEN / "cpu-ddp-slow-rank")
    page = open_page(explanation, grid)
    dots = page.locator('[data-out="weak"] .dot title').all_text_contents()
    shares = [number(dot.partition("efficiency ")[2]) for dot in dots]
    assert shares[0] == 100
    assert max(shares) == 100
    assert shares == sorted(shares, reverse=True)


def test_more_workers_than_samples_are_not_known_and_the_curves_stay(page: Any) -> None:
    page.locator("#wi-workers").fill("6")
    page.locator('[data-axis="share"]').nth(1).check()
    assert shown(page) == "Not known"
    assert "too small for 256 workers" in page.locator('[data-out="interval"]').inner_text()
    assert page.locator('[data-out="strong"] .dot').count() == 6
    page.locator("#wi-workers").fill("5")
    assert shown(page) != "Not known"
    assert "--set workers=64:strong" in page.locator('[data-out="command"]').inner_text()


def test_moving_a_control_moves_no_other(page: Any) -> None:
    """Numbers change, what stands where in the section does not."""
    where = """() => {
        const top = document.querySelector('[data-wi]').getBoundingClientRect().y;
        return [...document.querySelectorAll('[data-wi] form *:not(output), [data-wi] h3')]
            .filter((part) => part.offsetParent)
            .map((part) => part.getBoundingClientRect())
            .map((box) => [box.x, box.y - top]);
    }"""
    before = page.evaluate(where)
    for place in (1, 4, 6):
        page.locator("#wi-workers").fill(str(place))
        assert page.evaluate(where) == before


def test_several_ranks_share_one_page(
    explained: tuple[Explanation, Bench, WhatIfGrid], open_page: Any
) -> None:
    explanation, _, grid = explained
    one = explanation.ranks[0]
    both = replace(explanation, ranks=(one, replace(one, rank=1, path="/runs/1.json")))
    page = open_page(both, grid)
    assert page.locator("#whatif").count() == 1


def test_earlier_predictions_of_the_same_changes_move_those_with_workers_too(
    explained: tuple[Explanation, Bench, WhatIfGrid], open_page: Any
) -> None:
    """Twice a step with workers and bf16 took 10% longer than promised."""
    explanation, bench, _ = explained
    settings = (parse_setting("precision=bf16"), parse_setting("workers=8"))
    told = bench.predict(settings)
    promise = make_promise(told)
    ms = 1.1 * told.predicted_ms
    delivery = Delivery(
        promise=promise.id, when_unix=0.0, a_ms=told.baseline_ms, b_ms=ms,
        change=ms / told.baseline_ms - 1, low=0.0, high=0.0, confidence=0.95, verdict="faster",
        named=False,
    )  # fmt: skip
    history = (TrackedPromise(promise=promise, delivery=delivery),) * 2
    expected = adjusted(told, history)
    assert expected.predicted_ms > 1.02 * told.predicted_ms
    rank = explanation.ranks[0]
    page = open_page(explanation, lay_out(bench, try_each(bench, usual(bench)), history, rank))
    page.evaluate("window.stepscope.whatif.set(['precision=bf16', 'workers=8'])")
    found = page.evaluate("window.stepscope.whatif.state(window.stepscope.whatif.places)")
    assert found["step"] == pytest.approx(expected.predicted_ms, rel=1e-9)
    assert found["low"] == pytest.approx(expected.low_ms, rel=1e-9)
    assert found["high"] == pytest.approx(expected.high_ms, rel=1e-9)
    assert found["factor"] == pytest.approx(expected.throughput_factor, rel=1e-9)
