"""Ends, steps and memory of trials, and the file that holds a rank's losses."""

from __future__ import annotations

import json
from pathlib import Path

from stepscope.verify.trials import (
    Loss,
    RankPeak,
    RankTrial,
    compare_peaks,
    losses_of,
    read_trial,
    why_unfinished,
)

GIB = 1 << 30


def peak(device: int | None, host: int = GIB) -> dict[int, RankTrial]:
    return {0: RankTrial(peak=RankPeak(device=device, host=host))}


def test_enough_steps_on_all_ranks_are_enough_whatever_the_exit_code() -> None:
    assert why_unfinished({0: 60, 1: 61}, ranks=2, wanted=60, exit_code=1) is None


def test_a_crash_names_its_exit_code_or_signal() -> None:
    why = why_unfinished({0: 7}, ranks=1, wanted=60, exit_code=1)
    assert why == "it ended with exit code 1 after 7 steps"
    assert (
        why_unfinished({}, ranks=1, wanted=60, exit_code=139)
        == "it was ended by signal 11 after 0 steps"
    )


def test_a_short_script_must_make_as_many_steps_as_the_baseline() -> None:
    assert why_unfinished({0: 20}, ranks=1, wanted=60, exit_code=0, baseline_steps=20) is None
    why = why_unfinished({0: 20, 1: 10}, ranks=2, wanted=60, exit_code=0, baseline_steps=20)
    assert why == "rank 1 made 10 steps and ended, but 20 were expected"
    assert why_unfinished({0: 20}, ranks=1, wanted=60, exit_code=0) is not None


def test_the_highest_peak_of_the_device_counts() -> None:
    found = compare_peaks([peak(4 * GIB), peak(5 * GIB)], [peak(6 * GIB, host=9 * GIB)])
    assert (found.where, found.base_bytes, found.peak_bytes) == ("device", 5 * GIB, 6 * GIB)
    assert found.change == 0.19999999999999996
    assert found.refused is None


def test_the_host_counts_where_no_rank_has_a_device() -> None:
    found = compare_peaks([peak(None, GIB)], [peak(None, int(1.03 * GIB))])
    assert found.where == "host"
    assert found.change == 0.0  # equal runs differ as much


def test_a_limit_refuses() -> None:
    found = compare_peaks([peak(4 * GIB)], [peak(6 * GIB)], limit_bytes=5 * GIB)
    assert found.refused == "it needs 6 GiB on the GPU, more than the limit of 5 GiB"
    unknown = compare_peaks([peak(4 * GIB)], [{}], limit_bytes=5 * GIB)
    assert unknown.refused is not None
    assert unknown.change is None


def test_trial_files_are_read_by_rank(tmp_path: Path) -> None:
    content = {"schema": 1, "losses": [[0, (2.5).hex()]], "peak": {"device": None, "host": 5}}
    for name in ("rank-00000", "rank-00001", "rank-00001.2", "rank-00002"):
        (tmp_path / name).mkdir()
    (tmp_path / "rank-00000/trial.json").write_text(json.dumps(content))
    (tmp_path / "rank-00001/trial.json").write_text(json.dumps({**content, "losses": []}))
    (tmp_path / "rank-00001.2/trial.json").write_text("{")
    trial = read_trial(tmp_path)
    assert sorted(trial) == [0, 1]
    assert trial[0].peak.host == 5
    assert losses_of(trial) == {0: (Loss(0, "0x1.4000000000000p+1"),)}
    assert trial[0].losses[0].value == 2.5
