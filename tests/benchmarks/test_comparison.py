"""The table of comparisons: real lists are there, and cells outside the band are marked."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import comparison
import series


def test_a_table_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["comparison.py", "--comparisons", "2", "--only", "resnet18-again"]
    )
    comparison.main()
    (row,) = [
        line for line in capsys.readouterr().out.splitlines() if "h200-resnet18-again" in line
    ]
    assert len(row.split()) == 1 + len(comparison.LENGTHS) + 1  # and its own length


def test_cells_outside_the_band_are_marked() -> None:
    assert [comparison._cell(share)[-1] for share in (92.9, 93, 97, 97.1)] == ["*", " ", " ", "*"]


def test_lists_drawn_again_keep_their_neighbours() -> None:
    steps = np.arange(100.0)
    (drawn,) = series.drawn_again(steps, 25)(np.random.default_rng(0), 1, 60)
    assert len(drawn) == 60
    inside = np.arange(59) % 25 != 24
    assert (np.diff(drawn)[inside] % 100 == 1).all()


@pytest.mark.parametrize("name", [*series.MADE])
def test_made_series_have_the_size_asked_for_and_no_nonsense(name: str) -> None:
    made = series.MADE[name](np.random.default_rng(0), 3, 70)
    assert made.shape == (3, 70)
    assert np.isfinite(made).all()
    assert (made > 0).all()


def test_unseen_lists_are_apart_from_those_the_method_was_chosen_by() -> None:
    seen, unseen = series.real_lists(), series.unseen_lists()
    assert len(seen) >= 12
    assert len(unseen) >= 4
    assert not set(seen) & set(unseen)
    assert all(len(steps) > 100 for steps in (seen | unseen).values())


def test_the_table_of_means_has_steps_that_stall(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["comparison.py", "--mean", "--comparisons", "2", "--only", "1 in 100"]
    monkeypatch.setattr(sys, "argv", arguments)
    comparison.main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row[:27].strip() for row in rows] == ["1 in 100, 4 longer", "1 in 1000, 10 longer"]
