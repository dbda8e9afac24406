"""loader-workers=N: what another number of DataLoader workers makes of the mean step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins
from msgspec.structs import replace
from test_stalls import a_bench, predict, stall

from stepscope import UsageError
from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.predict.engine import Bench
from stepscope.predict.whatifs.loader_workers import LoaderCosts, predict_workers, read_costs
from stepscope.records.rank_facts import HostLoad, LoaderUse, Making, Passing, PlainSteps, Sum
from stepscope.trace.read import ReadOptions, read_rank_inputs

MS = 1_000_000
PASSING = Passing(hand_over_ns=50_000, write_page_ns=1_000, read_page_ns=500)


def costs(compute_ms: float, make_ms: float, **changes: Any) -> LoaderCosts:
    usual: dict[str, Any] = {"idle_ns": 0.0, "compute_cores": 1.0, "tensors": 2, "pages": 4.0}
    return LoaderCosts(
        compute_ns=compute_ms * MS,
        make_ns=make_ms * MS,
        passes=PASSING,
        **{"cores": 2.0, **usual, **changes},
    )


def step_ms(at: LoaderCosts, workers: int) -> float:
    now = at.compute_ns + at.make_ns
    return predict_workers(at, workers, now).step_ns / MS


def test_without_workers_the_step_computes_and_makes() -> None:
    assert step_ms(costs(3.0, 2.0), 0) == pytest.approx(5.0)


def test_small_batches_take_longer_to_hand_over_than_to_make() -> None:
    small = costs(1.0, 0.5)
    assert min(step_ms(small, count) for count in (1, 2, 4, 8)) > 1.3 * step_ms(small, 0)


def test_a_dear_batch_is_made_beside_the_step_on_free_cores() -> None:
    dear = costs(20.0, 60.0, cores=8.0)
    assert 20.0 < step_ms(dear, 4) < 30.0 < step_ms(dear, 2) < step_ms(dear, 1) < 80.0


def test_workers_share_the_cores_with_the_training() -> None:
    """Two cores have 40 ms of work for each step of 80 ms, whatever the number of workers."""
    assert step_ms(costs(20.0, 60.0), 8) > 40.0


def test_a_loader_that_sleeps_gains_beyond_the_cores() -> None:
    sleeping = costs(5.0, 40.0, idle_ns=39.0 * MS)
    assert step_ms(sleeping, 8) < 0.5 * step_ms(sleeping, 2) < 0.5 * step_ms(sleeping, 0)


def test_each_tensor_and_each_page_of_a_batch_costs() -> None:
    assert step_ms(costs(8.0, 1.0, tensors=28), 2) > 8.0 + 28 * 0.3
    assert step_ms(costs(8.0, 1.0, pages=20_000.0), 2) > 8.0 + 10.0


def test_short_epochs_start_their_workers_again() -> None:
    short = costs(5.0, 5.0, cores=8.0, epoch_steps=10.0)
    lasting = replace(short, persistent=True)
    assert step_ms(short, 4) > step_ms(short, 0) > step_ms(lasting, 4)


def test_from_workers_to_more_workers_the_measured_step_counts() -> None:
    """What the model misses of the present step it misses of the other one, too."""
    now = costs(1.0, 0.5, now=2)
    measured = 1.5 * predict_workers(costs(1.0, 0.5), 2, 0.0).step_ns
    assert predict_workers(now, 4, measured).step_ns == pytest.approx(measured, rel=0.15)


# From what capture wrote


def test_a_loader_without_workers_shows_how_long_it_sleeps() -> None:
    loader = LoaderUse(workers=0, fetch=Sum(count=100, wall_ns=1000 * MS, cpu_ns=100 * MS))
    plain = PlainSteps(steps=100, wall_ns=1500 * MS, user_ns=600 * MS, system_ns=0)
    read = read_costs(
        loader, PASSING, HostLoad(threads=1, cores=4, plain=plain),
        step_ns=15 * MS, data_ns=10 * MS, host_ns=5 * MS, batches=1.0,
    )  # fmt: skip
    assert read is not None
    assert (read.make_ns, read.idle_ns) == (10 * MS, pytest.approx(9 * MS))
    assert read.compute_cores == pytest.approx(1.0)


def test_a_loader_with_workers_shows_what_a_batch_takes_to_make() -> None:
    making = Making(count=100, wall_ns=3000 * MS, cpu_ns=1000 * MS, core_wait_ns=500 * MS)
    loader = LoaderUse(workers=2, tensors=2, batch_bytes=4096, make=making)
    read = read_costs(
        loader, None, None, step_ns=20 * MS, data_ns=8 * MS, host_ns=12 * MS, batches=1.0
    )
    assert read is not None
    assert 5 * MS < read.compute_ns < 12 * MS  # without what the workers add
    assert read.idle_ns == 15 * MS
    assert read.idle_ns + 5 * MS <= read.make_ns <= read.idle_ns + 10 * MS
    assert read.passing_doubt > 0.5  # not tried on that machine


def test_too_few_batches_tell_nothing() -> None:
    few = LoaderUse(workers=0, fetch=Sum(count=2, wall_ns=MS, cpu_ns=MS))
    sizes: dict[str, Any] = {"step_ns": 2 * MS, "data_ns": MS, "host_ns": MS, "batches": 1.0}
    assert read_costs(few, None, None, **sizes) is None
    assert read_costs(LoaderUse(workers=2), None, None, **sizes) is None


def test_a_trace_without_a_captured_loader_is_refused(tmp_path: Path) -> None:
    bench = a_bench(tmp_path, stall("data", 8.0, 25))
    (refusal,) = predict(bench, "loader-workers=2").refused
    assert "no DataLoader" in refusal
    with pytest.raises(UsageError, match="or 0 for none"):
        predict(bench, "loader-workers=many")


# From a run folder to a prediction

RUN = Path(__file__).parent.parent / "golden/h200-resnet18"


def bench_with(folder: Path, **loader: Any) -> Bench:
    """A golden run whose loader was captured, too."""
    shutil.copytree(RUN, folder / "run")
    rank = folder / "run/rank-00000"
    facts = json.loads((rank / "rank.json").read_text())
    feeding = {"workers": 0, "trains": True, "batches": 500, **loader}
    facts["data"] = {"loaders": [feeding], "passing": to_builtins(PASSING)}
    (rank / "rank.json").write_text(json.dumps(facts))
    inputs = read_rank_inputs(rank / "trace.json.gz", ReadOptions(cache=False))
    return Bench(RankAnalysis(inputs))


COUNTED = {"count": 400, "wall_ns": 400 * MS, "cpu_ns": 400 * MS}


def test_a_captured_loader_has_a_prediction_for_other_numbers_of_workers(tmp_path: Path) -> None:
    bench = bench_with(tmp_path, fetch=COUNTED, tensors=2, batch_bytes=1 << 20)
    after = predict(bench, "loader-workers=2")
    assert not after.refused
    assert after.low_ms < after.predicted_ms < after.high_ms
    assert any("in a worker" in line for line in after.assumptions)
    (refusal,) = predict(bench, "loader-workers=0").refused
    assert refusal.endswith("the DataLoader has no workers already")


def test_a_dataset_that_only_yields_may_have_one_worker(tmp_path: Path) -> None:
    bench = bench_with(tmp_path, fetch=COUNTED, iterable=True, dataset="Stream")
    assert not predict(bench, "loader-workers=1").refused
    (refusal,) = predict(bench, "loader-workers=2").refused
    assert "Stream is an IterableDataset. Every worker would yield all of it" in refusal


def test_workers_that_are_ranks_point_to_those_of_the_loader(tmp_path: Path) -> None:
    after = predict(bench_with(tmp_path, fetch=COUNTED), "workers=1")
    assert any("loader-workers=N" in line for line in (*after.assumptions, *after.refused))


def test_times_of_nothing_are_no_error(tmp_path: Path) -> None:
    nothing = Passing(hand_over_ns=0, write_page_ns=0, read_page_ns=0)
    empty = LoaderCosts(
        compute_ns=0.0, compute_cores=0.0, make_ns=0.0, idle_ns=0.0, passes=nothing,
        tensors=0, pages=0.0, now=1,
    )  # fmt: skip
    for workers in (0, 1, 4):
        assert predict_workers(empty, workers, 1.0).step_ns > 0
    bench = bench_with(tmp_path, workers=2, batches=1, make={"count": 9, "wall_ns": 0})
    for workers in (0, 1):
        assert predict(bench, f"loader-workers={workers}").predicted_ms > 0
