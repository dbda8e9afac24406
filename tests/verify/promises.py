"""Promises and deliveries of our choosing: 20 ms before, 16 ms promised, 15 to 17."""

from __future__ import annotations

from typing import Any

from stepscope.records.folders import node_name
from stepscope.records.prediction import Delivery, Promise, Setting, TrackedPromise, Workload

WORKLOAD = Workload(script="train.py", world_size=1)


def promise(name: str = "precision=bf16", **changes: Any) -> Promise:
    settings = tuple(
        Setting(name=n, value=v) for n, _, v in (w.partition("=") for w in name.split())
    )
    values = {
        "id": f"id{changes.get('when_unix', 1.0)}",
        "when_unix": 1.0,
        "host": node_name(),
        "settings": settings,
        "baseline_ms": 20.0,
        "predicted_ms": 16.0,
        "low_ms": 15.0,
        "high_ms": 17.0,
        "workload": WORKLOAD,
    }
    return Promise(**(values | changes))


def delivery(**changes: Any) -> Delivery:
    values = {
        "promise": "id1.0",
        "when_unix": 2.0,
        "a_ms": 20.0,
        "b_ms": 16.0,
        "change": -0.2,
        "low": -0.22,
        "high": -0.18,
        "seen": ("precision fp32 -> bf16",),
        "confidence": 0.95,
        "verdict": "faster",
    }
    return Delivery(**(values | changes))


def kept(delivered_ms: float, **changes: Any) -> TrackedPromise:
    made = promise(**changes)
    change = delivered_ms / made.baseline_ms - 1
    told = delivery(promise=made.id, a_ms=made.baseline_ms, b_ms=delivered_ms, change=change)
    return TrackedPromise(promise=made, delivery=told)
