"""Which backward pass is chosen, and that choosing leaves the training alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.fix.scan import recommend
from stepscope.fix.scan.advice import GradientHorizon, _advice


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_the_scan_is_chosen_only_where_it_is_worth_another_module() -> None:
    assert _advice(2.0, 1.0, None).choice == "scan"
    assert _advice(1.04, 1.0, None).choice == "torch"
    assert _advice(1.0, 2.0, None).choice == "torch"


def test_where_few_steps_matter_truncation_is_chosen_whatever_is_faster() -> None:
    advice = _advice(20.0, 1.0, GradientHorizon(29, 3000, 1e-7))
    assert advice.choice == "truncate"
    assert "29 of 3000 steps" in advice.why
    assert _advice(20.0, 1.0, GradientHorizon(2900, 3000, 1e-7)).choice == "scan"


def test_both_are_measured_once_and_kept(own_cache: Path) -> None:
    first = recommend(20, 2, 4, device="cpu")
    assert first.torch_ms > 0
    assert first.scan_ms > 0
    assert list(own_cache.glob("scan-cpu-*.json"))
    assert recommend(20, 2, 4, device="cpu") == first
    assert recommend(20, 2, 4, device="cpu", nonlinearity="relu") != first


def test_a_damaged_table_is_measured_anew(own_cache: Path) -> None:
    recommend(20, 2, 4, device="cpu")
    (file,) = own_cache.glob("scan-cpu-*.json")
    file.write_text(file.read_text().replace("[", "{"))
    assert recommend(20, 2, 4, device="cpu").torch_ms > 0


def test_random_numbers_of_the_training_stay_as_they_are() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    recommend(20, 2, 4, device="cpu")
    assert torch.equal(torch.rand(1), wanted)


@pytest.mark.parametrize("shape", [(0, 1, 1), (8, -1, 4), ("8", 1, 1), (8, 2, 0), (2.5, 4, 8)])
def test_shapes_that_are_none(shape: Any) -> None:
    with pytest.raises(ValueError, match="a whole number from 1 on"):
        recommend(*shape)
