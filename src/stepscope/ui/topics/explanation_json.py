"""`explain --json`, schema 1: names that other programs rely on. They only ever grow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from stepscope.explain.incomplete_ranks import is_untimed
from stepscope.explain.job.hosts import ranks_by_host
from stepscope.explain.job.rank_part import own_ms
from stepscope.records.explanation import Budget, Explanation, RankExplanation
from stepscope.records.hardware import Efficiency
from stepscope.records.job import Clock, Job
from stepscope.records.quality import Note
from stepscope.records.run import RunOrigin, WholeRun, failed_json
from stepscope.ui.topics.whatif import together_json

SCHEMA = 1
MOST_SPOTS = 50


def explanation_json(explanation: Explanation) -> dict[str, Any]:
    job = explanation.job
    budget = _budget(explanation.budget)
    if all(is_untimed(rank) for rank in explanation.ranks):
        budget["step_ms"] = None
    return {
        "schema": SCHEMA,
        **_named(explanation, "verdict why next also headline"),
        "ranks": [_rank(rank) for rank in explanation.ranks],
        "ranks_without_trace": to_builtins(explanation.without_trace),
        "budget": budget,
        **_named(explanation, "findings advice"),
        "hosts": _hosts(job),
        "links": _links(job),
        "collectives": _all_collectives(explanation),
        "stragglers": _stragglers(explanation),
        "clock": _clock(job),
        "arrivals": to_builtins(job.arrivals) if job else [],
        "critical_path": _path(job),
        "steps_by_rank": _steps_by_rank(job),
        "hierarchical": to_builtins(job.hierarchical) if job else [],
        "strategies": to_builtins(explanation.strategies),
        "run": _run(explanation.run, explanation.origin),
        "nccl": to_builtins(explanation.nccl),
        "together": together_json(explanation.together) if explanation.together else None,
        "quality": _notes(explanation.quality),
    }


def _named(record: object, names: str) -> dict[str, Any]:
    """Fields of a record that have the same name in the JSON."""
    return {name: to_builtins(getattr(record, name)) for name in names.split()}


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
    return {
        "account": to_builtins(run.account),
        "ranks": ranks,
        "spread": to_builtins(run.spread) if run.spread else None,
        **started,
    }


_IDLE = ("data_loading", "sync", "operators", "python", "profiler")


def _rank(rank: RankExplanation) -> dict[str, Any]:
    timeline, idle = rank.timeline, rank.idle
    parts = ("span", "compute", "exposed_comm", "exposed_memory", "idle")
    answer = {
        "rank": rank.rank,
        "name": rank.called,
        **_named(rank, "world_size path device kind events"),
        "timeline_ns": {name: getattr(timeline, f"{name}_ns") for name in parts},
        **_named(timeline, "comm_ns memory_ns overlap"),
        "idle_ns": {name: getattr(idle, f"{name}_ns") for name in ("host", "launch", "other")},
        "host_idle_ns": {name: getattr(idle, f"{name}_ns") for name in _IDLE},
        "steps": to_builtins(rank.steps.steps),
        "steps_from": rank.steps.source,
        "cycles_ns": list(rank.steps.cycles_ns),
        "step_ms": to_builtins(rank.step_ms),
        "budget": _budget(rank.budget),
        "own_ms": own_ms(rank) if len(rank.part.pace) else None,
        **_named(rank, "kernels operators modules lines launches copies syncs compiled"),
        "efficiency": _efficiency(rank.efficiency),
        "memory": to_builtins(rank.memory),
        "quality": _notes(rank.quality),
    }
    if is_untimed(rank):
        # What a memory snapshot or a parameter server does not record is null, not zero.
        for name in ("timeline_ns", "idle_ns", "host_idle_ns"):
            answer[name] = dict.fromkeys(answer[name])
        answer |= dict.fromkeys(("comm_ns", "memory_ns", "overlap", "launches"))
        answer["budget"] |= {"step_ms": None}
    return answer


def _efficiency(efficiency: Efficiency | None) -> dict[str, Any] | None:
    """FLOPs that could not be counted are null, not zero; only the widest gaps are listed."""
    if efficiency is None:
        return None
    answer: dict[str, Any] = to_builtins(efficiency)
    if not efficiency.hardware_flops:
        answer |= dict.fromkeys(("model_flops", "hardware_flops", "recomputed_flops"))
    return answer | {"spots": answer["spots"][:MOST_SPOTS]}


def _budget(budget: Budget) -> dict[str, Any]:
    return _named(budget, "step_ms basis parts")


def _hosts(job: Job | None) -> list[dict[str, Any]]:
    """Rack and switch are null where nothing says them."""
    if job is None:
        return []
    return [
        {
            "host": host,
            "ranks": list(ranks),
            **{name: getattr(job.places.get(host), name, None) for name in ("rack", "switch")},
        }
        for host, ranks in ranks_by_host(job.hosts).items()
    ]


def _links(job: Job | None) -> list[dict[str, Any]]:
    return [
        {
            "from": link.sender,
            "to": link.receiver,
            "gb_s": link.rate_bytes_s / 1e9,
            "busy_gb_s": link.steady_bytes_s / 1e9,
            "device_gb_s": link.device_bytes_s / 1e9 if link.device_bytes_s else None,
            **_named(link, "sent_bytes connections rtt_us retransmitted"),
        }
        for link in (job.links if job else ())
    ]


def _all_collectives(explanation: Explanation) -> list[dict[str, Any]]:
    """Those joined across ranks first, then what only single ranks recorded, whose waits and
    transfers are null: they need other ranks."""
    joined = explanation.job.collectives if explanation.job else ()
    known = {(row.kind, row.group, row.size_bytes) for row in joined}
    # The row that sums up the rest of a truncated table has no size.
    known |= {(row.kind, row.group, None) for row in joined}
    rows = []
    for row in joined:
        # A rank's time inside a collective is its wait and the transfer.
        times = (row.wait_ns, row.transfer_ns)
        total = None if None in times else sum(ns or 0 for ns in times)
        rows.append({**to_builtins(row), "rank": None, "total_ns": total})
    unknown = dict.fromkeys(
        ("wait_ns", "wait_error_ns", "transfer_ns", "expected_ns", "slowest_rank", "reach")
    )
    return rows + [
        {**to_builtins(row), "rank": rank.rank, **unknown}
        for rank in explanation.ranks
        for row in rank.collectives
        if (row.kind, row.group, row.size_bytes) not in known
    ]


def _stragglers(explanation: Explanation) -> dict[str, Any]:
    if explanation.job is not None:
        stragglers: dict[str, Any] = to_builtins(explanation.job.stragglers)
        return stragglers
    verdict = "one rank only" if len(explanation.ranks) == 1 else "not resolved"
    return {"verdict": verdict, "ranks": [], "detail": ""}


def _clock(job: Job | None) -> dict[str, Any]:
    clock = job.clock if job else Clock(aligned=False, detail="one rank: nothing to align")
    return {
        "aligned": clock.aligned,
        "offset_ns": _by_rank(clock.offset_ns),
        "error_ns": _by_rank(clock.error_ns),
        "drift_ppm": _by_rank(clock.drift_ppm),
        **_named(clock, "reference at_ns sources detail hosts notes"),
    }


def _path(job: Job | None) -> dict[str, Any] | None:
    if job is None or job.path is None:
        return None
    return {**to_builtins(job.path), "share_by_rank": _by_rank(job.path.share_by_rank)}


def _steps_by_rank(job: Job | None) -> dict[str, Any] | None:
    """One row per step, one column per rank; null if a rank lacks the step."""
    if job is None:
        return None
    return {
        "ranks": list(job.ranks),
        "hosts": _by_rank(job.hosts),
        "steps": list(job.steps),
        **{
            name: [[None if ns < 0 else ns for ns in row] for row in getattr(job, name).tolist()]
            for name in ("step_ns", "own_ns", "exposed_comm_ns", "input_ns")
        },
    }


def _by_rank(values: dict[int, Any]) -> dict[str, Any]:
    """Keys are ranks as text, since JSON has no other keys."""
    return {str(rank): value for rank, value in values.items()}


def _notes(notes: Iterable[Note]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in to_builtins(note).items() if value is not None}
        for note in notes
    ]
