"""The real packages, offline, and whole trainings that are logged from inside and from outside."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live_runs import make_rows, write_steps
from logged_runs import EXPLAINED
from stepscope.ui.loggers.run_log import LogChoice, RunLog

pytestmark = pytest.mark.slow
SETTINGS = "wait=1, warmup=1, active=2, memory=False"
LOOP = """
import torch, stepscope.loggers
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(run):
    for step in range(12):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        if run is not None:
            run.step()
"""


def _run(
    script: str, folder: Path, *command: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    file = folder / "train.py"
    file.write_text(script)
    done = subprocess.run(
        [sys.executable, *command, str(file)],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=300,
        env={**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done


def _tensorboard(folder: Path) -> Any:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def _wandb_records(file: Path) -> Iterator[bytes]:
    """An offline run is a log of LevelDB's format: blocks of 32 KiB with records cut into chunks,
    each after a checksum (4 bytes), its length (2) and whether it is whole, first, middle, last."""
    data, at, parts = file.read_bytes(), 7, []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


def _wandb_rows(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The history and the summary in an offline run's own file."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for data in _wandb_records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.history.item:
            rows.append({_key(one): json.loads(one.value_json) for one in record.history.item})
        for one in record.summary.update:
            summary[_key(one)] = json.loads(one.value_json)
    return rows, summary


def _key(item: Any) -> str:
    return str(item.key or "/".join(item.nested_key))


def test_mlflow_gets_metrics_by_step_tags_and_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.chdir(tmp_path)
    write_steps(tmp_path / "run/rank-00000", make_rows([1000.0] * 5))
    RunLog(tmp_path / "run", [LogChoice.parse("mlflow:mine")]).end(EXPLAINED)
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "stepscope/step_ms")
    assert [(one.step, one.value) for one in history] == [(1, 1000), (3, 1000), (4, 1000)]
    assert run.data.metrics["stepscope/budget/compute_share"] == 0.6
    assert run.data.tags["stepscope.verdict"].startswith("Waiting for data:")
    (text,) = (tmp_path / "mlruns").rglob("findings.md")
    assert "40%" in text.read_text()


def test_wandb_gets_history_and_summary_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    script = """
import sys; sys.path[:0] = PATHS
from pathlib import Path
from live_runs import make_rows, write_steps
from stepscope.ui.loggers.run_log import LogChoice
from stepscope.ui.loggers.run_log import RunLog
from logged_runs import EXPLAINED
write_steps(Path("run/rank-00000"), make_rows([1000.0] * 5))
RunLog(Path("run"), [LogChoice.parse("wandb:mine")]).end(EXPLAINED)
"""
    here = Path(__file__).parent
    script = script.replace("PATHS", repr([str(here.parent)]))
    _run(script, tmp_path, WANDB_MODE="offline")
    rows, summary = _wandb_rows(tmp_path / "run")
    steps = [(row["stepscope/step"], row["stepscope/step_ms"]) for row in rows]
    assert steps == [(1, 1000), (3, 1000), (4, 1000)]
    assert summary["stepscope/verdict"].startswith("Waiting for data:")
    assert summary["stepscope/budget/compute_share"] == 0.6


def test_runs_of_the_users_own_are_joined_and_keep_their_steps(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    script = f"""{LOOP}
import mlflow, wandb
mine = wandb.init(project="mine", mode="offline")
with mlflow.start_run() as active:
    for number in range(3):
        wandb.log({{"loss": number}}, step=10 * number)
    with stepscope.loggers.watch("wandb", "mlflow", folder="run", {SETTINGS}) as run:
        train(run)
    wandb.log({{"loss": 3}}, step=30)
    assert mlflow.active_run() is not None
assert wandb.run is not None
mine.finish()
print(active.info.run_id)
"""
    done = _run(script, tmp_path, MLFLOW_TRACKING_URI=(tmp_path / "mlruns").as_uri())
    rows, summary = _wandb_rows(tmp_path)
    assert [row["_step"] for row in rows if "loss" in row] == [0, 10, 20, 30]
    assert any("stepscope/step_ms" in row for row in rows)
    assert "stepscope/verdict" in summary
    (metrics,) = (tmp_path / "mlruns").rglob(f"{done.stdout.split()[-1]}/metrics/stepscope")
    assert (metrics / "step_ms").read_text()
    assert len(list((tmp_path / "mlruns").rglob("tags/stepscope.verdict"))) == 1


def test_a_plain_loop_logs_from_outside_and_from_inside(tmp_path: Path) -> None:
    window = ("--wait", "1", "--warmup", "1", "--active", "2", "--no-memory")
    log = ("--out", "outside", "--log", f"tensorboard:{tmp_path / 'a'}", "--log", "mlflow")
    done = _run(
        f"{LOOP}\ntrain(None)",
        tmp_path,
        *("-m", "stepscope", "run", *window, *log, "--", sys.executable),
        MLFLOW_TRACKING_URI="databricks-unknown-scheme://nowhere",
    )
    assert "nothing more is logged to mlflow" in done.stderr  # and the training went on
    inside = f"with stepscope.loggers.watch('tensorboard', folder='in', {SETTINGS}) as run:"
    _run(f"{LOOP}\n{inside}\n    train(run)", tmp_path)
    for folder in (tmp_path / "a", tmp_path / "in/tensorboard"):
        events = _tensorboard(folder)
        assert events.Scalars("stepscope/step_ms")[-1].step >= 10
        assert events.Tensors("stepscope/verdict")
        shares = [tag for tag in events.Tags()["scalars"] if tag.endswith("_share")]
        assert sum(events.Scalars(tag)[0].value for tag in shares) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("package", "script", "old", "new"),
    [
        (
            "lightning",
            "with_lightning.py",
            "from stepscope.measure.watch import lightning as watched",
            "from stepscope.loggers import lightning as watched",
        ),
        (
            "transformers",
            "with_transformers.py",
            "from stepscope.measure.watch import hugging_face",
            "from stepscope.loggers import hugging_face",
        ),
    ],
)
def test_trainers_log_through_their_callback(
    tmp_path: Path, package: str, script: str, old: str, new: str
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed in this Python")
    source = (Path(__file__).parent.parent / "measure/scripts/trainers" / script).read_text()
    assert old in source
    source = source.replace(old, new).replace(
        "(sys.argv[1], wait", "('tensorboard', folder='r', wait"
    )
    file = tmp_path / "train.py"
    file.write_text(source)
    done = subprocess.run(
        [sys.executable, str(file), "r"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    events = _tensorboard(tmp_path / "r/tensorboard")
    assert events.Scalars("stepscope/step_ms")[-1].step == 17
    assert events.Tensors("stepscope/verdict")
