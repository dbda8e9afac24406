"""Batched products, softmax, norms and attention on another GPU: which shapes cost what."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from stepscope.predict.other_gpu import kernel_time
from stepscope.predict.other_gpu.gpu import Gpu, find_row, make_gpu, transfer_fit
from stepscope.predict.other_gpu.kernel_time import bmm_kind, find_operator, retime


def gpu_named(name: str) -> Gpu:
    row = find_row(name)
    assert row is not None
    return make_gpu(row)


def bmm_ms(gpu: str, side: int) -> float:
    shape = np.array([[512.0, side, side, 512.0]])
    return float(find_operator("bmm").model(shape, "fp32", gpu_named(gpu), transfer_fit())[0])


def test_since_ampere_a_small_batched_product_costs_a_whole_tile() -> None:
    """One tile of 128 x 128 serves a product of 64 x 64 too; older GPUs have smaller tiles."""
    assert bmm_ms("A100-PCIE-80GB", 128) < 1.3 * bmm_ms("A100-PCIE-80GB", 64)
    assert bmm_ms("V100-PCIE-32GB", 128) > 2 * bmm_ms("V100-PCIE-32GB", 64)


@pytest.mark.parametrize(
    ("gpu", "kind"),
    [
        ("L4", "bmm"),
        ("H100-SXM5-80GB", "bmm"),
        ("A100-PCIE-40GB", "bmm"),
        ("T4", "bmm before ampere"),
        ("P4", "bmm before ampere"),
        ("MI210", "bmm before ampere"),
    ],
)
def test_newer_gpus_take_the_kernels_of_ampere(gpu: str, kind: str) -> None:
    assert bmm_kind(gpu_named(gpu).row) == kind


@pytest.mark.parametrize(
    ("columns", "vector", "threads", "steps"),
    [
        (1031, 4, 128, 2 + 1),  # 7 elements are left after two steps of 512
        (1032, 4, 256, 1 + 1),
        (2048, 4, 256, 2),
        (1600, 4, 256, 1 + 3),  # 576 left, 256 at a time
        (2065, 4, 512, 1 + 1),
        (16384, 4, 512, 8),
        (16384, 8, 512, 4),  # half precision: eight elements at once
    ],
)
def test_threads_and_steps_of_a_softmax(
    columns: int, vector: int, threads: int, steps: int
) -> None:
    block = kernel_time._softmax_block(np.array([float(columns)]), float(vector))
    assert [float(number[0]) for number in block] == [threads, steps]


def norm_ms(gpu: Gpu, rows: float, columns: float) -> float:
    shape = np.array([[rows, columns]])
    return float(find_operator("ln").model(shape, "fp32", gpu, transfer_fit())[0])


def test_rows_that_start_a_new_wave_cost_a_whole_one() -> None:
    """The registers of 108 multiprocessors hold 8 blocks each: 864 short rows at a time."""
    gpu = gpu_named("A100-PCIE-40GB")
    assert norm_ms(gpu, 865, 64) == pytest.approx(2 * norm_ms(gpu, 864, 64), rel=0.02)
    assert norm_ms(gpu, 1728, 64) == pytest.approx(norm_ms(gpu, 865, 64), rel=0.02)


def test_a_split_cache_keeps_half_as_many_rows() -> None:
    """28 MB of rows in flight fit one cache of 40 MB, not its halves."""
    halves = gpu_named("A100-PCIE-40GB")
    single = replace(halves, row=replace(halves.row, memory="GDDR"))
    assert (halves.near_l2_bytes, single.near_l2_bytes) == (20e6, 40e6)
    assert norm_ms(halves, 1e5, 4096) > 1.3 * norm_ms(single, 1e5, 4096)


def test_watts_slow_long_attention_and_not_short_one() -> None:
    """L40S has few watts for its peak: long kernels go by achieved rates, short ones do not."""
    long, short = (
        retime(
            op="attention",
            shape=(4, length, 32, 32, 128),
            dtype="bf16",
            ms=ms,
            source="A100-SXM4-80GB",
            target="L40S",
        )[0]
        / ms
        for length, ms in ((16384, 100.0), (512, 0.1))
    )
    source, target = gpu_named("A100-SXM4-80GB"), gpu_named("L40S")
    assert long == pytest.approx(source.rates["bf16"] / target.rates["bf16"], rel=0.01)
    assert short < 0.97 * long
