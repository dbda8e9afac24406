"""An ordinary training loop as a worker: its optimizer's step goes to the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stepscope.fix.server.optimizer_recipe import group_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.fix.server.worker import Worker


class ServedOptimizer(torch.optim.Optimizer):
    """`step` pushes the gradients, and pulls parameters for the next step.

    It has the parameter groups of the optimizer that it stands for: a schedule may be built on
    either, and the server uses the learning rate of the moment.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, worker: Worker) -> None:
        self.worker = worker
        super().__init__(optimizer.param_groups, optimizer.defaults)
        worker.pull()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Like any optimizer's; a loss that `closure` returns is kept in the run folder."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.worker.push(
            loss=None if loss is None else float(loss),
            settings=group_settings(self),
            keep_gradients=True,
        )
        self.worker.pull()
        return loss

    def close(self) -> None:
        """The training is over: the others no longer wait for this worker."""
        self.worker.close()
