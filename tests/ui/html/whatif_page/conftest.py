"""One trace's page for all tests here, and a browser to look at it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from whatif_pages import CHROMIUM, TRACE, laid_out

from stepscope.predict.whatif import Bench
from stepscope.records.explanation import Explanation
from stepscope.ui.html.report import write_report
from stepscope.ui.html.whatif_grid import WhatIfGrid


@pytest.fixture(scope="package")
def explained() -> tuple[Explanation, Bench, WhatIfGrid]:
    return laid_out(TRACE)


@pytest.fixture
def grid(explained: tuple[Explanation, Bench, WhatIfGrid]) -> WhatIfGrid:
    return explained[2]


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
