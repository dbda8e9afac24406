"""Times a step's operators one by one, keeps the times, and sums them up."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING

from stepscope.errors import NotCapturedError, UsageError
from stepscope.predict.operator_library import LibraryProblemError, save_times
from stepscope.predict.probed_step import place_of
from stepscope.predict.step_operators import find_step_operators
from stepscope.records.operator_times import cpu_place
from stepscope.records.probe_modes import PRECISIONS
from stepscope.records.probe_report import (
    OUT_OF_TIME,
    ProbedOperator,
    ProbeReport,
    UnprobedOperator,
)
from stepscope.ui.probe_calls import StepProbe

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stepscope.predict.step_context import StepContext
    from stepscope.predict.step_operators import StepOperators
    from stepscope.records.operator_times import ProbedDevice
    from stepscope.records.prediction import Setting
    from stepscope.ui.probe_calls import CallGroup, Clock, Prober, Show

_HOST_PART = 0.15  # of the budget, at most: what autocast costs the host
_NO_OPERATOR = "no operator in the trace launched it"


def modes_of(settings: Sequence[Setting]) -> tuple[str, ...]:
    """The precisions and batches asked for: `bf16`, `batch=x2`. UsageError for anything that a
    probe cannot change."""
    for setting in settings:
        if setting.name not in ("precision", "batch"):
            raise UsageError(
                f"probe --set {setting}: operators can be timed with precision=... and "
                "batch=... only"
            )
        if setting.name == "precision" and setting.value not in PRECISIONS:
            raise UsageError(f"precision={setting.value}: choose one of {', '.join(PRECISIONS)}")
    names = (str(one) if one.name == "batch" else one.value for one in settings)
    return tuple(dict.fromkeys(names))


def probe_step(
    context: StepContext,
    precisions: Sequence[str],
    prober: Prober,
    *,
    budget_s: float,
    show: Show = lambda *_: None,
    clock: Clock = time.monotonic,
) -> ProbeReport:
    """Raises NotCapturedError for a trace without shapes."""
    began = clock()
    operators = find_step_operators(context)
    if not operators.calls or not operators.item_ns.sum():
        raise NotCapturedError(
            f"{context.trace.path} has no operator shapes. Record the trace with record_shapes=True"
        )
    device = prober.device()
    started = clock()  # a process that loads torch takes its time, which is not the budget's
    probe = StepProbe(context, operators, precisions, prober)
    if device.kind != "cpu":  # a CPU's operators are the host's own time
        probe.time_host(started + _HOST_PART * budget_s, clock)
    probe.time_calls(started + budget_s, show, clock)
    place, notes = _place(context, device), [*_elsewhere(context, device), *_left_out(probe)]
    saved = 0
    try:
        times = probe.times(place, device.software)
        save_times(times)
        saved = len(times)
    except LibraryProblemError as problem:
        notes.append(f"{problem}. The times are not saved")
    total_ns = max(float(operators.item_ns.sum()), 1.0)
    unprobed = [*_untimed(probe, total_ns), *_without_operator(context, operators, total_ns)]
    timed = [group for group in probe.groups if _is_timed(probe, group)]
    alike = [(group, ns) for group in probe.groups if (ns := _probed_ns(probe, group, 0))]
    return ProbeReport(
        place=place,
        traced_place=place_of(context),
        software=device.software,
        modes=tuple(probe.modes)[1:],
        operators=tuple(_row(probe, group) for group in probe.groups if group.traced_ns),
        unprobed=tuple(sorted(unprobed, key=lambda row: -row.share)),
        traced_ms=total_ns / 1e6,
        probed_share=sum(group.traced_ns for group in timed) / total_ns,
        same_traced_ms=sum(group.traced_ns for group, _ in alike) / 1e6,
        same_probed_ms=sum(ns for _, ns in alike) / 1e6,
        host_added_ms=_host_added(probe),
        budget_s=budget_s,
        wall_s=clock() - began,
        saved=saved,
        notes=tuple(notes),
    )


def _probed_ns(probe: StepProbe, group: CallGroup, number: int) -> float | None:
    """All calls of the group in a mode."""
    spent = probe.spent_ns(group, number)
    return None if spent is None else spent * group.count


def _is_timed(probe: StepProbe, group: CallGroup) -> bool:
    return all(probe.spent_ns(group, number) is not None for number in range(len(probe.modes)))


def _row(probe: StepProbe, group: CallGroup) -> ProbedOperator:
    spent = [_probed_ns(probe, group, number) for number in range(len(probe.modes))]
    return ProbedOperator(
        name=group.made[0].name,
        shapes=group.made[0].shapes,
        count=group.count,
        traced_ms=group.traced_ns / 1e6,
        probed_ms=None if spent[0] is None else spent[0] / 1e6,
        modes_ms={
            mode: ns / 1e6
            for mode, ns in zip(tuple(probe.modes)[1:], spent[1:], strict=True)
            if ns is not None
        },
        spread=probe.spread(group),
    )


def _untimed(probe: StepProbe, total_ns: float) -> Iterator[UnprobedOperator]:
    for group in probe.groups:
        for number, mode in enumerate(probe.modes):
            if group.traced_ns and probe.spent_ns(group, number) is None:
                yield UnprobedOperator(
                    name=group.made[0].name,
                    shapes=group.made[0].shapes,
                    mode=mode,
                    share=group.traced_ns / total_ns,
                    why=probe.why_not(group, number) or OUT_OF_TIME,
                )


def _without_operator(
    context: StepContext, operators: StepOperators, total_ns: float
) -> Iterator[UnprobedOperator]:
    """What cannot be rebuilt at all: collectives, compiled kernels, copies from the host."""
    graph, trace = context.graph, context.trace
    around = graph.calls.operator if context.on_host else graph.calls.operator[graph.tasks.call]
    free = operators.owner < 0
    lost: dict[str, float] = defaultdict(float)
    for row, ns in zip(around[free].tolist(), operators.item_ns[free].tolist(), strict=True):
        lost[trace.strings[trace.host.name[row]] if row >= 0 else "kernels"] += ns
    for name, ns in lost.items():
        if ns:
            share = ns / total_ns
            yield UnprobedOperator(name=name, shapes="", mode="", share=share, why=_NO_OPERATOR)


def _host_added(probe: StepProbe) -> dict[str, float]:
    """By precision, as far as it was measured."""
    added = {mode: probe.host_added_ns(number) for number, mode in enumerate(probe.modes) if number}
    return {mode: ns / 1e6 for mode, ns in added.items() if ns is not None}


def _place(context: StepContext, device: ProbedDevice) -> str:
    """The trace's own name if the probe ran where the trace did."""
    if device.kind != "cpu":
        return device.place
    load = context.cpu.load if context.cpu else None
    return cpu_place(device.host, load.threads if load and context.on_host else 0)


def _left_out(probe: StepProbe) -> list[str]:
    return [
        f"{change} is not timed: the trace does not say its batch, or the new batch is not a "
        "whole number of samples"
        for change in probe.left_out
    ]


def _elsewhere(context: StepContext, device: ProbedDevice) -> list[str]:
    traced, here = place_of(context), _place(context, device)
    if traced is None or traced == here:
        return []
    if not context.on_host and device.kind != "cpu":
        return [
            f"the trace ran on {traced}, the probe on {here}. `whatif --set gpu=` and `gpus` "
            "use these times; other predictions for this trace do not"
        ]
    return [
        f"the trace ran on {traced}, the probe on {here}. Predictions for this trace do not "
        f"use these times. Probe on {traced}, or carry the library over (stepscope probe "
        "export)"
    ]
