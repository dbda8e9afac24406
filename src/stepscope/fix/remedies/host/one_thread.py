"""One thread per operator: short operators wait longer for each other than they compute."""

from __future__ import annotations

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.remedies.host import threads

FIX = Fix(
    id="one-thread",
    effect=Effect.ROUNDING,
    family="threads",
    fits=lambda facts, _: threads.fits(facts, "1"),
    apply=lambda training, _: threads.apply(training, "1"),
    environment=lambda _, variables: threads.environment("1", variables),
    patch=lambda script, _: threads.patch(script, "1"),
)
