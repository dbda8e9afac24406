"""The benchmark of consistencies: its arithmetic and its picture, from runs that never ran."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from server_runs import write_run
from stepscope.explain.rank_without_steps import explain_together_folder
from together import Measured, curve, draw, print_table, time_to

OWN = [[10, 10, 30], [10, 30, 10], [30, 10, 10], [10, 10, 10]] * 2


@pytest.fixture
def strong(tmp_path):
    """Losses of step n are 1 / (n + 1); steps end every 35 ms, each fourth after 15."""
    return explain_together_folder(write_run(tmp_path / "strong", OWN))


def test_the_time_to_a_loss_is_that_of_the_first_point_as_low(strong) -> None:
    # Three pushes a step; the mean of the last five losses is at most 0.6 with (1, 0.5 x 3, 1/3).
    assert time_to(strong, 0.6) == pytest.approx(curve(strong)[6][0])
    assert time_to(strong, 2.0) == pytest.approx(0.015)
    assert time_to(strong, 0.01) is None
    assert time_to(strong, None) is None


def test_table_and_picture_have_every_consistency(strong, tmp_path, capsys) -> None:
    run = write_run(tmp_path / "bounded", OWN, mode="bounded", bound=1)
    rows = [
        Measured("strong", strong, None, 0.2),
        Measured("bounded:1", explain_together_folder(run), None, None),
    ]
    print_table("transient", rows)
    printed = capsys.readouterr().out
    assert "barrier" in printed
    assert "pays" in printed
    picture = ElementTree.fromstring(draw([("transient", rows)]))
    names = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert names.count("strong") == names.count("bounded:1") == 2  # over time and over updates
