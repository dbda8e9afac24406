"""A note says when the recorded steps had other inputs than the run."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.explain.rank import note_other_inputs
from stepscope.explain.whole_run.rank_run import explain_run

from .columns import columns


@pytest.mark.parametrize(("at", "is_noted"), [(10, True), (150, False)])
def test_a_window_among_short_batches_of_a_curriculum_is_noted(at: int, is_noted: bool) -> None:
    elements = np.repeat([64, 128, 256], 100)
    noise = np.random.default_rng(0).normal(1, 0.01, 300)
    steps = columns(elements / 100 * noise, elements=elements, window=(at, at + 1, at + 2))
    notes = note_other_inputs(steps, explain_run(steps))
    assert [note.id for note in notes] == ["other-inputs"] * is_noted
    assert all("times as many elements" in note.detail for note in notes)


def test_without_steps_or_without_an_effect_of_inputs_nothing_is_noted() -> None:
    alike = columns([10.0] * 60, elements=[64] * 60, window=(5, 6))
    assert note_other_inputs(alike, explain_run(alike)) == ()
    assert note_other_inputs(None, None) == ()
