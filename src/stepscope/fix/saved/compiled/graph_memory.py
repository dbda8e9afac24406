"""Simulate memory and time of a step whose backward recomputes some values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepscope.fix.saved.compiled.joint_graph import (
    ELEMENT,
    PLACEHOLDER,
    POINTWISE,
    REDUCTION,
    GraphValue,
    JointGraph,
)
from stepscope.fix.saved.compiled.operator_costs import DeviceSpeed


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """Of one graph, without what is in memory before and after the step."""

    saved_bytes: int
    peak_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    time_ns: int


def kept_values(graph: JointGraph, repeated: set[GraphValue]) -> list[GraphValue]:
    """Return what forward hands to backward, in forward's order."""
    needed = {value for value in graph.saved if value not in repeated}
    return sorted(needed | read_again(repeated), key=lambda value: value.number)


def read_again(repeated: set[GraphValue]) -> set[GraphValue]:
    """Return what repetitions start from."""
    return {source for value in repeated for source in value.inputs if source not in repeated}


def backward_order(graph: JointGraph, repeated: set[GraphValue]) -> list[GraphValue]:
    """Return backward's operators, with each repetition before its first reader."""
    order: list[GraphValue] = []
    done: set[GraphValue] = set()

    def repeat(value: GraphValue) -> None:
        waiting, missing = [value], set[GraphValue]()
        while waiting:
            source = waiting.pop()
            if source in repeated and source not in done and source not in missing:
                missing.add(source)
                waiting += source.inputs
        order.extend(sorted(missing, key=lambda source: source.number))
        done.update(missing)

    for value in graph.backward:
        for source in value.inputs:
            repeat(source)
        order.append(value)
    return order


def simulate(graph: JointGraph, repeated: set[GraphValue], speed: DeviceSpeed) -> SimulatedStep:
    kept = kept_values(graph, repeated)
    kept_bytes = sum(value.size_bytes for value in kept if not value.free)
    stays = {*kept, *graph.outputs}
    operators = [value for value in graph.forward if value.kind != PLACEHOLDER]
    apart = set(graph.saved) if graph.exact else set[GraphValue]()  # written even if only fused
    forward = _run(operators, stays, apart, speed)
    order = backward_order(graph, repeated)
    held = sum(value.size_bytes for value in graph.outputs if not value.free)
    backward = _run(order, graph.gradients, apart, speed, kept)
    return SimulatedStep(
        saved_bytes=kept_bytes,
        peak_bytes=max(forward[0], backward[0] + held),
        forward_peak_bytes=forward[0],
        backward_peak_bytes=backward[0] + held,
        time_ns=forward[1] + backward[1],
    )


def _run(
    order: Sequence[GraphValue],
    stays: Iterable[GraphValue],
    apart: set[GraphValue],
    speed: DeviceSpeed,
    given: Iterable[GraphValue] = (),
) -> tuple[int, int]:
    """Return the peak and the time of operators in this order.

    Pointwise values that only pointwise operators read are fused into these: they take no memory,
    and what they read is read by the kernel that they end in.
    """
    users: dict[GraphValue, list[int]] = {}
    for position, value in enumerate(order):
        for source in value.inputs:
            users.setdefault(source, []).append(position)
    last_use: dict[GraphValue, int] = dict.fromkeys(stays, len(order))
    written = [False] * len(order)
    used_at = [0] * len(order)  # where a fused value's kernel runs
    for position in range(len(order) - 1, -1, -1):
        value = order[position]
        readers = users.get(value, ())
        fused = value.kind == POINTWISE and value not in apart and last_use.get(value) != len(order)
        fused = fused and all(order[reader].kind in (POINTWISE, REDUCTION) for reader in readers)
        written[position] = not fused
        used_at[position] = (
            position if not fused else max((used_at[r] for r in readers), default=position)
        )
        for source in value.inputs:
            if last_use.get(source, -1) < used_at[position]:
                last_use[source] = used_at[position]
    return _sweep(order, written, used_at, last_use, speed, given)


def _sweep(
    order: Sequence[GraphValue],
    written: list[bool],
    used_at: list[int],
    last_use: dict[GraphValue, int],
    speed: DeviceSpeed,
    given: Iterable[GraphValue],
) -> tuple[int, int]:
    freed_at: dict[int, list[GraphValue]] = {}
    level = 0
    for value in given:
        if not value.free:
            level += value.size_bytes
            freed_at.setdefault(last_use.get(value, 0), []).append(value)
    peak, time_ns = level, 0
    reads: set[GraphValue] = set()  # of the kernels since the last that cannot be fused
    fused: set[GraphValue] = set()
    fused_reads: dict[int, set[GraphValue]] = {}
    for position, value in enumerate(order):
        read = {source for source in value.inputs if source not in fused}
        if not written[position]:
            fused.add(value)
            fused_reads.setdefault(used_at[position], set()).update(read)
            continue
        read |= fused_reads.pop(position, set())
        dying = freed_at.pop(position, [])
        reusable = value.kind == POINTWISE and any(
            source.size_bytes == value.size_bytes for source in dying
        )
        level += value.size_bytes
        peak = max(peak, level - (value.size_bytes if reusable else 0))
        level -= sum(source.size_bytes for source in dying)
        if last_use.get(value, position) <= position:
            level -= value.size_bytes
        else:
            freed_at.setdefault(last_use[value], []).append(value)
        if value.kind in (POINTWISE, REDUCTION):
            new = read - reads
            moved = value.size_bytes + sum(source.size_bytes for source in new)
            time_ns += speed.move_ns(moved) + speed.launch_ns
            reads |= new | {value}
        elif value.kind != ELEMENT:
            time_ns += value.cost_ns
            reads = set()
    return peak, time_ns
