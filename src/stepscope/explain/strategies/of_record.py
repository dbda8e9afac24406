"""Strategies in milliseconds of the step of record, as the budget has it.

A strategy is measured in the profiler's window. The budget scales that window to the step of
record: device work by one factor, the host's idle time by another. Communication is scaled by the
device's factor, so that the strategies' exposed communication adds up to the budget's. A pipeline's
bubble contains idle time too, so its stages are scaled as a whole, with unchanged shares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from stepscope.records.strategies import Pipeline, TensorParallel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.explanation import Budget
    from stepscope.records.job import RankSteps
    from stepscope.records.strategies import Strategy

_S = TypeVar("_S", bound=Struct)


def strategy_of_record(strategy: Strategy, budget: Budget, paces: Sequence[RankSteps]) -> Strategy:
    """`paces` are the windows of the ranks that the budget and the strategy average over."""
    paces = [pace for pace in paces if len(pace)]
    step_ns = sum(float(pace.dur_ns.mean()) for pace in paces) / max(1, len(paces))
    if not step_ns or not budget.step_ms:
        return strategy
    whole = 1e6 * budget.step_ms
    if isinstance(strategy, Pipeline):
        return _scaled(strategy, whole / step_ns)
    of_comm = _comm_factor(budget, paces) or whole / step_ns
    scaled: Strategy = _communication(strategy, of_comm, round(whole))
    return scaled


def _comm_factor(budget: Budget, paces: Sequence[RankSteps]) -> float | None:
    """From the window to the step of record: exposed communication's factor, else compute's."""
    ms = {part.id: part.ms for part in budget.parts}
    exposed = sum(float(pace.exposed_comm_ns.mean()) for pace in paces) / len(paces)
    if exposed and ms["exposed_comm"]:
        return 1e6 * ms["exposed_comm"] / exposed
    computing = sum(float(pace.compute_ns.mean()) for pace in paces) / len(paces)
    return 1e6 * ms["compute"] / computing if computing and ms["compute"] else None


def _communication(strategy: Any, factor: float, step_ns: int) -> Any:
    """Scale all of its times, and recompute its shares."""
    scaled = replace(_scaled(strategy, factor), step_ns=step_ns)
    scaled = replace(scaled, exposed_share=scaled.exposed_ns / step_ns)
    if isinstance(scaled, TensorParallel):
        return replace(scaled, comm_share=scaled.comm_ns / step_ns)
    return scaled


def _scaled(record: _S, factor: float) -> _S:
    """Scale all fields in nanoseconds, including those of nested records."""
    changed: dict[str, Any] = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if name.endswith("_ns") and value is not None:
            changed[name] = round(value * factor)
        elif isinstance(value, tuple) and value and isinstance(value[0], Struct):
            changed[name] = tuple(_scaled(inner, factor) for inner in value)
    return replace(record, **changed)
