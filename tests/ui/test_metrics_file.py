"""Metrics of running jobs: the text that Prometheus reads, and the file for its node exporter."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from live_runs import (
    MS,
    alive,
    append_steps,
    as_text,
    make_rows,
    write_rank,
    write_run,
    write_steps,
)
from stepscope.explain.whole_run.live import explain_live
from stepscope.records.rank import ALL_PHASES
from stepscope.records.run import STALL_CAUSES, FindingNow, LiveRun, VerdictNow
from stepscope.trace.run_folder.follow_run import RunFollower
from stepscope.ui.serve.metrics import METRICS, MOST_RANKS, MetricsFile, RunMetrics, metrics_text
from verb_process import run_verb

VERDICT = VerdictNow(
    verdict="Data loading: half of the step",
    findings=(FindingNow(id="data-loading", summary="x", severity="high"),),
    mfu=0.25,
    peak_bytes=1000,
    batch=32,
)


def looked_at(folder: Path, ranks: int = 1, steps: int = 60) -> LiveRun:
    write_run(folder, process=alive())
    for rank in range(ranks):
        place = folder / f"rank-{rank:05d}"
        write_rank(place, rank=rank, process=alive())
        data = [2 * MS] * steps
        held = [1_000_000] * steps
        write_steps(place, make_rows([10.0] * steps, data_ns=data, allocated_bytes=held))
    return explain_live(RunFollower(folder).read(), 1_700_000_010.0)


def values(text: str) -> dict[tuple[str, ...], float]:
    """By name and the values of the labels except those that name the run."""
    return {
        (sample.name, *(word for name, word in sample.labels.items() if name not in RUN)): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


RUN = ("run", "name")


def test_prometheus_own_parser_reads_every_figure(tmp_path: Path) -> None:
    run = looked_at(tmp_path / "run")
    labels = {"run": "1f", "name": 'a "b"\\\nc'}
    text = metrics_text([RunMetrics(labels, run, VERDICT)])
    families = list(text_string_to_metric_families(text))
    assert {sample.labels.get("name") for one in families for sample in one.samples} == {
        labels["name"],
        None,
    }
    found = values(text)
    assert found["stepscope_steps_total", "0"] == 60
    assert found["stepscope_step_mean_seconds", "0"] == pytest.approx(0.01)
    assert found["stepscope_step_recent_seconds", "0"] == pytest.approx(0.01)
    assert found["stepscope_phase_seconds", "0", "data"] == pytest.approx(0.002)
    assert found["stepscope_memory_bytes", "0"] == 1_000_000
    assert found["stepscope_samples_per_second",] == pytest.approx(3200)
    assert found["stepscope_mfu_ratio",] == 0.25
    assert found["stepscope_verdict", "data-loading"] == 1
    assert found["stepscope_run_status", run.status] == 1
    assert {family.type for family in families} == {"gauge", "counter"}


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "run", process=alive())
    run = explain_live(RunFollower(tmp_path / "run").read(), 1_700_000_010.0)
    found = values(metrics_text([RunMetrics({"run": "1"}, run)]))
    assert set(found) == {
        ("stepscope_run_status", "starting up"),
        ("stepscope_run_seconds",),
        ("stepscope_runs_left_out",),
    }


def test_labels_are_bounded(tmp_path: Path) -> None:
    run = looked_at(tmp_path / "run", ranks=MOST_RANKS + 3, steps=30)
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics_text([RunMetrics({}, run, VERDICT)])):
        for sample in family.samples:
            for name, word in sample.labels.items():
                labels.setdefault(name, set()).add(word)
    assert len(labels["rank"]) == MOST_RANKS
    assert labels["phase"] <= set(ALL_PHASES)
    assert labels.get("cause", set()) <= set(STALL_CAUSES)


def test_every_metric_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/loggers.md").read_text()
    assert [name for name in METRICS if f"`{name}`" not in page] == []


def test_the_file_is_replaced_as_a_whole_and_follows_the_run(tmp_path: Path) -> None:
    folder, path = tmp_path / "run", tmp_path / "job.prom"
    looked_at(folder)
    metrics = MetricsFile(path, folder)
    assert metrics.write() is None
    before = path.stat().st_ino
    assert values(path.read_text())["stepscope_steps_total", "0"] == 60
    append_steps(folder / "rank-00000", as_text(make_rows([10.0] * 5, number=60)))
    metrics.write()
    assert values(path.read_text())["stepscope_steps_total", "0"] == 65
    assert path.stat().st_ino != before
    assert sorted(one.name for one in tmp_path.iterdir()) == ["job.prom", "run"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_file_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    looked_at(tmp_path / "run")
    place = tmp_path / "closed"
    place.mkdir(mode=0o500)
    metrics = MetricsFile(place / "job.prom", tmp_path / "run")
    assert "cannot be written" in (metrics.write() or "")
    assert metrics.write() is None


def test_a_folder_that_goes_away_is_said_once(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "job.prom", tmp_path / "nowhere")
    assert "cannot be written" in (metrics.write() or "")
    assert metrics.write() is None


@pytest.mark.parametrize("name", ["job.txt", "none/job.prom", "folder.prom"])
def test_a_place_that_cannot_hold_the_file_is_refused_before_the_start(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "folder.prom").mkdir()
    ran = tmp_path / "ran"
    options = ["--out", tmp_path / "run", "--metrics-file", tmp_path / name]
    done = run_verb("run", *options, "--", "touch", ran)
    assert done.returncode == 2
    assert "--metrics-file" in done.stderr
    assert "Traceback" not in done.stderr
    assert not ran.exists()


TRAIN = """
import time, torch
model = torch.nn.Linear(64, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(40):
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_run_keeps_the_file_of_a_real_training(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    out, path = tmp_path / "run", tmp_path / "job.prom"
    began = time.time()
    options = ["--out", out, "--metrics-file", path, "--", sys.executable]
    done = run_verb("run", *options, tmp_path / "train.py")
    assert done.returncode == 0, done.stderr
    found = values(path.read_text())
    assert found["stepscope_steps_total", "0"] == 40
    assert found["stepscope_run_status", "finished"] == 1
    assert 0 < found["stepscope_run_seconds",] < time.time() - began
    assert found["stepscope_samples_per_second",] > 0
    assert any(name[0] == "stepscope_verdict" for name in found)
    assert json.loads((out / "run.json").read_text())["exit_code"] == 0
