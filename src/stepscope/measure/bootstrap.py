"""In every process of the job that looks for torch: once torch is imported, start a session."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from stepscope.measure.never_raise import never_raise
from stepscope.measure.patches import expect, when_imported
from stepscope.measure.session import start_up
from stepscope.measure.settings import Settings

if TYPE_CHECKING:
    from stepscope.fix.begin import ChangedTraining

_session: Any = None


@never_raise
def arm(began: tuple[int, int], path: Sequence[str]) -> None:
    """`began`: when Python had started, by the wall clock and perf_counter_ns. `path`: where it
    looked for modules then, before the script's folder was added."""
    settings = Settings.from_environment()
    if settings is not None:
        start_up.python_began(*began)
        when_imported("torch", partial(_begin, settings, path))
        expect("safetensors.torch")  # it imports torch


def _begin(settings: Settings, path: Sequence[str], _torch: Any) -> None:
    """Only once, even if torch's code runs again."""
    if _session is None:
        with _found_first(path):
            _start_session(settings)


@contextlib.contextmanager
def _found_first(path: Sequence[str]) -> Iterator[None]:
    """The script's own resource.py must not be taken for the standard library's."""
    sys.path[:0] = path
    try:
        yield
    finally:
        del sys.path[: len(path)]


def _start_session(settings: Settings) -> None:
    global _session
    from stepscope.measure.hooks import install
    from stepscope.measure.session.session import Session
    from stepscope.measure.session.trial import TrialLog

    trial = None
    if settings.trial or settings.remedies or settings.stop_after or settings.script_facts:
        changed = _change_training(settings)
        trial = TrialLog(changed, settings.stop_after, keep_losses=settings.trial)
    _session = Session(settings, trial=trial, from_outside=True)
    install(_session)


@never_raise
def _change_training(settings: Settings) -> ChangedTraining:
    """Apply remedies before the script has built anything."""
    from stepscope.fix.begin import begin
    from stepscope.measure.patches import surrounds

    watch = settings.trial or settings.script_facts
    return begin(settings.remedies, when_imported, surrounds, watch=watch)
