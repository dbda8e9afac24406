"""Loggers: points along a run, the conclusion, and failures that never reach the training."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepscope.loggers
from live_runs import BEGAN_S, append_steps, as_text, make_rows, write_run, write_steps
from logged_runs import EXPLAINED
from stepscope.errors import UsageError
from stepscope.trace.run_folder.follow_run import RunFollower
from stepscope.ui.loggers import run_log
from stepscope.ui.loggers import run_log as metric_log
from stepscope.ui.loggers.run_log import (
    LogChoice,
    MetricLog,
    MetricPoint,
    RunConclusion,
    RunLog,
    StepPoints,
    conclude,
)


def _columns(folder: Path) -> Any:
    (rank,) = RunFollower(folder).read().ranks
    return rank.steps.recent


def test_points_are_means_over_stretches_and_each_step_counts_once(tmp_path: Path) -> None:
    rank = tmp_path / "rank-00000"
    rows = make_rows([500.0] * 4 + [1000.0] * 3, backward_ns=[100_000_000] * 7)
    rows[1]["window"] = True  # profiled: no step time
    write_steps(rank, rows)
    points = StepPoints()
    first = points.take(_columns(tmp_path))
    assert [point.step for point in first] == [3, 5]  # 2 s each; the third is not over
    assert first[0].values["stepscope/steps_per_s"] == pytest.approx(2.0)
    assert first[0].values["stepscope/step_ms"] == pytest.approx(500.0)
    assert first[0].values["stepscope/phase/backward_ms"] == pytest.approx(100.0)
    assert first[1].values["stepscope/step_ms"] == pytest.approx(1000.0)
    assert first[0].unix_s == pytest.approx(BEGAN_S + 2)
    assert points.take(_columns(tmp_path)) == []
    append_steps(rank, as_text(make_rows([300.0], number=7, began_ns=rows[-1]["end_unix_ns"])))
    (last,) = points.take(_columns(tmp_path), all_ended=True)
    assert (last.step, last.values["stepscope/slowest_step_ms"]) == (7, 1000.0)
    assert points.take(_columns(tmp_path), all_ended=True) == []


def test_a_long_run_has_few_points() -> None:
    from stepscope.records.rank import StepColumns

    hours, total = 100, 0
    walls = np.full(hours * 360, 10_000_000_000)
    false, true = np.zeros(len(walls), np.bool_), np.ones(len(walls), np.bool_)
    steps = StepColumns(
        number=np.arange(len(walls)),
        wall_ns=walls,
        end_unix_ns=np.cumsum(walls),
        phases_ns={},
        window=false,
        memory=false,
        whole=true,
    )
    total = len(StepPoints().take(steps, all_ended=True))
    assert 500 < total < 4000


def test_a_conclusion_has_values_that_are_known_and_text_without_markup() -> None:
    found = conclude(EXPLAINED)
    assert found.values == {
        "stepscope/run/step_ms": 100.0,
        "stepscope/budget/compute_ms": 60.0,
        "stepscope/budget/compute_share": 0.6,
        "stepscope/finding/data-loading": 0.4,
        "stepscope/run/peak_bytes": 7.0,
    }
    assert "\n" not in found.verdict
    assert "<b>" not in found.text
    assert "my&#95;model" in found.text
    assert "- 40% x &#124; y" in found.text


@pytest.mark.parametrize("text", ["tensorbord", "", ":x", "csv:file"])
def test_a_logger_that_there_is_not_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="choose from tensorboard"):
        LogChoice.parse(text)
    with pytest.raises(UsageError, match="choose from tensorboard"):
        stepscope.loggers.hugging_face(text)


class _Remembering(MetricLog):
    def __init__(self, fails_at: str = "") -> None:
        self.fails_at, self.steps, self.concluded, self.closed = fails_at, [], 0, 0
        self.first = threading.Event()

    def points(self, points: Sequence[MetricPoint]) -> None:
        self._fail("points")
        self.steps += [point.step for point in points]
        self.first.set()

    def conclude(self, conclusion: RunConclusion, step: int) -> None:
        self._fail("conclude")
        assert conclusion.values
        self.concluded = step

    def close(self) -> None:
        self.closed += 1

    def _fail(self, where: str) -> None:
        if self.fails_at == where:
            raise ConnectionError("the server said no. And more.")


def _opening(monkeypatch: pytest.MonkeyPatch, *logs: MetricLog) -> list[LogChoice]:
    waiting = list(logs)
    monkeypatch.setattr(LogChoice, "connect", lambda *_: waiting.pop(0))
    return [LogChoice("mlflow", str(number)) for number in range(len(logs))]


def test_a_run_is_followed_while_it_goes_on_and_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "_LOOK_S", 0.01)
    log = _Remembering()
    running = RunLog(tmp_path, _opening(monkeypatch, log))
    write_run(tmp_path)
    write_steps(tmp_path / "rank-00000", make_rows([1000.0] * 5))
    assert log.first.wait(30)
    assert log.steps == [1, 3]
    running.end(EXPLAINED)
    assert log.steps == [1, 3, 4]
    assert (log.concluded, log.closed) == (4, 1)


@pytest.mark.parametrize("where", ["points", "conclude"])
def test_a_logger_that_fails_is_said_once_and_the_others_go_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
) -> None:
    write_steps(tmp_path / "rank-00000", make_rows([1000.0] * 5))
    bad, good = _Remembering(where), _Remembering()
    RunLog(tmp_path, _opening(monkeypatch, bad, good)).end(EXPLAINED)
    assert (good.steps, good.concluded, good.closed) == ([1, 3, 4], 4, 1)
    assert bad.closed == 0
    said = capsys.readouterr().err
    assert said.count("nothing more is logged to mlflow:0: ConnectionError") == 1
    assert "the training goes on" in said


def test_a_package_that_is_missing_and_a_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(metric_log.KINDS, "mlflow", ("no_such_module", "X", "Y"))
    running = RunLog(tmp_path / "gone", [LogChoice("mlflow")])
    running.end(None)
    assert "pip install" in capsys.readouterr().err


def test_the_end_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_log, "_LONGEST_END_S", 0.05)
    never = threading.Event()
    monkeypatch.setattr(LogChoice, "connect", lambda *_: never.wait(60) and _Remembering())
    began = time.monotonic()
    RunLog(tmp_path, [LogChoice("wandb")]).end(None)
    assert time.monotonic() - began < 30
    assert "stepscope stops waiting" in capsys.readouterr().err
    never.set()


def test_tensorboard_gets_scalars_and_a_text_that_its_own_reader_shows(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_steps(tmp_path / "rank-00000", make_rows([1000.0] * 5))
    RunLog(tmp_path, [LogChoice.parse(f"tensorboard:{tmp_path / 'tb'}")]).end(EXPLAINED)
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    points = events.Scalars("stepscope/step_ms")
    assert [(point.step, point.value) for point in points] == [(1, 1000), (3, 1000), (4, 1000)]
    assert points[0].wall_time == pytest.approx(BEGAN_S + 2)
    assert events.Scalars("stepscope/budget/compute_share")[0].value == pytest.approx(0.6)
    (verdict,) = events.Tensors("stepscope/verdict")
    assert verdict.tensor_proto.string_val[0].startswith(b"Waiting for data: my")
    assert events.SummaryMetadata("stepscope/verdict").plugin_data.plugin_name == "text"
