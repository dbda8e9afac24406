"""Steps that compute on the CPU: threads, other processes, small operators, slow products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benches import analyse
from stepscope import explain_rank
from stepscope.explain.cpu_use import CpuUse, free_threads, idle_cores, measure_cpu_use, speedup
from stepscope.explain.findings import BESIDE_OTHERS, matmuls, threads
from stepscope.explain.rank import explain_analysis
from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.explain.verdict import judge
from stepscope.records.explanation import Finding, RankExplanation
from stepscope.records.hardware import Profile
from stepscope.records.job import RankFolder
from stepscope.records.rank import RankInputs, StepColumns
from stepscope.records.rank_facts import HostLoad, PlainSteps
from stepscope.records.source_lines import Place, StackSamples
from stepscope.records.trace import Trace
from stepscope.step.correct import event_cost_ns

from .build import kernel, op, step
from .conftest import Read
from .cpu_steps import CROWDED, LARGE, SECOND, SLOW, SMALL, counters, load_of, steps
from .whole_run.columns import columns


def profile_of(**changes: Any) -> Profile:
    told: dict[str, Any] = {
        "host": "here", "device": "a CPU", "kind": "cpu", "torch": "2.11", "when_unix": 0.0,
        "world_size": 1, "backend": None, "threads": 1, "matmul_flops": {"fp32": 120e9},
        "copy_bytes_s": 20e9,
    }  # fmt: skip
    return Profile(**(told | changes))


def explained(
    trace: Trace, load: HostLoad | None = None, profile: Profile | None = None
) -> RankExplanation:
    return explain_rank(trace, folder=RankFolder(load=load), profile=profile)


def found(rank: RankExplanation, name: str) -> Finding | None:
    return next((each for each in rank.findings if each.id == name), None)


def sure(rank: RankExplanation, name: str) -> Finding:
    finding = found(rank, name)
    assert finding is not None, [each.id for each in rank.findings]
    return finding


def use_of(trace: Trace, load: HostLoad | None = None) -> CpuUse:
    use = measure_cpu_use(analyse(trace, folder=RankFolder(load=load)))
    assert use is not None
    return use


# What operators take, by hand.


def test_a_stall_is_what_a_call_takes_beyond_twice_the_quick_pace(read: Read) -> None:
    trace = read(steps([LARGE], count=8, stall=60_000), device=None)
    use = use_of(trace)
    cost = event_cost_ns(trace, None)
    quick, late = 20e6 - cost, 80e6 - cost
    # Half of the steps are quick, half are late.
    assert use.own_ns == pytest.approx((quick + late) / 2)
    assert use.stalled_ns == pytest.approx((late - 2 * quick) / 2)


def test_calls_of_equal_length_do_not_stall(read: Read) -> None:
    assert use_of(read(steps([LARGE, SMALL]), device=None)).stalled_ns == 0


def test_overhead_is_what_a_short_call_takes_beyond_its_bytes(read: Read) -> None:
    trace = read(steps([SMALL] * 100), device=None)
    use = use_of(trace)
    bytes_ns = 3 * 64 * 4 / 25e9 * 1e9
    assert use.overhead_ns == pytest.approx(100 * (8_000 - event_cost_ns(trace, None) - bytes_ns))
    assert use.events == 100


def test_long_calls_are_work_and_not_overhead(read: Read) -> None:
    use = use_of(read(steps([LARGE]), device=None))
    assert use.overhead_share == 0
    assert use.long_share == 1


def test_twice_the_threads_bring_less_than_twice_the_speed() -> None:
    assert speedup(1, 2) == pytest.approx(2**0.8)
    assert speedup(4, 1) == pytest.approx(1 / speedup(1, 4))


def test_an_accelerators_step_has_no_use_of_the_cpu(read: Read) -> None:
    trace = read(step(1, start=0, dur=100) + kernel("gemm", start=10, dur=50, launched_at=2))
    assert measure_cpu_use(analyse(trace)) is None


# Cores, by hand.


def test_free_threads_are_cores_that_others_leave_shared_among_ranks() -> None:
    assert free_threads(load_of(counters())) == 4
    assert free_threads(load_of(CROWDED)) == 1  # 2.80 of 4 cores are taken
    assert free_threads(load_of(counters(), local_ranks=2)) == 2
    assert free_threads(load_of(counters(), quota_cores=1.5)) == 2
    assert free_threads(load_of(None, cores=1)) == 1


def test_idle_cores_are_those_that_nobody_kept_busy() -> None:
    plain = counters(busy_ns=25 * SECOND, stolen_ns=5 * SECOND)
    assert idle_cores(load_of(plain), plain) == pytest.approx(4 - 2.5 - 0.5)
    assert idle_cores(load_of(plain, cores=None), plain) is None


# Findings: when each appears, and when it must not.


WAITING = counters(
    waiting_ns=21 * SECOND, training_waiting_ns=6 * SECOND, involuntary=5000,
    user_ns=40 * SECOND, busy_ns=40 * SECOND, job_ns=40 * SECOND,
)  # fmt: skip


def test_threads_that_wait_for_cores_are_too_many(read: Read) -> None:
    trace = read(steps([SMALL] * 50, stall=200), device=None)
    rank = explained(trace, load_of(WAITING, threads=8))
    finding = sure(rank, "thread-oversubscription")
    assert rank.findings[0] is finding
    assert finding.share >= 0.6
    assert finding.severity == "high"
    assert "8 threads of this job share 4 cores" in finding.summary
    assert finding.evidence[0] == "8 threads on 4 cores"
    assert "OMP_NUM_THREADS=4" in finding.remedies[0].summary
    assert [remedy.id for remedy in finding.remedies] == ["threads"]  # one rank: nothing to pin
    assert "healthy" not in {each.id for each in rank.findings}


def test_where_threads_fit_the_cores_other_programs_are_the_cause(read: Read) -> None:
    trace = read(steps([SMALL] * 50, stall=200), device=None)
    rank = explained(trace, load_of(CROWDED, threads=4))
    assert found(rank, "thread-oversubscription") is None
    assert rank.findings[0].id == "other-processes"
    assert rank.findings[0].severity == "high"


def test_a_tenth_of_the_cores_makes_everything_doubtful(read: Read) -> None:
    """Nobody waits, yet caches and clocks are shared: it is said first, and of all the rest."""
    trace = read(steps([SMALL] * 300), device=None)
    busy = counters(busy_ns=14 * SECOND)
    rank = explained(trace, load_of(busy))
    first, second, *_ = rank.findings
    assert first.id == "other-processes"
    assert first.severity == "high"
    assert "0.400 of 4 cores busy during the steps" in first.summary
    assert second.evidence[-1] == BESIDE_OTHERS
    assert BESIDE_OTHERS not in first.evidence
    offered = [remedy.id for finding in rank.findings for remedy in finding.remedies]
    assert "batch" not in offered
    assert "batch" in [
        remedy.id
        for finding in explained(trace, load_of(counters(busy_ns=13 * SECOND))).findings
        for remedy in finding.remedies
    ]


def test_a_quota_does_not_make_other_containers_take_its_cores(read: Read) -> None:
    """Six of 64 cores are busy with others: no tenth, and 4 cores of quota are free."""
    load = load_of(counters(busy_ns=70 * SECOND), cores=64, quota_cores=4.0)
    rank = explained(read(steps([LARGE]), device=None), load)
    assert found(rank, "other-processes") is None
    assert free_threads(load) == 4


def test_ranks_that_each_start_a_thread_for_every_core_are_too_many(read: Read) -> None:
    plain = counters(waiting_ns=8 * SECOND, training_waiting_ns=4 * SECOND, job_ns=10 * SECOND)
    load = load_of(plain, threads=4, local_ranks=2)
    finding = sure(explained(read(steps([LARGE]), device=None), load), "thread-oversubscription")
    assert finding.share == pytest.approx(0.4)
    assert finding.evidence[0] == "2 ranks with 4 threads each on 4 cores"
    assert "OMP_NUM_THREADS=2" in finding.remedies[0].summary


def test_more_ranks_than_cores_are_told_to_be_fewer(read: Read) -> None:
    plain = counters(waiting_ns=5 * SECOND, training_waiting_ns=5 * SECOND)
    load = load_of(plain, threads=1, local_ranks=8)
    finding = sure(explained(read(steps([LARGE]), device=None), load), "thread-oversubscription")
    assert finding.remedies[0].id == "fewer-ranks"


def test_a_quota_that_stops_the_job_is_named(read: Read) -> None:
    plain = counters(throttled_ns=3 * SECOND)
    load = load_of(plain, threads=4, quota_cores=1.0)
    finding = sure(explained(read(steps([LARGE]), device=None), load), "thread-oversubscription")
    assert finding.share == pytest.approx(0.3)
    assert any("quota of 1 cores" in line for line in finding.evidence)


@pytest.mark.parametrize(
    "load",
    [
        None,
        load_of(None, threads=4),
        load_of(counters(), threads=4),  # nobody waits
        load_of(CROWDED, threads=4, cores=64),  # cores enough
        load_of(WAITING, threads=4),  # a core for each
        load_of(CROWDED, threads=1),  # one thread cannot wait for another
        load_of(CROWDED, threads=1, local_ranks=4),  # a core for each rank: others are the cause
        # The others of four threads do nothing: operators are too small to share.
        load_of(counters(waiting_ns=6 * SECOND, training_waiting_ns=6 * SECOND,
                         busy_ns=40 * SECOND, job_ns=40 * SECOND), threads=8),
        # Too short to be counted in hundredths of a second.
        load_of(counters(wall_ns=SECOND // 50), threads=8),
    ],
)  # fmt: skip
def test_threads_are_not_accused_without_evidence(read: Read, load: HostLoad | None) -> None:
    rank = explained(read(steps([LARGE]), device=None), load)
    assert found(rank, "thread-oversubscription") is None


def test_without_waits_many_switches_are_the_evidence(read: Read) -> None:
    told = {"waiting_ns": None, "training_waiting_ns": None, "busy_ns": 40 * SECOND}
    trace = read(steps([LARGE], count=8, stall=60_000), device=None)
    often = load_of(counters(**told, involuntary=10_000), threads=8)
    seldom = load_of(counters(**told, involuntary=10), threads=8)
    assert threads.MANY_SWITCHES == 50
    assert found(explained(trace, often), "thread-oversubscription")
    assert found(explained(trace, seldom), "thread-oversubscription") is None


def test_other_programs_that_take_the_cores_are_named(read: Read) -> None:
    rank = explained(read(steps([LARGE]), device=None), load_of(CROWDED))
    finding = sure(rank, "other-processes")
    assert finding.share == pytest.approx(0.6)
    assert "2.80 of 4 cores" in finding.summary
    assert any("backup 2.8" in line for line in finding.evidence)
    assert [remedy.id for remedy in finding.remedies] == ["idle-machine"]


@pytest.mark.parametrize(
    "plain",
    [
        counters(busy_ns=13 * SECOND),  # they are busy, but not much, and nobody waits
        counters(waiting_ns=6 * SECOND, training_waiting_ns=6 * SECOND),  # nobody else is there
        counters(busy_ns=None, waiting_ns=6 * SECOND, training_waiting_ns=6 * SECOND),
    ],
)
def test_other_programs_are_not_accused_without_evidence(read: Read, plain: PlainSteps) -> None:
    rank = explained(read(steps([LARGE]), device=None), load_of(plain))
    assert found(rank, "other-processes") is None


def test_idle_cores_beside_large_operators_are_too_few_threads(read: Read) -> None:
    load = load_of(counters(), variables={"OMP_NUM_THREADS": "1"})
    finding = sure(explained(read(steps([LARGE]), device=None), load), "too-few-threads")
    assert finding.share == pytest.approx(1 - 1 / 4**0.8, abs=0.01)
    assert "3.00 of 4 cores are idle" in finding.summary
    assert "OMP_NUM_THREADS=1 is set" in finding.evidence
    assert "OMP_NUM_THREADS=4" in finding.remedies[0].summary


@pytest.mark.parametrize(
    ("calls", "load"),
    [
        ([SMALL] * 50, load_of(counters())),  # nothing to share
        ([LARGE], load_of(counters(), threads=4)),
        ([LARGE], load_of(counters(busy_ns=39 * SECOND))),  # no core is idle
        ([LARGE], load_of(counters(), local_ranks=4)),
        ([LARGE], load_of(counters(busy_ns=None))),
        ([LARGE], None),
    ],
)
def test_threads_are_enough_where_more_have_nothing_to_do(
    read: Read, calls: list[Any], load: HostLoad | None
) -> None:
    assert found(explained(read(steps(calls), device=None), load), "too-few-threads") is None


def test_many_small_operators_are_bound_by_their_dispatch(read: Read) -> None:
    finding = sure(explained(read(steps([SMALL] * 300), device=None)), "dispatch-bound")
    assert finding.share > 0.5
    assert "300 operators" in finding.summary
    assert [remedy.id for remedy in finding.remedies] == ["batch", "fused-optimizer"]


def test_threads_that_spin_between_small_operators_are_told(read: Read) -> None:
    load = load_of(counters(user_ns=38 * SECOND), threads=4)
    finding = sure(explained(read(steps([SMALL] * 300), device=None), load), "dispatch-bound")
    assert any("4 threads spin" in line for line in finding.evidence)
    assert finding.remedies[-1].id == "one-thread"


def test_large_operators_are_not_bound_by_their_dispatch(read: Read) -> None:
    assert found(explained(read(steps([LARGE] * 3), device=None)), "dispatch-bound") is None


def test_products_far_below_calibrates_roof_are_slow(read: Read) -> None:
    load = load_of(counters(), capability="DEFAULT", onednn=False)
    rank = explained(read(steps([SLOW]), device=None), load, profile_of())
    finding = sure(rank, "slow-products")
    assert "13.4 GFLOP/s of 120 GFLOP/s (measured by calibrate)" in finding.summary
    # 0.268 GFLOP at 60 GFLOP/s are 4.5 of 20 ms.
    assert finding.share == pytest.approx(1 - 4.47 / 20, abs=0.01)
    assert any("torch uses DEFAULT instructions" in line for line in finding.evidence)
    assert {"vectors", "onednn"} <= {remedy.id for remedy in finding.remedies}


def test_without_a_calibration_the_traces_best_product_is_the_roof(read: Read) -> None:
    finding = sure(explained(read(steps([LARGE, SLOW]), device=None)), "slow-products")
    assert "13.4 GFLOP/s of 107 GFLOP/s (the best matmul of this trace)" in finding.summary


def test_a_plain_loop_is_named() -> None:
    assert matmuls._list_reasons(None, ["aten::mm", "aten::_slow_conv2d_forward"]) == [
        "aten::_slow_conv2d_forward: PyTorch's own loop, not a vectorised library kernel"
    ]
    assert matmuls._list_reasons(None, ["aten::mkldnn_convolution"]) == []


@pytest.mark.parametrize(
    ("calls", "load", "profile"),
    [
        ([LARGE], None, profile_of()),  # near the roof
        ([SLOW], None, None),  # nothing to compare with
        ([SLOW], load_of(CROWDED), profile_of()),  # no operator shows what it can do
        ([SLOW], load_of(counters()), profile_of(threads=32)),  # of 32 threads one was used
        # 16 million products of two numbers: bound by memory.
        ([("aten::mm", [[4096, 2], [2, 4096]], 20_000.0)], None, profile_of(copy_bytes_s=3e9)),
    ],
)
def test_products_are_not_slow_without_evidence(
    read: Read, calls: list[Any], load: HostLoad | None, profile: Profile | None
) -> None:
    rank = explained(read(steps(calls), device=None), load, profile)
    assert found(rank, "slow-products") is None


def test_denormal_values_and_slow_operators_are_denormals(read: Read) -> None:
    slow = ("aten::add", [[1000, 1000], [1000, 1000]], 40_000.0)  # 12 MB take 0.6 ms
    trace = read(steps([slow]), device=None)
    finding = sure(
        explained(trace, load_of(counters(), denormal_share=0.2), profile_of()), "denormals"
    )
    assert finding.share > 0.9
    assert finding.severity == "medium"  # how much of it they cost is not known
    assert "20% of the sampled" in finding.summary
    assert finding.remedies[0].id == "flush-denormal"


@pytest.mark.parametrize(
    "changes",
    [
        {"denormal_share": 0.001},
        {"denormal_share": None},
        {"denormal_share": 0.2, "flush_denormal": True},
        {"denormal_share": 0.2, "flush_denormal": None},
    ],
)
def test_slow_operators_alone_are_no_denormals(read: Read, changes: dict[str, Any]) -> None:
    slow = ("aten::add", [[1000, 1000], [1000, 1000]], 40_000.0)
    rank = explained(read(steps([slow]), device=None), load_of(counters(), **changes), profile_of())
    assert found(rank, "denormals") is None


def test_denormal_values_that_cost_nothing_are_no_finding(read: Read) -> None:
    load = load_of(counters(), denormal_share=0.2)
    assert (
        found(explained(read(steps([LARGE]), device=None), load, profile_of()), "denormals") is None
    )


# Healthy, with what was checked.


def test_healthy_says_what_was_checked_and_how_near_the_roof_it_is(read: Read) -> None:
    rank = explained(
        read(steps([LARGE]), device=None), load_of(counters(), threads=4), profile_of(threads=4)
    )
    finding = sure(rank, "healthy")
    assert finding.evidence[0].startswith("checked: data loading, ")
    for word in ("threads", "other processes", "speed of matmuls", "denormal numbers"):
        assert word in finding.evidence[0]
    assert "of 120 GFLOP/s (measured by calibrate)" in finding.evidence[0]
    assert not any(line.startswith("not known") for line in finding.evidence)
    assert finding.remedies == ()


def test_healthy_says_not_known_where_nothing_could_be_checked(read: Read) -> None:
    bare = [(name, None, dur) for name, _, dur in [LARGE]]
    rank = explain_rank(read(steps(bare), device=None))
    finding = sure(rank, "healthy")
    unknown = next(line for line in finding.evidence if line.startswith("not known"))
    for word in ("threads and other processes", "no shapes", "the best the CPU can do"):
        assert word in unknown
    assert "threads" not in finding.evidence[0]
    assert "calibrate" in judge((rank,), ()).next


def test_a_load_over_too_few_steps_is_not_known(read: Read) -> None:
    load = load_of(counters(wall_ns=SECOND // 50), threads=4)
    finding = sure(explained(read(steps([LARGE]), device=None), load), "healthy")
    assert any("too few steps outside" in line for line in finding.evidence)


@pytest.mark.parametrize(
    ("user_s", "data_ms", "steady", "title"),
    [
        (2.2, 0, 100, "Training thread sleeps"),  # operators run for 20 of 100 ms
        (10, 0, 100, "Python between operators"),
        (8, 0, 100, "Python between operators"),  # it sleeps for less than half of the rest
        (2.2, 70, 100, "Python between operators"),  # it sleeps while it waits for data
        (5, 0, 50, "Python between operators"),  # it may have slept before the steady steps
    ],
)
def test_a_thread_that_sleeps_is_not_busy_with_python(
    read: Read, user_s: float, data_ms: float, steady: int, title: str
) -> None:
    load = load_of(counters(user_ns=round(user_s * SECOND), system_ns=0))
    measured = columns([100.0] * steady, data=[data_ms] * steady)
    assert mostly_idle(read, load, measured).title == title


def mostly_idle(
    read: Read,
    load: HostLoad | None,
    measured: StepColumns,
    samples: StackSamples | None = None,
) -> Finding:
    """Of steps whose operators run for a fifth of the time."""
    events = [
        event
        for number in range(5)
        for event in (
            *step(number, start=1e5 * number, dur=1e5),
            *op("aten::mm", start=1e5 * number + 10, dur=2e4),
        )
    ]
    inputs = RankInputs(
        trace=read(events, device=None),
        folder=RankFolder(load=load),
        steps=measured,
        samples=samples,
    )
    return sure(explain_analysis(RankAnalysis(inputs)), "host-bound")


def test_nobody_is_called_busy_before_the_run_has_said_how_long_it_slept(read: Read) -> None:
    """Threads' times are written when a run ends; its windows are explained while it goes on."""
    live = mostly_idle(read, None, columns([100.0] * 100, data=[0.0] * 100))
    assert "busy or the training thread sleeps" in live.summary
    busy = load_of(counters(user_ns=10 * SECOND, system_ns=0))
    ended = mostly_idle(read, busy, columns([100.0] * 100, data=[0.0] * 100))
    assert ended.summary.endswith("because Python is busy between operators.")


@pytest.mark.parametrize(
    ("outside", "remedies"),
    [(60, ["own-python", "batch"]), (40, ["batch"])],
    ids=["most of it", "some of it"],
)
def test_python_outside_the_model_is_named_before_a_change_that_does_not_reach_it(
    read: Read, outside: int, remedies: list[str]
) -> None:
    """No operator runs for 80% of the step: with 60 of 100 samples outside the model at least 50%
    of the step are, with 40 of them it may be 30%."""
    sample = Place(file="/home/me/dqn.py", line=38, function="ReplayBuffer.sample")
    model = Place(file="/x/torch/nn/modules/module.py", line=1, function="Module._call_impl")
    samples = StackSamples(
        stacks=((sample,), (sample, model)),
        number=np.arange(100),
        stack=np.where(np.arange(100) < outside, 0, 1),
    )
    busy = load_of(counters(user_ns=10 * SECOND, system_ns=0))
    measured = columns([100.0] * 100, data=[0.0] * 100)
    finding = mostly_idle(read, busy, measured, samples)
    assert [remedy.id for remedy in finding.remedies] == remedies
    assert f"{outside}% in ReplayBuffer.sample (dqn.py:38)" in " ".join(finding.evidence)
    assert finding.where == (sample,)
    assert finding.summary.endswith(" Much of that is in ReplayBuffer.sample (dqn.py:38).")
