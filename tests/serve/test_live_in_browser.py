"""A real Chromium follows a real training of two ranks through `stepscope serve`, to its end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live_runs import alive, make_rows, write_rank, write_run, write_steps
from stepscope.ui.serve.listed_runs import run_id

pytestmark = pytest.mark.slow
LIMIT_MS = 120_000
TRAIN = """
import sys, time, pathlib, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
ends, until = pathlib.Path(sys.argv[1]), time.time() + 300
for step in range(1_000_000):
    if dist.get_rank() == 1:
        time.sleep(0.01)
    loss = model(torch.randn(32, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        over = torch.tensor([ends.exists() or time.time() > until])
        dist.broadcast(over, 0)
        if over.item():
            break
dist.destroy_process_group()
"""


@contextlib.contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, text=True, start_new_session=True, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)


@contextlib.contextmanager
def training(folder: Path) -> Iterator[Path]:
    """The run folder; the training goes on until a file is there, and no longer than this."""
    (folder / "train.py").write_text(TRAIN)
    out, ends = folder / "runs" / "live", folder / "ends"
    command = [sys.executable, "-m", "stepscope", "run", "--quiet", "--out", str(out), "--"]
    command += [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    with (
        (folder / "job.txt").open("w") as output,
        started(
            [*command, str(folder / "train.py"), str(ends)], stdout=output, stderr=output
        ) as job,
    ):
        until = time.monotonic() + 120
        while not (out / "rank-00001" / "steps.jsonl").exists():
            assert job.poll() is None, (folder / "job.txt").read_text()
            assert time.monotonic() < until
            time.sleep(0.1)
        yield out
        ends.touch()
        job.wait(60)


@contextlib.contextmanager
def serving_runs(runs: Path, cache: Path, *, port: int = 0, token: str = "") -> Iterator[str]:
    """The address with the token."""
    command = [sys.executable, "-m", "stepscope", "serve", str(runs), "--port", str(port)]
    environment = {**os.environ, "STEPSCOPE_CACHE_DIR": str(cache)}
    environment |= {"STEPSCOPE_SERVE_TOKEN": token} if token else {}
    with started(command, stdout=subprocess.PIPE, env=environment) as server:
        assert server.stdout is not None
        address = re.search(r"http://\S+", server.stdout.readline())
        assert address is not None
        yield address[0]


class Watched:
    """A page whose complaints and requests are kept."""

    def __init__(self, chromium: Any, address: str) -> None:
        self.base, token = address.split("/?")
        self.page = chromium.new_page(viewport={"width": 1240, "height": 1100})
        self.said: list[str] = []
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("console", lambda message: self.said.append(message.text))
        self.asked: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(f"{self.base}/?{token}")
        self.page.wait_for_url(f"{self.base}/", timeout=LIMIT_MS)

    def open_run(self, folder: Path) -> None:
        """Its row may not be in the list yet."""
        until = time.monotonic() + LIMIT_MS / 1000
        while not self.page.query_selector("#live"):
            assert time.monotonic() < until
            self.page.goto(f"{self.base}/runs/{run_id(folder)}")
            time.sleep(0.2)
        self.said.clear()  # 404 until it is listed

    def outside(self) -> list[str]:
        return [url for url in self.asked if not url.startswith((self.base, "data:"))]

    def text(self, selector: str) -> str:
        return str(self.page.text_content(selector))


def test_two_ranks_are_followed_to_their_end(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with serving_runs(tmp_path / "runs", tmp_path) as address:
        with training(tmp_path) as run:
            watched = Watched(browser, address)
            watched.open_run(run)
            page = watched.page
            page.wait_for_selector(".live-button:not([disabled])", timeout=LIMIT_MS)
            before = watched.text(".live-ranks tbody td:nth-child(2)")
            page.wait_for_function(
                "before => document.querySelector('.live-ranks tbody td:nth-child(2)')"
                ".textContent !== before",
                arg=before,
                timeout=LIMIT_MS,
            )
            assert page.locator(".live-ranks tbody tr").count() == 2
            page.click(".live-button")
            page.wait_for_selector('.live-asked[data-state="recorded"]', timeout=LIMIT_MS)
            assert "2 ranks" in watched.text(".live-asked")
            page.wait_for_selector(".live-verdict:not(.is-waiting)", timeout=LIMIT_MS)
            assert watched.text(".live-sentence")
            if picture := os.environ.get("STEPSCOPE_PICTURE"):
                page.locator("#live").screenshot(path=picture)
        page.wait_for_selector("[data-over]", timeout=LIMIT_MS)
        page.wait_for_selector("#report", timeout=LIMIT_MS)  # the page was loaded again
        assert not page.query_selector("#live")
        page.wait_for_load_state(timeout=LIMIT_MS)
        assert watched.said == []
        assert watched.outside() == []
        page.close()
    traces = [*run.glob("rank-*/trace-step-*.json.gz")]
    assert len(traces) == 2
    assert len({trace.name for trace in traces}) == 1
    assert json.loads((run / "run.json").read_text())["exit_code"] == 0


def test_a_killed_job_is_said(
    browser: Any,
    tmp_path: Path,
) -> None:
    (tmp_path / "runs").mkdir()
    with training(tmp_path) as run, serving_runs(tmp_path / "runs", tmp_path) as address:
        watched = Watched(browser, address)
        watched.open_run(run)
        page = watched.page
        page.wait_for_selector('.live-badge[data-tone="good"]', timeout=LIMIT_MS)
        for name in ("run.json", "rank-00000/rank.json", "rank-00001/rank.json"):
            pid = json.loads((run / name).read_text())["process"]["pid"]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        page.wait_for_selector('[data-over="killed"]', timeout=LIMIT_MS)
        assert watched.text(".live-badge") == "killed"
        page.close()


def wait_for_text(page: Any, selector: str, words: str) -> None:
    page.locator(selector, has_text=words).wait_for(timeout=LIMIT_MS, state="attached")


def test_an_open_page_survives_a_restart_of_the_server(
    browser: Any,
    tmp_path: Path,
) -> None:
    run, token = tmp_path / "runs" / "live", "a-token-that-stays-the-same"
    rank = run / "rank-00000"
    write_run(run, process=alive())
    write_rank(rank, rank=0, process=alive())
    write_steps(rank, make_rows([10.0] * 60, began_ns=time.time_ns()))
    with serving_runs(tmp_path / "runs", tmp_path, token=token) as address:
        watched = Watched(browser, address)
        watched.open_run(run)
        page, port = watched.page, int(watched.base.rpartition(":")[2])
        wait_for_text(page, ".live-facts", "60 steps")
    wait_for_text(page, ".live-link", "connection lost")
    write_steps(rank, make_rows([10.0] * 90, began_ns=time.time_ns()))
    # Another cache: the new server has not looked at the folder when the page asks.
    with serving_runs(tmp_path / "runs", tmp_path / "new", port=port, token=token):
        wait_for_text(page, ".live-facts", "90 steps")
        assert watched.text(".live-link") == ""
    with serving_runs(tmp_path / "runs", tmp_path, port=port):
        wait_for_text(page, ".live-link", "another token")
    page.close()
