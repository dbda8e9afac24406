"""Which ranks, and which whole hosts, are late over hundreds of steps: always, now and then,
or a different one each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, log, sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.records.normal import NORMAL_MAD, median, medians
from stepscope.step.arrays import Bools, Floats
from stepscope.step.statistics import spread

if TYPE_CHECKING:
    from stepscope.explain.job.hosts import HostColumns


# A rank is late **now and then** when single steps stick out of the noise of all ranks, and so much
# more often on this rank than on the others that chance does not explain it. Where such steps come
# on all ranks alike, the lateness **wanders**: it costs time, and no rank is to blame.
#
# A rank is late **at every step** when, in the steps that do not stick out, its mean lateness
# - is at least 3.5% of the step,
# - exceeds what chance makes of it, at a level that allows for the number of ranks, and
# - stands apart from the other ranks by more than they differ among themselves.
# Neighbouring steps are alike: a rank that shares its core is late for many steps in a
# row. So steps are taken in blocks, and blocks that resemble their neighbours count for less. Where
# ranks share cores, most of the noise is waiting for one. So the test is made up to three times:
# with the arrivals as they were, with the phases of the step in which no rank waits for another,
# and without the time for which the rank was ready to run and had no core. The last two accuse only
# ranks that arrived late.

LEAST_STEPS = 60
LEAST_LATE = 0.035  # of the step
_ARRIVED_LATE = 0.01  # of the step: ranks that share cores hide some of another one's lateness
LEAST_COST = 0.03  # of the step, of lateness now and then; wandering has to cost more
LEAST_WANDERING = 0.05
_FALSE_ALARM = 0.0025  # for the whole job, in each of four tests
_BLOCK, _MOST_BLOCKS = 10, 24  # steps in a block; blocks in a run
_FEW_RANKS = 8
_MADS = 3.5
_STICKS_OUT, _LEAST_SINGLE = 5.0, 0.25  # deviations of the noise, and of the step
_CLIPPED = 4.0  # deviations: no single step counts for more
_EPISODE = 5  # steps: late ones that close to each other have one reason
_LEAST_EPISODES = 4


class LateRank(msgspec.Struct, frozen=True, kw_only=True):
    """`place` is the rank's column; -1 where no rank is to blame."""

    place: int
    constant: bool
    excess_ns: float  # in its late steps; without waiting for cores, where that is known
    arrived_ns: float  # after the other ranks, whatever it waited for
    for_cores_ns: float = 0.0  # of that, waiting for a core
    cost_ns: float  # what the mean step would gain
    late: Bools  # (steps,)
    p_value: float  # that chance alone looks like this, for all ranks together


class Lateness(msgspec.Struct, frozen=True, kw_only=True):
    """What the steps show; `least_ns` is the constant lateness that they could have shown."""

    steps: int
    late: tuple[LateRank, ...]  # the costliest first
    wandering: LateRank | None
    least_ns: float


class _Always(msgspec.Struct, frozen=True, kw_only=True):
    """The test for lateness at every step; an array has a value for each rank."""

    excess_ns: Floats  # against the other ranks
    least_ns: Floats  # that chance does not make
    p_value: Floats


def find_late(
    arrival_ns: Floats,
    step_ns: float,
    cpu_wait_ns: Floats | None = None,
    own_ns: Floats | None = None,
) -> Lateness | None:
    """Matrices are (steps, ranks) without gaps; arrivals count from any common zero of a step.

    `own_ns` are phases in which no rank waits for another. None with too few steps to say anything.
    """
    steps, ranks = arrival_ns.shape
    if steps < LEAST_STEPS or ranks < 2 or step_ns <= 0:
        return None
    late_ns = arrival_ns - median_of_others(arrival_ns)
    calm = late_ns - medians(late_ns)
    single = _sticking_out(calm, arrival_ns, step_ns)
    usual: Bools = np.logical_not(single.any(axis=1))
    if usual.sum() < LEAST_STEPS:  # the single ones are no exceptions
        usual[:], single[:] = True, False
    with_cores = None if cpu_wait_ns is None else arrival_ns - cpu_wait_ns
    always, least_ns = _always_late(arrival_ns, usual, step_ns, own_ns, with_cores)
    at_times, rest = _late_at_times(arrival_ns, calm, single, step_ns)
    for rank in always:
        rest[:, rank.place] = False
    return Lateness(
        steps=steps,
        late=_costliest_of_each((*always, *at_times)),
        wandering=_wandering(arrival_ns, calm, rest, step_ns),
        least_ns=least_ns,
    )


def _costliest_of_each(late: tuple[LateRank, ...]) -> tuple[LateRank, ...]:
    """A rank that is late in both ways is named once, for the way that costs more."""
    named: dict[int, LateRank] = {}
    for rank in sorted(late, key=lambda rank: -rank.cost_ns):
        named.setdefault(rank.place, rank)
    return tuple(named.values())


def median_of_others(values: Floats) -> Floats:
    """Per row and column, the median of all other columns, from one sort of each row."""
    ordered = np.sort(values, axis=1)
    place = np.argsort(np.argsort(values, axis=1, kind="stable"), axis=1, kind="stable")
    others = values.shape[1] - 1
    row = np.arange(len(values))[:, None]

    def without(nth: int) -> Floats:
        """The nth smallest when the column itself is left out."""
        kept: Floats = ordered[row, nth + (place <= nth)]
        return kept

    return (without((others - 1) // 2) + without(others // 2)) / 2


# Late at every step


def _always_late(
    arrival_ns: Floats,
    usual: Bools,
    step_ns: float,
    own_ns: Floats | None,
    with_cores_ns: Floats | None,
) -> tuple[list[LateRank], float]:
    """Only a rank that was late by its arrivals is accused. The last test that does says by how
    much. Phases do not show all work, so they tell no least lateness."""
    as_it_was = _test_always(arrival_ns[usual], step_ns)
    tests = dict.fromkeys(np.flatnonzero(_accused(as_it_was)).tolist(), as_it_was)
    own = None if own_ns is None else _test_always(own_ns[usual], step_ns)
    with_cores = None if with_cores_ns is None else _test_always(with_cores_ns[usual], step_ns)
    arrived_late = as_it_was.excess_ns >= _ARRIVED_LATE * step_ns
    for test in filter(None, (own, with_cores)):
        late = _accused(test) & arrived_late
        if test is own:
            # A phase is longer, too, when its rank has no core: the arrivals have to agree.
            agrees = with_cores or as_it_was
            late &= agrees.excess_ns >= LEAST_LATE * step_ns
        tests |= dict.fromkeys(np.flatnonzero(late).tolist(), test)
    known = (as_it_was, with_cores) if with_cores is not None else (as_it_was,)
    least_ns = min(median(test.least_ns) for test in known)
    late_ranks = []
    for place, test in tests.items():
        arrived = float(as_it_was.excess_ns[place])
        # No lateness but what the rank arrived with, as far as that is known.
        excess = min(float(test.excess_ns[place]), max(arrived, LEAST_LATE * step_ns))
        without = arrival_ns.copy()
        without[:, place] -= excess
        late_ns = arrival_ns[:, place] - median_of_others(arrival_ns)[:, place]
        rank = LateRank(
            place=place,
            constant=True,
            excess_ns=excess,
            arrived_ns=excess,
            cost_ns=gain(arrival_ns, without),
            late=late_ns > 0,
            p_value=float(test.p_value[place]),
        )
        for_cores = max(0.0, arrived - excess) if test is with_cores else 0.0
        late_ranks.append(replace(rank, arrived_ns=arrived, for_cores_ns=for_cores))
    return late_ranks, least_ns


def _test_always(arrival_ns: Floats, step_ns: float) -> _Always:
    since = arrival_ns - medians(arrival_ns, axis=1)[:, None]
    middle = medians(since)
    noise = NORMAL_MAD * median(np.abs(since - middle))
    since = np.clip(since, middle - _CLIPPED * noise, middle + _CLIPPED * noise)
    blocks = np.array_split(since, min(_MOST_BLOCKS, max(4, len(since) // _BLOCK)))
    means = np.array([block.mean(axis=0) for block in blocks])
    against = means - _of_others(means)
    error, freedom = _error_of_mean(against)
    excess, ranks = against.mean(axis=0), against.shape[1]
    if ranks >= _FEW_RANKS:  # skewed noise makes all ranks late against the median of the others
        excess = excess - median(excess)
    in_errors = (excess / np.maximum(error, 1e-9)).tolist()
    chance = [ranks * _p_value(one, freedom) for one in in_errors]
    by_chance = _student(_FALSE_ALARM / ranks, freedom) * error
    return _Always(
        excess_ns=excess,
        least_ns=np.maximum(LEAST_LATE * step_ns, by_chance),
        p_value=np.minimum(1.0, chance),
    )


def _of_others(values: Floats) -> Floats:
    """Per row, the mean of a few other columns; of many, the median: several may be late."""
    ranks = values.shape[1]
    if ranks >= _FEW_RANKS:
        return median_of_others(values)
    mean: Floats = (values.sum(axis=1, keepdims=True) - values) / (ranks - 1)
    return mean


def _error_of_mean(against: Floats) -> tuple[Floats, float]:
    """The standard error of each rank's mean over blocks, and its freedom.

    It is pooled over ranks, or the rank's own if that is larger: by skewed noise a rank is seldom
    late without being uneven. Blocks that resemble their neighbours say less than their number.
    """
    blocks, ranks = against.shape
    centred = against - against.mean(axis=0)
    square = float((centred**2).sum())
    alike = float((centred[1:] * centred[:-1]).sum()) / square if square > 0 else 0.0
    # In so few blocks the estimate is too low by about 1/blocks.
    alike = min(0.8, max(0.0, alike + 1 / blocks))
    less = (1 + alike) / (1 - alike)
    own = (centred**2).sum(axis=0) / (blocks - 1)
    variance = np.maximum(own, own.mean()) * less
    return np.sqrt(variance / blocks), max(1.0, (blocks - 1) * (ranks - 1) / less)


def _accused(test: _Always) -> Bools:
    late: Bools = test.excess_ns >= test.least_ns
    for place in np.flatnonzero(late).tolist():
        late[place] = _stands_apart(test.excess_ns, place)
    return late


def _stands_apart(excess_ns: Floats, place: int) -> bool:
    others = np.delete(excess_ns, place)
    if len(others) < 2:
        return True
    if len(others) < _FEW_RANKS - 1:
        return bool(excess_ns[place] - others.max() > np.ptp(others))
    middle = median(others)
    return bool(excess_ns[place] - middle > _MADS * spread(others))


# Late now and then


def _sticking_out(calm: Floats, arrival_ns: Floats, step_ns: float) -> Bools:
    """Steps that waited for this rank, and for far longer than usual."""
    noise = NORMAL_MAD * median(medians(np.abs(calm)))
    last = np.zeros(calm.shape, np.bool_)
    last[np.arange(len(calm)), arrival_ns.argmax(axis=1)] = True
    out: Bools = last & (calm > max(_STICKS_OUT * noise, _LEAST_SINGLE * step_ns))
    return out


def _late_at_times(
    arrival_ns: Floats, calm: Floats, single: Bools, step_ns: float
) -> tuple[list[LateRank], Bools]:
    """The ranks that are, and the late steps of all others."""
    episodes = np.array([_count_episodes(column) for column in single.T])
    ranks, rest, late = len(episodes), single.copy(), []
    for place in np.argsort(-episodes, kind="stable").tolist():
        chance = ranks * _binomial_tail(int(episodes[place]), int(episodes.sum()), 1 / ranks)
        if episodes[place] < _LEAST_EPISODES or chance > _FALSE_ALARM:
            break
        alone = np.zeros_like(single)
        alone[:, place] = single[:, place]
        rank = _single_lateness(arrival_ns, calm, alone, place, chance)
        if rank.cost_ns >= LEAST_COST * step_ns:
            late.append(rank)
        rest[:, place] = False
        episodes[place] = 0
    return late, rest


def _wandering(arrival_ns: Floats, calm: Floats, rest: Bools, step_ns: float) -> LateRank | None:
    episodes = [_count_episodes(column) for column in rest.T]
    if sum(episodes) < 2 * _LEAST_EPISODES or sum(count > 1 for count in episodes) < 2:
        return None
    wandering = _single_lateness(arrival_ns, calm, rest, -1, 1.0)
    return wandering if wandering.cost_ns >= LEAST_WANDERING * step_ns else None


def _single_lateness(
    arrival_ns: Floats, calm: Floats, single: Bools, place: int, chance: float
) -> LateRank:
    excess = np.where(single, calm, 0.0)
    typical = median(calm[single])
    return LateRank(
        place=place,
        constant=False,
        excess_ns=typical,
        arrived_ns=typical,
        cost_ns=gain(arrival_ns, arrival_ns - excess),
        late=np.asarray(single.any(axis=1)),
        p_value=min(1.0, chance),
    )


def _count_episodes(late: Bools) -> int:
    at = np.flatnonzero(late)
    return int((np.diff(at, prepend=-_EPISODE - 1) > _EPISODE).sum()) if len(at) else 0


def gain(arrival_ns: Floats, without: Floats) -> float:
    """How much earlier the last rank would arrive, on average."""
    return float(np.maximum(arrival_ns.max(axis=1) - without.max(axis=1), 0.0).mean())


# Chance


def _student(chance: float, freedom: float) -> float:
    """The value that Student's t exceeds by this chance."""
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _p_value(middle, freedom) > chance else (low, middle)
    return high


def _p_value(t: float, freedom: float) -> float:
    """By Wallace's normal approximation, which is good to a few percent from 3 on."""
    if t <= 0:
        return 0.5
    z = (8 * freedom + 1) / (8 * freedom + 3) * sqrt(freedom * log(1 + t * t / freedom))
    return NormalDist().cdf(-z)


def _binomial_tail(least: int, of: int, share: float) -> float:
    """The chance of `least` or more."""
    if of > 1000:  # too many for the sum in floats
        error = sqrt(of * share * (1 - share))
        return NormalDist().cdf(-(least - 0.5 - of * share) / error)
    return sum(comb(of, k) * share**k * (1 - share) ** (of - k) for k in range(least, of + 1))


# Hosts whose ranks are all late together; what is left is the lateness of single ranks.
#
# The means of hosts are tested against each other just as ranks are. So a host with half of all
# ranks is found, although its ranks do not stand apart from one another. A host is late only if
# each of its ranks is, by about as much: a single late rank moves the mean of its host too.

# Of the step: ranks that are late only because they wait for cores, and by less, wait by chance.
# Such waiting lasts for minutes, and blocks of steps do not show how much of it is chance.
_LEAST_FOR_CORES = 0.15
_ALIKE = 0.5  # of the latest rank's lateness: less, and the ranks of a host are not late alike


class LateHost(msgspec.Struct, frozen=True, kw_only=True):
    """`late.place` is the host's place among the hosts."""

    host: HostColumns
    late: LateRank


class StepMatrices(msgspec.Struct, frozen=True, kw_only=True):
    """(steps, ranks): arrivals, waiting for cores, phases in which no rank waits for another."""

    arrival_ns: Floats
    cpu_wait_ns: Floats | None
    own_ns: Floats | None

    def by_host(self, hosts: Sequence[HostColumns]) -> StepMatrices:
        """The means of hosts, (steps, hosts)."""

        def means(matrix: Floats | None) -> Floats | None:
            if matrix is None:
                return None
            return np.stack([matrix[:, list(host.columns)].mean(axis=1) for host in hosts], axis=1)

        arrival = means(self.arrival_ns)
        assert arrival is not None
        cpu_wait, own = means(self.cpu_wait_ns), means(self.own_ns)
        return StepMatrices(arrival_ns=arrival, cpu_wait_ns=cpu_wait, own_ns=own)

    def without(self, hosts: Sequence[LateHost]) -> StepMatrices:
        """As if these hosts were like the others."""
        arrival = self.arrival_ns.copy()
        for late in hosts:
            if not late.late.constant:
                by = np.where(late.late.late, late.late.excess_ns, 0.0)
                arrival[:, list(late.host.columns)] -= by[:, None]
        return StepMatrices(
            arrival_ns=_levelled(arrival, hosts),
            cpu_wait_ns=None if self.cpu_wait_ns is None else _levelled(self.cpu_wait_ns, hosts),
            own_ns=None if self.own_ns is None else _levelled(self.own_ns, hosts),
        )

    def find_late(self, step_ns: float) -> Lateness | None:
        return find_late(self.arrival_ns, step_ns, self.cpu_wait_ns, self.own_ns)


def find_late_hosts(
    matrices: StepMatrices, hosts: Sequence[HostColumns], step_ns: float
) -> tuple[LateHost, ...]:
    """The costliest first. Hosts with one rank are compared with, but never found: see its rank."""
    if len(hosts) < 2 or all(len(host.columns) < 2 for host in hosts):
        return ()
    means = matrices.by_host(hosts)
    lateness = means.find_late(step_ns)
    late_hosts = []
    for late in lateness.late if lateness is not None else ():
        host = hosts[late.place]
        if len(host.columns) > 1 and _all_late(matrices, host, late, step_ns):
            late_hosts.append(LateHost(host=host, late=_recost(matrices.arrival_ns, host, late)))
    return tuple(sorted(late_hosts, key=lambda late: -late.late.cost_ns))


def merge_late_ranks(
    matrices: StepMatrices, hosts: Sequence[HostColumns], lateness: Lateness, step_ns: float
) -> tuple[tuple[LateHost, ...], Lateness]:
    """Where every rank of a host is found late by itself, and by about as much, it is the host."""
    always = {late.place: late for late in lateness.late if late.constant}
    merged = []
    for place, host in enumerate(hosts):
        if len(host.columns) < 2 or not always.keys() >= {*host.columns}:
            continue
        its = [always[column] for column in host.columns]
        if _is_alike(np.array([late.excess_ns for late in its]), step_ns):
            merged.append(LateHost(host=host, late=_mean_of(matrices.arrival_ns, host, place, its)))
    gone = {column for one in merged for column in one.host.columns}
    left = tuple(late for late in lateness.late if late.place not in gone)
    return tuple(merged), replace(lateness, late=left)


def _mean_of(
    arrival_ns: Floats, host: HostColumns, place: int, ranks: Sequence[LateRank]
) -> LateRank:
    late = replace(
        ranks[0],
        place=place,
        excess_ns=float(np.mean([rank.excess_ns for rank in ranks])),
        arrived_ns=float(np.mean([rank.arrived_ns for rank in ranks])),
        for_cores_ns=float(np.mean([rank.for_cores_ns for rank in ranks])),
        late=np.logical_and.reduce([rank.late for rank in ranks]),
        p_value=max(rank.p_value for rank in ranks),
    )
    return _recost(arrival_ns, host, late)


def _all_late(matrices: StepMatrices, host: HostColumns, late: LateRank, step_ns: float) -> bool:
    """Whether each rank of the host is late, by about as much. Ranks that share cores hide it, so
    one of the views suffices: arrivals as they were, or without waiting for cores."""
    arrival, cpu_wait = matrices.arrival_ns, matrices.cpu_wait_ns
    if not late.constant:
        since = _after_other_hosts(arrival, host)
        longer = medians(since[late.late]) - medians(since)
        return bool(longer.min() >= _ALIKE * late.excess_ns)
    as_it_was = _middle_mean(_after_other_hosts(arrival, host))
    if cpu_wait is None:
        return _is_alike(as_it_was, step_ns)
    with_cores = _middle_mean(_after_other_hosts(arrival - cpu_wait, host))
    if with_cores.mean() < LEAST_LATE * step_ns:
        return _is_alike(as_it_was, step_ns) and as_it_was.mean() >= _LEAST_FOR_CORES * step_ns
    return _is_alike(as_it_was, step_ns) or _is_alike(with_cores, step_ns)


def _is_alike(excess_ns: Floats, step_ns: float) -> bool:
    return bool(excess_ns.min() >= max(LEAST_LATE * step_ns, _ALIKE * float(excess_ns.max())))


def _after_other_hosts(arrival_ns: Floats, host: HostColumns) -> Floats:
    """Each rank of the host against the mean of the ranks of all other hosts."""
    mine = list(host.columns)
    others = np.delete(arrival_ns, mine, axis=1).mean(axis=1, keepdims=True)
    since: Floats = arrival_ns[:, mine] - others
    return since


def _middle_mean(since_ns: Floats) -> Floats:
    """Of each rank, without its latest and its earliest tenth of steps."""
    ordered = np.sort(since_ns, axis=0)
    cut = len(ordered) // 10
    middle: Floats = ordered[cut : len(ordered) - cut].mean(axis=0)
    return middle


def _recost(arrival_ns: Floats, host: HostColumns, late: LateRank) -> LateRank:
    """What the mean step would gain if all ranks of the host came earlier."""
    mine = list(host.columns)
    without = arrival_ns.copy()
    rows: Bools = np.ones(len(without), np.bool_) if late.constant else late.late
    without[:, mine] -= np.where(rows, late.excess_ns, 0.0)[:, None]
    return replace(late, cost_ns=gain(arrival_ns, without))


def _levelled(matrix: Floats, late: Sequence[LateHost]) -> Floats:
    """The ranks of these hosts brought to the level of all others: by one amount for each host."""
    late_columns = [column for one in late for column in one.host.columns]
    middle = medians(matrix)
    usual = np.delete(middle, late_columns)
    levelled = matrix.copy()
    for one in late if len(usual) else ():
        mine = list(one.host.columns)
        levelled[:, mine] -= middle[mine].mean() - usual.mean()
    return levelled
