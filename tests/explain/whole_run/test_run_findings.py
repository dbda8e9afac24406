"""Findings about the whole run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from stepscope.explain.findings import healthy, load_rules, sort_findings
from stepscope.explain.findings.compiled import compile_time, find_recompiles, recompiles
from stepscope.explain.findings.evidence import offer_for_waits
from stepscope.explain.findings.host import gc_pauses
from stepscope.explain.findings.loop import (
    checkpoint_share,
    data_stalls,
    evaluation_share,
    find_periodic_stall,
    irregular_stalls,
    periodic_stall,
    slows_down,
    start_up,
)
from stepscope.explain.findings.memory import (
    allocator_retries,
    find_growth,
    memory_growth,
    memory_leak,
)
from stepscope.explain.whole_run.stalls import find_steady
from stepscope.records.compiled import CompiledWork
from stepscope.records.explanation import Finding, Place
from stepscope.records.memory import Growth, Memory
from stepscope.records.rank import StepColumns
from stepscope.records.rank_facts import CodePlace, LoaderUse, Sum
from stepscope.records.run import (
    AccountPart,
    InputEffect,
    LevelChange,
    MemoryGrowth,
    RankRun,
    Trend,
)

from .runs import account, healthy_run, run, stall, times

# Findings about the whole run: they fire at planted numbers, and are silent on a healthy run.

OF_THE_RUN = (
    data_stalls, periodic_stall, irregular_stalls, slows_down, gc_pauses, recompiles,
    allocator_retries, evaluation_share, checkpoint_share, start_up, memory_growth,
)  # fmt: skip


def sure(finding: Finding | None) -> Finding:
    assert finding is not None
    return finding


def evidence_of(a_run: RankRun | None, memory: Memory | None = None) -> Any:
    return SimpleNamespace(run=a_run, memory=memory, compiled=None, longer_work_ns=0.0)


@pytest.mark.parametrize("rule", OF_THE_RUN, ids=lambda rule: rule.id)
def test_a_healthy_run_and_a_run_without_steps_say_nothing(rule: Any) -> None:
    assert rule.find(evidence_of(healthy_run())) is None
    assert rule.find(evidence_of(None)) is None
    assert rule.find(evidence_of(run(times=None))) is None


# Stalls


def test_bursts_are_blamed_on_workers_only_where_the_loader_has_so_many() -> None:
    for feeding in (None, LoaderUse(workers=0), LoaderUse(workers=2)):
        finding = sure(data_stalls.judge(run(stall("data"), loader=feeding)))
        assert finding.summary == "Every 4th step waits 68.0 ms for data."


def test_bursts_of_a_loader_are_named_with_its_workers() -> None:
    finding = sure(data_stalls.judge(run(stall("data"), loader=LoaderUse(workers=4))))
    assert finding.summary == (
        "Every 4th step waits 68.0 ms for data: the loader's 4 workers deliver in bursts."
    )
    assert finding.evidence == (
        "17.0 ms of the 55.0 ms mean step; a typical step takes 38.0 ms",
        "250 steps of 1,000, the longest 81.0 ms (steps 203, 7, 11)",
        "the DataLoader has 4 workers",
    )
    assert (finding.share, finding.severity, finding.of) == (17 / 55, "high", "step")
    assert [remedy.id for remedy in finding.remedies] == ["loader-workers", "cheaper-batch"]
    assert "it has 4" in finding.remedies[0].summary


def test_a_cheaper_batch_names_the_line_that_makes_it() -> None:
    feeding = LoaderUse(
        workers=0,
        dataset="Rows",
        made_at=CodePlace(file="/home/u/dataset.py", line=31, function="Rows.__getitem__"),
        fetch=Sum(count=50, wall_ns=485_000_000, cpu_ns=485_000_000),
    )
    finding = sure(data_stalls.judge(run(stall("data"), loader=feeding)))
    (cheaper,) = (remedy for remedy in finding.remedies if remedy.id == "cheaper-batch")
    assert cheaper.summary == (
        "Make a batch cheaper (it takes 9.70 ms), in dataset.py:31 (Rows.__getitem__)"
    )
    assert finding.evidence[-1] == (
        "the DataLoader has no workers, Rows, a batch takes 9.70 ms to make"
    )


def test_a_dataset_that_only_yields_is_said_to_be_duplicated() -> None:
    feeding = LoaderUse(workers=0, iterable=True)
    finding = sure(data_stalls.judge(run(stall("data"), loader=feeding)))
    assert "each worker must take its share" in finding.remedies[0].summary


def test_pinned_memory_is_offered_on_a_gpu_only() -> None:
    for feeding in (None, LoaderUse(workers=0)):
        offered = {gpu: offer_for_waits(feeding, gpu=gpu) for gpu in (False, True)}
        assert "pin-memory" in [remedy.id for remedy in offered[True]]
        assert "pin-memory" not in [remedy.id for remedy in offered[False]]
    pinned = offer_for_waits(LoaderUse(workers=0, pinned=True), gpu=True)
    assert "pin-memory" not in [remedy.id for remedy in pinned]


def test_workers_that_start_with_each_epoch_should_persist() -> None:
    feeding = LoaderUse(workers=2, epochs=4, batches=4 * 313)
    finding = sure(data_stalls.judge(run(stall("data", period=313), loader=feeding)))
    assert finding.summary == "Every 313th step waits 68.0 ms for data: an epoch begins."
    assert finding.remedies[0].id == "persistent-workers"
    lasting = sure(
        data_stalls.judge(run(stall("data", period=313), loader=replace(feeding, persistent=True)))
    )
    assert "persistent-workers" not in [remedy.id for remedy in lasting.remedies]


def test_a_wait_at_each_epoch_asks_for_workers_that_stay() -> None:
    finding = sure(data_stalls.judge(run(stall("data", period=313, typical_ms=2100.0))))
    assert finding.summary == "Every 313th step waits 2.10 s for data."
    assert finding.remedies[0].id == "persistent-workers"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"period": None, "steps": 83}, "1 step in 12 waits"),
        ({"period": None, "steps": 530}, "53% of all steps wait"),
        ({"period": None, "steps": 1}, "1 step of 1,000 waits"),
        ({"period": None, "steps": 3}, "3 steps of 1,000 wait"),
        ({"period": 1}, "Every step waits"),
        ({"period": 2}, "Every 2nd step waits"),
    ],
)
def test_how_often_steps_stall_is_said_as_people_say_it(
    changes: dict[str, Any], words: str
) -> None:
    finding = sure(data_stalls.judge(run(stall("data", **changes))))
    assert finding.summary.startswith(f"{words} 68.0 ms for data")


def test_a_stall_under_3_percent_of_the_mean_step_is_not_reported() -> None:
    assert data_stalls.judge(run(stall("data", share=0.029))) is None
    assert sure(data_stalls.judge(run(stall("data", share=0.031)))).severity == "low"
    assert sure(data_stalls.judge(run(stall("data", share=0.11)))).severity == "medium"


def test_garbage_collection() -> None:
    finding = sure(gc_pauses.judge(run(stall("gc", period=None, steps=20, typical_ms=850.0))))
    assert finding.summary == "1 step in 50 pauses for 850 ms while Python collects garbage."
    assert [remedy.id for remedy in finding.remedies] == ["gc-freeze", "gc-by-hand"]


def test_recompilation() -> None:
    finding = sure(find_recompiles(run(stall("compile", period=None, steps=12))))
    assert finding.summary == "1 step in 83 recompiles a function, which takes 68.0 ms."
    assert finding.remedies[0].id == "mark-dynamic"


def test_long_compilation_offers_a_cache_unless_one_was_used() -> None:
    evidence = evidence_of(run(account=account(wall_s=400.0)))
    evidence.compiled = CompiledWork(compilations=6, compile_s=120.0, cold_s=120.0, cached_s=0.0)
    finding = sure(compile_time.find(evidence))
    assert (finding.id, finding.of, finding.severity) == ("compile-time", "run", "medium")
    assert finding.share == pytest.approx(0.3)
    assert [one.id for one in finding.remedies] == ["keep-compile-cache", "compile-blocks"]
    evidence.compiled = CompiledWork(compilations=6, compile_s=120.0, cold_s=10.0, cached_s=110.0)
    assert [one.id for one in sure(compile_time.find(evidence)).remedies] == ["compile-blocks"]
    evidence.compiled = CompiledWork(compilations=1, compile_s=9.0, cold_s=9.0, cached_s=0.0)
    assert compile_time.find(evidence) is None


def test_allocator_retries() -> None:
    finding = sure(allocator_retries.judge(run(stall("allocator", period=None, steps=2))))
    assert finding.summary == (
        "2 steps of 1,000 wait 68.0 ms while the allocator frees its cache and asks for "
        "memory again."
    )
    assert finding.remedies[0].id == "expandable-segments"


@pytest.mark.parametrize(
    ("cause", "words", "first"),
    [
        ("logging", "longer in Python between two steps, as for logging or .item().", "less-often"),
        ("operating_system", "longer: no core is free, or pages come from disk.",
         "idle-machine"),
        ("unknown", "longer.", "on-stall"),
    ],
)  # fmt: skip
def test_a_stall_with_a_period_and_no_finding_of_its_own(
    cause: str, words: str, first: str
) -> None:
    finding = sure(find_periodic_stall(run(stall(cause, period=50))))
    assert finding.summary == f"Every 50th step takes 68.0 ms {words}"
    assert finding.remedies[0].id == first
    assert irregular_stalls.judge(run(stall(cause, period=50))) is None


def test_steps_that_do_as_much_more_work_do_not_stall() -> None:
    """A stall takes 10 ms: 8 ms of more work in the trace are enough, 7 are not."""
    a_run = run(stall("unknown", period=50, typical_ms=10.0))
    assert find_periodic_stall(a_run, longer_work_ns=8e6) is None
    assert find_periodic_stall(a_run, longer_work_ns=7e6) is not None
    measured = run(stall("logging", period=50, typical_ms=10.0))
    assert find_periodic_stall(measured, longer_work_ns=9e6) is not None


@pytest.mark.parametrize(("rule", "period"), [(periodic_stall, 50), (irregular_stalls, None)])
def test_where_the_line_is_known_it_is_named(rule: Any, period: int | None) -> None:
    place = Place(file="/home/u/train.py", line=40, function="log")
    a_run = run(stall("unknown", period=period, where=(place,)))
    finding = sure(rule.find(evidence_of(a_run)))
    assert finding.summary.endswith(" longer, in log (train.py:40).")
    assert finding.where == (place,)


def test_a_stall_without_a_period_that_nothing_explains() -> None:
    a_run = run(stall("unknown", period=None, steps=40))
    finding = sure(irregular_stalls.judge(a_run))
    assert finding.summary == (
        "1 step in 25 takes 68.0 ms longer, and nothing measured explains it."
    )
    assert find_periodic_stall(a_run) is None


def test_causes_with_a_finding_of_their_own_are_not_said_twice() -> None:
    for cause in ("data", "gc", "compile", "allocator", "evaluation", "checkpoint"):
        assert find_periodic_stall(run(stall(cause))) is None
        assert irregular_stalls.judge(run(stall(cause, period=None))) is None


# Slower with time

DOUBLED = LevelChange(step=310, low=308, high=311, before_ms=30.0, after_ms=60.0)


def test_a_step_that_doubles_after_step_300() -> None:
    """500 steps of 30 ms, 500 of 60 ms: 15 ms of a mean step of 45 ms are lost."""
    change = LevelChange(step=510, low=510, high=510, before_ms=30.0, after_ms=60.0)
    finding = sure(slows_down.judge(run(changes=(change,), times=times(mean_ms=45.0))))
    assert finding.summary == (
        "Steps take 2.0 times as long, from step 510 on: 60.0 ms instead of 30.0 ms."
    )
    assert finding.share == pytest.approx(15 / 45)
    assert finding.severity == "high"
    assert finding.evidence == (
        "15.0 ms of the 45.0 ms mean step",
        "step 510: 30.0 ms before, 60.0 ms after",
    )


def test_where_a_change_is_not_sure_its_interval_is_said() -> None:
    finding = sure(slows_down.judge(run(changes=(DOUBLED,), times=times(mean_ms=51.0))))
    assert finding.evidence[1] == ("step 310 (between 308 and 311): 30.0 ms before, 60.0 ms after")


def test_a_run_that_becomes_faster_does_not_slow_down() -> None:
    faster = LevelChange(step=310, low=308, high=311, before_ms=60.0, after_ms=30.0)
    assert slows_down.judge(run(changes=(faster,))) is None


def test_a_slow_time_that_ends_is_said_with_both_ends() -> None:
    slow = LevelChange(step=210, low=210, high=210, before_ms=30.0, after_ms=42.0)
    back = LevelChange(step=610, low=610, high=610, before_ms=42.0, after_ms=30.0)
    finding = sure(slows_down.judge(run(changes=(slow, back), times=times(mean_ms=34.8))))
    assert finding.summary == "Steps 210 to 609 take 40% longer; the others do not."
    assert finding.share == pytest.approx(0.4 * 12 / 34.8)
    assert finding.severity == "medium"


def test_a_drift_is_as_severe_as_what_the_last_steps_lose() -> None:
    drift = Trend(growth=0.3, low=0.25, high=0.35, per_step=1.0, follows_memory=True)
    finding = sure(slows_down.judge(run(trend=drift)))
    assert finding.summary == (
        "Steps get slower all the time: the last ones take 30% longer than the first."
    )
    assert finding.share == pytest.approx(0.15 / 1.15)
    assert finding.severity == "medium"
    assert finding.evidence == (
        "25% to 35% longer, over the run",
        "steps are longer where more memory is allocated",
    )
    shrinks = Trend(growth=-0.3, low=-0.35, high=-0.25, per_step=-1.0)
    assert slows_down.judge(run(trend=shrinks)) is None


# Shares of the training loop and of the wall time


def test_evaluation_every_50_steps() -> None:
    a_run = run(
        stall("evaluation", period=50, steps=20, typical_ms=900.0),
        account=account(evaluation=18.0),
    )
    finding = sure(evaluation_share.judge(a_run))
    assert finding.summary == "Evaluation takes 18% of the training loop: 900 ms every 50 steps."
    assert (finding.of, finding.severity) == ("run", "medium")
    assert finding.evidence == (
        "18.0 s of the 100 s of the training loop",
        "in 20 steps, 900 ms each",
    )


def test_without_a_wall_time_evaluation_is_a_share_of_steps_and_epochs() -> None:
    between = stall(
        "evaluation", steps=0, cost_ms=0.0, share=0.0, period=None, between_epochs_ms=45.0
    )
    finding = sure(evaluation_share.judge(run(between)))
    assert finding.share == pytest.approx(45 / 100)
    assert finding.severity == "high"
    assert finding.evidence == (
        "45.0 ms for each step of 100 ms",
        "between epochs: 45.0 ms for each step",
    )


def test_checkpoints_every_100_steps() -> None:
    a_run = run(
        stall("checkpoint", period=100, steps=10, typical_ms=2000.0),
        account=account(checkpoint=20.0),
    )
    finding = sure(checkpoint_share.judge(a_run))
    assert (
        finding.summary
        == "Saving checkpoints takes 20% of the training loop: 2.00 s every 100 steps."
    )
    assert finding.remedies[0].id == "async-checkpoint"


def test_wanted_work_under_5_percent_is_fine() -> None:
    few = run(account=account(evaluation=4.9, checkpoint=4.9))
    assert evaluation_share.judge(few) is None
    assert checkpoint_share.judge(few) is None


@pytest.mark.parametrize(
    ("wall_s", "start_s", "severity"),
    [(30.0, 12.0, "low"), (300.0, 90.0, "medium"), (2400.0, 700.0, "high")],
)
def test_a_short_start_up_is_low_whatever_it_is_of_a_test_run(
    wall_s: float, start_s: float, severity: str
) -> None:
    finding = sure(start_up.judge(run(account=account(wall_s, start_up=start_s))))
    assert (finding.severity, finding.of) == (severity, "run")
    assert finding.share == pytest.approx(start_s / wall_s)


def test_a_start_up_of_seconds_or_of_a_few_percent_is_not_reported() -> None:
    assert start_up.judge(run(account=account(10.0, start_up=9.0))) is None
    assert start_up.judge(run(account=account(10_000.0, start_up=300.0))) is None


def test_start_up_says_where_it_goes() -> None:
    whole = account(200.0, start_up=30.0, first_steps=50.0)
    parts = tuple(
        AccountPart(id=name, ms=ms, share=ms / 200e3)
        for name, ms in (("launch", 500.0), ("imports", 9500.0), ("first_batch", 20_000.0))
    )
    divided = tuple(
        AccountPart(id=part.id, ms=part.ms, share=part.share, parts=parts)
        if part.id == "start_up"
        else part
        for part in whole.parts
    )
    a_run = run(account=type(whole)(wall_ms=whole.wall_ms, goodput=0.6, parts=divided))
    finding = sure(start_up.judge(a_run))
    assert finding.summary == "Training reaches its pace after 80.0 s, 40% of the 200 s run."
    assert finding.evidence == (
        "the first steps, with compiling and warm-up 50.0 s, waiting for the first batch 20.0 s, "
        "imports 9.50 s",
    )
    assert finding.remedies[0].id == "keep-compile-cache"


# Memory

GROWTH = MemoryGrowth(
    bytes_per_step=1e6, low=0.9e6, high=1.1e6, first_bytes=10**9, last_bytes=16 * 10**8, of="device"
)


def test_memory_that_grows_over_the_run() -> None:
    finding = sure(find_growth(run(memory_growth=GROWTH), limit_bytes=4 * 10**9))
    assert finding.summary == "Allocated memory grows by 1.00 MB per step over the whole run."
    assert finding.evidence == (
        "at the end of a step: 1.00 GB after the warm-up, 1.60 GB at the end of the run (38% of it "
        "is growth)",
        "900 kB to 1.10 MB per step, by the lowest level from each step to the end",
        "at this rate memory is full in about 2,400 steps",
    )
    assert (finding.of, finding.severity) == ("memory", "medium")


def test_memory_that_is_full_before_as_many_steps_again_is_high() -> None:
    finding = sure(find_growth(run(memory_growth=GROWTH), limit_bytes=2 * 10**9))
    assert finding.severity == "high"


def test_memory_of_the_process_is_looked_at_with_tracemalloc() -> None:
    host = MemoryGrowth(
        bytes_per_step=1e5,
        low=9e4,
        high=1.1e5,
        first_bytes=10**9,
        last_bytes=102 * 10**7,
        of="host",
    )
    finding = sure(find_growth(run(memory_growth=host), limit_bytes=2 * 10**9))
    assert finding.summary.startswith("The process's memory grows by 100 kB per step")
    assert finding.severity == "low"
    assert finding.remedies[1].id == "tracemalloc"


def test_growth_of_the_whole_run_is_not_said_again_for_the_window() -> None:
    memory: Any = SimpleNamespace(
        growth=Growth(source="steps", bytes_per_step=10**7, steady=True, ends_bytes=(1, 2)),
        limit_bytes=10**9, peak_bytes=10**8,
    )  # fmt: skip
    assert memory_leak.find(evidence_of(None, memory)) is not None
    assert memory_leak.find(evidence_of(healthy_run(), memory)) is not None
    assert memory_leak.find(evidence_of(run(memory_growth=GROWTH), memory)) is None


# Together


def finding_of(name: str, share: float, of: Any, severity: Any = "high") -> Finding:
    return Finding(
        id=name, title=name, share=share, severity=severity, summary="", evidence=(), of=of
    )


def test_a_share_of_the_wall_time_is_compared_on_the_wall_time() -> None:
    """Evaluation leaves half of the run: 70% of a step is 35% of the run."""
    step = finding_of("host-bound", 0.7, "step")
    evaluation = finding_of("evaluation-share", 0.5, "run")
    assert [f.id for f in sort_findings((step, evaluation))] == ["evaluation-share", "host-bound"]
    less = finding_of("evaluation-share", 0.3, "run")
    assert [f.id for f in sort_findings((less, step))] == ["host-bound", "evaluation-share"]


def test_a_short_start_up_never_leads_over_a_loss_in_every_step() -> None:
    start = sure(start_up.judge(run(account=account(30.0, start_up=12.0))))
    medium = finding_of("data-loading", 0.11, "step", "medium")
    assert [f.id for f in sort_findings((start, medium))] == ["data-loading", "start-up"]


def test_healthy_says_how_much_steps_vary() -> None:
    inputs = InputEffect(explained=0.9, fixed_ms=1.0, per_element_ms=0.1, fewest=128, most=4096)
    assert healthy._describe_variation(healthy_run()) == "Steps vary by 1.0%, and no single loss"
    assert list(healthy._describe_steps(healthy_run(inputs=inputs))) == [
        "1,000 steps: 30.1 ms on average, stalls 0.7%, 99% take at most 30.7 ms",
        "inputs of 128 to 4,096 elements explain 90% of how steps differ",
    ]
    assert healthy._describe_variation(None) == "No single loss"
    assert list(healthy._describe_steps(None)) == []


def test_every_finding_of_the_run_is_in_the_list() -> None:
    names = {rule.id for rule in OF_THE_RUN}
    assert names <= {rule.id for rule in load_rules("rank")}
    assert names == {
        "data-stalls", "periodic-stall", "irregular-stalls", "slows-down", "gc-pauses",
        "recompiles", "allocator-retries", "evaluation-share", "checkpoint-share", "start-up",
        "memory-growth",
    }  # fmt: skip


# A run that ends soon after it began to train is not judged as if it were the whole training.


def find_compiling(wall_s: float, compile_s: float, **seconds: float) -> Any:
    a_run = run(account=account(wall_s, **seconds))
    compiled = CompiledWork(compilations=2, compile_s=compile_s, cold_s=compile_s, cached_s=0.0)
    return compile_time.find(SimpleNamespace(run=a_run, compiled=compiled))  # type: ignore[arg-type]


def test_a_minute_of_start_up_before_a_second_of_training_is_low_and_says_why() -> None:
    found = start_up.judge(run(account=account(76.0, start_up=15.0, first_steps=60.0)))
    assert found is not None
    assert found.severity == "low"
    assert found.share == pytest.approx(75 / 76)  # still the share of this run
    assert found.evidence[-1] == (
        "this run trained for 1.00 s only; with an hour of training it would be 2.0% of the run"
    )


def test_a_start_up_of_half_an_hour_counts_in_a_trial_too() -> None:
    found = start_up.judge(run(account=account(1810.0, start_up=1800.0)))
    assert found is not None
    assert found.severity == "high"
    assert "33% of the run" in found.evidence[-1]


def test_a_run_that_trained_longer_than_it_started_is_judged_as_it_is() -> None:
    found = start_up.judge(run(account=account(300.0, start_up=90.0)))
    assert found is not None
    assert found.severity == "medium"
    assert len(found.evidence) == 1


def test_compiling_is_judged_in_the_same_way() -> None:
    trial = find_compiling(100.0, 80.0, first_steps=90.0)
    assert trial.severity == "low"
    assert trial.evidence[-1].startswith("this run trained for 10.0 s only")
    whole = find_compiling(400.0, 80.0, first_steps=90.0)
    assert whole.severity == "medium"
    assert not any("an hour" in line for line in whole.evidence)


@pytest.mark.parametrize(("rule", "cause"), [(gc_pauses, "gc"), (irregular_stalls, "unknown")])
def test_what_came_once_is_low_and_says_so(rule: Any, cause: Any) -> None:
    once = rule.judge(run(stall(cause, period=None, steps=1, share=0.3)))
    assert once.severity == "low"
    assert once.evidence[-1] == "it happened once: only a longer run shows whether it happens again"
    often = rule.judge(run(stall(cause, period=None, steps=2, share=0.3)))
    assert often.severity == "high"
    assert not any("once" in line for line in often.evidence)


def steps_with_window(count: int, window: range) -> StepColumns:
    """The step after the window takes ten times as long as the others."""
    number = np.arange(count)
    wall = np.full(count, 20_000_000)
    wall[window.stop] *= 10
    nothing = np.zeros(count, np.bool_)
    return StepColumns(
        number=number,
        wall_ns=wall,
        end_unix_ns=np.cumsum(wall),
        phases_ns={},
        window=np.isin(number, window),
        memory=nothing,
        whole=~nothing,
    )


def test_the_step_after_a_window_does_not_count() -> None:
    steady, warm_up = find_steady(steps_with_window(30, range(12, 15)))
    assert warm_up == 0
    assert np.flatnonzero(~steady).tolist() == [12, 13, 14, 15]


def test_it_counts_where_few_others_are_there() -> None:
    steady, _ = find_steady(steps_with_window(9, range(4, 6)))
    assert np.flatnonzero(~steady).tolist() == [4, 5]


def test_a_step_after_a_gap_in_the_numbers_counts() -> None:
    steps = steps_with_window(30, range(12, 15))
    later = steps.number.copy()
    later[15:] += 5  # lines between are missing
    assert find_steady(replace(steps, number=later))[0][15]
