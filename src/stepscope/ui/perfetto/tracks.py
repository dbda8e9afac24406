"""What we know about one rank, as tracks above its own."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.explain import intervals
from stepscope.records.explanation import GAP_CAUSES
from stepscope.records.figures import milliseconds, percent
from stepscope.ui.perfetto.events import Slice, Track
from stepscope.ui.perfetto.path_track import PathTrack
from stepscope.ui.words import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.records.explanation import Explanation, Finding, Gaps, RankExplanation

    Stretches = tuple[list[int], list[int], list[str]]

_WORK_PARTS = ("compute", "exposed_comm", "exposed_memory")
_GAP_PARTS = {"launch": "idle_launch", "other": "idle_other"}  # the others have their own names
_PIECE_WORDS = {"work": "own work", "input": "waits for data", "transfer": "transfer"}
# What of the budget a finding is about: its instant stands where the longest such stretch begins.
_SHOWN_AT = {
    "data-loading": "data_loading",
    "blocking-syncs": "sync",
    "dispatch-bound": "operators",
    "python-overhead": "python",
    "profiler-overhead": "profiler",
    "launch-bound": "idle_launch",
    "exposed-communication": "exposed_comm",
    "exposed-copies": "exposed_memory",
}


def make_tracks(
    analysis: RankAnalysis, rank: RankExplanation, explanation: Explanation
) -> list[Track]:
    """Tracks without anything to show are left out."""
    stretches, path = _divide(analysis, rank), PathTrack(analysis)
    has_gaps = rank.gaps is not None and len(rank.gaps.start_ns) > 0
    job_path = list(_job_path(explanation, rank))
    tracks = {
        "budget by cycle": (True, _cycles(rank, stretches)),
        "budget": (bool(stretches[0]), _slices_of(stretches)),
        "idle causes": (has_gaps, _idle(analysis, rank)),
        "critical path": (bool(path), path.slices()),
        "critical path of the job": (bool(job_path), iter(job_path)),
        "findings": (True, _findings(explanation, rank, stretches)),
    }
    return [Track(name, slices) for name, (shown, slices) in tracks.items() if shown]


def _divide(analysis: RankAnalysis, rank: RankExplanation) -> Stretches:
    """The time line cut into parts of the budget: starts, ends, ids. Neighbours differ."""
    work = analysis.work
    starts, lengths, (compute, comm, memory) = intervals.sweep(
        (work.compute, work.comm, work.memory)
    )
    part = np.where(compute, 0, np.where(comm, 1, np.where(memory, 2, -1)))
    busy = part >= 0
    names = list(_WORK_PARTS) + [_part_of(cause) for cause in GAP_CAUSES]
    all_starts, all_ends = starts[busy], (starts + lengths)[busy]
    code = part[busy]
    if rank.gaps is not None:
        all_starts = np.append(all_starts, rank.gaps.start_ns)
        all_ends = np.append(all_ends, rank.gaps.end_ns)
        code = np.append(code, rank.gaps.cause.astype(np.int64) + len(_WORK_PARTS))
    return _joined(all_starts, all_ends, code, names)


def _joined(starts: Any, ends: Any, code: Any, names: Sequence[str]) -> Stretches:
    """In order of time; stretches of one part that touch become one."""
    order = np.argsort(starts, kind="stable")
    starts, ends, code = starts[order], ends[order], code[order]
    keep = ends > starts
    starts, ends, code = starts[keep], ends[keep], code[keep]
    opens = np.ones(len(starts), np.bool_)
    opens[1:] = (code[1:] != code[:-1]) | (starts[1:] != ends[:-1])
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(starts)) - 1
    if not len(starts):
        return [], [], []
    ids = [names[one] for one in code[first].tolist()]
    return starts[first].tolist(), ends[last].tolist(), ids


def _part_of(cause: str) -> str:
    return _GAP_PARTS.get(cause, cause)


def _label(part: str) -> str:
    return PARTS[part][0] if part in PARTS else part


def _slices_of(stretches: Stretches) -> Iterator[Slice]:
    for start, end, part in zip(*stretches, strict=True):
        yield Slice(_label(part), start, end, {})


def _cycles(rank: RankExplanation, stretches: Stretches) -> Iterator[Slice]:
    """Each cycle of the budget with what it consists of."""
    steps = rank.steps
    edges = list(accumulate(steps.cycles_ns, initial=steps.window_start_ns))
    if len(edges) < 2:
        edges = [steps.window_start_ns, steps.window_end_ns]
    for number, (start, end) in enumerate(pairwise(edges)):
        place = steps.first_cycle + number
        known = place < len(steps.steps) and bool(steps.cycles_ns)
        name = steps.steps[place].name if known else "steps"
        if end > start:
            yield Slice(name, start, end, _parts_within(stretches, start, end))


def _parts_within(stretches: Stretches, low: int, high: int) -> dict[str, str]:
    """What each part takes of this time, the longest first."""
    starts, ends = np.array(stretches[0]), np.array(stretches[1])
    if not len(starts):
        return {}
    first, last = np.searchsorted(ends, low, side="right"), np.searchsorted(starts, high)
    sizes: dict[str, int] = {}
    inside = np.minimum(ends[first:last], high) - np.maximum(starts[first:last], low)
    for part, size in zip(stretches[2][first:last], inside.tolist(), strict=True):
        sizes[part] = sizes.get(part, 0) + size
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    return {
        _label(part): f"{milliseconds(size / 1e6)} ({percent(size / (high - low))})"
        for part, size in ordered
    }


def _idle(analysis: RankAnalysis, rank: RankExplanation) -> Iterator[Slice]:
    """Every gap by its cause, with the Python function that ran on the host."""
    gaps: Gaps | None = rank.gaps
    if gaps is None:
        return
    names, strings = analysis.trace.host.name, analysis.trace.strings
    columns = (gaps.start_ns.tolist(), gaps.end_ns.tolist(), gaps.cause.tolist())
    for start, end, cause, frame in zip(*columns, gaps.frame.tolist(), strict=True):
        if end > start:
            args = {"in": strings[names[frame]]} if frame >= 0 else {}
            yield Slice(_label(_part_of(GAP_CAUSES[cause])), start, end, args)


def _job_path(explanation: Explanation, rank: RankExplanation) -> Iterator[Slice]:
    """The pieces of the job's critical path that are this rank's, on its own clock."""
    job = explanation.job
    if job is None or job.path is None or rank.rank is None:
        return
    for piece in job.path.pieces:
        if piece.rank == rank.rank:
            times = np.array([piece.start_ns, piece.end_ns], np.int64)
            # Clocks differ by far less than it takes the shift itself to change.
            start, end = (2 * times - job.clock.shift_ns(rank.rank, times)).tolist()
            yield Slice(_PIECE_WORDS[piece.kind], start, end, {"what": piece.label})


def _findings(
    explanation: Explanation, rank: RankExplanation, stretches: Stretches
) -> Iterator[Slice]:
    """The verdict and every finding about this rank or the job, where it shows most."""
    begin = rank.steps.window_start_ns
    yield Slice(
        explanation.verdict, begin, None, _present(why=explanation.why, next=explanation.next)
    )
    mine = [one for one in explanation.findings if one.rank in (None, rank.rank)]
    known = {one.id for one in mine}
    for finding in [*mine, *(one for one in rank.findings if one.id not in known)]:
        at = _longest(stretches, _SHOWN_AT.get(finding.id), begin, rank.steps.window_end_ns)
        name = f"{finding.title}: {percent(finding.share)}" if finding.share else finding.title
        yield Slice(name, at, None, _finding_args(finding))


def _longest(stretches: Stretches, part: str | None, begin: int, end: int) -> int:
    """Where the part's longest stretch within the steps begins; else where the steps begin."""
    sizes = [
        (high - low, low)
        for low, high, name in zip(*stretches, strict=True)
        if name == part and begin <= low < end
    ]
    return max(sizes, default=(0, begin))[1]


def _finding_args(finding: Finding) -> dict[str, Any]:
    return _present(
        summary=finding.summary,
        severity=finding.severity,
        evidence="; ".join(finding.evidence),
        where="; ".join(f"{place.file}:{place.line} {place.function}" for place in finding.where),
        remedies="; ".join(remedy.summary for remedy in finding.remedies),
    )


def _present(**args: str) -> dict[str, Any]:
    return {name: text for name, text in args.items() if text}
