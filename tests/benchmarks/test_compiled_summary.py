"""Compiled and graphed trainings as the page about efficiency has them."""

from __future__ import annotations

from typing import Any

from compiled_summary import first_of_each, summary


def row(precision: str, **changed: Any) -> dict[str, Any]:
    return {
        "model": "gpt2",
        "way": "default",
        "precision": precision,
        "bare_ms": 24.04,
        "steps_ms": [24.0],
        "mfu": 0.30,
        "expected_mfu": 0.25,
        "flops_ratio": 1.0,
        "parts_ratio": 1.0,
        "peak_ratio": 1.0,
        "reserved_ratio": 1.0,
        "operator_share": 0.98,
        "line_share": 0.97,
    } | changed


def test_precisions_stand_beside_each_other_with_the_least_share_of_all() -> None:
    old = row("fp32", steps_ms=None, mfu=None, expected_mfu=None, operator_share=0.96)
    assert summary([row("bf16"), old]).splitlines()[2] == (
        "| GPT-2 small, default | 24.0 / - / 24.0\\* | 1.200 / - / not known | 1.000 / - / 1.000 "
        "| 96.0% | 97.0% |"
    )


def test_only_rows_with_times_of_their_own_steps_count_for_the_worst_mfu() -> None:
    lines = summary([row("bf16"), row("tf32", steps_ms=None, mfu=0.5)]).splitlines()
    assert "2 rows, 1 with times of their own steps" in lines
    assert "MFU: 1.2000 to 1.2000 in 1" in lines


def test_what_a_file_lacks_or_failed_is_taken_from_the_next() -> None:
    failed = {"model": "gpt2", "way": "default", "precision": "bf16", "error": "out of memory"}
    rows = first_of_each([[failed, row("tf32", bare_ms=1.0)], [row("bf16"), row("tf32")]])
    assert [(one["precision"], one["bare_ms"]) for one in rows] == [("tf32", 1.0), ("bf16", 24.04)]
