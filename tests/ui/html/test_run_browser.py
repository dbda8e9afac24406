"""The Run section in a real browser: it draws, zooms, points at stalls, silently and offline."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from test_narrow import NARROW, faults

from made_runs import make_run
from stepscope.ui.html.report import write_report

pytestmark = pytest.mark.browser
COLOURS = """
() => {
  const { canvas } = stepscope.runChart;
  const copy = new OffscreenCanvas(canvas.width, canvas.height);
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
  const seen = new Set();
  for (let i = 0; i < data.length; i += 4) seen.add(`${data[i]},${data[i + 1]},${data[i + 2]}`);
  return [...seen];
}
"""
DATA, EVALUATION = "194,65,124", "122,92,201"  # of the style sheet


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture
def page(visit, explain, make_trace, report, folder):
    path = folder / "report.html"
    if not path.exists():
        run = make_run(20_000, 3, slow_rank=1)
        write_report(replace(report(explain(make_trace())), run=run), [], path)
    return visit(path, color_scheme="light")


def state(page):
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.evaluate("stepscope.state()")


def length(page):
    start, end = state(page)["runView"]
    return end - start


def over_chart(page, share=0.25):
    canvas = page.locator(".run-canvas")
    canvas.scroll_into_view_if_needed()
    page.wait_for_timeout(500)  # the page has just scrolled: until then the wheel scrolls on
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] / 2)
    return box


def test_stalls_have_the_colours_of_their_causes(page):
    colours = page.evaluate(COLOURS)
    assert {DATA, EVALUATION} <= set(colours)
    assert state(page)["runShown"] == ["Rank 0", "Rank 1", "Rank 2"]
    assert page.locator(".run-slowest").inner_text() == "rank 1, the slowest"


def test_the_wheel_zooms_and_a_double_click_shows_everything(page):
    over_chart(page)
    whole = length(page)
    page.mouse.wheel(0, -500)
    assert length(page) < 0.8 * whole
    box = over_chart(page)
    page.mouse.dblclick(box["x"] + box["width"] / 2, box["y"] + 20)
    assert length(page) == pytest.approx(whole)


def test_dragging_pans(page):
    box = over_chart(page)
    page.evaluate("stepscope.runChart.show(5000, 9000)")
    before = state(page)["runView"]
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 4 + 150, box["y"] + 40, steps=4)
    page.mouse.up()
    after = state(page)["runView"]
    assert after[0] < before[0]
    assert after[1] - after[0] == pytest.approx(before[1] - before[0])


def test_keys_zoom_and_pan_the_chart_and_not_the_timeline(page):
    page.locator(".run-scroll").focus()
    whole, timeline = length(page), state(page)["view"]
    for key in ("w", "w", "ArrowUp", "+"):
        page.keyboard.press(key)
    assert length(page) < 0.5 * whole
    before = state(page)["runView"][0]
    page.keyboard.press("ArrowRight")
    assert state(page)["runView"][0] > before
    page.keyboard.press("0")
    assert length(page) == pytest.approx(whole)
    assert state(page)["view"] == timeline


def test_a_click_in_the_table_goes_to_the_longest_stall(page):
    row = page.locator(".run-stalls tbody tr", has_text="Evaluation")
    row.locator("button").click()
    assert length(page) == pytest.approx(120)
    title, cause, *_ = state(page)["runSelected"]
    assert title.startswith("Step ")
    assert cause.startswith("Evaluation")
    start, end = state(page)["runView"]
    number = int(row.locator("button").get_attribute("data-step"))
    assert start < number < end


def test_the_pointer_names_the_step_under_it(page):
    box = over_chart(page, 0.5)
    tip = page.locator(".run-chart .tip")
    assert "Steps " in tip.inner_text()
    assert "of 3 ranks" in tip.inner_text()
    page.evaluate("stepscope.runChart.show(1000, 1100)")
    at = page.evaluate(
        "(() => { const c = stepscope.runChart, s = c.shown[0], i = s.at(1039);"
        " return [(s.x[i] - c.view.t0) / (c.view.t1 - c.view.t0) * c.width,"
        " c.levelScale().y(s.step[i])] })()"
    )
    page.mouse.move(box["x"] + at[0] + 1, box["y"] + at[1] + 1)
    words = tip.inner_text()
    assert words.startswith("Step 1,039, rank ")
    assert "Data stalls" in words
    assert "after the first step" in words


def test_one_rank_can_be_chosen(page):
    before = page.evaluate(COLOURS)
    page.locator(".run-rank").select_option("1")
    assert state(page)["runShown"] == ["Rank 1"]
    assert page.locator(".run-slowest").is_hidden()
    assert page.evaluate(COLOURS) != before


def test_scale_axis_and_causes_can_be_switched(page):
    page.get_by_role("button", name="Typical").click()
    assert state(page)["runScale"] == "typical"
    page.get_by_role("button", name="Log", exact=True).click()
    steps = length(page)
    page.get_by_role("button", name="Time", exact=True).click()
    assert length(page) != steps
    page.locator("button[data-shape=evaluation]").click()
    state(page)
    assert EVALUATION not in page.evaluate(COLOURS)


def test_the_whole_run_below_moves_the_view(page):
    page.evaluate("stepscope.runChart.show(0, 2000)")
    overview = page.locator(".run-overview")
    overview.click(position={"x": overview.bounding_box()["width"] * 0.75, "y": 10})
    start, end = state(page)["runView"]
    assert start < 15_000 < end


def test_dark_colours_are_drawn_when_the_theme_changes(page):
    page.locator("#theme").click()
    state(page)
    assert DATA not in page.evaluate(COLOURS)


def test_a_telephone_shows_no_text_over_text(visit, explain, make_trace, report, tmp_path):
    run = make_run(2_000, 2)
    other = replace(run.ranks[1].account, goodput=0.2, parts=run.ranks[1].account.parts[:3])
    run = replace(run, ranks=(run.ranks[0], replace(run.ranks[1], account=other)))
    path = tmp_path / "report.html"
    write_report(replace(report(explain(make_trace())), run=run), [], path)
    assert faults(visit(path, **NARROW)) == []


@pytest.mark.parametrize(("steps", "ranks"), [(1, 1), (3, 2), (60, 64)])
def test_small_and_wide_runs_are_drawn(visit, explain, make_trace, report, tmp_path, steps, ranks):
    path = tmp_path / "report.html"
    run = make_run(steps, ranks, windows=())
    write_report(replace(report(explain(make_trace())), run=run), [], path)
    page = visit(path)
    assert state(page)["runFrameMs"] > 0
    for scale in ("log", "typical", "linear"):
        page.evaluate(f"stepscope.runChart.useScale('{scale}')")
        assert state(page)["runScale"] == scale
