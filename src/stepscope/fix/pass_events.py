"""Backward passes and optimizer steps, as they begin and end."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class PassEvents:
    """Attaches to torch only where somebody listens."""

    def __init__(self, surrounds: Callable[[Any], Any]) -> None:
        self._surrounds = surrounds
        self._before: list[Callable[[Any], None]] = []
        self._after: list[Callable[[], None]] = []
        self._attached = False
        self._depth = 0

    def before(self, act: Callable[[Any], None]) -> None:
        self._attach()
        self._before.append(act)

    def after(self, act: Callable[[], None]) -> None:
        self._attach()
        self._after.append(act)

    def before_step(self, act: Callable[[Any], None]) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(lambda optimizer, _args, _kwargs: act(optimizer))

    def after_step(self, act: Callable[[Any], None]) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda optimizer, _args, _kwargs: act(optimizer))

    def _attach(self) -> None:
        if self._attached:
            return
        self._attached = True
        import torch.autograd.graph
        from torch._guards import TracingContext

        original = torch.autograd.graph._engine_run_backward

        @self._surrounds
        @functools.wraps(original)
        def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth or not kwargs.get("accumulate_grad") or TracingContext.try_get():
                return original(outputs, *args, **kwargs)
            self._depth += 1
            try:
                for begin in self._before:
                    begin(outputs)
                return original(outputs, *args, **kwargs)
            finally:
                self._depth -= 1
                for end in self._after:
                    end()

        torch.autograd._engine_run_backward = run_backward
        torch.autograd.graph._engine_run_backward = run_backward
