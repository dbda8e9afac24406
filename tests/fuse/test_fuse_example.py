"""Check that the example of the fuse page runs, learns, and loads into a plain model."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "docs/examples/fuse_eight.py"


@pytest.mark.slow
def test_eight_trainings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(EXAMPLE), run_name="__main__")
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 8
    assert min(losses) < 0.3 < 0.6 < max(losses)
    names["build"]().load_state_dict(torch.load("best.pt"))
