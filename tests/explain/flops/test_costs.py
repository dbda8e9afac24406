"""Which operator counts, which answers for a device event, and what surrounds tell about a call."""

from __future__ import annotations

from typing import Any

import numpy as np

from stepscope.explain.flops.costs import Costs, count_costs
from stepscope.records.dtypes import PEAKS
from stepscope.records.trace import Trace
from stepscope.step.phases import PHASES

from ..build import AUTOGRAD, Events, kernel, note, op, step
from ..conftest import Read

FLOAT, BF16 = "float", "c10::BFloat16"
GEMM = "nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_NNT"
TF32_GEMM = "sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x32"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
MANY = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<BinaryOpFunctor<float, 2>>"
)


def mm(start: float, dur: float = 4, dtype: str = BF16, **kwargs: Any) -> Events:
    """[8, 16] x [16, 32]: 8192 FLOPs."""
    return op(
        "aten::mm", start=start, dur=dur, shapes=[[8, 16], [16, 32]], dtypes=[dtype] * 2, **kwargs
    )


def row_of(trace: Trace, name: str, which: int = 0) -> int:
    rows = [row for row, code in enumerate(trace.host.name) if trace.strings[code] == name]
    return sorted(rows, key=lambda row: trace.host.start_ns[row])[which]


def behind(trace: Trace, costs: Costs) -> list[str | None]:
    """The operator that answers for each device event."""
    return [
        trace.strings[trace.host.name[row]] if row >= 0 else None for row in costs.operator.tolist()
    ]


def test_a_kernel_belongs_to_the_innermost_operator_that_is_known(read: Read) -> None:
    trace = read(
        op("aten::linear", start=0, dur=20, shapes=[[8, 16], [32, 16]], dtypes=[FLOAT] * 2),
        mm(2, 10),
        op("aten::something_new", start=3, dur=5),
        kernel(GEMM, start=30, dur=10, launched_at=4),
        kernel("Memset (Device)", start=41, dur=1, launched_at=9, category="gpu_memset"),
        kernel("lost", start=50, dur=10),
    )
    costs = count_costs(trace)
    assert behind(trace, costs) == ["aten::mm", "aten::mm", None]
    assert costs.flops[row_of(trace, "aten::linear")] == 8192
    assert costs.counted.nonzero()[0].tolist() == [row_of(trace, "aten::mm")]


def test_a_kernel_of_an_unknown_operator_belongs_to_that(read: Read) -> None:
    trace = read(
        op("mine::layer", start=0, dur=20),
        op("aten::sort", start=2, dur=4),
        kernel("sorted", start=30, dur=10, launched_at=3),
        kernel("made", start=41, dur=10, launched_at=8),
    )
    costs = count_costs(trace)
    assert behind(trace, costs) == ["aten::sort", "mine::layer"]
    assert costs.flops[row_of(trace, "mine::layer")] == -1
    assert costs.flops[row_of(trace, "aten::sort")] == 0


def test_an_operator_without_shapes_leaves_the_counting_to_the_one_around_it(read: Read) -> None:
    trace = read(
        op("aten::linear", start=0, dur=20, shapes=[[8, 16], [32, 16]], dtypes=[BF16] * 2),
        op("aten::addmm", start=2, dur=10),
        kernel(GEMM, start=30, dur=10, launched_at=4),
    )
    costs = count_costs(trace)
    linear, addmm = row_of(trace, "aten::linear"), row_of(trace, "aten::addmm")
    assert (costs.flops[linear], costs.flops[addmm]) == (8192, -1)
    assert costs.counted.nonzero()[0].tolist() == [linear]
    assert behind(trace, costs) == ["aten::linear"]


def test_fp32_inputs_multiplied_as_tf32_are_tf32(read: Read) -> None:
    trace = read(
        mm(0, dtype=FLOAT),
        kernel(TF32_GEMM, start=30, dur=10, launched_at=1),
        mm(10, dtype=FLOAT),
        kernel("ampere_sgemm_128x64_nn", start=41, dur=10, launched_at=11),
    )
    costs = count_costs(trace)
    assert [PEAKS[code] for code in costs.dtype[costs.counted]] == ["tf32", "fp32"]


def test_phases_come_from_what_is_around_an_operator(read: Read) -> None:
    trace = read(
        step(1, start=0, dur=100),
        mm(5),
        op("autograd::engine::evaluate_function: MmBackward0", start=20, dur=20, thread=AUTOGRAD),
        mm(22, thread=AUTOGRAD),
        mm(45),  # clips gradients, perhaps
        note("Optimizer.step#AdamW.step", start=60, dur=30),
        mm(65),
    )
    costs = count_costs(trace)
    in_order = sorted(np.flatnonzero(costs.counted), key=lambda row: trace.host.start_ns[row])
    phases = [PHASES[costs.phase[row]] for row in in_order]
    assert phases == ["forward", "backward", "other", "optimizer"]


def test_only_numbered_operators_inside_backward_that_ran_forward_are_recomputed(
    read: Read,
) -> None:
    """Backward's own products have no sequence number; another shape was never run forward."""
    node = "AddmmBackward0"
    trace = read(
        step(1, start=0, dur=100),
        mm(5, sequence=1, forward_thread=0),
        op(node, start=20, dur=40, thread=AUTOGRAD, sequence=1, forward_thread=1),
        mm(22, thread=AUTOGRAD, sequence=7, forward_thread=0),
        mm(30, thread=AUTOGRAD),
        op(
            "aten::mm",
            start=40,
            dur=4,
            thread=AUTOGRAD,
            shapes=[[2, 2], [2, 2]],
            dtypes=[BF16] * 2,
            sequence=8,
            forward_thread=0,
        ),
    )
    costs = count_costs(trace)
    assert trace.host.start_ns[costs.recomputed].tolist() == [trace.host.start_ns.min() + 22_000]
    assert costs.model_flops[costs.counted].tolist().count(0) == 1


def test_a_list_too_long_to_be_recorded_is_all_parameters_of_an_optimizer(read: Read) -> None:
    """Its dtype is in the kernel's name; the list of step counters launches nothing."""
    long = {"shapes": [[], []], "dtypes": ["TensorList", "Scalar"]}
    trace = read(
        step(1, start=0, dur=100),
        *(
            op(
                "torch::autograd::AccumulateGrad",
                start=10 + place,
                dur=1,
                shapes=[shape],
                dtypes=[FLOAT],
                thread=AUTOGRAD,
            )
            for place, shape in enumerate([[40, 10], [100]])
        ),
        note("Optimizer.step#AdamW.step", start=40, dur=50),
        op("aten::_foreach_add_", start=45, dur=5, **long),
        op("aten::_foreach_mul_", start=55, dur=5, **long),
        kernel(MANY, start=100, dur=10, launched_at=56),
    )
    costs = count_costs(trace)
    assert costs.bytes_moved[row_of(trace, "aten::_foreach_mul_")] == 2 * 500 * 4
    assert costs.bytes_moved[row_of(trace, "aten::_foreach_add_")] == -1


def test_two_groups_of_parameters_leave_long_lists_unknown(read: Read) -> None:
    long = {"shapes": [[], []], "dtypes": ["TensorList", "Scalar"]}
    trace = read(
        op("torch::autograd::AccumulateGrad", start=1, dur=1, shapes=[[500]], dtypes=[FLOAT]),
        note("Optimizer.step#AdamW.step", start=40, dur=50),
        op("aten::_foreach_mul_", start=45, dur=5, **long),
        op("aten::_foreach_mul_", start=55, dur=5, **long),
        kernel(MANY, start=100, dur=10, launched_at=46),
        kernel(MANY, start=111, dur=10, launched_at=56),
    )
    costs = count_costs(trace)
    assert costs.bytes_moved[row_of(trace, "aten::_foreach_mul_")] == -1


def test_a_function_whose_backward_says_nothing_costs_by_its_forward(read: Read) -> None:
    shape = [2, 10, 8, 16]
    trace = read(
        op(
            "FlashAttnFunc",
            start=0,
            dur=5,
            shapes=[shape] * 3,
            dtypes=[BF16] * 3,
            sequence=3,
            forward_thread=0,
        ),
        op(
            "FlashAttnFuncBackward",
            start=20,
            dur=5,
            thread=AUTOGRAD,
            shapes=[shape],
            dtypes=[BF16],
            sequence=3,
            forward_thread=1,
        ),
        kernel("flash_bwd_kernel", start=30, dur=10, launched_at=21, thread=AUTOGRAD),
    )
    costs = count_costs(trace)
    forward, backward = (row_of(trace, name) for name in ("FlashAttnFunc", "FlashAttnFuncBackward"))
    assert costs.flops[forward] == 2 * 2 * 2 * 8 * 10 * 10 * 16
    assert costs.flops[backward] == 2.5 * costs.flops[forward]
    assert costs.model_flops[backward] == 2 * costs.flops[forward]
    assert behind(trace, costs) == ["FlashAttnFuncBackward"]


def test_each_distinct_call_is_looked_at_once(read: Read) -> None:
    trace = read(*(mm(10 * place) for place in range(20)), mm(300, dtype=FLOAT))
    costs = count_costs(trace)
    assert len(costs.calls) == 2
    assert costs.flops[costs.counted].tolist() == [8192] * 21


def test_a_product_that_launched_nothing_on_a_gpu_does_not_count(read: Read) -> None:
    """It ran on the host, or was stopped: a checkpoint goes no further than it must."""
    trace = read(mm(0), kernel(GEMM, start=30, dur=10, launched_at=1), mm(10))
    costs = count_costs(trace)
    assert costs.counted.nonzero()[0].tolist() == [row_of(trace, "aten::mm", 0)]


def test_a_trace_without_operators_has_no_costs(read: Read) -> None:
    costs = count_costs(read(step(1, start=0, dur=100)))
    assert costs.flops.tolist() == [0]
    assert len(costs.operator) == 0
