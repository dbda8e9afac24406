"""gpu=NAME|FILE: the same step on another GPU, its host unchanged."""

from __future__ import annotations

from stepscope.errors import UsageError
from stepscope.predict.declaration import Outcome, WrongValue
from stepscope.predict.other_gpu.gpu import find_gpu, other_boards
from stepscope.predict.other_gpu.step import describe_memory, move_context
from stepscope.predict.step_context import StepContext


def predict(context: StepContext, value: str) -> Outcome:
    """Refuses a step without an accelerator, or one on a GPU that is not in the table."""
    if not value:
        raise WrongValue("gpu: give a GPU or a file, such as gpu=H100 or gpu=profile.json")
    try:
        target = find_gpu(value)
    except UsageError as error:
        raise WrongValue(f"gpu={value}: {error}") from None
    moved = move_context(context, target)
    boards = other_boards(value)
    read_as = f"{value} is read as {target.name}. {', '.join(boards)} differ"
    return Outcome(
        context=moved.context,
        assumptions=(
            *((read_as,) if boards else ()),
            *moved.assumptions,
            *describe_memory(context, target),
        ),
        spread=0.0,
        doubt=moved.doubt,
        doubt_is_whole=True,
    )
