"""What each workload is compared with: an earlier file, or the same workload without remedies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.records.figures import milliseconds
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stepscope.records.bench_result import BenchResults, WorkloadResult

SLOWER, FASTER, SAME = "slower", "faster", "no difference seen"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadChange:
    """The change of the step, as a share of the step before; the ends are of its interval."""

    before: WorkloadResult
    change: float
    low: float | None
    high: float | None
    verdict: str
    lines: tuple[str, ...]  # for a tip


def find_changes(
    measured: Mapping[str, WorkloadResult], against: BenchResults | None
) -> dict[str, WorkloadChange]:
    """By key, for workloads that have a counterpart: in `against`, else the one as it is."""
    olds = against.workloads if against else measured.values()
    partners = {_identity(old, remedies=against is not None): old for old in _plain(olds, against)}
    changes = {}
    for key, now in measured.items():
        before = partners.get(_identity(now, remedies=against is not None))
        if before is not None and before is not now:
            change = _change(before, now)
            if change is not None:
                changes[key] = change
    return changes


def _plain(results: Iterable[WorkloadResult], against: BenchResults | None) -> list[WorkloadResult]:
    return [result for result in results if against is not None or not result.remedies]


def _identity(result: WorkloadResult, *, remedies: bool) -> tuple[object, ...]:
    settings = tuple(sorted((name, str(value)) for name, value in result.settings.items()))
    return (
        result.name,
        result.size,
        result.ranks,
        settings,
        result.remedies if remedies else (),
    )


def _change(before: WorkloadResult, now: WorkloadResult) -> WorkloadChange | None:
    if not before.step_ms or not now.step_ms:
        return None
    low = high = None
    verdict = SAME
    if before.low and before.high and now.low and now.high and now.samples_per_s:
        # The widest that both intervals allow: an alarm needs them apart.
        low, high = before.low / now.high - 1, before.high / now.low - 1
        verdict = SLOWER if low > 0 else FASTER if high < 0 else SAME
    name = ", ".join(map(one_line, before.remedies)) or "as it is"
    steps = f"{milliseconds(before.step_ms)} before, {milliseconds(now.step_ms)} now"
    return WorkloadChange(
        before=before,
        change=now.step_ms / before.step_ms - 1,
        low=low,
        high=high,
        verdict=verdict,
        lines=(steps, f"against {name}"),
    )
