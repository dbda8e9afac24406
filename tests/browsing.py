"""A browser for all tests of a process, and pages of it that must stay silent and offline."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield opened
        opened.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    """Open a file; at the end there must have been no complaint, and nothing fetched beyond it."""
    seen: list[str] = []
    pages = []

    def open_file(path: Path, **options: Any) -> Any:
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 800}} | options)
        pages.append(page)
        page.on("pageerror", lambda error: seen.append(f"error: {error}"))
        page.on("console", lambda message: seen.append(f"console: {message.text}"))
        page.on("request", lambda request: seen.append(request.url))
        page.goto(path.as_uri())
        page.evaluate("window.stepscope.ready")
        return page

    yield open_file
    for page in pages:
        page.close()
    assert [line for line in seen if not line.startswith(("file://", "data:"))] == []
