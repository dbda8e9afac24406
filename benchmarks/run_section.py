"""The report's Run section with many steps: how large the page is, and how quickly it draws.

    python benchmarks/run_section.py [--steps 100000] [--ranks 8] [--out report.html] [--browser]

Makes a run that never ran (tests/made_runs.py): eight causes of stalls, a change of level, two
windows, one rank slower than the others. `--browser` opens the page in Chromium, pans and zooms,
and prints the time of the frames: on the clock, and the thread's own, which other processes do not
disturb. It needs playwright and a Chromium on PATH.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

import stepscope
from stepscope.ui.html.report import write_report
from stepscope.ui.html.run_points import encode_run

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

TRACE = ROOT / "tests" / "golden" / "cuda_step.json.gz"
PAN = """
async () => {
  const chart = stepscope.runChart;
  const times = [];
  for (let i = 0; i < 60; i++) {
    chart.pan(i < 30 ? 0.02 : -0.02);
    times.push(stepscope.redrawRun());
  }
  return times;
}
"""


def main() -> int:
    from made_runs import make_run

    options = _parser().parse_args()
    run = make_run(options.steps, options.ranks, slow_rank=options.ranks - 1)
    began = time.perf_counter()
    points = encode_run(run.ranks)
    took = time.perf_counter() - began
    if points is None:
        return 1
    print(
        f"data block: {len(points.payload) / 1e6:.2f} MB in {took:.2f} s, {points.drawn:,} points"
    )
    explanation = stepscope.explain(TRACE, cache=False)
    write_report(replace(explanation, run=run), [], options.out)
    print(f"page: {options.out}, {options.out.stat().st_size / 1e6:.2f} MB")
    if options.browser:
        _measure(options.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("report.html"))
    parser.add_argument("--browser", action="store_true")
    return parser


def _measure(path: Path) -> None:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        began = time.perf_counter()
        page.goto(path.resolve().as_uri())
        page.evaluate("window.stepscope.ready")
        print(f"opens in {time.perf_counter() - began:.2f} s")
        metrics = page.context.new_cdp_session(page)
        metrics.send("Performance.enable", {"timeDomain": "threadTicks"})
        for factor, name in ((1, "whole run"), (8, "zoom 8"), (64, "zoom 64"), (800, "zoom 800")):
            page.evaluate("stepscope.runChart.reset()")
            page.evaluate(f"stepscope.runChart.zoom(1 / {factor})")
            before = _thread_ms(metrics)
            times = page.evaluate(PAN)
            _print_frames(name, times, (_thread_ms(metrics) - before) / len(times))
        browser.close()


def _thread_ms(metrics: Any) -> float:
    values = metrics.send("Performance.getMetrics")["metrics"]
    return 1e3 * next(item["value"] for item in values if item["name"] == "TaskDuration")


def _print_frames(name: str, times: list[Any], thread_ms: float) -> None:
    late = sorted(times)[int(0.95 * len(times))]
    best, middle = min(times), statistics.median(times)
    print(
        f"{name}: frames of {best:.1f} ms at best, {middle:.1f} ms (median), "
        f"{late:.1f} ms (95th percentile), {thread_ms:.1f} ms of the thread"
    )


if __name__ == "__main__":
    sys.exit(main())
