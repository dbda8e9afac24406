"""Judge whether a remedy still trains the same: the losses of its trials against those of
the baseline.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.text.figures import difference
from stepscope.text.words import counted

if TYPE_CHECKING:
    from stepscope.records.rank import StepFlags
    from stepscope.records.script_facts import ScriptFacts
    from stepscope.verify.spread import Floats
    from stepscope.verify.trials import Loss

    RunLosses = dict[int, tuple[Loss, ...]]

# The losses of every backward pass are compared rank by rank, in order. Runs of the baseline
# against each other are the control: what they do by themselves, a remedy may do too.
#
# bit-identical  All losses are equal to the bit.
# rounding       (1) The first loss, made from the same weights and data, differs by no more than
# the
#                precision explains (FIRST). (2) In the first passes the difference grows no faster
#                than the square root of their number (EARLY). (3) In the later half, the mean of
#                the
#                differences is small (GAP) or small beside their scatter from pass to pass
#                (SCATTER):
#                rounding that training has made large has no direction, a wrong gradient has.
# random         More than that, but the mean of the differences is small beside their scatter
#                (RANDOM_SCATTER), as with other batches or other random numbers.
# training       More than that.
#
# Training can make rounding large very fast. Where losses look wrong, the baseline is run with its
# weights nudged by the size of rounding, or with other random numbers: what these controls do, a
# remedy may do too.
#
# A remedy has failed if it does more than it declared, if losses are missing, or if they are NaN or
# infinite where the baseline's are not. If the baseline's own runs differ, weaker tests are left,
# and `control` says so. docs/records/tune.md says where the numbers come from and what such a test
# cannot see.

Observed = Literal["bit-identical", "rounding", "random", "training", "not known"]
Precision = Literal["fp32", "tf32", "16 bits"]

LEVELS: tuple[Observed, ...] = ("bit-identical", "rounding", "random", "training", "not known")
# Shares of the loss, by the coarsest precision of the products.
FIRST = {"fp32": 2.0**-14, "tf32": 2.0**-10, "16 bits": 2.0**-6}
EARLY = {"fp32": 2.0**-14, "tf32": 2.0**-8, "16 bits": 2.0**-7}
GAP = {"fp32": 2.0**-12, "tf32": 2.0**-9, "16 bits": 2.0**-7}
SCATTER, RANDOM_SCATTER = 1.5, 1.0
_CONTROLS = 2.0  # times what the baseline's runs do to each other
_ODD_STEPS = 0.05  # of the steps: a GradScaler skips some of the first ones
_SIXTEEN = {"bf16", "fp16", "compress-gradients"}


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a remedy. Shares are of the loss."""

    parity: str  # what was observed, or "failed"
    observed: Observed  # without regard to what was declared
    control: Observed  # what the baseline's runs do to each other
    why: str
    first_difference: int | None = None  # the step from which losses differ
    largest: float | None = None  # difference of two losses
    gap: float | None = None  # mean difference in the later half; positive: the loss is higher

    @property
    def passed(self) -> bool:
        """Tell whether it passed. What is not known has not passed, nor has it failed."""
        return self.parity not in ("failed", "not known")


def check_parity(
    baseline: Sequence[RunLosses],
    candidate: Sequence[RunLosses],
    *,
    declared: str,
    precision: Precision = "fp32",
    nudged: Sequence[RunLosses] = (),
    redrawn: Sequence[RunLosses] = (),
) -> Parity:
    """Compare runs of the candidate with runs of the baseline, of which two are needed.

    `declared` is the largest effect that the applied remedies declare (a level of LEVELS),
    `precision` the coarsest that they or the script compute in (`coarsest_precision`). `nudged` are
    runs of the baseline with weights off by rounding, `redrawn` those with other random numbers.
    """
    unknown = _why_unknown(baseline, candidate)
    if unknown:
        return _not_known(unknown)
    worst: Parity | None = None
    for rank in sorted({rank for run in baseline for rank in run}):
        sides = (baseline, candidate, nudged, redrawn)
        runs = _RankLosses(*([run.get(rank, ()) for run in side] for side in sides))
        found = _check_rank(runs, declared, precision)
        if len(baseline[0]) > 1:
            found = replace(found, why=f"rank {rank}: {found.why}")
        if worst is None or _severity(found) > _severity(worst):
            worst = found
    assert worst is not None
    return worst


def coarsest_precision(facts: ScriptFacts, remedies: Sequence[str]) -> Precision:
    """Return the precision of the products, with these remedies (`ID` or `ID=VALUE`) or without
    them."""
    ids = {remedy.partition("=")[0] for remedy in remedies}
    half = {"float16", "bfloat16", "torch.float16", "torch.bfloat16"} & set(facts.dtypes)
    if ids & _SIXTEEN or half or facts.autocast:
        return "16 bits"
    convolves = any(name.startswith(("Conv", "LazyConv")) for name in facts.modules)
    uses_tf32 = facts.matmul_precision != "highest" or (facts.conv_tf32 and convolves)
    if "tf32" in ids or (facts.device == "cuda" and uses_tf32):
        return "tf32"
    return "fp32"


def _why_unknown(baseline: Sequence[RunLosses], candidate: Sequence[RunLosses]) -> str | None:
    if not any(baseline):
        return "no loss was captured: stepscope saw no backward pass of the script"
    if len(baseline) < 2:
        return "the baseline ran only once, so it is unknown how much its own losses differ"
    return None if candidate else "the candidate has not run"


def _not_known(why: str) -> Parity:
    return Parity(parity="not known", observed="not known", control="not known", why=why)


def _severity(found: Parity) -> tuple[bool, int, float]:
    return found.parity == "failed", LEVELS.index(found.observed), found.largest or 0.0


class _RankLosses(NamedTuple):
    """One rank's losses in each run."""

    baseline: Sequence[tuple[Loss, ...]]
    candidate: Sequence[tuple[Loss, ...]]
    nudged: Sequence[tuple[Loss, ...]]
    redrawn: Sequence[tuple[Loss, ...]]

    def controls(self, length: int) -> list[Floats]:
        """Return those of each kind that are whole and finite."""
        kinds = ([run for run in runs if len(run) >= length] for runs in self[2:])
        values = (_values(runs, length) for runs in kinds)
        return [rows[np.isfinite(rows).all(axis=1)] if len(rows) else rows for rows in values]


def _check_rank(runs: _RankLosses, declared: str, precision: Precision) -> Parity:
    baseline, candidate = runs.baseline, runs.candidate
    control: Observed = "not known"
    if not all(baseline):
        return _not_known("no loss was captured in a run of the baseline")
    for run in candidate:
        why = _missing(baseline[0], run)
        if why:
            return Parity(parity="failed", observed="not known", control=control, why=why)
    length = min(len(run) for run in (*baseline, *candidate))
    before, after = (_values(side, length) for side in (baseline, candidate))
    finite = _where_finite(before)
    broken = np.flatnonzero(finite & ~_where_finite(after))
    if len(broken):
        step = baseline[0][int(broken[0])].step
        why = f"the loss is NaN or infinite in step {step}, but the baseline's is not"
        return Parity(parity="failed", observed="training", control=control, why=why)
    same_controls = all(_bits(run, length) == _bits(baseline[0], length) for run in baseline)
    if same_controls and all(_bits(run, length) == _bits(baseline[0], length) for run in candidate):
        why = f"all {counted(length, 'loss', 'losses')} are bit-identical"
        same: Observed = "bit-identical"
        return Parity(parity=same, observed=same, control=same, why=why, largest=0.0, gap=0.0)
    if not finite.any():
        return _not_known("the baseline's losses are NaN or infinite")
    steps = [
        loss.step for loss, good in zip(baseline[0][:length], finite.tolist(), strict=True) if good
    ]
    nudged, redrawn = (rows[:, finite] for rows in runs.controls(length))
    curves = _Curves(before[:, finite], after[:, finite], steps, precision, nudged, redrawn)
    if same_controls:
        control = "bit-identical"
    else:
        control = "random" if curves.control.like_seeds else "rounding"
    return curves.verdict(declared, control)


def _missing(baseline: tuple[Loss, ...], run: tuple[Loss, ...]) -> str | None:
    """Return why its losses cannot be those of the same steps. A last step may be cut short."""
    if not run:
        return f"no loss was captured, but the baseline has {len(baseline)}"
    expected, seen = (Counter(loss.step for loss in one) for one in (baseline, run))
    last = max(expected)
    if max(seen) < last - 1:
        return f"the losses end with step {max(seen)}, the baseline's with step {last}"
    odd = [
        step for step in expected if step < min(last, max(seen)) and expected[step] != seen[step]
    ]
    if len(odd) > max(1, _ODD_STEPS * len(expected)):
        passes = counted(seen[odd[0]], "backward pass", "backward passes")
        return f"step {odd[0]} has {passes}, but {expected[odd[0]]} in the baseline"
    return None


def _bits(run: Sequence[Loss], length: int) -> list[str]:
    return [loss.hexadecimal for loss in run[:length]]


def _values(side: Sequence[Sequence[Loss]], length: int) -> Floats:
    rows = [[loss.value for loss in run[:length]] for run in side]
    return np.array(rows, np.float64).reshape(len(rows), length)


def _where_finite(runs: Floats) -> StepFlags:
    """Mark the passes that are finite in all runs."""
    flags: StepFlags = np.all(np.isfinite(runs), axis=0)
    return flags


class _Curves:
    """One rank's losses, one row per run, where the baseline's are finite."""

    def __init__(
        self,
        baseline: Floats,
        candidate: Floats,
        steps: Sequence[int],
        precision: Precision,
        nudged: Floats,
        redrawn: Floats,
    ) -> None:
        self.control: Control = control_of(baseline)
        self.rounding: Control = control_of(np.vstack([baseline, nudged]))
        self.chance: Control = control_of(np.vstack([baseline, nudged, redrawn]))
        self.runs = [compare_curves(baseline, run) for run in candidate]
        self.together = compare_curves(baseline, candidate.mean(axis=0))
        self.steps = steps
        self.precision = precision

    def verdict(self, declared: str, control: Observed) -> Parity:
        observed, why = self.observed(control)
        largest = max(run.largest for run in self.runs)
        apart = [np.flatnonzero(run.values) for run in self.runs]
        first = min((int(places[0]) for places in apart if len(places)), default=None)
        parity: str = observed
        allowed = max(LEVELS.index(_level(declared)), LEVELS.index(control))
        if observed != "not known" and LEVELS.index(observed) > allowed:
            parity = "failed"
            since = f"differs from step {self.steps[first]} on" if first is not None else "differs"
            why = f"declared {declared}, but it {since}, by {difference(largest)} at most: {why}"
        return Parity(
            parity=parity,
            observed=observed,
            control=control,
            why=why,
            first_difference=None if first is None else self.steps[first],
            largest=largest,
            gap=self.together.gap,
        )

    def observed(self, control: Observed) -> tuple[Observed, str]:
        beyond = next(filter(None, map(self.beyond_rounding, self.runs)), None)
        if beyond is None and control != "random":
            own = "" if control == "bit-identical" else ". Runs of the baseline differ too"
            return "rounding", f"the differences are of the size of rounding{own}"
        if not self.together.has_later_half:
            return "not known", f"too few losses ({len(self.steps)}) to compare their means"
        limit = RANDOM_SCATTER * self.together.scatter + _CONTROLS * self.chance.gap
        if abs(self.together.gap) > limit:
            mean = _off_on_average(self.together.gap, "chance", limit)
            return "training", f"{beyond}. {mean}" if beyond else mean
        if control == "random":
            why = (
                "runs of the baseline differ as much (no fixed seed?), so only the mean is compared"
            )
            return "random", why
        return "random", f"{beyond}. The mean loss is as expected with other random numbers"

    def beyond_rounding(self, run: CurveDifference) -> str | None:
        """Return what is too large to be rounding."""
        size = np.abs(run.values)
        allowed = FIRST[self.precision] + _CONTROLS * float(self.rounding.reach[0])
        if size[0] > allowed:
            return f"the first loss is {_off(size[0], 'rounding', allowed)}"
        early = size[:EARLY_PASSES]
        grown = np.sqrt(1.0 + np.arange(len(early)))
        bounds = max(EARLY[self.precision], 2 * float(size[0])) * grown
        bounds += _CONTROLS * self.rounding.reach[: len(early)]
        places = np.flatnonzero(early > bounds)
        if len(places):
            place = int(places[0])
            off = _off(early[place], "rounding", bounds[place])
            return f"the loss in step {self.steps[place]} is {off}"
        limit = GAP[self.precision] + SCATTER * run.scatter + _CONTROLS * self.rounding.gap
        if run.has_later_half and abs(run.gap) > limit:
            return _off_on_average(run.gap, "rounding", limit)
        return None


def _off(share: float, cause: str, limit: float) -> str:
    return f"off by {difference(share)}, {cause} explains {difference(limit)}"


def _off_on_average(gap: float, cause: str, limit: float) -> str:
    way = "higher" if gap > 0 else "lower"
    explained = f"{cause} explains {difference(limit)}"
    return f"the later losses are {difference(gap)} {way} on average, {explained}"


def _level(declared: str) -> Observed:
    return next((level for level in LEVELS[:-1] if level == declared), "training")


# Losses of two trainings side by side: how far apart they are, and what would be chance.
#
# Differences are shares of the loss at that pass, or of half the mean loss where that is larger: a
# loss near zero makes nothing large.

EARLY_PASSES = 5  # passes in which rounding has not grown much
_OF_MEAN = 0.5
FEWEST_LATER = 8  # passes in the later half: fewer give no mean
_LOOKED_AT = 10  # first passes that tell runs with other random numbers from rounding
_LIKE_SEEDS = 0.5  # of the noise from batch to batch: random numbers make that difference at once


class CurveDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Candidate minus baseline, as shares of the loss."""

    values: Floats
    largest: float
    gap: float  # mean of the later half
    scatter: float  # of the later half's values from pass to pass

    @property
    def has_later_half(self) -> bool:
        return len(self.values) >= 2 * FEWEST_LATER


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """What runs of the baseline do to each other, as shares of the loss."""

    reach: Floats  # the largest difference up to each pass
    gap: float  # the largest mean difference of the later half
    batch_noise: float  # deviation of the loss from batch to batch
    like_seeds: bool  # the runs differ as with other random numbers


def loss_size(baseline: Floats) -> Floats:
    """Per pass: the mean of the runs, which are rows, and at least half of the mean of all."""
    sizes = np.abs(baseline).mean(axis=0)
    least = max(_OF_MEAN * float(sizes.mean()), float(np.finfo(float).tiny))
    size: Floats = np.maximum(sizes, least)
    return size


def compare_curves(baseline: Floats, candidate: Floats) -> CurveDifference:
    """One run against the mean of the baseline's runs."""
    values = (candidate - baseline.mean(axis=0)) / loss_size(baseline)
    later = values[len(values) // 2 :]
    return CurveDifference(
        values=values,
        largest=float(np.abs(values).max()),
        gap=float(later.mean()),
        scatter=pass_noise(later),
    )


def control_of(baseline: Floats) -> Control:
    size = loss_size(baseline)
    noise = math.sqrt(float(np.mean([pass_noise(run) ** 2 for run in baseline])))
    noise /= float(size.mean())
    apart: list[Floats] = [(a - b) / size for a, b in combinations(baseline, 2)]
    reach = np.zeros(baseline.shape[1])
    for values in apart:
        reach = np.maximum(reach, np.maximum.accumulate(np.abs(values)))
    first = [float(np.sqrt((values[:_LOOKED_AT] ** 2).mean())) for values in apart]
    later = [abs(float(values[len(values) // 2 :].mean())) for values in apart]
    return Control(
        reach=reach,
        gap=max(later, default=0.0),
        batch_noise=noise,
        like_seeds=max(first, default=0.0) > _LIKE_SEEDS * noise > 0,
    )


def pass_noise(values: Floats) -> float:
    """The deviation from pass to pass, without a trend: from second differences."""
    if len(values) < 3:
        return 0.0
    return math.sqrt(float((np.diff(values, 2) ** 2).mean()) / 6)
