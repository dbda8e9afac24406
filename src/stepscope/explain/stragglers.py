"""Who slows the others, and why. "None" is an answer.

A rank's own time (its step less communication that nothing hides) is set against the median of the
other ranks, step by step. It is a straggler when the median of these ratios

- is more than 5%, in most steps,
- is more than 3.5 MADs of the other ranks' ratios away from them, with four ranks or more, and
- stands out of the step-to-step noise, at a level that allows for the number of ranks looked at,
- and is more than 5% in the ranks' typical steps too, whose own times every surface shows.

How much slower it is, and what that costs, is said of the typical steps.
The cause is its input when that explains half of what it takes longer, else its own compute. A link
is slow when ranks come together and the transfer takes longer than calibrated, or than the same
transfer in the job's other groups.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.records.figures import duration, factor, percent, signed_percent, size
from stepscope.records.job import Straggler, Stragglers
from stepscope.records.words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.arrays import Floats, Int64s
    from stepscope.records.job import Cause, Job, RankTimes


LEAST_EXCESS = 0.05
MOST_MADS = 3.5
SLOW_LINK = 1.5
_FALSE_ALARM = 0.002  # for the whole job, however many ranks
# A few steps say little about their noise: as if four more had been seen with 3%.
_PRIOR_NOISE, _PRIOR_STEPS = 0.03, 4
_TOLD_APART = 0.10  # an excess that large which noise could explain is "not resolved"


class LinkEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One kind and size of collective in one group: its transfers, step by step."""

    group: str
    members: int
    kind: str
    size_bytes: int
    step: Int64s  # the step's number of each transfer
    transfer_ns: Int64s
    exposed_ns: Int64s  # mean over ranks
    wait_ns: Floats  # of the rank that waited longest
    expected_ns: float | None  # by calibration, with its error
    expected_error: float
    siblings_ns: float | None  # median of the same transfer in the job's other groups


def find_stragglers(
    ranks: Sequence[int],
    own_ns: Int64s,
    input_ns: Int64s,
    step_ns: Int64s,
    links: Sequence[LinkEvidence] = (),
    times: Sequence[RankTimes] = (),
) -> Stragglers:
    """Matrices are (steps, ranks), as recorded; a step that a rank lacks is -1 and left out.

    `times` are the ranks' typical steps; without them the medians of the matrices are used.
    """
    if len(ranks) < 2:
        return Stragglers(verdict="one rank only")
    whole = (own_ns > 0).all(axis=1)
    own, loading = own_ns[whole].astype(float), input_ns[whole].astype(float)
    slow_links = _slow_links(links, step_ns[whole])
    if len(own) < 2 and not slow_links:
        return Stragglers(
            verdict="not resolved",
            detail="at least two steps that all ranks recorded are needed to tell a slow rank "
            "from chance",
        )
    shown = _typical_steps(times, own, loading)
    found, doubt = _slow_ranks(ranks, own, loading, shown) if len(own) > 1 else ([], "")
    if found:
        return Stragglers(verdict="found", ranks=tuple(found))
    if slow_links:
        return Stragglers(verdict="found", ranks=tuple(slow_links))
    if doubt:
        return Stragglers(verdict="not resolved", detail=doubt)
    return Stragglers(verdict="none", detail=f"no rank stands out in {counted(len(own), 'step')}")


def costs_of_record(job: Job, step_ms: float) -> Job:
    """Stragglers are found in recorded steps; what they cost is told of the step of record."""
    recorded_ms = max((each.step_ms for each in job.times), default=0.0)
    if not recorded_ms or not step_ms:
        return job
    scale = step_ms / recorded_ms
    found = [replace(each, cost_ms=each.cost_ms * scale) for each in job.stragglers.ranks]
    return replace(job, step_ms=step_ms, stragglers=replace(job.stragglers, ranks=tuple(found)))


def _typical_steps(
    times: Sequence[RankTimes], own: Floats, loading: Floats
) -> tuple[Floats, Floats]:
    """Every rank's own time and input of its typical step, in nanoseconds."""
    if not times:
        return np.median(own, axis=0), np.median(loading, axis=0)
    return (
        np.array([each.own_ms for each in times]) * 1e6,
        np.array([each.input_ms for each in times]) * 1e6,
    )


def _slow_ranks(
    ranks: Sequence[int], own: Floats, loading: Floats, shown: tuple[Floats, Floats]
) -> tuple[list[Straggler], str]:
    excess = np.log(own) - np.log(_median_of_others(own))
    typical = np.median(excess, axis=0)
    noise_level = _noise_level(excess)
    often = (np.expm1(excess) > LEAST_EXCESS).mean(axis=0) > 0.5
    slow = (np.expm1(typical) > LEAST_EXCESS) & often
    if len(ranks) >= 4:
        for rank in np.flatnonzero(slow).tolist():
            slow[rank] = _stands_out(typical, rank)
    sure = slow & (typical > noise_level)
    on_the_whole = shown[0] / np.maximum(_median_of_others(shown[0][None])[0], 1.0) - 1
    found = [
        _straggler(ranks, own, loading, excess, shown, rank)
        for rank in np.flatnonzero(sure & (on_the_whole > LEAST_EXCESS)).tolist()
    ]
    doubt = ""
    if not found and (slow & (np.expm1(typical) > _TOLD_APART)).any():
        rank = int(np.argmax(np.where(slow, typical, -np.inf)))
        longer = percent(float(np.expm1(typical[rank])))
        doubt = f"rank {ranks[rank]} takes {longer} longer than the others"
        if sure[rank]:
            doubt += f" step by step, but {signed_percent(on_the_whole[rank])} in its typical step"
        else:
            chance = np.expm1(noise_level)
            doubt += f", but in {len(own)} such uneven steps chance could make {percent(chance)}"
    return sorted(found, key=lambda each: -each.cost_ms), doubt


def _stands_out(typical: Floats, rank: int) -> bool:
    """By more than 3.5 times the others' median distance from their own median."""
    others = np.delete(typical, rank)
    middle = np.median(others)
    return bool(typical[rank] - middle > MOST_MADS * np.median(np.abs(others - middle)))


def _median_of_others(values: Floats) -> Floats:
    """Per step and rank, the median of all other ranks, from one sort of each step."""
    ordered = np.sort(values, axis=1)
    place = np.argsort(np.argsort(values, axis=1, kind="stable"), axis=1, kind="stable")
    others = values.shape[1] - 1
    step = np.arange(len(values))[:, None]

    def without(nth: int) -> Floats:
        """The nth smallest when the rank itself is left out."""
        kept: Floats = ordered[step, nth + (place <= nth)]
        return kept

    return (without((others - 1) // 2) + without(others // 2)) / 2


def _noise_level(excess: Floats) -> float:
    """What the median of the steps reaches by chance on the worst of all ranks."""
    steps, ranks = excess.shape
    freedom = (ranks - 1) * (steps - 1)
    variances = excess.var(axis=0, ddof=1)
    if freedom >= 30:  # the median rank's: hiccups of a few do not count
        variance = float(np.median(variances)) / (1 - 2 / (9 * (steps - 1))) ** 3
    else:
        variance = float(variances.mean())
    prior = _PRIOR_NOISE**2 * (1 + 1.57 / (ranks - 1))
    pooled = (freedom * variance + _PRIOR_STEPS * prior) / (freedom + _PRIOR_STEPS)
    worst = _student(1 - _FALSE_ALARM / ranks, freedom + _PRIOR_STEPS)
    return worst * 1.25 * float(np.sqrt(pooled / steps))


def _student(share: float, freedom: int) -> float:
    """Quantile of Student's t by the usual expansion around the normal one."""
    z = NormalDist().inv_cdf(share)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def _straggler(
    ranks: Sequence[int],
    own: Floats,
    loading: Floats,
    excess: Floats,
    shown: tuple[Floats, Floats],
    rank: int,
) -> Straggler:
    longer = own[:, rank] - _median_of_others(own)[:, rank]
    fed_later = loading[:, rank] - _median_of_others(loading)[:, rank]
    cause: Cause = "input" if np.median(fed_later) >= np.median(longer) / 2 else "compute"
    usual, usual_input = (float(np.median(np.delete(each, rank))) for each in shown)
    cost, of_input = float(shown[0][rank]) - usual, float(shown[1][rank]) - usual_input
    slowdown = float(shown[0][rank] / usual)
    often = int((np.expm1(excess[:, rank]) > LEAST_EXCESS).sum())
    evidence = [
        f"its step without communication is {factor(slowdown)} times the other ranks' median, in "
        f"{often} of {counted(len(own), 'step')}",
        f"{percent(min(1.0, max(of_input, 0.0) / cost) if cost > 0 else 0.0)} of the extra time is "
        "waiting for data",
    ]
    return Straggler(
        rank=ranks[rank],
        cause=cause,
        slowdown=slowdown,
        cost_ms=cost / 1e6,
        steps=often,
        of=len(own),
        evidence=tuple(evidence),
    )


def _slow_links(links: Sequence[LinkEvidence], step_ns: Int64s) -> list[Straggler]:
    """Per group, what its transfers take longer than they should, when that is worth mentioning."""
    step = float(np.median(step_ns)) if step_ns.size else 0.0
    by_group: dict[str, list[tuple[LinkEvidence, float]]] = {}
    for link in links:
        should = _should_take(link)
        if should is not None:
            by_group.setdefault(link.group, []).append((link, should))
    judged = [_judge_link(group, slow, step) for group, slow in by_group.items()]
    return sorted((link for link in judged if link is not None), key=lambda link: -link.cost_ms)


def _should_take(link: LinkEvidence) -> float | None:
    if link.expected_ns is not None:
        return link.expected_ns * (1 + link.expected_error)
    return link.siblings_ns


def _judge_link(
    group: str, links: list[tuple[LinkEvidence, float]], step_ns: float
) -> Straggler | None:
    took = sum(float(link.transfer_ns.sum()) for link, _ in links)
    should = sum(value * len(link.transfer_ns) for link, value in links)
    steps = np.unique(np.concatenate([link.step for link, _ in links]))
    slow_steps = _slow_steps(links, steps)
    if took <= SLOW_LINK * should or slow_steps <= len(steps) / 2:
        return None
    exposed = sum(
        float(np.minimum(link.exposed_ns, np.maximum(link.transfer_ns - value, 0)).sum())
        for link, value in links
    )
    cost = exposed / max(len(steps), 1)
    if cost < LEAST_EXCESS * step_ns:
        return None
    worst, value = max(links, key=lambda pair: float(pair[0].transfer_ns.sum()))
    against = "calibrated" if worst.expected_ns is not None else "in the other groups"
    typical = float(np.median(worst.transfer_ns))
    return Straggler(
        rank=None,
        group=group,
        cause="link",
        slowdown=took / should,
        cost_ms=cost / 1e6,
        steps=slow_steps,
        of=len(steps),
        evidence=(
            f"ranks arrive together, but {worst.kind} of {size(worst.size_bytes)} takes "
            f"{duration(typical)}; {against}: {duration(value)}",
        ),
    )


def _slow_steps(links: list[tuple[LinkEvidence, float]], steps: Int64s) -> int:
    took, should = np.zeros(len(steps)), np.zeros(len(steps))
    for link, value in links:
        at = np.searchsorted(steps, link.step)
        np.add.at(took, at, link.transfer_ns)
        np.add.at(should, at, value)
    return int((took > SLOW_LINK * should).sum())
