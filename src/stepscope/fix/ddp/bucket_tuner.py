"""Find DDP's best bucket sizes while the training goes on, and report what was tried."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from stepscope.errors import UsageError
from stepscope.fix.ddp.exchange_timeline import (
    Candidate,
    ExchangeCosts,
    ExchangeTimeline,
    GradientTimer,
    RanksAgree,
    TimedStep,
    best_candidates,
    fit_costs,
    predict_sizes,
    wait_for_device,
)
from stepscope.fix.ddp.gradient_exchange import (
    BucketSizes,
    own_hook,
    rebuild_reducer,
    reducer_parameters,
    why_not_rebuilt,
)
from stepscope.text.figures import byte_rate, duration, factor, percent, size

if TYPE_CHECKING:
    Steps = Generator[None, None, None]

# A few steps are timed: when each gradient is ready, and what a bucket costs on this link. From
# that the exposed time of many bucket sizes is predicted. The most promising ones take turns on
# real steps with the sizes of the script, each warm before it counts; half of them leave after
# every round. The fastest stays if it is clearly faster than the script's own, otherwise those come
# back.
#
# The group's first rank decides and tells the others. Between two ranks no bit of a gradient
# depends on the buckets; among more, sums may round differently, as with any other bucket_cap_mb.

MOST_STEPS = 58
_WARM_UP = 2  # the script's own first steps
_SETTLE = 1  # a reducer's first step
_TIMED = 2
_COUNTED = 2  # steps of a turn
_ROUNDS = (6, 3, 2)  # how many candidates are left in each round
_PROBED_PARTS = (16, 4)  # buckets of a sixteenth and of a quarter of all bytes
_CLEARLY, _LARGE = 0.99, 0.9  # the median turn, against that of the script's own buckets


def tune_buckets(
    ddp: Any, optimizer: Any = None, *, report: Callable[[str], None] | None = None
) -> BucketTuner:
    """Tune the buckets of this DistributedDataParallel within its next 58 steps.

        tuner = tune_buckets(ddp, optimizer)     # the loop stays as it is

    Without an optimizer, call `tuner.step()` after each step of yours, on all ranks. `report` gets
    the explanation on the first rank; it is written to stderr unless told otherwise.
    """
    tuner = BucketTuner(ddp, report or (lambda text: print(text, file=sys.stderr)))  # noqa: T201
    if optimizer is not None:
        tuner.follow(optimizer)
    return tuner


class BucketTuner:
    """`result` is None until the sizes are found."""

    def __init__(self, ddp: Any, report: Callable[[str], None]) -> None:
        import torch.distributed as dist

        if dist.get_world_size(ddp.process_group) < 2:
            raise UsageError("tune_buckets: a single rank exchanges no gradients")
        why_not = why_not_rebuilt(ddp)
        if why_not is not None:
            raise UsageError(f"tune_buckets: the buckets cannot be changed: {why_not}")
        self.result: TuningResult | None = None
        self._ddp, self._report = ddp, report
        self._parameters = reducer_parameters(ddp)
        devices = sorted({str(parameter.device) for parameter in self._parameters})
        if len(devices) > 1 or not devices[0].startswith(("cpu", "cuda")):
            raise UsageError(
                "tune_buckets: steps are timed on the CPU or on one CUDA device, but the "
                f"model is on {', '.join(devices)}"
            )
        self._agree = RanksAgree(ddp.process_group, self._parameters[0].device)
        self._is_first = dist.get_rank(ddp.process_group) == 0
        self._hook = own_hook(ddp)
        self._timer = GradientTimer(ddp, self._parameters, self._agree)
        self._order = list(reversed(range(len(self._parameters))))
        self._turns: dict[BucketSizes | None, list[float]] = {}
        self._steps = 0
        self._handle: Any = None
        self._course: Steps | None = self._tune()

    def step(self) -> None:
        """One step of the training has ended."""
        if self._course is None:
            return
        if self._ddp._join_config.enable:
            raise UsageError(
                "tune_buckets: ranks that may end early (join) cannot be tuned together"
            )
        self._steps += 1
        try:
            next(self._course)
        except StopIteration:
            self._course = None
            if self._handle is not None:
                self._handle.remove()

    def follow(self, optimizer: Any) -> None:
        """Count the steps of this optimizer instead of calls of `step`."""
        self._handle = optimizer.register_step_post_hook(lambda *_: self.step())

    def _tune(self) -> Steps:
        """Every `yield` is one step of the training."""
        for _ in range(_WARM_UP - 1):
            yield
        timed: list[TimedStep] = []
        before = yield from self._time_exchange(None, timed)
        first = timed[-1]
        # The first rank's order in which gradients become ready; ties keep their order.
        order = sorted(self._order, key=lambda place: first.ready_ns[place])
        self._order = [int(place) for place in self._agree.of_first(order)]
        all_bytes = sum(parameter.nbytes for parameter in self._parameters)
        for part in _PROBED_PARTS:
            cap = max(1, all_bytes // part)
            yield from self._time_exchange(BucketSizes(first_bytes=cap, cap_bytes=cap), timed)
        costs = fit_costs(one.timeline for one in timed)
        candidates = self._candidates(before, timed, costs)
        own = self._own_sizes(before)
        if not candidates or costs is None:
            self._use(own)
            self._finish(before, None, (first, first), costs, ())
            return
        yield from self._try_in_rounds(own, [one.sizes for one in candidates])
        chosen = self._decide(own)
        after = [first]
        if chosen != own:
            after = []
            yield from self._time_exchange(chosen, after, steps=1)
        self._use(chosen)
        predicted = predict_sizes(*self._in_order(timed), before, costs).predicted
        base_ns = median(self._turns[own]) - predicted.exposed_ns
        tried = tuple(
            TriedBuckets(
                sizes=one.sizes,
                buckets=len(one.buckets_bytes),
                predicted_ns=base_ns + one.predicted.exposed_ns,
                measured_ns=median(self._turns[one.sizes]),
            )
            for one in candidates
        )
        new = chosen if chosen != own else None
        self._finish(before, new, (first, after[-1]), costs, tried)

    def _time_exchange(
        self, sizes: BucketSizes | None, timed: list[TimedStep], steps: int = _TIMED
    ) -> Generator[None, None, BucketSizes]:
        """Adds the timed steps; returns the sizes that the DDP was built with."""
        built_with = rebuild_reducer(self._ddp, self._order, sizes, self._timer.hook, stays=False)
        for _ in range(_SETTLE):
            yield
        for _ in range(steps):
            self._timer.begin()
            yield
            timed.append(self._timer.end())
        return built_with

    def _candidates(
        self, before: BucketSizes, timed: Sequence[TimedStep], costs: ExchangeCosts | None
    ) -> list[Candidate]:
        if costs is None:
            return []
        in_order = self._in_order(timed)
        others = best_candidates(*in_order, before, costs, _ROUNDS[0])
        if self._own_sizes(before) is None:  # the same sizes in the measured order are new as well
            others = [predict_sizes(*in_order, before, costs), *others]
        return others[: _ROUNDS[0]]

    def _in_order(self, timed: Sequence[TimedStep]) -> tuple[list[Any], list[int]]:
        """Parameters and the middle of their ready times, in the order of the buckets."""
        ready = [round(median(one.ready_ns[place] for one in timed)) for place in self._order]
        return [self._parameters[place] for place in self._order], ready

    def _own_sizes(self, before: BucketSizes) -> BucketSizes | None:
        """The script's own buckets. DDP never reorders them where it looks for unused parameters:
        there they are None, as it built them."""
        keeps = self._ddp.find_unused_parameters and not self._ddp.static_graph
        return None if keeps else before

    def _use(self, sizes: BucketSizes | None, *, stays: bool = True) -> None:
        order = self._order if sizes is not None else None
        stays = stays or order is None
        rebuild_reducer(self._ddp, order, sizes, self._hook, stays=stays)

    def _try_in_rounds(self, own: BucketSizes | None, others: list[BucketSizes]) -> Steps:
        for number, count in enumerate(_ROUNDS):
            # The fastest as the first rank sees it; before the first round in the predicted order.
            places = list(range(len(others)))
            if self._turns:
                times = [median(self._turns[sizes]) for sizes in others]
                places.sort(key=lambda place: times[place])
            others = [others[int(place)] for place in self._agree.of_first(places)][:count]
            turns = [own, *others]
            for sizes in turns if number % 2 == 0 else reversed(turns):
                yield from self._take_turn(sizes)

    def _take_turn(self, sizes: BucketSizes | None) -> Steps:
        self._use(sizes, stays=False)
        for _ in range(_SETTLE):
            yield
        begun = self._now()
        for _ in range(_COUNTED):
            yield
        (slowest,) = self._agree.largest([(self._now() - begun) / _COUNTED])
        self._turns.setdefault(sizes, []).append(slowest)

    def _now(self) -> int:
        wait_for_device(self._parameters[0])
        return time.perf_counter_ns()

    def _decide(self, own: BucketSizes | None) -> BucketSizes | None:
        """The sizes that stay, as the first rank sees it."""
        most = max(len(turns) for turns in self._turns.values())
        finalists = [sizes for sizes, turns in self._turns.items() if len(turns) == most]
        times = [self._turns[sizes] for sizes in finalists]
        best = choose_fastest(times, finalists.index(own))
        return finalists[int(self._agree.of_first([best])[0])]

    def _finish(
        self,
        before: BucketSizes,
        after: BucketSizes | None,
        steps: tuple[TimedStep, TimedStep],
        costs: ExchangeCosts | None,
        tried: tuple[TriedBuckets, ...],
    ) -> None:
        own = self._turns.get(self._own_sizes(before))
        new = own if after is None else self._turns[after]
        self.result = TuningResult(
            steps=self._steps,
            before=before,
            after=after,
            before_ns=median(own) if own else None,
            after_ns=median(new) if new else None,
            costs=costs,
            before_timeline=steps[0].timeline,
            after_timeline=steps[1].timeline,
            tried=tried,
        )
        if self._is_first:
            self._report(str(self.result))


def choose_fastest(turns: Sequence[Sequence[float]], own: int) -> int:
    """The place of the fastest by its median turn; `own`, unless the other is clearly faster.

    A small gain must show in every round, because chance gives small gains too. A large one may
    have lost a round to other programs.
    """
    best = min(range(len(turns)), key=lambda place: median(turns[place]))
    ratio = median(turns[best]) / median(turns[own])
    in_every_round = all(new < old for new, old in zip(turns[best], turns[own], strict=True))
    at_its_best = min(turns[best]) < min(turns[own])
    is_clear = ratio < _CLEARLY and in_every_round
    return best if is_clear or (ratio < _LARGE and at_its_best) else own


# What a bucket tuner found, in words.

_FIRST_ROWS, _LAST_ROWS = 3, 9  # of a table of buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedBuckets:
    """Bucket sizes that were tried on real steps."""

    sizes: BucketSizes
    buckets: int
    predicted_ns: float
    measured_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """The buckets before and now, and why."""

    steps: int
    before: BucketSizes
    after: BucketSizes | None  # None: those of before
    before_ns: float | None  # a step; None where nothing else was worth a trial
    after_ns: float | None
    costs: ExchangeCosts | None
    before_timeline: ExchangeTimeline
    after_timeline: ExchangeTimeline
    tried: tuple[TriedBuckets, ...]

    @property
    def is_changed(self) -> bool:
        return self.after is not None

    @property
    def verdict(self) -> str:
        if self.costs is None:
            return f"buckets stay at {self.before}: the timed steps exchanged no gradients"
        if self.before_ns is None or self.after_ns is None:
            return f"buckets stay at {self.before}: other sizes would give the same buckets"
        if not self.is_changed:
            others = f"{len(self.tried)} others were" if len(self.tried) > 1 else "1 other was"
            return f"buckets stay at {self.before}: {others} tried and not clearly faster"
        gain = factor(self.before_ns / self.after_ns)
        other = f"instead of {self.before}"
        if self.after == self.before:
            other = "in the order in which gradients become ready"
        return (
            f"buckets of {self.after} {other}: a step takes {duration(self.after_ns)} instead "
            f"of {duration(self.before_ns)} ({gain})"
        )

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"stepscope: {self.verdict}"
        yield f"  the tuning took {self.steps} steps"
        if self.costs is not None:
            per_byte_ns = self.costs.per_byte_ns
            rate = f", then {byte_rate(1e9 / per_byte_ns)}" if per_byte_ns > 0 else ""
            yield f"  a bucket costs {duration(self.costs.per_bucket_ns)}{rate}"
        yield from _table("before", self.before, self.before_timeline)
        if self.after is not None:
            yield from _table("now", self.after, self.after_timeline)
        for one in self.tried:
            buckets = "1 bucket" if one.buckets == 1 else f"{one.buckets} buckets"
            yield (
                f"  tried {one.sizes} ({buckets}): predicted {duration(one.predicted_ns)} per "
                f"step, measured {duration(one.measured_ns)}"
            )
        if self.after is not None:
            sizes = f"cap_bytes={self.after.cap_bytes}, first_bytes={self.after.first_bytes}"
            yield f"  next time, without tuning: stepscope.fix.ddp.set_buckets(ddp, {sizes})"


def _table(name: str, sizes: BucketSizes, timeline: ExchangeTimeline) -> Iterator[str]:
    overlap = timeline.overlap
    hidden = (
        "" if overlap is None else f", {percent(overlap)} of the exchange overlaps with compute"
    )
    yield (
        f"  {name}: {sizes}. The last gradient is ready after "
        f"{duration(timeline.backward_end_ns)}, the last bucket is done "
        f"{duration(timeline.exposed_ns)} later{hidden}"
    )
    rows = [
        f"    bucket {place:>3}: {size(bucket.size_bytes):>8}, ready "
        f"{duration(bucket.ready_ns):>8}, done {duration(bucket.end_ns):>8}, exposed "
        f"{duration(exposed_ns):>8}"
        for place, (bucket, exposed_ns) in enumerate(
            zip(timeline.buckets, timeline.exposed_by_bucket(), strict=True)
        )
    ]
    left_out = len(rows) - _FIRST_ROWS - _LAST_ROWS
    if left_out > 1:
        rows[_FIRST_ROWS:-_LAST_ROWS] = [f"    ... {left_out} more"]
    yield from rows
