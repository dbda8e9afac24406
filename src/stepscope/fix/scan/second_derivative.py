"""The scans' own gradients have none."""

from __future__ import annotations

from typing import Any, NoReturn


class SecondDerivativeError(NotImplementedError):
    """The gradient of a scan's gradient was asked for."""


def refuse_second_derivative(*_: Any) -> NoReturn:
    raise SecondDerivativeError(
        "the gradient of a scan's gradient is not implemented. Use torch's own modules where "
        "a second derivative is needed (create_graph=True, gradient penalties)"
    )
