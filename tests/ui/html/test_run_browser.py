"""The Run section in a real browser: it draws, zooms, points at stalls, silently and offline."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from test_narrow import NARROW, faults

from made_runs import make_run
from stepscope.records.source_lines import Place, StackDifference, StackShare
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
    row.locator(".run-jump").click()
    assert length(page) == pytest.approx(120)
    title, cause, *_ = state(page)["runSelected"]
    assert title.startswith("Step ")
    assert cause.startswith("Evaluation")
    start, end = state(page)["runView"]
    number = int(row.locator(".run-jump").get_attribute("data-step"))
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


MAIN = Place(file="/home/u/train.py", line=10, function="main")
SAVE = Place(file="/home/u/train.py", line=41, function="log_images")
LOAD = Place(file="/home/u/data.py", line=14, function="Pictures.__getitem__")
CALM = StackShare(frames=(MAIN,), stalled=0.25, typical=1.0)
MORE, SAME = "196,70,31", "223,227,233"  # of the style sheet


def difference(cause, line):
    stack = StackShare(frames=(MAIN, line), stalled=0.75, typical=0.0)
    return StackDifference(
        cause=cause, stalled_steps=10, typical_steps=90, stalled_samples=100,
        typical_samples=225, stalled_ms=200.0, typical_ms=50.0, stacks=(stack, CALM),
    )  # fmt: skip


@pytest.fixture
def sampled(visit, explain, make_trace, report, folder):
    path = folder / "sampled.html"
    if not path.exists():
        run = make_run(2_000, 1)
        stacks = (difference("data", LOAD), difference("logging", SAVE))
        ranks = (replace(run.ranks[0], stacks=stacks),)
        write_report(
            replace(report(explain(make_trace())), run=replace(run, ranks=ranks)), [], path
        )
    return visit(path, color_scheme="light")


def reason(page):
    return page.locator(".run-why-words:visible").inner_text()


def choose(page, label):
    page.locator(".run-stalls tbody tr", has_text=label).locator("td").nth(1).click()


def test_the_costliest_stall_comes_with_its_stacks(sampled):
    assert state(sampled)["runCause"] == "data"
    assert state(sampled)["runStacks"] == 3
    assert reason(sampled).startswith("In stalled steps data.py:14 Pictures.__getitem__ runs for")
    seen = sampled.evaluate(COLOURS.replace("runChart", "stallFlames.graph"))
    assert {MORE, SAME} & set(seen) == {MORE}


def test_a_row_of_the_table_chooses_the_stacks(sampled):
    choose(sampled, "Logging")
    assert state(sampled)["runCause"] == "logging"
    assert reason(sampled).startswith("In stalled steps train.py:41 log_images runs for 150 ms")
    chosen = sampled.locator('.run-choose[aria-pressed="true"]')
    assert chosen.all_inner_texts() == ["Logging"]
    assert sampled.locator(".run-why-most").inner_text() == ", by up to 150 ms"


def test_the_keyboard_chooses_too(sampled):
    sampled.locator(".run-choose", has_text="Logging").focus()
    sampled.keyboard.press("Enter")
    assert state(sampled)["runCause"] == "logging"


def test_a_cause_without_samples_says_so(sampled):
    choose(sampled, "GC pauses")
    assert reason(sampled).startswith("Not sampled: fewer than 4 stacks")
    assert not sampled.locator(".run-why canvas").is_visible()
    choose(sampled, "Logging")
    assert sampled.locator(".run-why canvas").is_visible()


def test_arrows_walk_through_the_stacks(sampled):
    sampled.locator(".run-why canvas").focus()
    for _ in range(3):
        sampled.keyboard.press("ArrowDown")
    crumb = sampled.locator(".run-why .flame-crumb").inner_text()
    assert crumb == (
        "/home/u/data.py(14): Pictures.__getitem__ · 150 ms of a stalled step, 75% of it · "
        "150 ms more than in a typical step · 75 samples, self 150 ms"
    )
    sampled.keyboard.press("ArrowUp")
    assert "train.py(10): main" in sampled.locator(".run-why .flame-crumb").inner_text()


def test_the_pointer_names_a_frame_and_its_difference(sampled):
    canvas = sampled.locator(".run-why canvas")
    canvas.scroll_into_view_if_needed()
    canvas.hover(position={"x": 40, "y": 45})
    tip = sampled.locator(".run-why .tip").inner_text()
    assert "Pictures.__getitem__" in tip
    assert "150 ms more than in a typical step" in tip


def test_a_jump_to_the_longest_stall_leaves_the_stacks(sampled):
    sampled.locator(".run-stalls tbody tr", has_text="Logging").locator(".run-jump").click()
    assert state(sampled)["runSelected"] is not None
    assert state(sampled)["runCause"] == "data"
