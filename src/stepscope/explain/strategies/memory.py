"""What a rank holds between steps, as the capture measured it."""

from __future__ import annotations

from pathlib import Path

import msgspec

_AT_REST = ("optimizer", "begin")  # phases that end with nothing gathered


class _Phase(msgspec.Struct, frozen=True):
    phase: str
    categories: dict[str, int | None]


class _Memory(msgspec.Struct, frozen=True):
    phases: list[_Phase] = []


def bytes_at_rest(trace_path: str) -> dict[str, int]:
    """Bytes by category from memory.json beside the trace; empty where there is none."""
    try:
        text = (Path(trace_path).parent / "memory.json").read_bytes()
        memory = msgspec.json.decode(text, type=_Memory)
    except (OSError, msgspec.DecodeError):
        return {}
    held = {phase.phase: phase.categories for phase in memory.phases}
    found = next((held[name] for name in _AT_REST if name in held), {})
    return {name: value for name, value in found.items() if value is not None}
