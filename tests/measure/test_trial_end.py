"""A trial ends when it has seen enough, whatever its disk says."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

import pytest

from stepscope.measure.session import trial

if TYPE_CHECKING:
    from pathlib import Path


class ProcessEndedError(Exception):
    """Instead of the test's own process."""


def end(code: int) -> NoReturn:
    raise ProcessEndedError(code)


def test_a_disk_that_refuses_does_not_keep_a_trial_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(trial, "_WAIT_S", 0.0)
    with pytest.raises(ProcessEndedError, match="0"):
        trial.end_process(tmp_path / "gone" / "rank-00000", 2)
