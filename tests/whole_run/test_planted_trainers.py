"""Loops that belong to a trainer: evaluation and checkpoints against what the script timed itself.

`make trainers` runs them: the packages take minutes to install.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from whole_run.planted import run_planted

pytestmark = pytest.mark.slow


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed in this Python: {missing}")


@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param("lightning", marks=needs("lightning")),
        pytest.param("transformers", marks=needs("transformers", "accelerate")),
        pytest.param("accelerate", marks=needs("accelerate")),
    ],
)
def test_a_trainers_evaluation_and_checkpoints_are_accounted_for(
    tmp_path: Path, trainer: str
) -> None:
    planted = run_planted(tmp_path / "run", f"trainers/with_{trainer}")
    truth, account = planted.truth, planted.run["account"]
    assert planted.run["steps"] == truth["steps"]
    assert math.fsum(part["ms"] for part in account["parts"]) == pytest.approx(account["wall_ms"])
    # Lightning's hooks around evaluation lie outside of eval() and train().
    least = 0.6 if trainer == "lightning" else 0.9
    assert least < planted.account_ms("evaluation") / truth["evaluated_ms"] < 1.1
    # A trainer also copies and moves files around the save itself, which is not seen as saving.
    assert 0.6 < planted.account_ms("checkpoint") / truth["saved_ms"] < 1.05
