"""Calls whose whole numbers kernels check, slow calls, and calls that are only described."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepscope.measure.probe.arguments import Recorded, build_arguments, find_operator  # noqa: E402
from stepscope.measure.probe.timing import ProbedCall  # noqa: E402

CPU = torch.device("cpu")
BAG = {
    "name": "aten::embedding_bag",
    "shapes": [[50, 8], [96], [32], [], [], [], [], [], []],
    "dtypes": ["float", "long int", "long int", *["Scalar"] * 3, "", "Scalar", ""],
    "concrete": ["", "", "", "False", "1", "False", "", "False", ""],
}
PACK = {
    "name": "aten::_pack_padded_sequence",
    "shapes": [[6, 11, 8], [6], []],
    "dtypes": ["float", "long int", "Scalar"],
    "concrete": ["", "", "True"],
}
LSTM = {
    "name": "aten::lstm",
    "shapes": [
        [40, 8],
        [11],
        [[1, 6, 4], [1, 6, 4]],
        [[16, 8], [16, 4], [16], [16]],
        *([] for _ in range(5)),
    ],
    "dtypes": ["float", "long int", "TensorList", "TensorList", *["Scalar"] * 5],
    "concrete": ["", "", "", "", "True", "1", "0.", "True", "False"],
}


@pytest.mark.parametrize("request_", [BAG, PACK, LSTM], ids=["bags", "packing", "packed lstm"])
def test_bags_and_packed_sequences_can_be_called_again(request_: dict[str, Any]) -> None:
    assert ProbedCall(request_, CPU).measure(0.01, backward=False)["forward"]["ns"] > 0


def test_packed_rows_are_all_there_and_never_grow() -> None:
    recorded = Recorded(LSTM)
    arguments, _ = build_arguments(find_operator(recorded), recorded, CPU)
    sizes = arguments[1].tolist()
    assert sum(sizes) == 40
    assert sizes[0] == 6
    assert sizes == sorted(sizes, reverse=True)


def test_the_start_of_a_library_is_no_time_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a slow call the shorter of two times counts; a very slow one is made once."""
    linear = {"name": "aten::linear", "shapes": [[4, 8], [3, 8], []], "dtypes": ["float"] * 2}
    call = ProbedCall({**linear, "dtypes": ["float", "float", ""]}, CPU)
    times = iter([3e9, 1.5e9, 2e10])
    monkeypatch.setattr(ProbedCall, "_first_ns", lambda *_: next(times))
    assert call.measure(0.01, backward=False)["forward"]["ns"] == 1.5e9
    assert call.measure(0.01, backward=False)["forward"]["ns"] == 2e10


def test_a_call_is_described_without_running_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that no machine could hold; what depends on values is run after all."""
    monkeypatch.setattr("stepscope.measure.probe.timing.free_bytes", lambda _: 1 << 60)
    huge = {
        "name": "aten::mm",
        "shapes": [[1 << 20, 1 << 20], [1 << 20, 1 << 20]],
        "dtypes": ["float", "float"],
        "concrete": ["", ""],
        "grads": [True, False],
        "mode": "bf16",
    }
    answer = ProbedCall.describe_cheaply(huge, CPU)
    assert answer == {"outputs": [[[1 << 20, 1 << 20], "c10::BFloat16", True]]}
    chosen = {"name": "aten::nonzero", "shapes": [[3]], "dtypes": ["bool"], "concrete": [""]}
    assert ProbedCall.describe_cheaply(chosen, CPU)["outputs"][0][1] == "long int"


@pytest.mark.parametrize(
    ("left", "right", "ends"),
    [
        ([12, 8], [3, 8, 5], [4, 8, 12]),  # rows of experts
        ([8, 12], [12, 5], [4, 8, 12]),  # gradients of their weights
        ([3, 5, 8], [8, 12], [4, 8, 12]),
    ],
)
def test_groups_of_rows_are_of_one_size(left: list[int], right: list[int], ends: list[int]) -> None:
    request = {
        "name": "aten::_grouped_mm",
        "shapes": [left, right, [3], [], []],
        "dtypes": ["float", "float", "int", "", ""],
    }
    recorded = Recorded(request)
    arguments, _ = build_arguments(find_operator(recorded), recorded, CPU)
    assert arguments[2].tolist() == ends


def test_a_number_is_not_a_dimensions_name() -> None:
    """Some torch versions list the form that takes names first."""
    library = torch.library.Library("stepscope_probe_test", "DEF")
    library.define("pick.name(Tensor self, str dim, int index) -> Tensor")
    library.define("pick.int(Tensor self, int dim, int index) -> Tensor")
    request = {
        "name": "stepscope_probe_test::pick",
        "shapes": [[6, 1, 8], [], []],
        "dtypes": ["float", "Scalar", "Scalar"],
        "concrete": ["", "1", "0"],
    }
    assert find_operator(Recorded(request))._overloadname == "int"


def test_a_reduction_by_index_is_taken_for_a_maximum() -> None:
    """A trace has no texts; gradients of both inputs are timed."""
    request = {
        "name": "aten::scatter_reduce_",
        "shapes": [[6, 4], [], [30, 4], [30, 4], [], []],
        "dtypes": ["float", "Scalar", "long int", "float", "", "Scalar"],
        "concrete": ["", "0", "", "", "", "False"],
        "grads": [False, False, False, True, False, False],
    }
    answer = ProbedCall(request, CPU).measure(0.01)
    assert answer["forward"]["ns"] > 0
    assert answer["backward"]["ns"] > 0
