"""Compiled and graphed steps: the order of the rows, and how they are printed."""

from __future__ import annotations

import argparse

import pytest

pytest.importorskip("torch", reason="the benchmarks train")

from compiled_table import WAYS, markdown, plan


def test_bf16_comes_first_and_what_compiles_for_minutes_last() -> None:
    options = argparse.Namespace(only="gpt2,bert", ways=None, precisions="bf16,fp32", tiny=False)
    rows = plan(options)
    assert len(set(rows)) == len(rows) == 2 * len(WAYS) * 2
    assert rows[:2] == [("gpt2", "reduce-overhead", "bf16"), ("bert", "reduce-overhead", "bf16")]
    assert {way for _, way, _ in rows[-4:]} == {"max-autotune-no-cudagraphs"}


def test_a_failed_row_stands_beside_the_others() -> None:
    good = {"model": "gpt2", "way": "eager", "precision": "bf16", "bare_ms": 12.5, "findings": []}
    good |= {"mfu": 0.3, "expected_mfu": 0.4, "flops_ratio": 1.0, "line_share": None}
    bad = {"model": "bert", "way": "eager", "precision": "bf16", "error": "out of memory"}
    text = markdown([good, bad])
    assert "| gpt2 eager bf16 | 12.50 | 0.750 | 1.000 | - |" in text
    assert "gpt2 eager bf16: no finding" in text
    assert "bert eager bf16: failed: out of memory" in text
