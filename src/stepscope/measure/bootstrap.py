"""In every Python process of the job: wait until it imports torch, then start a session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.measure import processes, start_up  # noqa: F401  (notes when it is loaded)
from stepscope.measure.after_import import expect, when_imported
from stepscope.measure.never_raise import never_raise
from stepscope.measure.settings import Settings

if TYPE_CHECKING:
    from stepscope.fix.begin import ChangedTraining

_session: Any = None


@never_raise
def arm() -> None:
    """Costs nothing in processes that never import torch."""
    settings = Settings.from_environment()
    if settings is not None:
        processes.record(settings.folder, processes.STARTED)
        when_imported("torch", lambda _module: _begin(settings))
        expect("safetensors.torch")  # it imports torch


def _begin(settings: Settings) -> None:
    """Only once, even if torch's code runs again."""
    global _session
    if _session is not None:
        return
    from stepscope.measure.hooks import install
    from stepscope.measure.session import Session

    if settings.trial or settings.remedies or settings.stop_after or settings.script_facts:
        from stepscope.measure.trial_session import TrialSession

        _session = TrialSession(settings, _change_training(settings))
    else:
        _session = Session(settings, from_outside=True)
    install(_session)


@never_raise
def _change_training(settings: Settings) -> ChangedTraining:
    """Apply remedies before the script has built anything."""
    from stepscope.fix.begin import begin
    from stepscope.measure.dynamo import surrounds

    watch = settings.trial or settings.script_facts
    return begin(settings.remedies, when_imported, surrounds, watch=watch)
