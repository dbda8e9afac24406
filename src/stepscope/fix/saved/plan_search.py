"""Which selections are worth comparing: segments first, then prices of time, then what lies between
two prices where the target runs through."""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, Protocol, TypeVar

from stepscope.fix.saved.selection import keep_everything, select

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.fix.saved.plan_load import PlanLoad
    from stepscope.fix.saved.selection import ValueSelection
    from stepscope.fix.saved.step_record import StepRecord

_MOST_SEGMENTS = 64
_LEAST_IN_SEGMENT = 8  # operators
_PRICES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # times the step's bytes for the step's time
_NEVER = 1e6  # bytes for a nanosecond: nothing is worth that
_ENDS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the operators
_HALVINGS = 4
_PARTS = 6  # a limit is met to a 64th of the operators
_SHARES = (0.02, 0.05, 0.1, 0.2)  # of a step: times that are looked at
_PRICED_SEGMENTS = 3  # segmentations that are tried at every price
_MOST_OPERATORS = 4000  # beyond, one segmentation is: a cut takes seconds


class Scored(Protocol):
    """A selection that was worked out."""

    @property
    def peak_bytes(self) -> int: ...

    @property
    def extra_ns(self) -> int: ...

    @property
    def load(self) -> PlanLoad: ...


C = TypeVar("C", bound=Scored)


def search(
    record: StepRecord,
    score: Callable[[ValueSelection], C],
    *,
    fits: Callable[[C], bool] | None,
    most_ns: float | None,
) -> list[C]:
    """Selections that may be the best for a limit of memory, of the added time, or both."""
    by_segments = _segmentations(record, score)
    large = len(record.operators) > _MOST_OPERATORS
    priced = sorted(by_segments, key=lambda segments: by_segments[segments].peak_bytes)
    found = list(by_segments.values())
    for segments in priced[: 1 if large else _PRICED_SEGMENTS]:
        found += _priced(record, score, segments, by_segments[segments], fits, most_ns)
    return found


def _segmentations(record: StepRecord, score: Callable[[ValueSelection], C]) -> dict[int, C]:
    segments, scored = 1, {}
    while segments <= min(_MOST_SEGMENTS, max(1, len(record.operators) // _LEAST_IN_SEGMENT)):
        scored[segments] = score(select(record, bytes_per_ns=0, segments=segments))
        segments *= 2
    return scored


def _priced(
    record: StepRecord,
    score: Callable[[ValueSelection], C],
    segments: int,
    free: C,
    fits: Callable[[C], bool] | None,
    most_ns: float | None,
) -> list[C]:
    """At rising prices less is recomputed; between two that a limit separates, look closer."""
    saved_bytes = sum(record.values[v].size_bytes for v in keep_everything(record).kept)
    pace = saved_bytes / max(1, record.forward_ns)

    @functools.cache
    def at(price: float, late: tuple[int, float] | None = None) -> C:
        late = None if late is None else (late[0], late[1] * pace)
        return score(select(record, bytes_per_ns=price * pace, segments=segments, late=late))

    rising = [(0.0, free), *((price, at(price)) for price in _PRICES)]
    found = [one for _, one in rising]
    if fits is None and most_ns is None:
        found += [_one_end(record, score, segments, part) for part in _ENDS]
    for beyond in _limits(record, fits, most_ns):
        for (low, below), (high, above) in itertools.pairwise(rising):
            if beyond(above) and not beyond(below):
                found += _between(at, low, high, len(record.operators), beyond)
                break
    return found


def _limits(
    record: StepRecord, fits: Callable[[C], bool] | None, most_ns: float | None
) -> list[Callable[[C], bool]]:
    """Also the same shorter times for everybody: where much is made again at once, what takes
    longer may need more, and who allows more time is to get no worse plan. Once steps have shown
    what the host can take, these were looked at before."""
    limits: list[Callable[[C], bool]] = []
    if most_ns is not None:
        times = [share * record.step_ns for share in _SHARES if record.most_host_ns is None]
        shorter = [time_ns for time_ns in times if time_ns < most_ns]
        limits += [
            functools.partial(is_timely, time_ns, record.most_host_ns)
            for time_ns in (*shorter, most_ns)
        ]
    if fits is not None:
        limits.append(lambda one: not fits(one))
    return limits


def is_timely(most_ns: float | None, most_host_ns: int | None, one: Scored) -> bool:
    in_time = most_ns is None or one.extra_ns <= most_ns
    return in_time and (most_host_ns is None or one.load.host_ns <= most_host_ns)


def _one_end(
    record: StepRecord, score: Callable[[ValueSelection], C], segments: int, part: float
) -> C:
    """Recompute at the end of the pass only: what is made again for its beginning is there when
    backward has freed most, and may be a peak of its own. Times do not matter here, so the least
    memory is the least on a busy machine, too."""
    late = (round(part * len(record.operators)), 0.0)
    return score(select(record, bytes_per_ns=_NEVER, segments=segments, late=late))


def _between(
    at: Callable[..., C], low: float, high: float, operators: int, beyond: Callable[[C], bool]
) -> list[C]:
    """First prices between two. Then two prices at once: the lower for early operators, whose
    values stay longest, the higher for late ones. Near the price at which all or nothing is worth
    it, a few layers may not pay for what they have in common, and what was paid for makes all the
    others worth it: the first two prices are tried, too."""
    found, first = [], (low, high)
    for _ in range(_HALVINGS if low else 0):
        middle = math.sqrt(low * high)
        found.append(at(middle))
        low, high = (low, middle) if beyond(found[-1]) else (middle, high)
    for early_price, late_price in dict.fromkeys(((low, high), first)):
        none, every = 0, operators
        while every - none > max(1, operators >> _PARTS):
            late = (none + every) // 2
            found.append(at(early_price, (late, late_price)))
            none, every = (late, every) if beyond(found[-1]) else (none, late)
    return found
