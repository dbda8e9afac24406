"""A pruned chain of convolutions: the critical path is short, and its steps are cheap."""

from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


def test_levels_are_logarithmic_and_no_level_costs_more_than_the_baselines_step() -> None:
    from scan_chain_table import measure, table

    dense, pruned = (measure(4, 16, share) for share in (0.0, 0.97))
    for row in (dense, pruned):
        assert row["depth"] <= row["depth_bound"] == 2 * math.ceil(math.log2(21 + 2))
        assert row["gradient_error"] < 1e-12
    assert dense["step_over_baseline"] > 1
    assert pruned["step_over_baseline"] <= 1
    assert pruned["critical_flops"] < pruned["chain_flops"]
    assert "instead of 21" in table(pruned)
