"""save-memory=TARGET from a run folder: what is freed, what it costs, and why not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import stepscope
from stepscope.errors import NotCapturedError, StepscopeError

RELU_BYTES = 400_000_000


@pytest.fixture
def run(golden: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(golden / "h200-resnet18", folder)
    return folder


def write_producers(run: Path, *rows: dict[str, Any], **more: Any) -> None:
    file = run / "rank-00000" / "memory.json"
    content = json.loads(file.read_text()) if file.exists() else {}
    content |= {"activations_by_producer": list(rows), **more}
    file.write_text(json.dumps(content))


def row(producer: str, size_bytes: int, free_bytes: int = 0) -> dict[str, Any]:
    return {"producer": producer, "bytes": size_bytes, "free_bytes": free_bytes, "tensors": 1}


MEMORY = {
    "schema": 1,
    "device": "cuda",
    "categories": {"parameters": 45_000_000, "activations": 900_000_000},
    "peak": {
        "allocated_bytes": 1_200_000_000,
        "reserved_bytes": 1_300_000_000,
        "phase": "backward",
        "measured": "made up",
        "categories": {},
    },
}


def test_what_relu_made_is_freed_for_its_forward_time(run: Path) -> None:
    rows = (row("Convolution", 500_000_000), row("Relu", RELU_BYTES, RELU_BYTES))
    write_producers(run, *rows, **MEMORY)
    prediction = stepscope.whatif(run, "save-memory=max")
    assert not prediction.refused
    assert prediction.baseline_ms < prediction.predicted_ms < 1.3 * prediction.baseline_ms
    # All but a tenth, which is there while it is made again.
    assert prediction.peak_bytes == 1_200_000_000 - 0.9 * RELU_BYTES
    low, high = prediction.peak_low_bytes, prediction.peak_high_bytes
    assert low is not None
    assert high is not None
    assert low < prediction.peak_bytes < high


def test_a_slowdown_limits_what_is_freed(run: Path) -> None:
    rows = (row("Convolution", 500_000_000), row("Relu", RELU_BYTES, RELU_BYTES))
    write_producers(run, *rows, **MEMORY)
    free = stepscope.whatif(run, "save-memory=max")
    little = stepscope.whatif(run, "save-memory=0.5%")
    assert little.predicted_ms <= free.predicted_ms
    assert little.peak_bytes is not None
    assert free.peak_bytes is not None
    assert little.peak_bytes > free.peak_bytes


@pytest.mark.parametrize(
    ("rows", "value", "words"),
    [
        ((), "max", "were not captured"),
        ((row("Convolution", 10**8),), "max", "nothing here is cheap to recompute"),
        ((row("CompiledFunction", 10**8, 0),), "max", "the compiler already frees this"),
        ((row("Relu", 10**8, 10**8),), "100GB", "fits as it is"),
    ],
)
def test_why_not(run: Path, rows: tuple[Any, ...], value: str, words: str) -> None:
    write_producers(run, *rows, **MEMORY)
    with pytest.raises(NotCapturedError, match=words):
        stepscope.whatif(run, f"save-memory={value}")


def test_weights_that_dominate_are_named(run: Path) -> None:
    heavy = {**MEMORY, "categories": {"parameters": 10**10, "activations": 10**8}}
    heavy["peak"] = {**MEMORY["peak"], "categories": {}}  # type: ignore[dict-item]
    heavy["peak"]["categories"] = {"parameters": 10**10}  # type: ignore[index]
    write_producers(run, row("Convolution", 10**8), **heavy)
    with pytest.raises(NotCapturedError, match="Weights dominate"):
        stepscope.whatif(run, "save-memory=max")


def test_a_wrong_target_is_a_wrong_use(run: Path) -> None:
    with pytest.raises(StepscopeError, match="is no target"):
        stepscope.whatif(run, "save-memory=some")


def test_a_run_made_with_it_is_told_apart(run: Path) -> None:
    write_producers(run, row("Relu", 10**8, 10**8), **MEMORY)
    (run / "rank-00000" / "memory-plan.json").write_text('{"schema": 1, "target": "5%"}')
    with pytest.raises(NotCapturedError, match="already used it"):
        stepscope.whatif(run, "save-memory=max")
