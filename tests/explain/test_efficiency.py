"""MFU, HFU, dtypes and the roofline, on tiny traces by hand and on real ones by formula."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benches import analyse
from stepscope import explain_rank, read_trace
from stepscope.explain.efficiency import measure_efficiency
from stepscope.explain.rank import truncate_tables
from stepscope.explain.verdict import judge
from stepscope.records.explanation import RankExplanation, StepTime
from stepscope.records.hardware import Efficiency, Profile, Spot, find_device
from stepscope.records.rank import MeasuredSteps
from stepscope.ui.topics.explanation_json import explanation_json

from .build import AUTOGRAD, Events, graph, kernel, memcpy, note, op, step
from .conftest import Explain, Read

BF16, FLOAT = "c10::BFloat16", "float"
GEMM = "nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_NNT"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
H200 = find_device("NVIDIA H200")
assert H200 is not None
PEAK, WIDE = H200.peaks["bf16"], H200.bandwidth_bytes_s
FLOPS = 2 * 1024**3


def product(at: float, dtype: str = BF16, name: str = GEMM, **kwargs: Any) -> Events:
    """[1024, 1024] x [1024, 1024], 20 µs on the device."""
    shapes = [[1024, 1024], [1024, 1024]]
    return [
        *op("aten::mm", start=at, dur=3, shapes=shapes, dtypes=[dtype] * 2, **kwargs),
        *kernel(name, start=at + 5, dur=20, launched_at=at + 1, thread=kwargs.get("thread", 100)),
    ]


def addition(at: float) -> Events:
    """A million floats to a million others, 10 µs."""
    shapes = [[1000, 1000], [1000, 1000], []]
    return [
        *op("aten::add", start=at, dur=3, shapes=shapes, dtypes=[FLOAT, FLOAT, "Scalar"]),
        *kernel(ADD, start=at + 30, dur=10, launched_at=at + 1),
    ]


def steps_of(*parts: Any, steps: int = 3, every: float = 100) -> list[Events]:
    """The same work in each step."""
    return [
        events
        for number in range(steps)
        for events in (
            step(number, start=number * every, dur=every),
            *(part(number * every + 5 + 5 * place) for place, part in enumerate(parts)),
        )
    ]


def truth_of(step_ns: int) -> MeasuredSteps:
    """A step measured without the profiler."""
    return MeasuredSteps(
        steps=20, steps_ns=(), step_ns=step_ns, wall_ns=step_ns, device_ns=None, phases_ns={}
    )


def efficiency_of(explained: Explain, *events: Events, device: str = "NVIDIA H200") -> Efficiency:
    found = explained(*events, device=device).efficiency
    assert found is not None
    return found


def written_for(rank: RankExplanation) -> dict[str, Any]:
    """As `explain --json` has it."""
    found: dict[str, Any] = explanation_json(judge((rank,), ()))["ranks"][0]["efficiency"]
    return found


def spot_of(efficiency: Efficiency, operator: str) -> Spot:
    (found,) = (spot for spot in efficiency.spots if spot.operator == operator)
    return found


def test_mfu_is_flops_over_step_and_peak(explained: Explain) -> None:
    found = efficiency_of(explained, *steps_of(product, addition))
    assert found.model_flops == found.hardware_flops == FLOPS
    assert found.step_ms is not None
    assert found.mfu == found.hfu == pytest.approx(FLOPS / (found.step_ms / 1e3 * PEAK))
    assert (found.peak_flops, found.peak_source, found.dtype) == (PEAK, "table", "bf16")
    assert found.unknown_share == 0
    assert found.tensor_core_share == 1
    (use,) = found.by_dtype
    assert (use.flops, use.device_ns, use.tensor_core_ns) == (FLOPS, 20_000, 20_000)


@pytest.mark.parametrize(
    ("step_ms", "expected"),
    [
        (StepTime(profiled=0.1), 0.1),
        (StepTime(profiled=0.1, corrected=0.07), 0.07),
        (StepTime(profiled=0.1, corrected=0.07, truth=0.05), 0.05),
    ],
)
def test_the_step_is_the_measured_else_the_corrected_else_the_profiled_one(
    read: Read, step_ms: StepTime, expected: float
) -> None:
    trace = read(*steps_of(product), device="NVIDIA H200")
    found = measure_efficiency(analyse(trace), step_ms)
    assert found is not None
    assert found.step_ms == expected
    assert found.mfu == pytest.approx(FLOPS / (expected / 1e3 * PEAK))


def test_a_calibrated_peak_goes_before_the_data_sheet(read: Read) -> None:
    trace = read(*steps_of(product), device="NVIDIA H200")
    profile = Profile(
        host="here",
        device="NVIDIA H200",
        kind="cuda",
        torch="2.11",
        when_unix=0.0,
        world_size=1,
        backend=None,
        threads=1,
        matmul_flops={"bf16": 8e14},
        copy_bytes_s=4.3e12,
    )
    found = explain_rank(trace, profile=profile).efficiency
    assert found is not None
    assert found.ceilings is not None
    assert (found.peak_flops, found.peak_source) == (8e14, "calibrated")
    assert found.ceilings.flops_source == {
        **dict.fromkeys(H200.peaks, "table"),
        "bf16": "calibrated",
    }
    assert (found.ceilings.bytes_s, found.ceilings.bytes_source) == (4.3e12, "calibrated")
    assert "here" in found.ceilings.source


def test_a_cpu_has_a_peak_only_where_it_was_calibrated(read: Read) -> None:
    shapes = [[64, 64], [64, 64]]
    events = [
        step(1, start=0, dur=100),
        op("aten::mm", start=10, dur=50, shapes=shapes, dtypes=[FLOAT] * 2),
    ]
    trace = read(*events, device=None)
    found = explain_rank(trace).efficiency
    assert found is not None
    assert (found.mfu, found.ceilings, found.model_flops) == (None, None, 2 * 64**3)
    profile = Profile(
        host="here",
        device="a CPU",
        kind="cpu",
        torch="2.11",
        when_unix=0.0,
        world_size=1,
        backend=None,
        threads=1,
        matmul_flops={"fp32": 1e11},
    )
    found = explain_rank(trace, profile=profile).efficiency
    assert found is not None
    assert found.step_ms is not None
    assert found.mfu == pytest.approx(2 * 64**3 / (found.step_ms / 1e3 * 1e11))
    assert found.tensor_core_share is None


def test_a_device_that_nobody_knows_has_flops_and_no_mfu(explained: Explain) -> None:
    found = efficiency_of(explained, *steps_of(product), device="Some Device 9000")
    assert (found.mfu, found.peak_flops, found.ceilings) == (None, None, None)
    assert found.model_flops == FLOPS
    assert spot_of(found, "aten::mm").bound == "unknown"


def test_a_rank_on_two_devices_is_measured_against_both(explained: Explain) -> None:
    def second(at: float) -> Events:
        shapes = [[1024, 1024], [1024, 1024]]
        return [
            *op("aten::mm", start=at, dur=3, shapes=shapes, dtypes=[BF16] * 2),
            *kernel(GEMM, start=at + 5, dur=20, launched_at=at + 1, device=1),
        ]

    one = efficiency_of(explained, *steps_of(product, product))
    two = efficiency_of(explained, *steps_of(product, second))
    assert (one.devices, two.devices) == (1, 2)
    assert one.mfu is not None
    assert two.mfu == pytest.approx(one.mfu / 2)


def test_recomputed_products_count_in_hfu_only(explained: Explain) -> None:
    def backward(at: float) -> Events:
        return [
            *op("MmBackward0", start=at, dur=30, thread=AUTOGRAD, sequence=1, forward_thread=1),
            *product(at + 1, thread=AUTOGRAD, sequence=9, forward_thread=0),
            *product(at + 12, thread=AUTOGRAD),
        ]

    def forward(at: float) -> Events:
        return product(at, sequence=1, forward_thread=0)

    found = efficiency_of(explained, *steps_of(forward, backward))
    assert (found.model_flops, found.hardware_flops) == (2 * FLOPS, 3 * FLOPS)
    assert found.recomputed_flops == FLOPS
    assert found.mfu is not None
    assert found.hfu == pytest.approx(1.5 * found.mfu)
    assert {(spot.phase, spot.recomputed) for spot in found.spots} == {
        ("forward", False),
        ("backward", False),
        ("backward", True),
    }


def test_the_dtype_that_did_most_is_the_peak_and_all_are_listed(explained: Explain) -> None:
    def tf32(at: float) -> Events:
        return product(at, dtype=FLOAT, name="sm90_xmma_gemm_f32f32_tf32f32_f32_nt_n_tilesize256")

    def fp32(at: float) -> Events:
        return product(at, dtype=FLOAT, name="ampere_sgemm_128x64_nn")

    found = efficiency_of(explained, *steps_of(tf32, fp32, tf32))
    assert [(use.dtype, use.flops) for use in found.by_dtype] == [
        ("tf32", 2 * FLOPS),
        ("fp32", FLOPS),
    ]
    assert found.peak_flops == H200.peaks["tf32"]
    assert found.tensor_core_share == pytest.approx(2 / 3)


def test_kernels_nobody_can_tell_about_are_a_share_of_compute(explained: Explain) -> None:
    """20 µs known, 10 harmless, 30 of somebody's operator: half is unknown."""

    def foreign(at: float) -> Events:
        return [
            *op("mine::attention", start=at, dur=3),
            *kernel("my_kernel", start=at + 50, dur=30, launched_at=at + 1),
        ]

    found = efficiency_of(explained, *steps_of(product, addition, foreign))
    assert found.unknown_share == pytest.approx(0.5)
    assert any("50% of compute time" in note for note in found.notes)


def test_a_cuda_graphs_products_are_unknown_and_its_other_kernels_harmless(
    explained: Explain,
) -> None:
    def replayed(at: float) -> Events:
        kernels = [kernel(GEMM, start=at + 10, dur=20), kernel(ADD, start=at + 31, dur=60)]
        return graph(kernels, launched_at=at)

    found = efficiency_of(explained, *steps_of(replayed))
    assert found.unknown_share == pytest.approx(0.25)
    assert (found.mfu, found.model_flops) == (None, 0)
    assert any("CUDA graph" in note for note in found.notes)


def test_without_shapes_the_note_says_how_to_record_them(explained: Explain) -> None:
    def bare(at: float) -> Events:
        return [
            *op("aten::mm", start=at, dur=3),
            *kernel(GEMM, start=at + 5, dur=20, launched_at=at + 1),
        ]

    found = efficiency_of(explained, *steps_of(bare))
    assert found.mfu is None
    assert found.unknown_share == 1
    assert any("record_shapes=True" in note for note in found.notes)


def test_a_products_roof_is_its_arithmetic_and_an_additions_its_bytes(explained: Explain) -> None:
    found = efficiency_of(explained, *steps_of(product, addition))
    big, small = spot_of(found, "aten::mm"), spot_of(found, "aten::add")
    assert (big.calls, big.device_ns, big.flops, big.bytes_moved) == (1, 20_000, FLOPS, 6 << 20)
    assert big.intensity == pytest.approx(FLOPS / (6 << 20))
    assert big.roof_ns == pytest.approx(FLOPS / PEAK * 1e9)
    assert big.gap_ns == pytest.approx(20_000 - FLOPS / PEAK * 1e9)
    assert big.achieved_flops == pytest.approx(FLOPS / 20e-6)
    assert big.ceiling_flops == pytest.approx(PEAK)
    assert (big.bound, small.bound) == ("compute", "memory")
    assert small.flops == 0
    assert small.roof_ns == pytest.approx(12e6 / WIDE * 1e9)
    assert [spot.operator for spot in found.spots] == ["aten::mm", "aten::add"]


def test_a_thin_product_is_bound_by_memory_at_a_lower_ceiling(explained: Explain) -> None:
    def thin(at: float) -> Events:
        shapes = [[8, 1024], [1024, 1024]]
        return [
            *op("aten::mm", start=at, dur=3, shapes=shapes, dtypes=[BF16] * 2),
            *kernel(GEMM, start=at + 5, dur=20, launched_at=at + 1),
        ]

    spot = spot_of(efficiency_of(explained, *steps_of(thin)), "aten::mm")
    moved = 2 * (8 * 1024 + 1024 * 1024 + 8 * 1024)
    assert spot.bound == "memory"
    assert spot.roof_ns == pytest.approx(moved / WIDE * 1e9)
    assert spot.ceiling_flops == pytest.approx(spot.intensity * WIDE)


def test_copies_from_the_host_stand_under_no_roof(explained: Explain) -> None:
    def loaded(at: float) -> Events:
        shapes = [[1000], [1000], []]
        return [
            *op("aten::copy_", start=at, dur=3, shapes=shapes, dtypes=[FLOAT, FLOAT, "Scalar"]),
            *memcpy(start=at + 50, dur=30, launched_at=at + 1),
        ]

    found = efficiency_of(explained, *steps_of(product, loaded))
    assert [spot.operator for spot in found.spots] == ["aten::mm"]


def test_with_many_ranks_spots_are_cut_and_what_is_left_out_is_summed(explained: Explain) -> None:
    def unlike(place: int) -> Any:
        def made(at: float) -> Events:
            shapes = [[64 + place, 64], [64, 64]]
            return [
                *op("aten::mm", start=at, dur=3, shapes=shapes, dtypes=[BF16] * 2),
                *kernel(GEMM, start=at + 5, dur=1 + place, launched_at=at + 1),
            ]

        return made

    rank = explained(
        *steps_of(*(unlike(place) for place in range(30)), every=1000), device="NVIDIA H200"
    )
    whole, short = rank.efficiency, truncate_tables(rank, 100).efficiency
    assert whole is not None
    assert short is not None
    assert len(whole.spots) == 30
    assert short.spots[:20] == whole.spots[:20]
    assert {spot.operator for spot in short.spots[20:]} == {"(others)"}
    for name in ("calls", "device_ns", "flops", "bytes_moved", "gap_ns"):
        sums = [sum(getattr(spot, name) for spot in each.spots) for each in (whole, short)]
        assert sums[0] == pytest.approx(sums[1])


def test_json_writes_flops_that_nobody_could_count_as_null(explained: Explain) -> None:
    def bare(at: float) -> Events:
        return [
            *op("aten::mm", start=at, dur=3),
            *kernel(GEMM, start=at + 5, dur=20, launched_at=at + 1),
        ]

    written = written_for(explained(*steps_of(bare)))
    names = ("mfu", "hfu", "model_flops", "hardware_flops", "recomputed_flops")
    assert [written[name] for name in names] == [None] * 5
    written = written_for(explained(*steps_of(product), device="NVIDIA H200"))
    assert written["model_flops"] == FLOPS
    assert written["spots"][0]["operator"] == "aten::mm"
    assert json.loads(json.dumps(written))["dtype"] == "bf16"


def test_no_device_work_means_no_efficiency(explained: Explain) -> None:
    assert explained(step(1, start=0, dur=100), note("x", start=1, dur=1)).efficiency is None


# GPT-2 small: per token 6N + 12·L·H·S, N without the embeddings that are only looked up.
LAYERS, WIDTH, LENGTH, VOCABULARY = 12, 768, 1024, 50304
MATRICES = LAYERS * 12 * WIDTH**2 + VOCABULARY * WIDTH
PER_TOKEN = 6 * MATRICES + 12 * LAYERS * WIDTH * LENGTH
SCORES = 2 * LAYERS * WIDTH * LENGTH  # of a token, one of attention's products


def real(shared: Path, name: str) -> tuple[Efficiency, dict[str, Any]]:
    path = shared / "traces" / "h200" / f"{name}.json.gz"
    if not path.is_file():
        pytest.skip(f"{path} is not on this machine")
    truth = json.loads((path.parent / "truth.json").read_text())[name]
    step_ns = round(truth["step_ms_pipelined"] * 1e6)
    rank = explain_rank(read_trace(path, cache=False), truth_of(step_ns))
    assert rank.efficiency is not None
    return rank.efficiency, truth


@pytest.mark.parametrize(
    ("name", "dtype", "peak", "mfu"),
    [
        ("gpt2s_b8_fp32", "fp32", 67e12, 0.646),
        ("gpt2s_b16_fp32", "fp32", 67e12, 0.689),
        ("gpt2s_b8_tf32", "tf32", 494e12, 0.244),
        ("gpt2s_b8_bf16", "bf16", 989e12, 0.228),
        ("gpt2s_b8_bf16_compile", "bf16", 989e12, 0.331),
    ],
)
def test_gpt2_on_an_h200_agrees_with_the_formula(
    shared: Path, name: str, dtype: str, peak: float, mfu: float
) -> None:
    found, truth = real(shared, name)
    tokens = truth["batch"] * LENGTH
    assert found.model_flops == pytest.approx(tokens * PER_TOKEN, rel=1e-3)
    # Fused attention computes its scores again in backward.
    assert found.hardware_flops == pytest.approx(tokens * (PER_TOKEN + SCORES), rel=1e-3)
    assert found.dtype == dtype
    assert found.peak_flops == pytest.approx(peak, rel=2e-3)
    assert found.mfu == pytest.approx(mfu, abs=2e-3)
    assert found.unknown_share == 0
    assert any("causal" in note for note in found.notes)


def test_gpt2_with_checkpoints_computes_its_blocks_again(shared: Path) -> None:
    found, truth = real(shared, "gpt2s_b8_bf16_ckpt")
    tokens = truth["batch"] * LENGTH
    # All of a block but its last product: there the checkpoint stops.
    blocks = tokens * (2 * LAYERS * 8 * WIDTH**2 + 4 * LAYERS * WIDTH * LENGTH)
    assert found.model_flops == pytest.approx(tokens * PER_TOKEN, rel=1e-3)
    again = found.recomputed_flops - tokens * SCORES
    assert again == pytest.approx(blocks, rel=1e-3)
    assert found.mfu is not None
    assert found.hfu is not None
    assert found.hfu / found.mfu == pytest.approx(found.hardware_flops / found.model_flops)
    assert sum(spot.flops or 0 for spot in found.spots if spot.recomputed) == pytest.approx(again)


def test_gpt2_in_a_cuda_graph_is_unknown_and_not_zero(shared: Path) -> None:
    found, _ = real(shared, "gpt2s_b8_bf16_graph")
    assert found.mfu is None
    assert found.unknown_share == pytest.approx(0.37, abs=0.02)


def test_compiled_gpt2_says_how_much_torch_compile_wrote(shared: Path) -> None:
    found, _ = real(shared, "gpt2s_b8_bf16_compile")
    assert any(
        "28% of compute time is in kernels that torch.compile wrote" in n for n in found.notes
    )


def test_spots_hold_all_flops_and_all_device_time_of_operators(shared: Path) -> None:
    found, _ = real(shared, "gpt2s_b8_bf16")
    assert sum(spot.flops or 0 for spot in found.spots) == pytest.approx(found.hardware_flops)
    gaps = [spot.gap_ns for spot in found.spots if spot.gap_ns is not None]
    assert gaps == sorted(gaps, reverse=True)


def test_recomputation_is_found_on_amd_too(shared: Path) -> None:
    path = shared / "traces" / "third_party" / "mi300x_resnet_checkpoint_rank0of8.json.gz"
    if not path.is_file():
        pytest.skip(f"{path} is not on this machine")
    found = explain_rank(read_trace(path, cache=False)).efficiency
    assert found is not None
    # ResNet-18, ten images: 1.81 G multiply-adds each, in backward twice but for the first layer.
    assert found.model_flops == pytest.approx(10 * 3 * 2 * 1.814e9 - 10 * 2 * 0.118e9, rel=0.005)
    assert found.recomputed_flops == pytest.approx(3.39e10, rel=0.01)
    assert found.dtype == "bf16"
    assert found.tensor_core_share == 1
