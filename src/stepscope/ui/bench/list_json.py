"""`bench --list --json`: what every workload says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.bench.workload import TrainingWorkload


def list_json(workloads: Sequence[TrainingWorkload]) -> dict[str, Any]:
    return {"schema": 1, "workloads": [_workload(workload) for workload in workloads]}


def _workload(workload: TrainingWorkload) -> dict[str, Any]:
    return {
        "name": workload.name,
        "task": workload.task,
        "source": workload.source,
        "samples": workload.samples,
        "tags": sorted(workload.tags),
        "sizes": {
            size: {
                "settings": dict(settings),
                "target_loss": workload.targets[size].loss,
                "target_steps": workload.targets[size].steps,
            }
            for size, settings in workload.sizes.items()
        },
    }
