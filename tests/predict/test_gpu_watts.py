"""Boards that are short of watts: which products their lower clocks slow, and by how much."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from stepscope.measure.calibrate.ceilings import _sustained_flops
from stepscope.predict.other_gpu.gpu import Gpu, find_gpu, transfer_fit, with_profile
from stepscope.predict.other_gpu.kernel_time import find_operator, inside_step
from stepscope.records.hardware import Profile


def product_ms(gpu: Gpu, *shape: float, dtype: str = "fp32", in_step: bool = False) -> float:
    fit = inside_step(transfer_fit()) if in_step else transfer_fit()
    return float(find_operator("linear").model(np.array([shape]), dtype, gpu, fit)[0])


def flops_s(gpu: Gpu, *shape: float, in_step: bool = False) -> float:
    return 2e3 * float(np.prod(shape)) / product_ms(gpu, *shape, in_step=in_step)


LONG, ODD = (1, 8192, 8192, 8192), (1, 8192, 8193, 8193)
SHORT, SHORT_ODD = (1, 1024, 1024, 1024), (1, 1024, 1025, 1025)


def test_long_products_of_odd_sides_are_slowed_most() -> None:
    board = find_gpu("T4")
    assert flops_s(board, *ODD) < 0.9 * flops_s(board, *LONG)
    rich = replace(board, full_rates=board.rates)  # no lack of watts
    assert flops_s(rich, *ODD) == pytest.approx(flops_s(rich, *LONG), rel=0.03)


def test_a_short_product_alone_ends_before_the_clocks_fall() -> None:
    board = find_gpu("T4")
    in_step = product_ms(board, *SHORT, in_step=True)
    assert product_ms(board, *SHORT) < 0.85 * in_step
    assert product_ms(board, *LONG) == pytest.approx(product_ms(board, *LONG, in_step=True), 0.01)


def test_small_bf16_matrices_come_from_the_cache_when_timed_again_and_again() -> None:
    """Six copies of 8 MB fit the 96 MB of an L40S, and not of 200 MB."""
    board = find_gpu("L40S")
    small, large = (1, 16, 2048, 2048), (1, 16, 10240, 10240)
    alone, there = (product_ms(board, *small, dtype="bf16", in_step=one) for one in (False, True))
    assert alone < 0.9 * there
    alone, there = (product_ms(board, *large, dtype="bf16", in_step=one) for one in (False, True))
    assert alone == pytest.approx(there, rel=0.02)


def profile(**rates: dict[str, float]) -> Profile:
    return Profile(
        host="t4-host", device="Tesla T4", kind="cuda", torch="2.11", when_unix=1.0,
        world_size=1, backend=None, threads=1, **rates,
    )  # fmt: skip


def test_a_calibrated_product_takes_as_long_as_calibrate_measured() -> None:
    board = with_profile(find_gpu("T4"), profile(matmul_flops={"fp32": 4e12}))
    assert flops_s(board, *LONG) == pytest.approx(4e12, rel=0.08)


def test_what_a_board_sustains_counts_more_than_what_it_reaches_after_a_rest() -> None:
    rested = profile(matmul_flops={"fp32": 7e12, "fp16": 5e13}, sustained_flops={"fp32": 4e12})
    board = with_profile(find_gpu("T4"), rested)
    assert flops_s(board, *LONG) == pytest.approx(4e12, rel=0.08)
    assert board.rates["fp16"] > 5e13  # of the best tile; this one has no other figure


def test_products_without_rests_are_timed() -> None:
    assert _sustained_flops("fp32", 64, 1e6, torch.device("cpu")) > 0
