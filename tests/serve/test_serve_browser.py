"""The pages in a real browser: list, comparison, what-if; silent, and nothing from outside."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live_runs import BEGAN_S
from served_folders import TOKEN, add_run, add_tune
from served_here import serve_here
from stepscope.ui.serve.app import make_app, open_port
from stepscope.ui.serve.served_runs import IndexKeeper

pytestmark = pytest.mark.browser
MARKUP = "<img src=x onerror=alert(1)>"
LIMIT_MS = 60_000


@pytest.fixture
def address(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import uvicorn

    add_run(root, "alpha", trace=True, started_unix=BEGAN_S)
    add_run(root, "beta", trace=True, step_ms=14.0, started_unix=BEGAN_S + 100)
    add_run(root, MARKUP)
    add_tune(root, "tuned")
    listener = open_port(0)
    served = serve_here(root)
    monkeypatch.setattr(IndexKeeper, "explain_next", lambda _: False)  # other tests have that
    app = make_app(served, TOKEN)
    config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    end = time.monotonic() + 60
    while not server.started and time.monotonic() < end:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(60)


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """At the end there must have been no complaint, and no request to anywhere else."""
    seen: list[str] = []
    opened = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
    opened.set_default_timeout(LIMIT_MS)
    opened.on("pageerror", lambda error: seen.append(f"error: {error}"))
    opened.on("console", lambda message: seen.append(f"console: {message.text}"))
    opened.on("request", lambda request: seen.append(request.url))
    opened.goto(f"{address}/?token={TOKEN}")
    opened.locator("#compare:disabled").wait_for()  # the script has started
    yield opened
    opened.close()
    assert [line for line in seen if not line.startswith((address, "data:"))] == []


def test_from_the_list_to_a_comparison_and_a_what_if(page: Any, address: str) -> None:
    assert page.url == f"{address}/"
    assert page.locator("tbody tr").count() == 4
    assert page.locator("tbody img").count() == 0
    page.keyboard.press("/")
    page.keyboard.type("train.py alpha")
    page.locator("tbody tr").nth(1).wait_for(state="detached")
    page.locator("tbody input").check()
    page.locator("#search").fill("")
    page.locator("tbody tr").nth(3).wait_for()
    assert page.locator("tbody input:checked").count() == 1
    assert page.locator("#compare").is_disabled()
    page.get_by_label("Compare beta").check()
    page.locator("#compare").click()
    report = page.frame_locator("#report")
    report.locator("h1").wait_for()
    assert "slower" in report.locator("h1").inner_text().lower()
    assert report.locator("#moved, #steps").first.is_visible()
    page.locator("[data-waiting]").wait_for(state="hidden")
    page.locator("dd a", has_text="beta").click()
    page.frame_locator("#report").locator("h1").wait_for()
    page.get_by_role("link", name="What if", exact=True).click()
    page.locator("#predictions p").first.wait_for()
    page.locator("select").first.select_option("scale")
    page.locator("input[name=value]").first.fill("mm:0.5")
    page.get_by_role("button", name="Predict").click()
    page.locator("#predictions .runs .words").first.wait_for()
    assert "change=scale" in page.url
    page.locator("#theme").click()
    assert page.locator("html").get_attribute("data-theme") == "dark"


@pytest.mark.slow
def test_a_report_in_a_frame_has_no_second_head_and_follows_the_theme(page: Any) -> None:
    page.locator("td.name a", has_text="alpha").click()
    page.locator("[data-waiting]").wait_for(state="hidden")
    frame = page.frame(name="stepscope-page")
    assert not frame.locator(".mark").is_visible()
    page.locator("#theme").click()
    frame.locator("html[data-theme='dark']").wait_for()


@pytest.mark.slow
def test_on_a_phone_a_row_is_a_card_with_nothing_cut_off(page: Any) -> None:
    page.set_viewport_size({"width": 420, "height": 800})
    width = page.evaluate(
        "Math.max(...[...document.querySelectorAll('.run-list td')]"
        ".map((cell) => cell.getBoundingClientRect().right))"
    )
    assert width <= 420


@pytest.mark.slow
def test_every_page_is_silent_and_can_be_reached_by_keyboard(page: Any, address: str) -> None:
    for path in ("/trends", "/record", "/?q=tuned"):
        page.goto(f"{address}{path}")
        page.locator("#content").wait_for()
    page.locator("td.name a").first.focus()
    page.keyboard.press("Enter")
    page.frame_locator("#report").locator("h1").wait_for()
    page.get_by_label("Tags").fill("first, second")
    with page.expect_navigation():  # back to the same address
        page.keyboard.press("Enter")
    page.goto(f"{address}/?q=tag:second")
    page.locator("a.tag", has_text="second").wait_for()
