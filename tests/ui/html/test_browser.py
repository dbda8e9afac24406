"""The report in a real browser: it draws, zooms, searches and sorts, silently and offline."""

from __future__ import annotations

import shutil
import statistics

import pytest
from msgspec.structs import replace

from stepscope.ui.html.picture import draw_rank
from stepscope.ui.html.report import write_report

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH"),
]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """Open a file; at the end there must have been no error and no request beyond it."""
    seen: list[str] = []
    pages = []

    def visit(path, **options):
        page = browser.new_page(viewport={"width": 1280, "height": 800}, **options)
        pages.append(page)
        page.on("pageerror", lambda error: seen.append(f"error: {error}"))
        page.on("console", lambda message: seen.append(f"console: {message.text}"))
        page.on("request", lambda request: seen.append(request.url))
        page.goto(path.as_uri())
        page.evaluate("window.stepscope.ready")
        assert state(page)["lastFrameMs"] > 0
        return page

    yield visit
    for page in pages:
        page.close()
    assert [line for line in seen if not line.startswith(("file://", "data:"))] == []


@pytest.fixture
def page(visit, make_trace, explain, report, tmp_path):
    return visit(written(make_trace(steps=3, layers=12), explain, report, tmp_path))


def written(trace, explain, report, folder):
    rank = explain(trace)
    path = folder / "report.html"
    write_report(report(rank), [draw_rank(trace, rank)], path)
    return path


def state(page):
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.evaluate("stepscope.state()")


def wait_for(page, key, value):
    for _ in range(100):
        if state(page)[key] == value:
            return
        page.wait_for_timeout(50)
    pytest.fail(f"{key} never became {value}")


def shown(page):
    start, end = state(page)["view"]
    return end - start


def over_timeline(page):
    canvas = page.locator(".tl-canvas")
    canvas.scroll_into_view_if_needed()
    page.wait_for_timeout(500)  # the page has just scrolled: until then the wheel scrolls on
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 20)
    return box


def test_the_wheel_zooms_where_the_pointer_is(page):
    over_timeline(page)
    before = state(page)["view"]
    page.mouse.wheel(0, -400)
    after = state(page)["view"]
    assert after[1] - after[0] < 0.8 * (before[1] - before[0])
    quarter = [start + (end - start) / 4 for start, end in (before, after)]
    assert abs(quarter[0] - quarter[1]) < 0.02 * (before[1] - before[0])


def test_keys_zoom_pan_and_reset(page):
    whole = shown(page)
    page.keyboard.press("w")
    page.keyboard.press("w")
    assert shown(page) < 0.7 * whole
    before = state(page)["view"]
    page.keyboard.press("d")
    assert state(page)["view"][0] > before[0]
    page.keyboard.press("a")
    assert state(page)["view"][0] == pytest.approx(before[0])
    page.keyboard.press("s")
    page.keyboard.press("0")
    assert shown(page) == pytest.approx(whole)


def test_dragging_pans(page):
    box = over_timeline(page)
    page.keyboard.press("w")
    page.keyboard.press("w")
    before = state(page)["view"]
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 4 + 150, box["y"] + 24, steps=4)
    page.mouse.up()
    after = state(page)["view"]
    assert after[0] < before[0]
    assert after[1] - after[0] == pytest.approx(before[1] - before[0])


def test_a_click_on_a_step_zooms_to_it(page):
    ruler = page.locator(".tl-ruler")
    ruler.click(position={"x": ruler.bounding_box()["width"] / 2, "y": 6})
    assert shown(page) < 0.4 * page.evaluate("stepscope.state().span")
    assert page.locator(".tl-canvas").is_visible()


def test_dragging_over_the_overview_chooses_what_is_shown(page):
    whole = shown(page)
    page.locator(".tl-overview").scroll_into_view_if_needed()
    box = page.locator(".tl-overview").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 20, steps=3)
    page.mouse.up()
    assert shown(page) == pytest.approx(whole * 0.1, rel=0.1)


def test_search_counts_steps_through_and_clears(page):
    page.keyboard.press("/")
    page.keyboard.type("gemm_1")
    assert state(page)["matches"] == 9
    assert page.locator(".tl-count").inner_text() == "9 · 270 µs device"
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    assert state(page)["match"] == 1
    assert state(page)["selected"] == "void at::native::gemm_1<float, 128>()"
    assert "Launched by cudaLaunchKernel" in page.locator(".tl-detail").inner_text()
    page.keyboard.press("Escape")
    assert state(page)["matches"] == 0
    assert state(page)["selected"] is None


def test_arrows_step_through_matches_when_the_timeline_has_the_focus(page):
    page.evaluate("stepscope.find('aten::addmm')")
    page.locator(".tl-scroll").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert state(page)["match"] == 1


def test_fit_zooms_to_the_selection(page):
    page.evaluate("stepscope.find('aten::item')")
    page.locator("h2#timeline-title").click()
    page.keyboard.press("f")
    assert 200_000 < shown(page) < 700_000


def test_a_hovered_event_shows_its_name_and_time(page):
    page.evaluate("stepscope.find('AllReduce')")
    page.locator(".tl-scroll").focus()
    page.keyboard.press("f")
    box = over_timeline(page)
    lane = page.locator(".tl-label", has_text="Stream 20").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, lane["y"] + lane["height"] / 2)
    tip = page.locator(".tl .tip")
    assert "ncclDevKernel_AllReduce_Sum_f32_RING_LL" in tip.inner_text()
    assert "150 µs" in tip.inner_text()


def test_idle_is_the_first_lane(page):
    assert page.locator(".tl-label").first.inner_text().strip() == "Idle, by cause"


def test_lanes_fold_and_unfold(page):
    lane = page.locator("button.tl-label").first
    assert lane.get_attribute("aria-expanded") == "true"
    height = page.locator(".tl-space").bounding_box()["height"]
    lane.click()
    assert page.locator("button.tl-label").first.get_attribute("aria-expanded") == "false"
    assert page.locator(".tl-space").bounding_box()["height"] < height


def test_the_theme_follows_the_system_and_the_switch(page):
    assert state(page)["theme"] == "light"
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(back)
    page.locator("#theme").click()
    assert state(page)["theme"] == "dark"
    assert page.evaluate(back) != light
    page.emulate_media(color_scheme="dark")
    page.locator("#theme").click()
    assert state(page)["theme"] == "light"


def test_tables_sort_filter_and_lead_to_the_timeline(page):
    def first():
        return page.locator("#tables tbody tr").first.inner_text()

    assert "nccl" in first()
    page.get_by_role("button", name="Count").click()
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("Count")
    assert "gemm" in first()
    page.get_by_role("button", name="Count").click()
    assert "Memcpy" in first() or "nccl" in first()
    page.locator(".table-filter").fill("allreduce")
    assert page.locator("#tables tbody tr").count() == 1
    page.locator("#tables tbody button.link").click()
    assert state(page)["matches"] == 3


def test_tabs_change_the_table(page):
    page.get_by_role("tab", name="Sync calls").click()
    assert state(page)["table"] == "sync-calls"
    assert "/home/me/train.py:57" in page.locator("#tables table").inner_text()


def test_flame_graphs_zoom_and_reset(page):
    canvas = page.locator("#flame-device canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    canvas.click(position={"x": box["width"] / 4, "y": 18 * 2 + 8})
    crumb = page.locator("#flame-device .flame-crumb")
    assert "/home/me/train.py(42): forward" in crumb.inner_text()
    page.locator("#flame-device [data-flame-reset]").click()
    assert crumb.inner_text() == ""
    page.locator("#flame-device input").fill("nccl")
    assert "% of all" in page.locator("#flame-device .flame-count").inner_text()


def test_help_opens_and_closes(page):
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()


def test_ranks_can_be_picked(visit, make_trace, explain, report, tmp_path):
    traces = [
        replace(make_trace(rank=rank, layers=4 + 4 * rank), path=f"/runs/{rank}") for rank in (0, 1)
    ]
    ranks = [explain(trace) for trace in traces]
    pictures = [draw_rank(*pair) for pair in zip(traces, ranks, strict=True)]
    write_report(report(*ranks), pictures, tmp_path / "r.html")
    page = visit(tmp_path / "r.html")
    few = state(page)["events"]
    page.locator("#rank-picker").select_option("1")
    wait_for(page, "rank", 1)
    assert state(page)["events"] > few
    assert page.locator(".path:visible").inner_text().startswith("/runs/1")


def test_hostile_names_stay_text(visit, make_trace, explain, report, hostile, tmp_path):
    trace = make_trace()
    trace = replace(trace, strings=tuple(hostile + text for text in trace.strings))
    page = visit(written(trace, explain, report, tmp_path))
    page.evaluate("stepscope.find('onerror')")
    assert state(page)["matches"] > 0
    assert page.locator("img").count() == 0
    assert hostile in page.locator("#tables tbody tr").first.inner_text()


def test_an_empty_trace_opens(browser, empty_trace, explain, report, tmp_path):
    path = written(empty_trace, explain, report, tmp_path)
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(path.as_uri())
    page.evaluate("window.stepscope.ready")
    assert page.locator(".tl-none").is_visible()
    page.keyboard.press("w")
    page.close()
    assert errors == []


def test_two_hundred_thousand_events_redraw_smoothly(
    browser, make_trace, explain, report, tmp_path, record_testsuite_property
):
    trace = make_trace(steps=40, layers=810)
    path = written(trace, explain, report, tmp_path)
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(path.as_uri())
    page.evaluate("window.stepscope.ready")
    assert 190_000 < state(page)["events"] <= 200_000
    whole = shown(page)
    times = page.evaluate(
        """() => Array.from({ length: 31 }, (_, i) => {
          document.dispatchEvent(new KeyboardEvent("keydown", { key: i % 4 < 2 ? "w" : "s" }));
          return stepscope.redraw();
        })"""
    )
    assert shown(page) < whole
    page.close()
    median = statistics.median(times)
    record_testsuite_property("redraw_median_ms", median)
    record_testsuite_property("report_bytes", path.stat().st_size)
    assert median < 250
