"""A first dimension that may not be the number of samples."""

from __future__ import annotations

from typing import Any

import pytest

import stepscope
from stepscope.explain.memory.model import ShapedCall, StepCalls
from stepscope.predict.step_context import BatchReading, read_batch


def operator(name: str, shapes: list[Any], start: int) -> dict[str, Any]:
    args = {"Input Dims": shapes, "Input type": ["float"] * len(shapes)}
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": 5} | {
        "args": args
    }


@pytest.fixture
def reading(write_trace: Any) -> Any:
    def read(*calls: tuple[str, list[Any]]) -> BatchReading | None:
        events = [operator(name, shapes, 10 * n) for n, (name, shapes) in enumerate(calls)]
        shaped = [
            ShapedCall(name, tuple(shapes), ("float",) * len(shapes)) for name, shapes in calls
        ]
        step = StepCalls(calls=tuple(shaped), cast_bytes=0)
        return read_batch(stepscope.read_trace(write_trace(events)), step)

    return read


LINEAR = ("aten::linear", [[20_000, 16], [64, 16], [64]])


def test_a_plain_batch_is_not_doubted(reading: Any) -> None:
    linear = ("aten::linear", [[32, 16], [64, 16]])
    found = reading(linear, ("aten::cross_entropy_loss", [[32, 10], [32]]))
    assert (found.size, found.doubt) == (32, "")
    tokens = reading(("aten::embedding", [[100, 16], [4, 128]]), ("aten::linear", [[4, 128, 16]]))
    assert (tokens.size, tokens.doubt) == (4, "")


def test_the_nodes_of_a_graph_are_no_batch(reading: Any) -> None:
    found = reading(LINEAR, ("aten::index_select", [[20_000, 64], [], [90_000]]))
    assert found.size == 20_000
    assert "picks rows of a table of 20,000" in found.doubt


def test_one_whole_graph_is_told_from_batches_of_graphs(reading: Any) -> None:
    picks = ("aten::index_select", [[20_000, 64], [], [90_000]])
    assert reading(LINEAR, picks, ("aten::index_select", [[20_000, 7], [], [90_000]])).one_graph
    other_step = ("aten::index_select", [[18_500, 64], [], [81_000]])
    assert not reading(LINEAR, picks, other_step).one_graph


def test_packed_sequences_are_no_batch(reading: Any) -> None:
    assert "packed" in reading(LINEAR, ("aten::_pack_padded_sequence", [[20, 8, 16], [8]])).doubt


def test_a_loss_over_other_rows_disagrees(reading: Any) -> None:
    odd = reading(LINEAR, ("aten::cross_entropy_loss", [[141, 7], [141]]))
    assert "reads 141 rows" in odd.doubt


def test_embeddings_of_two_batches_disagree(reading: Any) -> None:
    found = reading(
        ("aten::embedding", [[100, 16], [4, 128]]), ("aten::embedding", [[100, 16], [6, 20]])
    )
    assert "embeddings read batches of 4, 6" in found.doubt


def test_positions_that_are_read_once_for_all_samples_are_no_other_batch(reading: Any) -> None:
    words = ("aten::embedding", [[100, 16], [16, 128]])
    positions = ("aten::embedding", [[512, 16], [1, 128]])
    for order in ((words, positions), (positions, words)):
        found = reading(*order)
        assert (found.size, found.doubt) == (16, "")


def test_a_convolution_without_a_batch_is_doubted(reading: Any) -> None:
    assert (
        "no dimension for a batch" in reading(("aten::conv2d", [[3, 64, 64], [8, 3, 3, 3]])).doubt
    )
    assert reading(("aten::conv2d", [[3, 3, 64, 64], [8, 3, 3, 3]])).doubt == ""


def test_distances_between_positions_are_no_other_batch(reading: Any) -> None:
    """As T5 looks up its biases: one table of 48 x 48 pairs beside six sentences."""
    tokens = ("aten::embedding", [[500, 64], [6, 48]])
    found = reading(tokens, ("aten::embedding", [[32, 4], [48, 48]]))
    assert (found.size, found.doubt) == (6, "")
