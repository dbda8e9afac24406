"""Controls change chance alone: weights by the size of rounding, or what a forward pass draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from injected import TRAINING, run_injected

from stepscope.changes import APPLIED
from stepscope.errors import UsageError
from stepscope.fix.named_changes import CONTROLS, choose

if TYPE_CHECKING:
    from pathlib import Path

DRAWN = "torch.randn(8, 16), torch.randint(4, (8,))"
DROPS = (
    TRAINING.replace("nn.ReLU(),", "nn.ReLU(), nn.Dropout(0.2),")
    .replace(f"x, y = {DRAWN}", "x, y = batches[step]")
    .replace("for step", f"batches = [({DRAWN}) for _ in range(8)]\nfor step")
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return run_injected(tmp_path_factory.mktemp("plain"), DROPS).values


@pytest.mark.slow
def test_nudged_weights_move_the_first_loss_by_the_size_of_rounding(
    tmp_path: Path, plain: list[float]
) -> None:
    coarse = run_injected(tmp_path, DROPS, "nudged-weights=16-bits:1")
    fine = run_injected(tmp_path, DROPS, "nudged-weights=fp32:1")
    assert coarse.did["nudged-weights=16-bits:1"]
    assert 1e-6 < abs(coarse.values[0] / plain[0] - 1) < 1e-2
    assert abs(fine.values[0] / plain[0] - 1) < 1e-5


@pytest.mark.slow
def test_other_draws_change_what_a_forward_pass_draws_and_no_data(
    tmp_path: Path, plain: list[float]
) -> None:
    first = run_injected(tmp_path, DROPS, "other-draws=1").values
    second = run_injected(tmp_path, DROPS, "other-draws=2").values
    assert len({plain[0], first[0], second[0]}) == 3
    assert run_injected(tmp_path, DROPS, "other-draws=1").values == first


@pytest.mark.slow
def test_a_model_that_draws_nothing_trains_the_same_with_other_draws(tmp_path: Path) -> None:
    """The script draws its data between the steps, from the same stream as before."""
    plain = run_injected(tmp_path, TRAINING)
    assert run_injected(tmp_path, TRAINING, "other-draws=1").losses == plain.losses


def test_controls_are_no_remedies() -> None:
    assert not set(CONTROLS) & set(APPLIED)
    assert str(choose("other-draws=2")) == "other-draws=2"
    with pytest.raises(UsageError) as error:
        choose("other-drawz")
    assert "other-draws" not in str(error.value)
