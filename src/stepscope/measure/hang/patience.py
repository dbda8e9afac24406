"""How long a run may go without a step, by the steps it has made so far."""

from __future__ import annotations

from collections import deque

_KEPT = 256  # looks
# A step may take so many usual ones, or the usual one and so many leasts; the usual one is that of
# the 99th percentile, but no more than so many medians.
_TIMES, _LEASTS, _MEDIANS = 20, 10, 5
_LONGEST = 2  # times the longest so far
LONG = 20  # leasts: the first steps, evaluation, checkpoints, compilation
FEWEST_STEPS = 3  # that have ended; the first ones are long


class Patience:
    """Told how many steps ended between two looks. `least_s`: never less than this."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._walls: deque[float] = deque(maxlen=_KEPT)
        self._longest_s = 0.0
        self.steps = 0

    def took(self, steps: int, seconds: float) -> None:
        first, self.steps = self.steps < FEWEST_STEPS, self.steps + steps
        if first:
            return
        self._walls.append(seconds / steps)
        # After one very long wait others of its length are not all expected.
        longest = min(seconds, LONG * self._least_s) if steps == 1 else seconds / steps
        self._longest_s = max(self._longest_s, longest)

    @property
    def usual_s(self) -> float:
        walls = sorted(self._walls)
        if not walls:
            return 0.0
        high = walls[min(len(walls) - 1, round(0.99 * len(walls)))]
        return min(high, _MEDIANS * walls[len(walls) // 2])

    def limit_s(self, *, is_long: bool) -> float:
        """`is_long`: what runs now is known to take longer than steps."""
        usual = self.usual_s
        step_s = min(_TIMES * usual, usual + _LEASTS * self._least_s)
        limit = max(self._least_s, step_s, _LONGEST * self._longest_s)
        is_long = is_long or self.steps < FEWEST_STEPS
        return max(limit, LONG * self._least_s) if is_long else limit
