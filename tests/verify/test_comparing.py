"""Whole comparisons: run folders, lists and traces in, one record out."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from folders import noisy, write_run

from stepscope.errors import NotCapturedError, UnreadableInputError, UsageError
from stepscope.explain.explain_job import explain_job
from stepscope.records.comparison import Comparison
from stepscope.text.figures import milliseconds
from stepscope.ui.topics.comparison import comparison_json
from stepscope.verify.compare import compare


def folders(tmp_path: Path, a_ms: float, b_ms: float, **b: Any) -> tuple[list[str], list[str]]:
    first = write_run(tmp_path / "a", noisy(a_ms, seed=1))
    second = write_run(tmp_path / "b", noisy(b_ms, seed=2), **b)
    return [str(first)], [str(second)]


def test_a_faster_run_is_found_with_its_size(tmp_path: Path) -> None:
    found = compare(*folders(tmp_path, 20, 18))
    assert found.verdict == "faster"
    assert found.change == pytest.approx(-0.1, abs=0.01)
    assert found.low < -0.1 < found.high < 0
    assert found.a_ms == pytest.approx(20, rel=0.01)
    assert found.b_ms == pytest.approx(18, rel=0.01)
    assert found.confidence == 0.95
    assert found.steps_are == "measured"


def test_a_slower_run_is_found(tmp_path: Path) -> None:
    found = compare(*folders(tmp_path, 20, 20.8))
    assert found.verdict == "slower"
    assert found.low > 0


def test_the_same_run_against_itself_is_no_difference(tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "a", noisy(20)))
    found = compare([run], [run])
    assert found.verdict == "no difference seen"
    assert found.change == 0
    assert found.low < 0 < found.high
    assert found.config == ()


def test_less_than_starts_may_differ_is_no_difference(tmp_path: Path) -> None:
    """A quiet device measures its own steps to a thousandth; its next start differs by more."""
    a = write_run(tmp_path / "a", noisy(20, noise=0.001, seed=1))
    b = write_run(tmp_path / "b", noisy(20.1, noise=0.001, seed=2))
    found = compare([str(a)], [str(b)])
    assert found.verdict == "no difference seen"
    assert found.steps_low > 0.004
    assert found.between_starts == 0.005
    sharp = compare([str(a)], [str(b)], between_starts=0)
    assert sharp.verdict == "slower"
    assert (sharp.low, sharp.high) == (found.steps_low, found.steps_high)
    assert sharp.between_starts is None


def test_a_list_is_taken_at_its_word(tmp_path: Path) -> None:
    for name, ms in (("a", 20), ("b", 20.1)):
        steps = noisy(ms, noise=0.001, seed=len(name))
        (tmp_path / f"{name}.txt").write_text("\n".join(map(str, steps)))
    found = compare([str(tmp_path / "a.txt")], [str(tmp_path / "b.txt")])
    assert found.steps_are == "listed"
    assert found.verdict == "slower"
    assert found.between_starts is None


def test_several_runs_a_side_measure_what_starts_differ(tmp_path: Path) -> None:
    """Steps of each run are sharp, but runs of one command lie 2% apart: 1% is nothing then."""
    sides = [
        [
            str(write_run(tmp_path / f"{side}{i}", noisy(ms, noise=0.001, seed=i)))
            for i, ms in enumerate(runs)
        ]
        for side, runs in (("a", (20, 20.4, 20.8)), ("b", (20.2, 20.6, 21.0)))
    ]
    found = compare(*sides)
    assert found.verdict == "no difference seen"
    assert found.between_starts is None
    assert len(found.a.runs) == 3
    assert compare(*sides, paired=True).verdict == "slower"  # each pair says 1%


def test_pairs_need_two_of_each(tmp_path: Path) -> None:
    a, b = folders(tmp_path, 20, 21)
    with pytest.raises(UsageError, match="as many runs of A as of B"):
        compare([*a, *a], b, paired=True)


def test_warm_up_is_left_out_and_told(tmp_path: Path) -> None:
    slow = [60.0] * 20
    a = write_run(tmp_path / "a", noisy(20, seed=1))
    b = write_run(tmp_path / "b", slow + noisy(20, seed=2))
    found = compare([str(a)], [str(b)])
    assert found.b.runs[0].warm_up == 20
    assert found.b.runs[0].steps == 200
    assert found.phases[0].b_ms == pytest.approx(10, rel=0.01)


def test_phases_say_where_the_change_is(tmp_path: Path) -> None:
    found = compare(*folders(tmp_path, 20, 22))
    assert [phase.id for phase in found.phases] == ["forward", "backward"]  # others take no time
    forward = found.phases[0]
    assert forward.a_ms == pytest.approx(10, rel=0.01)
    assert forward.change_ms == pytest.approx(1, abs=0.1)
    assert forward.low_ms > 0


def test_slow_steps_have_a_change_of_their_own(tmp_path: Path) -> None:
    steps = noisy(20, steps=400, seed=2)
    worse = [ms * 1.5 if i % 10 == 0 else ms for i, ms in enumerate(steps)]
    a = write_run(tmp_path / "a", noisy(20, steps=400, seed=1))
    b = write_run(tmp_path / "b", worse)
    found = compare([str(a)], [str(b)])
    assert found.median is not None
    assert found.median.verdict == "no difference seen"
    assert found.slow_steps is not None
    assert found.slow_steps.low > 0.2


def stalling(ms: float, waits: float, *, every: int = 4, seed: int = 1) -> tuple[Any, ...]:
    """Steps whose every fourth waits for data, and that waiting."""
    steps = noisy(ms, steps=400, seed=seed)
    data = [waits if i % every == 0 else 0.0 for i in range(len(steps))]
    return [own + wait for own, wait in zip(steps, data, strict=True)], data


def write_stalling(folder: Path, ms: float, waits: float, seed: int) -> str:
    steps, data = stalling(ms, waits, seed=seed)
    return str(write_run(folder, steps, data_ms=data))


def test_fewer_stalls_make_the_mean_shorter_though_the_typical_step_stays(tmp_path: Path) -> None:
    """Every fourth step waits 80 ms, then 8: 20 ms and 2 ms of the mean."""
    a = write_stalling(tmp_path / "a", 37, 80, seed=1)
    b = write_stalling(tmp_path / "b", 37, 8, seed=2)
    found = compare([a], [b])
    assert found.basis == "mean"
    assert found.a_ms == pytest.approx(57, rel=0.01)
    assert found.b_ms == pytest.approx(39, rel=0.01)
    assert found.verdict == "faster"
    assert found.median is not None
    assert found.median.verdict == "no difference seen"
    stall = found.stalls[0]  # noise in the steps that stalled is a cause unknown
    assert (stall.id, stall.low_ms < 0, stall.high_ms < 0) == ("stall_data", True, True)
    assert stall.a_ms == pytest.approx(20, rel=0.02)
    assert stall.b_ms == pytest.approx(2, rel=0.08)


def test_phases_stalls_and_the_rest_add_up_to_the_difference_of_the_means(tmp_path: Path) -> None:
    a = write_stalling(tmp_path / "a", 37, 80, seed=1)
    b = write_stalling(tmp_path / "b", 40, 8, seed=2)
    found = compare([a], [b])
    assert found.rest is not None
    rows = (*found.phases, *found.stalls, found.rest)
    assert sum(row.change_ms for row in rows) == pytest.approx(found.b_ms - found.a_ms)
    assert sum(row.a_ms for row in rows) == pytest.approx(found.a_ms)


def test_stalls_of_several_runs_are_averaged(tmp_path: Path) -> None:
    a = [write_stalling(tmp_path / f"a{i}", 37, waits, seed=i) for i, waits in enumerate((60, 100))]
    b = [write_stalling(tmp_path / f"b{i}", 37, 8, seed=5 + i) for i in range(2)]
    stall = compare(a, b).stalls[0]
    assert stall.a_ms == pytest.approx((15 + 25) / 2, rel=0.02)


def test_a_list_of_steps_shows_stalls_without_a_cause(tmp_path: Path) -> None:
    for name, waits in (("a", 80.0), ("b", 0.0)):
        steps, _ = stalling(37, waits)
        (tmp_path / f"{name}.txt").write_text("\n".join(map(str, steps)))
    found = compare([str(tmp_path / "a.txt")], [str(tmp_path / "b.txt")])
    assert [row.id for row in found.stalls] == ["stall_unknown"]
    assert found.verdict == "faster"


def test_few_steps_have_no_slow_ones(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", noisy(20, steps=60))
    found = compare([str(a)], [str(a)])
    assert found.slow_steps is None


def test_facts_that_differ_are_listed(tmp_path: Path) -> None:
    a, b = folders(tmp_path, 20, 20, torch="2.14", command=("python", "train.py", "--bf16"))
    found = compare(a, b)
    assert {(row.name, row.a, row.b) for row in found.config} == {
        ("torch", "2.13", "2.14"),
        ("command", "python train.py", "python train.py --bf16"),
    }


def test_memory_of_both_sides(tmp_path: Path) -> None:
    a, b = folders(tmp_path, 20, 20, peak_bytes=456)
    found = compare(a, b)
    assert (found.a_peak_bytes, found.b_peak_bytes) == (None, 456)


def test_one_step_is_not_enough(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [20])
    b = write_run(tmp_path / "b", noisy(20))
    with pytest.raises(NotCapturedError, match="has one step"):
        compare([str(a)], [str(b)])


# Traces


def trace_of(steps_us: list[int], kernels: dict[str, int]) -> list[dict[str, Any]]:
    """Steps end to end, each with its kernels from its start on."""
    events, start = [], 0
    for number, dur in enumerate(steps_us):
        name = f"ProfilerStep#{number}"
        step = {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1}
        events.append(step | {"ts": start, "dur": dur})
        at = start
        for place, (kernel, length) in enumerate(kernels.items()):
            both = {"correlation": number * 100 + place + 1}
            call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1}
            events.append(call | {"tid": 1, "ts": at, "dur": 1, "args": both})
            device = {"ph": "X", "cat": "kernel", "name": kernel, "pid": 0, "tid": 7}
            more = {**both, "stream": 7, "device": 0}
            events.append(device | {"ts": at + 2, "dur": length, "args": more})
            at += length
        start += dur
    return events


def traces(write_trace: Callable[..., Path]) -> tuple[Path, Path]:
    a = write_trace(trace_of([1000, 1001, 1000, 999, 1000], {"gemm": 600, "relu": 300}))
    b = write_trace(trace_of([800, 801, 800, 799, 800], {"gemm": 400, "fused": 300}))
    return a, b


def test_traces_are_compared_by_their_profiled_steps(write_trace: Callable[..., Path]) -> None:
    a, b = traces(write_trace)
    found = compare([str(a)], [str(b)])
    assert found.steps_are == "profiled"
    assert found.verdict == "faster"
    assert found.change == pytest.approx(-0.2, abs=0.001)
    assert any("profiled steps" in note for note in found.notes)


def test_kernels_that_came_went_and_changed_by_hand(write_trace: Callable[..., Path]) -> None:
    a, b = traces(write_trace)
    found = {row.name: row for row in compare([str(a)], [str(b)]).kernels}
    assert found["gemm"].a_ms == pytest.approx(0.6)
    assert found["gemm"].b_ms == pytest.approx(0.4)
    assert found["gemm"].change_ms == pytest.approx(-0.2)
    assert (found["gemm"].a_calls, found["gemm"].b_calls) == (1, 1)
    assert (found["relu"].a_ms, found["relu"].b_ms) == (pytest.approx(0.3), None)
    assert (found["fused"].a_ms, found["fused"].b_calls) == (None, 1)


def test_parts_of_the_budget_add_up_to_both_steps(write_trace: Callable[..., Path]) -> None:
    a, b = traces(write_trace)
    found = compare([str(a)], [str(b)])
    change = {row.id: row.change_ms for row in found.budget}
    assert sum(row.change_ms for row in found.budget) == pytest.approx(found.b_ms - found.a_ms)
    assert change["compute"] == pytest.approx(-0.2, abs=0.01)


def test_profiled_steps_are_divided_as_recorded_by_hand(write_trace: Callable[..., Path]) -> None:
    """A step of 1000 µs has kernels of 900 in it, one of 800 has 700."""
    a, b = traces(write_trace)
    found = compare([str(a)], [str(b)])
    parts = {row.id: (row.a_ms, row.b_ms) for row in found.budget}
    assert (found.a_ms, found.b_ms) == (pytest.approx(1.0), pytest.approx(0.8))
    assert parts["compute"] == (pytest.approx(0.9), pytest.approx(0.7))
    assert sum(a for a, _ in parts.values()) == pytest.approx(1.0)
    assert sum(b for _, b in parts.values()) == pytest.approx(0.8)


@pytest.mark.parametrize("bare", [(True, True), (True, False), (False, True), (False, False)])
def test_parts_add_up_to_the_step_that_the_verdict_names(
    golden: Path, tmp_path: Path, bare: tuple[bool, bool]
) -> None:
    """Whatever `explain` makes of each: steps measured in the run, or the trace's, corrected."""
    run = golden / "h200-resnet18"
    trace = shutil.copy(run / "rank-00000/trace.json.gz", tmp_path)
    paths = [trace if alone else run for alone in bare]
    found = compare([str(paths[0])], [str(paths[1])], cache=False)
    assert found.steps_are == ("profiled" if any(bare) else "measured")
    assert sum(row.a_ms for row in found.budget) == pytest.approx(found.a_ms, rel=1e-12)
    assert sum(row.b_ms for row in found.budget) == pytest.approx(found.b_ms, rel=1e-12)
    # One trace on both sides: not one part may differ.
    assert [row.change_ms for row in found.budget] == pytest.approx([0.0] * len(found.budget))


def test_a_step_that_explain_calls_shorter_is_named_with_its_reason(
    golden: Path, tmp_path: Path
) -> None:
    run = golden / "h200-resnet18"
    trace = shutil.copy(run / "rank-00000/trace.json.gz", tmp_path)
    ours, alone = explain_job(str(run), cache=False), explain_job(str(trace), cache=False)
    found = compare([str(run)], [str(trace)], cache=False)
    assert alone.budget.basis == "corrected"
    assert alone.budget.step_ms < found.b_ms  # else there is nothing to be named
    (note,) = [note for note in found.notes if "stepscope explain" in note]
    assert f"{milliseconds(ours.budget.step_ms)} (measured) for A's step" in note
    assert f"{milliseconds(alone.budget.step_ms)} (estimated) for B's" in note
    measured = compare([str(run)], [str(run)], cache=False)
    assert not [note for note in measured.notes if "stepscope explain" in note]


def test_traces_are_compared_by_the_step_without_the_profiler(golden: Path, tmp_path: Path) -> None:
    """The very step that `explain` gives; the profiled pair stands beside it."""
    trace = shutil.copy(golden / "h200-resnet18" / "rank-00000/trace.json.gz", tmp_path)
    alone = explain_job(str(trace), cache=False)
    assert alone.budget.basis == "corrected"
    found = compare([str(trace)], [str(trace)], cache=False)
    assert found.a_ms == found.b_ms == pytest.approx(alone.budget.step_ms)
    assert found.low < found.change == 0 < found.high
    assert found.profiled is not None
    assert found.profiled.a_ms > found.a_ms
    assert found.high >= found.profiled.high  # the doubt about both corrections comes on top
    body = comparison_json(found)
    assert body["profiled"]["a_ms"] == found.profiled.a_ms
    assert "overhead is subtracted" in body["why"]
    assert any("both steps are estimates" in note for note in found.notes)


def test_parts_of_several_ranks_add_up_too(tmp_path: Path) -> None:
    """The slowest rank's step, divided by the mean of their shares: 60% and 80% compute."""
    for side, slow in (("a", 1000), ("b", 1200)):
        for rank, (kernel, dur) in enumerate(((600, slow), (640, 800))):
            events = trace_of([dur] * 4, {"gemm": kernel * dur // slow if rank == 0 else kernel})
            head = {"distributedInfo": {"rank": rank, "world_size": 2}}
            (tmp_path / side).mkdir(exist_ok=True)
            file = tmp_path / side / f"rank{rank}.json"
            file.write_text(json.dumps({**head, "traceEvents": events}))
    found = compare([str(tmp_path / "a")], [str(tmp_path / "b")], cache=False)
    assert (found.a_ms, found.b_ms) == (pytest.approx(1.0), pytest.approx(1.2))
    parts = {row.id: (row.a_ms, row.b_ms) for row in found.budget}
    assert parts["compute"] == (pytest.approx(0.7 * 1.0), pytest.approx(0.65 * 1.2))
    assert sum(a for a, _ in parts.values()) == pytest.approx(found.a_ms)
    assert sum(b for _, b in parts.values()) == pytest.approx(found.b_ms)


def test_profiled_and_measured_steps_are_not_mixed(
    tmp_path: Path, write_trace: Callable[..., Path]
) -> None:
    trace, _ = traces(write_trace)
    run = write_run(tmp_path / "run", noisy(1))
    with pytest.raises(UsageError, match="Their difference would be the profiler's"):
        compare([str(run)], [str(trace)])
    (tmp_path / "steps.txt").write_text("1\n2\n")
    with pytest.raises(UsageError, match="Their difference would be the profiler's"):
        compare([str(trace)], [str(tmp_path / "steps.txt")])


def test_a_run_folder_with_a_trace_meets_a_bare_trace_under_the_profiler(golden: Path) -> None:
    run = golden / "h200-resnet18"
    found = compare([str(run)], [str(run / "rank-00000/trace.json.gz")], cache=False)
    assert found.steps_are == "profiled"
    assert found.change == 0
    assert any("the profiled steps of both sides" in note for note in found.notes)


def test_a_trace_without_several_steps_is_not_captured(write_trace: Callable[..., Path]) -> None:
    one = write_trace(trace_of([1000], {"gemm": 600}))
    with pytest.raises(NotCapturedError, match="has one profiled step"):
        compare([str(one)], [str(one)])


def test_the_recorded_run_against_a_slower_copy_of_itself(golden: Path, tmp_path: Path) -> None:
    """Every step 5% longer: everything about the trace is the same, the step is not."""
    a, b = golden / "h200-resnet18", tmp_path / "slower"
    shutil.copytree(a, b)
    file = b / "rank-00000/steps.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if "device_ns" in row:
            row["device_ns"] = round(row["device_ns"] * 1.05)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found: Comparison = compare([str(a)], [str(b)], cache=False)
    assert found.verdict == "slower"
    assert found.change == pytest.approx(0.05, abs=0.001)
    assert found.kernels == ()
    assert sum(row.change_ms for row in found.budget) == pytest.approx(found.b_ms - found.a_ms)
    assert found.workload.script == "resnet18.py"
    assert found.workload.device == "NVIDIA H200"
    assert found.workload.signature


@pytest.mark.parametrize(("steps", "said"), [(60, True), (100, False)])
def test_below_a_hundred_steps_a_note_warns_of_spells(
    tmp_path: Path, steps: int, said: bool
) -> None:
    run = str(write_run(tmp_path / "a", noisy(20, steps=steps)))
    notes = compare([run], [run]).notes
    assert any(f"has only {steps} steps" in note for note in notes) is said


def test_kernels_of_earlier_steps_are_no_part_of_a_step(write_trace: Callable[..., Path]) -> None:
    """A window opens while the device still works on what was launched before it."""
    events = trace_of([1000, 1001, 999], {"gemm": 600})
    left = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7}
    more = {"correlation": 9000, "stream": 7, "device": 0}
    a = write_trace([left | {"ts": -900, "dur": 600, "args": more}, *events])
    b = write_trace(trace_of([800, 801, 799], {"gemm": 500}))
    (row,) = compare([str(a)], [str(b)]).kernels
    assert (row.a_ms, row.a_calls) == (pytest.approx(0.6), 1)


def test_a_file_that_is_no_trace_is_said_before_its_steps_are_called_profiled(
    tmp_path: Path,
) -> None:
    (tmp_path / "steps.txt").write_text("1\n2\n")
    (tmp_path / "other.json").write_text('{"what": "ever"}')
    with pytest.raises(UnreadableInputError, match=r"other\.json"):
        compare([str(tmp_path / "steps.txt")], [str(tmp_path / "other.json")])


def test_two_steps_against_hundreds_raise_no_alarm(tmp_path: Path) -> None:
    """They lie close to each other by chance, within one standard deviation of the others."""
    many, two = tmp_path / "many.txt", tmp_path / "two.txt"
    many.write_text("\n".join(map(str, noisy(10, steps=300))))
    two.write_text("10.15\n10.16\n")
    found = compare([str(many)], [str(two)])
    assert found.verdict == "no difference seen"
    assert any("B has only 2 steps" in note for note in found.notes)


def test_phases_and_the_rest_add_up_to_the_change_exactly(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", noisy(20, seed=1))
    b = write_run(tmp_path / "b", noisy(17, seed=2))
    c = write_run(tmp_path / "c", noisy(17, seed=3))
    for found in (compare([str(a)], [str(b)]), compare([str(a), str(b)], [str(b), str(c)])):
        assert found.rest is not None
        parts = [*found.phases, found.rest]
        assert sum(row.change_ms for row in parts) == pytest.approx(found.b_ms - found.a_ms)
        assert sum(row.a_ms for row in parts) == pytest.approx(found.a_ms)
        assert sum(row.b_ms for row in parts) == pytest.approx(found.b_ms)
        # as uncertain as the step and its phases together
        halves = [(row.high_ms - row.low_ms) / 2 for row in found.phases]
        step = found.a_ms * (found.high - found.low) / 2
        assert found.rest.high_ms - found.rest.change_ms == pytest.approx(math.hypot(step, *halves))


def test_a_trail_is_the_steps_in_order_or_medians_of_stretches(tmp_path: Path) -> None:
    few, many = tmp_path / "few.txt", tmp_path / "many.txt"
    few.write_text("3\n1\n2\n")
    many.write_text("\n".join(str(1 + step // 2) for step in range(320)))
    found = compare([str(few)], [str(many)])
    assert found.a.runs[0].trail_ms == (3.0, 1.0, 2.0)
    dropped = found.b.runs[0].warm_up
    assert dropped == 0 or dropped % 2 == 0
    assert len(found.b.runs[0].trail_ms) == 160
    assert found.b.runs[0].trail_ms[-1] == 160.0
