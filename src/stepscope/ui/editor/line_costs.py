"""The cost of each line: measured in a run folder, or estimated for an edited script before
anybody runs it.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from stepscope.errors import NotCapturedError, UnreadableInputError
from stepscope.explain.line_costs import (
    KeptBytes,
    OperatorTimes,
    cost_lines,
    first_dtype,
    operator_times,
)
from stepscope.records.explanation import RankExplanation
from stepscope.records.source_lines import LineCost, LineCosts, LineOperator
from stepscope.text.figures import milliseconds, percent
from stepscope.trace.files import MissingFileError, read_whole
from stepscope.trace.read import read_trace
from stepscope.ui.advice import find_slowest
from stepscope.ui.api import explain
from stepscope.ui.editor.edits import follow
from stepscope.ui.editor.fake_run import FakeAnswer, FakeScript, LineCall, run_with_fakes

TRACE, MEMORY, SOURCES = "trace-lines.json.gz", "memory.json", "lines.json"
_MOST_SOURCES = 256 << 20
_T = TypeVar("_T")


class _KeptLine(msgspec.Struct, frozen=True):
    file: str
    line: int
    bytes: int


class _MemoryFile(msgspec.Struct, frozen=True):
    activations_by_line: list[_KeptLine] | None = None


class _Sources(msgspec.Struct, frozen=True):
    texts: dict[str, str] = {}


def line_costs_of(run: Path) -> LineCosts:
    """Return those of the rank that decides the step. NotCapturedError without `--lines`."""
    if not any(run.glob(f"rank-*/{TRACE}")):
        raise NotCapturedError(
            f"{run} has no costs of lines: record with `stepscope run --lines`, and train at least "
            "25 steps"
        )
    explanation = explain(run)
    slowest = find_slowest(explanation)
    ranks = [one for one in (slowest, *explanation.ranks) if (_folder(one) / TRACE).is_file()]
    if not ranks:
        raise NotCapturedError(f"no rank next to {slowest.path} recorded lines of code")
    rank, folder = ranks[0], _folder(ranks[0])
    step_ms = rank.budget.step_ms
    if step_ms is None:
        raise NotCapturedError(f"{run} does not show how long a step is")
    memory = _decoded(folder / MEMORY, _MemoryFile)
    costs = cost_lines(read_trace(folder / TRACE), step_ms, _kept(memory))
    sources = _decoded(folder / SOURCES, _Sources)
    largest = rank.memory.largest_batch if rank.memory is not None else None
    return replace(
        costs,
        verdict=explanation.verdict,
        peak_bytes=rank.memory.peak_bytes if rank.memory is not None else None,
        device=rank.device or rank.kind,
        run=str(run.absolute()),
        batch=largest.batch if largest is not None else None,
        # Passes that share a batch count once: the loader gave one.
        batches_per_step=(largest.batches_per_step if largest is not None else None) or 1,
        texts=sources.texts if sources is not None else {},
    )


def _folder(rank: RankExplanation) -> Path:
    return Path(rank.path).parent


def _kept(memory: _MemoryFile | None) -> KeptBytes | None:
    """Return None where the memory step did not watch lines."""
    if memory is None or memory.activations_by_line is None:
        return None
    kept: KeptBytes = {}
    for one in memory.activations_by_line:
        kept[one.file, one.line] = kept.get((one.file, one.line), 0) + one.bytes
    return kept


def _decoded(path: Path, kind: type[_T]) -> _T | None:
    try:
        return msgspec.json.decode(read_whole(path, _MOST_SOURCES), type=kind)
    except MissingFileError:
        return None
    except msgspec.MsgspecError as error:
        raise UnreadableInputError(f"{path} is damaged: {error}") from None


# The cost of an edited script's lines, before anybody runs it.
#
# Both the measured text and the edited one run a step with fake tensors, and their operators are
# timed by those of the measured run. A line whose operators did not change keeps its measured cost;
# the others get their operators' times, scaled by how those of the same line, or of all lines of
# the measured text, compare with what was measured.

PHASES = ("forward", "backward", "optimizer")
_WORTH_SAYING = 0.05  # of the estimated time
_Place = tuple[str, int]


class _Timed(NamedTuple):
    """One line's operators in a fake step."""

    function: str
    ms: dict[str, float]  # by phase
    operators: tuple[LineOperator, ...]
    signature: frozenset[tuple[object, int]]  # what it runs, without its place

    @property
    def names(self) -> set[str]:
        return {one.name for one in self.operators}

    @property
    def calls(self) -> float:
        return sum(one.calls for one in self.operators)


class _Estimated(NamedTuple):
    """All lines of a fake step."""

    lines: dict[_Place, _Timed]
    kept: dict[_Place, int]
    parameter_bytes: int
    unsure_ms: float  # of operators that were never measured with these shapes


def estimate_script(
    script: Path,
    texts: Mapping[Path, str],
    arguments: Sequence[str],
    *,
    limit_s: float,
    measured: LineCosts | None = None,
    python: str | None = None,
    stop: threading.Event | None = None,
) -> LineCosts:
    """Line costs of the script with `texts` for files of it, marked as estimated.

    Files that are not in `texts` are as they were measured. Raises NotCapturedError, which says why
    it cannot: a syntax error with its line, nothing measured yet, shapes that depend on values,
    missing data, or the time limit. `stop` ends it early.
    """
    for file, text in texts.items():
        check_syntax(file, text)
    if measured is None or measured.run is None:
        raise NotCapturedError(f"{script.name} has not been measured: profile it once")
    script = script.resolve()
    before = measured.texts
    if str(script) not in before:
        raise NotCapturedError(f"the measured run did not run {script.name}: profile it once")
    after = {**before, **{str(file.resolve()): text for file, text in texts.items()}}
    how = (tuple(arguments), python or sys.executable, script.parent.absolute())
    times = _times_of(measured.run, measured.step_ms)
    old, new = (FakeScript(script, tuple(sorted(them.items())), *how) for them in (before, after))
    # The edited one first: what is wrong with it is said at once.
    edited = run_with_fakes(new, limit_s, stop) if new != old else None
    baseline = _fake_baseline(old, limit_s, stop)
    return _combine(
        measured, after, _time_lines(baseline, times), _time_lines(edited or baseline, times)
    )


def check_syntax(script: Path, text: str) -> None:
    """Raises NotCapturedError that names the line."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise NotCapturedError(f"{script.name}, line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise NotCapturedError(f"{script.name} cannot be parsed: {error}") from None


@lru_cache(maxsize=4)
def _times_of(run: str, step_ms: float) -> OperatorTimes:
    traces = sorted(Path(run).glob(f"rank-*/{TRACE}"))
    if not traces:
        raise NotCapturedError(f"{run} was removed: profile the script again")
    return operator_times(read_trace(traces[0]), step_ms)


_baselines: dict[FakeScript, FakeAnswer] = {}
_MOST_BASELINES = 4


def _fake_baseline(script: FakeScript, limit_s: float, stop: threading.Event | None) -> FakeAnswer:
    """Run the measured text, which is the same for every edit."""
    answer = _baselines.get(script)
    if answer is None:
        answer = run_with_fakes(script, limit_s, stop)
        if len(_baselines) >= _MOST_BASELINES:
            _baselines.clear()
        _baselines[script] = answer
    return answer


def _time_lines(answer: FakeAnswer, times: OperatorTimes) -> _Estimated:
    by_line: dict[_Place, list[LineCall]] = defaultdict(list)
    for call in answer.calls:
        by_line[call.file, call.line].append(call)
    unsure = 0.0
    lines = {}
    for place, calls in by_line.items():
        ms: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        operators = []
        for call in calls:
            shapes = tuple(tuple(shape) for shape in call.shapes if shape)
            one = times.of(call.name, shapes, first_dtype(call.dtypes))
            total = one.ms * call.count
            ms[call.phase] += total
            unsure += total if one.basis != "measured" else 0.0
            operators.append(
                LineOperator(name=call.name, calls=call.count, ms=total, shapes=str(call.shapes))
            )
        signature = Counter(
            {
                (one.phase, one.name, tuple(map(tuple, one.shapes)), tuple(one.dtypes)): one.count
                for one in calls
            }
        )
        ranked = tuple(sorted(operators, key=lambda one: -one.ms))
        lines[place] = _Timed(calls[0].function, ms, ranked, frozenset(signature.items()))
    kept = {(file, line): size for file, line, size in answer.kept}
    return _Estimated(lines, kept, answer.parameter_bytes, unsure)


def _combine(
    measured: LineCosts, texts: dict[str, str], old: _Estimated, new: _Estimated
) -> LineCosts:
    factors = _factors(measured, old)
    costs_before = _in_todays_texts(measured, texts)
    was_at = {now: cost.place for now, cost in costs_before.items()}
    lines = []
    for place in {**dict.fromkeys(costs_before), **dict.fromkeys(new.lines)}:
        known, timed = costs_before.get(place), new.lines.get(place)
        before = old.lines.get(was_at[place]) if known is not None else None
        kept = new.kept.get(place, 0)
        lines.append(_estimate_line(place, known, before, timed, factors, kept))
    step_ms = measured.other_ms + sum(cost.total_ms for cost in lines)
    ranked = sorted(lines, key=lambda cost: -cost.total_ms)
    return LineCosts(
        lines=tuple(replace(cost, share=cost.total_ms / step_ms) for cost in ranked),
        step_ms=step_ms,
        other_ms=measured.other_ms,
        verdict=f"estimated {milliseconds(step_ms)} per step; "
        f"{milliseconds(measured.step_ms)} were measured before the edit",
        peak_bytes=_peak(measured, old, new),
        device=measured.device,
        kind="estimated",
        run=measured.run,
        batch=None,
        texts=texts,
        notes=_notes(new, step_ms),
    )


def _estimate_line(
    place: _Place,
    known: LineCost | None,
    before: _Timed | None,
    timed: _Timed | None,
    factors: Mapping[str, float],
    kept: int,
) -> LineCost:
    """Measured as it is, if its operators are the same; else by its operators."""
    file, line = place
    same = (
        before is timed
        if before is None or timed is None
        else (before.signature == timed.signature)
    )
    if known is not None and same:
        return replace(known, file=file, line=line)
    if timed is None:  # it runs no operator any more
        assert known is not None
        nothing = LineCost(file=file, line=line, function=known.function, calls=known.calls)
        return replace(nothing, other_ms=known.other_ms, kept_bytes=kept)
    ms = {
        phase: timed.ms[phase] * (_own_factor(phase, known, before, timed) or factors[phase])
        for phase in PHASES
    }
    return LineCost(
        file=file,
        line=line,
        function=timed.function,
        forward_ms=ms["forward"],
        backward_ms=ms["backward"],
        optimizer_ms=ms["optimizer"],
        other_ms=known.other_ms if known is not None else 0.0,
        kept_bytes=kept,
        calls=known.calls if known and before and before.calls == timed.calls else None,
        operators=timed.operators,
    )


def _own_factor(
    phase: str, known: LineCost | None, before: _Timed | None, after: _Timed
) -> float | None:
    """Return what the line took over what its operators were timed at, while they only differ in
    shapes: one that fakes show otherwise than the profiler is timed badly, before and after
    alike."""
    if known is None or before is None or before.names != after.names or not before.ms[phase]:
        return None
    took: float = getattr(known, f"{phase}_ms")
    return took / before.ms[phase] or None


def _in_todays_texts(measured: LineCosts, texts: Mapping[str, str]) -> dict[_Place, LineCost]:
    """Measured lines by where they are now; those of files without a text stay where they are."""
    places = {cost.place: cost for cost in measured.lines if cost.file not in texts}
    for file, text in texts.items():
        for followed in follow(measured, Path(file), text).lines:
            if followed.line is not None:
                places[file, followed.line] = followed.cost
    return places


def _factors(measured: LineCosts, old: _Estimated) -> dict[str, float]:
    """Measured time over that of the operators that fakes show, by phase."""
    factors = {}
    for phase in PHASES:
        seen = sum(getattr(cost, f"{phase}_ms") for cost in measured.lines)
        counted = sum(timed.ms[phase] for timed in old.lines.values())
        factors[phase] = seen / counted if counted > 0 and seen > 0 else 1.0
    return factors


def _peak(measured: LineCosts, old: _Estimated, new: _Estimated) -> int | None:
    """Add what the lines keep more or less; None once the parameters change."""
    if measured.peak_bytes is None or old.parameter_bytes != new.parameter_bytes:
        return None
    return max(0, measured.peak_bytes + sum(new.kept.values()) - sum(old.kept.values()))


def _notes(new: _Estimated, step_ms: float) -> tuple[str, ...]:
    share = new.unsure_ms / step_ms if step_ms else 0.0
    if share < _WORTH_SAYING:
        return ()
    return (
        f"{percent(share)} of the estimate is scaled from operators that were measured with other "
        "shapes, or from similar operators",
    )
