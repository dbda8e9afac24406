"""The pieces of save_memory alone: minimum cuts, encodings, and the peak of backward."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from stepscope.fix.saved import encodings
from stepscope.fix.saved.backward_memory import backward_memory
from stepscope.fix.saved.choose import MemoryTarget, make_plan
from stepscope.fix.saved.max_flow import UNLIMITED, FlowNetwork
from stepscope.fix.saved.selection import ValueSelection, keep_everything, select
from stepscope.fix.saved.step_record import RecordedCall, SavedUse, StepRecord, StepValue


def random_edges(seed: int, nodes: int) -> list[tuple[int, int, int]]:
    draw = random.Random(seed)
    pairs = [pair for pair in itertools.permutations(range(nodes), 2) if draw.random() < 0.4]
    return [(start, end, draw.randint(0, 9)) for start, end in pairs]


def cut_size(edges: list[tuple[int, int, int]], side: set[int]) -> int:
    return sum(room for start, end, room in edges if start in side and end not in side)


@pytest.mark.parametrize("seed", range(30))
def test_a_cut_is_as_small_as_the_best_of_all(seed: int) -> None:
    nodes = 7
    edges = random_edges(seed, nodes)
    network = FlowNetwork()
    for _ in range(nodes):
        network.node()
    for edge in edges:
        network.connect(*edge)
    side = network.source_side(0, nodes - 1)
    inner = range(1, nodes - 1)
    sides = [
        {0, *chosen}
        for count in range(nodes - 1)
        for chosen in itertools.combinations(inner, count)
    ]
    assert cut_size(edges, side) == min(cut_size(edges, one) for one in sides)


def test_a_cut_never_runs_through_an_unlimited_edge() -> None:
    network = FlowNetwork()
    source, middle, sink = (network.node() for _ in range(3))
    network.connect(source, middle, UNLIMITED)
    network.connect(middle, sink, 5)
    assert network.source_side(source, sink) == {source, middle}


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000])
def test_bits_come_back(count: int) -> None:
    mask = torch.rand(count) < 0.5
    packed = encodings.pack_bits(mask)
    assert packed.nbytes == encodings.bit_bytes(count)
    assert torch.equal(encodings.unpack_bits(packed, count), mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_noise_of_a_dropout_comes_back(dtype: torch.dtype) -> None:
    noise = torch.empty(3, 5, 7, dtype=dtype).bernoulli_(0.7).div_(0.7)
    encoded = encodings.encode_value("two-valued", noise, None)
    assert encoded is not None
    assert encoded.size_bytes == 14 + noise.itemsize
    assert torch.equal(encodings.Geometry.of(noise).on(encoded.decode()), noise)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "window",
    [
        {"kernel_size": 2},
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": 1},
        {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2},
        {"kernel_size": 3, "stride": 2, "ceil_mode": True},
    ],
)
def test_pooling_indices_come_back(layout: Any, window: dict[str, Any]) -> None:
    x = torch.randn(2, 3, 11, 9).contiguous(memory_format=layout)
    _, indices = functional.max_pool2d(x, **window, return_indices=True)
    names = ("kernel_size", "stride", "padding", "dilation")
    defaults = {"stride": [], "padding": 0, "dilation": 1}
    call = (x, *({**defaults, **window}[name] for name in names))
    encoded = encodings.encode_value("window", indices, call)
    assert encoded is not None
    assert encoded.size_bytes == indices.numel()
    decoded = encodings.Geometry.of(indices).on(encoded.decode())
    assert torch.equal(decoded, indices)


def test_a_sign_is_all_that_relu_asks_for() -> None:
    output = torch.tensor([[0.0, 1e-40, 3.0], [float("nan"), float("inf"), -0.0]])
    encoded = encodings.encode_use("sign", output)
    assert encoded is not None
    gradient = torch.randn(2, 3)
    backward = torch.ops.aten.threshold_backward
    assert torch.equal(backward(gradient, encoded.decode(), 0), backward(gradient, output, 0))


def test_a_strided_tensor_has_no_sign_encoding() -> None:
    assert encodings.encode_use("sign", torch.randn(4, 4)[:, ::2]) is None


def chain(sizes: list[int], refusals: list[str | None], saved: list[int]) -> StepRecord:
    """Operator n makes value n + 1 of value n; value 0 is the batch. Each takes 10 ns."""
    values = [
        StepValue(
            storage=number,
            size_bytes=size_bytes,
            shape=(size_bytes,),
            dtype="uint8",
            module="",
            producer=number - 1 if number else None,
            owned=False,
            overwritten=False,
            encoding=None,
            encoded_bytes=0,
        )
        for number, size_bytes in enumerate(sizes)
    ]
    operators = [
        RecordedCall(
            name=f"op{number}",
            inputs=(number,),
            outputs=(number + 1,),
            took_ns=10,
            refusal=refusal,
        )
        for number, refusal in enumerate(refusals)
    ]
    uses = [
        SavedUse(
            value=value,
            after=value,
            shape=(sizes[value],),
            dtype="uint8",
            consumer="",
            order=value,
            encoding=None,
            encoded_bytes=0,
        )
        for value in saved
    ]
    return StepRecord(
        operators=tuple(operators), values=tuple(values), uses=tuple(uses), coding_ns_per_element=1
    )


def test_the_narrowest_place_of_a_chain_is_kept() -> None:
    """heavy -> 100, cheap -> 10, cheap -> 100, cheap -> 100: the last two are saved."""
    record = chain([5, 100, 10, 100, 100], ["heavy", None, None, None], [3, 4])
    selection = select(record, bytes_per_ns=0, segments=1)
    assert selection.kept == {2}
    assert selection.repeated == {2, 3}
    memory = backward_memory(record, selection)
    assert memory.saved_bytes == 10
    assert memory.peak_bytes == 210  # 4 is made from 3, which stays until its own use


def test_time_has_a_price() -> None:
    """Recomputing 3 and 4 saves 190 bytes and takes 20 ns."""
    record = chain([5, 100, 10, 100, 100], ["heavy", None, None, None], [3, 4])
    assert select(record, bytes_per_ns=9, segments=1).repeated == {2, 3}
    assert select(record, bytes_per_ns=11, segments=1).repeated == set()


def test_a_kept_value_goes_after_its_last_reader() -> None:
    record = chain([0, 100, 40], ["heavy", "heavy"], [1, 2])
    memory = backward_memory(record, keep_everything(record))
    assert (memory.saved_bytes, memory.peak_bytes) == (140, 140)


def test_a_long_chain_is_cut_into_segments() -> None:
    """Without segments the whole chain would be recomputed, and be there, at once."""
    count = 64
    record = chain([100] * (count + 1), [None] * count, list(range(1, count + 1)))
    at_once = backward_memory(record, select(record, bytes_per_ns=0, segments=1))
    assert at_once.saved_bytes == 100
    assert at_once.peak_bytes >= 100 * count
    plan = make_plan(record, MemoryTarget())
    assert plan.peak_bytes <= 100 * 3 * count**0.5
    assert plan.peak_bytes_before == 100 * count


def test_the_least_time_that_meets_a_target() -> None:
    count = 64
    record = chain([100] * (count + 1), [None] * count, list(range(1, count + 1)))
    some = make_plan(record, MemoryTarget(reduce=0.3))
    assert some.peak_bytes <= 0.7 * some.peak_bytes_before
    none = make_plan(record, MemoryTarget(max_slowdown=0.0))
    assert none.peak_bytes == none.peak_bytes_before
    assert none.repeated == ()


def test_following_a_plan_counts_as_time() -> None:
    record = chain([5, 100, 10, 100, 10, 100], ["heavy", None, None, "heavy", None], [3, 5])
    costly = replace(record, watch_ns=7, hold_ns=5)
    assert make_plan(record, MemoryTarget()).extra_ns == 20
    saved_tensors = 2
    assert make_plan(costly, MemoryTarget()).extra_ns == 20 + saved_tensors * 7 + 2 * 5


def test_nothing_cheap_is_said() -> None:
    record = chain([0, 100, 40], ["heavy", "heavy"], [1, 2])
    plan = make_plan(record, MemoryTarget())
    assert plan.verdict() == "Backward keeps 140 B; nothing is changed."
    assert plan.notes == ("Nothing here is cheap to recompute or compresses exactly.",)
    assert backward_memory(record, ValueSelection()).saved_bytes == 0
