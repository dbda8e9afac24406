"""`run --probe`: wrong use is refused before the job, and nothing fails after it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from stepscope.errors import UsageError
from stepscope.ui.probe import REPORT, asked_precisions, probe_run
from verb_process import run_verb

TRAIN = """
import sys, torch
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
sys.exit(5)
"""


def test_precisions_need_the_probe_and_must_exist() -> None:
    assert asked_precisions(["precision=bf16", "precision=tf32"], probe=True) == ("bf16", "tf32")
    assert asked_precisions([], probe=False) == ()
    with pytest.raises(UsageError, match="--set needs --probe"):
        asked_precisions(["precision=bf16"], probe=False)
    with pytest.raises(UsageError, match="choose one of tf32, bf16, fp16"):
        asked_precisions(["precision=fp8"], probe=True)


def test_a_run_that_cannot_be_read_is_said_in_a_sentence(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    words = probe_run(tmp_path, [], 1.0)
    assert words.startswith("no operator was timed: ")
    assert "Traceback" not in words


def test_a_cpu_step_is_left_alone_where_nobody_wants_its_times(golden: Path) -> None:
    pytest.importorskip("torch")
    on_cpu = next(path for path in sorted(golden.iterdir()) if path.name.startswith("cpu-"))
    assert probe_run(on_cpu, ["bf16"], 1.0, on_cpu=False) == ""


@pytest.mark.slow
def test_the_exit_code_is_the_commands_and_the_report_is_in_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script, out = tmp_path / "train.py", tmp_path / "run"
    script.write_text(TRAIN)
    options = ["--out", out, "--probe", "--set", "precision=bf16", "--probe-budget", "2s"]
    ended = run_verb("run", *options, "--", sys.executable, script, timeout=300)
    assert ended.returncode == 5
    assert "probed" in ended.stderr
    report = json.loads((out / REPORT).read_text())
    assert report["modes"] == ["bf16"]
    assert report["probed_share"] > 0.9
