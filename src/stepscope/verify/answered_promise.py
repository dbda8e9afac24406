"""Which promise a comparison answers: one about A, if B is A with that change and nothing else.

Without evidence the promise stays open, and the reason is given. The user's word (`--promise`)
replaces evidence that is missing; it never overrules evidence that is there.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.records.comparison import OpenPromise
from stepscope.records.promise import Delivery, TrackedPromise
from stepscope.verify.promised_change import judge
from stepscope.verify.record_file import append
from stepscope.verify.track_record import (
    ANY_BASELINE,
    find_promise,
    off_baseline,
    open_promises,
    too_vague,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.comparison import Comparison, MedianStep
    from stepscope.records.promise import Promise, Workload

CLOSE_BASELINE = 1.25  # largest ratio of A's step to the promise's, either way
_MOST_OPEN = 5  # open promises that are named
_BY_WORD = ". If B is that change and nothing else, --prediction {} records its result"
_PROFILED = "predictions are about steps without the profiler, and these steps are profiled"


def with_promise(comparison: Comparison, promise_id: str | None = None) -> Comparison:
    """Record the promise that this comparison answers, or say why the open ones stay open.

    If several fit, the newest is answered.
    """
    candidates = [find_promise(promise_id)] if promise_id else _about_a(comparison)
    still_open = []
    for promise in candidates:
        seen, why = examine(promise, comparison, named=promise_id is not None)
        hint = "" if examine(promise, comparison, named=True)[1] else _BY_WORD.format(promise.id)
        if why is None:
            answered = deliver(promise, comparison, seen, named=promise_id is not None)
            return replace(comparison, promise=answered)
        still_open.append(OpenPromise(id=promise.id, words=promise.words, why=why + hint))
    return replace(comparison, open_promises=tuple(still_open[:_MOST_OPEN]))


def examine(
    promise: Promise, comparison: Comparison, *, named: bool = False
) -> tuple[Sequence[str], str | None]:
    """What shows the promised change in B, and why the promise stays open, if it does."""
    if comparison.steps_are == "profiled":
        return (), f"{_PROFILED}: compare run folders (stepscope run) or use stepscope ab"
    why = _other_work(promise.workload, comparison.workload, named=named)
    if why is None:
        # A busy machine slows alternating runs alike, so A may be far from the promise's own run.
        far = named or comparison.paired
        a_ms = _same_basis(promise, comparison).a_ms
        why = off_baseline(promise, a_ms, ANY_BASELINE if far else CLOSE_BASELINE)
    if why is not None:
        return (), why
    judgement = judge(promise.settings, _without_script(comparison) if named else comparison)
    why = judgement.against or (None if named else judgement.unseen)
    step = _same_basis(promise, comparison)
    return judgement.seen, why or too_vague(step.low, step.high)


def _same_basis(promise: Promise, comparison: Comparison) -> Comparison | MedianStep:
    """The means, or the medians for a promise about those: the two are never mixed."""
    if promise.basis == "median" and comparison.median is not None:
        return comparison.median
    return comparison


def _about_a(comparison: Comparison) -> list[Promise]:
    """Open promises of this host whose script or operators are A's, newest first."""
    work = comparison.workload
    return [
        promise
        for promise in open_promises()
        if (promise.workload.script and promise.workload.script == work.script)
        or (promise.workload.signature and promise.workload.signature == work.signature)
    ]


def _other_work(promised: Workload, work: Workload, *, named: bool) -> str | None:
    differs = promised.differs_in(work)
    if named:  # shapes may vary from run to run, and files have new names
        both = {"script", "signature"}.issubset(differs)
        differs = tuple(x for x in differs if x in ("world_size", "device") or both)
    if differs:
        names = ", ".join(_words(name, promised, work) for name in differs)
        return f"A does other work than the prediction is about: {names}"
    if not named and not promised.is_same(work):
        return (
            "operator shapes were not captured, so nothing shows that A is the step of the "
            "prediction"
        )
    return None


def _words(name: str, promised: Workload, work: Workload) -> str:
    if name == "signature":
        return "its operators have other shapes"
    return f"{name.replace('_', ' ')} {getattr(work, name)}, not {getattr(promised, name)}"


def _without_script(comparison: Comparison) -> Comparison:
    """A and B may be two files if the user says that B is the promised change."""
    changed = tuple(row for row in comparison.evidence.changed if row.name != "script")
    return replace(comparison, evidence=replace(comparison.evidence, changed=changed))


def deliver(
    promise: Promise, comparison: Comparison, seen: Sequence[str], *, named: bool
) -> TrackedPromise:
    """Record what was measured for a promise; `examine` says whether it may be."""
    step = _same_basis(promise, comparison)
    delivery = Delivery(
        promise=promise.id,
        when_unix=time.time(),
        a_ms=step.a_ms,
        b_ms=step.b_ms,
        change=step.change,
        low=step.low,
        high=step.high,
        confidence=comparison.confidence,
        verdict=step.verdict,
        basis=promise.basis,
        named=named,
        seen=tuple(seen),
        a_path=comparison.a.runs[-1].path,
        b_path=comparison.b.runs[-1].path,
    )
    append(delivery)
    return TrackedPromise(promise=promise, delivery=delivery)
