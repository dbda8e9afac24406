"""After SIGTERM little time is left: the scheduler's SIGKILL must not become the exit code."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from stepscope.measure.settings import Settings
from stepscope.ui.cli import run as verb
from stepscope.ui.jobs.run_folder import RunFile


@pytest.mark.parametrize(("number", "stopped"), [(signal.SIGTERM, True), (signal.SIGUSR1, False)])
def test_explaining_ends_before_the_scheduler_kills(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    stopped: bool,
) -> None:
    monkeypatch.setattr(verb, "AFTER_SIGTERM_S", 0.05)
    run = RunFile.begin(tmp_path, ("train",), Settings(folder=str(tmp_path)))
    run.heard(number)
    before = signal.getsignal(signal.SIGALRM)
    explained = False
    with verb._not_ended_by_signals(), verb._ended_before_the_scheduler_kills(run):
        time.sleep(0.5)
        explained = True
    assert explained is not stopped
    assert ("stopped explaining (0.05 s after SIGTERM" in capsys.readouterr().err) is stopped
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
