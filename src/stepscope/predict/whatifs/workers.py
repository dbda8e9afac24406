"""workers=N: so many replicas of the model, gradients summed by DDP; workers=N:strong divides the
batch among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.predict import scale_out
from stepscope.predict.outcome import WrongValue

if TYPE_CHECKING:
    from stepscope.predict.outcome import Outcome
    from stepscope.predict.step_context import StepContext

HELP = "N data-parallel workers, each with its own batch (workers=8; 8:strong divides one batch)"
_MOST = 1 << 20


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses where nobody knows what an all-reduce costs, or the gradients' sizes."""
    number, _, how = value.partition(":")
    try:
        count = int(number)
    except ValueError:
        count = 0
    if not 1 <= count <= _MOST or how not in ("", "strong", "weak"):
        raise WrongValue(f"workers={value}: give their number, such as 8, or 8:strong")
    return scale_out.replan(context, ranks=count, strong=how == "strong")
