"""Findings about torch.compile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import (
    LOW,
    RankEvidence,
    as_short_run,
    cost_lines,
    costly_stall,
    length_severity,
    rule,
    stalling_steps,
    typical_wait,
)
from stepscope.explain.host_calls import is_library_frame
from stepscope.records.compiled import BreakCost, CompiledWork, FailedGuard, Recompiled, RegionTime
from stepscope.records.explanation import Finding, Place, Remedy, Severity
from stepscope.records.run import RankRun
from stepscope.text.figures import duration, milliseconds, percent, size
from stepscope.text.words import counted, plural

_MOST_BREAKS = 5  # named one by one


@rule("Graph breaks")
def graph_breaks(evidence: RankEvidence) -> Finding | None:
    """torch.compile splits the model where it cannot trace a line. Breaks that the steps of
    the trace ran into."""
    breaks = evidence.compiled.breaks if evidence.compiled else ()
    ran = [one for one in breaks if one.times and one.cost_ms is not None]
    step_ms = evidence.budget.step_ms
    if not ran or not step_ms:
        # Older versions of torch do not mark compiled regions in a trace.
        regions = evidence.compiled.regions if evidence.compiled else ()
        if not breaks or not regions or any(region.region for region in regions):
            return None
        return graph_breaks.finding(
            share=0.0,
            severity="low",
            summary=f"{_splits(len(breaks))} What this costs is not known.",
            evidence=tuple(_describe_break(one) for one in breaks[:_MOST_BREAKS]),
            where=tuple(one.place for one in breaks if one.place is not None)[:_MOST_BREAKS],
            remedies=(remedies.NO_BREAKS.offer(_advice(breaks[0])),),
        )
    cost_ms = sum(one.cost_ms or 0.0 for one in ran)
    share = min(1.0, cost_ms / step_ms)
    named = [*ran, *(one for one in breaks if one not in ran)][:_MOST_BREAKS]
    return graph_breaks.finding(
        share=share,
        summary=f"{_splits(len(ran))} This costs {evidence.step_ms(share)}.",
        evidence=tuple(_describe_break(one) for one in named),
        where=tuple(one.place for one in named if one.place is not None),
        remedies=(remedies.NO_BREAKS.offer(_advice(ran[0])),),
    )


def _splits(lines: int) -> str:
    return (
        f"torch.compile cannot trace {counted(lines, 'line')}, which "
        f"{plural(lines, 'splits', 'split')} the model."
    )


def _describe_break(one: BreakCost) -> str:
    where = "a line that was not recorded"
    if one.place is not None:
        where = f"{_line_of(one.place)} in {one.place.function}"
    cost = milliseconds(one.cost_ms) if one.cost_ms is not None else "cost not known"
    return f"{where}: {cost}; {one.reason}"


def _line_of(place: Place) -> str:
    return f"{PurePath(place.file).name}:{place.line}"


def _advice(one: BreakCost) -> str:
    """Name the costliest line, with torch's own hint if there is one."""
    line = _line_of(one.place) if one.place is not None else "the costliest line"
    if one.hint:
        return f"Change {line}: {one.hint.rstrip('.')}"
    if one.place is None:
        return ""
    return (
        f"Rewrite {line} so that torch.compile can trace it, or move it out of the compiled "
        "function"
    )


_LEAST_SHARE = 0.05  # of the run, where no steady step shows it
_LEAST_RECOMPILING_S = 1.0
_MOST_GUARDS = 3  # functions and guards that are named
_SIZES = ("size mismatch", "size()", "stride", "shape")


@rule("Recompilation")
def recompiles(evidence: RankEvidence) -> Finding | None:
    """torch.compile compiles again in the middle of training."""
    return find_recompiles(evidence.run, evidence.compiled)


def find_recompiles(run: RankRun | None, compiled: CompiledWork | None = None) -> Finding | None:
    """Steps after the warm-up that compile; in short runs, functions compiled again at all."""
    again = [one for one in compiled.recompiled if one.times] if compiled else []
    stall = costly_stall(run, "compile") if run is not None else None
    if run is None or stall is None:
        return _in_any_step(run, again)
    subject = stalling_steps(stall, run, "recompiles", "recompile")
    return recompiles.finding(
        share=stall.share,
        summary=f"{subject} a function, which takes {typical_wait(stall)}.",
        evidence=(*cost_lines(stall, run), *_guard_lines(again)),
        where=_own(_places(again)) or _own(stall.where) or _places(again) or stall.where,
        remedies=_offer_for_guards(again),
    )


def _own(places: tuple[Place, ...]) -> tuple[Place, ...]:
    """The user's lines: of a plain nn.Module torch compiles a wrapper of its own."""
    return tuple(place for place in places if not is_library_frame(place))


def _in_any_step(run: RankRun | None, again: Sequence[Recompiled]) -> Finding | None:
    """By the compiler's own records, of the whole run."""
    wall_s = run.account.wall_ms / 1e3 if run is not None and run.account else 0.0
    seconds = sum(one.seconds for one in again)
    share = min(1.0, seconds / wall_s) if wall_s else 0.0
    gave_up = [one for one in again if one.gave_up]
    if not gave_up and (share < _LEAST_SHARE or seconds < _LEAST_RECOMPILING_S):
        return None
    times = sum(one.times for one in again)
    summary = (
        f"torch.compile recompiled {counted(len(again), 'function')}, {counted(times, 'time')} in "
        f"all, for {duration(1e9 * seconds)} of the run."
    )
    if gave_up:
        summary += f" It gave up on {gave_up[0].function}, which runs without being compiled."
    severity: Severity = "medium" if gave_up else "low"
    return recompiles.finding(
        share=share,
        of="run",
        severity=severity,
        summary=summary,
        evidence=_guard_lines(again),
        where=_places(again),
        remedies=_offer_for_guards(again),
    )


def _guard_lines(again: Sequence[Recompiled]) -> tuple[str, ...]:
    return tuple(_describe_recompiled(one) for one in again[:_MOST_GUARDS])


def _describe_recompiled(one: Recompiled) -> str:
    where = f" ({PurePath(one.place.file).name}:{one.place.line})" if one.place else ""
    line = f"{one.function}{where}: {counted(one.times, 'time')}, {duration(1e9 * one.seconds)}"
    if one.guards:
        line += "; changed: " + ", ".join(map(_guard_words, one.guards[:_MOST_GUARDS]))
    return line


def _guard_words(failed: FailedGuard) -> str:
    place = failed.place
    return failed.guard + (f" ({PurePath(place.file).name}:{place.line})" if place else "")


def _places(again: Sequence[Recompiled]) -> tuple[Place, ...]:
    """The lines whose values changed; for a guard without a line, its function."""
    places = [
        place
        for one in again
        for failed in one.guards or (None,)
        if (place := (failed.place if failed else None) or one.place) is not None
    ]
    return tuple(dict.fromkeys(places))[:_MOST_GUARDS]


def _offer_for_guards(again: Sequence[Recompiled]) -> tuple[Remedy, ...]:
    """A guard on a plain number needs another cure than one on a size."""
    sizes = (
        remedies.MARK_DYNAMIC.offer(),
        remedies.STEADY_SHAPES.offer(
            "Pad batches to a few lengths: torch.compile makes one graph for each"
        ),
    )
    guards = [failed.guard for one in again for failed in one.guards]
    numbers = [guard for guard in guards if not any(word in guard for word in _SIZES)]
    if not numbers:
        return sizes
    steady = remedies.STEADY_VALUES.offer()
    return (steady, *sizes) if len(numbers) == len(guards) else (*sizes, steady)


_MOST_REGIONS = 4


@rule("CUDA graphs skipped")
def graphs_skipped(evidence: RankEvidence) -> Finding | None:
    """CUDA graphs were asked for, and torch.compile leaves some graphs out. Graphs of the
    step that are launched kernel by kernel although they were to be replayed."""
    regions = evidence.compiled.regions if evidence.compiled else ()
    skipped = [region for region in regions if region.not_graphed]
    step_ms = evidence.budget.step_ms
    if evidence.on_host or not skipped or not step_ms:
        return None
    waits_ms = sum(region.gaps_ms or 0.0 for region in skipped)
    share = min(1.0, waits_ms / step_ms)
    return graphs_skipped.finding(
        share=share,
        summary=f"{len(skipped)} of {counted(len(regions), 'compiled graph')} "
        f"{plural(len(skipped), 'is', 'are')} not replayed as a CUDA graph. The "
        f"{evidence.device} waits between {plural(len(skipped), 'its', 'their')} kernels for "
        f"{evidence.step_ms(share)}.",
        evidence=tuple(_describe_region(region) for region in skipped[:_MOST_REGIONS]),
        where=tuple(region.lines[0].place for region in skipped if region.lines)[:_MOST_REGIONS],
        remedies=(remedies.GRAPHABLE.offer(),),
    )


def _describe_region(region: RegionTime) -> str:
    which = "backward" if region.backward else "forward"
    return f"region {region.region or 'not known'}, {which}: {region.not_graphed}"


_MOST_PAIRS = 4


@rule("Kernels not fused")
def not_fused(evidence: RankEvidence) -> Finding | None:
    """Loops over the same tensors that torch.compile did not make one. Neighbours that read
    what the one before has just made or read, by the memory's rate."""
    regions = evidence.compiled.regions if evidence.compiled else ()
    pairs = [pair for region in regions for pair in region.unfused if pair.ms is not None]
    pairs.sort(key=lambda pair: -(pair.ms or 0.0))
    step_ms = evidence.budget.step_ms
    cost_ms = sum(pair.ms or 0.0 for pair in pairs)
    if not step_ms or cost_ms / step_ms < LOW:
        return None
    share = min(1.0, cost_ms / step_ms)
    return not_fused.finding(
        share=share,
        severity="low",
        summary="torch.compile left pairs of kernels unfused: the second reads again what the "
        f"first had just used. This costs up to {evidence.step_ms(share)}.",
        evidence=tuple(
            (
                f"{pair.first}, then {pair.second}: {size(pair.size_bytes)}, "
                f"{milliseconds(pair.ms or 0.0)} per step"
            )
            for pair in pairs[:_MOST_PAIRS]
        ),
        where=tuple(r.lines[0].place for r in regions if r.unfused and r.lines)[:_MOST_PAIRS],
        remedies=(remedies.FUSE_NEIGHBOURS.offer(),),
    )


_LEAST_SHARE = 0.05
_LEAST_COMPILING_S = 10.0  # as for start-up


@rule("Long compilation")
def compile_time(evidence: RankEvidence) -> Finding | None:
    """Compiling takes much of the run. Dynamo's own times of its compilations, of the
    command's wall time."""
    compiled, run = evidence.compiled, evidence.run
    if compiled is None or compiled.compile_s is None or run is None or run.account is None:
        return None
    seconds, wall_s = compiled.compile_s, run.account.wall_ms / 1e3
    share = min(1.0, seconds / wall_s) if wall_s else 0.0
    if share < _LEAST_SHARE or seconds < _LEAST_COMPILING_S:
        return None
    trial = as_short_run(run, 1e3 * seconds)
    lines = [counted(compiled.compilations or 0, "compilation")]
    if compiled.cold_s is not None and compiled.cached_s is not None:
        lines[0] += (
            f": {duration(1e9 * compiled.cold_s)} of compiling, "
            f"{duration(1e9 * compiled.cached_s)} of loading from a cache"
        )
    again = sum(one.seconds for one in compiled.recompiled)
    if again:
        lines.append(f"{duration(1e9 * again)} of it recompiled a function")
    return compile_time.finding(
        share=share,
        of="run",
        severity=length_severity(trial.share if trial else share, 1e3 * seconds),
        summary=f"torch.compile compiled for {duration(1e9 * seconds)}, {percent(share)} of the "
        f"{duration(1e9 * wall_s)} run.",
        evidence=(*lines, *([trial.words] if trial else [])),
        remedies=_offer_for_compiling(compiled),
    )


def _offer_for_compiling(compiled: CompiledWork) -> tuple[Remedy, ...]:
    """A cache helps with what no cache had; one block compiled once helps in any case."""
    regional = remedies.COMPILE_BLOCKS.offer()
    if compiled.cold_s is not None and compiled.cold_s < (compiled.cached_s or 0.0):
        return (regional,)
    return (remedies.KEEP_COMPILE_CACHE.offer(), regional)
