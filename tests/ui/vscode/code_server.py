"""A VS Code in the browser (code-server) with the extension's package installed, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

EXTENSION = Path(__file__).parents[3] / "editors/vscode"
PACKAGE = EXTENSION / "dist/stepscope.vsix"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
SETTINGS = {
    "workbench.startupEditor": "none",
    "workbench.colorTheme": "Default Light Modern",
    "workbench.secondarySideBar.defaultVisibility": "hidden",
    "chat.disableAIFeatures": True,
    "editor.minimap.enabled": False,
    "extensions.ignoreRecommendations": True,
    "telemetry.telemetryLevel": "off",
    "window.commandCenter": False,
}
LIMIT_S = 180


def code_server() -> list[str]:
    """The command that starts it: `CODE_SERVER`, as editors/vscode/DEVELOPING.md says."""
    command = os.environ.get("CODE_SERVER", "").split()
    if not command:
        pytest.skip("CODE_SERVER names no code-server (editors/vscode/DEVELOPING.md)")
    if not PACKAGE.is_file():
        pytest.skip("no package of the extension: `make vscode` builds it")
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH")
    return command


def wait_for(what: str, seen: Callable[[], Any]) -> Any:
    """The first true answer; pages that are being drawn again count as not yet."""
    from playwright.sync_api import Error

    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        with contextlib.suppress(Error):
            if answer := seen():
                return answer
        time.sleep(0.2)
    raise AssertionError(f"not seen within {LIMIT_S} s: {what}")


@contextlib.contextmanager
def served(workspace: Path, data: Path, python: Path) -> Iterator[str]:
    """The address of a code-server whose extension runs this Python."""
    command = code_server()
    for name, settings in (("User", SETTINGS), ("Machine", {"stepscope.python": str(python)})):
        (data / name).mkdir(parents=True)
        (data / name / "settings.json").write_text(json.dumps(settings))
    own = ["--user-data-dir", str(data), "--extensions-dir", str(data / "extensions")]
    own += ["--config", str(data / "config.yaml")]
    subprocess.run([*command, *own, "--install-extension", str(PACKAGE)], check=True, timeout=120)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = ["--auth", "none", "--bind-addr", address, "--disable-telemetry"]
    options += ["--disable-update-check", "--disable-workspace-trust"]
    server = subprocess.Popen([*command, *own, *options, str(workspace)])
    try:
        wait_for("code-server", lambda: _answers(f"http://{address}/"))
        yield f"http://{address}/?folder={workspace}"
    finally:
        server.terminate()
        server.wait(timeout=30)


def _answers(address: str) -> bool:
    try:
        with urlopen(address, timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


class Editor:
    """One window of it, as a person would use it."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.requests: list[str] = []
        page.set_default_timeout(LIMIT_S * 1000)
        page.on("request", self._note)
        page.goto(address)
        self.icon = page.locator(".activitybar a[aria-label*='stepscope']").first
        self.icon.wait_for()

    def _note(self, request: Any) -> None:
        """What the extension's own pages ask for; the editor's own requests are not ours."""
        with contextlib.suppress(Exception):  # workers have no frame
            if "webview" in request.frame.url:
                self.requests.append(request.url)

    def open(self, name: str) -> None:
        tab = self.page.locator(f".tab[data-resource-name='{name}']")

        def opened() -> bool:
            if tab.count() == 0:
                self.page.keyboard.press("Control+P")
                self.page.locator(".quick-input-widget input").first.fill(name)
                self.page.wait_for_timeout(1000)
                self.page.keyboard.press("Enter")
                self.page.wait_for_timeout(1000)
            return bool(tab.count())

        wait_for(f"{name} in a tab", opened)

    def open_panel(self) -> None:
        self.icon.click()
        self.panel()

    def panel(self) -> Any:
        """The frame of the panel."""
        return wait_for("the panel", self._panel_frame)

    def _panel_frame(self) -> Any:
        parts = "body > header, body > .hint, body > .problem"
        frames = (frame for frame in self.page.frames if "webview" in frame.url)
        return next((frame for frame in frames if frame.query_selector(parts)), None)

    def panel_text(self) -> str:
        frame = self._panel_frame()
        return frame.inner_text("body") if frame else ""

    def wait_for_panel(self, words: str) -> str:
        return str(wait_for(words, lambda: words in (text := self.panel_text()) and text))

    def code(self) -> str:
        """The visible lines with what is shown beside them."""
        text = self.page.locator(".editor-instance .view-lines").first.inner_text()
        return str(text).replace("\xa0", " ")

    def status(self) -> str:
        return str(self.page.locator(".statusbar").inner_text()).replace("\xa0", " ")


@contextlib.contextmanager
def editor(address: str) -> Iterator[Editor]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        try:
            yield Editor(page, address)
        finally:
            if folder := os.environ.get("PICTURES"):
                page.screenshot(path=str(Path(folder) / f"{time.time_ns()}.png"))
            browser.close()
