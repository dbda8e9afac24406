"""Logits of 50,257 words: slow in bf16 by themselves, padded by torch.compile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from benches import analyse
from explain.build import AUTOGRAD, MAIN, kernel, op, step, write
from stepscope import read_trace
from stepscope.predict.compiled_step import pad_products
from stepscope.predict.engine import Bench
from stepscope.predict.whatifs import precision

if TYPE_CHECKING:
    from pathlib import Path

STEP_US, LOGITS_US, GRADIENT_US = 20_000.0, 6200.0, 5900.0
ROWS, WIDTH = 4096, 768
ODD, EVEN = 50257, 50304


def bench(folder: Path, words: int, gemm: str = "gemm") -> Bench:
    """The logits, and the gradient of what they are made from, in fp32."""
    events: list[dict[str, Any]] = []
    floats = {"dtypes": ["float", "float"]}
    logits = {"shapes": [[ROWS, WIDTH], [WIDTH, words]], "strides": [[WIDTH, 1], [1, WIDTH]]}
    gradient = {"shapes": [[ROWS, words], [words, WIDTH]], "strides": [[words, 1], [WIDTH, 1]]}
    for number in range(3):
        at = number * STEP_US
        events += step(number, start=at, dur=STEP_US)
        events += op("aten::mm", start=at + 10, dur=40, sequence=number, **logits, **floats)
        events += kernel(gemm, start=at + 20, dur=LOGITS_US, launched_at=at + 15)
        at += 7000
        linked = {"sequence": number, "forward_thread": MAIN, "thread": AUTOGRAD}
        events += op("MmBackward0", start=at, dur=60, **linked)
        events += op("aten::mm", start=at + 2, dur=40, thread=AUTOGRAD, **gradient, **floats)
        events += kernel(gemm, start=at + 20, dur=GRADIENT_US, launched_at=at + 5, thread=AUTOGRAD)
    return Bench(analyse(read_trace(write(folder / "made.json", events, device="NVIDIA H200"))))


def in_bf16_ms(folder: Path, words: int) -> tuple[list[float], list[float]]:
    """The products by themselves, and padded."""
    context = precision.predict(bench(folder, words).context, "bf16").context
    tasks = context.graph.tasks
    products = tasks.row >= 0
    padded = pad_products(context, tasks.dur_ns)
    return (tasks.dur_ns[products] / 1e6).tolist(), (padded[products] / 1e6).tolist()


def test_an_odd_vocabulary_makes_products_slow_until_it_is_padded(tmp_path: Path) -> None:
    plain, padded = in_bf16_ms(tmp_path, ODD)
    assert plain == pytest.approx([3.2, 2.46], rel=0.02)
    assert max(padded) < 0.6


def test_aligned_products_need_no_padding(tmp_path: Path) -> None:
    plain, padded = in_bf16_ms(tmp_path, EVEN)
    assert max(plain) < 0.45
    assert padded == plain


def test_fp32_products_stay_as_they_are(tmp_path: Path) -> None:
    context = bench(tmp_path, ODD).context
    dur_ns = context.graph.tasks.dur_ns
    assert pad_products(context, dur_ns).tolist() == dur_ns.tolist()


def test_tf32_products_are_padded_to_four_elements(tmp_path: Path) -> None:
    """316 GFLOPs at the rate that products reach, and what they move once more."""
    context = bench(tmp_path, ODD, "sm80_xmma_gemm_tf32f32_tf32f32").context
    padded = pad_products(context, context.graph.tasks.dur_ns)
    assert (padded / 1e6).tolist() == pytest.approx([1.08, 1.59], rel=0.01)
    aligned = bench(tmp_path, EVEN, "sm80_xmma_gemm_tf32f32_tf32f32").context
    dur_ns = aligned.graph.tasks.dur_ns
    assert pad_products(aligned, dur_ns).tolist() == dur_ns.tolist()
