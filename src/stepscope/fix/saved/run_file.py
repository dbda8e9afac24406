"""What a run folder keeps of a plan: records/saved_memory.py reads it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.fix.saved.memory_saver import MemorySaver
    from stepscope.fix.saved.save_plan import SavePlan

_MOST_VALUES = 40
_MOST_NOTES = 16


def saving_content(saver: MemorySaver) -> dict[str, Any] | None:
    """None before a pass was recorded."""
    plan, promise = saver.plan, saver.promise
    if plan is None:
        return None
    largest = sorted(plan.rows, key=lambda row: -max(row.size_bytes, row.held_bytes))
    content: dict[str, Any] = {
        "schema": 1,
        "target": plan.target,
        "saved_bytes_before": plan.saved_bytes_before,
        "saved_bytes": plan.saved_bytes,
        "held_bytes": saver.held_bytes,
        "peak_bytes_before": plan.peak_bytes_before,
        "peak_bytes": plan.peak_bytes,
        "step_peak_bytes_before": plan.step_peak_bytes_before,
        "step_peak_bytes": plan.step_peak_bytes,
        "extra_ns": plan.extra_ns,
        "measured_step_ns": saver.measured_step_ns,
        "actions": _by_action(plan),
        "values": [asdict(row) for row in largest[:_MOST_VALUES]],
        "timeline": None if plan.timeline is None else asdict(plan.timeline),
        "notes": [*plan.notes, *saver.notes][:_MOST_NOTES],
    }
    if promise is not None:
        if promise.whole_step:
            content["step_peak_bytes_before"] = promise.peak_bytes_before
            content["step_peak_bytes"] = promise.peak_bytes
        names = ("step_ns_before", "step_ns", "step_low_ns", "step_high_ns")
        content |= {name: getattr(promise, name) for name in names}
    return content


def _by_action(plan: SavePlan) -> list[dict[str, Any]]:
    """Without the encodings' names. A value that is kept only to start from held nothing before."""
    actions: dict[str, dict[str, Any]] = {}
    for row in plan.rows:
        action = row.action.partition(":")[0]
        entry = actions.setdefault(
            action,
            {"action": action, "values": 0, "before_bytes": 0, "held_bytes": 0, "cost_ns": 0},
        )
        entry["values"] += 1
        entry["before_bytes"] += row.size_bytes if row.was_kept else 0
        entry["held_bytes"] += row.held_bytes
        entry["cost_ns"] += row.cost_ns
    return [actions[action] for action in sorted(actions)]
