"""Strategies in milliseconds of the step of record, as the budget has it.

A strategy is measured in the profiler's window. The budget brings that window to the step of
record: what ran on the device by one factor, the host's idle time by another. The same factor
brings communication there, so that the strategies' exposed communication adds up to the budget's.
A pipeline's bubble holds idle time too: its stages are brought there as a whole, shares unchanged.
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
    """`paces` are the windows of the ranks that the budget and the strategy are means of."""
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
    """From the window's mean step to the step of record, for communication; for all of the device's
    work where none is exposed."""
    ms = {part.id: part.ms for part in budget.parts}
    exposed = sum(float(pace.exposed_comm_ns.mean()) for pace in paces) / len(paces)
    if exposed and ms["exposed_comm"]:
        return 1e6 * ms["exposed_comm"] / exposed
    computing = sum(float(pace.compute_ns.mean()) for pace in paces) / len(paces)
    return 1e6 * ms["compute"] / computing if computing and ms["compute"] else None


def _communication(strategy: Any, factor: float, step_ns: int) -> Any:
    """Every time of it by the factor, and the shares that follow."""
    found = replace(_scaled(strategy, factor), step_ns=step_ns)
    found = replace(found, exposed_share=found.exposed_ns / step_ns)
    if isinstance(found, TensorParallel):
        return replace(found, comm_share=found.comm_ns / step_ns)
    return found


def _scaled(record: _S, factor: float) -> _S:
    """All fields that are nanoseconds, in the records inside it too."""
    changed: dict[str, Any] = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if name.endswith("_ns") and value is not None:
            changed[name] = round(value * factor)
        elif isinstance(value, tuple) and value and isinstance(value[0], Struct):
            changed[name] = tuple(_scaled(each, factor) for each in value)
    return replace(record, **changed)
