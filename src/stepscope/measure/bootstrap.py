"""In every process of the job that looks for torch: once torch is imported, start a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stepscope.measure.never_raise import never_raise
from stepscope.measure.patches import expect, when_imported
from stepscope.measure.session import start_up
from stepscope.measure.settings import Settings

if TYPE_CHECKING:
    from stepscope.fix.begin import ChangedTraining

_session: Any = None


@never_raise
def arm(began: tuple[int, int], unnoticed: Callable[[Callable[[], None]], None]) -> None:
    """`began`: when Python had started, by the wall clock and perf_counter_ns. `unnoticed` calls
    what imports modules: the script's own resource.py and Python's must not be mixed up."""
    settings = Settings.from_environment()
    if settings is not None:
        start_up.python_began(*began)
        when_imported("torch", lambda _torch: unnoticed(lambda: _start_session(settings)))
        expect("safetensors.torch")  # it imports torch


def _start_session(settings: Settings) -> None:
    """Only once, even if torch's code runs again."""
    global _session
    if _session is not None:
        return
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
