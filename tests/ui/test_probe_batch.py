"""Operators timed with another batch, and what a what-if makes of that."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from stepscope.errors import UsageError
from stepscope.predict.operator_library import find_probed_batch, grown_operators, software_of
from stepscope.predict.step_operators import TracedCall, find_step_operators, grow_calls
from stepscope.predict.whatifs import parse_setting
from stepscope.records.hardware import ProbedDevice
from stepscope.ui.api import open_bench
from stepscope.ui.probe import probe_step

if TYPE_CHECKING:
    from pathlib import Path

H200 = ProbedDevice(kind="cuda", device="NVIDIA H200")


class ProportionalProber:
    """Every call takes as long as its first tensor has rows, and two rows more."""

    def __init__(self, device: ProbedDevice) -> None:
        self._device = device

    def device(self) -> ProbedDevice:
        return self._device

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert seconds > 0
        first = next((dims for dims in request["shapes"] if dims), [1])
        first = first[0] if isinstance(first[0], list) else first
        if request["do"] == "describe":
            return {"outputs": [[first, "float", True]]}
        timing = {"ns": 1000.0 * (first[0] + 2), "spread": 0.01, "repeats": 9}
        return {"forward": timing, "backward": timing}


@pytest.fixture
def bench(golden: Path) -> Any:
    return open_bench(str(golden / "h200-resnet18"), cache=False, quiet=True)[0]


def probe(bench: Any, *changes: str) -> Any:
    versions = dict(part.split(" ", 1) for part in software_of(bench.context))
    prober = ProportionalProber(replace(H200, **versions))
    return probe_step(bench.context, changes, prober, budget_s=1e6)


def test_a_batch_is_timed_and_used(bench: Any) -> None:
    assert find_probed_batch(bench.context, 2.0) == (None, "")
    batch = bench.context.batch
    report = probe(bench, "batch=x2")
    convolution = next(row for row in report.operators if row.name == "aten::conv2d")
    assert json.loads(convolution.shapes)[0][0] == batch  # the table names the call as traced
    grown_ms = convolution.modes_ms["batch=x2"]
    assert grown_ms / convolution.probed_ms == pytest.approx((2 * batch + 2) / (batch + 2))
    prediction = bench.predict([parse_setting("batch=x2")])
    assert "operator times" in " ".join(prediction.assumptions)


def test_a_neighbour_in_proportion_does_not_stand_for_another_batch(bench: Any) -> None:
    probe(bench)
    plain, _ = find_probed_batch(bench.context, 2.0)
    assert plain is None or plain.probed_share < 0.5
    assert plain is None or plain.remembered_share == 0.0


def test_more_samples_never_take_less_time(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first probe beside other programs, a second one without them."""
    measure = ProportionalProber.ask

    def noisy(self: Any, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        answer = measure(self, request, seconds)
        first = next((dims for dims in request["shapes"] if dims), [0])
        if "forward" in answer and first[0] == bench.context.batch:
            answer["forward"] = {**answer["forward"], "ns": 1e9}
        return answer

    monkeypatch.setattr(ProportionalProber, "ask", noisy)
    probe(bench, "batch=x2")
    probed, _ = find_probed_batch(bench.context, 2.0)
    assert probed is not None
    assert probed.factor.min() >= 1.0
    assert probed.factor.max() <= 3.0


def test_another_gpu_or_precision_is_not_what_was_probed(bench: Any) -> None:
    probe(bench, "batch=x2")
    together = bench.predict([parse_setting("batch=x2"), parse_setting("gpu=L4")])
    assert "operator times" not in " ".join(together.assumptions)


def test_a_batch_without_ground_is_left_out_and_said(bench: Any) -> None:
    odd = probe(bench, "batch=x1.01")
    assert odd.modes == ()
    assert any("batch=x1.01 is not timed" in note for note in odd.notes)
    with pytest.raises(UsageError, match="give a number of samples"):
        probe(bench, "batch=many")


def call(name: str, shapes: list[Any], strides: list[Any], concrete: list[str]) -> TracedCall:
    return TracedCall(
        name=name,
        shapes=tuple(shapes),
        strides=tuple(strides),
        dtypes=("float",) * len(shapes),
        concrete=tuple(concrete),
    )


def test_sides_that_hold_samples_grow() -> None:
    """Rows of tokens, heads beside samples, sequences first; weights and channels last stay."""
    linear = call("aten::linear", [[32, 16], [64, 16]], [[16, 1], [16, 1]], ["", ""])
    later = call("aten::add", [[7, 4, 16]], [[64, 16, 1]], [""])
    image = call("aten::conv2d", [[4, 3, 8, 8]], [[192, 1, 24, 3]], [""])
    turned = call("aten::mul", [[4, 5]], [[1, 4]], [""])
    view = call("aten::view", [[4, 96, 16], []], [[1536, 16, 1], []], ["", "[384, 16]"])
    listed = call("aten::cat", [[[4, 3], [4, 5]], []], [[[3, 1], [5, 1]], []], ["", "1"])
    optimizer = replace(linear, in_forward=False)
    calls = grow_calls(
        [linear, later, image, turned, view, listed, optimizer], {(64, 16)}, batch=4, factor=2.0
    )
    assert calls[0].shapes == ([64, 16], [64, 16])
    assert (calls[1].shapes, calls[1].strides) == (([7, 8, 16],), ([128, 16, 1],))
    assert (calls[2].shapes, calls[2].strides) == (([8, 3, 8, 8],), ([192, 1, 24, 3],))
    assert (calls[3].shapes, calls[3].strides) == (([8, 5],), ([1, 8],))
    assert calls[4].concrete == ("", "[768, 16]")
    assert calls[5].shapes == ([[8, 3], [8, 5]], [])
    assert calls[6] is optimizer


def test_weights_of_experts_keep_their_shapes_also_transposed() -> None:
    """As many experts as samples: their rows grow, their weights and where groups end do not."""
    experts = call(
        "aten::_grouped_mm",
        [[64, 16], [4, 16, 32], [4]],
        [[16, 1], [512, 1, 16], [1]],
        ["", "", ""],
    )
    product = call("aten::bmm", [[4, 5, 16], [4, 16, 32]], [[80, 16, 1], [512, 1, 16]], ["", ""])
    grouped, batched = grow_calls([experts, product], {(4, 32, 16)}, batch=4, factor=2.0)
    assert grouped.shapes == ([128, 16], [4, 16, 32], [4])
    assert batched.shapes == ([8, 5, 16], [4, 16, 32])


def test_calls_whose_shapes_stay_are_left_to_the_model(bench: Any) -> None:
    """A graph's nodes beside its edges: which is the batch is not known, and both grow."""
    probe(bench, "batch=x2")
    probed, _ = find_probed_batch(bench.context, 2.0)
    operators = find_step_operators(bench.context)
    grown = grown_operators(bench.context, operators, 2.0)
    assert probed is not None
    assert grown is not None
    stays = np.array([one == two for one, two in zip(operators.calls, grown.calls, strict=True)])
    mine = operators.owner >= 0
    assert stays[operators.owner[mine]].any()
    assert not probed.known[mine][stays[operators.owner[mine]]].any()
