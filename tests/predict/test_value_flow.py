"""Dtypes of inputs in another precision, followed by shapes."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from stepscope.predict.step_operators import TracedCall, follow_values
from stepscope.records.hardware import OperatorCall, Output

PARAMETERS = {(32, 64), (32,), (64, 32)}
BF16 = "c10::BFloat16"


def call(name: str, *shapes: list[int], dtype: str = "float") -> TracedCall:
    return TracedCall(
        name=name,
        shapes=shapes,
        strides=(),
        dtypes=tuple(dtype for _ in shapes),
        concrete=tuple("" for _ in shapes),
    )


def autocast(made: OperatorCall) -> list[Output]:
    """Products return bf16, sums the widest of their inputs, norms fp32."""
    shape = tuple(json.loads(made.shapes)[0])
    dtypes = json.loads(made.dtypes)
    if made.name == "aten::linear":
        return [Output((*shape[:-1], json.loads(made.shapes)[1][0]), BF16, True)]
    widest = "float" if "float" in dtypes or made.name == "aten::layer_norm" else BF16
    return [Output(shape, widest, True)]


def dtypes(made: OperatorCall) -> Any:
    return json.loads(made.dtypes)


def test_what_follows_a_product_is_narrow_and_weights_stay_wide() -> None:
    first = call("aten::linear", [8, 64], [32, 64], [32])
    activation = call("aten::relu", [8, 32])
    second = call("aten::linear", [8, 32], [64, 32])
    made = follow_values([first, activation, second], PARAMETERS, "bf16", autocast)
    assert dtypes(made[0]) == ["float"] * 3
    assert dtypes(made[1]) == [BF16]
    assert dtypes(made[2]) == [BF16, "float"]


def test_a_sum_joins_a_product_with_a_wide_residual_stream() -> None:
    norm = call("aten::layer_norm", [8, 64])
    up = call("aten::linear", [8, 64], [32, 64])
    down = call("aten::linear", [8, 32], [64, 32])
    sum_ = call("aten::add", [8, 64], [8, 64])
    made = follow_values([norm, up, down, sum_], PARAMETERS, "bf16", autocast)
    assert sorted(dtypes(made[3])) == sorted([BF16, "float"])


def test_data_needs_no_gradient_parameters_and_what_comes_from_them_do() -> None:
    first = call("aten::linear", [8, 64], [32, 64], [32])
    made = follow_values([first, call("aten::relu", [8, 32])], PARAMETERS, "", autocast)
    assert [entry.grads for entry in made] == ["011", "1"]


def test_as_traced_keeps_the_traces_dtypes() -> None:
    first = call("aten::linear", [8, 64], [32, 64])
    made = follow_values([first, call("aten::relu", [8, 32])], PARAMETERS, "", autocast)
    assert dtypes(made[1]) == ["float"]


def test_whole_numbers_are_not_followed() -> None:
    index = call("aten::embedding", [8, 32], dtype="long int")
    first = call("aten::linear", [8, 64], [32, 64])
    made = follow_values([first, index], PARAMETERS, "bf16", autocast)
    assert dtypes(made[1]) == ["long int"]
    assert made[1].grads == "0"


def test_where_the_graph_says_what_a_call_reads_that_decides() -> None:
    """An fp32 copy of the product's result has its shape, and is not what is read."""
    product = call("aten::linear", [8, 64], [32, 64], [32])
    copied = call("aten::layer_norm", [8, 32])
    reads_product = msgspec.structs.replace(call("aten::relu", [8, 32]), widths=(2,))
    calls = [product, copied, reads_product]
    assert dtypes(follow_values(calls, PARAMETERS, "bf16", autocast)[2]) == [BF16]
    assert dtypes(follow_values(calls, PARAMETERS, "tf32", autocast)[2]) == ["float"]


def test_what_the_graph_has_an_edge_to_needs_a_gradient() -> None:
    """Also where nobody could say what made it."""
    linear = call("aten::linear", [9, 64], [32, 64], [32])
    reads = msgspec.structs.replace(linear, widths=(2, 0, 0))
    made = follow_values([linear, reads], PARAMETERS, "", lambda _: None)
    assert [entry.grads for entry in made] == ["011", "111"]
