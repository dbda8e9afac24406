"""A step with other workers, links and buckets, from its tables: the oracle of scaled_step.js.

One test compares it with what the page computes in the browser, another with replaying each
combination (`predict.scale_out`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.predict import scale_out
from stepscope.predict.buckets import chain_buckets
from stepscope.predict.max_plus import HOST

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Floats
    from stepscope.predict.contracted_step import ContractedStep
    from stepscope.predict.max_plus import StepTables
    from stepscope.predict.scaling_grid import BucketLayout, Line, ScalingSetup, WorkerLink
    from stepscope.ui.html.whatif_scaling import Doubts

_STEPS = 4
_FREE = 0.0  # links that take no time


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Places in the lists of links and bucket sizes."""

    link: int
    way: int = 0
    bandwidth: float = 1.0


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """One step."""

    step_ns: float
    host_ns: float
    device_ns: float
    comm_ns: float


def run(
    crew: ScalingSetup,
    step: ContractedStep,
    plan: Plan,
    *,
    slower: float | None = None,
    times: float = 1.0,
) -> Done:
    """`times` scales every transfer; `slower` is the slowest worker's pace, if not the link's."""
    link, way = crew.links[plan.link], crew.ways[plan.way]
    pace = link.straggling if slower is None else slower
    if step.traced is not None and way.bucket_mb is None:
        return _retimed(step, link, way, plan, pace, times)
    return _planned(crew, step, link, way, plan, pace, times)


def cost_ns(lines: tuple[Line, ...], sizes: Floats, bandwidth: float) -> Floats:
    which = np.searchsorted([line[0] for line in lines[:-1]], sizes)
    alpha = np.array([line[1] for line in lines])[which]
    beta = np.array([line[2] for line in lines])[which]
    found: Floats = alpha + beta * sizes / bandwidth
    return found


def slow_tables(step: StepTables, pace: float) -> Floats:
    """The tables of a worker whose own work takes `pace` times as long."""
    if step.slope is None or pace == 1.0:
        slowed: Floats = step.tables * (1 + (pace - 1) * np.array(step.own))
        return slowed
    return np.asarray(step.tables + (pace - 1) * step.slope)


def advance_times(table: Floats, before: Floats) -> Floats:
    """The times at the end of a stretch."""
    after: Floats = (table + before).max(axis=1)
    return after


def _host(step: ContractedStep, shape: StepTables, pace: float) -> float:
    return shape.host_ns * (pace if step.task_ns is None else 1.0)


def _busy(shape: StepTables, pace: float) -> Floats:
    own = np.array(shape.own[1 : 1 + len(shape.busy_ns)])
    found: Floats = np.array(shape.busy_ns) * (1 + (pace - 1) * own)
    return found


def _steady(ends: list[float]) -> float:
    half = len(ends) // 2
    return (ends[-1] - ends[-1 - half]) / half


def _retimed(
    step: ContractedStep, link: WorkerLink, way: BucketLayout, plan: Plan, pace: float, times: float
) -> Done:
    """The trace's own collectives with other durations."""
    shape = step.traced
    assert shape is not None
    lasting = np.zeros(len(shape.marked))
    if link.all_reduce:
        expected = times * cost_ns(link.all_reduce, np.array(way.size_bytes), plan.bandwidth)
        lasting = np.array(step.wait_ns) + np.array(step.share) * expected
        if times == _FREE:
            lasting = np.zeros(len(shape.marked))
    tables = slow_tables(shape, pace)
    now = np.zeros(tables.shape[1])
    ends = []
    for _ in range(_STEPS):
        for number, table in enumerate(tables):
            now = advance_times(table, now)
            if number < len(lasting):
                now[list(shape.marked[number])] += lasting[number]
        ends.append(float(now.max()))
    busy = _busy(shape, pace)
    np.add.at(busy, [places[0] - 1 for places in shape.marked], lasting)
    return Done(
        step_ns=_steady(ends),
        host_ns=_host(step, shape, pace),
        device_ns=float(busy.max(initial=0.0)),
        comm_ns=float(lasting.sum()),
    )


def _planned(
    crew: ScalingSetup,
    step: ContractedStep,
    link: WorkerLink,
    way: BucketLayout,
    plan: Plan,
    pace: float,
    times: float,
) -> Done:
    """Collectives put between the stretches."""
    shape = step.planned
    assert shape is not None
    tables = slow_tables(shape, pace)
    if not link.all_reduce:
        return _alone(tables, _host(step, shape, pace), _busy(shape, pace))
    tolls = step.task_ns is None  # inside a CUDA graph nobody pays the host
    host = np.array(way.host_ns) + (np.array(way.fill_ns) if crew.on_host else 0.0)
    sizes = np.array(way.size_bytes)
    lasting = times * cost_ns(link.all_reduce, sizes, plan.bandwidth)
    lost = np.zeros(len(sizes))
    if link.beside and times != _FREE:
        lasting, lost = _contended(crew, tables, link, way, host, plan.bandwidth, times)
    if times != _FREE:
        lasting = lasting + step.waiting_ns / max(1, len(sizes))
    sent = np.zeros(0)
    if crew.sent_bytes:
        sent = times * cost_ns(link.broadcast, np.array(crew.sent_bytes), plan.bandwidth)
    lanes = _Lanes(crew, step, way, host if tolls else 0 * host, lasting, lost, sent, tolls)
    ends = []
    for _ in range(_STEPS):
        for number, table in enumerate(tables):
            lanes.now = advance_times(table, lanes.now)
            lanes.meet(number)
        ends.append(float(max(lanes.now.max(), lanes.comm)))
    busy = _busy(shape, pace)
    comm = float(lasting.sum() + sent.sum())
    if not crew.on_host:
        busy[step.compute - 1] += 2 * sum(way.fill_ns)
    return Done(
        step_ns=_steady(ends),
        host_ns=_host(step, shape, pace) + lanes.host_ns,
        device_ns=max(float(busy.max(initial=0.0)), comm),
        comm_ns=comm,
    )


def _alone(tables: Floats, host_ns: float, busy: Floats) -> Done:
    now = np.zeros(tables.shape[1])
    ends = []
    for _ in range(_STEPS):
        for table in tables:
            now = advance_times(table, now)
        ends.append(float(now.max()))
    return Done(
        step_ns=_steady(ends),
        host_ns=host_ns,
        device_ns=float(busy.max(initial=0.0)),
        comm_ns=0.0,
    )


def _contended(
    crew: ScalingSetup,
    tables: Floats,
    link: WorkerLink,
    way: BucketLayout,
    host: Floats,
    bandwidth: float,
    times: float,
) -> tuple[Floats, Floats]:
    """Where compute and communication share processors each makes the other longer."""
    sizes = np.array(way.size_bytes)
    now, ended = np.zeros(tables.shape[1]), []
    for table in tables:
        now = advance_times(table, now)
        ended.append(float(now[HOST]))
    spent = np.cumsum(host)
    alone = cost_ns(link.all_reduce, sizes, bandwidth)
    beside = cost_ns(link.beside, sizes, bandwidth)
    return chain_buckets(
        np.array([ended[mark] for mark in way.marks]) + spent,
        ended[crew.moments - 1] + float(spent[-1]),
        times * alone,
        times * np.maximum(alone, beside),
        link.lost,
    )


class _Lanes:
    """Host, streams and the exchange beside them, from moment to moment."""

    def __init__(
        self,
        crew: ScalingSetup,
        step: ContractedStep,
        way: BucketLayout,
        host: Floats,
        lasting: Floats,
        lost: Floats,
        sent: Floats,
        tolls: bool,
    ) -> None:
        assert step.planned is not None
        self.crew, self.way, self.compute = crew, way, step.compute
        self.host, self.lasting, self.lost, self.sent = host, lasting, lost, sent
        self.at = {mark: [i for i, m in enumerate(way.marks) if m == mark] for mark in way.marks}
        self.finish = crew.finish_ns if tolls else 0.0
        self.send, self.behind = (crew.send_ns, crew.sent_ns) if tolls else (0.0, 0.0)
        self.now: Floats = np.zeros(step.planned.tables.shape[1])
        self.comm = 0.0
        self.host_ns = float(host.sum() + lost.sum()) + self.finish
        if crew.on_host:
            self.finish += sum(way.fill_ns)
            self.host_ns += sum(way.fill_ns)
        if len(sent):
            self.host_ns += self.send * len(sent) + self.behind
        if step.task_ns is not None:
            filled = 0 if not any(way.fill_ns) else len(way.fill_ns)
            more = len(lasting) + filled + 1 + (len(sent) + 1 if len(sent) else 0)
            self.host_ns += step.task_ns * more

    def meet(self, moment: int) -> None:
        """What happens between this stretch and the next."""
        if moment == self.crew.forward and len(self.sent):
            for dur in self.sent:
                self.now[HOST] += self.send
                self.comm = max(self.comm, self.now[HOST]) + dur
            self._wait(self.behind, 0.0)
        for number in self.at.get(moment, ()):
            self._sum(number)
        if moment == self.crew.moments - 1:
            back = 0.0 if self.crew.on_host else sum(self.way.fill_ns)
            self._wait(self.finish, back)

    def _sum(self, number: int) -> None:
        now = self.now
        ready = 0.0
        if not self.crew.on_host:
            fill = self.way.fill_ns[number]
            if fill:
                now[self.compute] = max(now[self.compute], now[HOST]) + fill
            ready = now[self.compute]
        now[HOST] += self.host[number]
        start = max(now[HOST], self.comm, ready)
        now[HOST] += self.lost[number]
        self.comm = start + self.lasting[number]

    def _wait(self, host_ns: float, device_ns: float) -> None:
        now = self.now
        if self.crew.on_host:
            now[HOST] = max(now[HOST], self.comm) + host_ns
            return
        now[HOST] += host_ns
        now[self.compute] = max(now[HOST], now[self.compute], self.comm) + device_ns


def log_ratio(after: float, before: float) -> float:
    return abs(math.log(max(after, 1.0) / max(before, 1.0)))


# The prediction, as `whatif.Bench` makes it


class Local(msgspec.Struct, frozen=True, kw_only=True):
    """A step with what one worker changes."""

    sketch: ContractedStep
    step_ns: float
    variance: float
    whole: ContractedStep | None = None  # with the whole batch, where `sketch` has a share of it
    graphed: ContractedStep | None = None  # and then a CUDA graph is made of it
    stalls_ns: float = 0.0  # of an average step of so many workers
    stalls_doubt_ns: float = 0.0
    spread: float = 0.0


class Together(msgspec.Struct, frozen=True, kw_only=True):
    """The step, its interval, and what of it is the exchange."""

    done: Done  # of the typical step
    step_ns: float  # with its stalls
    low_ns: float
    high_ns: float
    exposed_ns: float


def predict_together(crew: ScalingSetup, doubts: Doubts, local: Local, plan: Plan) -> Together:
    """The changes are made in the order of `predict.order`: each adds its doubt."""
    step, variance, first = local.step_ns, local.variance, True
    done = run(crew, local.sketch, plan)
    for each in _changes(crew, plan):
        done = run(crew, local.sketch, each)
        variance += (doubts.change * log_ratio(done.step_ns, step)) ** 2
        if first:
            variance += _doubt(crew, doubts, local.sketch, each, done) ** 2
            variance += _doubt_of_share(crew, local, done) ** 2
        step, first = done.step_ns, False
    without = _without(crew, local.sketch, plan)
    least = 0.0 if local.whole else _least(doubts, local.sketch, plan, done, without)
    if local.graphed is not None:
        done = run(crew, local.graphed, plan)
        without = _without(crew, local.graphed, plan)
        moved = log_ratio(done.step_ns, step)
        variance += (local.spread * min(1.0, moved)) ** 2 + (doubts.change * moved) ** 2
    host = doubts.host * min(1.0, done.host_ns / done.step_ns) ** 4
    whole = done.step_ns + local.stalls_ns
    share, doubt = done.step_ns / whole, local.stalls_doubt_ns
    half = 1.96 * math.sqrt(
        share**2 * (host**2 + variance) + (doubt / whole) ** 2 + doubts.least**2
    )
    low = whole * math.exp(-half)
    least_stalls = max(0.0, local.stalls_ns - 1.96 * doubt)
    return Together(
        done=done,
        step_ns=whole,
        low_ns=max(low, least + least_stalls) if least < done.step_ns else low,
        high_ns=whole * math.exp(half),
        exposed_ns=max(0.0, done.step_ns - without),
    )


def _changes(crew: ScalingSetup, plan: Plan) -> list[Plan]:
    """Workers, then buckets, then links; those that are as now are no change."""
    now = next(i for i, link in enumerate(crew.links) if link.ranks == crew.before)
    found = []
    if plan.link != now:
        found.append(Plan(link=plan.link))
    if plan.way:
        found.append(Plan(link=plan.link, way=plan.way))
    if plan.bandwidth != 1.0:
        found.append(plan)
    return found


def _doubt(
    crew: ScalingSetup, doubts: Doubts, step: ContractedStep, plan: Plan, done: Done
) -> float:
    """Of the logarithm of the step: the link's, and whether slow steps meet."""
    link = crew.links[plan.link]
    if not link.all_reduce:
        return 0.0
    factor = math.exp(1.96 * link.spread)
    low, high = (run(crew, step, plan, times=each).step_ns for each in (1 / factor, factor))
    of_link = log_ratio(high, low) / (2 * 1.96)
    usual = run(crew, step, plan, slower=1.0).step_ns
    slow = doubts.straggling * log_ratio(done.step_ns, usual)
    return math.hypot(of_link, slow, doubts.model)


def _doubt_of_share(crew: ScalingSetup, local: Local, done: Done) -> float:
    if local.whole is None:
        return 0.0
    own = (_own(local.whole), _own(local.sketch))
    return scale_out.share_doubt(*own, done.step_ns, on_host=crew.on_host)


def _own(step: ContractedStep) -> float:
    """What a worker needs by itself."""
    if step.traced is not None:
        return step.silent_ns
    assert step.planned is not None
    return _alone(step.planned.tables, 0.0, np.zeros(0)).step_ns


def _without(crew: ScalingSetup, step: ContractedStep, plan: Plan) -> float:
    """The step if no collective took any time."""
    silent = step.quiet_ns if plan.way else step.silent_ns
    if step.traced is not None and silent is not None:
        return crew.links[plan.link].straggling * silent
    return run(crew, step, plan, times=_FREE).step_ns


def _least(doubts: Doubts, step: ContractedStep, plan: Plan, done: Done, without: float) -> float:
    """No link makes the step shorter than what a worker needs by itself."""
    own = without
    if step.planned is not None and (step.traced is None or plan.way):
        tables = step.planned
        own = min(own, _alone(tables.tables, 0.0, np.zeros(0)).step_ns)
    return doubts.reached * min(done.step_ns, own) * doubts.low_end
