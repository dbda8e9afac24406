"""Calls rebuilt from what a trace says of them, and kernels told apart by marks."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepscope.measure.probe.arguments import Recorded, find_operator  # noqa: E402
from stepscope.measure.probe.timing import ProbedCall, split_by_marks  # noqa: E402

CPU = torch.device("cpu")
LISTS = [[[4, 3], [5]], [[4, 3], [5]], [[4, 3], [5]]]


def call(name: str, shapes: Any, dtypes: Any, concrete: Any, mode: str = "") -> ProbedCall:
    request = {"name": name, "shapes": shapes, "dtypes": dtypes, "concrete": concrete}
    return ProbedCall({**request, "mode": mode}, CPU)


def test_only_kernels_between_marks_count() -> None:
    spin = "void at::cuda::spin_kernel(long)"
    kernels = [(0, 5, "fill"), (10, 1, spin), (20, 7, "gemm"), (30, 2, "add"), (40, 1, spin)]
    kernels += [(50, 9, "fill"), (60, 1, spin), (70, 8, "gemm"), (80, 1, spin)]
    assert split_by_marks(kernels[::-1], 2) == [9.0, 8.0]
    assert split_by_marks(kernels, 3) is None


def test_an_optimizer_update_whose_factors_are_not_recorded() -> None:
    dtypes = ["TensorList", "TensorList", "TensorList", ""]
    update = call("aten::_foreach_addcdiv_", [*LISTS, []], dtypes, [""] * 4)
    assert update.measure(0.01, backward=False)["forward"]["ns"] > 0
    recorded = Recorded(
        {"name": "aten::_foreach_addcdiv_", "shapes": [*LISTS, []], "dtypes": dtypes}
    )
    assert find_operator(recorded)._overloadname == "ScalarList"


def test_a_fused_update_has_counters_and_no_third_moment() -> None:
    lists = [LISTS[0]] * 6
    numbers = ["0.001", "0.9", "0.999", "0.01", "1e-8", "False", "False"]
    shapes, dtypes = [*lists, *[[]] * 9], ["TensorList"] * 6 + ["Scalar"] * 7 + ["", ""]
    update = call("aten::_fused_adamw_", shapes, dtypes, [""] * 6 + numbers + ["", ""])
    assert update.measure(0.01, backward=False)["backward"] is None


def test_tensors_of_a_list_have_the_dtype_that_the_request_names() -> None:
    shapes = [[[2, 3], [2, 4]], []]
    joined = call("aten::cat", shapes, ["TensorList[c10::BFloat16]", "Scalar"], ["", "1"])
    assert joined.describe() == {"outputs": [[[2, 7], "c10::BFloat16", False]]}


def test_the_host_time_is_known_for_both_passes() -> None:
    request = {"name": "aten::linear", "shapes": [[4, 8], [3, 8], [3]], "grads": [True, True, True]}
    linear = ProbedCall({**request, "dtypes": ["float"] * 3, "mode": "bf16"}, CPU)
    assert linear.measure_host()["host_ns"] > 0
    assert linear.measure(0.01)["backward"]["ns"] > 0
    assert linear.measure(0.01, backward=False)["backward"] is None


def test_the_host_is_timed_by_calls_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the device between them would leave it cold."""
    waits: list[None] = []
    relu = call("aten::relu", [[4, 8]], ["float"], [""])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(None))
    assert relu.measure_host()["host_ns"] > 0
    assert len(waits) == 1


def test_a_mode_is_set_for_its_call_only() -> None:
    from stepscope.measure.probe.timing import math_mode

    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark
    with math_mode("tf32+benchmark"):
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.benchmark
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark) == before
