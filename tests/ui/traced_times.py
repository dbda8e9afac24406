"""How long a step's calls took in its trace, for made-up probers that agree with it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from stepscope.predict.step_operators import find_step_operators

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext


def call_key(request: dict[str, Any]) -> tuple[str, str]:
    return request["name"], json.dumps(request["shapes"])


def traced_times(context: StepContext) -> dict[tuple[str, str], tuple[float, float]]:
    """Forward and backward of each call, the mean of equal ones."""
    operators = find_step_operators(context)
    passes = [operators.pass_ns(backward=backward) for backward in (False, True)]
    places: dict[tuple[str, str], list[int]] = {}
    for place, call in enumerate(operators.calls):
        key = call_key({"name": call.name, "shapes": list(call.shapes)})
        places.setdefault(key, []).append(place)
    return {
        key: (float(passes[0][mine].mean()), float(passes[1][mine].mean()))
        for key, mine in places.items()
    }
