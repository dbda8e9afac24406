"""Check what three steps of a job say (pace, stragglers, use of the device, memory) and
print a word and a sentence on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec
from rich.table import Table

from stepscope.explain.job.hosts import columns_by_host
from stepscope.explain.job.rank_part import typical_step
from stepscope.explain.job.stragglers import LEAST_EXCESS
from stepscope.records.explanation import Explanation, RankExplanation
from stepscope.text.figures import duration, factor, milliseconds, percent, significant, size
from stepscope.text.words import named_ranks
from stepscope.ui.terminal.console import make_console
from stepscope.ui.topics.distributed import rank_on_host, straggler_name

TIGHT = 0.9  # of the device's memory
FEW_RANKS = 8
FEW_HOSTS = 4


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """One answer; `lines` are (word, sentence) for people."""

    verdict: str
    healthy: bool
    lines: tuple[tuple[str, str], ...]
    ranks: tuple[dict[str, Any], ...]
    hosts: tuple[dict[str, Any], ...]
    stragglers: dict[str, Any]
    memory: tuple[dict[str, Any], ...]


def check_health(explanation: Explanation, captured: Sequence[dict[str, Any]]) -> Health:
    """`captured`: rank number, device and memory.json of each rank."""
    memory = [_memory(rank) for rank in captured]
    tight = [rank for rank in memory if (rank["share"] or 0.0) > TIGHT]
    stragglers = explanation.job.stragglers if explanation.job else None
    verdict = explanation.verdict
    if tight and explanation.findings[0].id != "straggler":
        numbers = ", ".join(str(rank["rank"]) for rank in tight[:8])
        verdict = f"memory is nearly full on rank {numbers}"
    ranks = [_rank(rank) for rank in explanation.ranks]
    hosts = list_hosts(explanation)
    return Health(
        verdict=verdict,
        healthy=not (stragglers and stragglers.ranks) and not tight,
        lines=(
            ("health", verdict),
            ("why", explanation.why),
            ("pace", _about_pace(ranks)),
            ("hosts", _about_hosts(hosts)),
            ("stragglers", _about_stragglers(explanation)),
            ("use", _about_use(explanation)),
            ("memory", _about_memory(memory)),
            ("next", explanation.next),
        ),
        ranks=tuple(ranks),
        hosts=tuple(hosts),
        stragglers=msgspec.to_builtins(stragglers) if stragglers else {"verdict": "one rank only"},
        memory=tuple(memory),
    )


def _rank(rank: RankExplanation) -> dict[str, Any]:
    times, has_pace = typical_step(rank.part.pace), len(rank.part.pace) > 0
    shares = {part.id: part.share for part in rank.budget.parts}
    return {
        "rank": rank.rank,
        "host": rank.part.host,
        "step_ms": rank.budget.step_ms,
        "own_ms": times.own_ms if has_pace else None,
        "input_ms": times.input_ms if has_pace else None,
        "compute_share": shares.get("compute", 0),
        "exposed_comm_share": shares.get("exposed_comm", 0),
    }


def _about_pace(ranks: Sequence[dict[str, Any]]) -> str:
    """Every rank when there are few, else both ends."""
    rows = sorted(ranks, key=lambda row: -(row["own_ms"] or 0))
    pace = f"{duration(median(row['step_ms'] for row in rows) * 1e6)} per step"
    if len(rows) == 1:
        return pace
    named = rows if len(rows) <= FEW_RANKS else [*rows[:3], *rows[-2:]]
    own = ", ".join(f"{row['rank']}: {significant(row['own_ms'] or 0.0)}" for row in named)
    return f"{pace}; without communication, ms by rank, slowest first: {own}"


def list_hosts(explanation: Explanation) -> list[dict[str, Any]]:
    """Each host's typical rank, and how far it is behind those of the other hosts; the latest
    first. Empty unless the ranks are on several known hosts."""
    job = explanation.job
    if job is None:
        return []
    by_host = {
        host.host: [job.ranks[column] for column in host.columns]
        for host in columns_by_host(job.ranks, job.hosts)
    }
    own = {rank: times.own_ms for rank, times in zip(job.ranks, job.times, strict=True)}
    typical = {host: median(own[rank] for rank in ranks) for host, ranks in by_host.items()}
    rows = []
    for host, ranks in by_host.items():
        others = [ms for name, ms in typical.items() if name != host]
        place = job.places.get(host)
        rows.append(
            {
                "host": host,
                "ranks": ranks,
                "own_ms": typical[host],
                "late_ms": typical[host] - median(others),
                "rack": place.rack if place else None,
                "switch": place.switch if place else None,
            }
        )
    return sorted(rows, key=lambda row: -row["late_ms"])


def _about_hosts(hosts: list[dict[str, Any]]) -> str:
    """Those that are late by more than a straggler's threshold first; both ends of many."""
    named = hosts if len(hosts) <= FEW_HOSTS else [*hosts[:3], hosts[-1]]
    words = []
    for host in named:
        late = host["late_ms"] > LEAST_EXCESS * host["own_ms"]
        pace = f"late by {milliseconds(host['late_ms'])}" if late else milliseconds(host["own_ms"])
        words.append(f"{host['host']}: {named_ranks(host['ranks'])} {pace}")
    if len(named) < len(hosts):
        words.insert(-1, f"{len(hosts) - len(named)} more between")
    return "; ".join(words)


def _about_stragglers(explanation: Explanation) -> str:
    if explanation.job is None:
        return "one rank only"
    job, stragglers = explanation.job, explanation.job.stragglers
    if not stragglers.ranks:
        return "; ".join(filter(None, (stragglers.verdict, stragglers.detail)))
    return "; ".join(
        f"{straggler_name(slow) if slow.rank is None else rank_on_host(slow.rank, job)} "
        f"({slow.cause}, {factor(slow.slowdown)} times, "
        f"{milliseconds(slow.cost_ms)} per step)"
        for slow in stragglers.ranks[:4]
    )


def _about_use(explanation: Explanation) -> str:
    parts = {part.id: part.share for part in explanation.budget.parts}
    compute, comm = parts.get("compute", 0.0), parts.get("exposed_comm", 0.0)
    loading = parts.get("data_loading", 0.0)
    rest = 1.0 - compute - comm - loading
    return (
        f"compute {percent(compute)}, exposed communication {percent(comm)}, "
        f"input {percent(loading)}, other idle {percent(rest)} of the step"
    )


def _memory(captured: dict[str, Any]) -> dict[str, Any]:
    memory = captured.get("memory") or {}
    peak = memory.get("peak") or {}
    reserved = peak.get("reserved_bytes") or peak.get("allocated_bytes")
    device = captured.get("device")
    device_bytes = device.get("memory_bytes") if isinstance(device, dict) else None
    return {
        "rank": captured.get("rank"),
        "peak_bytes": reserved,
        "device_bytes": device_bytes,
        "share": min(1.0, reserved / device_bytes) if reserved and device_bytes else None,
        "categories": {name: held for name, held in (peak.get("categories") or {}).items() if held},
    }


def _about_memory(memory: list[dict[str, Any]]) -> str:
    measured = [rank for rank in memory if rank["share"] is not None]
    if measured:
        worst = max(measured, key=lambda rank: float(rank["share"]))
        return (
            f"fullest is rank {worst['rank']}: {size(worst['peak_bytes'])} reserved of "
            f"{size(worst['device_bytes'])} ({percent(worst['share'])})"
        )
    known = [rank for rank in memory if rank["categories"]]
    if not known:
        return "not captured"
    most = max(known, key=lambda rank: sum(rank["categories"].values()))
    held = ", ".join(f"{name} {size(value)}" for name, value in most["categories"].items())
    return f"rank {most['rank']}: {held}; the CPU has no allocator that counts the rest"


def print_health(health: Health, *, width: int | None = None) -> None:
    """Sentences that are not known have no line."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="bright_black", no_wrap=True)
    grid.add_column(overflow="fold")
    for word, sentence in health.lines:
        if sentence:
            grid.add_row(word, sentence)
    make_console(width).print(grid)
