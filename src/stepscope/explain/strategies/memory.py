"""What a rank holds between steps, as the capture measured it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.records.memory import CapturedMemory

_AT_REST = ("optimizer", "begin")  # phases that end with nothing gathered


def bytes_at_rest(captured: CapturedMemory | None) -> dict[str, int]:
    """Bytes by category; empty when memory was not captured."""
    if captured is None:
        return {}
    held = {phase.phase: phase.categories for phase in captured.phases}
    categories = next((held[name] for name in _AT_REST if name in held), {})
    return {name: value for name, value in categories.items() if value is not None}
