"""Prove that a schedule computes its collective."""

from __future__ import annotations

from stepscope.records.collective_schedules import (
    CollectiveSchedule,
    WrongScheduleError,
    simulate,
)


def prove(schedule: CollectiveSchedule) -> None:
    """Every rank ends with what the collective promises, each contribution counted once."""
    *_, held = simulate(schedule)
    whole = frozenset(range(schedule.ranks))
    for rank in range(schedule.ranks):
        for chunk in range(schedule.ranks):
            if schedule.kind == "reduce_scatter" and rank != chunk:
                continue
            wanted = frozenset({chunk}) if schedule.kind == "all_gather" else whole
            if held[rank][chunk] != wanted:
                raise WrongScheduleError(
                    f"{schedule.algorithm} {schedule.kind}, {schedule.ranks} ranks: rank {rank} "
                    f"ends with {sorted(held[rank][chunk])} in chunk {chunk}"
                )
