"""How long a collective takes as a function of its bytes: lines fitted by relative error.

The largest sizes rule a plain least-squares line: its latency comes out negative, and small
messages are off by whole multiples. Here errors are relative, so every size counts the same;
latencies cannot be negative; and one to three lines cover the sizes, as many as predict held-out
passes best. The lines are the measured total, without an algorithm's factors.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from stepscope.records.profile import CollectiveFit, Contention, MeasuredSize, Segment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stepscope.explain.replay.graph import Floats

    _Span = tuple[int, int]
    _Lines = dict[_Span, tuple[float, float, float]]

MAX_SEGMENTS = 3
_MIN_SIZES = 3  # per segment: a line through two points proves nothing
_SMALLEST_GAIN = 0.1  # one more segment must lower the held-out error by this share
_NEGLIGIBLE = 1e-4  # of the time
_REWEIGHTINGS = 8


def fit_sweep(
    *,
    kind: str,
    group: str,
    group_size: int,
    sizes_bytes: Sequence[int],
    passes_ns: Sequence[Sequence[Sequence[float]]],
) -> CollectiveFit:
    """Times are by pass, by size, by call. Needs two sizes and two passes."""
    sizes = np.asarray(sizes_bytes, dtype=np.float64)
    medians = np.array([[np.median(calls) for calls in one] for one in passes_ns])
    by_pass = held_out_errors(sizes, medians)
    by_size = held_out_errors(sizes, medians, sizes_too=True)
    count = _choose_count(by_size)
    times = np.median(medians, axis=0)
    return CollectiveFit(
        kind=kind,
        group=group,
        group_size=group_size,
        segments=fit_segments(sizes, times, count),
        measured=_measured(sizes, medians),
        passes=len(medians),
        noise=noise_floor(medians),
        held_out=by_pass[count - 1],
        held_out_sizes=by_size[count - 1],
    )


def fit_contention(group_size: int, sizes: Sequence[Mapping[str, float]]) -> Contention | None:
    """From the times of an all-reduce and of compute, each alone and while the other runs.

    The share that compute loses is that of all sizes together: one small size is mostly noise.
    """
    if not sizes:
        return None
    columns = {
        name: np.array([size[f"{name}_ns"] for size in sizes], np.float64)
        for name in ("alone", "compute", "slowed", "lasts")
    }
    lost = float((columns["slowed"] - columns["compute"]).sum() / columns["alone"].sum())
    size_bytes = np.array([size["size_bytes"] for size in sizes], np.float64)
    lasts = np.maximum(columns["lasts"], columns["alone"])
    return Contention(
        group_size=group_size,
        lost=min(max(lost, 0.0), 1.5),
        beside=fit_segments(size_bytes, lasts, 1),
    )


def noise_floor(medians: Floats) -> float:
    """The median relative distance of a pass from the other passes' median at the same size.

    No model can be expected to do better on a pass that it has not seen.
    """
    errors = [np.abs(np.median(others, axis=0) - one) / one for one, others in _hold_out(medians)]
    return float(np.median(errors))


def held_out_errors(sizes: Floats, medians: Floats, *, sizes_too: bool = False) -> list[float]:
    """The median relative error on a pass the fit has not seen, with one segment, two, ...

    With `sizes_too` the fit has not seen the size either, except the smallest and the largest.
    """
    counts = range(1, max(1, min(MAX_SEGMENTS, len(sizes) // _MIN_SIZES)) + 1)
    by_count: list[list[Floats]] = [[] for _ in counts]
    for one, others in _hold_out(medians):
        known = np.median(others, axis=0)
        predicted = _predictions(sizes, known, counts)
        if sizes_too:
            for place in range(1, len(sizes) - 1):
                rest = np.arange(len(sizes)) != place
                unseen = _predictions(sizes[rest], known[rest], counts, sizes[place : place + 1])
                predicted[:, place] = unseen[:, 0]
        for row, errors in zip(np.abs(predicted - one) / one, by_count, strict=True):
            errors.append(row)
    return [float(np.median(errors)) for errors in by_count]


def fit_segments(sizes: Floats, times: Floats, count: int) -> tuple[Segment, ...]:
    """The best `count` lines by the sum of relative errors; fewer if there are too few sizes."""
    return _partition(sizes, _fit_all_lines(sizes, times), count)


def evaluate(
    segments: Sequence[Segment], sizes: Floats, latency: float = 1.0, bandwidth: float = 1.0
) -> Floats:
    """latency x alpha + bytes x beta / bandwidth, by the line that covers each size."""
    which = np.searchsorted([segment.to_bytes for segment in segments[:-1]], sizes)
    alpha = np.array([segment.alpha_ns for segment in segments])[which]
    beta = np.array([segment.beta_ns_per_byte for segment in segments])[which]
    times: Floats = alpha * latency + beta * sizes / bandwidth
    return times


def _choose_count(errors: list[float]) -> int:
    """As few segments as possible, unless more are clearly better on what they have not seen."""
    chosen = 0
    for more in range(1, len(errors)):
        if errors[more] < errors[chosen] * (1 - _SMALLEST_GAIN) - _NEGLIGIBLE:
            chosen = more
    return chosen + 1


def _predictions(
    sizes: Floats, times: Floats, counts: range, asked: Floats | None = None
) -> Floats:
    """One row per number of segments."""
    lines = _fit_all_lines(sizes, times)
    asked = sizes if asked is None else asked
    return np.array([evaluate(_partition(sizes, lines, count), asked) for count in counts])


def _partition(sizes: Floats, lines: _Lines, count: int) -> tuple[Segment, ...]:
    """The cheapest way to cover all sizes with `count` of the lines."""
    count = max(1, min(count, len(sizes) // _MIN_SIZES))
    best: dict[tuple[int, int], tuple[float, list[_Span]]] = {(0, 0): (0.0, [])}
    for used in range(1, count + 1):
        for (start, end), (_, _, cost) in lines.items():
            total, before = best.get((used - 1, start), (np.inf, []))
            if total + cost < best.get((used, end), (np.inf, []))[0]:
                best[used, end] = (total + cost, [*before, (start, end)])
    spans = best[count, len(sizes)][1]
    edges = _edges(sizes, [end for _, end in spans])
    return tuple(
        Segment(
            from_bytes=low, to_bytes=high, alpha_ns=lines[span][0], beta_ns_per_byte=lines[span][1]
        )
        for (low, high), span in zip(pairwise(edges), spans, strict=True)
    )


def _fit_all_lines(sizes: Floats, times: Floats) -> _Lines:
    """alpha, beta and the sum of relative errors of the line through every run of sizes.

    All runs at once, one row each; reweighting brings the sum of errors near its minimum.
    """
    spans = _spans(len(sizes))
    place = np.arange(len(sizes))
    inside = np.array([(start <= place) & (place < end) for start, end in spans])
    base = inside / times**2
    weights = base
    for _ in range(_REWEIGHTINGS):
        alpha, beta = _least_squares(sizes, times, weights)
        errors = np.abs(alpha[:, None] + beta[:, None] * sizes - times) / times
        weights = base / np.maximum(errors, 1e-4)
    cost = (errors * inside).sum(axis=1)
    rows = zip(alpha.tolist(), beta.tolist(), cost.tolist(), strict=True)
    return dict(zip(spans, rows, strict=True))


def _least_squares(sizes: Floats, times: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """One line per row of weights; a number that would be negative is zero."""
    total = weights.sum(axis=1)
    centre, level = weights @ sizes / total, weights @ times / total
    offset = sizes - centre[:, None]
    square = (weights * offset**2).sum(axis=1)
    beta = np.divide((weights * offset) @ times, square, out=np.zeros_like(total), where=square > 0)
    beta = np.maximum(beta, 0.0)
    alpha = level - beta * centre
    through_zero = (weights @ (sizes * times)) / (weights @ sizes**2)
    below = alpha < 0
    return np.where(below, 0.0, alpha), np.where(below, through_zero, beta)


def _spans(count: int) -> list[_Span]:
    """Runs of sizes that may be a segment: the first, and the one after the last."""
    return [
        (start, end)
        for start in range(count)
        for end in range(start + 1, count + 1)
        if end - start >= _MIN_SIZES or (start, end) == (0, count)
    ]


def _edges(sizes: Floats, ends: list[int]) -> list[int]:
    """From the smallest size to the largest; two segments meet at the geometric mean."""
    inner = [round(float(np.sqrt(sizes[end - 1] * sizes[end]))) for end in ends[:-1]]
    return [int(sizes[0]), *inner, int(sizes[-1])]


def _hold_out(medians: Floats) -> list[tuple[Floats, Floats]]:
    """Each pass, with all the others."""
    return [(medians[i], np.delete(medians, i, axis=0)) for i in range(len(medians))]


def _measured(sizes: Floats, medians: Floats) -> tuple[MeasuredSize, ...]:
    return tuple(
        MeasuredSize(
            size_bytes=int(size),
            time_ns=round(float(np.median(column))),
            low_ns=round(float(column.min())),
            high_ns=round(float(column.max())),
        )
        for size, column in zip(sizes, medians.T, strict=True)
    )
