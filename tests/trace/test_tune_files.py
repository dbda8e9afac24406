"""A tune is found beside a run of the same command, and read with care."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import NotCapturedError, UnreadableInputError
from stepscope.records.run import RunOrigin
from stepscope.trace.run_folder.related_runs import FoundTune, find_tune, read_tune, traced_run
from stepscope.trace.run_folder.run_state import origin_of_traces, read_origin

COMMAND = ("python", "train.py")


def write_tune(place: Path, when: float = 1e9, **content: Any) -> Path:
    place.mkdir(parents=True)
    known = {"schema": 1, "command": COMMAND, "baseline_ms": 38.1}
    (place / "tune.json").write_text(json.dumps(known | content))
    os.utime(place / "tune.json", (when, when))
    return place


def find(run: Path, folder: str | None = None) -> FoundTune | None:
    return find_tune(run, RunOrigin(command=COMMAND, folder=folder))


def test_the_newest_tune_of_the_same_command_is_found(tmp_path: Path) -> None:
    write_tune(tmp_path / "20260101-train", 2e9, baseline_ms=1.0)
    write_tune(tmp_path / "20260102-train", 1e9, baseline_ms=2.0)
    write_tune(tmp_path / "20260103-other", 3e9, command=["python", "other.py"])
    found = find(tmp_path / "run")
    assert found is not None
    assert (found.folder.name, found.result.baseline_ms) == ("20260101-train", 1.0)
    assert not found.holds_run


def test_a_tune_of_another_working_folder_is_about_another_script(tmp_path: Path) -> None:
    write_tune(tmp_path / "tune", folder="/elsewhere")
    assert find(tmp_path / "run", "/here") is None
    assert find(tmp_path / "run", "/elsewhere") is not None


def test_a_run_elsewhere_finds_the_tunes_of_its_working_folder(tmp_path: Path) -> None:
    write_tune(tmp_path / "work/stepscope-runs/tune", folder=str(tmp_path / "work"))
    found = find(tmp_path / "elsewhere/run", str(tmp_path / "work"))
    assert found is not None


def test_a_run_inside_a_tune_belongs_to_it(tmp_path: Path) -> None:
    write_tune(tmp_path / "newer", 3e9)
    tune = write_tune(tmp_path / "tune", 1e9)
    for run in ("baseline", "trials/0001-bf16"):
        found = find(tune / run)
        assert found is not None
        assert (found.folder, found.holds_run) == (tune, True)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1', "\x00"])
def test_a_file_that_is_no_tune_is_passed_over(tmp_path: Path, text: str) -> None:
    write_tune(tmp_path / "good", 1e9)
    bad = write_tune(tmp_path / "bad", 2e9)
    (bad / "tune.json").write_text(text)
    found = find(tmp_path / "run")
    assert found is not None
    assert found.folder.name == "good"
    with pytest.raises(UnreadableInputError, match=r"tune\.json"):
        read_tune(bad)


def test_values_that_make_no_sense_cost_only_themselves(tmp_path: Path) -> None:
    tune = write_tune(tmp_path / "tune", best_ms="fast", trials=[{"remedies": ["bf16"], "x": 1}])
    result = read_tune(tune)
    assert (result.baseline_ms, result.best_ms) == (38.1, None)
    assert result.trials[0].remedies == ("bf16",)


def test_a_tune_folder_stands_for_its_baseline(tmp_path: Path) -> None:
    tune = write_tune(tmp_path / "tune")
    with pytest.raises(NotCapturedError, match="without a captured baseline"):
        traced_run(tune)
    (tune / "baseline").mkdir()
    assert traced_run(str(tune)) == tune / "baseline"
    assert traced_run("s3://bucket/run") == "s3://bucket/run"
    assert traced_run(tmp_path) == tmp_path


# run.json and rank.json


def write_rank(run: Path, number: int, **facts: Any) -> Path:
    rank = run / f"rank-{number:05d}"
    rank.mkdir(parents=True)
    (rank / "rank.json").write_text(json.dumps({"rank": number} | facts))
    return rank


def test_a_runs_origin_joins_what_its_ranks_say(tmp_path: Path) -> None:
    run = tmp_path / "run"
    did = {"id": "bf16", "did": ["autocast"], "refused": None}
    ranks = [write_rank(run, 0, remedies=[did]), write_rank(run, 1)]
    whole = {"command": COMMAND, "folder": "/here", "remedies": ["bf16", "tf32"]}
    (run / "run.json").write_text(json.dumps(whole))
    origin = read_origin(run, ranks)
    assert origin is not None
    assert (origin.command, origin.folder) == (COMMAND, "/here")
    assert [(each.id, each.outcome) for each in origin.remedies] == [
        ("bf16", "applied"),
        ("tf32", "unknown"),
    ]
    traces = [str(rank / "trace.json.gz") for rank in ranks]
    assert origin_of_traces(traces) == origin


def test_bare_traces_and_older_runs_have_no_remedies(tmp_path: Path) -> None:
    assert origin_of_traces([str(tmp_path / "trace.json")]) is None
    assert origin_of_traces(["s3://bucket/rank-00000/trace.json"]) is None
    rank = write_rank(tmp_path / "run", 0)
    assert origin_of_traces([str(rank / "trace.json")]) is None
    (tmp_path / "run/run.json").write_text('{"command": ["python", "train.py"]}')
    origin = origin_of_traces([str(rank / "trace.json")])
    assert origin == RunOrigin(command=COMMAND)
