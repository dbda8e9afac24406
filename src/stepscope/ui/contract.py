"""`explain --json`, schema 1: the names other programs rely on. Additive changes only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

if TYPE_CHECKING:
    from stepscope.records.explanation import Budget, Explanation, Finding, RankExplanation
    from stepscope.records.quality import Note

SCHEMA = 1


def explanation_json(explanation: Explanation) -> dict[str, Any]:
    """The whole object."""
    one = len(explanation.ranks) == 1
    return {
        "schema": SCHEMA,
        "verdict": explanation.verdict,
        "why": explanation.why,
        "next": explanation.next,
        "ranks": [_rank(rank) for rank in explanation.ranks],
        "budget": _budget(explanation.budget),
        "findings": [_finding(finding) for finding in explanation.findings],
        "collectives": [row for rank in explanation.ranks for row in _collectives(rank)],
        "stragglers": {"verdict": "one rank only" if one else "not resolved", "ranks": []},
        "clock": {"aligned": False, "offset_ns": {}, "error_ns": {}},
        "quality": [_note(note) for note in explanation.quality],
    }


def _rank(rank: RankExplanation) -> dict[str, Any]:
    timeline, idle = rank.timeline, rank.idle
    return {
        "rank": rank.rank,
        "world_size": rank.world_size,
        "path": rank.path,
        "device": rank.device,
        "kind": rank.kind,
        "events": rank.events,
        "timeline_ns": {
            "span": timeline.span_ns,
            "compute": timeline.compute_ns,
            "exposed_comm": timeline.exposed_comm_ns,
            "exposed_memory": timeline.exposed_memory_ns,
            "idle": timeline.idle_ns,
        },
        "comm_ns": timeline.comm_ns,
        "memory_ns": timeline.memory_ns,
        "overlap": timeline.overlap,
        "idle_ns": {"host": idle.host_ns, "launch": idle.launch_ns, "other": idle.other_ns},
        "host_idle_ns": {
            "data_loading": idle.data_loading_ns,
            "sync": idle.sync_ns,
            "operators": idle.operators_ns,
            "python": idle.python_ns,
            "profiler": idle.profiler_ns,
        },
        "steps": [to_builtins(step) for step in rank.steps.steps],
        "steps_from": rank.steps.source,
        "cycles_ns": list(rank.steps.cycles_ns),
        "step_ms": to_builtins(rank.step_ms),
        "budget": _budget(rank.budget),
        "kernels": [to_builtins(kernel) for kernel in rank.kernels],
        "operators": [to_builtins(operator) for operator in rank.operators],
        "modules": [to_builtins(module) for module in rank.modules],
        "lines": [to_builtins(line) for line in rank.lines],
        "launches": to_builtins(rank.launches),
        "copies": [to_builtins(copy) for copy in rank.copies],
        "syncs": [to_builtins(sync) for sync in rank.syncs],
        "efficiency": None,
        "memory": None,
        "quality": [_note(note) for note in rank.quality],
    }


def _budget(budget: Budget) -> dict[str, Any]:
    return {
        "step_ms": budget.step_ms,
        "basis": budget.basis,
        "parts": [to_builtins(part) for part in budget.parts],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    found: dict[str, Any] = to_builtins(finding)
    return found


def _collectives(rank: RankExplanation) -> list[dict[str, Any]]:
    """Waiting and transfer need other ranks' clocks: null until they are aligned."""
    return [
        {**to_builtins(each), "rank": rank.rank, "wait_ns": None, "transfer_ns": None}
        for each in rank.collectives
    ]


def _note(note: Note) -> dict[str, Any]:
    return {key: value for key, value in to_builtins(note).items() if value is not None}
