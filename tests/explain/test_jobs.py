"""Simulated jobs: the generator is consistent, and what is reported about its jobs is true."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from clock_bounds import offset_bounds
from jobs import FORMS, PIPELINES, Fault, Form, Job, Plan, draw_plan, make_job, profile_of
from jobs_files import write_job
from jobs_table import describe, describe_answer, judge, tally
from jobs_world import paces
from stepscope.records.job import KINDS, SYNCHRONISING, CollectiveCalls, RankPart
from stepscope.records.job import Job as Joined

# How many jobs of each size a block has; thresholds hold for its jobs of a size together. Other
# blocks are other draws of the same: `make test-slow` has them.
FAULTY = {2: 50, 4: 50, 8: 50, 64: 10, 1024: 1}
HEALTHY = {2: 25, 4: 25, 8: 25, 64: 5, 1024: 1}
BLOCKS = [0, pytest.param(1, marks=pytest.mark.slow)]


def join(parts: Sequence[RankPart], profiles: Sequence[Any] = ()) -> Joined:
    from stepscope.explain.job.all_ranks import join_ranks

    return join_ranks(parts, profiles)


def small(form: Form, **given: Any) -> Plan:
    return Plan(**{"ranks": 8, "steps": 4, "form": form, "stages": 4, "tensor_ranks": 2, **given})


# The generator


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_nobody_leaves_a_collective_before_everybody_has_come(form: Form, backend: Any) -> None:
    calls = make_job(small(form, backend=backend)).timeline.calls
    last = np.full(calls["match"].max() + 1, -np.inf)
    np.maximum.at(last, calls["match"], calls["arrival"])
    waits = np.isin(calls["kind"], [KINDS.index(kind) for kind in SYNCHRONISING])
    waits |= calls["kind"] == KINDS.index("recv")
    assert waits.any()
    assert (calls["end"] > last[calls["match"]])[waits].all()
    assert (calls["called"] <= calls["arrival"]).all()
    assert (calls["arrival"] <= calls["start"]).all()
    assert (calls["start"] < calls["end"]).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_and_a_rank_do_one_thing_at_a_time(form: Form) -> None:
    timeline = make_job(small(form)).timeline
    for rank in range(8):
        calls = timeline.of_rank(timeline.calls, rank)
        for stream in np.unique(calls["stream"]):
            mine = calls["stream"] == stream
            assert (calls["start"][mine][1:] >= calls["end"][mine][:-1]).all()
        compute = timeline.of_rank(timeline.compute, rank)
        assert (compute["start"][1:] >= compute["end"][:-1]).all()
        step = compute["step"]
        assert (compute["start"] >= timeline.step_start[step, rank]).all()
        assert (compute["end"] <= timeline.step_end[step, rank]).all()
        assert (calls["end"] <= timeline.step_end[calls["step"], rank]).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_exposed_communication_is_what_millisecond_by_millisecond_is_not_hidden(
    form: Form, backend: Any
) -> None:
    job = make_job(small(form, backend=backend))
    grid_ns = 5_000.0
    for rank in (0, 5):
        part = job.parts[rank]
        times = np.arange(0, job.timeline.step_end[:, rank].max(), grid_ns) + grid_ns / 2
        compute = job.timeline.of_rank(job.timeline.compute, rank)
        calls = job.timeline.of_rank(job.timeline.calls, rank)
        working = covered(times, compute["start"], compute["end"])
        talking = covered(times, calls["start"], calls["end"])
        if backend == "gloo":
            talking |= covered(times, calls["called"], calls["called"] + 30e3)
        step = np.searchsorted(job.timeline.step_end[:, rank], times)
        exposed = np.bincount(step[talking & ~working], minlength=4) * grid_ns
        assert part.pace.exposed_comm_ns == pytest.approx(exposed, abs=grid_ns * len(calls["rank"]))
        assert part.pace.exposed_comm_ns == pytest.approx(exposed, rel=0.1)
        for row in range(0, len(part.calls), 7):
            inside = covered(times, calls["start"][row : row + 1], calls["end"][row : row + 1])
            expected = (inside & ~working).sum() * grid_ns
            assert part.calls.exposed_ns[row] == pytest.approx(expected, abs=4 * grid_ns)


def covered(times: Any, starts: Any, ends: Any) -> Any:
    """Which times lie in any of these spans, counted the slow way."""
    inside = np.zeros(len(times), np.bool_)
    for start, end in zip(starts, ends, strict=True):
        inside |= (times >= start) & (times < end)
    return inside


@pytest.mark.parametrize("form", FORMS)
def test_own_time_is_input_and_work_whatever_the_others_do(form: Form) -> None:
    job = make_job(small(form, fault=Fault(cause="compute", size=1.5, place=3)))
    for part in job.parts:
        pace = part.pace
        bare = pace.compute_ns + pace.input_ns + job.plan.other_ns
        assert pace.own_ns == pytest.approx(bare, rel=1e-3)
    own = np.array([part.pace.own_ns.mean() for part in job.parts])
    assert own.argmax() == 3


def test_columns_are_of_the_records_types() -> None:
    part = make_job(small("1f1b", rounds=3)).parts[2]
    kinds = {"kind": np.int8, "group": np.int32, "peer": np.int32, "step": np.int32}
    for name in part.calls.__struct_fields__[1:]:
        assert getattr(part.calls, name).dtype == kinds.get(name, np.int64), name
    for name in part.pace.__struct_fields__:
        assert getattr(part.pace, name).dtype == np.int64, name
    assert {group.description for group in part.calls.groups} == {"mesh_dp", "mesh_pp"}
    assert all(part.rank in group.ranks for group in part.calls.groups)
    assert (np.diff(part.calls.arrival_ns) >= 0).all() or part.calls.kind.max() > 6
    assert [len(each.came_ns) for each in part.rounds] == [3, 3]


@pytest.mark.parametrize("ranks", [2, 64])
def test_rounds_bound_the_true_offset(ranks: int) -> None:
    for seed in range(5):
        job = make_job(Plan(ranks=ranks, seed=seed, rounds=50, offset_ns=30e9))
        lead = job.parts[0].rounds
        assert all((each.came_ns == each.left_ns).all() for each in lead)
        for part in job.parts[1:]:
            for sync, own in enumerate(part.rounds):
                bounds = offset_bounds(
                    np.stack((lead[sync].came_ns, lead[sync].left_ns), 1).tolist(),
                    np.stack((own.came_ns, own.left_ns), 1).tolist(),
                )
                true = job.clocks.difference_ns(part.rank, 0, int(lead[sync].came_ns[0]))
                assert bounds is not None
                assert bounds[0] <= true <= bounds[1]
                assert 20_000 < (own.left_ns - own.came_ns).mean() < 250_000


def test_a_clock_reads_and_is_read_back() -> None:
    job = make_job(Plan(ranks=4, offset_ns=30e9, drift_ppm=50))
    at = int(job.clocks.read(2, np.array([5e9]))[0])
    assert job.clocks.true_time(2, at) == pytest.approx(5e9, abs=1)
    apart = job.clocks.read(3, np.array([5e9]))[0] - at
    assert job.clocks.difference_ns(3, 2, at) == pytest.approx(apart, abs=2)


@pytest.mark.parametrize("form", PIPELINES)
@pytest.mark.parametrize(("stages", "micro"), [(2, 4), (4, 8), (8, 16)])
def test_a_pipelines_bubble_is_what_theory_says_where_nothing_else_costs(
    form: Form, stages: int, micro: int
) -> None:
    plan = Plan(
        ranks=stages,
        steps=3,
        form=form,
        stages=stages,
        microbatches=micro,
        noise=0.0,
        input_ns=0.0,
        other_ns=0.0,
        compute_ns=2e9,
        size_bytes=64,
    )
    bubble = make_job(plan).truth.bubble[:, 0]
    waits = 0.96 * (stages - 1) / micro  # the optimizer's 4% of compute has no bubble
    assert bubble == pytest.approx(waits / (1 + waits), rel=0.01)


def test_equal_plans_give_equal_jobs_and_seeds_differ() -> None:
    first, again, other = (make_job(small("ddp", seed=seed)) for seed in (1, 1, 2))
    assert (first.parts[3].calls.end_ns == again.parts[3].calls.end_ns).all()
    assert (first.parts[3].calls.end_ns != other.parts[3].calls.end_ns).any()


@pytest.mark.parametrize("form", FORMS)
def test_a_thousand_ranks_are_made_in_a_moment(form: Form) -> None:
    began = time.process_time()
    job = make_job(Plan(ranks=1024, steps=10, form=form))
    assert time.process_time() - began < 2
    assert len(job.parts) == 1024


@pytest.mark.parametrize("cause", ["compute", "input", "link", "stage"])
def test_a_fault_shows_where_it_should(cause: Any) -> None:
    for seed in range(10):
        job = make_job(draw_plan(seed, 16, noise=0.01, cause=cause, common=0.0))
        own = np.array([part.pace.own_ns.mean() for part in job.parts])
        if cause == "link":
            assert np.ptp(own) / own.mean() < 0.1
            assert job.truth.group is not None
        else:
            assert set(np.argsort(own)[-len(job.truth.ranks) :].tolist()) == job.truth.ranks


# What is reported about them


def seeds(block: int, count: int) -> range:
    return range(block * count, (block + 1) * count)


@pytest.mark.few(3)
@pytest.mark.parametrize("ranks", FAULTY)
@pytest.mark.parametrize("block", BLOCKS)
def test_the_right_rank_and_cause_are_found(ranks: int, block: int) -> None:
    plans = [draw_plan(seed, ranks, faulty=True) for seed in seeds(block, FAULTY[ranks])]
    counts, lines = tally(plans, join)
    assert counts["right"] >= 0.98 * FAULTY[ranks], "\n".join(lines)


@pytest.mark.few(3)
@pytest.mark.parametrize("ranks", HEALTHY)
@pytest.mark.parametrize("block", BLOCKS)
def test_nobody_is_accused_in_healthy_jobs(ranks: int, block: int) -> None:
    plans = [
        draw_plan(seed + 10_000, ranks, noise=noise)
        for noise in (0.01, 0.05)
        for seed in seeds(block, HEALTHY[ranks])
    ]
    counts, lines = tally(plans, join)
    assert counts["accused"] <= 0.01 * len(plans), "\n".join(lines)


@pytest.mark.parametrize(("ranks", "jobs"), [(2, 600), (4, 600), (8, 600), (64, 300), (1024, 50)])
def test_chance_accuses_nobody(ranks: int, jobs: int) -> None:
    """Steps of 5% noise alone, so that there are enough jobs to see one in a hundred."""
    from stepscope.explain.job.stragglers import find_stragglers

    accused = Counter[int]()
    for seed in range(jobs):
        steps = 3 + seed % 18
        plan = Plan(ranks=ranks, steps=steps, seed=seed, noise=0.05, transients=seed % 3)
        pace, loading = (each.astype(np.float64) for each in paces(plan))
        own = (plan.compute_ns * pace + loading + plan.other_ns).astype(np.int64)
        found = find_stragglers(range(ranks), own, loading.astype(np.int64), own)
        accused[steps] += found.verdict == "found"
    assert accused.total() <= 0.01 * jobs, +accused


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_a_hiccup_is_no_straggler(ranks: int) -> None:
    plans = [
        Plan(ranks=ranks, steps=3, seed=seed, transients=min(ranks, 3))
        for seed in range(30 if ranks < 64 else 10)
    ]
    counts, lines = tally(plans, join)
    assert counts["accused"] == 0, "\n".join(lines)


@pytest.mark.parametrize("ranks", [4, 8, 64])
@pytest.mark.parametrize("cause", ["stage", "link"])
@pytest.mark.parametrize("block", BLOCKS)
def test_where_as_many_are_slow_as_not_nobody_is_accused_wrongly(
    ranks: int, cause: Any, block: int
) -> None:
    """One of two stages, or of two groups: to find it is welcome, to find another one is not."""
    drawn = seeds(block, 15 if ranks < 64 else 4)
    plans = [draw_plan(seed, ranks, cause=cause, halves=True) for seed in drawn]
    counts, lines = tally(plans, join)
    assert counts["wrong"] == 0, "\n".join(lines)


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_link_without_siblings_is_slow_only_beside_a_calibration(ranks: int) -> None:
    wrong = []
    for seed in range(20):
        fault = Fault(cause="link", size=2.0 + seed % 4, place=0, layer="default_pg")
        plan = Plan(ranks=ranks, seed=seed, fault=fault, collectives=4, size_bytes=150_000_000)
        job = make_job(plan)
        alone = join(job.parts)
        assert judge(job, alone.stragglers) == "missed", describe_answer(alone.stragglers)
        found = join(job.parts, [profile_of(job.plan)])
        if judge(job, found.stragglers) != "right":
            wrong.append(f"{describe(job.plan)} -> {describe_answer(found.stragglers)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_calibration_accuses_no_healthy_link(ranks: int, block: int) -> None:
    counts: Counter[str] = Counter()
    lines = []
    for seed in seeds(block, 20 if ranks < 64 else 5):
        job = make_job(draw_plan(seed + 10_000, ranks))
        found = join(job.parts, [profile_of(job.plan)]).stragglers
        counts[judge(job, found)] += 1
        if found.verdict == "found":
            lines.append(f"{describe(job.plan)} -> {describe_answer(found)}")
    assert counts["accused"] == 0, "\n".join(lines)


# Clocks that contradict


def assert_nothing_invented(found: Joined, about: object) -> None:
    assert not found.clock.aligned, about
    assert found.clock.detail, about
    assert "clocks-contradict" in {note.id for note in found.notes}, about
    assert all(each.wait_ns is None for each in found.collectives), about
    assert all(each.slowest_rank is None for each in found.collectives), about
    assert found.arrivals == (), about
    assert found.path is None, about
    assert found.lanes is None, about


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("rounds", [0, 50])
def test_a_clock_that_jumps_is_said_and_nothing_is_invented(ranks: int, rounds: int) -> None:
    for seed in range(4 if ranks < 64 else 2):
        plan = draw_plan(seed, ranks, rounds=rounds, jump=(seed % ranks, 3e8 * (-1) ** seed))
        assert_nothing_invented(join(make_job(plan).parts), plan)


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_of_different_runs_are_said_and_nothing_is_invented(ranks: int) -> None:
    for seed in range(4):
        plan = draw_plan(seed, ranks, rounds=0, form="fsdp")
        other = make_job(replace(plan, seed=seed + 1, compute_ns=1.7 * plan.compute_ns))
        parts = make_job(plan).parts
        parts[seed % ranks] = other.parts[seed % ranks]
        assert_nothing_invented(join(parts), plan)


# Waits


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("rounds", [0, 50])
def test_waits_and_transfers_are_true_within_their_error(
    form: Form, backend: Any, rounds: int
) -> None:
    job = make_job(small(form, backend=backend, rounds=rounds, drift_ppm=20, steps=6, noise=0.05))
    found = join(job.parts)
    assert found.clock.aligned
    truth = true_collectives(job)
    seen = {
        (each.group, each.kind, each.size_bytes): each
        for each in found.collectives
        if each.kind in SYNCHRONISING
    }
    assert set(seen) == set(truth)
    for key, (count, wait, transfer) in truth.items():
        each = seen[key]
        assert each.count == count
        assert each.wait_ns is not None
        assert each.wait_error_ns is not None
        assert each.transfer_ns is not None
        ends = 15_000 * count  # ranks leave some microseconds apart
        assert abs(each.wait_ns - wait) <= each.wait_error_ns + ends, key
        assert abs(each.transfer_ns - transfer) <= 2 * each.wait_error_ns + ends, key
        whole = abs(each.wait_ns + each.transfer_ns - wait - transfer)
        assert whole <= each.wait_error_ns + ends, key
        if rounds:
            assert each.wait_error_ns / count < 150_000


def true_collectives(job: Job) -> dict[tuple[str, str, int], tuple[int, float, float]]:
    """By group, kind and size: how many, the waits' sum (mean over ranks) and the transfers'."""
    calls, truth = job.timeline.calls, job.truth
    out: dict[tuple[str, str, int], tuple[int, float, float]] = {}
    _, first = np.unique(calls["match"], return_index=True)
    for row in first.tolist():
        kind = KINDS[calls["kind"][row]]
        if kind in SYNCHRONISING:
            key = str(calls["group"][row]), kind, int(calls["size_bytes"][row])
            match = int(calls["match"][row])
            count, wait, transfer = out.get(key, (0, 0.0, 0.0))
            out[key] = (
                count + 1,
                wait + truth.wait_ns[match],
                transfer + truth.transfer_ns[match],
            )
    return out


def test_a_slow_rank_is_the_last_to_come() -> None:
    for seed in range(10):
        job = make_job(
            draw_plan(seed, 8, cause="compute", noise=0.01, form="ddp", rounds=50, broadcast=False)
        )
        (culprit,) = job.truth.ranks
        arrivals = join(job.parts).arrivals
        assert arrivals[0].rank == culprit
        assert arrivals[0].times_last >= 0.5 * arrivals[0].of
        assert arrivals[0].waits_ns == min(each.waits_ns for each in arrivals)


# Input that is not as it should be


def ids(found: Joined) -> set[str]:
    return {note.id for note in found.notes}


def test_healthy_input_has_no_notes_but_on_far_clocks() -> None:
    assert ids(join(make_job(Plan(ranks=4)).parts)) == set()
    assert ids(join(make_job(Plan(ranks=4, offset_ns=30e9)).parts)) == {"clocks-apart"}


@pytest.mark.parametrize("form", FORMS)
def test_missing_ranks_are_noted(form: Form) -> None:
    job = make_job(small(form))
    found = join([part for part in job.parts if part.rank not in (3, 6)])
    assert found.ranks == (0, 1, 2, 4, 5, 7)
    assert found.notes
    assert found.step_ns.shape == (4, 6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tell_sequence", [True, False])
def test_different_steps_are_noted_and_the_common_ones_compared(
    form: Form, tell_sequence: bool
) -> None:
    job = make_job(small(form, steps=6, tell_sequence=tell_sequence))
    job.parts[1] = only_steps(job.parts[1], range(4))
    job.parts[2] = only_steps(job.parts[2], range(1, 6))
    found = join(job.parts)
    assert "different-steps" in ids(found)
    assert found.steps == tuple(range(10, 16))
    assert (found.step_ns[:, 1] >= 0).sum() == 4
    assert (found.step_ns[:, 2] >= 0).sum() == 5
    assert found.clock.aligned
    assert found.stragglers.verdict == "none"


def test_a_rank_that_comes_twice_is_noted() -> None:
    parts = make_job(small("ddp")).parts
    found = join([*parts, parts[2]])
    assert "duplicate-ranks" in ids(found)
    assert found.ranks == tuple(range(8))


def test_an_empty_rank_is_noted() -> None:
    parts = make_job(small("ddp")).parts
    parts[5] = empty(parts[5])
    found = join(parts)
    assert "empty-rank" in ids(found)
    assert found.clock.aligned
    assert 5 not in found.clock.offset_ns


@pytest.mark.parametrize("without", ["calls", "steps"])
def test_a_rank_with_calls_alone_or_steps_alone_is_no_trouble(without: str) -> None:
    parts = make_job(small("ddp")).parts
    bare = empty(parts[5])
    kept = {"calls": bare.calls} if without == "calls" else {"pace": bare.pace}
    parts[5] = msgspec.structs.replace(parts[5], **kept)
    found = join(parts)
    assert found.notes
    assert found.clock.aligned


def test_groups_that_only_some_ranks_have_are_noted() -> None:
    parts = make_job(small("tensor")).parts
    calls = parts[3].calls
    tensor = next(i for i, group in enumerate(calls.groups) if group.description == "mesh_tp")
    parts[3] = msgspec.structs.replace(parts[3], calls=some_calls(calls, calls.group != tensor))
    found = join(parts)
    assert found.notes
    assert found.clock.aligned


def test_half_of_a_call_list_is_noted() -> None:
    for tell_sequence in (True, False):
        parts = make_job(small("ddp", tell_sequence=tell_sequence)).parts
        calls = parts[3].calls
        half = some_calls(calls, np.arange(len(calls)) < len(calls) // 2)
        parts[3] = msgspec.structs.replace(parts[3], calls=half)
        found = join(parts)
        assert found.notes
        assert found.clock.aligned


def test_no_input_and_one_rank_are_answered() -> None:
    assert join([]).stragglers.verdict == "one rank only"
    parts = make_job(small("ddp")).parts
    assert join(parts[:1]).stragglers.verdict == "one rank only"
    assert join([empty(part) for part in parts]).stragglers.verdict == "one rank only"


@pytest.mark.parametrize("seed", range(40))
def test_damaged_jobs_never_raise(seed: int) -> None:
    draw = np.random.default_rng(seed)
    ranks = int(draw.choice([2, 4, 8]))
    parts = [
        damaged(part, draw)
        for part in make_job(draw_plan(seed, ranks)).parts
        for _ in range(int(draw.choice([0, 1, 1, 1, 1, 2])))
    ]
    found = join(parts)
    assert found.step_ns.shape == (len(found.steps), len(found.ranks))
    assert len(set(found.ranks)) == len(found.ranks)
    assert found.stragglers.verdict in ("none", "found", "not resolved", "one rank only")


def damaged(part: RankPart, draw: np.random.Generator) -> RankPart:
    """A rank that lost calls, steps, its rounds, its sequence or everything."""
    if draw.random() < 0.1:
        return empty(part)
    if draw.random() < 0.3:
        kept = draw.random(len(part.calls)) < draw.choice([0.0, 0.5, 0.95])
        part = msgspec.structs.replace(part, calls=some_calls(part.calls, kept))
    if draw.random() < 0.3:
        steps = sorted(draw.choice(len(part.pace), max(1, len(part.pace) // 2), False).tolist())
        part = only_steps(part, steps)
    if draw.random() < 0.2:
        part = msgspec.structs.replace(part, rounds=part.rounds[:1], host=None, world_size=None)
    if draw.random() < 0.2:
        sequence = np.full(len(part.calls), -1, np.int64)
        calls = msgspec.structs.replace(part.calls, sequence=sequence)
        part = msgspec.structs.replace(part, calls=calls)
    return part


def empty(part: RankPart) -> RankPart:
    none = np.arange(0)
    pace = {name: getattr(part.pace, name)[none] for name in part.pace.__struct_fields__}
    return msgspec.structs.replace(
        part,
        calls=some_calls(part.calls, none),
        pace=msgspec.structs.replace(part.pace, **pace),
        rounds=(),
    )


def only_steps(part: RankPart, steps: Sequence[int]) -> RankPart:
    """As if the rank had recorded these steps alone."""
    chosen = np.array(steps)
    pace = {name: getattr(part.pace, name)[chosen] for name in part.pace.__struct_fields__}
    calls = some_calls(part.calls, np.isin(part.calls.step, chosen))
    place = np.searchsorted(chosen, calls.step).astype(np.int32)
    return msgspec.structs.replace(
        part,
        calls=msgspec.structs.replace(calls, step=place),
        pace=msgspec.structs.replace(part.pace, **pace),
    )


def some_calls(calls: CollectiveCalls, rows: Any) -> CollectiveCalls:
    """Of one rank's calls, only these rows."""
    columns = {name: getattr(calls, name)[rows] for name in calls.__struct_fields__[1:]}
    return msgspec.structs.replace(calls, **columns)


# On disk


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_trace_on_disk_says_what_the_rank_recorded(
    tmp_path: Path, form: Form, backend: Any
) -> None:
    from stepscope import read_trace
    from stepscope.step.collectives import list_calls
    from stepscope.step.steps import find_steps
    from stepscope.step.work import find_work
    from stepscope.trace.run_folder.rank_folder import read_rank_folder

    job = make_job(small(form, ranks=4, stages=2, backend=backend, rounds=5, offset_ns=1e9))
    paths = write_job(tmp_path, job)
    for rank in (0, 3):
        trace = read_trace(paths[rank], cache=False)
        assert (trace.rank, trace.world_size, trace.quality) == (rank, 4, ())
        work = find_work(trace)
        folder = read_rank_folder(paths[rank])
        assert folder is not None
        assert folder.notes == ()
        assert [len(each.came_ns) for each in folder.rounds] == [5, 5]
        seen, _ = list_calls(trace, work, find_steps(trace, work), folder)
        assert_same_calls(seen, job.parts[rank].calls, backend)


def assert_same_calls(seen: CollectiveCalls, true: CollectiveCalls, backend: str) -> None:
    told = ["start_ns", "end_ns", "arrival_ns", "size_bytes"]
    told += ["kind", "sequence", "peer"] if backend == "nccl" else []
    for name in told:
        mine, theirs = (
            getattr(each, name)[np.lexsort((each.arrival_ns, each.end_ns, each.start_ns))]
            for each in (seen, true)
        )
        assert mine.tolist() == theirs.tolist(), name
    if backend == "nccl":
        groups = [{group.name: group.ranks for group in each.groups} for each in (seen, true)]
        assert groups[0] == groups[1]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_straggler_is_found_in_a_run_folder(tmp_path: Path, backend: Any) -> None:
    from stepscope import explain_job

    fault = Fault(cause="compute", size=1.4, place=2)
    job = make_job(Plan(ranks=4, backend=backend, steps=4, rounds=20, fault=fault))
    write_job(tmp_path, job)
    explained = explain_job(tmp_path, cache=False)
    assert "rank 2" in explained.verdict
    assert explained.quality == ()


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_file_is_as_long_as_wanted_and_quickly_written(tmp_path: Path, backend: Any) -> None:
    job = make_job(Plan(ranks=16, backend=backend, steps=5))
    began = time.process_time()
    paths = write_job(tmp_path, job, target_bytes=1_000_000, compressed=False, run_folder=False)
    assert time.process_time() - began < 2
    assert [path.name for path in paths[:2]] == ["rank0.json", "rank1.json"]
    assert all(950_000 < path.stat().st_size < 1_050_000 for path in paths)


# The size of it


def test_a_thousand_ranks_are_joined_in_seconds() -> None:
    fault = Fault(cause="compute", size=1.3, place=700)
    job = make_job(Plan(ranks=1024, steps=10, collectives=10, fault=fault))
    began = time.process_time()
    found = join(job.parts)
    assert time.process_time() - began < 10
    assert judge(job, found.stragglers) == "right"
