"""Consistency, simulated: on paper with three workers, and against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from stepscope.errors import UsageError
from stepscope.predict.parameter_server import (
    ServerTimes,
    block_length,
    blocked_share,
    draw_runs,
    find_staleness,
    needed_clocks,
    promise_throughput,
    simulate_clocks,
    simulate_queued,
    updates_per_second,
)
from stepscope.records.change_values import Consistency
from stepscope.records.job import WorkerTimes
from stepscope.records.prediction import Setting
from stepscope.ui.api import open_bench

MS = 1e6
# Three workers, four steps: each of the first three steps is slow on another worker.
PAPER = np.array([[10, 10, 30], [10, 30, 10], [30, 10, 10], [10, 10, 10]]) * MS


def of(text: str) -> Consistency:
    return Consistency.parse(text)


def times_of(own, side_by_side: bool = True) -> WorkerTimes:
    columns = np.asarray(own, np.float64).T
    return WorkerTimes(
        workers=tuple(range(len(columns))),
        own_ns=tuple(np.ascontiguousarray(columns)),
        side_by_side=side_by_side,
        source="every step",
    )


def transient(steps: int, workers: int, seed: int = 5) -> WorkerTimes:
    own = np.full((steps, workers), 20 * MS)
    slow = np.random.default_rng(seed).integers(0, workers, steps)
    own[np.arange(steps), slow] *= 3
    return times_of(own)


def persistent(steps: int, workers: int) -> WorkerTimes:
    own = np.full((steps, workers), 20 * MS)
    own[:, 0] *= 3
    return times_of(own)


def ends(consistency: str) -> list[list[float]]:
    return (simulate_clocks(PAPER[None], of(consistency)).end_ns[0] / MS).tolist()


def test_with_a_barrier_every_step_ends_after_the_slowest_of_the_last() -> None:
    assert ends("strong") == [[10, 10, 30], [40, 60, 40], [90, 70, 70], [100, 100, 100]]
    assert ends("bounded:0") == ends("strong")


def test_a_bound_of_one_lets_workers_be_one_step_ahead() -> None:
    # Worker 0 may start its third step when worker 2 has ended its first: 30, not 20.
    assert ends("bounded:1") == [[10, 10, 30], [20, 40, 40], [60, 50, 50], [70, 60, 60]]
    simulated = simulate_clocks(PAPER[None], of("bounded:1"))
    assert blocked_share(simulated) == pytest.approx(10 / 140)
    assert find_staleness(simulated, of("bounded:1")).counts == (7, 5)


def test_without_waiting_every_worker_adds_up_its_own_steps() -> None:
    expected = np.cumsum(PAPER / MS, axis=0).tolist()
    assert ends("eventual") == ends("weak:2") == expected
    assert ends("bounded:3") == expected  # nobody gets further ahead in four steps


def test_a_weak_reader_keeps_the_age_of_its_copy() -> None:
    own = np.full((1, 4, 2), 10 * MS)
    simulated = simulate_clocks(own, of("weak:2"))
    # Copies of clocks 0 and 2 are read at once and used for one step more.
    assert find_staleness(simulated, of("weak:2")).counts == (4, 4)
    assert find_staleness(simulated, of("eventual")).counts == (8,)


def test_a_shard_serves_one_request_after_the_other() -> None:
    server = ServerTimes(pull_ns=(1 * MS,), push_ns=(2 * MS,))
    own = np.full((1, 2, 2), 10 * MS)
    for consistency in ("eventual", "strong"):
        simulated = simulate_queued(own, of(consistency), server)
        # Pulls end at 1 and 2; pushes come at 11 and 12 and end at 13 and 15; and so on.
        assert (simulated.end_ns[0, 0] / MS).tolist() == [13, 15]
        assert simulated.end_ns[0, 1, 0] / MS == 28
    assert server.busy_ns == 3 * MS


def test_a_request_waits_for_the_slowest_shard() -> None:
    server = ServerTimes(pull_ns=(1 * MS, 4 * MS), push_ns=(0.0, 2 * MS))
    simulated = simulate_queued(np.full((1, 1, 1), 10 * MS), of("eventual"), server)
    assert simulated.end_ns[0, 0, 0] / MS == 16


@pytest.mark.parametrize("consistency", ["strong", "bounded:1", "bounded:4", "eventual"])
def test_a_server_without_work_changes_nothing(consistency: str) -> None:
    own = draw_runs(transient(50, 3), runs=3, steps=30)
    free = simulate_clocks(own, of(consistency))
    queued = simulate_queued(own, of(consistency), ServerTimes(pull_ns=(0.0,), push_ns=(0.0,)))
    known = np.isfinite(queued.end_ns)
    assert known.sum() > 0.6 * known.size
    assert np.allclose(queued.end_ns[known], free.end_ns[known])
    assert np.allclose(queued.start_ns[known], free.start_ns[known])
    assert updates_per_second(queued) == pytest.approx(updates_per_second(free), rel=0.1)


def test_a_saturated_server_gives_its_own_rate() -> None:
    server = ServerTimes(pull_ns=(4 * MS,), push_ns=(6 * MS,))
    promise = promise_throughput(persistent(100, 8), of("eventual"), server)
    assert promise.queued
    assert promise.updates_per_s == pytest.approx(100, rel=0.02)  # 10 ms of its time per update


def test_strong_is_the_expected_slowest_worker() -> None:
    promise = promise_throughput(transient(400, 4), of("strong"))
    assert promise.updates_per_s == pytest.approx(4 / 0.060, rel=0.002)
    assert promise.step_ms == pytest.approx(60, rel=0.002)
    assert promise.low < promise.updates_per_s < promise.high
    assert promise.staleness.largest == 0


def test_eventual_is_the_sum_of_the_rates() -> None:
    promise = promise_throughput(persistent(300, 4), of("eventual"))
    assert promise.updates_per_s == pytest.approx(3 / 0.020 + 1 / 0.060, rel=0.01)
    assert promise.blocked_share == 0


@pytest.mark.parametrize("bound", [1, 3, 10])
def test_bounded_comes_down_to_the_rate_of_a_persistent_straggler(bound: int) -> None:
    promise = promise_throughput(persistent(300, 4), of(f"bounded:{bound}"))
    assert promise.updates_per_s == pytest.approx(4 / 0.060, rel=0.01)
    assert promise.staleness.largest == bound


def test_bounded_comes_near_the_mean_pace_with_transient_stragglers() -> None:
    times = transient(2_000, 4)
    steps = [promise_throughput(times, of(f"bounded:{bound}")).step_ms for bound in (0, 1, 3, 10)]
    assert steps[0] == pytest.approx(60, rel=0.002)
    assert steps == sorted(steps, reverse=True)
    assert 30 < steps[-1] < 33  # every worker's mean is 30


def test_longer_spells_need_a_larger_bound() -> None:
    """The same share of slow steps, alone or in spells of ten on one worker."""
    alone, spells = np.full((2, 1_000, 4), 20 * MS)
    rng = np.random.default_rng(1)
    alone[np.arange(1_000), rng.integers(0, 4, 1_000)] *= 3
    spells[np.arange(1_000), np.repeat(rng.integers(0, 4, 100), 10)] *= 3
    assert block_length(np.ascontiguousarray(spells[:, 0])) > 30
    one, other = (promise_throughput(times_of(own), of("bounded:2")) for own in (alone, spells))
    assert one.updates_per_s > 1.25 * other.updates_per_s


def test_drawn_runs_keep_medians_and_what_comes_together() -> None:
    own = np.full((200, 2), 10 * MS)
    own[::50] += 90 * MS  # both workers at once, as with an evaluation
    runs = draw_runs(times_of(own), runs=4, steps=300)
    assert runs.shape == (4, 300, 2)
    assert (runs[:, :, 0] == runs[:, :, 1]).all()
    assert set(np.unique(runs)) == {10 * MS, 100 * MS}
    apart = draw_runs(times_of(own, side_by_side=False), runs=4, steps=300)
    assert (apart[:, :, 0] != apart[:, :, 1]).any()


def test_sixty_four_workers_and_ten_thousand_steps() -> None:
    promise = promise_throughput(transient(10_000, 64), of("bounded:3"))
    assert promise.steps == 10_000
    assert 20 < promise.step_ms < 25


@pytest.mark.parametrize(
    ("text", "needed"),
    [("strong", [0, 1, 2, 3]), ("bounded:2", [0, 0, 0, 1]), ("eventual", [0, 0, 0, 0])],
)
def test_what_all_workers_must_have_reached(text: str, needed: list[int]) -> None:
    assert needed_clocks(of(text), 3).tolist() == needed


@pytest.mark.parametrize("text", ["", "bound:3", "bounded", "bounded:-1", "strong:2", "weak:x"])
def test_an_unknown_consistency_says_what_to_write(text: str) -> None:
    with pytest.raises(UsageError, match='use "strong", "bounded:3"'):
        of(text)


# As a what-if of a synchronous run


def bench_with(golden, times: WorkerTimes | None):
    bench, _, _ = open_bench(str(golden / "cpu-two-ranks"), cache=False, quiet=True)
    job = replace(bench.context.job, own_times=times)
    bench.context = replace(bench.context, job=job)
    return bench


def test_the_step_shrinks_by_what_the_simulation_saves(golden) -> None:
    bench = bench_with(golden, transient(400, 2))
    prediction = bench.predict([Setting(name="consistency", value="eventual")])
    assert not prediction.refused
    # Of two workers one takes 60 ms and the other 20: 60 with a barrier, 40 without.
    assert prediction.predicted_ms / prediction.baseline_ms == pytest.approx(40 / 60, rel=0.03)
    assert prediction.low_ms < prediction.predicted_ms < prediction.high_ms
    promise = prediction.consistency
    assert promise.updates_per_s == pytest.approx(2e3 / prediction.predicted_ms)
    assert promise.low == pytest.approx(2e3 / prediction.high_ms)
    assert "slow steps come to different workers" in prediction.assumptions[0]


def test_a_persistent_straggler_is_named_and_a_bound_buys_nothing(golden) -> None:
    bench = bench_with(golden, persistent(400, 2))
    prediction = bench.predict([Setting(name="consistency", value="bounded:3")])
    assert prediction.predicted_ms == pytest.approx(prediction.baseline_ms, rel=0.01)
    assert "bounded staleness only delays the wait" in prediction.assumptions[0]
    assert "it takes 3.0 times" in prediction.assumptions[0]


def test_few_steps_and_one_rank_are_refused(golden) -> None:
    setting = Setting(name="consistency", value="bounded:3")
    (few,) = bench_with(golden, None).predict([setting]).refused  # the window has three steps
    assert "3 steps of all ranks are known" in few
    bench, _, _ = open_bench(str(golden / "cpu_step.json.gz"), cache=False, quiet=True)
    (alone,) = bench.predict([setting]).refused
    assert "one alone waits for nobody" in alone
    with pytest.raises(UsageError, match="is not known"):
        bench.predict([Setting(name="consistency", value="sloppy")])


def test_a_copy_at_hand_saves_the_pull_and_its_messages() -> None:
    server = ServerTimes(
        pull_ns=(1 * MS,), push_ns=(2 * MS,), pull_delay_ns=8 * MS, push_delay_ns=4 * MS
    )
    delays = server.delays_ns(of("weak:2"), 4, queued=True) / MS
    assert delays.tolist() == [12, 4, 12, 4]
    delays = server.delays_ns(of("eventual"), 2, queued=False) / MS
    assert delays.tolist() == [15, 15]
