"""How well stragglers are found in simulated jobs, as a table."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from jobs import Job, Plan, draw_plan, make_job
from stepscope.records.job import Stragglers

Outcome = Literal["right", "missed", "wrong", "quiet", "accused"]
COUNTS = {2: 100, 4: 100, 8: 100, 64: 40, 1024: 6}
NOISES = (0.01, 0.05)
STEPS = (3, 5, 10, 20)
TIMES_OF_CLOCK = 5


def judge(job: Job, answer: Stragglers) -> Outcome:
    """For a faulty job: exactly the one slow rank (or stage, or group), with the right cause."""
    accused = answer.ranks if answer.verdict == "found" else ()
    truth = job.truth
    if truth.cause is None:
        return "accused" if accused else "quiet"
    if not accused:
        return "missed"
    if {straggler.cause for straggler in accused} != {truth.cause}:
        return "wrong"
    if truth.cause == "link":
        return "right" if {straggler.group for straggler in accused} == {truth.group} else "wrong"
    ranks = {straggler.rank for straggler in accused}
    whole = ranks <= truth.ranks if len(truth.ranks) > 1 else ranks == truth.ranks
    return "right" if whole else "wrong"


def clock_errors(job: Job, clock: Any) -> list[str]:
    """Where the aligned clock is off by more than its own error bar, in words."""
    if not clock.aligned:
        return [f"not aligned: {clock.detail}"]
    times = np.linspace(0, float(job.timeline.step_end.max()), TIMES_OF_CLOCK)
    reference = job.clocks.read(clock.reference, times)
    out = []
    for part in job.parts:
        if part.rank not in clock.offset_ns:
            out.append(f"rank {part.rank} is not aligned")
            continue
        allowed = clock.error_ns[part.rank] + 2  # whole nanoseconds, twice
        true = job.clocks.difference_ns(part.rank, clock.reference, clock.at_ns)
        apart = abs(true - clock.offset_ns[part.rank])
        moved = clock.shift_ns(part.rank, job.clocks.read(part.rank, times))
        worst = max(apart, float(np.abs(moved - reference).max()))
        if worst > allowed:
            out.append(f"rank {part.rank}: off by {worst:.0f} ns, said {allowed} ns")
    return out


def tally(plans: Iterable[Plan], join: Any) -> tuple[Counter[str], list[str]]:
    """Outcomes of these jobs, and a line for each wrong one."""
    counts: Counter[str] = Counter()
    lines = []
    for plan in plans:
        job = make_job(plan)
        answer = join(job.parts).stragglers
        outcome = judge(job, answer)
        counts[outcome] += 1
        if outcome not in ("right", "quiet"):
            lines.append(f"{outcome}: {describe(plan)} -> {describe_answer(answer)}")
    return counts, lines


def describe(plan: Plan) -> str:
    fault = plan.fault
    wrong = f"{fault.cause} x{fault.size:.2f} at {fault.layer}{fault.place}" if fault else "healthy"
    return (
        f"seed={plan.seed} ranks={plan.ranks} {plan.form} {plan.backend} steps={plan.steps} "
        f"noise={plan.noise} common={plan.common} transients={plan.transients} {wrong}"
    )


def describe_answer(answer: Stragglers) -> str:
    who = ", ".join(
        f"{straggler.cause} rank {straggler.rank} group {straggler.group} x{straggler.slowdown:.2f}"
        for straggler in answer.ranks[:4]
    )
    return f"{answer.verdict} [{who}] {answer.detail}"


def figures(
    join: Any,
    sizes: Sequence[int],
    noises: Sequence[float] = NOISES,
    steps: Sequence[int] = STEPS,
    scale: float = 1.0,
    seed: int = 0,
) -> tuple[list[tuple[Any, ...]], list[str]]:
    """One row per number of ranks, noise and number of steps."""
    rows, lines = [], []
    for ranks in sizes:
        for noise in noises:
            for count in steps:
                jobs = max(2, round(COUNTS[ranks] * scale))
                seeds = range(seed, seed + jobs)
                fixed: dict[str, Any] = {"noise": noise, "steps": count}
                faulty = [draw_plan(s, ranks, faulty=True, **fixed) for s in seeds]
                healthy = [draw_plan(s + 10_000, ranks, **fixed) for s in seeds]
                outcomes, bad = tally(faulty, join)
                quiet, worse = tally(healthy, join)
                rows.append((ranks, noise, count, jobs, outcomes, quiet))
                lines += bad + worse
    return rows, lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--ranks", type=int, nargs="*", default=list(COUNTS))
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of jobs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", action="store_true", help="also every job that was misjudged")
    given = parser.parse_args()
    if not given.table:
        parser.print_help()
        return
    from stepscope.explain.job.all_ranks import join_ranks

    write = sys.stdout.write
    write("ranks noise steps   jobs  right missed wrong   healthy jobs  accused\n")
    began = time.perf_counter()
    every: list[str] = []
    for ranks in given.ranks:
        rows, lines = figures(join_ranks, (ranks,), scale=given.scale, seed=given.seed)
        every += lines
        for n, noise, steps, jobs, outcomes, quiet in rows:
            write(
                f"{n:5d} {noise:5.0%} {steps:5d} {jobs:6d} {outcomes['right'] / jobs:6.1%} "
                f"{outcomes['missed']:6d} {outcomes['wrong']:5d} {jobs:14d} {quiet['accused']:8d}\n"
            )
        sys.stdout.flush()
    write(f"in {time.perf_counter() - began:.0f} s\n")
    if given.cases:
        write("\n".join(every) + "\n")
