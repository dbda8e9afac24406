"""Kernels of CUDA graphs, joined to operators by the recording's order or by their likes."""

from __future__ import annotations

import pytest

from benches import analyse, bench_for
from stepscope.explain.efficiency import measure_efficiency
from stepscope.predict.step_context import find_operators
from stepscope.records.explanation import StepTime
from stepscope.records.hardware import Efficiency

from ..build import Events, call, graph, kernel, op, step
from ..conftest import Read

GEMM = "nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_NNT"
SPLIT = "void cublasLt::splitKreduce_kernel<32, 16, int>"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>"
BF16 = "c10::BFloat16"
FLOPS = 2 * 1024**3
BIG, SMALL = [[1024, 1024], [1024, 1024]], [[512, 512], [512, 512]]
BACKWARD = "autograd::engine::evaluate_function: MmBackward0"


def mm(at: float, shapes: list[list[int]] = BIG) -> Events:
    return op("aten::mm", start=at, dur=4, shapes=shapes, dtypes=[BF16] * 2)


def replay(at: float, *kernels: Events, dur: float = 100) -> Events:
    """A step that launches one graph."""
    return step(int(at), start=at, dur=dur) + graph(list(kernels), launched_at=at + 1)


def two_products(at: float, grid: list[int] | None = None) -> list[Events]:
    """Two layers with the same shapes: two kernels each, 20 and 5 µs."""
    sides = grid or [8, 8, 1]
    return [
        kernel(name, start=at + start, dur=dur, grid=sides)
        for name, start, dur in ((GEMM, 5, 20), (SPLIT, 26, 5), (GEMM, 35, 20), (SPLIT, 56, 5))
    ]


def recorded(launches: int = 4) -> Events:
    """The recording before the window: forward and backward, two launches each."""
    events = call("cudaStreamBeginCapture", start=-90, dur=1)
    events += mm(-80) + op(BACKWARD, start=-60, dur=10) + mm(-58)
    for at in (-79, -78, -57, -56)[:launches]:
        events += call("cudaLaunchKernel", start=at, dur=0.5)
    return events + call("cudaStreamEndCapture", start=-40, dur=1)


def efficiency(read: Read, *events: Events) -> Efficiency:
    analysis = analyse(read(*events, device="NVIDIA H200"))
    found = measure_efficiency(analysis, StepTime(profiled=0.1))
    assert found is not None
    return found


def steps(grid: list[int] | None = None) -> list[Events]:
    return [replay(100.0 * n, *two_products(100.0 * n, grid)) for n in range(3)]


def test_a_recording_in_the_trace_gives_operators_phases_and_flops(read: Read) -> None:
    found = efficiency(read, recorded(), *steps())
    assert found.model_flops == found.hardware_flops == 2 * FLOPS
    assert found.unknown_share == 0
    assert found.mfu == pytest.approx(2 * FLOPS / 989.5e12 / 100e-6)
    spots = {spot.phase: spot for spot in found.spots}
    assert set(spots) == {"forward", "backward"}
    for spot in spots.values():
        assert (spot.operator, spot.calls, spot.flops) == ("aten::mm", 1, FLOPS)
        assert spot.device_ns == 25_000
    assert found.by_dtype[0].flops == 2 * FLOPS
    assert found.by_dtype[0].device_ns == 40_000  # without the kernels that only help


def test_a_recording_of_another_length_is_not_this_graphs(read: Read) -> None:
    found = efficiency(read, recorded(launches=3), *steps())
    assert (found.mfu, found.model_flops) == (None, 0)
    assert found.unknown_share == pytest.approx(40 / 50)


def warm_up(shapes: list[list[int]] = BIG, at: float = -90) -> Events:
    """An eager call with the same two kernels."""
    events = mm(at, shapes)
    events += kernel(GEMM, start=at + 5, dur=20, launched_at=at + 1, grid=[8, 8, 1])
    return events + kernel(SPLIT, start=at + 26, dur=5, launched_at=at + 2, grid=[8, 8, 1])


def test_kernels_are_what_their_likes_are(read: Read) -> None:
    found = efficiency(read, warm_up(), *steps())
    assert found.model_flops == 2 * FLOPS
    (spot,) = found.spots
    assert (spot.calls, spot.flops, spot.device_ns) == (2, 2 * FLOPS, 50_000)


def test_another_grid_is_no_like(read: Read) -> None:
    found = efficiency(read, warm_up(), *steps(grid=[4, 4, 1]))
    assert (found.mfu, found.model_flops) == (None, 0)


def test_likes_with_other_shapes_leave_the_operator_unknown(read: Read) -> None:
    others = [warm_up(SMALL, at=-150), warm_up(SMALL, at=-210)]
    found = efficiency(read, warm_up(), *others, *steps())
    assert (found.mfu, found.model_flops) == (None, 0)
    assert found.unknown_share == pytest.approx(40 / 50)


def test_likes_with_other_shapes_are_told_apart_by_their_order(read: Read) -> None:
    eager = [warm_up(SMALL, at=-290), warm_up(at=-230), warm_up(SMALL, at=-170), warm_up(at=-110)]
    found = efficiency(read, *eager, *steps())
    assert found.model_flops == FLOPS + FLOPS // 8
    by_shape = {spot.shapes: spot for spot in found.spots}
    assert [spot.calls for spot in by_shape.values()] == [1, 1]
    assert {spot.device_ns for spot in by_shape.values()} == {25_000}


def test_eager_steps_beside_a_graph_count_once(read: Read) -> None:
    eager: list[Events] = [warm_up(at=100.0 * n + 62) for n in range(3)]
    found = efficiency(read, *steps(), *eager)
    assert found.model_flops == 3 * FLOPS


def test_predictions_give_each_replayed_kernel_its_part(read: Read) -> None:
    bench = bench_for(read(recorded(), *steps(), device="NVIDIA H200"))
    context = bench.context
    operators = find_operators(context.trace, context.graph, context.costs, on_host=False)
    assert operators.flops.tolist() == [FLOPS, 0, FLOPS, 0]
    assert operators.share.tolist() == [1, 1, 1, 1]


def test_copies_and_memsets_must_be_in_the_same_places(read: Read) -> None:
    events = [replay(100.0 * n, *two_products(100.0 * n)) for n in range(3)]
    swapped = [
        event | {"name": "cudaMemsetAsync"} if event["name"] == "cudaLaunchKernel" else event
        for event in recorded()
    ]
    assert efficiency(read, swapped, *events).mfu is None


def test_a_graph_with_an_addition_only_has_no_flops_and_a_roof(read: Read) -> None:
    shapes = [[1 << 20], [1 << 20]]
    events = call("cudaStreamBeginCapture", start=-90, dur=1)
    events += op("aten::add", start=-80, dur=5, shapes=shapes, dtypes=["float"] * 2)
    events += call("cudaLaunchKernel", start=-79, dur=1)
    events += call("cudaStreamEndCapture", start=-40, dur=1)
    found = efficiency(
        read,
        events,
        *(replay(100.0 * n, kernel(ADD, start=100.0 * n + 5, dur=20)) for n in range(3)),
    )
    (spot,) = found.spots
    assert (spot.operator, spot.bytes_moved, spot.bound) == ("aten::add", 12 << 20, "memory")
