"""The library of these tests itself: scripts run, unchanged and changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from injected import TRAINING, assert_patch_trains_the_same, run_injected

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_a_run_on_trial_is_the_script_itself(tmp_path: Path) -> None:
    shown = TRAINING + "    print(loss.item().hex())\n"
    run = run_injected(tmp_path, shown, steps=6)
    assert [value for _, value in run.losses[:5]] == run.output.split()  # it ends in the last step
    assert len(run.losses) == 6
    assert run.facts.roots == ("Sequential",)
    assert run.did == {}


def test_injected_and_patched_are_compared_loss_for_loss(tmp_path: Path) -> None:
    source = assert_patch_trains_the_same(tmp_path, TRAINING, "fused-optimizer")
    assert "AdamW(model.parameters(), lr=1e-2, fused=True)" in source
