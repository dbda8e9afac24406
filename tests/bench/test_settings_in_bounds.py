"""--set refuses what no training can have, before anything runs."""

from __future__ import annotations

import pytest

from stepscope.bench.task import BenchTask, check_task
from stepscope.bench.workload import Target, TrainingWorkload
from stepscope.errors import UsageError

WORKLOAD = TrainingWorkload(
    name="one",
    task="sums",
    source="this test",
    samples="rows",
    sizes={"tiny": {"batch": 8, "layers": 2, "lr": 0.1, "shift": -1.0, "kind": "gru"}},
    targets={"tiny": Target(loss=1.0, steps=60)},
    build=lambda _config, _place: lambda _number: None,  # type: ignore[arg-type, return-value]
)


def check(text: str) -> BenchTask:
    name, _, value = text.partition("=")
    return check_task(BenchTask(workload=WORKLOAD, size="tiny", changes={name: value}))


@pytest.mark.parametrize(
    "text", ["batch=0", "batch=-3", "batch=2.5", "layers=-1", "lr=nan", "lr=inf", "lr=-0.1"]
)
def test_impossible_values_are_refused_with_the_usual_one(text: str) -> None:
    with pytest.raises(UsageError, match=r"--set .*: one needs a value such as"):
        check(text)


@pytest.mark.parametrize("text", ["batch=1", "layers=0", "lr=0", "shift=-2", "kind=lstm"])
def test_what_a_training_can_have_is_taken(text: str) -> None:
    assert check(text).changes
