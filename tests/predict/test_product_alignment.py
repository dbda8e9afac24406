"""Products whose rows start at odd addresses: a vocabulary of 50,257."""

from __future__ import annotations

import json

import numpy as np
import pytest

from stepscope.predict.kernel_costs import Family, roofline_ns
from stepscope.predict.tensor_cores import read_row_length, written_row_length
from stepscope.records.hardware import Ceilings

ROWS, WIDTH = 4096, 768
CEILINGS = Ceilings(
    device="NVIDIA H200",
    flops={"tf32": 494.7e12, "bf16": 989.4e12},
    bytes_s=4.8e12,
    flops_source={"tf32": "table", "bf16": "table"},
    bytes_source="table",
    source="data sheet",
)


@pytest.mark.parametrize("words", [50257, 30522])
def test_rows_are_those_of_the_operands_and_of_the_result(words: int) -> None:
    # Logits: the weight is stored by words and read transposed; only the result's rows are odd.
    assert read_row_length(json.dumps([[WIDTH, 1], [1, WIDTH]])) == WIDTH
    assert written_row_length(json.dumps([[ROWS, WIDTH], [WIDTH, words]])) == words
    # Gradient of the weight: the logits' gradient is read transposed, in rows of all words.
    assert read_row_length(json.dumps([[1, words], [WIDTH, 1]])) == np.gcd(words, WIDTH)
    assert written_row_length(json.dumps([[words, ROWS], [ROWS, WIDTH]])) == WIDTH


def test_biases_numbers_and_missing_strides_say_nothing() -> None:
    assert read_row_length(json.dumps([[1], [WIDTH, 1], [1, WIDTH], [], []])) == WIDTH
    assert read_row_length(json.dumps([[], []])) == 0
    assert written_row_length(json.dumps([[], []])) == 0


@pytest.mark.parametrize(
    ("words", "dtype", "item_bytes", "measured_ms"),
    [
        (30522, "bf16", 2, (0.846, 1.758)),
        (30522, "tf32", 4, (1.500, 3.337)),
        (51865, "tf32", 4, (0.356, 0.761)),  # of 512 rows
    ],
)
def test_unaligned_products_take_what_was_measured(
    words: int, dtype: str, item_bytes: int, measured_ms: tuple[float, float]
) -> None:
    rows = 512 if words == 51865 else ROWS
    flops = 2.0 * rows * WIDTH * words
    alignment = np.gcd(np.array([words * item_bytes]), 16).astype(np.int32)
    for passes, backward in ((1, False), (2, True)):
        said = roofline_ns(
            Family.MATMUL,
            np.array([flops]),
            np.zeros(1),
            dtype,
            CEILINGS,
            backward=backward,
            alignment=alignment,
        )
        assert passes * said[0] / 1e6 == pytest.approx(measured_ms[backward], rel=0.12)


def test_aligned_rows_change_nothing() -> None:
    flops, moved = np.array([1e12]), np.zeros(1)
    plain = roofline_ns(Family.MATMUL, flops, moved, "bf16", CEILINGS, backward=False)
    aligned = roofline_ns(
        Family.MATMUL,
        flops,
        moved,
        "bf16",
        CEILINGS,
        backward=False,
        alignment=np.array([16], np.int32),
    )
    assert aligned == plain
