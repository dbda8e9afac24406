"""The first sentence of an answer: the title where the summary lacks it, and whose step it is."""

from __future__ import annotations

import pytest

from stepscope.explain.verdict import state
from stepscope.records.explanation import Finding


def finding(title: str, summary: str) -> Finding:
    return Finding(id="x", title=title, share=0.5, severity="high", summary=summary, evidence=())


@pytest.mark.parametrize(
    ("title", "summary", "whose", "verdict"),
    [
        (
            "Host-bound",
            "The GPU is idle 72% of the step.",
            "",
            "Host-bound: The GPU is idle 72% of the step.",
        ),
        (
            "FP32 matmuls",
            "FP32 matmuls take 86% of the step.",
            "",
            "FP32 matmuls take 86% of the step.",
        ),
        (
            "Cores in use",
            "It waits in 14% of steps because cores are busy.",
            "",
            "Cores in use: It waits in 14% of steps because cores are busy.",
        ),
        (
            "Slow rank",
            "Rank 1 takes twice as long.",
            "rank 1",
            "Slow rank (rank 1): Rank 1 takes twice as long.",
        ),
        (
            "FP32 matmuls",
            "FP32 matmuls take 86% of rank 1's step.",
            "rank 1",
            "FP32 matmuls take 86% of rank 1's step.",
        ),
    ],
)
def test_a_summary_that_says_its_title_stands_alone(
    title: str, summary: str, whose: str, verdict: str
) -> None:
    assert state(finding(title, summary), whose) == verdict
