"""Whether a remedy still trains the same: the losses of its trials against those of the baseline.

The losses of every backward pass are compared rank by rank, in order. Runs of the baseline against
each other are the control: what they do by themselves, a remedy may do too.

bit-identical  all losses are equal to the bit.
rounding       (1) The first loss, made from the same weights and data, differs by no more than the
               precision explains (FIRST). (2) In the first steps the difference may grow with the
               square root of the steps. (3) In the later half the mean of the differences is small
               (GAP), or small beside their scatter from step to step: rounding that training has
               made large has no direction, a wrong gradient has. And it is never more than
               SEEDS times what other batches would do to the mean.
random         More than that, but the mean loss differs by no more than SEEDS times what other
               batches or other random numbers would do.
failed         More than the remedy declared; losses that are missing; NaN or infinity where the
               baseline has none.

If the baseline's own runs differ like this, only the weaker tests are possible, and `control` says
so. docs/tune-statistics.md says what such a test cannot see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.verify.trial_file import Loss

    RunLosses = dict[int, tuple[Loss, ...]]  # by rank

Observed = Literal["bit-identical", "rounding", "random", "training", "not known"]
Level = Literal["bit-identical", "rounding", "random", "training"]
Precision = Literal["fp32", "tf32", "16 bits"]


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a remedy. Shares are of the loss."""

    parity: str  # what was observed; "failed" if it is more than was declared, or losses are wrong
    observed: Observed  # the same without regard to what was declared
    control: Observed  # what the baseline's runs do to each other
    why: str
    first_difference: int | None = None  # the step from which losses differ
    largest: float | None = None  # difference of two losses
    gap: float | None = None  # mean difference in the later half; positive: the loss is higher

    @property
    def passed(self) -> bool:
        """ "not known" has not passed and has not failed."""
        return self.parity not in ("failed", "not known")


def check_parity(
    baseline: Sequence[RunLosses],
    candidate: Sequence[RunLosses],
    *,
    declared: Level,
    precision: Precision = "fp32",
) -> Parity:
    """Compare runs of the candidate with runs of the baseline, two of them at least.

    `declared` is the largest effect that the applied remedies declare, `precision` the coarsest
    that they or the script compute in (`coarsest_precision`).
    """
    raise NotImplementedError
