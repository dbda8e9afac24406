"""Windows of `--every`: the newest stays, the others are thinned out evenly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import stepscope
from stepscope.measure.profiler import windows as kept_windows
from stepscope.measure.profiler.schedule import Schedule
from stepscope.measure.profiler.windows import KeptWindows, to_keep
from stepscope.measure.settings import Settings


@pytest.mark.parametrize("most", [2, 3, 16])
def test_windows_are_bounded_spread_and_never_come_back(most: int) -> None:
    before: set[int] = set()
    for newest in range(1, 300):
        kept = to_keep(newest, most)
        assert newest in kept
        assert len(kept) <= most
        assert kept <= before | {newest}
        apart = [b - a for a, b in zip([0, *sorted(kept)], sorted(kept), strict=False)]
        assert len(set(apart[:-1])) <= 1  # all but the newest are equally far apart
        before = kept


def record(folder: Path, windows: int, size: int = 1) -> KeptWindows:
    schedule = Schedule.plan(Settings(folder="", every=100))
    kept = KeptWindows(folder, 100)
    for number in range(1, windows + 1):
        window = schedule.opens(100 * number)
        assert window is not None
        (folder / window.file).write_bytes(bytes(size))
        (folder / window.comms_file).write_bytes(b"")
        kept.saved(window)
    return kept


def test_files_of_dropped_windows_are_removed(tmp_path: Path) -> None:
    kept = record(tmp_path, 20).content()
    assert kept["kept"] == [100 * number + 2 for number in range(2, 21, 2)]
    assert (kept["every"], kept["recorded"], kept["dropped"]) == (100, 20, 10)
    assert {file.name for file in tmp_path.iterdir()} == {
        name.format(step)
        for step in kept["kept"]
        for name in ("trace-step-{}.json.gz", "comms-step-{}.jsonl")
    }


def test_large_traces_are_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_windows, "MOST_BYTES", 3500)
    assert record(tmp_path, 20, size=1000).content()["kept"] == [802, 1602, 2002]


EVERY = """
import torch
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(130):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""


def test_a_run_records_regular_windows_and_says_which_it_kept(tmp_path: Path) -> None:
    path, out = tmp_path / "train.py", tmp_path / "run"
    path.write_text(EVERY)
    options = ["--out", str(out), "--no-explain", "--quiet", "--wait", "2", "--every", "6"]
    window = ["--warmup", "1", "--active", "1"]
    ours = [sys.executable, "-m", "stepscope", "run", *options, *window]
    subprocess.run([*ours, "--", sys.executable, str(path)], check=True, timeout=120)
    rank = out / "rank-00000"
    windows = json.loads((rank / "rank.json").read_text())["windows"]
    # Windows 2 to 21 were recorded, at steps 12, 18, ... 126; each begins with a warm-up step.
    assert windows["recorded"] == 20
    assert windows["kept"] == [6 * number + 1 for number in [*range(2, 21, 2), 21]]
    assert windows["dropped"] == 9
    kept = {f"trace-step-{step}.json.gz" for step in windows["kept"]}
    assert {file.name for file in rank.glob("trace*")} == {"trace.json.gz", *kept}
    chosen = stepscope.explain_job(out, cache=False).ranks[0]
    assert Path(chosen.path).name in {"trace.json.gz", *kept}
