"""The tune's page: bars to scale, every trial in the table, a patch that can be copied whole."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import NotCapturedError, UnreadableInputError
from stepscope.records.comparison import TriedConfiguration, TuneResult
from stepscope.trace.run_folder.related_runs import FoundTune, read_tune
from stepscope.ui.html.panes.tune import draw_losses, view_of_tune, write_tune_report
from stepscope.ui.html.report import write_report

HOSTILE = "</script><img src=x onerror=alert(1)>{{ 7 * 7 }}"
PATCH = f"--- a/t.py\n+++ b/t.py\n@@ -1 +1 @@\n-x = 1  # {HOSTILE}\n+x = 2\n"


def trial(*remedies: str, ms: float | None, kept: bool = False, **more: Any) -> dict[str, Any]:
    ends = {} if ms is None else {"low_ms": ms - 2, "high_ms": ms + 2}
    return {"remedies": remedies, "measured_ms": ms, "kept": kept, **ends, **more}


@pytest.fixture
def tune(tmp_path: Path) -> Path:
    folder = tmp_path / "tune"
    folder.mkdir()
    content = {
        "command": ["python", f"t.py {HOSTILE}"],
        "baseline_ms": 40.0,
        "best_ms": 20.0,
        "kept": ["bf16", "fused-optimizer"],
        "verdict": "bf16 + fused-optimizer: a step is 2.0 times faster",
        "trials": [
            trial("bf16", ms=30.0, kept=True, predicted_ms=25.0, parity="rounding", runs=["t/1"]),
            trial("fp16", ms=46.0, parity="failed", why=f"losses differ {HOSTILE}"),
            trial("compile", ms=None, why="exit code 1", parity="not known"),
            trial("bf16", "fused-optimizer", ms=20.0, kept=True, peak_bytes=5 * 10**9),
        ],
        "left_out": [{"remedy": "tf32", "why": HOSTILE}],
        "patch": PATCH,
        "by_hand": ["t.py:3: set num_workers"],
        "variables": {"OMP_NUM_THREADS": "8"},
    }
    (folder / "tune.json").write_text(json.dumps(content))
    return folder


def write_losses(folder: Path, run: str, *losses: float) -> None:
    rank = folder / run / "rank-00000"
    rank.mkdir(parents=True)
    rows = [[step, value.hex()] for step, value in enumerate(losses)]
    (rank / "trial.json").write_text(json.dumps({"losses": rows}))


def test_bars_are_to_scale_and_the_fastest_comes_first(tune: Path) -> None:
    view = view_of_tune(FoundTune(tune, read_tune(tune)))
    assert view is not None
    names = [bar.name for bar in view.bars]
    assert names == ["baseline", "bf16 + fused-optimizer", "bf16", "fp16"]
    assert [bar.tone for bar in view.bars] == ["baseline", "kept", "kept", "failed"]
    baseline, best, bf16, fp16 = view.bars
    assert best.width == pytest.approx(baseline.width / 2)
    assert bf16.width == pytest.approx(baseline.width * 3 / 4)
    assert view.baseline_at == pytest.approx(baseline.width)
    assert bf16.promised == pytest.approx(baseline.width * 25 / 40)
    assert bf16.whisker == pytest.approx((baseline.width * 28 / 40, baseline.width * 32 / 40))
    assert max(fp16.whisker or ()) <= 100
    assert (best.change, fp16.change) == ("-50%", "+15.0%")


def test_every_trial_is_in_the_table_and_unknown_is_a_dash(tune: Path) -> None:
    view = view_of_tune(FoundTune(tune, read_tune(tune)))
    assert view is not None
    rows = {row.name: row for row in view.rows}
    assert len(rows) == 4
    failed = rows["compile"]
    assert (failed.measured, failed.between, failed.memory, failed.change) == ("-",) * 4
    assert failed.why == "exit code 1"
    assert rows["bf16 + fused-optimizer"].memory == "5.00 GB"


def test_a_promise_that_is_far_off_stays_in_the_picture() -> None:
    far = TriedConfiguration(remedies=("x",), predicted_ms=9000.0, measured_ms=39.0)
    result = TuneResult(baseline_ms=40.0, trials=(far,))
    view = view_of_tune(FoundTune(Path("nowhere"), result))
    assert view is not None
    assert view.bars[1].promised == 100.0
    assert view.bars[0].width > 90


def test_an_absurd_interval_does_not_squeeze_the_bars() -> None:
    """Two runs on a busy machine say next to nothing."""
    wild = TriedConfiguration(remedies=("x",), measured_ms=39.0, low_ms=0.1, high_ms=16_000.0)
    result = TuneResult(baseline_ms=40.0, baseline_high_ms=600.0, trials=(wild,))
    view = view_of_tune(FoundTune(Path("nowhere"), result))
    assert view is not None
    assert view.bars[0].width > 70
    assert view.bars[1].whisker is not None
    assert view.bars[1].whisker[1] == 100.0


def test_an_interval_that_leaves_the_picture_has_no_end_there(tune: Path) -> None:
    """A mark there would say that the interval ends."""
    inside = write_tune_report(tune).read_text()
    assert 'class="beyond"' not in inside
    path = tune / "tune.json"
    content = json.loads(path.read_text())
    content["trials"][0]["high_ms"] = 1e6
    path.write_text(json.dumps(content))
    text = write_tune_report(tune).read_text()
    assert text.count('class="beyond"') == 1
    assert text.count('class="reach"') == inside.count('class="reach"') - 1


def test_the_page_escapes_names_and_copies_the_patch_whole(tune: Path) -> None:
    path = write_tune_report(tune)
    text = path.read_text()
    assert path == tune / "report.html"
    assert "<img" not in text
    copied = [unescape(found) for found in re.findall(r'data-copy="([^"]*)"', text)]
    assert PATCH in copied
    assert any(
        found.startswith("stepscope run --with bf16,fused-optimizer -- python") for found in copied
    )
    assert "2.0 times faster" in text


def test_without_a_baseline_there_is_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInputError, match=r"tune\.json"):
        write_tune_report(tmp_path)
    (tmp_path / "tune.json").write_text('{"schema": 1}')
    with pytest.raises(NotCapturedError, match="no measured baseline"):
        write_tune_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_losses_of_the_trials_are_drawn_over_the_baselines(tune: Path) -> None:
    write_losses(tune, "trials/0001-baseline", 2.0, 1.0, 0.5)
    write_losses(tune, "t/1", 2.0, float("nan"), 0.5)
    view = view_of_tune(FoundTune(tune, read_tune(tune)))
    assert view is not None
    ((name, parity, picture),) = view.curves
    assert (name, parity) == ("bf16", "losses differ by rounding")
    assert picture.count("<path") == 2
    assert "step 0" in picture
    assert "nan" not in picture


def test_damaged_losses_do_no_harm(tune: Path) -> None:
    write_losses(tune, "trials/0001-baseline", 2.0, 1.0)
    write_losses(tune, "t/1", 2.0, 1.0)
    (tune / "t/1/rank-00000/trial.json").write_text('{"losses": [[0, "zz"], [1, "0x1p+99999"]]}')
    assert write_tune_report(tune).exists()


def test_a_flat_curve_of_one_step_can_be_drawn() -> None:
    assert "nan" not in draw_losses([(3, 1.0)], [(3, 1.0)], "bf16")


def test_a_report_of_the_same_command_has_the_trials(
    tune: Path, make_trace: Any, explain: Any, report: Any, tmp_path: Path
) -> None:
    path = tmp_path / "r.html"
    whole = report(explain(make_trace()))
    write_report(whole, [], path, tune=FoundTune(tune, read_tune(tune)))
    text = path.read_text()
    assert '<section id="tune"' in text
    assert '<a href="#tune">Tried</a>' in text
    write_report(whole, [], path)
    assert '<section id="tune"' not in path.read_text()


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_silent_offline_and_fits(tune: Path, visit: Any, width: int) -> None:
    write_losses(tune, "trials/0001-baseline", 2.0, 1.0, 0.5)
    write_losses(tune, "t/1", 2.0, 1.1, 0.5)
    page = visit(write_tune_report(tune), viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    bars = page.locator(".tune-bar .bar-fill")
    wide = [bars.nth(at).bounding_box()["width"] for at in range(bars.count())]
    assert wide[1] == pytest.approx(wide[0] / 2, rel=0.02)
    page.get_by_role("button", name="Copy patch").click()
    page.get_by_role("button", name="Copy patch").wait_for(state="detached")
