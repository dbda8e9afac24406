"""A wait that only recorded steps have is no part of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

import stepscope
from stepscope.explain.collective_waits import without_window_waits
from stepscope.records.explanation import Part

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.explanation import RankExplanation

STEPS = np.arange(100)


@pytest.fixture
def ranks(golden: Path) -> tuple[RankExplanation, ...]:
    """Two ranks on a CPU, with steps of 20 ms: rank 0 is exposed for 12 of them, rank 1 for 2."""
    explanation = stepscope.explain(golden / "cpu-two-ranks")
    shares = ((0, {"compute": 0.3, "exposed_comm": 0.6, "data_loading": 0.1}),
              (1, {"compute": 0.8, "exposed_comm": 0.1, "data_loading": 0.1}))  # fmt: skip
    return tuple(
        replace(
            explanation.ranks[rank],
            budget=replace(
                explanation.ranks[rank].budget,
                step_ms=20.0,
                parts=tuple(Part(id=name, ms=20 * each, share=each) for name, each in of.items()),
            ),
        )
        for rank, of in shares
    )


def parts(rank: RankExplanation) -> dict[str, float]:
    return {part.id: part.ms for part in rank.budget.parts}


def test_the_step_keeps_the_transfer_and_what_plain_steps_wait(
    ranks: tuple[RankExplanation, ...],
) -> None:
    """Plain steps wait 1 ms, known to 0.2 ms; the rest of 12 ms is the rank's own work."""
    waits = {0: (STEPS, np.full(100, 1_000_000)), 1: (STEPS, np.zeros(100, np.int64))}
    first, second = without_window_waits(ranks, waits, {0: 200_000.0})
    assert parts(first) == pytest.approx(
        {"compute": 6 + 8.8, "exposed_comm": 2 + 1 + 0.2, "data_loading": 2}
    )
    assert sum(part.share for part in first.budget.parts) == pytest.approx(1.0)
    assert second == ranks[1]
    (finding,) = (one for one in first.findings if one.id == "exposed-communication")
    assert finding.share == pytest.approx(3.2 / 20)
    assert "16% of the step" in finding.summary


@pytest.mark.parametrize(
    ("wait_ms", "steps"), [(10, 100), (1, 5)], ids=["as long in plain steps", "few plain steps"]
)
def test_a_wait_that_plain_steps_have_too_stays(
    ranks: tuple[RankExplanation, ...], wait_ms: int, steps: int
) -> None:
    waits = {0: (STEPS[:steps], np.full(steps, wait_ms * 1_000_000))}
    assert without_window_waits(ranks, waits, {}) == ranks
