"""Reports of inputs full of hostile names, in a real browser: nothing of a name runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hostile_names import PLACES
from stepscope.explain.engines import Here
from stepscope.ui.api import explain_paths

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.browser
FOREIGN = "img, iframe, object, embed, base, [onerror], a[href^=javascript]"


@pytest.mark.few(2)
@pytest.mark.parametrize("place", ["kernels", "functions", "frames", "run_folder", "path_names"])
def test_nothing_of_a_name_runs(place: str, tmp_path: Path, browser: Any) -> None:
    report = tmp_path / "report.html"
    path = PLACES[place](tmp_path)
    explain_paths([path], cache=False, html=report, quiet=True, engine=Here())
    page = browser.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.add_init_script("window.ran = []; window.alert = (what) => { window.ran.push(what); };")
    page.goto(report.as_uri())
    page.evaluate("window.stepscope.ready")
    for key in "wasd":
        page.keyboard.press(key)
    page.wait_for_timeout(200)
    assert wrong == []
    assert page.evaluate("window.ran") == []
    assert page.locator(FOREIGN).count() == 0
    assert "49" not in page.title()
    page.close()
