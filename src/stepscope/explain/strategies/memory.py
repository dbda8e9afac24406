"""What a rank holds between steps, as the capture measured it."""

from __future__ import annotations

from pathlib import Path

from stepscope.trace.memory_file import read_captured

_AT_REST = ("optimizer", "begin")  # phases that end with nothing gathered


def bytes_at_rest(trace_path: str) -> dict[str, int]:
    """Bytes by category from memory.json beside the trace; empty where there is none."""
    captured, _ = read_captured(Path(trace_path).parent)
    if captured is None:
        return {}
    held = {phase.phase: phase.categories for phase in captured.phases}
    found = next((held[name] for name in _AT_REST if name in held), {})
    return {name: value for name, value in found.items() if value is not None}
