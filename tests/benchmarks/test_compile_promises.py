"""The table of promises about torch.compile, without a device."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import compile_promises

PROGRAM = Path(compile_promises.__file__)


def row(promised: float, measured: float, mode: str = "default", **more: Any) -> dict[str, Any]:
    return {
        "model": "bert",
        "precision": "bf16",
        "mode": mode,
        "eager_ms": 40.0,
        "promised_ms": promised,
        "low_ms": promised * 0.9,
        "high_ms": promised * 1.1,
        "measured_ms": measured,
        "promised_device_ms": 15.0,
        "device_ms": 16.0,
        **more,
    }


def test_the_summary_counts_errors_and_intervals() -> None:
    text = compile_promises.table([row(20.0, 20.0), row(30.0, 20.0, "reduce-overhead")])
    assert "default: 1 rows, mean error 0.0%" in text
    assert "all: 2 rows, mean error 25.0%" in text
    assert "inside 50%" in text
    assert text.count("OUTSIDE") == 1


def test_failures_and_refusals_are_rows_too() -> None:
    failed = {"model": "gat", "precision": "bf16", "mode": "default", "failure": "OSError: no"}
    refused = {**failed, "refused": ["compile: no accelerator"], "failure": None}
    refused["measured_ms"] = 12.5
    text = compile_promises.table([failed, refused])
    assert "OSError: no" in text
    assert "compile: no accelerator; measured 12.50" in text
    assert "mean error" not in text


def test_rows_are_saved_one_after_the_other(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    compile_promises.save_rows(file, [row(1.0, 1.0)])
    compile_promises.save_rows(file, [row(2.0, 2.0)])
    assert [one["promised_ms"] for one in compile_promises.read_rows(file)] == [1.0, 2.0]


def test_failed_rows_are_forgotten_and_the_first_precision_comes_first(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    failed = {"model": "gat", "precision": "bf16", "mode": "default", "failure": "OSError: no"}
    compile_promises.save_rows(file, [row(1.0, 1.0), failed])
    compile_promises.forget_failures(file)
    assert compile_promises.read_rows(file) == [row(1.0, 1.0)]
    words = {"models": "bert,gat", "precisions": "bf16,tf32", "modes": "default"}
    options = argparse.Namespace(save=file, **words)
    assert compile_promises.cases_left(options) == [
        ("gat", "bf16"), ("bert", "tf32"), ("gat", "tf32"),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_model_that_cannot_start_is_a_row_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ["--models", "nosuch", "--precisions", "fp32", "--tiny", "--device", "cpu"]
    subprocess.run([sys.executable, PROGRAM, "--save", file, *words], check=True, timeout=120)
    rows = json.loads(file.read_text())
    assert len(rows) == 2
    assert all("No module named" in one["failure"] for one in rows)


@pytest.mark.slow
def test_a_tiny_model_on_a_cpu_goes_all_the_way_and_is_not_tried_again(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "rows.json"
    words = ["--models", "bert", "--precisions", "fp32", "--tiny", "--device", "cpu"]
    for _ in range(2):
        subprocess.run([sys.executable, PROGRAM, "--save", file, *words], check=True, timeout=300)
    rows = json.loads(file.read_text())
    assert [one["mode"] for one in rows] == ["default", "reduce-overhead"]
    assert all(one["measured_ms"] > 0 for one in rows)
    assert all("no GPU" in one["refused"][0] for one in rows)
