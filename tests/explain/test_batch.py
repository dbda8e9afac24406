"""How many samples a step trains on: what says so, and what speaks against it."""

from __future__ import annotations

from typing import Any

import pytest

import stepscope
from stepscope.explain.batch import find_batch
from stepscope.explain.memory.model import ShapedCall, StepCalls
from stepscope.records.explanation import BatchReading
from stepscope.records.memory import CapturedInputs
from stepscope.records.rank_facts import LoaderUse


def operator(name: str, shapes: list[Any], start: int) -> dict[str, Any]:
    args = {"Input Dims": shapes, "Input type": ["float"] * len(shapes)}
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": 5} | {
        "args": args
    }


@pytest.fixture
def reading(write_trace: Any) -> Any:
    def read(
        *calls: tuple[str, list[Any]],
        given: Any = (),
        loaders: Any = (),
        passes: int = 1,
        fetches: float = 0.0,
    ) -> BatchReading | None:
        events = [operator(name, shapes, 10 * n) for n, (name, shapes) in enumerate(calls)]
        shaped = [
            ShapedCall(name, tuple(shapes), ("float",) * len(shapes)) for name, shapes in calls
        ]
        step = StepCalls(calls=tuple(shaped), cast_bytes=0, micro_batches=passes, fetches=fetches)
        inputs = [CapturedInputs(module=module, shapes=shapes) for module, *shapes in given]
        feeding = [LoaderUse(workers=0, batch_size=size) for size in loaders]
        trace = stepscope.read_trace(write_trace(events))
        return find_batch(trace, step, loaders=feeding, inputs=inputs)

    return read


LINEAR = ("aten::linear", [[20_000, 16], [64, 16], [64]])


def test_a_plain_batch_is_not_doubted(reading: Any) -> None:
    linear = ("aten::linear", [[32, 16], [64, 16]])
    found = reading(linear, ("aten::cross_entropy_loss", [[32, 10], [32]]))
    assert (found.size, found.doubt) == (32, "")
    tokens = reading(("aten::embedding", [[100, 16], [4, 128]]), ("aten::linear", [[4, 128, 16]]))
    assert (tokens.size, tokens.doubt) == (4, "")
    assert tokens.read_from == "the first aten::embedding, whose input is [4, 128]"


def test_shapes_that_cannot_be_read_show_no_batch(reading: Any) -> None:
    assert reading(("aten::linear", []), ("aten::embedding", [[[3]], "x"])) is None


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


# What the script says.

CONVOLUTION = ("aten::conv2d", [[16, 3, 64, 64], [8, 3, 3, 3]])


def test_the_data_loader_decides(reading: Any) -> None:
    joined = reading(CONVOLUTION, loaders=[8])
    assert (joined.size, joined.doubt, joined.read_from) == (8, "", "the DataLoader's batch_size")
    graphs = reading(LINEAR, ("aten::index_select", [[20_000, 64], [], [90_000]]), loaders=[32])
    assert (graphs.size, graphs.doubt) == (32, "")


@pytest.mark.parametrize(
    ("passes", "fetches", "batches"),
    [
        (1, 1.0, 1),
        (4, 4.0, 4),  # gradients are accumulated
        (4, 1.0, 1),  # of parts of a batch, or the same batch is read again
        (1, 6.0, 1),  # evaluation fetches the others
        (2, 0.0, 2),  # another thread fetches
    ],
)
def test_a_step_takes_as_many_batches_as_it_fetches_and_trains_on(
    reading: Any, passes: int, fetches: float, batches: int
) -> None:
    found = reading(CONVOLUTION, loaders=[16], passes=passes, fetches=fetches)
    assert found.per_step == batches


def test_a_loader_of_single_items_may_give_whole_batches(reading: Any) -> None:
    assert "the model reads 16" in reading(CONVOLUTION, loaders=[1]).doubt
    single = ("aten::conv2d", [[1, 3, 64, 64], [8, 3, 3, 3]])
    assert (reading(single, loaders=[1]).size, reading(single, loaders=[1]).doubt) == (1, "")


def test_loaders_that_disagree_decide_nothing(reading: Any) -> None:
    assert "batches of 64, 448" in reading(CONVOLUTION, loaders=[448, 64]).doubt
    assert reading(CONVOLUTION, loaders=[16, 16]).doubt == ""


# What the model is called with.


def test_pictures_that_the_model_joins_are_counted_once(reading: Any) -> None:
    """As RAFT joins the two pictures of each pair."""
    pair = ("RAFT", [8, 3, 64, 64], [8, 3, 64, 64])
    found = reading(CONVOLUTION, given=[pair])
    assert (found.size, found.doubt) == (8, "")
    assert found.read_from == "what RAFT is called with: [8, 3, 64, 64]"


def test_inputs_of_other_lengths_decide_nothing(reading: Any) -> None:
    edges = ("Net", [300, 16], [2, 900])
    assert "called with 2, 300" in reading(LINEAR, given=[edges]).doubt
    mask = ("Model", [16, 3, 64, 64], [64, 64])
    assert (reading(CONVOLUTION, given=[mask]).size, reading(CONVOLUTION, given=[mask]).doubt) == (
        16,
        "",
    )


def test_a_compiled_step_has_the_batch_that_its_model_was_called_with(reading: Any) -> None:
    assert (
        reading(("aten::mm", [[64, 8], [8, 4]]), given=[("Net", [32, 8]), ("Loss", [32])]).size
        == 32
    )
    assert (
        reading(("aten::mm", [[64, 8], [8, 4]]), given=[("Net", [32, 8]), ("Loss", [640])]) is None
    )
    assert reading(("aten::mm", [[64, 8], [8, 4]]), given=[("Net", [1, 512])]).size == 1


# Witnesses in the trace.


def test_a_loss_over_fewer_rows_shows_that_samples_are_joined(reading: Any) -> None:
    pairs = reading(CONVOLUTION, ("aten::l1_loss", [[8, 2, 64, 64], [8, 2, 64, 64]]))
    assert "reads 8 rows" in pairs.doubt
    rays = ("aten::linear", [[262_144, 63], [256, 63]])
    assert "reads 4,096 rows" in reading(rays, ("aten::mse_loss", [[4_096, 3], [4_096, 3]])).doubt
    tokens = reading(
        ("aten::embedding", [[100, 16], [4, 128]]), ("aten::nll_loss", [[512, 100], [512]])
    )
    assert (tokens.size, tokens.doubt) == (4, "")


def test_a_last_layer_that_reads_fewer_rows_shows_it_as_well(reading: Any) -> None:
    head = ("aten::linear", [[4, 24], [2, 24]])
    assert "the last layer reads 4 rows" in reading(CONVOLUTION, head).doubt
    assert reading(CONVOLUTION, ("aten::linear", [[1, 24], [2, 24]])).doubt == ""


def test_detections_per_picture_are_no_other_batch(reading: Any) -> None:
    counts = (("aten::l1_loss", [[rows, 4], [rows, 4]]) for rows in (2, 3, 4))
    assert reading(CONVOLUTION, *counts).doubt == ""


def test_recurrent_layers_over_time_first_show_the_batch(reading: Any) -> None:
    state = [[2, 20, 64], [2, 20, 64]]
    lstm = ("aten::lstm", [[35, 20, 64], state, [[256, 64], [256, 64]]])
    found = reading(("aten::embedding", [[100, 64], [35, 20]]), lstm)
    assert (found.size, found.doubt) == (20, "")
    assert "the state of aten::lstm" in found.read_from
    first = ("aten::lstm", [[20, 35, 64], state, [[256, 64], [256, 64]]])
    assert reading(("aten::embedding", [[100, 64], [20, 35]]), first).size == 20


def test_attention_over_time_first_shows_the_batch(reading: Any) -> None:
    words = ("aten::embedding", [[100, 64], [35, 20]])
    fused = ("aten::scaled_dot_product_attention", [[20, 8, 35, 8], [20, 8, 35, 8]])
    plain = ("aten::softmax", [[160, 35, 35]])
    for attention in (fused, plain):
        assert reading(words, attention).size == 20
    batch_first = ("aten::softmax", [[35, 8, 20, 20]])
    assert (reading(words, batch_first).size, reading(words, batch_first).doubt) == (35, "")
    either = reading(words, ("aten::softmax", [[140, 35, 35]]))
    assert "may be the length of sequences" in either.doubt
