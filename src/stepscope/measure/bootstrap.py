"""In every Python process of the job: wait until it imports torch, then start a session."""

from __future__ import annotations

from typing import Any

from stepscope.measure.harmless import harmless
from stepscope.measure.hooks import when_imported
from stepscope.measure.settings import Settings


@harmless
def arm() -> None:
    """Costs nothing in processes that never import torch."""
    settings = Settings.from_environment()
    if settings is not None:
        when_imported("torch", lambda _module: _begin(settings))


def _begin(settings: Settings) -> Any:
    from stepscope.measure.hooks import install
    from stepscope.measure.session import Session

    session = Session(settings)
    install(session)
    return session
