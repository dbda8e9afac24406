"""Batch, casts and a transformer, read from the shapes of a step's operators."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from stepscope.explain.memory.model import (
    find_transformer,
    read_calls,
    transformer_activations,
)
from stepscope.step.steps import find_steps
from stepscope.step.work import find_work

from .. import build


def _calls(read, *events):
    trace = read(*events)
    return read_calls(trace, find_steps(trace, find_work(trace)))


def _linear(start, inputs, weight, dtype="float", weight_dtype="float"):
    shapes = [inputs, weight, weight[:1]]
    types = [dtype, weight_dtype, weight_dtype]
    return build.op("aten::linear", start=start, dur=8, shapes=shapes, dtypes=types)


def _block(start, *, scores="fused", shape=(2, 4, 16, 8)):
    batch, heads, length, width = shape
    wide = heads * width
    stream = [batch, length, wide]
    norm = {"dur": 1, "shapes": [stream, [], [wide], [wide]], "dtypes": ["float"] * 4}
    attention = {
        "fused": build.op(
            "aten::scaled_dot_product_attention",
            start=start + 20,
            dur=5,
            shapes=[list(shape)] * 3,
            dtypes=["float"] * 3,
        ),
        "stored": build.op(
            "aten::softmax",
            start=start + 20,
            dur=5,
            shapes=[[batch, heads, length, length]],
            dtypes=["float"],
        ),
    }[scores]
    return [
        build.op("aten::layer_norm", start=start, **norm),
        _linear(start + 10, stream, [3 * wide, wide]),
        attention,
        _linear(start + 30, stream, [wide, wide]),
        build.op("aten::layer_norm", start=start + 40, **norm),
        _linear(start + 50, stream, [4 * wide, wide]),
        _linear(start + 60, [batch, length, 4 * wide], [wide, 4 * wide]),
    ]


def _embedding(start, rows, index):
    return build.op(
        "aten::embedding",
        start=start,
        dur=1,
        shapes=[[rows, 32], index],
        dtypes=["float", "long int"],
    )


def _transformer(**kinds):
    return [
        _embedding(1, 16, [16]),  # positions come first here, and are not the batch
        _embedding(3, 100, [2, 16]),
        *_block(100, **kinds),
        *_block(200, **kinds),
        _linear(300, [2, 16, 32], [100, 32]),
    ]


def test_a_transformer_is_told_by_its_blocks(read):
    calls = _calls(read, *_transformer())
    model = find_transformer(calls)
    assert model is not None
    assert (model.layers, model.width, model.heads, model.head_width) == (2, 32, 4, 8)
    assert (model.length, model.batch, model.feedforward, model.gated) == (16, 2, 128, False)
    assert model.vocabulary == 100
    assert model.fused_attention


def test_stored_scores_are_told_from_softmax(read):
    model = find_transformer(_calls(read, *_transformer(scores="stored")))
    assert model is not None
    assert not model.fused_attention
    assert (model.heads, model.head_width) == (4, 8)


def test_blocks_of_different_shapes_are_no_transformer_that_the_formula_knows(read):
    calls = _calls(read, *_block(100), *_block(200, shape=(2, 2, 16, 16)))
    assert find_transformer(calls) is None


def test_a_plain_network_is_no_transformer(read):
    convolution = build.op(
        "aten::conv2d",
        start=1,
        dur=3,
        shapes=[[128, 3, 224, 224], [64, 3, 7, 7]],
        dtypes=["float"] * 2,
    )
    calls = _calls(read, convolution, _linear(10, [128, 512], [1000, 512]))
    assert find_transformer(calls) is None


def test_weights_that_autocast_copies_are_counted_and_activations_are_not(read):
    def copy(start, shape, to="c10::BFloat16"):
        return build.op(
            "aten::copy_", start=start, dur=1, shapes=[shape, shape], dtypes=[to, "float"]
        )

    calls = _calls(
        read,
        build.op(
            "aten::linear",
            start=0,
            dur=20,
            shapes=[[8, 16], [32, 16], [32]],
            dtypes=["float"] * 3,
        ),
        copy(1, [32]),
        copy(3, [32, 16]),
        copy(5, [8, 16]),  # the input: grows with the batch
        copy(30, [32, 16]),  # not inside a layer
    )
    assert calls is not None
    assert calls.cast_bytes == 2 * (32 + 32 * 16)


def test_only_the_last_step_and_only_forward_are_read(read):
    backward = "autograd::engine::evaluate_function: Linear"
    calls = _calls(
        read,
        build.step(1, start=0, dur=100),
        build.step(2, start=100, dur=100),
        _linear(10, [4, 16], [32, 16]),
        _linear(110, [8, 16], [32, 16]),
        build.op(backward, start=150, dur=30),
        _linear(160, [9, 16], [32, 16]),
    )
    assert calls is not None
    assert [call.dims(0) for call in calls.calls] == [[8, 16]]


def test_without_shapes_nothing_is_read(read):
    assert _calls(read, build.op("aten::linear", start=0, dur=5)) is None


def test_odd_shapes_are_no_stumbling_block(read):
    calls = _calls(
        read,
        build.op("aten::linear", start=0, dur=5, shapes=[], dtypes=[]),
        build.op("aten::embedding", start=6, dur=5, shapes=[[[3]], "x"], dtypes=["float"]),
    )
    assert find_transformer(replace(calls, calls=())) is None


def _backward(start):
    return build.op("autograd::engine::evaluate_function: MeanBackward0", start=start, dur=50)


def _moved(events, by):
    return [event | {"ts": event["ts"] + by} for event in events]


def _pass(start, **kinds):
    """Forward of the two-block transformer (300 µs), then backward."""
    return [*(_moved(events, start) for events in _transformer(**kinds)), _backward(start + 400)]


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_gradient_accumulation_counts_the_blocks_of_one_pass(read, micro_batches):
    events = [each for number in range(micro_batches) for each in _pass(500 * number)]
    calls = _calls(read, build.step(1, start=0, dur=500 * micro_batches), *events)
    model = find_transformer(calls)
    assert (model.layers, model.batch) == (2, 2)
    assert calls.micro_batches == micro_batches
    # By hand, a token: a block keeps 2·4·32 + (2·32 + 2·32 + 2·32 + 2·128)·4 + 4·4 = 2064 bytes,
    # the head (4 + 4)·32 + 100·4 = 656. Two samples of 16 tokens: 32·(2·2064 + 656).
    assert transformer_activations(model, None).total_bytes == 32 * (2 * 2064 + 656)


def _fetch(start):
    return build.note(
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start=start, dur=2
    )


@pytest.mark.parametrize(
    ("fetches", "batches"),
    [
        (0, 2),  # the script makes its batches itself
        (1, None),  # one batch is split into two, or read twice
        (2, 2),
        (3, 2),  # one of them comes from another loader
    ],
)
def test_batches_of_a_step_are_passes_unless_the_loader_gave_fewer(read, fetches, batches):
    events = [*_pass(100), *_pass(600), *(_fetch(10 * number) for number in range(fetches))]
    calls = _calls(read, build.step(1, start=0, dur=1200), *events)
    assert (calls.micro_batches, calls.batches_per_step) == (2, batches)


def test_an_evaluation_after_backward_keeps_nothing_and_does_not_count(read):
    evaluation = [_moved(events, 500) for events in _transformer()]
    calls = _calls(read, build.step(1, start=0, dur=1000), *_pass(0), *evaluation, *evaluation)
    assert find_transformer(calls).layers == 2
    assert calls.micro_batches == 1


def test_of_unlike_passes_the_longest_is_read(read):
    other = [_linear(10, [7, 16], [32, 16]), _backward(50)]
    calls = _calls(
        read,
        build.step(1, start=0, dur=1000),
        *other,
        *_pass(100),
        *(_moved(each, 600) for each in other),
    )
    assert find_transformer(calls).layers == 2
    assert (find_transformer(calls).batch, calls.micro_batches) == (2, 1)


def test_casts_of_weights_are_counted_in_one_pass_only(read):
    def cast(start):
        shapes, dtypes = [[32, 16], [32, 16]], ["c10::BFloat16", "float"]
        copy = build.op("aten::copy_", start=start + 1, dur=1, shapes=shapes, dtypes=dtypes)
        return [_linear(start, [8, 16], [32, 16]), copy, _backward(start + 20)]

    calls = _calls(read, build.step(1, start=0, dur=400), *cast(0), *cast(100), *cast(200))
    assert calls.cast_bytes == 2 * 32 * 16
    assert calls.micro_batches == 3
