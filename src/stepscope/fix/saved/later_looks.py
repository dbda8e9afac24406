"""When an accepted plan is looked at again.

A plan is accepted after a dozen of its passes. A training goes on for hours, and its host may turn
slower: other processes, a larger heap, a reader of data that is late. So steps are looked at again
after 24, 48, 96, ... passes of the plan. A look costs nothing: it reads the marks that every pass
leaves on the device's clock, of passes that are over, and waits for none.

- Steps that are too slow once are looked at again twelve passes later, and count only if they
  surely are, the doubt taken away. A plan is accepted only if they fit with the doubt on top. So a
  plan near its limit is not given up and taken again by chance.
- Plain steps would tell what the plan adds now. But one needs the memory that the plan saves, which
  something else may have taken since, and no training may run out of memory for a measurement. So
  the plan is compared with the plain steps seen at first. If it is over its limit, a smaller one
  is tried; where its steps are no faster, something else became slower, and the larger plan is
  followed again, for good (plan_tries.py).
- A smaller plan needs more memory: it is taken only where that is free. With a target of bytes a
  plan stays, as the bytes were asked for: the steps' time is noted.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.fix.saved.time_limit import CHECKED_AFTER

FIRST_LOOK = 2 * CHECKED_AFTER  # passes


@dataclass(slots=True)
class LaterLooks:
    """At the passes of one accepted plan."""

    next_at: int = FIRST_LOOK
    suspects: bool = False  # the last look found steps that are too slow

    def is_due(self, passes: int) -> bool:
        return passes >= self.next_at

    def seen(self, passes: int, *, too_slow: bool) -> bool:
        """Whether the plan has to go; else says when to look again."""
        if too_slow and self.suspects:
            return True
        self.suspects = too_slow
        self.next_at = passes + CHECKED_AFTER if too_slow else 2 * passes
        return False
