"""Windows of `--every`: the newest stays, the others are thinned out evenly."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.measure import kept_windows
from stepscope.measure.kept_windows import KeptWindows, to_keep
from stepscope.measure.schedule import Schedule
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
