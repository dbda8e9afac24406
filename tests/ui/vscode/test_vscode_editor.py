"""The extension in a real editor in Chromium; needs code-server and the built package."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from code_server import EXTENSION, Editor, code_server, editor, served, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.browser]

MODEL = """from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(256, 2048)
        self.narrow = nn.Linear(2048, 10)

    def forward(self, x):
        x = self.wide(x).relu()
        return self.narrow(x)
"""
SCRIPT = """import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from net import Net

BATCH = 32
data = TensorDataset(torch.randn(4096, 256), torch.randint(0, 10, (4096,)))
loader = DataLoader(data, batch_size=BATCH, shuffle=True)
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "net.py").write_text(MODEL)
    (folder / "train.py").write_text(SCRIPT)
    return folder


def opened_script(window: Editor) -> None:
    window.open("train.py")
    window.open_panel()
    window.wait_for_panel("train.py")


def drag(window: Editor, share: float, *, release: bool) -> None:
    """Take the throughput bar to a share of its length."""
    track = window.panel().locator(".samplesPerSecond .track")
    track.scroll_into_view_if_needed()
    box = track.bounding_box()
    middle = box["y"] + box["height"] / 2
    window.page.mouse.move(box["x"] + box["width"] / 2, middle)
    window.page.mouse.down()
    window.page.mouse.move(box["x"] + share * box["width"], middle, steps=8)
    if release:
        window.page.mouse.up()


def batch_in(text: str) -> int:
    found = re.search(r"BATCH = (\d+)", text)
    assert found, text
    return int(found[1])


def no_outside_request(window: Editor, address: str) -> bool:
    own = (address.partition("?")[0], "data:", "blob:")
    outside = [url for url in window.requests if not url.startswith(own)]
    return all("vscode-resource" in url for url in outside)  # answered by the editor's own worker


def test_dragging_a_bar_changes_the_number_in_the_code_and_undo_takes_it_back(
    workspace: Path, tmp_path: Path
) -> None:
    code_server()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec node "{EXTENSION}/out/test/fakeServer.mjs"\n')
    python.chmod(0o755)
    with served(workspace, tmp_path / "data", python) as address, editor(address) as window:
        opened_script(window)
        window.wait_for_panel("32 on line 7")
        drag(window, 0.85, release=False)
        during = window.wait_for_panel("predicted. Release")
        wanted = int(re.findall(r"32 → (\d+) on line 7", during)[0])
        assert wanted > 32
        assert batch_in(window.code()) == 32
        window.page.mouse.up()
        wait_for("the new number", lambda: batch_in(window.code()) == wanted)
        window.wait_for_panel(f"{wanted} on line 7")
        window.page.locator(".editor-instance .view-lines").first.click()
        window.page.keyboard.press("Control+Z")
        wait_for("the old number", lambda: batch_in(window.code()) == 32)
        window.wait_for_panel("32 on line 7")
        slider = window.panel().locator(".peakBytes .track")
        slider.focus()
        slider.press("PageUp")
        slider.press("Enter")
        wait_for("the number by keys", lambda: batch_in(window.code()) == 64)
        assert no_outside_request(window, address)


def test_a_real_script_is_profiled_and_its_costs_stand_beside_the_lines(
    workspace: Path, tmp_path: Path
) -> None:
    code_server()
    pytest.importorskip("stepscope.ui.lsp", reason="no language server in this version")
    pytest.importorskip("pygls", reason="pygls is not installed")
    python = Path(sys.executable)
    with served(workspace, tmp_path / "data", python) as address, editor(address) as window:
        opened_script(window)
        window.wait_for_panel("not measured yet")
        window.panel().get_by_role("button", name="Profile").click()
        window.wait_for_panel("a step · measured")
        wait_for("hints", lambda: re.search(r"optimizer\.step\(\).*\d ms", window.code()))
        assert "a step" in window.status()
        wide = window.panel().locator(".block.jumps", has_text="forward").first
        wide.click()
        wait_for("the model's file", lambda: "class Net" in window.code())
        assert "train.py" in window.panel_text().splitlines()[0]
        window.panel().get_by_role("button", name="Report").click()
        wait_for(
            "the report",
            lambda: [one for one in window.page.frames if one.query_selector("#help-title")],
        )
        assert no_outside_request(window, address)


def language_servers(workspace: Path) -> list[int]:
    """Processes of this workspace's language server."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"lsp" in words and (process / "cwd").readlink() == workspace:
                found.append(int(process.name))
    return found


def test_a_server_that_dies_is_started_again(workspace: Path, tmp_path: Path) -> None:
    code_server()
    pytest.importorskip("stepscope.ui.lsp", reason="no language server in this version")
    pytest.importorskip("pygls", reason="pygls is not installed")
    python = Path(sys.executable)
    with served(workspace, tmp_path / "data", python) as address, editor(address) as window:
        opened_script(window)
        window.wait_for_panel("not measured yet")
        (first,) = language_servers(workspace)
        os.kill(first, signal.SIGKILL)
        wait_for("a new server", lambda: {*language_servers(workspace)} - {first})
        window.wait_for_panel("not measured yet")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo 'python: No module named stepscope' >&2; exit 1", " -m pip install"),
        ("cat > /dev/null", " did not answer as a language server"),
    ],
)
def test_without_a_server_the_panel_says_what_to_do(
    workspace: Path, tmp_path: Path, body: str, words: str
) -> None:
    code_server()
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    with served(workspace, tmp_path / "data", python) as address, editor(address) as window:
        window.open("train.py")
        window.open_panel()
        window.wait_for_panel(f"{python}{words}")
