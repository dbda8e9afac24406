"""`explain --json`, schema 1: names that other programs rely on. They only ever grow."""

from __future__ import annotations

from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from stepscope.explain.incomplete_ranks import is_untimed
from stepscope.explain.job.hosts import ranks_by_host
from stepscope.explain.job.rank_part import own_ms
from stepscope.records.explanation import Budget, Explanation, RankExplanation
from stepscope.records.hardware import Efficiency
from stepscope.records.job import Clock, Job, JobCollective
from stepscope.records.quality import Note
from stepscope.records.run import RunOrigin, WholeRun, failed_json
from stepscope.ui.topics.whatif import together_json

SCHEMA = 1
MOST_SPOTS = 50


def explanation_json(explanation: Explanation) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "verdict": explanation.verdict,
        "why": explanation.why,
        "next": explanation.next,
        "also": explanation.also,
        "headline": to_builtins(explanation.headline),
        "ranks": [_rank(rank) for rank in explanation.ranks],
        "ranks_without_trace": to_builtins(explanation.without_trace),
        "budget": _whole_budget(explanation),
        "findings": [to_builtins(finding) for finding in explanation.findings],
        "advice": [to_builtins(advice) for advice in explanation.advice],
        "hosts": _hosts(explanation.job),
        "links": _links(explanation.job),
        "collectives": _all_collectives(explanation),
        "stragglers": _stragglers(explanation),
        "clock": _clock(explanation.job),
        "arrivals": to_builtins(explanation.job.arrivals) if explanation.job else [],
        "critical_path": _path(explanation.job),
        "steps_by_rank": _steps_by_rank(explanation.job),
        "hierarchical": to_builtins(explanation.job.hierarchical) if explanation.job else [],
        "strategies": [to_builtins(strategy) for strategy in explanation.strategies],
        "run": _run(explanation.run, explanation.origin),
        "nccl": to_builtins(explanation.nccl) if explanation.nccl else None,
        "together": together_json(explanation.together) if explanation.together else None,
        "quality": [_note(note) for note in explanation.quality],
    }


def _run(run: WholeRun | None, origin: RunOrigin | None) -> dict[str, Any] | None:
    """Every step's summary, and how the run was started; the steps and stacks themselves are in
    the run folder."""
    started = {
        "command": list(origin.command) if origin and origin.command else None,
        "remedies": to_builtins(origin.remedies) if origin else [],
        "failed": failed_json(origin.failed) if origin else None,
    }
    if run is None:
        empty: dict[str, Any] = {"account": None, "ranks": [], "spread": None}
        return {**empty, **started} if started["command"] or started["remedies"] else None
    ranks = [to_builtins(replace(rank, series=None, stacks=())) for rank in run.ranks]
    for rank in ranks:
        del rank["series"], rank["stacks"]
    spread = to_builtins(run.spread) if run.spread else None
    return {"account": to_builtins(run.account), "ranks": ranks, "spread": spread, **started}


def _rank(rank: RankExplanation) -> dict[str, Any]:
    timeline, idle = rank.timeline, rank.idle
    answer = {
        "rank": rank.rank,
        "name": rank.called,
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
        "own_ms": own_ms(rank) if len(rank.part.pace) else None,
        "kernels": [to_builtins(kernel) for kernel in rank.kernels],
        "operators": [to_builtins(operator) for operator in rank.operators],
        "modules": [to_builtins(module) for module in rank.modules],
        "lines": [to_builtins(line) for line in rank.lines],
        "launches": to_builtins(rank.launches),
        "copies": [to_builtins(copy) for copy in rank.copies],
        "syncs": [to_builtins(sync) for sync in rank.syncs],
        "compiled": to_builtins(rank.compiled) if rank.compiled else None,
        "efficiency": _efficiency(rank.efficiency),
        "memory": to_builtins(rank.memory) if rank.memory else None,
        "quality": [_note(note) for note in rank.quality],
    }
    return answer | _without_times(answer) if is_untimed(rank) else answer


def _without_times(answer: dict[str, Any]) -> dict[str, Any]:
    """What a memory snapshot or a parameter server does not record is null, not zero."""
    unknown = {
        name: dict.fromkeys(answer[name]) for name in ("timeline_ns", "idle_ns", "host_idle_ns")
    }
    nothing = dict.fromkeys(("comm_ns", "memory_ns", "overlap", "launches"))
    return unknown | nothing | {"budget": {**answer["budget"], "step_ms": None}}


def _efficiency(efficiency: Efficiency | None) -> dict[str, Any] | None:
    """FLOPs that could not be counted are null, not zero; only the widest gaps are listed."""
    if efficiency is None:
        return None
    answer: dict[str, Any] = to_builtins(efficiency)
    if not efficiency.hardware_flops:
        answer |= dict.fromkeys(("model_flops", "hardware_flops", "recomputed_flops"))
    return answer | {"spots": answer["spots"][:MOST_SPOTS]}


def _whole_budget(explanation: Explanation) -> dict[str, Any]:
    budget = _budget(explanation.budget)
    without_times = all(is_untimed(rank) for rank in explanation.ranks)
    return {**budget, "step_ms": None} if without_times else budget


def _budget(budget: Budget) -> dict[str, Any]:
    return {
        "step_ms": budget.step_ms,
        "basis": budget.basis,
        "parts": [to_builtins(part) for part in budget.parts],
    }


def _hosts(job: Job | None) -> list[dict[str, Any]]:
    """Rack and switch are null where nothing says them."""
    by_host = ranks_by_host(job.hosts) if job else {}
    return [
        {"host": host, "ranks": list(ranks), **_rack_and_switch(job, host)}
        for host, ranks in by_host.items()
    ]


def _rack_and_switch(job: Job | None, host: str) -> dict[str, str | None]:
    place = job.places.get(host) if job else None
    return {"rack": place.rack if place else None, "switch": place.switch if place else None}


def _links(job: Job | None) -> list[dict[str, Any]]:
    return [
        {
            "from": link.sender,
            "to": link.receiver,
            "gb_s": link.rate_bytes_s / 1e9,
            "busy_gb_s": link.steady_bytes_s / 1e9,
            "device_gb_s": link.device_bytes_s / 1e9 if link.device_bytes_s else None,
            "sent_bytes": link.sent_bytes,
            "connections": link.connections,
            "rtt_us": link.rtt_us,
            "retransmitted": link.retransmitted,
        }
        for link in (job.links if job else ())
    ]


def _all_collectives(explanation: Explanation) -> list[dict[str, Any]]:
    """Those joined across ranks first, then what only single ranks recorded."""
    joined = explanation.job.collectives if explanation.job else ()
    known = {(row.kind, row.group, row.size_bytes) for row in joined}
    # The row that sums up the rest of a truncated table has no size.
    known |= {(row.kind, row.group, None) for row in joined}
    return [_joined(row) for row in joined] + [
        row
        for rank in explanation.ranks
        for row in _collectives(rank)
        if (row["kind"], row["group"], row["size_bytes"]) not in known
    ]


def _joined(row: JobCollective) -> dict[str, Any]:
    """A rank's time inside a collective is its wait and the transfer."""
    total = None
    if row.wait_ns is not None and row.transfer_ns is not None:
        total = row.wait_ns + row.transfer_ns
    return {**to_builtins(row), "rank": None, "total_ns": total}


def _collectives(rank: RankExplanation) -> list[dict[str, Any]]:
    """Waits and transfers are null: they need other ranks."""
    unknown = dict.fromkeys(
        ("wait_ns", "wait_error_ns", "transfer_ns", "expected_ns", "slowest_rank", "reach")
    )
    return [{**to_builtins(row), "rank": rank.rank, **unknown} for row in rank.collectives]


def _stragglers(explanation: Explanation) -> dict[str, Any]:
    if explanation.job is not None:
        stragglers: dict[str, Any] = to_builtins(explanation.job.stragglers)
        return stragglers
    verdict = "one rank only" if len(explanation.ranks) == 1 else "not resolved"
    return {"verdict": verdict, "ranks": [], "detail": ""}


def _clock(job: Job | None) -> dict[str, Any]:
    """Keys are ranks as text, since JSON has no other keys."""
    clock = job.clock if job else Clock(aligned=False, detail="one rank: nothing to align")
    return {
        "aligned": clock.aligned,
        "offset_ns": _by_rank(clock.offset_ns),
        "error_ns": _by_rank(clock.error_ns),
        "drift_ppm": _by_rank(clock.drift_ppm),
        "reference": clock.reference,
        "at_ns": clock.at_ns,
        "sources": list(clock.sources),
        "detail": clock.detail,
        "hosts": [to_builtins(host) for host in clock.hosts],
        "notes": list(clock.notes),
    }


def _path(job: Job | None) -> dict[str, Any] | None:
    if job is None or job.path is None:
        return None
    return {**to_builtins(job.path), "share_by_rank": _by_rank(job.path.share_by_rank)}


def _steps_by_rank(job: Job | None) -> dict[str, Any] | None:
    """One row per step, one column per rank; null if a rank lacks the step."""
    if job is None:
        return None
    matrices = {
        "step_ns": job.step_ns,
        "own_ns": job.own_ns,
        "exposed_comm_ns": job.exposed_comm_ns,
        "input_ns": job.input_ns,
    }
    return {
        "ranks": list(job.ranks),
        "hosts": _by_rank(job.hosts),
        "steps": list(job.steps),
        **{
            name: [[None if ns < 0 else ns for ns in row] for row in matrix.tolist()]
            for name, matrix in matrices.items()
        },
    }


def _by_rank(values: dict[int, Any]) -> dict[str, Any]:
    return {str(rank): value for rank, value in values.items()}


def _note(note: Note) -> dict[str, Any]:
    return {key: value for key, value in to_builtins(note).items() if value is not None}
