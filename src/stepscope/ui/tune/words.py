"""A tune in sentences: progress while it runs, and its verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.records.figures import (
    factor,
    interval,
    long_duration,
    longer_or_shorter,
    milliseconds,
    percent,
    relative_interval,
    significant,
    trimmed,
    unsigned_percent,
)
from stepscope.verify.tuned_gain import WORTH

if TYPE_CHECKING:
    from stepscope.records.tuning import TuneResult
    from stepscope.ui.tune.search import Search
    from stepscope.ui.tune.trial_bench import TrialBench
    from stepscope.verify.tuned_gain import Gain

AS_IT_IS = "the unchanged command"
STOPPED = "stopped before any change was kept"
NOT_YET = "the budget was spent before any change was clearly faster"
NOTHING = f"none of the tried changes gains {trimmed(percent(WORTH))} or more"

_NOTHING_TRIED = {
    "finished": "no change fits this training, so nothing was tried",
    "out of time": "the budget leaves no time to try a change and to confirm it",
}


def configuration_words(remedies: tuple[str, ...]) -> str:
    return " + ".join(remedies) or AS_IT_IS


def gain_words(gain: Gain) -> str:
    """Return 'saves 12.3% (11.0% to 13.5%)', '4.2% slower (+3.1% to +5.3%)', or how the step may
    change where the interval does not say which."""
    if gain.high < 0:
        ends = relative_interval(-gain.high, -gain.low)
        return f"{_slower(gain)} ({ends})"
    if gain.low < 0:
        ends = f"{_slower_or_shorter(gain.low)} to {_slower_or_shorter(gain.high)}"
        return f"may make the step {ends}"
    ends = f"{unsigned_percent(gain.low)} to {unsigned_percent(gain.high)}"
    return f"saves {unsigned_percent(gain.value)} ({ends})"


def _slower(gain: Gain) -> str:
    return longer_or_shorter(-gain.value, longer="slower")


def _slower_or_shorter(share: float) -> str:
    """Return what a saved share does to the step."""
    if share < -1:
        return "over 100% slower"
    return f"{unsigned_percent(share)} {'slower' if share < 0 else 'shorter'}"


def progress_words(
    number: int, remedies: tuple[str, ...], search: Search, bench: TrialBench
) -> str:
    """What is being tried, how far it is, the best so far and the time left."""
    best = (
        f"best so far: {configuration_words(search.kept)}" if search.kept else "no change kept yet"
    )
    left = long_duration(bench.left_s * 1e9)
    tried = configuration_words(remedies)
    doing = f" ({search.doing})" if search.doing != tried else ""
    return f"trial {number}: {tried}{doing}; {best}; {left} of the budget left"


def verdict_words(result: TuneResult) -> str:
    if result.baseline_ms is None:
        what = "stopped" if result.status == "interrupted" else "the budget ended"
        return f"{what} before anything was measured"
    if not result.kept or result.best_ms is None or result.speedup is None:
        return _nothing_kept(result)
    names = configuration_words(result.kept)
    steps = f"{significant(result.baseline_ms)} -> {milliseconds(result.best_ms)}"
    if result.best_low_ms is not None and result.best_high_ms is not None:
        steps += f" ({interval(result.best_low_ms, result.best_high_ms)})"
    if result.speedup >= 1.5:
        return f"{names}: a step is {factor(result.speedup)} times faster, {steps}"
    return f"{names}: a step is {percent(1 - 1 / result.speedup)} shorter, {steps}"


def _nothing_kept(result: TuneResult) -> str:
    """That nothing helps is said only where everything was tried and decided."""
    if result.status == "interrupted":
        return STOPPED
    if not result.trials:
        return _NOTHING_TRIED.get(result.status, NOTHING)
    if result.starts_differ is not None:
        spread = percent(result.starts_differ)
        return f"none is clearly faster: starts of the same command differ by {spread}"
    return NOT_YET if result.status == "out of time" else NOTHING
