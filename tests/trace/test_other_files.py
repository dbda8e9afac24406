"""Files that stepscope itself writes into a run's folder are not taken for traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope.errors import NotCapturedError
from stepscope.trace.discover import find_traces


def test_a_trial_without_a_trace_says_that_only_steps_were_captured(tmp_path: Path) -> None:
    rank = tmp_path / "rank-00000"
    rank.mkdir()
    (tmp_path / "run.json").write_text(json.dumps({"schema": 1, "command": ["x"]}))
    (tmp_path / "losses.json").write_text("[]")
    for name in ("rank.json", "script.json", "trial.json"):
        (rank / name).write_text("{}")
    with pytest.raises(NotCapturedError, match="holds no trace"):
        find_traces(tmp_path)
