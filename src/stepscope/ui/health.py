"""What three steps of a job say in a few lines: pace, stragglers, use of the device, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.explain.rank_steps import typical_step
from stepscope.records.figures import duration, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.explanation import Explanation, RankExplanation

TIGHT = 0.9  # of the device's memory
FEW_RANKS = 8


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """One answer; `lines` are (word, sentence) for people."""

    verdict: str
    healthy: bool
    lines: tuple[tuple[str, str], ...]
    ranks: tuple[dict[str, Any], ...]
    stragglers: dict[str, Any]
    memory: tuple[dict[str, Any], ...]


def check_health(explanation: Explanation, captured: Sequence[dict[str, Any]]) -> Health:
    """`captured`: rank number, device and memory.json of each rank."""
    memory = [_memory(each) for each in captured]
    tight = [each for each in memory if (each["share"] or 0.0) > TIGHT]
    found = explanation.job.stragglers if explanation.job else None
    straggler = found.ranks[0] if found and found.ranks else None
    verdict = _verdict(explanation, tight)
    ranks = tuple(_rank(rank) for rank in explanation.ranks)
    return Health(
        verdict=verdict,
        healthy=straggler is None and not tight,
        lines=(
            ("health", verdict),
            ("why", explanation.why),
            *_pace(explanation),
            ("stragglers", _about_stragglers(explanation)),
            ("use", _use(explanation)),
            ("memory", _about_memory(memory)),
            ("next", explanation.next),
        ),
        ranks=ranks,
        stragglers=msgspec.to_builtins(found) if found else {"verdict": "one rank only"},
        memory=tuple(memory),
    )


def _verdict(explanation: Explanation, tight: list[dict[str, Any]]) -> str:
    top = explanation.findings[0]
    if tight and top.id != "straggler":
        ranks = ", ".join(str(each["rank"]) for each in tight[:8])
        return f"memory is nearly full on rank {ranks}"
    return explanation.verdict


def _rank(rank: RankExplanation) -> dict[str, Any]:
    times = typical_step(rank.part.pace)
    return {
        "rank": rank.rank,
        "host": rank.part.host,
        "step_ms": rank.budget.step_ms,
        "own_ms": times.own_ms if len(rank.part.pace) else None,
        "input_ms": times.input_ms if len(rank.part.pace) else None,
        "compute_share": _share(rank, "compute"),
        "exposed_comm_share": _share(rank, "exposed_comm"),
    }


def _share(rank: RankExplanation, name: str) -> float:
    return sum(part.share for part in rank.budget.parts if part.id == name)


def _pace(explanation: Explanation) -> list[tuple[str, str]]:
    """Every rank when there are few, else both ends."""
    told = sorted(
        (_rank(rank) for rank in explanation.ranks), key=lambda row: -(row["own_ms"] or 0)
    )
    steps = [row["step_ms"] for row in told]
    pace = f"{duration(np.median(steps) * 1e6)} a step"
    if len(told) == 1:
        return [("pace", pace)]
    named = told if len(told) <= FEW_RANKS else [*told[:3], *told[-2:]]
    own = ", ".join(f"{row['rank']}: {row['own_ms'] or 0.0:.1f}" for row in named)
    return [("pace", f"{pace}; without communication, ms by rank, slowest first: {own}")]


def _about_stragglers(explanation: Explanation) -> str:
    if explanation.job is None:
        return "one rank only"
    found = explanation.job.stragglers
    if not found.ranks:
        return f"{found.verdict}; {found.detail}" if found.detail else found.verdict
    return "; ".join(
        f"{'rank ' + str(each.rank) if each.rank is not None else 'group ' + str(each.group)} "
        f"({each.cause}, {each.slowdown:.2f} times, {each.cost_ms:.1f} ms a step)"
        for each in found.ranks[:4]
    )


def _use(explanation: Explanation) -> str:
    parts = {part.id: part.share for part in explanation.budget.parts}
    compute, comm = parts.get("compute", 0.0), parts.get("exposed_comm", 0.0)
    loading = parts.get("data_loading", 0.0)
    rest = 1.0 - compute - comm - loading
    return (
        f"compute {compute:.0%}, exposed communication {comm:.0%}, input {loading:.0%}, "
        f"other idle {rest:.0%} of the step"
    )


def _memory(captured: dict[str, Any]) -> dict[str, Any]:
    told = captured.get("memory") or {}
    peak = told.get("peak") or {}
    held = peak.get("reserved_bytes") or peak.get("allocated_bytes")
    device = captured.get("device")
    there = device.get("memory_bytes") if isinstance(device, dict) else None
    known = {name: value for name, value in (peak.get("categories") or {}).items() if value}
    return {
        "rank": captured.get("rank"),
        "peak_bytes": held,
        "device_bytes": there,
        "share": min(1.0, held / there) if held and there else None,
        "categories": known,
    }


def _about_memory(memory: list[dict[str, Any]]) -> str:
    measured = [each for each in memory if each["share"] is not None]
    if measured:
        worst = max(measured, key=lambda each: float(each["share"]))
        return (
            f"fullest is rank {worst['rank']}: {size(worst['peak_bytes'])} reserved of "
            f"{size(worst['device_bytes'])} ({worst['share']:.0%})"
        )
    told = [each for each in memory if each["categories"]]
    if not told:
        return "not captured"
    most = max(told, key=lambda each: sum(each["categories"].values()))
    known = ", ".join(f"{name} {size(value)}" for name, value in most["categories"].items())
    return f"rank {most['rank']}: {known}; the CPU has no allocator that counts the rest"
