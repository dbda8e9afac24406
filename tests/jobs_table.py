"""How well stragglers are found in made-up jobs: judged here, counted in a table."""

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


def judge(job: Job, found: Stragglers) -> Outcome:
    """Of a faulty job: the one rank (or stage, or group) with the right cause and nobody else."""
    accused = found.ranks if found.verdict == "found" else ()
    truth = job.truth
    if truth.cause is None:
        return "accused" if accused else "quiet"
    if not accused:
        return "missed"
    if {each.cause for each in accused} != {truth.cause}:
        return "wrong"
    if truth.cause == "link":
        return "right" if {each.group for each in accused} == {truth.group} else "wrong"
    ranks = {each.rank for each in accused}
    whole = ranks <= truth.ranks if len(truth.ranks) > 1 else ranks == truth.ranks
    return "right" if whole else "wrong"


def clock_errors(job: Job, clock: Any) -> list[str]:
    """Where the clock is not what it says it is, within its own error bar; in words."""
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
    """Outcomes of these jobs, and a line for each that is not what it should be."""
    counts: Counter[str] = Counter()
    lines = []
    for plan in plans:
        job = make_job(plan)
        found = join(job.parts).stragglers
        outcome = judge(job, found)
        counts[outcome] += 1
        if outcome not in ("right", "quiet"):
            lines.append(f"{outcome}: {describe(plan)} -> {said(found)}")
    return counts, lines


def describe(plan: Plan) -> str:
    fault = plan.fault
    wrong = f"{fault.cause} x{fault.size:.2f} at {fault.layer}{fault.place}" if fault else "healthy"
    return (
        f"seed={plan.seed} ranks={plan.ranks} {plan.form} {plan.backend} steps={plan.steps} "
        f"noise={plan.noise} common={plan.common} transients={plan.transients} {wrong}"
    )


def said(found: Stragglers) -> str:
    who = ", ".join(
        f"{each.cause} rank {each.rank} group {each.group} x{each.slowdown:.2f}"
        for each in found.ranks[:4]
    )
    return f"{found.verdict} [{who}] {found.detail}"


def figures(
    join: Any,
    sizes: Sequence[int],
    noises: Sequence[float] = NOISES,
    steps: Sequence[int] = STEPS,
    scale: float = 1.0,
    seed: int = 0,
) -> tuple[list[tuple[Any, ...]], list[str]]:
    """A row for each number of ranks, noise and number of steps."""
    rows, lines = [], []
    for ranks in sizes:
        for noise in noises:
            for count in steps:
                jobs = max(2, round(COUNTS[ranks] * scale))
                seeds = range(seed, seed + jobs)
                fixed: dict[str, Any] = {"noise": noise, "steps": count}
                faulty = [draw_plan(s, ranks, faulty=True, **fixed) for s in seeds]
                healthy = [draw_plan(s + 10_000, ranks, **fixed) for s in seeds]
                found, bad = tally(faulty, join)
                quiet, worse = tally(healthy, join)
                rows.append((ranks, noise, count, jobs, found, quiet))
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
    from stepscope.explain.job import join_ranks

    write = sys.stdout.write
    write("ranks noise steps   jobs  right missed wrong   healthy jobs  accused\n")
    began = time.perf_counter()
    every: list[str] = []
    for ranks in given.ranks:
        rows, lines = figures(join_ranks, (ranks,), scale=given.scale, seed=given.seed)
        every += lines
        for n, noise, steps, jobs, found, quiet in rows:
            write(
                f"{n:5d} {noise:5.0%} {steps:5d} {jobs:6d} {found['right'] / jobs:6.1%} "
                f"{found['missed']:6d} {found['wrong']:5d} {jobs:14d} {quiet['accused']:8d}\n"
            )
        sys.stdout.flush()
    write(f"in {time.perf_counter() - began:.0f} s\n")
    if given.cases:
        write("\n".join(every) + "\n")
