"""Which rank or link slows the others, and why. "None" is an answer.

A rank's own time (its step without exposed communication) is compared with the median of the other
ranks, step by step. The rank is a straggler when the median excess
- is more than 5%, and so in most steps,
- with four ranks or more, is over 3.5 MADs of the other ranks' excesses away from them,
- exceeds the step-to-step noise, at a level that allows for the number of ranks, and
- is more than 5% in the ranks' typical steps too, whose own times every surface shows.
Slowdown and cost refer to the typical steps.

Where hosts are known, their mean times are compared first, in the same way. A host is slow when
each of its ranks is, by about as much; ranks are then compared without what their host explains.

The cause is its input when that explains half of the extra time, else its own compute. A link is
slow when ranks arrive together and the transfer takes longer than calibrated, or than the same
transfer in the job's other groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.job.hosts import HostColumns, columns_by_host
from stepscope.explain.job.lateness import median_of_others
from stepscope.records.job import Cause, Job, RankTimes, Straggler, Stragglers
from stepscope.records.normal import median, medians
from stepscope.step.arrays import Floats, Int64s
from stepscope.text.figures import duration, factor, percent, signed_percent, size
from stepscope.text.words import counted

LEAST_EXCESS = 0.05
MOST_MADS = 3.5
SLOW_LINK = 1.5
_FALSE_ALARM = 0.002  # for the whole job, however many ranks
# A few steps say little about their noise: this adds four more with 3%.
_PRIOR_NOISE, _PRIOR_STEPS = 0.03, 4
_ALIKE = 0.5  # of the slowest rank's excess: less, and the ranks of a host are not slow alike
_WORTH_A_DOUBT = 0.10  # so large an excess that noise could explain is "not resolved"


class LinkEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One kind and size of collective in one group: its transfers, step by step."""

    group: str
    members: int
    kind: str
    size_bytes: int
    step: Int64s  # the step's number of each transfer
    transfer_ns: Int64s
    exposed_ns: Int64s  # mean over ranks
    calibrated: bool
    should_ns: float  # by calibration and its error, else as in the job's other groups


def find_stragglers(
    ranks: Sequence[int],
    own_ns: Int64s,
    input_ns: Int64s,
    step_ns: Int64s,
    links: Sequence[LinkEvidence] = (),
    times: Sequence[RankTimes] = (),
    hosts: Mapping[int, str] | None = None,
) -> Stragglers:
    """Matrices are (steps, ranks), as recorded; a step that a rank lacks is -1 and left out.

    `times` are the ranks' typical steps; without them the medians of the matrices are used.
    `hosts` are the ranks' hosts, where they are known.
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
    # Every rank's own time and input of its typical step, in nanoseconds.
    if not times:
        shown: tuple[Floats, Floats] = (medians(own), medians(loading))
    else:
        own_ms, input_ms = np.array([(rank.own_ms, rank.input_ms) for rank in times]).T
        shown = (own_ms * 1e6, input_ms * 1e6)
    slow, doubt = _slow_hosts_and_ranks(ranks, own, loading, shown, hosts or {})
    if slow or slow_links:
        return Stragglers(verdict="found", ranks=tuple(slow or slow_links))
    if doubt:
        return Stragglers(verdict="not resolved", detail=doubt)
    return Stragglers(verdict="none", detail=f"no rank stands out in {counted(len(own), 'step')}")


def costs_of_record(job: Job, step_ms: float) -> Job:
    """Scale the cost of stragglers of the recorded steps to the step of record."""
    recorded_ms = max((times.step_ms for times in job.times), default=0.0)
    if not recorded_ms or not step_ms:
        return job
    scale = step_ms / recorded_ms
    ranks = tuple(
        rank if rank.source == "every step" else replace(rank, cost_ms=rank.cost_ms * scale)
        for rank in job.stragglers.ranks
    )
    return replace(job, step_ms=step_ms, stragglers=replace(job.stragglers, ranks=ranks))


def _slow_hosts_and_ranks(
    ranks: Sequence[int],
    own: Floats,
    loading: Floats,
    shown: tuple[Floats, Floats],
    hosts: Mapping[int, str],
) -> tuple[list[Straggler], str]:
    """With one step, nothing; else the costliest first, and what is in doubt if nothing is slow."""
    if len(own) < 2:
        return [], ""
    by_host = columns_by_host(ranks, hosts)
    slow_hosts = _slow_hosts(ranks, own, loading, shown, by_host)
    for host in slow_hosts:
        mine = [column for column, rank in enumerate(ranks) if rank in host.ranks]
        own, loading = _levelled(own, mine), _levelled(loading, mine)
        shown = (_levelled(shown[0][None], mine)[0], _levelled(shown[1][None], mine)[0])
    slow_ranks, doubt = _slow_ranks(ranks, own, loading, shown)
    named = [replace(rank, host=hosts.get(rank.rank or 0)) for rank in slow_ranks]
    found = sorted((*slow_hosts, *named), key=lambda straggler: -straggler.cost_ms)
    return found, "" if found else doubt


def _slow_hosts(
    ranks: Sequence[int],
    own: Floats,
    loading: Floats,
    shown: tuple[Floats, Floats],
    hosts: Sequence[HostColumns],
) -> list[Straggler]:
    """Hosts are compared by their means, like ranks."""
    if not any(len(host.columns) > 1 for host in hosts):
        return []
    columns = [list(host.columns) for host in hosts]

    def means(matrix: Floats) -> Floats:
        return np.stack([matrix[..., mine].mean(axis=-1) for mine in columns], axis=-1)

    typical = means(shown[0]), means(shown[1])
    slow, _ = _slow_ranks(range(len(hosts)), means(own), means(loading), typical)
    return [
        replace(
            one,
            rank=None,
            scope="host",
            host=hosts[place].host,
            ranks=tuple(ranks[column] for column in hosts[place].columns),
        )
        for one in slow
        if (place := one.rank) is not None
        and len(columns[place]) > 1
        and _slow_alike(own, columns[place])
    ]


def _slow_alike(own: Floats, mine: list[int]) -> bool:
    """Whether each of these ranks takes longer than the ranks of other hosts, by about as much."""
    others = np.delete(own, mine, axis=1).mean(axis=1, keepdims=True)
    excess = medians(own[:, mine] / others) - 1
    return bool(excess.min() > max(LEAST_EXCESS, _ALIKE * float(excess.max())))


def _levelled(matrix: Floats, mine: list[int]) -> Floats:
    """These ranks as fast as the others, each by the same factor at every step."""
    level = median(np.delete(matrix, mine, axis=1)) / max(median(matrix[:, mine]), 1.0)
    levelled = matrix.copy()
    levelled[:, mine] *= level
    return levelled


def _slow_ranks(
    ranks: Sequence[int], own: Floats, loading: Floats, shown: tuple[Floats, Floats]
) -> tuple[list[Straggler], str]:
    excess = np.log(own) - np.log(median_of_others(own))
    typical = medians(excess)
    noise_level = _noise_level(excess)
    often = (np.expm1(excess) > LEAST_EXCESS).mean(axis=0) > 0.5
    slow = (np.expm1(typical) > LEAST_EXCESS) & often
    if len(ranks) >= 4:
        for rank in np.flatnonzero(slow).tolist():
            # More than 3.5 times the others' median distance from their own median.
            others = np.delete(typical, rank)
            middle = median(others)
            slow[rank] = bool(typical[rank] - middle > MOST_MADS * median(np.abs(others - middle)))
    sure = slow & (typical > noise_level)
    on_the_whole = shown[0] / np.maximum(median_of_others(shown[0][None])[0], 1.0) - 1
    stragglers = [
        _straggler(ranks, own, loading, excess, shown, rank)
        for rank in np.flatnonzero(sure & (on_the_whole > LEAST_EXCESS)).tolist()
    ]
    doubt = ""
    if not stragglers and (slow & (np.expm1(typical) > _WORTH_A_DOUBT)).any():
        rank = int(np.argmax(np.where(slow, typical, -np.inf)))
        longer = percent(float(np.expm1(typical[rank])))
        doubt = f"rank {ranks[rank]} takes {longer} longer than the others"
        if sure[rank]:
            doubt += f" step by step, but {signed_percent(on_the_whole[rank])} in its typical step"
        else:
            chance = np.expm1(noise_level)
            doubt += f", but in {len(own)} such uneven steps chance could make {percent(chance)}"
    return sorted(stragglers, key=lambda straggler: -straggler.cost_ms), doubt


def _noise_level(excess: Floats) -> float:
    """The median excess that the worst of all ranks reaches by chance."""
    steps, ranks = excess.shape
    freedom = (ranks - 1) * (steps - 1)
    variances = excess.var(axis=0, ddof=1)
    if freedom >= 30:  # the median rank's, so that hiccups of a few ranks do not count
        variance = median(variances) / (1 - 2 / (9 * (steps - 1))) ** 3
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
    longer = own[:, rank] - median_of_others(own)[:, rank]
    fed_later = loading[:, rank] - median_of_others(loading)[:, rank]
    cause: Cause = "input" if median(fed_later) >= median(longer) / 2 else "compute"
    usual, usual_input = (median(np.delete(times, rank)) for times in shown)
    cost, of_input = float(shown[0][rank]) - usual, float(shown[1][rank]) - usual_input
    slowdown = float(shown[0][rank] / usual)
    often = int((np.expm1(excess[:, rank]) > LEAST_EXCESS).sum())
    evidence = (
        f"its step without communication is {factor(slowdown)} times the other ranks' median, in "
        f"{often} of {counted(len(own), 'step')}",
        f"{percent(min(1.0, max(of_input, 0.0) / cost) if cost > 0 else 0.0)} of the extra time is "
        "waiting for data",
    )
    return Straggler(
        rank=ranks[rank],
        cause=cause,
        slowdown=slowdown,
        cost_ms=cost / 1e6,
        steps=often,
        of=len(own),
        evidence=evidence,
    )


def _slow_links(links: Sequence[LinkEvidence], step_ns: Int64s) -> list[Straggler]:
    """The groups whose transfers take longer than they should, where that costs enough."""
    step = median(step_ns) if step_ns.size else 0.0
    by_group: dict[str, list[LinkEvidence]] = {}
    for link in links:
        by_group.setdefault(link.group, []).append(link)
    judged = [_judge_link(group, transfers, step) for group, transfers in by_group.items()]
    return sorted(filter(None, judged), key=lambda link: -link.cost_ms)


def _judge_link(group: str, links: list[LinkEvidence], step_ns: float) -> Straggler | None:
    took = sum(float(link.transfer_ns.sum()) for link in links)
    should = sum(link.should_ns * len(link.transfer_ns) for link in links)
    steps = np.unique(np.concatenate([link.step for link in links]))
    slow_steps = _slow_steps(links, steps)
    if took <= SLOW_LINK * should or slow_steps <= len(steps) / 2:
        return None
    exposed = sum(
        float(np.minimum(link.exposed_ns, np.maximum(link.transfer_ns - link.should_ns, 0)).sum())
        for link in links
    )
    cost = exposed / max(len(steps), 1)
    if cost < LEAST_EXCESS * step_ns:
        return None
    worst = max(links, key=lambda link: float(link.transfer_ns.sum()))
    against = "calibrated" if worst.calibrated else "in the other groups"
    typical = median(worst.transfer_ns)
    return Straggler(
        rank=None,
        group=group,
        cause="link",
        scope="link",
        slowdown=took / should,
        cost_ms=cost / 1e6,
        steps=slow_steps,
        of=len(steps),
        evidence=(
            f"ranks arrive together, but {worst.kind} of {size(worst.size_bytes)} takes "
            f"{duration(typical)}; {against}: {duration(worst.should_ns)}",
        ),
    )


def _slow_steps(links: list[LinkEvidence], steps: Int64s) -> int:
    took, should = np.zeros(len(steps)), np.zeros(len(steps))
    for link in links:
        at = np.searchsorted(steps, link.step)
        np.add.at(took, at, link.transfer_ns)
        np.add.at(should, at, link.should_ns)
    return int((took > SLOW_LINK * should).sum())
