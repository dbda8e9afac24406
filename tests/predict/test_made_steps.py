"""What-ifs on steps written down event by event, so that every number can be worked out by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benches import ask, bench_for
from explain.build import kernel, note, op, step, write
from stepscope import read_trace
from stepscope.predict.engine import Bench
from stepscope.predict.step_context import ADAM, MOMENTUM, PLAIN, UpdateRule, current_form
from stepscope.predict.whatifs import predict_change
from stepscope.predict.whatifs.checkpoint import count_blocks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STEP_US, STEPS = 6000.0, 3
IMAGES = [32, 96, 56, 56]
Made = tuple[str, list[list[int]], float]  # operator, shapes, microseconds of its kernel
# What follows a convolution's tensors: padding, stride, dilation, groups; of backward also sizes of
# the bias, whether it is transposed, and what is asked for.
ARGUMENTS = {
    "aten::cudnn_convolution": ["[1, 1]", "[1, 1]", "[1, 1]", "1"],
    "aten::_convolution": [
        "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", "False", "False", "True", "True",
    ],
    "aten::convolution_backward": [
        "", "[1, 1]", "[3, 3]", "[1, 1]", "False", "[0, 0]", "96", "[True, True, False]",
    ],
}  # fmt: skip

KERNELS = {
    "aten::convolution_backward": "sm80_xmma_wgrad_implicit_gemm_indexed",
    "aten::_convolution": "void DSE::regular_fft_pad<0, 1, 128, 16, 32, 1, float>",
}


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., Bench]:
    def made(*operators: Made) -> Bench:
        events: list[dict[str, Any]] = []
        for number in range(STEPS):
            at = number * STEP_US
            events += step(number, start=at, dur=STEP_US)
            for name, shapes, dur in operators:
                more = ARGUMENTS.get(name, [])
                events += op(
                    name,
                    start=at,
                    dur=40,
                    shapes=[*shapes, *([] for _ in more)],
                    dtypes=["float"] * len(shapes) + ["ScalarList"] * len(more),
                    concrete=[""] * len(shapes) + more,
                )
                events += kernel(
                    KERNELS.get(name, "k"),
                    start=at + 20,
                    dur=dur,
                    launched_at=at + 5,
                    grid=[64, 1, 1],
                )
                at += 200 + dur
        return bench_for(read_trace(write(tmp_path / "made.json", events, device="NVIDIA H200")))

    return made


def us(bench: Bench, name: str, value: str) -> list[float]:
    """Of every kernel of the trace, after the change."""
    tasks = predict_change(name, bench.context, value).context.graph.tasks
    found: list[float] = (tasks.dur_ns[tasks.row >= 0] / 1e3).tolist()
    return found


def test_a_product_is_as_fast_as_its_share_of_the_new_peak(bench: Callable[..., Bench]) -> None:
    """4096^3 x 2 FLOPs at 0.8 of 989.5 TFLOP/s, behind a start of 3.5 us: 177.1 us."""
    found = us(bench(("aten::mm", [[4096, 4096], [4096, 4096]], 1500)), "precision", "bf16")
    assert found == pytest.approx([2 * 4096**3 / (0.8 * 989.5e12) * 1e6 + 3.5], rel=1e-3)


def test_no_product_gains_more_than_the_peak(bench: Callable[..., Bench]) -> None:
    """A hundredth of fp32's peak then is no more than a hundredth of bf16's."""
    found = us(bench(("aten::mm", [[512, 512], [512, 512]], 600)), "precision", "bf16")
    assert found == pytest.approx([600 * 67 / 989.5], rel=0.01)


def test_a_depthwise_convolution_gains_nothing(bench: Callable[..., Bench]) -> None:
    wide = ("aten::cudnn_convolution", [IMAGES, [96, 96, 3, 3]], 400.0)
    deep = ("aten::cudnn_convolution", [IMAGES, [96, 1, 7, 7]], 300.0)
    back = ("aten::convolution_backward", [IMAGES, IMAGES, [96, 1, 7, 7]], 900.0)
    found = us(bench(wide, deep, back), "precision", "bf16")
    assert found[0] < 200
    assert found[1:] == pytest.approx([300, 900])


def test_a_first_layer_of_three_channels_is_not_depthwise(bench: Callable[..., Bench]) -> None:
    """In its backward the image stands where a weight does in forward."""
    image, weight = [32, 3, 56, 56], [96, 3, 3, 3]
    found = us(
        bench(("aten::convolution_backward", [IMAGES, image, weight], 900.0)), "precision", "bf16"
    )
    assert found[0] < 200


def test_a_convolution_by_fourier_transforms_goes_another_way_in_bf16(
    bench: Callable[..., Bench],
) -> None:
    """However slow the transforms were: what the shape says, and 22% of the peak behind a start of
    8 us for two groups."""
    dense, grouped = [96, 96, 3, 3], [96, 48, 3, 3]
    by_fourier, in_groups = (
        us(bench(("aten::_convolution", [IMAGES, weight], 5000.0)), "precision", "bf16")
        for weight in (dense, grouped)
    )
    other = us(bench(("aten::cudnn_convolution", [IMAGES, dense], 400.0)), "precision", "bf16")
    assert by_fourier == pytest.approx(other)
    flops = 2 * 32 * 96 * 48 * 9 * 56 * 56
    assert in_groups == pytest.approx([flops / (0.22 * 989.5e12) * 1e6 + 8], rel=0.01)


def test_batch_norms_of_images_get_slower_and_activations_take_half(
    bench: Callable[..., Bench],
) -> None:
    found = us(
        bench(
            ("aten::cudnn_convolution", [IMAGES, [96, 96, 3, 3]], 400.0),
            ("aten::cudnn_batch_norm", [IMAGES, [96], [96]], 100.0),
            ("aten::relu", [IMAGES], 102.0),
        ),
        "precision",
        "bf16",
    )
    assert found[1:] == pytest.approx([167, 52])  # 2 us of a kernel are its start


def test_where_layer_norms_give_fp32_back_sums_stay_as_they_are(
    bench: Callable[..., Bench],
) -> None:
    words = [16, 512, 768]
    found = us(
        bench(
            ("aten::mm", [[8192, 768], [768, 768]], 300.0),
            ("aten::native_layer_norm", [words, [768], [768]], 50.0),
            ("aten::add", [words, words], 100.0),
            ("aten::gelu", [words], 102.0),
        ),
        "precision",
        "bf16",
    )
    assert found[1:] == pytest.approx([50, 100, 52])


def test_twice_the_batch_doubles_what_moves_bytes_and_fills_idle_cores_with_products(
    bench: Callable[..., Bench],
) -> None:
    """64 blocks leave half of 132 multiprocessors idle: 128 take hardly longer."""
    found = us(
        bench(
            ("aten::mm", [[512, 768], [768, 768]], 102.0),
            ("aten::cudnn_batch_norm", [IMAGES, [96], [96]], 102.0),
        ),
        "batch",
        "x2",
    )
    assert found == pytest.approx([2 + 100 * (128 / 132 + 0.4), 202], rel=1e-3)


def test_a_convolutions_gradient_of_weights_sums_over_twice_the_samples(
    bench: Callable[..., Bench],
) -> None:
    """Its blocks are those of the weight: as many as before, each twice as long."""
    back = ("aten::convolution_backward", [IMAGES, IMAGES, [96, 96, 3, 3]], 902.0)
    assert us(bench(back), "batch", "x2") == pytest.approx([1802], rel=1e-3)


def test_a_cuda_graphs_kernels_are_a_microsecond_apart(bench: Callable[..., Bench]) -> None:
    many = [("aten::relu", [IMAGES], 50.0)] * 5
    graph = predict_change("cuda-graphs", bench(*many).context, "").context.graph
    assert graph.tasks.spacing_ns.tolist() == [1000.0] * 5
    assert len(graph.calls) == 1


def test_a_fused_optimizer_costs_the_host_what_was_measured() -> None:
    """Once a step and for each tensor, in microseconds."""
    forms = ADAM.forms
    assert forms["foreach"].host_us(100, 10**6) == 890 + 17 * 100
    assert forms["fused"].host_us(100, 10**6) / forms["foreach"].host_us(
        100, 10**6
    ) == pytest.approx(0.413, abs=0.001)
    assert forms["fused"].host_us(100, 10**6) / forms["loop"].host_us(100, 10**6) == pytest.approx(
        0.094, abs=0.001
    )


def stepped(folder: Path, optimizer: str, *operators: str) -> Bench:
    """A product, and behind it an optimizer's step of these operators."""
    events: list[dict[str, Any]] = []
    for number in range(STEPS):
        at = number * STEP_US
        events += step(number, start=at, dur=STEP_US)
        events += op("aten::mm", start=at, dur=40, shapes=[[64, 64], [64, 64]])
        events += kernel("k", start=at + 20, dur=50, launched_at=at + 5)
        events += note(f"Optimizer.step#{optimizer}.step", start=at + 500, dur=2000)
        for place, name in enumerate(operators):
            events += op(name, start=at + 520 + 100 * place, dur=60)
            events += kernel("k", start=at + 540 + 100 * place, dur=50,
                             launched_at=at + 530 + 100 * place)  # fmt: skip
    return bench_for(read_trace(write(folder / "stepped.json", events, device="NVIDIA H200")))


@pytest.mark.parametrize(
    ("optimizer", "operators", "rule"),
    [
        ("AdamW", ("aten::_foreach_mul_", "aten::_foreach_addcdiv_"), ADAM),
        ("SGD", ("aten::_foreach_mul_", "aten::_foreach_add_"), MOMENTUM),
        ("SGD", ("aten::_foreach_add_",), PLAIN),
    ],
)
def test_an_optimizers_rule_is_known_by_its_name_and_what_it_runs(
    optimizer: str, operators: tuple[str, ...], rule: UpdateRule, tmp_path: Path
) -> None:
    made = stepped(tmp_path, optimizer, *operators)
    assert made.context.rule == rule
    assert current_form(made.context) == "foreach"


def test_what_has_no_fused_form_is_refused(tmp_path: Path) -> None:
    made = stepped(tmp_path, "RMSprop", "aten::_foreach_mul_", "aten::_foreach_addcdiv_")
    found = ask(made, "optimizer=fused")
    assert found.refused == ("optimizer=fused: PyTorch has no fused form of RMSprop",)


def test_sgd_keeps_less_than_adam() -> None:
    """Parameter and moments, in fp32."""
    assert [rule.state_bytes for rule in (ADAM, MOMENTUM, PLAIN)] == [12, 8, 4]


def test_blocks_are_counted_by_operators_not_kernels(bench: Callable[..., Bench]) -> None:
    """Three blocks of two products; one runs twice in each."""
    block = [("aten::mm", [[512, 768], [768, 3072]], 50.0)] * 2 + [
        ("aten::mm", [[512, 3072], [3072, 768]], 50.0)
    ]
    assert count_blocks(bench(*block * 3).context) == 3


def test_a_product_that_runs_many_times_in_a_block_does_not_hide_the_block(
    bench: Callable[..., Bench],
) -> None:
    """Three blocks of two layers, and five small products of one shape in each."""
    block = [
        ("aten::mm", [[512, 768], [768, 3072]], 50.0),
        *[("aten::bmm", [[96, 64, 64], [96, 64, 64]], 10.0)] * 5,
        ("aten::mm", [[512, 3072], [3072, 768]], 50.0),
    ]
    head = ("aten::mm", [[512, 768], [768, 1000]], 50.0)
    made = bench(*block * 3, head)
    assert count_blocks(made.context) == 3
    # Fifteen times the same layer is nobody's block.
    assert count_blocks(bench(*[block[1]] * 15, head).context) == 15


def test_what_was_not_changed_is_there_again(bench: Callable[..., Bench]) -> None:
    found = bench(("aten::relu", [IMAGES], 50.0), ("aten::mm", [[64, 64], [64, 64]], 10.0))
    same = predict_change("scale", found.context, ".*:1").context.graph
    assert np.array_equal(same.tasks.dur_ns, found.context.graph.tasks.dur_ns)


def _accumulating(folder: Path, micro_batches: int) -> Bench:
    """On a CPU, in microseconds: forward 1000, backward 3000, so often; the optimizer 500."""
    events: list[dict[str, Any]] = []
    length = 4000 * micro_batches + 500
    for at in range(0, 3 * length, length):
        events += step(at // length, start=at, dur=length)
        for now in range(at, at + 4000 * micro_batches, 4000):
            shapes = [[8, 16], [32, 16], [32]]
            events += op("aten::linear", start=now, dur=1000, shapes=shapes, dtypes=["float"] * 3)
            backward = "autograd::engine::evaluate_function: AddmmBackward0"
            events += op(backward, start=now + 1000, dur=3000, forward_thread=1)
        events += note("Optimizer.step#SGD.step", start=at + length - 500, dur=500)
        events += op("aten::add_", start=at + length - 500, dur=500, shapes=[[32, 16]])
    return bench_for(read_trace(write(folder / "cpu.json", events, device=None), cache=False))


@pytest.mark.parametrize(("now", "asked", "factor"), [(1, 4, 4), (2, 4, 2), (4, 8, 2)])
def test_accumulation_counts_the_micro_batches_that_are_there(
    tmp_path: Path, now: int, asked: int, factor: int
) -> None:
    found = ask(_accumulating(tmp_path, now), f"accumulate={asked}")
    step_of = {many: 4000 * many + 500 for many in (now, asked)}
    assert found.predicted_ms / found.baseline_ms == pytest.approx(
        step_of[asked] / step_of[now], rel=0.01
    )
    assert found.throughput_factor == pytest.approx(
        factor * step_of[now] / step_of[asked], rel=0.01
    )
    assert f"{asked} forward and backward passes" in found.assumptions[0]


@pytest.mark.parametrize("asked", [2, 4, 6])
def test_accumulation_refuses_what_is_there_and_what_does_not_divide(
    tmp_path: Path, asked: int
) -> None:
    found = ask(_accumulating(tmp_path, 4), f"accumulate={asked}")
    assert "already has 4 micro-batches" in found.refused[0]
