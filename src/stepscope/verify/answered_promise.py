"""Which promise a comparison answers: one about A, where B is A with that change and nothing else.

Without evidence of it the promise stays open and the reason is said. The user's word (`--promise`)
stands for what cannot be seen, never against what can.
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

    from stepscope.records.comparison import Comparison
    from stepscope.records.promise import Promise, Workload

CLOSE_BASELINE = 1.25  # A's step over the promise's, or the other way round, at most
_MOST_TOLD = 5  # open promises that are named
_BY_WORD = "; if B is that change and nothing else, --promise {} answers it"
_PROFILED = "promises are about steps without the profiler, and these are profiled ones"


def with_promise(comparison: Comparison, promise_id: str | None = None) -> Comparison:
    """The promise this comparison answers, written down and kept beside it; why others stay open.

    Where several fit, the newest is answered.
    """
    chosen = [find_promise(promise_id)] if promise_id else _about_a(comparison)
    waiting = []
    for promise in chosen:
        seen, why = examine(promise, comparison, named=promise_id is not None)
        hint = "" if examine(promise, comparison, named=True)[1] else _BY_WORD.format(promise.id)
        if why is None:
            kept = _deliver(promise, comparison, seen, named=promise_id is not None)
            return replace(comparison, promise=kept)
        waiting.append(OpenPromise(id=promise.id, words=promise.words, why=why + hint))
    return replace(comparison, open_promises=tuple(waiting[:_MOST_TOLD]))


def examine(
    promise: Promise, comparison: Comparison, *, named: bool = False
) -> tuple[Sequence[str], str | None]:
    """What is seen of the promised change in B, and why the promise stays open, if it does."""
    if comparison.steps_are == "profiled":
        return (), f"{_PROFILED}: compare run folders (stepscope run) or use stepscope ab"
    why = _not_its_work(promise.workload, comparison.workload, named=named)
    if why is None:
        # In turns a busy machine slows A and B alike, so A may be far from the promise's own run.
        far = named or comparison.paired
        why = off_baseline(promise, comparison.a_ms, ANY_BASELINE if far else CLOSE_BASELINE)
    if why is not None:
        return (), why
    told = judge(promise.settings, _without_script(comparison) if named else comparison)
    why = told.against or (None if named else told.unseen)
    return told.seen, why or too_vague(comparison.low, comparison.high)


def _about_a(comparison: Comparison) -> list[Promise]:
    """Open promises of this host that name A's work as far as that is known, newest first."""
    work = comparison.workload
    return [
        promise
        for promise in open_promises()
        if (promise.workload.script and promise.workload.script == work.script)
        or (promise.workload.signature and promise.workload.signature == work.signature)
    ]


def _not_its_work(promised: Workload, work: Workload, *, named: bool) -> str | None:
    differs = promised.differs_in(work)
    if named:  # shapes may vary from run to run, and files have new names
        both = {"script", "signature"}.issubset(differs)
        differs = tuple(x for x in differs if x in ("world_size", "device") or both)
    if differs:
        told = (_words(name, promised, work) for name in differs)
        return f"A is other work than the promise is about: {', '.join(told)}"
    if not named and not promised.is_same(work):
        return "nothing captured says that A is the work the promise is about (shapes of operators)"
    return None


def _words(name: str, promised: Workload, work: Workload) -> str:
    if name == "signature":
        return "its operators have other shapes"
    return f"{name.replace('_', ' ')} {getattr(work, name)}, not {getattr(promised, name)}"


def _without_script(comparison: Comparison) -> Comparison:
    """Two files may hold A and B where the user says that B is the promised change."""
    changed = tuple(row for row in comparison.evidence.changed if row.name != "script")
    return replace(comparison, evidence=replace(comparison.evidence, changed=changed))


def _deliver(
    promise: Promise, comparison: Comparison, seen: Sequence[str], *, named: bool
) -> TrackedPromise:
    delivery = Delivery(
        promise=promise.id,
        when_unix=time.time(),
        a_ms=comparison.a_ms,
        b_ms=comparison.b_ms,
        change=comparison.change,
        low=comparison.low,
        high=comparison.high,
        confidence=comparison.confidence,
        verdict=comparison.verdict,
        named=named,
        seen=tuple(seen),
        a_path=comparison.a.runs[-1].path,
        b_path=comparison.b.runs[-1].path,
    )
    append(delivery)
    return TrackedPromise(promise=promise, delivery=delivery)
