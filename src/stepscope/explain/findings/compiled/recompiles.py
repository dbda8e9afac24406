"""torch.compile compiles again in the middle of training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import (
    RankEvidence,
    cost_lines,
    costly_stall,
    stalling_steps,
    typical_wait,
)
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.host_calls import is_library_frame
from stepscope.records.compiled import CompiledWork, FailedGuard, Recompiled
from stepscope.records.explanation import Place, Remedy, Severity
from stepscope.records.run import RankRun
from stepscope.text.figures import duration
from stepscope.text.words import counted

_LEAST_SHARE = 0.05  # of the run, where no steady step shows it
_LEAST_S = 1.0
_MOST = 3  # functions and guards that are named
_SIZES = ("size mismatch", "size()", "stride", "shape")


def find(evidence: RankEvidence) -> Finding | None:
    return find_in(evidence.run, evidence.compiled)


def find_in(run: RankRun | None, compiled: CompiledWork | None = None) -> Finding | None:
    """Steps after the warm-up that compile; in short runs, functions compiled again at all."""
    again = [one for one in compiled.recompiled if one.times] if compiled else []
    stall = costly_stall(run, "compile") if run is not None else None
    if run is None or stall is None:
        return _in_any_step(run, again)
    recompiles = stalling_steps(stall, run, "recompiles", "recompile")
    return RULE.finding(
        share=stall.share,
        summary=f"{recompiles} a function, which takes {typical_wait(stall)}.",
        evidence=(*cost_lines(stall, run), *_guard_lines(again)),
        where=_own(_places(again)) or _own(stall.where) or _places(again) or stall.where,
        remedies=_offer(again),
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
    if not gave_up and (share < _LEAST_SHARE or seconds < _LEAST_S):
        return None
    times = sum(one.times for one in again)
    summary = (
        f"torch.compile recompiled {counted(len(again), 'function')}, {counted(times, 'time')} in "
        f"all, for {duration(1e9 * seconds)} of the run."
    )
    if gave_up:
        summary += f" It gave up on {gave_up[0].function}, which runs without being compiled."
    severity: Severity = "medium" if gave_up else "low"
    return RULE.finding(
        share=share,
        of="run",
        severity=severity,
        summary=summary,
        evidence=_guard_lines(again),
        where=_places(again),
        remedies=_offer(again),
    )


def _guard_lines(again: Sequence[Recompiled]) -> tuple[str, ...]:
    return tuple(_describe(one) for one in again[:_MOST])


def _describe(one: Recompiled) -> str:
    where = f" ({PurePath(one.place.file).name}:{one.place.line})" if one.place else ""
    line = f"{one.function}{where}: {counted(one.times, 'time')}, {duration(1e9 * one.seconds)}"
    if one.guards:
        line += "; changed: " + ", ".join(map(_guard_words, one.guards[:_MOST]))
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
    return tuple(dict.fromkeys(places))[:_MOST]


def _offer(again: Sequence[Recompiled]) -> tuple[Remedy, ...]:
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


RULE = FindingRule(id="recompiles", title="Recompilation", find=find)
