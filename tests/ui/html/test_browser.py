"""The report in a real browser: it draws, zooms, searches and sorts, silently and offline."""

from __future__ import annotations

import dataclasses
import re
import statistics

import pytest
from msgspec.structs import replace

from jobs import Fault, Plan, make_job, profile_of
from stepscope.explain.job.all_ranks import join_ranks
from stepscope.ui.html.picture import draw_rank
from stepscope.ui.html.report import write_report

pytestmark = pytest.mark.browser


@pytest.fixture
def visit(visit):
    """As everywhere, and the timeline was drawn."""

    def open_file(path, **options):
        page = visit(path, **options)
        assert state(page)["lastFrameMs"] > 0
        return page

    return open_file


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


def test_with_everything_in_view_the_wheel_scrolls_the_page(page):
    over_timeline(page)
    before, top = state(page)["view"], page.evaluate("scrollY")
    page.mouse.wheel(0, 300)
    page.wait_for_function("top => scrollY > top", arg=top)
    assert state(page)["view"] == before


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


@pytest.fixture
def ranks_page(visit, together, make_trace, tmp_path):
    """A page of several ranks; the last one is slow unless the plan says otherwise."""

    def open_(ranks, **plan):
        plan = {"fault": Fault(cause="compute", size=1.4, place=ranks - 1), **plan}
        made = make_job(Plan(ranks=ranks, steps=6, rounds=20, offset_ns=5e6, **plan))
        said = together(join_ranks(made.parts, [profile_of(made.plan)]))
        picture = replace_path(draw_rank(make_trace(), said.ranks[0]), said.ranks[0].path)
        write_report(said, [picture], tmp_path / "ranks.html")
        return visit(tmp_path / "ranks.html")

    return open_


def replace_path(picture, path):
    return dataclasses.replace(picture, path=path)


def test_the_heat_map_shows_each_measure_and_marks_the_slow_rank(ranks_page):
    page = ranks_page(4)
    assert "Rank 3 holds the others back" in page.locator(".job-verdict").inner_text()
    assert state(page)["metric"] == "own"
    page.get_by_role("button", name="Data loading").click()
    assert state(page)["metric"] == "input"
    assert page.locator(".hm-low").inner_text() == "0 ns"
    assert "loader is too slow" in page.locator(".hm-about").inner_text()
    assert state(page)["order"] == [0, 1, 2, 3]
    page.get_by_role("button", name="Without comm").click()
    page.locator(".hm-order").select_option("value")
    assert state(page)["order"][0] == 3


def test_a_cell_of_the_heat_map_tells_its_exact_times_and_leads_to_the_rank(ranks_page):
    page = ranks_page(4)
    canvas = page.locator(".hm-canvas")
    canvas.scroll_into_view_if_needed()
    canvas.hover(position={"x": 138 + 40, "y": 24 + 24 * 3 + 12})
    tip = page.locator(".hm .tip").inner_text()
    assert tip.startswith("Rank 3 · node0 · step 10")
    assert re.search(r"Without comm: 1\d\d\.\d{3} ms", tip)
    assert "slow compute" in tip
    canvas.click(position={"x": 60, "y": 24 + 24 * 2 + 12})
    wait_for(page, "rank", 2)
    assert page.locator("#rank-picker").input_value() == "2"


def test_ranks_lie_under_their_hosts(ranks_page):
    page = ranks_page(16)
    assert page.locator(".hm-order").input_value() == "host"
    assert state(page)["order"] == list(range(16))
    canvas = page.locator(".hm-canvas")
    canvas.scroll_into_view_if_needed()
    canvas.hover(position={"x": 300, "y": 24 + 24 * 9 + 12})
    assert page.locator(".hm .tip").inner_text().startswith("Rank 9 · node1 · step")


def test_hosts_stand_for_a_thousand_ranks_until_one_is_opened(ranks_page):
    page = ranks_page(1024)
    order = state(page)["order"]
    assert page.locator(".hm-order").input_value() == "slowest-host"
    assert order[0] == "node127"
    canvas = page.locator(".hm-canvas")
    canvas.scroll_into_view_if_needed()
    canvas.hover(position={"x": 40, "y": 24 + 7})
    tip = page.locator(".hm .tip").inner_text()
    assert tip.startswith("node127 · ranks 1016-1023")
    assert "largest of its ranks" in tip
    canvas.click(position={"x": 40, "y": 24 + 7})
    assert state(page)["order"][:10] == ["node127", *range(1016, 1024), order[1]]
    canvas.click(position={"x": 40, "y": 24 + 7})
    assert state(page)["order"][:2] == order[:2]


def test_a_thousand_ranks_scroll_and_the_strip_leads_to_any_of_them(ranks_page):
    page = ranks_page(1024)
    page.locator(".hm-order").select_option("value")
    assert state(page)["order"][0] == 1023
    assert page.locator(".hm-scroll").bounding_box()["height"] < 500
    strip = page.locator(".hm-strip")
    assert strip.is_visible()
    page.locator(".hm-order").select_option("rank")
    strip.click(position={"x": strip.bounding_box()["width"] * 0.6, "y": 20})
    assert page.evaluate("document.querySelector('.hm-scroll').scrollTop") > 5000
    assert page.locator("#rank-picker option").count() == 64
    assert (
        "64 of 1,024 ranks are shown in detail"
        in page.locator("#timeline .note").first.inner_text()
    )


def test_lanes_begin_at_the_critical_path_and_zoom_like_the_timeline(ranks_page):
    page = ranks_page(4)
    first, whole = state(page)["lanesView"], state(page)["lanesSpan"]
    assert first[1] - first[0] < 0.5 * whole
    assert page.locator(".rl-label").all_inner_texts()[0].startswith("Critical path")
    assert "slow compute" in page.locator(".rl-label.is-accused").inner_text()
    assert "±" in page.locator(".rl-label").nth(2).inner_text()
    page.locator(".rl [data-act=reset]").click()
    begin = state(page)["lanesView"]
    assert begin[1] - begin[0] > whole
    canvas = page.locator(".rl-canvas")
    canvas.scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    canvas.hover(position={"x": 300, "y": 100})
    page.mouse.wheel(0, -400)
    zoomed = state(page)["lanesView"]
    assert zoomed[1] - zoomed[0] < 0.8 * (begin[1] - begin[0])
    page.locator(".rl-scroll").focus()
    timeline = state(page)["view"]
    page.keyboard.press("0")
    assert state(page)["lanesView"] == pytest.approx(begin)
    assert state(page)["view"] == timeline


def test_the_last_collective_says_who_was_waited_for(ranks_page):
    page = ranks_page(4)
    tips = page.evaluate(
        """() => {
          const lanes = stepscope.rankLanes;
          return Array.from({ length: lanes.scene.count }, (_, i) => lanes.aboutCall(i).join("; "));
        }"""
    )
    assert any("for rank 3" in tip and "±" in tip for tip in tips)
    assert any("the last of 4 drawn ranks to arrive" in tip for tip in tips)


def test_tables_about_all_ranks_have_their_own_tabs(ranks_page):
    page = ranks_page(4)
    assert state(page)["jobTable"] == "job-collectives"
    box = page.locator("#job-table-panel")
    assert "±" in box.inner_text()
    page.locator("#ranks").get_by_role("tab", name="Stragglers").click()
    assert "slow compute" in box.inner_text()
    page.locator("#ranks").get_by_role("tab", name="Clocks").click()
    assert "ppm" in box.inner_text()
    assert state(page)["table"] == "kernels"


def test_clocks_that_cannot_be_aligned_leave_a_sentence_not_a_hole(ranks_page):
    page = ranks_page(4, jump=(1, 5e8), fault=None)
    assert not page.locator(".rl").is_visible()
    said = page.locator("#ranks").inner_text()
    assert "Nothing to draw on one clock: times of the ranks contradict each other" in said
    assert "Who arrives last. Not known" in said
    assert page.locator(".hm-canvas").is_visible()


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
