"""Find long recurrences: the gradient of each step waits for that of the next one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import (
    LOW,
    RankEvidence,
    costliest_places,
    rule,
    severity_of,
)
from stepscope.explain.recurrences import (
    Recurrence,
    RecurrentCalls,
    StepWindow,
    find_recurrences,
    owners,
)
from stepscope.records.explanation import Finding, Remedy
from stepscope.records.hardware import find_device
from stepscope.records.scan_costs import LARGEST_SIZE, gpu_scan_pays
from stepscope.records.trace import HostKind
from stepscope.step.arrays import Int32s, Int64s
from stepscope.step.graph import outermost_operator
from stepscope.text.figures import percent

_NAMES = {
    "tanh": "a plain RNN (tanh)",
    "relu": "a plain RNN (relu)",
    "lstm": "an LSTM",
    "gru": "a GRU",
    "gated": "a gated recurrence",
}
_USUAL_MULTIPROCESSORS = 108  # of a GPU that is not listed
_FORMS = {"layer": "", "cells": ", its cell called step by step", "loop": ", written as a loop"}


@rule("Long recurrence")
def long_recurrence(evidence: RankEvidence) -> Finding | None:
    """A long recurrence: the gradient of each step waits for that of the next one. The share
    of the step that backward through time takes."""
    # The calls of the budget's window; the device's window begins later than its first call.
    start_ns, end_ns = (
        evidence.timeline.start_ns,
        evidence.timeline.start_ns + evidence.timeline.span_ns,
    )
    if not evidence.on_host:
        host, (top, _) = evidence.trace.host, _device_work(evidence)
        began = host.start_ns[top[top >= 0]]
        start_ns, end_ns = (int(began.min()), int(began.max()) + 1) if len(began) else (0, 0)
    window = StepWindow(start_ns=start_ns, end_ns=end_ns, steps=evidence.cycles)
    found = find_recurrences(evidence.trace, window)
    if not found:
        return None
    shares = _backward_shares(evidence, window, found)
    share = min(1.0, sum(shares))
    if share < LOW:
        return None
    longest = found[int(np.argmax(shares))].recurrence
    guessed = all(one.recurrence.form == "loop" for one in found)
    rows = np.array([one.rows[0] for one in found], np.int32)
    return long_recurrence.finding(
        share=share,
        severity="low" if guessed else severity_of(share),
        summary=f"{percent(share)} of the step is the backward pass through {longest.steps:,} "
        f"steps of {_NAMES[longest.cell]}{_FORMS[longest.form]}. The gradient of each step waits "
        "for that of the next.",
        evidence=(
            *(
                f"{_shape_words(one.recurrence)}: {evidence.step_ms(its_share)} in backward"
                for one, its_share in zip(found, shares, strict=True)
                if its_share > 0
            ),
            *_guess_words(guessed),
        ),
        where=costliest_places(
            evidence.trace, *(rows, np.array([int(share * 1e9) for share in shares], np.int64))
        ),
        remedies=tuple(_offer(_scannable(evidence, found, shares))),
    )


def _backward_shares(
    evidence: RankEvidence, window: StepWindow, found: Sequence[RecurrentCalls]
) -> list[float]:
    """Of the step of record, by recurrence."""
    on_host = evidence.on_host or any(one.recurrence.form != "layer" for one in found)
    top, dur_ns = _host_work(evidence, window) if on_host else _device_work(evidence)
    owner, backward = owners(evidence.trace, found, top)
    sums = [float(dur_ns[(owner == place) & backward].sum()) for place, _ in enumerate(found)]
    if not on_host:
        return [evidence.device_share(each) for each in sums]
    # Loops launch small kernels one by one: the host's calls take the time, on a GPU too.
    working = evidence.budget_share("compute", "operators", "python", "idle_launch")
    return [working * each / max(1.0, float(dur_ns.sum())) for each in sums]


def _host_work(evidence: RankEvidence, window: StepWindow) -> tuple[Int32s, Int64s]:
    host = evidence.trace.host
    inside = (host.start_ns >= window.start_ns) & (host.start_ns < window.end_ns)
    rows = np.flatnonzero(inside & (host.kind == HostKind.OPERATOR)).astype(np.int32)
    top = rows[outermost_operator(evidence.trace, rows) == rows]
    return top, host.dur_ns[top]


def _device_work(evidence: RankEvidence) -> tuple[Int32s, Int64s]:
    launched = evidence.launched
    return outermost_operator(evidence.trace, launched.operator), launched.dur_ns


def _shape_words(recurrence: Recurrence) -> str:
    layers = f"{recurrence.layers} layers, " if recurrence.layers > 1 else ""
    return (
        f"{layers}{recurrence.steps:,} steps, batch {recurrence.batch:,}, state of "
        f"{recurrence.size:,}"
    )


def _guess_words(guessed: bool) -> tuple[str, ...]:
    if not guessed:
        return ()
    return (
        "a guess from shapes: the same [batch, size] matmul with the same weight is repeated. It "
        "is no recurrence unless each call uses the previous result",
    )


def _scannable(
    evidence: RankEvidence, found: Sequence[RecurrentCalls], shares: Sequence[float]
) -> list[Recurrence]:
    """Plain recurrences that a scan is expected to take through faster, as the what-if does."""
    plain = [
        (one.recurrence, 1e3 * share * evidence.budget.step_ms)
        for one, share in zip(found, shares, strict=True)
        if one.recurrence.is_plain and one.recurrence.size <= LARGEST_SIZE
    ]
    if evidence.on_host:
        return [recurrence for recurrence, _ in plain]
    device = find_device(evidence.trace.device_name or "")
    processors = device.multiprocessors if device else _USUAL_MULTIPROCESSORS
    return [
        one
        for one, now_us in plain
        if gpu_scan_pays(
            now_us, (one.steps, one.batch, one.size, one.features), processors, one.layers
        )
    ]


def _offer(fitting: Sequence[Recurrence]) -> Iterator[Remedy]:
    yield remedies.TRUNCATE_BACKWARD.offer(
        "Measure how far back the gradient reaches: stepscope.fix.scan.gradient_horizon. If only N "
        "steps matter, detach the state every 2N steps"
    )
    if not fitting:
        return
    if any(one.form == "layer" for one in fitting):
        yield remedies.SCAN_BACKWARD.offer(
            "If the gradient reaches far (gradient_horizon), call "
            "stepscope.fix.scan.scan_backward(model): same parameters, another backward pass"
        )
    else:
        yield remedies.SCAN_BACKWARD.offer(
            "If the gradient reaches far (gradient_horizon), write the loop as one "
            "stepscope.fix.scan.ScanRNN"
        )
