"""long-recurrence: backward through time, by what operators are called and given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import stepscope
from stepscope.explain.recurrences import StepWindow, find_recurrences
from stepscope.records.explanation import Finding
from stepscope.records.scan_costs import gpu_layer_us

from .build import AUTOGRAD, Events, call, kernel, op, step, write

STEPS, BATCH, SIZE = 130, 4, 6


def recorded(path: Path, train: Callable[[], Any]) -> Path:
    """Two training steps of a real module on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for number in range(2):
            with record_function(f"ProfilerStep#{number}"):
                train().sum().backward()
    profiler.export_chrome_trace(str(path))
    return path


def by_hand(shared: bool) -> Callable[[], Any]:
    """One recurrent weight, or as many layers as steps with weights of their own."""
    below = nn.Linear(3, SIZE)
    recurrent = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(1 if shared else STEPS))

    def forward() -> torch.Tensor:
        state = torch.zeros(BATCH, SIZE)
        for place, given in enumerate(torch.randn(STEPS, BATCH, 3)):
            state = torch.tanh(below(given) + recurrent[place % len(recurrent)](state))
        return state

    return forward


def cells(cell: nn.Module) -> Callable[[], Any]:
    def forward() -> torch.Tensor:
        state = torch.zeros(BATCH, SIZE)
        for given in torch.randn(STEPS, BATCH, 3):
            state = cell(given, state)
        return state

    return forward


def layers(rnn: nn.Module) -> Callable[[], Any]:
    shape = (BATCH, STEPS, 3) if rnn.batch_first else (STEPS, BATCH, 3)
    return lambda: rnn(torch.randn(shape))[0]


def packed(rnn: nn.Module) -> Callable[[], Any]:
    def forward() -> torch.Tensor:
        lengths = torch.full((BATCH,), STEPS)
        given = nn.utils.rnn.pack_padded_sequence(torch.randn(STEPS, BATCH, 3), lengths)
        last: torch.Tensor = rnn(given)[1]
        return last

    return forward


Case = tuple[str, "Callable[[], Callable[[], Any]]", tuple[Any, ...]]
QUICK: list[Case] = [
    ("batch first", lambda: layers(nn.RNN(3, SIZE, batch_first=True)), ("layer", "tanh", 3, 1)),
    ("lstm", lambda: layers(nn.LSTM(3, SIZE)), ("layer", "lstm", 3, 1)),
    ("cells", lambda: cells(nn.RNNCell(3, SIZE)), ("cells", "tanh", 3, 1)),
    ("loop", lambda: by_hand(shared=True), ("loop", "tanh", SIZE, 1)),
]
LONGER: list[Case] = [
    ("layers", lambda: layers(nn.RNN(3, SIZE, 2, bidirectional=True)), ("layer", "tanh", 3, 4)),
    ("relu", lambda: layers(nn.RNN(3, SIZE, nonlinearity="relu")), ("layer", "relu", 3, 1)),
    ("gru", lambda: layers(nn.GRU(3, SIZE)), ("layer", "gru", 3, 1)),
    ("packed", lambda: packed(nn.RNN(3, SIZE)), ("layer", "tanh", 3, 1)),
    ("gru cells", lambda: cells(nn.GRUCell(3, SIZE)), ("cells", "gru", 3, 1)),
]
CASES = [
    *(pytest.param(*case[1:], id=case[0]) for case in QUICK),
    *(pytest.param(*case[1:], id=case[0], marks=pytest.mark.slow) for case in LONGER),
]


@pytest.mark.parametrize(("make", "wanted"), CASES)
def test_shapes_say_what_recurs(
    tmp_path: Path, make: Callable[[], Callable[[], Any]], wanted: tuple[Any, ...]
) -> None:
    trace = stepscope.read_trace(recorded(tmp_path / "trace.json", make()))
    window = StepWindow(start_ns=0, end_ns=1 << 62, steps=2)
    (found,) = [one.recurrence for one in find_recurrences(trace, window)]
    assert (found.form, found.cell, found.features, found.layers) == wanted
    assert (found.steps, found.batch, found.size) == (STEPS, BATCH, SIZE)


def test_as_many_layers_with_weights_of_their_own_are_no_recurrence(tmp_path: Path) -> None:
    trace = stepscope.read_trace(recorded(tmp_path / "trace.json", by_hand(shared=False)))
    assert not find_recurrences(trace, StepWindow(start_ns=0, end_ns=1 << 62, steps=2))


def finding(path: Path) -> Finding | None:
    found = [one for one in stepscope.explain(path).findings if one.id == "long-recurrence"]
    return found[0] if found else None


def test_a_real_rnn_on_the_cpu(tmp_path: Path) -> None:
    found = finding(recorded(tmp_path / "trace.json", layers(nn.RNN(3, SIZE))))
    assert found is not None
    assert "backward pass through 130 steps of a plain RNN (tanh)" in found.summary
    assert found.share > 0.3
    remedies = {remedy.id: remedy for remedy in found.remedies}
    assert set(remedies) == {"truncate-backward", "scan-backward"}
    assert all("gradient_horizon" in remedy.summary for remedy in found.remedies)
    assert remedies["scan-backward"].predicted_ms


def test_a_loop_is_a_guess_and_says_so(tmp_path: Path) -> None:
    found = finding(recorded(tmp_path / "trace.json", by_hand(shared=True)))
    assert found is not None
    assert found.severity == "low"
    assert "a guess from shapes" in found.evidence[-1]


def cudnn(steps: int, backward_us: float, layer: str = "rnn_tanh", gates: int = 1) -> Events:
    """Three training steps of 10 ms: forward 1 ms, and so much in backward."""
    made: Events = []
    state = [1, 16, 20]
    dims = [
        [steps, 16, 8],
        [state, state] if gates == 4 else state,
        [[20 * gates, 8], [20 * gates, 20]],
    ]
    concrete = ["", "", "", "False", "1", "0.", "True", "False", "False"]
    for number in range(3):
        at, sequence = number * 10_000.0, 50 + number
        made += step(number, start=at, dur=10_000)
        made += op(f"aten::{layer}", start=at + 10, dur=90, shapes=dims, concrete=concrete)
        made += op("aten::_cudnn_rnn", start=at + 20, dur=70, shapes=dims, sequence=sequence)
        made += kernel("rnn_forward", start=at + 60, dur=1_000, launched_at=at + 40)
        node = "CudnnRnnBackward0"
        made += op(
            f"autograd::engine::evaluate_function: {node}",
            start=at + 200,
            dur=90,
            thread=AUTOGRAD,
            sequence=sequence,
            forward_thread=1,
            shapes=[],
        )
        made += op(
            node,
            start=at + 205,
            dur=80,
            thread=AUTOGRAD,
            sequence=sequence,
            forward_thread=1,
            shapes=[[steps, 16, 20]],
        )
        made += kernel(
            "rnn_backward", start=at + 1_100, dur=backward_us, launched_at=at + 220, thread=AUTOGRAD
        )
        made += call("cudaDeviceSynchronize", start=at + 300, dur=9_650)
    return made  # fmt: skip


def test_cudnns_kernels(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", cudnn(4096, 8_500), device="NVIDIA H200")
    found = finding(path)
    assert found is not None
    assert found.share == pytest.approx(0.85, abs=0.03)
    assert "4,096 steps, batch 16, state of 20" in found.evidence[0]
    assert found.severity == "high"


def test_the_what_if_leaves_what_the_model_of_the_kernels_says(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", cudnn(4096, 8_500), device="NVIDIA H200")
    prediction = stepscope.whatif(path, "scan")
    kernels_ms = gpu_layer_us(4096, 16, 20, 8, 132) / 1e3
    assert prediction.predicted_ms == pytest.approx(10 - 8.5 + kernels_ms, abs=0.3)
    assert prediction.low_ms < prediction.predicted_ms < prediction.high_ms
    assert "gradient_horizon" in prediction.assumptions[0]


def test_the_what_if_prefers_what_was_measured_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of 9.5 ms: 4.75 ms less. Between 2048 and 8192 steps it is the middle."""
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path))
    table = {"2048 16 20 8 tanh": "[4.0, 1.0]", "8192 16 20 8 tanh": "[1.0, 1.0]", "9 x": "?"}
    file = tmp_path / "scan-NVIDIA-H200-torch-2.11.json"
    file.write_text(json.dumps({"schema": 1, "choices": table}))
    path = write(tmp_path / "t.json", cudnn(4096, 8_500), device="NVIDIA H200")
    prediction = stepscope.whatif(path, "scan")
    assert prediction.predicted_ms == pytest.approx(10 - 9.5 / 2, abs=0.3)
    assert any("measured on this GPU" in each for each in prediction.assumptions)


def test_the_what_if_of_an_lstm_rests_on_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path))
    file = tmp_path / "scan-NVIDIA-H200-torch-2.11.json"
    choices = {"4096 16 20 8 lstm": "[4.0, 2.0]"}
    file.write_text(json.dumps({"schema": 1, "choices": choices}))
    path = write(tmp_path / "t.json", cudnn(4096, 8_500, "lstm", 4), device="NVIDIA H200")
    assert stepscope.whatif(path, "scan").predicted_ms == pytest.approx(10 - 9.5 / 2, abs=0.3)


@pytest.mark.parametrize(
    ("events", "why"),
    [
        (("lstm", 4, 4096, 8_500), "of a scan of an LSTM or a GRU of this shape is unknown"),
        (("rnn_tanh", 1, 100, 8_500), "no recurrence of 128 steps"),
    ],
)
def test_the_what_if_refuses(tmp_path: Path, events: tuple[str, int, int, float], why: str) -> None:
    layer, gates, steps, backward_us = events
    path = write(tmp_path / "t.json", cudnn(steps, backward_us, layer, gates), device="NVIDIA H200")
    with pytest.raises(stepscope.StepscopeError, match=why):
        stepscope.whatif(path, "scan")


def test_where_the_scan_loses_the_step_is_predicted_longer_and_no_remedy_offered(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "t.json", cudnn(4096, 400), device="NVIDIA H200")
    prediction = stepscope.whatif(path, "scan")
    assert prediction.predicted_ms > prediction.baseline_ms
    assert any("not worth it for 4,096 steps" in words for words in prediction.assumptions)
    found = finding(path)
    assert found is not None
    assert [remedy.id for remedy in found.remedies] == ["truncate-backward"]


def test_gated_cells_are_offered_truncation_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", cudnn(4096, 8_500, "lstm", 4), device="NVIDIA H200")
    found = finding(path)
    assert found is not None
    assert "an LSTM" in found.summary
    assert [remedy.id for remedy in found.remedies] == ["truncate-backward"]


@pytest.mark.parametrize(("steps", "backward_us"), [(100, 5_000), (4096, 100)])
def test_short_or_cheap_recurrences_are_fine(
    tmp_path: Path, steps: int, backward_us: float
) -> None:
    path = write(tmp_path / "t.json", cudnn(steps, backward_us), device="NVIDIA H200")
    assert finding(path) is None
