"""Runs made by hand, for tests of what findings say about them."""

from __future__ import annotations

from typing import Any

from stepscope.records.run import ACCOUNT, AccountPart, RankRun, RunAccount, Stall, StepTimes


def times(**changes: Any) -> StepTimes:
    usual: dict[str, Any] = {
        "steps": 1000, "mean_ms": 55.0, "low_ms": 54.0, "high_ms": 56.0, "median_ms": 38.0,
        "typical_ms": 38.0, "p99_ms": 110.0, "longest_ms": 140.0, "variation": 0.01,
    }  # fmt: skip
    return StepTimes(**(usual | changes))


def stall(cause: Any, **changes: Any) -> Stall:
    """Every 4th step takes 68 ms longer: 17 ms of a mean step of 55 ms."""
    usual: dict[str, Any] = {
        "cause": cause, "steps": 250, "cost_ms": 17.0, "share": 17 / 55, "typical_ms": 68.0,
        "longest_ms": 81.0, "period": 4, "numbers": (203, 7, 11),
    }  # fmt: skip
    return Stall(**(usual | changes))


def run(*stalls: Stall, **changes: Any) -> RankRun:
    usual: dict[str, Any] = {
        "rank": 0, "steps": 1010, "warm_up": 10, "times": times(), "stalls": stalls,
    }  # fmt: skip
    return RankRun(**(usual | changes))


def healthy_run(**changes: Any) -> RankRun:
    """Steps of 30 ms that vary by 1%, with one stall that costs nearly nothing."""
    steady = times(mean_ms=30.1, typical_ms=30.0, median_ms=30.0, p99_ms=30.7, longest_ms=60.0)
    small = [
        stall(cause, steps=1, cost_ms=0.03, share=0.001, period=None, typical_ms=30.0)
        for cause in ("data", "gc", "compile", "allocator", "logging", "unknown", "evaluation")
    ]
    return run(*small, **({"times": steady, "account": account(start_up=3.0)} | changes))


def account(wall_s: float = 100.0, **seconds: float) -> RunAccount:
    """Training takes what the parts, in seconds, leave."""
    sums = dict.fromkeys(ACCOUNT, 0.0) | seconds
    sums["training"] = wall_s - sum(sums.values())
    return RunAccount(
        wall_ms=1e3 * wall_s,
        goodput=sums["training"] / wall_s,
        parts=tuple(
            AccountPart(id=name, ms=1e3 * took, share=took / wall_s) for name, took in sums.items()
        ),
    )
