"""Tunes of made-up machines: nothing is kept where nothing helps, and what helps is found."""

from __future__ import annotations

import numpy as np
import pytest

from tune_noise import MACHINES, Machine, false_keeps, resampled, tune

NOTHING = [f"nothing-{place}" for place in range(6)]


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_a_tune_in_which_nothing_helps_keeps_nothing(name: str) -> None:
    """At most 5 of 100 may; of 12, three would be a surprise of less than 2 in 100."""
    keeps, _ = false_keeps(MACHINES[name].draw, 6, tunes=12)
    assert keeps < 3


def test_without_a_common_level_noise_would_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tunes with every look at 50% often keep something: the test above can fail."""
    monkeypatch.setattr("stepscope.ui.tune.search.level_of_next_test", lambda *_: 2.5)
    keeps, _ = false_keeps(MACHINES["starts 3%"].draw, 6, tunes=12)
    assert keeps >= 3


@pytest.mark.parametrize("seed", range(3))
def test_what_helps_is_found_among_what_does_not(seed: int) -> None:
    machine = Machine(start=0.01, gains={"a-third": 0.3, "a-twelfth": 0.08})
    done = tune(machine.draw(seed), [*NOTHING, "a-twelfth", "a-third"])
    assert set(done.kept) == {"a-third", "a-twelfth"}
    assert done.pairs["a-third"] == 2


def test_a_pause_of_the_machine_decides_nothing() -> None:
    """Every third trial pauses for 300 ms, half of its 60 steps together."""
    found = [
        tune(Machine(hiccups=0.3, gains={"helps": 0.1}).draw(seed), [*NOTHING, "helps"]).kept
        for seed in range(4)
    ]
    assert found == [("helps",)] * 4


def test_real_lists_are_drawn_by_chance_or_in_order() -> None:
    lists = [[float(place)] for place in range(10)]
    in_order = [resampled(lists)(1)((), number)[0] for number in range(10)]
    assert np.diff(in_order).tolist().count(1.0) >= 8
    assert sorted(in_order) == [float(place) for place in range(10)]
    trial = resampled(lists)(2)
    assert len({trial((), number)[0] for number in range(50)}) > 5
