"""What a change buys, in words: time that a step saves, or samples a second that it adds.

"saves" stands only where the whole interval lies on one side of zero.
"""

from __future__ import annotations

import msgspec

from stepscope.records.figures import factor, interval, milliseconds, signed

_SAME_SAMPLES = 1e-6
_WIDE = 3.0  # times its low end


class PredictedGain(msgspec.Struct, frozen=True, kw_only=True):
    """Of one change: what the samples of a present step take less, with its interval."""

    saved_ms: float
    low_ms: float
    high_ms: float
    step_ms: float  # the present step
    changed_ms: float | None = None  # the step with the change
    samples_factor: float = 1.0  # samples of a step with the change, over those without

    @property
    def is_sure(self) -> bool:
        """Whether the whole interval is on one side of zero."""
        return self.low_ms > 0 or self.high_ms < 0

    @property
    def is_known(self) -> bool:
        """An interval wider than the step says nothing."""
        return self.high_ms - self.low_ms < self.step_ms

    @property
    def changes_samples(self) -> bool:
        """Such a step does other work: only samples a second compare with the present one."""
        return abs(self.samples_factor - 1) > _SAME_SAMPLES

    def words(self) -> tuple[str, str]:
        """The gain, and the interval in brackets; the second is empty if the first holds it."""
        if not self.is_known:
            return "not known", f"({self._change()})"
        if self.changes_samples:
            return self._throughput()
        if not self.is_sure:
            return f"may change the step by {self._change()}", ""
        if self.saved_ms >= 0:
            return f"saves {milliseconds(self.saved_ms)}", f"({self._ends(1)})"
        return f"costs {milliseconds(-self.saved_ms)}", f"({self._ends(-1)})"

    def sentence(self, of: str = "") -> str:
        """With the step that it is a gain of; `of` says that step in other words."""
        gain, ends = self.words()
        if not self.is_known:
            return f"has an unknown effect {ends}"
        if self.changes_samples:
            return f"{gain}{f' {ends}' if ends else ''}{self._becomes()}"
        if not self.is_sure:
            return gain
        verb, _, amount = gain.partition(" ")
        if self._is_wide():
            amount = ends.strip("()")
        return f"{verb} {amount.removesuffix(' ms')} of {of or milliseconds(self.step_ms)}"

    def _is_wide(self) -> bool:
        """The middle of such an interval would promise too much."""
        least, most = sorted((abs(self.low_ms), abs(self.high_ms)))
        return most > _WIDE * least

    def _throughput(self) -> tuple[str, str]:
        middle, low, high = (
            self.step_ms / max(1e-9, self.step_ms - saved)
            for saved in (self.saved_ms, self.low_ms, self.high_ms)
        )
        if not self.is_sure:
            return f"{factor(low)} to {factor(high)} times the samples/s", ""
        return f"{factor(middle)} times the samples/s", f"({factor(low)} to {factor(high)})"

    def _becomes(self) -> str:
        if self.changed_ms is None:
            return ""
        now, then = milliseconds(self.step_ms), milliseconds(self.changed_ms)
        return ", in steps as long" if now == then else f", in steps of {then} instead of {now}"

    def _change(self) -> str:
        """Of the step: what is saved is taken off."""
        return f"{signed(-self.high_ms)} to {signed(-self.low_ms)} ms"

    def _ends(self, sign: int) -> str:
        low, high = sorted((sign * self.low_ms, sign * self.high_ms))
        return interval(low, high)
