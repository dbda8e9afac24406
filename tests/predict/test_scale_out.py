"""More workers: what each assumption does to the step, what is refused, and real traces."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from ddp_steps import MB, calibration, cpu_trace, ddp_trace, gpu_trace, truth
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from benches import ask, bench_for
from measured import read_measured_steps
from stepscope import read_trace
from stepscope.errors import UsageError
from stepscope.predict import scale_out
from stepscope.predict.collective_times import (
    TracedAllReduces,
    compare_algorithms,
    find_transfer_times,
    from_data_sheet,
    from_trace,
    lower_line,
)
from stepscope.predict.data_parallel import expected_maximum
from stepscope.predict.engine import Bench
from stepscope.predict.whatifs import parse_setting
from stepscope.records.hardware import find_device
from stepscope.records.job import Clock, Job, RankTimes, Straggler, Stragglers
from stepscope.records.memory import Memory
from stepscope.step.replay import step_ns
from stepscope.step.work import Kind

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.hardware import Profile


def cpu_bench(folder: Path, *profiles: Profile, shape: tuple[int, int] = (512, 512)) -> Bench:
    trace = cpu_trace(folder, list(shape))
    return bench_for(
        trace, measured=truth(*[4500] * 9), calibrations=profiles or (calibration(lost=0.0),)
    )


# The slowest of several


def test_one_worker_is_the_mean_and_very_many_are_the_longest() -> None:
    assert expected_maximum([1.0, 2.0, 6.0], 1) == pytest.approx(3.0)
    assert expected_maximum([1.0, 2.0, 6.0], 10_000) == pytest.approx(6.0)


def test_two_draws_of_two_values() -> None:
    """1 in a quarter of the cases, else 2."""
    assert expected_maximum([1.0, 2.0], 2) == pytest.approx(1.75)


@given(
    st.lists(st.floats(1.0, 9.0), min_size=2, max_size=12),
    st.integers(1, 40),
)
def test_it_is_the_mean_over_resampled_maxima(values: list[float], count: int) -> None:
    draws = np.random.default_rng(0).choice(values, size=(20_000, count)).max(axis=1)
    assert expected_maximum(values, count) == pytest.approx(draws.mean(), rel=0.03)


def test_uneven_steps_make_more_workers_slower(tmp_path: Path) -> None:
    trace = cpu_trace(tmp_path, [512, 512])
    uneven = truth(4000, 4250, 4500, 4750, 5000)
    even = truth(*[4500] * 5)
    profile = calibration(8, alpha_us=0, us_per_mb=0, lost=0.0)
    found = [
        ask(bench_for(trace, measured=each, calibrations=(profile,)), "workers=8")
        for each in (even, uneven)
    ]
    expected = expected_maximum([4000, 4250, 4500, 4750, 5000], 8) / 4500
    assert found[1].predicted_ms - found[0].predicted_ms == pytest.approx(
        4.5 * (expected - 1), rel=0.001
    )
    assert "expected maximum over 5 measured steps" in " ".join(found[1].assumptions)


def test_a_step_that_is_long_on_every_rank_is_left_out(tmp_path: Path) -> None:
    """An evaluation of 100 ms between steps is no straggler."""
    trace = cpu_trace(tmp_path, [512, 512])
    profile = calibration(8, alpha_us=0, us_per_mb=0, lost=0.0)
    steps = (truth(*[4500] * 9), truth(*[4500] * 9, 100_000))
    found = [
        ask(bench_for(trace, measured=each, calibrations=(profile,)), "workers=8") for each in steps
    ]
    assert found[0].predicted_ms == pytest.approx(found[1].predicted_ms)


# How long a collective lasts


def test_a_fit_of_the_same_size_is_taken_as_it_is(tmp_path: Path) -> None:
    found = find_transfer_times(
        4,
        trace=cpu_trace(tmp_path, [8]),
        profiles=[calibration(2, alpha_us=1), calibration(4, alpha_us=50, us_per_mb=10)],
        traced=None,
        device=None,
        on_host=True,
    )
    assert found is not None
    assert found.basis == "calibrated"
    assert found.expected_ns(np.array([0.0, MB])).tolist() == [50_000, 60_000]


def test_gloo_is_carried_over_as_a_ring(tmp_path: Path) -> None:
    """The same as the ring's formula with a hop's alpha and beta."""
    found = find_transfer_times(
        8,
        trace=cpu_trace(tmp_path, [8]),
        profiles=[calibration(2, alpha_us=200, us_per_mb=1000)],
        traced=None,
        device=None,
        on_host=True,
    )
    assert found is not None
    ring = compare_algorithms(4 * MB, 8, 100_000, 1e6 / MB).times_ns["ring"]
    assert found.expected_ns(np.array([4.0 * MB]))[0] == pytest.approx(ring)
    assert found.basis == "carried over"


def test_nccl_is_carried_over_with_a_trees_latency(tmp_path: Path) -> None:
    trace = gpu_trace(tmp_path, [8])
    profile = calibration(2, alpha_us=20, kind="cuda", device="NVIDIA H200", backend="nccl")
    found = find_transfer_times(
        1024, trace=trace, profiles=[profile], traced=None, device=None, on_host=False
    )
    assert found is not None
    assert found.expected_ns(np.array([0.0]))[0] == pytest.approx(200_000)  # log2: ten times
    assert found.contention is None


def test_the_further_it_is_carried_the_less_is_known(tmp_path: Path) -> None:
    trace = cpu_trace(tmp_path, [8])
    spreads = []
    for ranks in (2, 4, 64):
        found = find_transfer_times(
            ranks, trace=trace, profiles=[calibration(2)], traced=None, device=None, on_host=True
        )
        assert found is not None
        spreads.append(found.spread)
    assert spreads[0] < spreads[1] < spreads[2]


def test_a_profile_of_another_device_or_backend_is_not_taken(tmp_path: Path) -> None:
    trace = gpu_trace(tmp_path, [8])
    other = calibration(2, kind="cuda", device="NVIDIA A100-SXM4-80GB", backend="nccl")
    assert (
        find_transfer_times(
            2, trace=trace, profiles=[other], traced=None, device=None, on_host=False
        )
        is None
    )


def test_a_data_sheets_link_is_a_ring_of_one_direction() -> None:
    device = find_device("NVIDIA H200")
    assert device is not None
    found = from_data_sheet(8, device)
    assert found is not None
    # 900 GB/s both ways: 450 one way, of which 75%; 2 x 7/8 of the bytes.
    seconds = 2 * 7 / 8 * 1e9 / (0.75 * 450e9)
    latency = 12e-6 + 2 * 3 * 6e-6
    assert found.expected_ns(np.array([1e9]))[0] == pytest.approx((seconds + latency) * 1e9)
    assert "data sheet" in found.source


def test_the_quickest_of_a_traces_collectives_tell_the_line() -> None:
    size, dur = np.array([1e6, 1e6, 5e6, 5e6]), np.array([900.0, 300.0, 1100.0, 2000.0])
    alpha, beta = lower_line(size, dur)
    assert beta == pytest.approx((1100 - 300) / 4e6)
    assert alpha == pytest.approx(300 - beta * 1e6)


def test_what_a_trace_shows_is_carried_over_too() -> None:
    seen = TracedAllReduces(ranks=2, size_bytes=np.array([1e6, 5e6]), dur_ns=np.array([1e5, 5e5]))
    found = from_trace(4, seen, "nccl")
    assert found is not None
    # 0.1 ns a byte over two ranks, which move each byte once: 1.5 times that over four.
    assert found.expected_ns(np.array([1e6]))[0] == pytest.approx(1.5e5)


# workers


def test_a_worker_more_costs_what_the_exchange_costs(tmp_path: Path) -> None:
    """3 MiB in two buckets (1 MiB, then 25): the first hides, the second takes 100 + 2000 µs."""
    found = ask(cpu_bench(tmp_path), "workers=2")
    toll = 450 + 2 * 60 + 3 * 15 + 4 * 3 * MB / 27e9 * 1e6
    assert found.baseline_ms == pytest.approx(4.5, rel=0.001)
    assert found.predicted_ms * 1000 == pytest.approx(4500 + 2100 + toll, rel=0.01)
    assert found.throughput_factor == pytest.approx(2 * 4.5 / found.predicted_ms, rel=0.001)
    assert found.low_ms < found.predicted_ms < found.high_ms


def test_the_order_of_what_is_asked_for_does_not_matter(tmp_path: Path) -> None:
    bench = cpu_bench(tmp_path)
    one = ask(bench, "workers=2", "bucket-mb=1", "bandwidth=2")
    other = ask(bench, "bandwidth=2", "bucket-mb=1", "workers=2")
    assert one.predicted_ms == other.predicted_ms
    assert not one.refused
    assert not other.refused


def test_the_exchange_is_told_once_as_it_ends_up(tmp_path: Path) -> None:
    found = ask(cpu_bench(tmp_path), "workers=2", "bucket-mb=1", "bandwidth=2")
    told = [line for line in found.assumptions if "exchanges" in line]
    assert len(told) == 1
    assert "3.15 MB in 3 buckets of 1 MiB at 2 times the bandwidth" in told[0]


def test_twice_the_bandwidth_halves_what_bytes_take_and_half_the_latency_the_rest(
    tmp_path: Path,
) -> None:
    bench = cpu_bench(tmp_path)
    steps = [
        ask(bench, "workers=2", "bucket-mb=25", *more).predicted_ms * 1000
        for more in ((), ("bandwidth=2",), ("latency=0.5",))
    ]
    assert steps[0] - steps[1] == pytest.approx(1500, rel=0.001)  # 3 MiB, a millisecond each
    assert steps[0] - steps[2] == pytest.approx(50, rel=0.001)  # one all-reduce of 100 µs


@pytest.mark.parametrize("setting", ["workers=2", "workers=2:strong", "bandwidth=1", "latency=1"])
def test_workers_and_links_as_they_are_change_nothing(setting: str, tmp_path: Path) -> None:
    bench = bench_for(ddp_trace(tmp_path, elements=1 << 20, dur=900))
    now, same = ask(bench), ask(bench, setting)
    assert not same.refused
    assert (same.predicted_ms, same.low_ms, same.high_ms) == (
        now.predicted_ms, now.low_ms, now.high_ms,
    )  # fmt: skip


def test_strong_scaling_divides_forward_and_backward(tmp_path: Path) -> None:
    """Of 4 ms a quarter stays on a CPU, and half of the rest goes."""
    bench = cpu_bench(tmp_path, calibration(2, alpha_us=0, us_per_mb=0, lost=0.0))
    weak, strong = (ask(bench, f"workers=2{how}") for how in ("", ":strong"))
    assert weak.predicted_ms - strong.predicted_ms == pytest.approx(1.5, rel=0.01)
    assert strong.throughput_factor == pytest.approx(4.5 / strong.predicted_ms, rel=0.001)


def test_what_a_share_of_the_batch_takes_on_a_cpu_is_a_guess_and_shows_it(tmp_path: Path) -> None:
    bench = cpu_bench(tmp_path, calibration(2, alpha_us=0, us_per_mb=0, lost=0.0))
    weak, strong = (ask(bench, f"workers=2{how}") for how in ("", ":strong"))
    assert strong.high_ms / strong.low_ms > 1.2 * weak.high_ms / weak.low_ms
    assert any("A quarter" in said for said in strong.assumptions)
    # 0.4 of what the share takes away, of the part of the step that is a worker's own.
    found = scale_out.share_doubt(4.5e6, 3.0e6, 4.0e6, on_host=True)
    assert found == pytest.approx(0.4 * math.log(1.5) * 0.75)
    assert scale_out.share_doubt(4.5e6, 4.5e6, 5e6, on_host=True) == 0.0


def test_without_a_calibration_a_cpu_is_refused_and_told_what_to_do(tmp_path: Path) -> None:
    bench = bench_for(cpu_trace(tmp_path, [512, 512]), measured=truth(4500))
    found = ask(bench, "workers=4")
    assert found.predicted_ms == found.baseline_ms
    assert "stepscope calibrate --ranks 4" in found.refused[0]


def test_without_shapes_it_is_refused(tmp_path: Path) -> None:
    cpu_trace(tmp_path, [512, 512])
    path = tmp_path / "cpu.json"
    path.write_text(path.read_text().replace('"Input Dims"', '"Nothing"'))
    found = ask(
        bench_for(read_trace(path, cache=False), calibrations=(calibration(),)), "workers=2"
    )
    assert "record_shapes=True" in found.refused[0]


@pytest.mark.parametrize("asked", ["bandwidth=2", "latency=2", "bucket-mb=5", "zero=2"])
def test_one_worker_alone_exchanges_nothing(asked: str, tmp_path: Path) -> None:
    found = ask(cpu_bench(tmp_path), asked)
    assert "workers=N" in found.refused[0]


@pytest.mark.parametrize(
    "asked",
    ["workers=0", "workers=many", "workers=2:weird", "bandwidth=-1", "latency=0", "bucket-mb=x",
     "bandwidth=inf", "zero=4"],
)  # fmt: skip
def test_values_that_make_no_sense_are_wrong_use(asked: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=asked.split("=")[0]):
        ask(cpu_bench(tmp_path), asked)


def test_communication_that_compute_has_to_pay_for_is_said(tmp_path: Path) -> None:
    said = ask(cpu_bench(tmp_path, calibration(lost=0.7)), "workers=2").assumptions
    assert any("as many cores as workers" in line and "70%" in line for line in said)
    usual = ask(cpu_bench(tmp_path, calibration()), "workers=2").assumptions
    assert any("usual" in line for line in usual)


# A trace that communicates


def ddp_bench(folder: Path, **how: Any) -> Bench:
    """One all-reduce of 4 MB that takes 1000 µs; links that would need 400."""
    trace = ddp_trace(folder, elements=1_000_000, dur=1000)
    line = calibration(
        2, alpha_us=100, us_per_mb=300 * MB / 4e6, kind="cuda", device="NVIDIA H200",
        backend="nccl",
    )  # fmt: skip
    return bench_for(trace, measured=truth(2500), calibrations=(line,), **how)


def comm_us(bench: Bench, *settings: str) -> float:
    trial = bench.begin()
    for setting in settings:
        trial = bench.change(trial, parse_setting(setting))
    assert not trial.refused
    tasks = trial.context.graph.tasks
    return float(tasks.dur_ns[tasks.kind == Kind.COMM].sum()) / 1000


def test_bandwidth_changes_what_moves_bytes_and_not_what_waits(tmp_path: Path) -> None:
    bench = ddp_bench(tmp_path)
    scale = comm_us(bench) / 1000  # the device's times were brought to the measured step
    assert comm_us(bench, "bandwidth=2") / scale == pytest.approx(1000 - 150 / scale, rel=0.01)
    assert comm_us(bench, "latency=2") / scale == pytest.approx(1000 + 100 / scale, rel=0.01)


def test_more_workers_keep_the_waiting_and_get_longer_transfers(tmp_path: Path) -> None:
    bench = ddp_bench(tmp_path)
    # Twice the latency (log2), and 2 x 3/4 of the bytes instead of 2 x 1/2.
    longer = 100 + 300 * 0.5
    assert comm_us(bench, "workers=4") == pytest.approx(comm_us(bench) + longer, rel=0.01)


def test_one_worker_of_a_job_exchanges_nothing(tmp_path: Path) -> None:
    found = ask(ddp_bench(tmp_path), "workers=1")
    assert found.predicted_ms < found.baseline_ms
    assert found.throughput_factor == pytest.approx(
        0.5 * found.baseline_ms / found.predicted_ms, rel=0.001
    )


def test_without_a_calibration_the_trace_itself_tells(tmp_path: Path) -> None:
    trace = ddp_trace(tmp_path, elements=1_000_000, dur=1000)
    found = ask(bench_for(trace, measured=truth(2500)), "workers=4")
    assert any("fastest in the trace" in line for line in found.assumptions)


# zero


def test_zero_shares_memory_by_the_formula(tmp_path: Path) -> None:
    categories = {"parameters": 400, "gradients": 400, "optimizer": 800, "activations": 1000}
    memory = Memory(peak_bytes=3000, categories=categories, **_nothing(Memory))
    trace = gpu_trace(tmp_path, [512, 512])
    bench = bench_for(trace, measured=truth(4500), memory=memory)
    peaks = [ask(bench, "workers=4", f"zero={stage}").peak_bytes for stage in (1, 2, 3)]
    rest = 3000 - 1600
    assert peaks == [rest + 800 + 200, rest + 400 + 300, rest + 400]
    said = ask(bench, "workers=4", "zero=3").assumptions
    assert any("1.5 times the bytes" in line for line in said)
    assert any("4.00 bytes per parameter instead of 16.0" in line for line in said)


def _nothing(kind: type) -> dict[str, Any]:
    """Fields that a record needs and that do not matter here."""
    needed = kind.__struct_fields__[: len(kind.__struct_fields__) - len(kind.__struct_defaults__)]
    return {name: None for name in needed if name not in ("peak_bytes", "categories")}


def test_a_few_small_messages_tell_no_bandwidth() -> None:
    """84 bytes in 2 ms are not 0 µs + 0.0 GB/s: nothing is fitted."""
    one = TracedAllReduces(
        ranks=2, size_bytes=np.array([84.0, 84.0]), dur_ns=np.array([2.1e6, 2.2e6])
    )
    assert from_trace(2, one, "gloo") is None
    alike = TracedAllReduces(
        ranks=2, size_bytes=np.array([84.0, 4e4]), dur_ns=np.array([2.1e6, 2.2e6])
    )
    assert from_trace(2, alike, "gloo") is None


def test_sizes_apart_whose_times_are_apart_tell_a_bandwidth() -> None:
    seen = TracedAllReduces(ranks=2, size_bytes=np.array([1e3, 1e5]), dur_ns=np.array([1e5, 1e6]))
    found = from_trace(2, seen, "gloo")
    assert found is not None
    assert "MB/s" in found.source
    assert "0.0 GB/s" not in found.source


# no-straggler


def job(own_us: list[list[float]], verdict: str = "found") -> Job:
    own = (np.array(own_us) * 1000).astype(np.int64)
    steps = np.repeat(own.max(axis=1)[:, None], own.shape[1], axis=1)
    times = tuple(
        RankTimes(
            step_ms=step, own_ms=mine, exposed_comm_ms=step - mine, compute_ms=mine, input_ms=0.0
        )
        for step, mine in zip(*np.median((steps, own), axis=1) / 1e6, strict=True)
    )
    return Job(
        ranks=tuple(range(own.shape[1])), times=times, hosts={},
        steps=tuple(range(len(own))), step_ns=steps,
        own_ns=own, input_ns=own * 0, exposed_comm_ns=steps - own, clock=Clock(aligned=False),
        collectives=(), arrivals=(), stragglers=Stragglers(verdict=verdict), path=None, lanes=None,
    )  # fmt: skip


def test_the_slow_rank_itself_gets_as_long_as_the_median_of_the_others(tmp_path: Path) -> None:
    slow = job([[3000, 2000, 2000, 2200]] * 4)
    bench = ddp_bench(tmp_path, job=slow)
    found = ask(bench, "no-straggler")
    graph = bench.change(bench.begin(), parse_setting("no-straggler")).context.graph
    before = bench.context.graph
    assert graph.calls.gap_ns.sum() == pytest.approx(before.calls.gap_ns.sum() * 2 / 3)
    assert found.predicted_ms < found.baseline_ms
    assert "rank 0" in found.assumptions[0]


def test_another_rank_waits_less_for_it(tmp_path: Path) -> None:
    """Steps of 3000 µs become 2200: the next slowest decides. On rank 0 that is less waiting."""
    slow = job([[2000, 2000, 2200, 3000]] * 4)
    found = ask(ddp_bench(tmp_path, job=slow), "no-straggler")
    assert found.predicted_ms / found.baseline_ms == pytest.approx(2200 / 3000, rel=0.02)


def test_no_straggler_refuses_where_only_a_link_is_slow(tmp_path: Path) -> None:
    link = Straggler(rank=None, group="1", cause="link", slowdown=2, cost_ms=1, steps=4, of=4)
    slow = job([[3000, 2000, 2000, 2200]] * 4)
    slow = msgspec.structs.replace(slow, stragglers=Stragglers(verdict="found", ranks=(link,)))
    assert ask(ddp_bench(tmp_path, job=slow), "no-straggler").refused


@pytest.mark.parametrize("verdict", ["none", "not resolved"])
def test_no_straggler_refuses_what_the_verdict_does_not_find(tmp_path: Path, verdict: str) -> None:
    slow = job([[3000, 2000, 2000, 2200]] * 4, verdict)
    assert ask(ddp_bench(tmp_path, job=slow), "no-straggler").refused


def test_no_straggler_refuses_one_rank_and_ranks_that_are_alike(tmp_path: Path) -> None:
    alone = ask(ddp_bench(tmp_path), "no-straggler")
    assert "all ranks" in alone.refused[0]
    alike = ask(ddp_bench(tmp_path, job=job([[2000, 2001]] * 4)), "no-straggler")
    assert "no rank is slower" in alike.refused[0]


def test_ranks_of_a_job_tell_how_much_workers_differ(tmp_path: Path) -> None:
    spread = job([[2000, 2100, 2200, 2300]] * 4)
    even = job([[2000, 2000, 2000, 2000]] * 4)
    found = [
        ask(ddp_bench(tmp_path, job=each), "workers=64").predicted_ms for each in (even, spread)
    ]
    assert found[1] > found[0]


# By the number of workers


def test_one_worker_alone_is_faster_than_either_of_two_that_exchange(tmp_path: Path) -> None:
    """They exchange for 900 of 2,400 µs."""
    nccl = calibration(2, kind="cuda", device="NVIDIA H200", backend="nccl", us_per_mb=100)
    bench = bench_for(ddp_trace(tmp_path, elements=1 << 20, dur=900), calibrations=(nccl,))
    alone, four = ask(bench, "workers=1"), ask(bench, "workers=4")
    assert alone.predicted_ms < alone.baseline_ms
    assert four.throughput_factor < 2.0


def test_more_workers_take_longer_and_lose_efficiency(tmp_path: Path) -> None:
    bench = cpu_bench(tmp_path)
    counts = (2, 4, 8)
    found = [ask(bench, f"workers={count}") for count in counts]
    steps = [4.5, *(prediction.predicted_ms for prediction in found)]
    assert steps == sorted(steps)
    assert all(a.low_ms < a.predicted_ms < a.high_ms for a in found)
    efficiencies = [a.throughput_factor / count for a, count in zip(found, counts, strict=True)]
    assert 1 > efficiencies[0] > efficiencies[1] > efficiencies[2] > 0


def test_a_shared_batch_must_have_a_sample_for_each_worker(tmp_path: Path) -> None:
    trace = cpu_trace(tmp_path, [512, 512])
    bench = bench_for(trace, measured=truth(4500), calibrations=(calibration(lost=0.0),))
    bench.context = replace(bench.context, batch=4)
    assert not ask(bench, "workers=4:strong").refused
    assert ask(bench, "workers=8:strong").refused == (
        "workers=8:strong: a batch of 4 is too small for 8 workers",
    )


# Real recordings


def test_resnet_on_an_h200_scales_by_its_data_sheet(golden: Path) -> None:
    path = golden / "h200-resnet18/rank-00000/trace.json.gz"
    bench = bench_for(read_trace(path), measured=read_measured_steps(path))
    found = ask(bench, "workers=8")
    assert 0.85 * 8 < found.throughput_factor < 8
    said = " ".join(found.assumptions)
    assert "NVLink" in said
    assert "46.8 MB in 3 buckets" in said
    assert "20 batch norms" in said
    faster = ask(bench, "workers=8", "bandwidth=2")
    assert found.predicted_ms >= faster.predicted_ms >= found.baseline_ms
    assert ask(bench, "workers=1024").throughput_factor > 0.5 * 1024


def test_ddp_over_one_rank_keeps_the_buckets_it_was_traced_with(shared: Path) -> None:
    path = shared / "traces/h200/gpt2s_b8_bf16_ddp1.json.gz"
    bench = bench_for(read_trace(path))
    found = ask(bench, "workers=8")
    told = found.assumptions[-1]
    # 163 million parameters of four bytes; the head's bucket is as large as its one gradient.
    assert "652 MB in 14 buckets as traced" in told
    assert found.predicted_ms >= found.baseline_ms


def test_a_real_job_of_two_ranks_with_more_and_with_faster_links(shared: Path) -> None:
    path = shared / "traces/third_party/a100_nccl_rank0of2.json.gz"
    bench = bench_for(read_trace(path))
    more = ask(bench, "workers=8")
    assert not more.refused
    assert "over 2 ranks" in " ".join(more.assumptions)
    assert more.predicted_ms >= more.baseline_ms * 0.999
    before = comm_us(bench)
    # The quickest of its all-reduces move 13 GB/s; half of what 102 MB take by that is saved.
    saved = 102.2e6 / 2 / 13.0e9 * 1e6
    assert before - comm_us(bench, "bandwidth=2") == pytest.approx(saved, rel=0.1)
    assert step_ns(bench.context.graph) / 1e6 == pytest.approx(more.baseline_ms)
