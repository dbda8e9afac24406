"""Random numbers of Python and numpy: drawn in forward, they would be one model's for all."""

from __future__ import annotations

import random
import sys
from typing import Any

from stepscope.errors import UsageError


def host_random_state() -> tuple[Any, bytes, int]:
    """Changes with every number drawn."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), b"", 0
    state = numpy.random.get_state(legacy=False)["state"]
    return random.getstate(), state["key"].tobytes(), state["pos"]


def check_nothing_drawn(before: tuple[Any, bytes, int]) -> None:
    after = host_random_state()
    if after != before:
        name = "random" if after[0] != before[0] else "numpy.random"
        raise UsageError(
            f"the models' code draws from Python's {name}, which happens once for all models. "
            "Draw with torch (torch.rand(()).item()), so that each model draws for itself, "
            "or draw outside of the fused models"
        )
