"""Decide which prediction a comparison answers: one about A, if B is A with the predicted
change and nothing else, judged by what both captured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from stepscope.records.comparison import Comparison, Difference, MedianStep, OpenPromise
from stepscope.records.prediction import Delivery, Promise, Setting, TrackedPromise, Workload
from stepscope.verify.track_record import (
    ANY_BASELINE,
    append,
    find_promise,
    off_baseline,
    open_promises,
    too_vague,
)
from stepscope.verify.traits import NO_REMEDIES, REMEDIES

# Without evidence the promise stays open, and the reason is given. The user's word (`--promise`)
# replaces evidence that is missing; it never overrules evidence that is there.

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
    """Return what shows the promised change in B, and why the promise stays open, if it does."""
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


# Whether B is A with the promised change and nothing else, judged by what both captured.

# Whether a trait changed as promised: called with the setting's value, A's word and B's word.
Fits = Callable[[str, str, str], bool]
_LESS_DATA = 0.25  # of A's data loading: less is left if data is always ready
_RECOMPUTED = 1.1  # products of a step that recomputes over those of one that does not


class Sign(msgspec.Struct, frozen=True):
    """The trait that a what-if changes, and the traits that may change with it."""

    trait: str
    fits: Fits
    along: tuple[str, ...] = ()


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What shows the promised change, what speaks against it, and what cannot be seen."""

    seen: tuple[str, ...] = ()
    against: str | None = None
    unseen: str | None = None


def judge(settings: Sequence[Setting], comparison: Comparison) -> Judgement:
    """Judge all settings of one promise together."""
    changed = {row.name: row for row in comparison.evidence.changed}
    other_work = _other_model_or_machine(settings, changed)
    if other_work:
        return Judgement(against=other_work)
    judgements = [_judge_one(setting, comparison, changed) for setting in settings]
    against = next((one.against for one in judgements if one.against), None)
    return Judgement(
        seen=tuple(words for one in judgements for words in one.seen),
        against=against or _more_than_promised(settings, changed),
        unseen=next((one.unseen for one in judgements if one.unseen), None),
    )


def _other_model_or_machine(
    settings: Sequence[Setting], changed: dict[str, Difference]
) -> str | None:
    """No promise covers another model or another machine."""
    allowed = _allowed(settings)
    for name in ("parameters", "parameter memory", "shapes", "device", "world size"):
        if name in changed and name not in allowed:
            return f"B does other work than A: {_difference_words(changed[name])}"
    return None


def _judge_one(
    setting: Setting, comparison: Comparison, changed: dict[str, Difference]
) -> Judgement:
    if made_by := _applied_remedy(setting, changed.get(REMEDIES)):
        return Judgement(seen=(f"B was run with {made_by}",))
    sign = _sign(setting.name, comparison.evidence.looked_at)
    if sign is None:
        return Judgement(unseen=f"stepscope captures nothing that shows {setting}")
    if sign.trait not in comparison.evidence.looked_at:
        return Judgement(unseen=f"{sign.trait} was not captured on both sides")
    row = changed.get(sign.trait)
    if row is None or row.a is None or row.b is None:
        return Judgement(against=f"B does not show {setting}: its {sign.trait} is the same as in A")
    if not sign.fits(setting.value, row.a, row.b):
        return Judgement(against=f"B does not show {setting}: {_difference_words(row)}")
    return Judgement(seen=(_difference_words(row),))


def _applied_remedy(setting: Setting, row: Difference | None) -> str | None:
    """The remedy that makes the promised change, if it was applied to B and not to A."""
    return next((name for name in _added(row) if _makes(name, setting)), None)


def _added(row: Difference | None) -> list[str]:
    before, after = ((row.a or "").split(", "), (row.b or "").split(", ")) if row else ([], [])
    return [name for name in after if name not in before and name != NO_REMEDIES]


def _makes(remedy: str, setting: Setting) -> bool:
    """bf16 makes precision=bf16; a remedy with a value makes the setting of the same words."""
    made = MAKES.get(remedy, MAKES.get(remedy.partition("=")[0], remedy))
    return made == str(setting)


def _is_promised(settings: Sequence[Setting], row: Difference) -> bool:
    """Tell whether only what was promised was added, and nothing was taken away."""
    before, after = (row.a or "").split(", "), (row.b or "").split(", ")
    kept = {*before} - {NO_REMEDIES} <= {*after}
    promised = all(any(_makes(name, one) for one in settings) for name in _added(row))
    return kept and promised


def _more_than_promised(settings: Sequence[Setting], changed: dict[str, Difference]) -> str | None:
    others = [row for name, row in changed.items() if name not in _allowed(settings)]
    others = [row for row in others if row.name != REMEDIES or not _is_promised(settings, row)]
    if not others:
        return None
    return f"B differs from A in other ways too: {', '.join(map(_difference_words, others))}"


def _allowed(settings: Sequence[Setting]) -> set[str]:
    out: set[str] = {"stalls"}  # they come and go with what others do on the machine
    for setting in settings:
        sign = SIGNS.get(setting.name)
        out |= {sign.trait, *sign.along} if sign else {setting.name}
        if setting.name in ("remove", "scale"):
            out |= {*_OPERATORS, "optimizer", "update rule"}
        if setting.name == "workers" and setting.value.endswith(":strong"):
            out.add("batch")
    return out


def _sign(name: str, looked_at: Sequence[str]) -> Sign | None:
    """A what-if that is not listed shows in a fact of its own name, if capture has one."""
    known = SIGNS.get(name)
    if known is None and name in looked_at:
        return Sign(name, _becomes)
    return known


def _difference_words(row: Difference) -> str:
    return f"{row.name} {row.a} -> {row.b}"


def _becomes(value: str, _a: str, b: str) -> bool:
    return b == value


def _appears(_value: str, a: str, b: str) -> bool:
    return (a, b) == ("no", "yes")


def _grows(value: str, a: str, b: str) -> bool:
    """64, or x2."""
    wanted = float(a) * float(value[1:]) if value.startswith("x") else float(value)
    return abs(float(b) / wanted - 1) < 0.01


def _recomputes(value: str, a: str, b: str) -> bool:
    factor = float(b) / float(a)
    return factor >= _RECOMPUTED if value == "blocks" else factor <= 1 / _RECOMPUTED


def _nearly_gone(_value: str, a: str, b: str) -> bool:
    return _number(b) <= _LESS_DATA * _number(a)


def _number(words: str) -> float:
    return float(words.split()[0])


# Remedies that `run --with` applies, and the what-if that predicts each.
MAKES = {
    "tf32": "precision=tf32",
    "bf16": "precision=bf16",
    "fp16": "precision=fp16",
    "fused-optimizer": "optimizer=fused",
    "foreach-optimizer": "optimizer=foreach",
    "compile": "compile",
    "activation-checkpointing": "checkpoint=blocks",
    "save-memory": "save-memory=5%",
    "one-thread": "threads=1",
    "threads=cores": "threads=fit",
}
_OPERATORS = ("matmuls per step", "shapes", "blocking calls")
SIGNS = {
    "precision": Sign(
        "precision",
        lambda value, a, b: value in b.split(", ") and value not in a.split(", "),
        ("blocking calls",),
    ),
    "optimizer": Sign("optimizer", _becomes, ("blocking calls",)),
    "compile": Sign("compile", _appears, (*_OPERATORS, "CUDA graphs")),
    "cuda-graphs": Sign("CUDA graphs", _appears, (*_OPERATORS, "data loading")),
    "batch": Sign("batch", _grows, ("data loading",)),
    "accumulate": Sign(
        "micro-batches",
        lambda value, a, b: abs(float(b) / float(a) / float(value) - 1) < 0.1,
        ("data loading",),
    ),
    "checkpoint": Sign("matmuls per step", _recomputes),
    "no-sync": Sign("blocking calls", lambda _value, a, b: _number(b) < _number(a)),
    "no-data-wait": Sign("data loading", _nearly_gone, ("workers", "loader-workers")),
    "loader-workers": Sign("loader-workers", _becomes, ("data loading",)),
    "no-stalls": Sign("stalls", _nearly_gone, ("workers", "loader-workers", "data loading")),
    "workers": Sign(
        "world size",
        lambda value, _a, b: b == value.partition(":")[0],
        ("strategy", "bucket size", "data loading", "host", "blocking calls"),
    ),
    "bucket-mb": Sign(  # MiB, as DDP takes them
        "bucket size", lambda value, _a, b: abs(_number(b) / (float(value) * 2**20) - 1) < 0.01
    ),
    "zero": Sign(
        "strategy",
        lambda _value, a, b: "fully_sharded" in b and "fully_sharded" not in a,
        ("bucket size", "parameters", "parameter memory", "shapes"),
    ),
}
