"""Findings about how well the device is used: each where its cause is, none where it is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stepscope import explain_rank, read_trace
from stepscope.records.explanation import Finding, RankExplanation

from .build import AUTOGRAD, Events, frame, kernel, note, op, write

if TYPE_CHECKING:
    On = Callable[..., RankExplanation]

SIMT = "cutlass_80_simt_sgemm_128x128_8x4_nn_align1"
TENSOR = "nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_NNT"
TF32 = "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x32_stage3"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
SQUARE = [[4096, 4096], [4096, 4096]]
FLOAT, HALF = ["float", "float"], ["c10::BFloat16", "c10::BFloat16"]
FP32, TF32_PEAK, BF16 = 67e12, 494.7e12, 989.5e12  # an H200's


@pytest.fixture
def on_h200(tmp_path: Path) -> On:
    """Events -> a file recorded on an H200 -> everything explained."""

    def explaining(
        *events: Events, device: str = "NVIDIA H200", units: int = 132
    ) -> RankExplanation:
        path = write(tmp_path / "trace.json", *events, device=device)
        text = json.loads(path.read_text())
        text["deviceProperties"] = [{"id": 0, "name": device, "numSms": units}]
        path.write_text(json.dumps(text))
        return explain_rank(read_trace(path, cache=False))

    return explaining


def calls(*rows: tuple[Any, ...]) -> Events:
    """(operator, kernel, µs, shapes, dtypes): queued long before, back to back on the device."""
    out: Events = []
    at = 0.0
    for place, (name, on_device, dur, *said) in enumerate(rows):
        host = -20.0 * (len(rows) - place)
        shapes, dtypes = said or (None, None)
        out += op(name, start=host, dur=10, shapes=shapes, dtypes=dtypes)
        out += kernel(on_device, start=at, dur=dur, launched_at=host + 2)
        at += dur
    return out


def product(dur: float = 2500, shapes: Any = SQUARE, dtypes: Any = FLOAT, by: str = SIMT) -> Any:
    return ("aten::mm", by, dur, shapes, dtypes)


def addition(dur: float = 200, side: int = 8192) -> Any:
    return ("aten::add", ADD, dur, [[side, side], [side, side]], FLOAT)


def found(rank: RankExplanation, name: str) -> Finding | None:
    return next((each for each in rank.findings if each.id == name), None)


def sure(rank: RankExplanation, name: str) -> Finding:
    finding = found(rank, name)
    assert finding is not None, [each.id for each in rank.findings]
    assert finding.summary.endswith(".")
    assert finding.evidence
    assert finding.remedies
    return finding


class TestFp32Matmuls:
    def test_share_is_what_the_first_faster_dtype_would_save(self, on_h200: On) -> None:
        rank = on_h200(calls(product(2500), product(2500), addition(1000)))
        finding = sure(rank, "fp32-matmuls")
        # 5000 of 6000 µs in fp32; as close to tf32's peak they take 67 / 494.7 of that
        assert finding.share == pytest.approx(5000 * (1 - FP32 / TF32_PEAK) / 6000, rel=1e-3)
        assert finding.severity == "high"
        assert finding.summary == (
            "FP32 matmuls take 83% of the step. This GPU runs TF32 matmuls up to 7.38 times faster."
        )
        assert [each.id for each in finding.remedies] == ["tf32", "bf16"]
        # 2 * 4096^3 FLOPs in 2500 µs
        assert "at 55.0 TFLOP/s (peak 67.0 TFLOP/s)" in finding.evidence[0]

    def test_work_bound_by_memory_is_not_promised_more_than_memory_gives(self, on_h200: On) -> None:
        # 4096 x 32 x 4096: 1.07 GFLOP, and 68.2 MB at 4.8 TB/s need 14.2 µs
        thin = product(40, [[4096, 32], [32, 4096]])
        finding = sure(on_h200(calls(thin)), "fp32-matmuls")
        assert finding.share == pytest.approx((40 - 68.157 / 4.8) / 40, rel=1e-3)

    @pytest.mark.parametrize(
        ("dtypes", "by", "device"),
        [
            (HALF, TENSOR, "NVIDIA H200"),
            (FLOAT, TF32, "NVIDIA H200"),
            (FLOAT, SIMT, "NVIDIA Unheard Of"),
        ],
        ids=["bf16", "tf32", "unknown device"],
    )
    def test_says_nothing_of_fast_dtypes_nor_of_an_unknown_device(
        self, on_h200: On, dtypes: list[str], by: str, device: str
    ) -> None:
        rank = on_h200(calls(product(2500, dtypes=dtypes, by=by)), device=device)
        assert found(rank, "fp32-matmuls") is None

    def test_fp32_that_tensor_cores_make_of_tf32_is_only_faster_in_bf16(self, on_h200: On) -> None:
        attention = "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention)"
        heads = [[8, 12, 1024, 64]] * 3
        row = ("aten::_efficient_attention_forward", attention, 2000, heads, ["float"] * 3)
        finding = sure(on_h200(calls(row)), "fp32-matmuls")
        assert [each.id for each in finding.remedies] == ["bf16"]
        assert finding.share == pytest.approx(1 - TF32_PEAK / 3 / BF16, rel=1e-3)

    def test_an_old_device_without_bf16_is_offered_fp16(self, on_h200: On) -> None:
        rank = on_h200(calls(product(20_000)), device="Tesla V100-SXM2-16GB", units=80)
        assert [each.id for each in sure(rank, "fp32-matmuls").remedies] == ["fp16"]

    def test_while_the_host_starves_the_device_faster_kernels_are_not_grave(
        self, on_h200: On
    ) -> None:
        late = kernel(ADD, start=6000, dur=15, launched_at=5999, launch_dur=0.5)
        rank = on_h200(calls(product(2500)), late)
        assert sure(rank, "fp32-matmuls").severity == "medium"
        assert rank.findings[0].id == "host-bound"

    def test_the_line_of_the_product_is_named(self, on_h200: On) -> None:
        rank = on_h200(calls(product(2500)), frame("model.py(7): forward", start=-40, dur=40))
        (place,) = sure(rank, "fp32-matmuls").where
        assert (place.file, place.line) == ("model.py", 7)


class TestTensorCoresIdle:
    def test_half_precision_on_plain_cores_is_told(self, on_h200: On) -> None:
        finding = sure(on_h200(calls(product(900, dtypes=HALF))), "tensor-cores-idle")
        assert finding.share == pytest.approx(1.0)
        assert "without tensor cores: 0.900 ms of the 0.900 ms step" in finding.evidence[0]

    def test_a_slow_product_of_odd_size_is_told_with_its_size(self, on_h200: On) -> None:
        odd = [[8192, 768], [768, 50257]]
        finding = sure(
            on_h200(calls(product(3000, odd, HALF, TENSOR), addition(600))), "tensor-cores-idle"
        )
        # 632 GFLOP at 989.5 TFLOP/s are 639 µs
        roof = 2 * 8192 * 768 * 50257 / BF16 * 1e6
        assert finding.share == pytest.approx((3000 - roof) / 3600, rel=1e-3)
        assert any("50257 is not a multiple of 8" in line for line in finding.evidence)

    @pytest.mark.parametrize(
        ("dur", "wide"),
        [(3000, 50304), (700, 50257), (12, 13)],
        ids=["even and slow", "odd and fast", "odd and tiny"],
    )
    def test_says_nothing_where_size_is_not_the_reason(
        self, on_h200: On, dur: float, wide: int
    ) -> None:
        rank = on_h200(calls(product(dur, [[8192, 768], [768, wide]], HALF, TENSOR)))
        assert found(rank, "tensor-cores-idle") is None


class TestMemoryBound:
    def test_share_is_a_run_of_neighbours_less_its_longest(self, on_h200: On) -> None:
        rank = on_h200(
            calls(
                addition(200),
                addition(300),
                addition(250),
                product(250, dtypes=HALF, by=TENSOR),
                addition(500),
            )
        )
        finding = sure(rank, "memory-bound")
        assert finding.share == pytest.approx(450 / 1500)
        assert finding.summary.startswith("83% of the step is limited by memory bandwidth")
        assert finding.evidence[1].startswith("in 1 run of neighbouring kernels")
        # four additions are one spot: 4 x 3 x 8192 x 8192 x 4 bytes in 1250 µs
        assert "1.25 ms of the 1.50 ms step, 2.58 TB/s" in finding.evidence[2]

    def test_says_nothing_of_a_lone_kernel_or_of_kernels_already_joined(self, on_h200: On) -> None:
        alone = calls(addition(500), product(250, dtypes=HALF, by=TENSOR), addition(500))
        assert found(on_h200(alone), "memory-bound") is None
        lists = [[[1024], [1024]]]
        joined = calls(*[("aten::_foreach_add_", ADD, 300, lists, ["TensorList"])] * 4)
        assert found(on_h200(joined), "memory-bound") is None

    def test_says_nothing_where_products_fill_the_step(self, on_h200: On) -> None:
        rank = on_h200(calls(product(5000, by=TF32), addition(100), addition(100)))
        assert found(rank, "memory-bound") is None


def small(count: int, blocks: int, dur: float) -> Events:
    return [
        event
        for i in range(count)
        for event in kernel(
            f"k{i % 5}", start=dur * i, dur=dur, launched_at=-200, grid=[blocks, 1, 1]
        )
    ]


class TestSmallBatch:
    def test_share_is_time_weighted_by_idle_multiprocessors(self, on_h200: On) -> None:
        finding = sure(on_h200(small(50, blocks=33, dur=4)), "small-batch")
        assert finding.share == pytest.approx(0.75)  # 33 blocks on 132 multiprocessors
        assert finding.severity == "high"
        assert "50 of 50 kernels have fewer blocks than multiprocessors" in finding.evidence[0]

    @pytest.mark.parametrize(("blocks", "dur"), [(264, 4), (33, 400)], ids=["full", "long"])
    def test_says_nothing_of_full_waves_or_of_long_kernels(
        self, on_h200: On, blocks: int, dur: float
    ) -> None:
        assert found(on_h200(small(50, blocks, dur)), "small-batch") is None

    def test_says_nothing_where_grids_were_not_recorded(self, on_h200: On) -> None:
        rank = on_h200(calls(*[addition(4, 64)] * 30))
        assert found(rank, "small-batch") is None


ADAM = ("aten::mul_", "aten::lerp_", "aten::addcmul_", "aten::addcdiv_")


def optimizer(*names: str) -> Events:
    """One optimizer step after 1 ms of products: a kernel of 3 µs every 10 µs."""
    out = calls(product(1000, dtypes=HALF, by=TENSOR))
    out += note("Optimizer.step#AdamW.step", start=980, dur=10.0 * len(names) + 20)
    for i, name in enumerate(names):
        at = 990 + 10.0 * i
        out += op(name, start=at, dur=8)
        out += kernel(ADD, start=at + 10, dur=3, launched_at=at + 1)
    return out


class TestOptimizerPerParameter:
    def test_parameters_and_kernels_are_counted(self, on_h200: On) -> None:
        finding = sure(on_h200(optimizer(*ADAM * 30)), "optimizer-per-parameter")
        assert "launches 120 kernels" in finding.summary
        assert "about 30 parameters, 4.00 kernels each" in finding.evidence[1]
        # from 1000 to 1000 + 119 * 10 + 3 µs, of 2193 µs
        assert finding.share == pytest.approx(1193 / 2193)
        assert [each.id for each in finding.remedies] == ["fused-optimizer", "cuda-graphs"]

    @pytest.mark.parametrize(
        "names",
        [("aten::_foreach_mul_", "aten::_foreach_addcdiv_") * 60, ADAM * 5],
        ids=["foreach", "few parameters"],
    )
    def test_says_nothing_of_lists_or_of_few_parameters(
        self, on_h200: On, names: tuple[str, ...]
    ) -> None:
        assert found(on_h200(optimizer(*names)), "optimizer-per-parameter") is None


def copied(outer: str, inner: str, dtypes: list[str]) -> Events:
    """500 µs of products, then a copy of 100 µs inside two operators."""
    shape = [[4096, 4096], [4096, 4096]]
    return [
        *calls(product(500, dtypes=HALF, by=TENSOR)),
        *op(outer, start=-15, dur=14),
        *op(inner, start=-14, dur=12),
        *op("aten::copy_", start=-13, dur=10, shapes=shape, dtypes=dtypes),
        *kernel(ADD, start=500, dur=100, launched_at=-12),
    ]


class TestLayoutCopies:
    def test_a_copy_that_contiguous_makes_is_told(self, on_h200: On) -> None:
        rank = on_h200(copied("aten::contiguous", "aten::clone", HALF))
        finding = sure(rank, "layout-copies")
        assert finding.share == pytest.approx(100 / 600)
        assert [each.id for each in finding.remedies] == ["compile"]

    def test_a_transpose_inside_a_convolution_asks_for_channels_last(self, on_h200: On) -> None:
        transpose = "void cudnn::ops::nchwToNhwcKernel<float, float, float>"
        images = [[32, 64, 56, 56], [64, 64, 3, 3]]
        rows = [("aten::cudnn_convolution", by, 100, images, FLOAT) for by in (transpose, TF32)]
        finding = sure(on_h200(calls(*rows)), "layout-copies")
        assert finding.share == pytest.approx(0.5)
        assert finding.remedies[0].id == "channels-last"
        assert "for aten::cudnn_convolution: 1 kernel," in finding.evidence[1]

    def test_says_nothing_of_a_cast(self, on_h200: On) -> None:
        rank = on_h200(copied("aten::to", "aten::_to_copy", ["c10::BFloat16", "float"]))
        assert found(rank, "layout-copies") is None


def checkpointed(again: bool) -> Events:
    """A product in forward, its gradients in backward and, with `again`, itself before them."""
    node = "autograd::engine::evaluate_function: CheckpointFunctionBackward"
    out = op("aten::mm", start=-90, dur=10, shapes=SQUARE, dtypes=HALF, sequence=7)
    out += kernel(TENSOR, start=0, dur=300, launched_at=-88)
    out += op(node, start=-70, dur=60, thread=AUTOGRAD, sequence=7, forward_thread=1)
    if again:
        told = {"shapes": SQUARE, "dtypes": HALF, "sequence": 9, "thread": AUTOGRAD}
        out += op("aten::mm", start=-65, dur=10, **told)
        out += kernel(TENSOR, start=300, dur=300, launched_at=-63, thread=AUTOGRAD)
    gradients = {"shapes": SQUARE, "dtypes": HALF, "thread": AUTOGRAD}
    out += op("aten::mm", start=-50, dur=10, **gradients)
    out += kernel(TENSOR, start=600 if again else 300, dur=600, launched_at=-48, thread=AUTOGRAD)
    return out


class TestRecomputation:
    def test_share_is_the_time_of_what_ran_twice(self, on_h200: On) -> None:
        finding = sure(on_h200(checkpointed(again=True)), "recomputation")
        assert finding.share == pytest.approx(300 / 1200)
        assert finding.severity == "medium"  # a quarter would be high: but somebody chose it
        assert "33% of the step's FLOPs are done twice" in finding.evidence[1]

    def test_says_nothing_of_an_ordinary_backward(self, on_h200: On) -> None:
        assert found(on_h200(checkpointed(again=False)), "recomputation") is None


def waiting() -> Events:
    """300 µs of work, then 300 µs in which nothing is queued."""
    return [
        *calls(product(300, dtypes=HALF, by=TENSOR)),
        *kernel(ADD, start=600, dur=15, launched_at=599, launch_dur=0.5),
    ]


class TestPythonOverhead:
    def test_python_between_operators_is_told_with_its_line(self, on_h200: On) -> None:
        rank = on_h200(waiting(), frame("train.py(12): log", start=-50, dur=700))
        finding = sure(rank, "python-overhead")
        assert finding.share == pytest.approx(299 / 615, rel=0.01)
        assert (finding.where[0].file, finding.where[0].line) == ("train.py", 12)
        assert rank.findings[0].id == "host-bound"  # what the device sees leads

    def test_says_nothing_where_operators_take_the_time(self, on_h200: On) -> None:
        rank = on_h200(waiting(), op("aten::nonzero", start=290, dur=320))
        assert found(rank, "host-bound") is not None
        assert found(rank, "python-overhead") is None


@pytest.mark.parametrize(
    ("name", "says", "silent"),
    [
        ("gpt2s_b8_fp32", {"fp32-matmuls"}, {"recomputation", "memory-bound"}),
        ("gpt2s_b8_bf16", {"memory-bound"}, {"fp32-matmuls", "optimizer-per-parameter"}),
        ("gpt2s_b8_bf16_ckpt", {"recomputation"}, {"fp32-matmuls", "tensor-cores-idle"}),
        ("mlp_b32_fp32_loop", {"optimizer-per-parameter"}, {"memory-bound"}),
        ("mlp_b32_fp32_fused", {"small-batch"}, {"optimizer-per-parameter", "recomputation"}),
        ("vitb16_b64_bf16", {"layout-copies"}, {"fp32-matmuls", "recomputation"}),
    ],
)
def test_real_recordings_say_what_they_are_known_for(
    shared: Path, name: str, says: set[str], silent: set[str]
) -> None:
    rank = explain_rank(read_trace(shared / f"traces/h200/{name}.json.gz", cache=False))
    ids = {each.id for each in rank.findings}
    assert says <= ids
    assert not silent & ids


def test_what_fusing_should_save_is_what_the_compiled_recording_saved(shared: Path) -> None:
    """The same model and optimizer, eager and through torch.compile: kernel time of one step."""
    eager, joined = (
        explain_rank(read_trace(shared / f"traces/h200/gpt2s_b8_bf16_{name}.json.gz", cache=False))
        for name in ("fused", "compile")
    )
    told = sure(eager, "memory-bound").share * eager.budget.step_ms
    (saved,) = (
        a.ms - b.ms
        for a, b in zip(eager.budget.parts, joined.budget.parts, strict=True)
        if a.id == "compute"
    )
    assert told == pytest.approx(saved, rel=0.15)
    assert found(joined, "memory-bound") is None
