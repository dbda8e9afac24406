"""A bench of many rows in a few sentences."""

from __future__ import annotations

import pytest
from made_results import made_results, made_workload
from msgspec.structs import replace

from stepscope.ui.bench.words import bench_answer
from stepscope.ui.terminal.bench import print_bench


def test_what_was_not_run_for_one_reason_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    measured, *others = made_results(12).workloads
    stopped = [replace(row, status="not run", why="interrupted") for row in others]
    results = replace(made_results(12), workloads=(measured, *stopped), scaling=())
    assert bench_answer(results).verdict.endswith(" and 5 more")
    print_bench(results, {}, width=100)
    lines = capsys.readouterr().out.splitlines()
    (reason,) = [line for line in lines if line.endswith(": not run: interrupted")]
    assert all(row.name in reason for row in stopped)


def test_places_of_a_study_are_rows_with_names_of_their_own() -> None:
    small = made_workload(0, settings={"batch": 8}, busy=0.2)
    large = made_workload(0, settings={"batch": 64}, busy=0.9)
    answer = bench_answer(replace(made_results(1), workloads=(small, large)))
    assert answer.verdict.startswith("2 rows measured")
    assert "20% (resnet50, batch 8, 1 rank) to 90% (resnet50, batch 64, 1 rank)" in answer.why


def test_shares_that_read_alike_are_said_once() -> None:
    rows = tuple(made_workload(place, busy=0.981 + place / 1e4, cpu=None) for place in range(3))
    answer = bench_answer(replace(made_results(1), workloads=rows))
    assert "the device works for 98% of the step" in answer.why
