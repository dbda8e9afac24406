"""What findings about the whole run share: how often steps stall, what that costs, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stepscope.explain.findings.evidence import LOW, MEDIUM
from stepscope.records.figures import duration, milliseconds, percent
from stepscope.records.whole_run import WITHOUT_GRADIENTS
from stepscope.records.words import counted, ordinal

if TYPE_CHECKING:
    from stepscope.records.explanation import Place, Severity
    from stepscope.records.whole_run import AccountPart, RankRun, Stall, StallCause

_FEW = 3  # stalls: a frequency would promise too much
_MOST_NUMBERS = 4
_LEAST_WANTED, _MUCH_WANTED = 0.05, 0.25  # of the training loop
_HOUR_MS = 3.6e6
_ONCE = "it happened once: only a longer run shows whether it happens again"
# Of the account.
_LOOP = ("training", *WITHOUT_GRADIENTS, "checkpoint", "between_epochs", "outside")


def costly_stall(run: RankRun, *causes: StallCause) -> Stall | None:
    """The costliest stall with one of these causes, if it takes 3% of the mean step or more."""
    stalls = [stall for stall in run.stalls if stall.cause in causes and stall.share >= LOW]
    return max(stalls, key=lambda stall: stall.share, default=None)


def stalling_steps(stall: Stall, run: RankRun, one: str, many: str) -> str:
    """Return subject and verb: `Every 4th step waits`, `1 step in 12 waits`, `3 steps of 80 wait`.
    `one` and `many` are the verb's forms."""
    if stall.period == 1:
        return f"Every step {one}"
    if stall.period:
        return f"Every {ordinal(stall.period)} step {one}"
    all_steps = run.times.steps if run.times else run.steps
    if stall.steps <= _FEW:
        return (
            f"{counted(stall.steps, 'step')} of {all_steps:,} {one if stall.steps == 1 else many}"
        )
    share = stall.steps / max(1, all_steps)
    if share > 0.4:
        return f"{percent(share)} of all steps {many}"
    return f"1 step in {round(1 / share):,} {one}"


def typical_wait(stall: Stall) -> str:
    """What one of these stalls adds to its step."""
    return duration(1e6 * stall.typical_ms)


def where_words(stall: Stall) -> str:
    """The line that ran in most of these stalls: `, in log_images (train.py:40)`."""
    if not stall.where:
        return ""
    return f", in {stall.where[0].words}"


def cost_lines(stall: Stall, run: RankRun) -> tuple[str, ...]:
    """What it costs on average, and its longest cases."""
    if run.times is None:
        return ()
    numbers = ", ".join(f"{number:,}" for number in stall.numbers[:_MOST_NUMBERS])
    longest = f"the longest {duration(1e6 * stall.longest_ms)}"
    return (
        f"{milliseconds(stall.cost_ms)} of the {milliseconds(run.times.mean_ms)} mean step; a "
        f"typical step takes {milliseconds(run.times.typical_ms)}",
        f"{counted(stall.steps, 'step')} of {run.times.steps:,}, {longest}"
        + (f" (steps {numbers})" if len(stall.numbers) > 1 else ""),
        *([_ONCE] if _came_once(stall) else []),
    )


def stall_severity(stall: Stall) -> Severity | None:
    """None: as severe as its share. What came once may never come again, so its share of a short
    run says little about a long one."""
    return "low" if _came_once(stall) else None


def _came_once(stall: Stall) -> bool:
    return stall.steps == 1 and stall.period is None and not stall.between_epochs_ms


def account_part(run: RankRun, name: str) -> AccountPart | None:
    """A part of the wall time; None where the wall time is not known."""
    parts = run.account.parts if run.account else ()
    return next((part for part in parts if part.id == name), None)


class ShortRun(NamedTuple):
    """What something that passes once would be of a run with an hour of training."""

    share: float
    words: str


def as_short_run(run: RankRun, once_ms: float) -> ShortRun | None:
    """For a run that trained for less time than something took that passes once, such as start-up.
    None for any other run, which is judged as it is."""
    parts = run.account.parts if run.account else ()
    loop_ms = sum(part.ms for part in parts if part.id in _LOOP)
    if not parts or loop_ms >= once_ms:
        return None
    share = once_ms / (once_ms + _HOUR_MS)
    words = f"this run trained for {duration(1e6 * loop_ms)} only; with an hour of training it"
    return ShortRun(share, f"{words} would be {percent(share)} of the run")


class BesideSteps(NamedTuple):
    """Work that is wanted but is no training: evaluation, or saving checkpoints."""

    share: float  # of the training loop: the wall time without start-up, warm-up and shut-down
    how_often: str
    evidence: tuple[str, ...]
    where: tuple[Place, ...]


def beside_steps(run: RankRun, name: StallCause) -> BesideSteps:
    """From the account; without one, from what the steps and the time between epochs show."""
    stall = next((stall for stall in run.stalls if stall.cause == name), None)
    part = account_part(run, name)
    if part is not None and run.account is not None:
        took = part.ms
        whole = sum(part.ms for part in run.account.parts if part.id in _LOOP)
        lines = [f"{duration(1e6 * took)} of the {duration(1e6 * whole)} of the training loop"]
    else:
        took, whole = _per_step(run, stall)
        lines = [f"{milliseconds(took)} for each step of {milliseconds(whole)}"]
    if stall is not None and stall.steps:
        lines.append(f"in {counted(stall.steps, 'step')}, {typical_wait(stall)} each")
    if stall is not None and stall.between_epochs_ms:
        lines.append(f"between epochs: {milliseconds(stall.between_epochs_ms)} for each step")
    every = (
        f": {typical_wait(stall)} every {stall.period:,} steps" if stall and stall.period else ""
    )
    return BesideSteps(
        share=took / whole if whole else 0.0,
        how_often=every,
        evidence=tuple(lines),
        where=stall.where if stall else (),
    )


def _per_step(run: RankRun, stall: Stall | None) -> tuple[float, float]:
    """Milliseconds for each step, of the mean step with the time between epochs."""
    between = sum(stall.between_epochs_ms for stall in run.stalls)
    whole = run.times.mean_ms + between if run.times else 0.0
    return (stall.cost_ms + stall.between_epochs_ms if stall else 0.0), whole


def wanted_work_severity(share: float) -> Severity | None:
    """None under 5% of the training loop: evaluation and checkpoints are wanted."""
    if share < _LEAST_WANTED:
        return None
    return "high" if share >= _MUCH_WANTED else "medium" if share >= MEDIUM else "low"
